"""The directories of a run's steps, by the pattern of their names, and which hold a finished checkpoint.

``step-<number>``, torchtitan's name, comes first. The names of other trainers are recognized if all steps of a run have
the same kind. Any other pattern is a text: ``"ckpt-{step}"``, ``"iter_{step:07d}"`` with leading zeros,
``"epoch=*-step={step}"`` with any text in the place of the star.

A fallback directory takes what storage refuses of several runs. Each has a folder of its own there.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from torchtitan_ext.errors import WrongValueError
from torchtitan_ext.storage.checkpoint_files import index_path, metadata_path
from torchtitan_ext.storage.location import is_local

_NUMBER = re.compile(r"\{step(?::0(\d+)d?)?\}")


class StepPattern:
    """How a run names the directories of its steps.

    Raises:
        WrongValueError: The text is no name with one ``{step}``.
    """

    def __init__(self, text: str) -> None:
        match = _NUMBER.search(text)
        others = [] if match is None else [text[: match.start()], text[match.end() :]]
        if match is None or any("{" in other or "}" in other or "/" in other for other in others):
            raise WrongValueError(f"got the step pattern {text!r}, expected a name such as 'checkpoint-{{step}}'")
        self.text = text
        before, after = (".*".join(map(re.escape, other.split("*"))) for other in others)
        self._regex = re.compile(rf"{before}(\d+){after}", re.ASCII | re.DOTALL)

    def number_of(self, name: str) -> int | None:
        """The step in a directory's name; ``None`` if the name is another one, or has other leading zeros."""
        match = self._regex.fullmatch(name)
        number = None if match is None else int(match[1])
        if number is not None and "*" not in self.text and self.text.format(step=number) != name:
            return None
        return number


STEP = StepPattern("step-{step}")

# Names of Hugging Face's Trainer, DeepSpeed, verl, Megatron-LM, Lightning and others. A name matches at most one.
_COMMON = (
    STEP,
    *map(
        StepPattern,
        (
            "step_{step}",
            "checkpoint-{step}",
            "checkpoint_{step}",
            "global_step_{step}",
            "global_step{step}",
            "iter_{step:07d}",
            "epoch={step}",
            "epoch={step}.ckpt",
            "epoch=*-step={step}",
            "epoch=*-step={step}.ckpt",
        ),
    ),
)


def patterns_in(run: Path) -> list[StepPattern]:
    """The known patterns that directories of a run match; only ``step-{step}`` if a directory matches that."""
    names = os.listdir(run) if run.is_dir() else []
    return _patterns_among(names, lambda name: (run / name).is_dir())


def _patterns_among(names: Sequence[str], is_directory: Callable[[str], bool]) -> list[StepPattern]:
    found = [
        pattern
        for pattern in _COMMON
        if any(pattern.number_of(name) is not None and is_directory(name) for name in names)
    ]
    return [STEP] if STEP in found else found


def step_paths(run: Path, pattern: str | None = None) -> dict[int, Path]:
    """The directories of a run's steps.

    Args:
        pattern: How the run names its steps; by default the one known pattern that directories match.
    """
    names = sorted(os.listdir(run)) if run.is_dir() else []
    return {
        number: run / name for number, name in steps_among(names, pattern, lambda name: (run / name).is_dir()).items()
    }


def steps_among(
    names: Sequence[str], pattern: str | None, is_directory: Callable[[str], bool] = lambda name: True
) -> dict[int, str]:
    """As ``step_paths``, from the names of what is in a run, of which only some may be directories."""
    if pattern is None:
        known = _patterns_among(names, is_directory)
        chosen = known[0] if len(known) == 1 else STEP
    else:
        chosen = StepPattern(pattern)
    numbers = [(chosen.number_of(name), name) for name in names]
    return {number: name for number, name in numbers if number is not None and is_directory(name)}


def find_steps(run: Path) -> dict[int, bool]:
    """The steps of a run, and whether their saves have finished."""
    return {number: has_finished(path) for number, path in step_paths(run).items()}


def step_of(path: str | os.PathLike[str], pattern: str | None = None) -> int | None:
    """The step in a directory's name; ``None`` for other names."""
    name = Path(os.path.abspath(path)).name
    chosen = pattern_of(path) if pattern is None else StepPattern(pattern)
    return None if chosen is None else chosen.number_of(name)


def pattern_of(path: str | os.PathLike[str]) -> StepPattern | None:
    """The known pattern that a directory's name matches."""
    name = Path(os.path.abspath(path)).name
    return next((pattern for pattern in _COMMON if pattern.number_of(name) is not None), None)


def folders_in_fallback(run: str | os.PathLike[str], fallback: str | os.PathLike[str]) -> list[str]:
    """The folders of a run in a fallback directory: its name, and a digest of its absolute path or URL.

    A save takes the first one, by the path without links. A save that was made while the disk of a link was lost has
    the second one.
    """
    is_url = not is_local(run)
    paths = [os.fspath(run).rstrip("/")] if is_url else [os.path.realpath(run), os.path.abspath(run)]
    names = [f"{Path(path).name[:40]}-{hashlib.sha256(os.fsencode(path)).hexdigest()[:12]}" for path in paths]
    return [os.path.join(fallback, name) for name in dict.fromkeys(names)]


def is_absent(run: Path) -> bool:
    """Whether there is nothing at the path of a run, as where its disk is not mounted."""
    return not run.is_dir() or not os.listdir(run)


def own_pattern(path: str | os.PathLike[str], pattern: str | None) -> str | None:
    """The given pattern, or the known one that a directory's name matches."""
    known = pattern_of(path) if pattern is None else None
    return pattern if known is None else known.text


def has_finished(path: Path) -> bool:
    """Whether there is a ``.metadata``, or an index that may replace it."""
    return metadata_path(path, None).is_file() or index_path(path, None).is_file()
