"""Compares two checkpoints, whatever their formats and layouts.

Tensors are compared by their fingerprints: each checkpoint is read once, in the order of its files. Only tensors whose
fingerprints differ are read again, side by side, if the caller asks where and how far they differ.
"""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from torchtitan_ext._core import SumTable
from torchtitan_ext.errors import CheckpointReadError
from torchtitan_ext.offline.compare.fingerprints import stored_sums, sum_tensors
from torchtitan_ext.offline.compare.side import DifferenceKind, Side, kind_by_metadata
from torchtitan_ext.offline.selection import Selection
from torchtitan_ext.offline.sources import DcpSource, FileSource
from torchtitan_ext.storage.progress import OnBytes

_MAX_SHOWN = 60


@dataclass(frozen=True)
class ValueDifference:
    """How far two tensors of one dtype and shape are apart.

    Attributes:
        num_different: The number of elements that differ by more than the tolerance.
        first_index: The index of the first of these elements, in row-major order, in the global tensor.
        first_a, first_b: The two numbers there.
        max_abs, max_rel: The largest difference, absolute (an exact int for integers) and relative to the larger of the
            two numbers. Infinite differences and NaNs do not count.
    """

    num_different: int
    num_elements: int
    first_index: tuple[int, ...]
    first_a: Any
    first_b: Any
    max_abs: float
    max_rel: float


@dataclass(frozen=True)
class Difference:
    """One key in which two checkpoints differ.

    Attributes:
        a, b: A description of what each checkpoint has under the key; ``None`` for nothing.
        values: Where the two tensors differ, if the caller asked for it.
    """

    key: str
    kind: DifferenceKind
    a: str | None = None
    b: str | None = None
    values: ValueDifference | None = None


@dataclass(frozen=True)
class DiffReport:
    """What two checkpoints differ in.

    Attributes:
        num_equal: The number of keys that both have with equal contents.
        num_unread: The number of tensors that were compared by the fingerprints of both saves alone.
    """

    differences: tuple[Difference, ...]
    num_equal: int
    num_unread: int = 0


@dataclass(frozen=True)
class Tolerance:
    """Numbers count as equal if ``|a - b| <= atol + rtol * |b|`` or both are NaN."""

    rtol: float = 0.0
    atol: float = 0.0

    @property
    def is_exact(self) -> bool:
        return self.rtol == 0 and self.atol == 0


def diff(
    a: FileSource,
    b: FileSource,
    *,
    selection: Selection | None = None,
    values: bool = False,
    tolerance: Tolerance | None = None,
    max_bytes: int = 256 << 20,
    num_threads: int = 2,
    read: bool = False,
    progress: OnBytes = lambda _: None,
) -> DiffReport:
    """Compares two checkpoints key by key: tensors by their bits, NaNs too, and other values by their digests.

    Args:
        selection: The keys to compare. The prefix is ignored in a source that has no key below it.
        values: Also find where and how far tensors differ.
        tolerance: Tensors whose numbers are this close count as equal.
        max_bytes: The bytes of tensors that are held at a time.
        read: Read tensors whose fingerprints the save has stored too.
        progress: Called with the bytes that were read; ``num_bytes_to_read`` is the total.
    """
    chosen = selection or Selection()
    chosen.check_finds(a, b)
    sides = one, other = Side(a, chosen), Side(b, chosen)
    both = one.fqns.keys() & other.fqns.keys()
    for side in sides:
        side.source.check_files(side.fqns[key] for key in sorted(both))
    differences = []
    tensors = []
    for key in sorted(one.fqns.keys() | other.fqns.keys()):
        kind = kind_by_metadata(key, one, other)
        if kind is None and one.has_tensor(key):
            tensors.append(key)
        elif (kind := kind or _compare_values(key, one, other)) is not None:
            differences.append(Difference(key, kind, *_texts(key, one, other)))
    bounds = {"max_bytes": max_bytes, "num_threads": num_threads}
    fqns = [[side.fqns[key] for key in tensors] for side in sides]
    stored = [SumTable() if read else stored_sums(side.source, named) for side, named in zip(sides, fqns, strict=True)]
    sums_a, sums_b = (
        sum_tensors(side.source, named, progress=progress, stored=known, **bounds)
        for side, named, known in zip(sides, fqns, stored, strict=True)
    )
    num_unread = sum(a in stored[0] and b in stored[1] for a, b in zip(*fqns, strict=True))
    limit = tolerance or Tolerance()
    for key in tensors:
        if sums_a[one.fqns[key]] == sums_b[other.fqns[key]]:
            continue
        found = Difference(key, "values", *_texts(key, one, other))
        if values or not limit.is_exact:
            measured = importlib.import_module("torchtitan_ext.offline.compare.measure").measure(
                key, one, other, limit, max_bytes
            )
            if measured is None:
                continue
            found = replace(found, values=measured if values else None)
        differences.append(found)
    ordered = tuple(sorted(differences, key=lambda difference: difference.key))
    num_equal = len(both) - sum(found.kind not in ("only_in_a", "only_in_b") for found in ordered)
    return DiffReport(ordered, num_equal, num_unread)


def num_bytes_to_read(a: FileSource, b: FileSource, selection: Selection | None = None, *, read: bool = False) -> int:
    """The bytes of tensors that ``diff`` reads."""
    num_bytes = 0
    for source in (a, b):
        chosen = (selection or Selection()).within(source)
        known = SumTable() if read else stored_sums(source, chosen.keys_of(source).values())
        num_bytes += chosen.num_bytes_of(source, without=known)
    return num_bytes


def _texts(key: str, *sides: Side) -> tuple[str | None, str | None]:
    """What each side has under a key: ``float32 [4096, 512]``, ``3``; long texts from where they begin to differ."""
    one, other = (side.text(key) if key in side.fqns else None for side in sides)
    a, b = one or "", other or ""
    same = len(os.path.commonprefix([a, b]))
    begin = max(0, same - _MAX_SHOWN // 2) if max(len(a), len(b)) > _MAX_SHOWN else 0
    return one and _part_from(one, begin), other and _part_from(other, begin)


def _part_from(text: str, begin: int) -> str:
    end = begin + _MAX_SHOWN
    return f"{'...' if begin else ''}{text[begin:end]}{'...' if end < len(text) else ''}"


def _compare_values(key: str, a: Side, b: Side) -> DifferenceKind | None:
    # Equal bytes are equal values, also where these must not be unpickled.
    if isinstance(a.source, DcpSource) and isinstance(b.source, DcpSource):
        one, other = (side.source.value_record(side.fqns[key]) for side in (a, b))
        if np.array_equal(one, other):
            return None
    digest_value = importlib.import_module("torchtitan_ext.state.value_digest").digest_value
    try:
        return None if digest_value(a.value(key)) == digest_value(b.value(key)) else "values"
    except CheckpointReadError:
        return "unreadable"
