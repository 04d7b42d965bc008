"""Hints for messages about a name that does not exist: the name that was perhaps meant, and the names that exist.

Names are flat keys; globs of them are compared word by word, between the dots. Imports no torch.
"""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Collection, Iterable

from torchtitan_ext.errors.failures import WrongValueError
from torchtitan_ext.errors.problems import named

_WILDCARDS = re.compile(r"[*?\[]")

# A guess in a message may be wide. A name that is refused because it resembles another one must resemble it closely.
_WIDE = 0.6
CLOSE = 0.8
"""A word of at least this similarity to another one, of 1, counts as misspelt."""


def nearest_name(name: str, names: Iterable[str], *, likeness: float = _WIDE) -> str | None:
    """The most similar of some names; ``None`` if none has at least this likeness, as ``difflib`` counts it, of 1."""
    return next(iter(difflib.get_close_matches(name, names, n=1, cutoff=likeness)), None)


def nearest_glob(glob: str, names: Iterable[str], *, likeness: float = _WIDE) -> str | None:
    """A glob of flat keys, or a component, with its misspelt words replaced; ``None`` if no word is misspelt.

    Numbers and words whose wildcards match one count as correct.

    Example:
        >>> nearest_glob("optimiser.state.*.exp_avgs", ["optimizer.state.w.exp_avg"])
        'optimizer.state.*.exp_avg'
    """
    words = {part for name in names for part in name.split(".")}
    meant = ".".join(_nearest_word(part, words, likeness) for part in glob.split("."))
    return None if meant == glob else meant


def names_hint(glob: str, names: Collection[str], components: Iterable[str] | None = None) -> str:
    """The end of a sentence about a glob that matches none of these names. It lists the components.

    Example:
        >>> names_hint("modle", ["model.w", "optimizer.step"])
        "perhaps 'model' is meant; there are model, optimizer"
    """
    if not names:
        return "there are none"
    components = (name.split(".")[0] for name in names) if components is None else components
    meant = nearest_glob(glob, {*names, *(components := list(dict.fromkeys(components)))})
    there = f"there are {named(components)}"
    return there if meant is None else f"perhaps {meant!r} is meant; {there}"


def refuse_unmatched(argument: str, globs: Iterable[str], names: Collection[str], *, where: object) -> None:
    """Raises WrongValueError for the first glob, as ``fnmatch`` reads it, that matches none of these names.

    The error names ``argument`` and the nearest names of ``where``. Without names nothing is refused.
    """
    for glob in globs:
        if names and not fnmatch.filter(names, glob):
            hint = names_hint(glob, names)
            raise WrongValueError(f"got {glob!r}, which matches no key of {where}; {hint}", argument)


def _nearest_word(part: str, words: Collection[str], likeness: float) -> str:
    stem = part.strip("*")
    if part in words or stem.isdecimal() or not stem or _WILDCARDS.search(stem):
        return part
    if stem != part and fnmatch.filter(words, part):
        return part
    near = nearest_name(stem, words, likeness=likeness)
    return part if near is None else part.replace(stem, near)
