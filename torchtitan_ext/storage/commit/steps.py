"""The directories of a run's steps, by the pattern of their names, and which hold a finished checkpoint.

``step-<number>``, as torchtitan names them, comes first. Names that other trainers give are known where a run has those
of one kind only; any other pattern is given as text: ``"ckpt-{step}"``, ``"iter_{step:07d}"`` with leading zeros,
``"epoch=*-step={step}"`` with a part that may be anything.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from torchtitan_ext.errors import WrongValueError
from torchtitan_ext.storage.checkpoint_files import index_path, metadata_path

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
        self._is_one_name = "*" not in text
        before, after = (".*".join(map(re.escape, other.split("*"))) for other in others)
        self._regex = re.compile(rf"{before}(\d+){after}", re.ASCII | re.DOTALL)

    def number_of(self, name: str) -> int | None:
        """The step that a directory is of; ``None`` for another name, one with other leading zeros among them."""
        match = self._regex.fullmatch(name)
        number = None if match is None else int(match[1])
        return None if number is not None and self._is_one_name and self.name_of(number) != name else number

    def name_of(self, number: int) -> str | None:
        """What the directory of a step is called; ``None`` where the pattern leaves that open."""
        return self.text.format(step=number) if self._is_one_name else None


STEP = StepPattern("step-{step}")

# Of Hugging Face's Trainer, DeepSpeed, verl, Megatron-LM and Lightning, and of people. A name matches one.
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
    """The known patterns by which directories of a run are named; ``step-{step}`` alone where there is such a one."""
    names = os.listdir(run) if run.is_dir() else []
    found = [
        pattern
        for pattern in _COMMON
        if any(pattern.number_of(name) is not None and (run / name).is_dir() for name in names)
    ]
    return [STEP] if STEP in found else found


def step_paths(run: Path, pattern: str | None = None) -> dict[int, Path]:
    """The directories of a run's steps.

    Args:
        pattern: Of their names; by default the known one by which some are named, none where there are several.
    """
    if pattern is None:
        known = patterns_in(run)
        chosen = known[0] if len(known) == 1 else STEP
    else:
        chosen = StepPattern(pattern)
    names = sorted(os.listdir(run)) if run.is_dir() else []
    numbers = [(chosen.number_of(name), run / name) for name in names]
    return {number: path for number, path in numbers if number is not None and path.is_dir()}


def find_steps(run: Path, pattern: str | None = None) -> dict[int, bool]:
    """The steps that a run has directories of, and whether their saves have finished."""
    return {number: has_finished(path) for number, path in step_paths(run, pattern).items()}


def last_finished(steps: Mapping[int, bool]) -> int | None:
    """The highest of some steps whose saves have finished."""
    return max((number for number, is_finished in steps.items() if is_finished), default=None)


def step_path(run: Path, number: int, pattern: str | None = None) -> Path:
    """The directory of a step, which need not be there.

    Raises:
        WrongValueError: It is not, and the pattern leaves its name open.
    """
    found = step_paths(run, pattern).get(number)
    if found is not None:
        return found
    name = (STEP if pattern is None else StepPattern(pattern)).name_of(number)
    if name is None:
        raise WrongValueError(f"{run} has no step {number}, and {pattern!r} does not say how it would be called")
    return run / name


def step_of(path: str | os.PathLike[str], pattern: str | None = None) -> int | None:
    """The step that a directory is of, by its name; ``None`` where it has another name."""
    name = Path(os.path.abspath(path)).name
    chosen = pattern_of(path) if pattern is None else StepPattern(pattern)
    return None if chosen is None else chosen.number_of(name)


def pattern_of(path: str | os.PathLike[str]) -> StepPattern | None:
    """The known pattern by which a directory is named."""
    name = Path(os.path.abspath(path)).name
    return next((pattern for pattern in _COMMON if pattern.number_of(name) is not None), None)


def has_finished(path: Path) -> bool:
    """Whether there is metadata, or an index that stands for it."""
    return metadata_path(path, None).is_file() or index_path(path, None).is_file()
