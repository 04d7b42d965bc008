"""Writes the weighted mean, or the weighted sum, of several checkpoints, in bounded memory.

The last source is copied as ``convert`` copies it, through a reader that adds up the elements of all sources. Example
of two sources with weights 1 and 3, normalised to 0.25 and 0.75:

    bfloat16 element    2.0 and 4.0    0.25 * 2.0 + 0.75 * 4.0 = 3.5 in float32, then rounded once, to bfloat16
    integer             7 and 7        7: equal everywhere; 7 and 8 are refused, or 8 is taken (others="last")
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from torchtitan_ext import _core
from torchtitan_ext.errors import Problem, ProblemKind, WrongValueError, check_choice, named, refusal
from torchtitan_ext.offline.boxes import BoxReader, Memory, Piece, whole
from torchtitan_ext.offline.rewrite.convert import NewFormat, refuse_target, write_keys
from torchtitan_ext.offline.selection import SelectedKeys, Selection
from torchtitan_ext.offline.sources import FileSource, compare_values
from torchtitan_ext.storage.element_types import is_floating_point
from torchtitan_ext.storage.formats.detect import format_of
from torchtitan_ext.storage.progress import OnBytes

Accumulate = Literal["float32", "float64"]
Kind = Literal["mean", "sum"]
Others = Literal["equal", "last"]

# A part of bfloat16 beside its sums takes so many times the memory of the part.
_ROOM_FOR_SUMS: dict[Accumulate, int] = {"float32": 3, "float64": 5}


@dataclass(frozen=True)
class MergeReport:
    """What ``merge`` wrote.

    Attributes:
        num_bytes: Size of all tensors in bytes.
        dropped: Keys of values that the format cannot hold.
        sources: The paths of the checkpoints.
        weights: By which their elements were multiplied.
    """

    num_keys: int
    num_bytes: int
    num_files: int
    dropped: tuple[str, ...]
    sources: tuple[str, ...]
    weights: tuple[float, ...]


def merge(
    sources: Sequence[FileSource],
    target: str | os.PathLike[str],
    *,
    to: NewFormat | None = None,
    weights: Sequence[float] | None = None,
    kind: Kind = "mean",
    accumulate: Accumulate = "float32",
    others: Others = "equal",
    selection: Selection | None = None,
    max_file_bytes: int = 5 * 10**9,
    overwrite: bool = False,
    max_bytes: int = 1 << 30,
    num_processes: int | None = None,
    progress: OnBytes = lambda _: None,
) -> MergeReport:
    """Writes the weighted mean of checkpoints of any formats and layouts.

    The target becomes whole, or stays what it was.

    Args:
        to: As for ``convert``; by default the format of the last source.
        weights: One for each source, any finite numbers; by default equal ones.
        kind: Of a mean the weights are divided by their sum; of a sum they are taken as they are.
        accumulate: The dtype of the sums, which are rounded once, to the dtype of the sources. Those of elements of 64
            bits are in float64 in any case. Sources are added in their order.
        others: What becomes of integers, bools and values that are no tensors: ``"equal"`` refuses those that are not
            equal in all sources, ``"last"`` takes those of the last source, without a look at the others.
        selection: The keys. The prefix is ignored in a source that has no key below it.
        max_file_bytes, overwrite, max_bytes, num_processes: As for ``convert``.
        progress: Called with the bytes of tensors that were written.

    Raises:
        WrongValueError: Weights do not fit; nothing is selected; a sum is too large for the dtype of its tensor.
        StateRefusedError: Keys differ in being there, in type, shape or dtype, or have a dtype of which no mean is
            taken, such as float8; ``others`` are not equal. All of them are named, and nothing was written.
        And what ``convert`` raises.
    """
    check_choice("merge", "kind", kind, Kind)
    factors = _checked_weights(weights, len(sources), kind)
    check_choice("merge", "accumulate", accumulate, Accumulate)
    check_choice("merge", "others", others, Others)
    to = format_of(sources[-1].path) if to is None else to
    refuse_target(Path(target), to, overwrite, "merge")
    chosen = selection or Selection()
    chosen.check_finds(*sources)
    each = []
    for source in sources:  # where one of them is in an object store, one process reads all of them
        keys = SelectedKeys(source, chosen.within(source))
        shares = keys.divide(max_bytes // _ROOM_FOR_SUMS[accumulate], num_processes)
        num_processes = shares.num_processes
        keys.reader.trim(len(sources))
        each.append(keys)
    problems = list(_problems(each, without_values=to == "safetensors"))
    if others == "equal":
        refused = {problem.fqn for problem in problems}
        problems += _differing(each, refused, shares.part_bytes, without_values=to == "safetensors")
    if problems:
        raise refusal("merge", problems)
    keys.reader = _SumReader(each, factors, accumulate)  # the last source's keys, with everybody's elements
    num_files, dropped = write_keys(keys, target, to, shares, progress, max_file_bytes, weights_only=True)
    paths = tuple(str(source.path) for source in sources)
    return MergeReport(len(keys.fqns) - len(dropped), keys.num_bytes, num_files, dropped, paths, factors)


class _SumReader(BoxReader):
    """Reads weighted sums of the elements of several sources under the names of the last one, which alone is read for
    dtypes without sums."""

    def __init__(self, each: Sequence[SelectedKeys], weights: Sequence[float], accumulate: Accumulate) -> None:
        super().__init__(each[-1].source)
        names = each[-1].fqns
        fqns = [{names[key]: fqn for key, fqn in keys.fqns.items() if key in names} for keys in each]
        self._summands = list(zip([keys.reader for keys in each], fqns, weights, strict=True))
        self._sums = _core.WeightedSums(accumulate == "float64")

    def read(self, pieces: Sequence[Piece], places: Sequence[Memory]) -> None:
        filled = list(zip(pieces, places, strict=True))
        copied = [(piece, place) for piece, place in filled if not _core.has_weighted_sum(piece.dtype)]
        super().read([piece for piece, _ in copied], [place for _, place in copied])
        summed = [(piece, place) for piece, place in filled if _core.has_weighted_sum(piece.dtype)]
        self._sums.begin([(place.ctypes.data, place.nbytes, piece.dtype) for piece, place in summed])
        for reader, fqns, weight in self._summands:
            reader.read([replace(one, fqn=fqns[one.fqn]) for one, _ in summed], [place for _, place in summed])
            reader.trim(len(self._summands))
            self._sums.add(weight)
        for position, number in self._sums.round():
            fqn, dtype = summed[position][0].fqn, summed[position][0].dtype
            what = f"{fqn} gets the number {number}, which {dtype} cannot hold; give smaller weights, or leave it out"
            raise WrongValueError(what, "weights")


def _checked_weights(weights: Sequence[float] | None, num_sources: int, kind: Kind) -> tuple[float, ...]:
    """The factors of the sources."""
    given = [1.0] * num_sources if weights is None else [float(weight) for weight in weights]
    if not given or len(given) != num_sources:
        raise WrongValueError(f"got {len(given)} weights and {num_sources} sources, expected one for each", "weights")
    total = sum(given) if kind == "mean" else 1.0
    if not all(map(math.isfinite, (*given, total))) or total == 0:
        what = f"got weights {named(given)}, expected finite numbers whose sum is not 0; a weighted sum may have any"
        raise WrongValueError(what, "weights")
    return tuple(weight / total for weight in given)


def _problems(each: Sequence[SelectedKeys], *, without_values: bool) -> Iterator[Problem]:
    """What keeps keys from being added up, as their metadata tells."""
    for key in dict.fromkeys(key for keys in each for key in keys.fqns):
        entries = [keys.tensors.get(key) for keys in each]
        if without_values and all(entry is None for entry in entries):
            continue
        lacking = [str(keys.source.path) for keys in each if key not in keys.fqns]
        if lacking:
            yield Problem("missing_key", key, f"is not in {named(lacking)}", "; leave it out with only= (--only)")
            continue
        kinds: tuple[tuple[ProblemKind, list[str]], ...] = (
            ("wrong_type", ["a value" if entry is None else "a tensor" for entry in entries]),
            ("wrong_dtype", [entry.dtype if entry else "" for entry in entries]),
            ("wrong_shape", [str(list(entry.shape)) if entry else "" for entry in entries]),
        )
        for kind, found in kinds:
            other = next((number for number, one in enumerate(found) if one != found[0]), None)
            if other is not None:
                places = [each[number].source.path for number in (0, other)]
                yield Problem(kind, key, f"is {found[0]} in {places[0]} and {found[other]} in {places[1]}")
                break
        else:
            dtype = kinds[1][1][0]
            if is_floating_point(dtype) and not _core.has_weighted_sum(dtype):
                advice = "; leave it out, or let torchtitan-ext convert --dtype make other sources"
                yield Problem("wrong_dtype", key, f"is {dtype}, of which no mean is taken", advice)


def _differing(
    each: Sequence[SelectedKeys], refused: set[str], max_bytes: int, *, without_values: bool
) -> Iterator[Problem]:
    """Which keys without sums are not equal in all sources, of those that are in all of them."""
    last = each[-1]
    tensors = [key for key, of in last.tensors.items() if not (key in refused or _core.has_weighted_sum(of.dtype))]
    values = [] if without_values else [key for key in last.values if key not in refused]
    for keys in each[:-1]:
        boxes = [[whole(of.fqns[key], of.tensors[key]) for key in tensors] for of in (keys, last)]
        batches = (of.reader.read_batches(part, max_bytes) for of, part in zip((keys, last), boxes, strict=True))
        differ: dict[str, str] = {}
        for one, other in zip(*batches, strict=True):
            for (_, mine, part), (_, its, _) in zip(one, other, strict=True):
                if not np.array_equal(mine, its):
                    differ[tensors[part.box]] = "differs in"
        for key in values:
            found = compare_values(keys.source, keys.fqns[key], last.source, last.fqns[key])
            if found is not None:
                differ[key] = "differs in" if found == "values" else "is more than plain data, and differs in bytes, in"
        tail = '; others="last" (--others last) takes what the last source has'
        paths = f"{keys.source.path} and {last.source.path}"
        yield from (Problem("sources_differ", key, f"{what} {paths}", tail) for key, what in differ.items())
