"""The directories ``step-<number>`` of a run, as torchtitan names them, and which hold a finished checkpoint."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from torchtitan_ext.storage.checkpoint_files import index_path, metadata_path

_STEP = re.compile(r"step-(\d+)")


def find_steps(run: Path) -> dict[int, bool]:
    """The steps that a run has directories of, and whether their saves have finished."""
    names = os.listdir(run) if run.is_dir() else []
    numbers = {int(match[1]) for name in names if (match := _STEP.fullmatch(name))}
    # There may be step-007 alone, a name that no save gives.
    return {number: _has_finished(path) for number in numbers if (path := step_path(run, number)).is_dir()}


def last_finished(steps: Mapping[int, bool]) -> int | None:
    """The highest of some steps whose saves have finished."""
    return max((number for number, is_finished in steps.items() if is_finished), default=None)


def step_path(run: Path, number: int) -> Path:
    return run / f"step-{number}"


def step_of(path: str | os.PathLike[str]) -> int | None:
    """The step that a directory is of, by its name; ``None`` where it has another name."""
    match = _STEP.fullmatch(Path(os.path.abspath(path)).name)
    return None if match is None else int(match[1])


def _has_finished(path: Path) -> bool:
    """Whether there is metadata, or an index that stands for it."""
    return metadata_path(path, None).is_file() or index_path(path, None).is_file()
