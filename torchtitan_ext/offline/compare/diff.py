"""Compares two checkpoints, whatever their formats and layouts.

Tensors are compared by their fingerprints: each checkpoint is read once, in the order of its files. Only tensors whose
fingerprints differ are read again, side by side, if the caller asks where and how far they differ.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from torchtitan_ext import _core
from torchtitan_ext._core import SumTable
from torchtitan_ext.errors import CheckpointReadError
from torchtitan_ext.layout.dtensor import as_bytes
from torchtitan_ext.offline.boxes import BoxReader, Piece, cut, whole
from torchtitan_ext.offline.compare.fingerprints import stored_sums, sum_tensors
from torchtitan_ext.offline.selection import Selection
from torchtitan_ext.offline.sources import DcpSource, FileSource
from torchtitan_ext.state.value_digest import digest_value
from torchtitan_ext.storage.progress import OnBytes
from torchtitan_ext.storage.raw_tensor import dtype_name

DifferenceKind = Literal["only_in_a", "only_in_b", "type", "dtype", "shape", "values", "unreadable"]

# For each element that differs: its position, and numbers and distances of 8 or 16 bytes.
_BYTES_PER_DIFFERENT = 96

_MAX_SHOWN = 60

_MAX_CELLS = 64

_Numbers: TypeAlias = npt.NDArray[Any]


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
        totals: The sums of all elements of each pair of tensors that were compared, in A and in B, modulo 2^64.
    """

    differences: tuple[Difference, ...]
    num_equal: int
    num_unread: int = 0
    totals: Mapping[str, tuple[int, int]] = field(default_factory=dict, compare=False, repr=False)


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
    totals = {key: (sums_a[one.fqns[key]], sums_b[other.fqns[key]]) for key in tensors}
    for key, (total_a, total_b) in totals.items():
        if total_a == total_b:
            continue
        found = Difference(key, "values", *_texts(key, one, other))
        if values or not limit.is_exact:
            measured = _measure(key, one, other, limit, max_bytes)
            if measured is None:
                continue
            found = replace(found, values=measured if values else None)
        differences.append(found)
    ordered = tuple(sorted(differences, key=lambda difference: difference.key))
    num_equal = len(both) - sum(found.kind not in ("only_in_a", "only_in_b") for found in ordered)
    return DiffReport(ordered, num_equal, num_unread, totals)


def map_differences(
    a: FileSource,
    b: FileSource,
    key: str,
    *,
    selection: Selection | None = None,
    tolerance: Tolerance | None = None,
    max_bytes: int = 256 << 20,
) -> DifferenceMap:
    """Where a tensor differs whose values ``diff`` found to differ. The arguments are those of ``diff``."""
    one, other = (Side(source, selection or Selection()) for source in (a, b))
    found = DifferenceMap(one.shape(key))
    for piece, *pair in pieces_of(key, one, other, max_bytes):
        flat_a, flat_b = (tensor.view(-1) for tensor in pair)
        found.add(piece.offsets, piece.sizes, _positions_apart(flat_a, flat_b, tolerance or Tolerance()))
    return found


class DifferenceMap:
    """Counts of different elements in at most 64 x 64 cells of the two largest dims, summed over all other dims.

    Attributes:
        shape: The shape of both tensors.
        dims: The dims that give rows and columns of cells: one for a vector, none for a single number.
        sizes: The sizes of these two dims; 1 for a dim that does not exist.
        cell_sizes: Rows and columns of elements in a cell; the last cell of a row or column may have fewer.
        counts: The number of different elements in each cell, by row and column.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape
        self.dims = tuple(sorted(sorted(range(len(shape)), key=lambda dim: (-shape[dim], dim))[:2]))
        rows, cols = (*(shape[dim] for dim in self.dims), 1, 1)[:2]
        self.sizes = rows, cols
        self.cell_sizes = -(-rows // _MAX_CELLS), -(-cols // _MAX_CELLS)
        num_cells = [-(-size // cell) for size, cell in zip(self.sizes, self.cell_sizes, strict=True)]
        self.counts = torch.zeros(num_cells, dtype=torch.int64, device="cpu")

    def add(self, offsets: Sequence[int], sizes: Sequence[int], positions: torch.Tensor) -> None:
        """Counts the different elements of a box of the tensor.

        Args:
            offsets, sizes: The box: a number per dim of the tensor.
            positions: The different elements, int64, counted in the row-major order of the box.
        """
        inside = np.unravel_index(positions.numpy(), (1, *sizes))[1:]  # it knows no indices without dims
        pairs = zip(self.dims, self.cell_sizes, strict=False)
        cells = [torch.from_numpy((inside[dim] + offsets[dim]) // size) for dim, size in pairs]
        row, col = (*cells, torch.zeros_like(positions), torch.zeros_like(positions))[:2]
        self.counts.index_put_((row, col), torch.ones_like(positions), accumulate=True)


def num_bytes_to_read(a: FileSource, b: FileSource, selection: Selection | None = None, *, read: bool = False) -> int:
    """The bytes of tensors that ``diff`` reads."""
    num_bytes = 0
    for source in (a, b):
        chosen = (selection or Selection()).within(source)
        known = SumTable() if read else stored_sums(source, chosen.keys_of(source).values())
        num_bytes += chosen.num_bytes_of(source, without=known)
    return num_bytes


class Side:
    """One of the two checkpoints, and its names for the keys that are compared."""

    def __init__(self, source: FileSource, selection: Selection) -> None:
        self.source = source
        self.fqns = selection.within(source).keys_of(source)
        self.reader = BoxReader(source)

    def entry(self, key: str) -> Any:
        return self.source.metadata.state_dict_metadata[self.fqns[key]]

    def has_tensor(self, key: str) -> bool:
        """Whether the side has the key, and a tensor under it."""
        return key in self.fqns and isinstance(self.entry(key), TensorStorageMetadata)

    def shape(self, key: str) -> tuple[int, ...]:
        return tuple(self.reader.entry(self.fqns[key]).size)

    def value(self, key: str) -> Any:
        return self.source.read_value(self.fqns[key])

    def text(self, key: str) -> str:
        entry = self.entry(key)
        if isinstance(entry, TensorStorageMetadata):
            return f"{str(entry.properties.dtype).removeprefix('torch.')} {list(entry.size)}"
        try:
            return repr(self.value(key))
        except CheckpointReadError:
            return "a value that is more than plain data"


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


def _measure(key: str, one: Side, other: Side, tolerance: Tolerance, max_bytes: int) -> ValueDifference | None:
    """How far two tensors are apart; ``None`` if no element differs by more than the tolerance."""
    num_different = 0
    first: tuple[tuple[int, ...], Any, Any] | None = None
    max_abs: list[float] = []
    max_rel: list[float] = []
    for piece, *pair in pieces_of(key, one, other, max_bytes):
        flat_a, flat_b = (tensor.view(-1) for tensor in pair)
        positions = _positions_apart(flat_a, flat_b, tolerance)
        if positions.numel() == 0:
            continue
        num_different += positions.numel()
        if first is None:
            position = int(positions[0])
            inside = np.unravel_index(position, (1, *piece.sizes))[1:]
            index = tuple(offset + int(place) for offset, place in zip(piece.offsets, inside, strict=True))
            first = index, _shown(flat_a[position]), _shown(flat_b[position])
        a, b = _numbers(flat_a[positions]), _numbers(flat_b[positions])
        distance = _distances(a, b)
        with np.errstate(invalid="ignore"):  # 0 and -0, or two infinities
            relative = distance / np.maximum(_magnitudes(a), _magnitudes(b))
        is_finite = np.isfinite(distance)
        max_abs.append(distance[is_finite].max(initial=0).item())
        max_rel.append(np.nan_to_num(relative[is_finite]).max(initial=0.0).item())
    if first is None:
        return None
    return ValueDifference(num_different, math.prod(one.shape(key)), *first, max(max_abs), max(max_rel))


def pieces_of(
    key: str, one: Side, other: Side, max_bytes: int, bytes_per_element: int = _BYTES_PER_DIFFERENT
) -> Iterator[tuple[Piece, torch.Tensor, torch.Tensor]]:
    """The pieces of two tensors, in row-major order; the tensors are valid until the next ones are asked for.

    Args:
        bytes_per_element: What the caller needs for an element of a piece, beside the elements and a mask of them.
    """
    dtype, shape = one.entry(key).properties.dtype, one.shape(key)
    # Both pieces, copies of what differs, and the bits of a comparison of all bytes.
    # Allocators keep as much again: half of the memory is left to them.
    num_elements = max(max_bytes // 2 // (5 * dtype.itemsize + bytes_per_element), 1)
    batches = []
    for side in (one, other):
        pieces = cut(whole(side.fqns[key], dtype, shape), num_elements * dtype.itemsize)
        batches.append(side.reader.read_batches(((piece, piece) for piece in pieces), num_elements * dtype.itemsize))
    for batch_a, batch_b in zip(*batches, strict=True):
        for (a, piece), (b, _) in zip(batch_a, batch_b, strict=True):
            yield piece, a, b


def kind_by_metadata(key: str, a: Side, b: Side) -> DifferenceKind | None:
    """How a key differs by being there, in type, shape or dtype; ``None`` if it does not."""
    if key not in a.fqns or key not in b.fqns:
        return "only_in_a" if key in a.fqns else "only_in_b"
    if not a.has_tensor(key) and not b.has_tensor(key):
        return None
    if not (a.has_tensor(key) and b.has_tensor(key)):
        return "type"
    one, other = a.entry(key), b.entry(key)
    if one.size != other.size:
        return "shape"
    return "dtype" if one.properties.dtype != other.properties.dtype else None


def _compare_values(key: str, a: Side, b: Side) -> DifferenceKind | None:
    try:
        return None if digest_value(a.value(key)) == digest_value(b.value(key)) else "values"
    except CheckpointReadError:
        # Values that must not be unpickled are equal if their bytes are.
        is_dcp = isinstance(a.source, DcpSource) and isinstance(b.source, DcpSource)
        records = (side.source.value_record(side.fqns[key]) for side in (a, b))
        return None if is_dcp and torch.equal(*records) else "unreadable"


def _positions_apart(a: torch.Tensor, b: torch.Tensor, tolerance: Tolerance) -> torch.Tensor:
    """The positions at which two vectors differ by more than the tolerance."""
    if torch.equal(as_bytes(a), as_bytes(b)):
        return torch.empty(0, dtype=torch.int64, device="cpu")
    item_bytes = a.element_size()
    has_other_bits = as_bytes(a).view(-1, item_bytes) != as_bytes(b).view(-1, item_bytes)
    positions = has_other_bits.any(dim=1).nonzero().view(-1)
    if tolerance.is_exact:
        return positions
    return positions[torch.from_numpy(~_are_close(_numbers(a[positions]), _numbers(b[positions]), tolerance))]


def _numbers(values: torch.Tensor) -> _Numbers:
    """Floats as float64 or complex128; integers as they are, since a float64 cannot hold all of 64 bits."""
    if values.dtype.is_complex:
        return values.to(torch.complex128).numpy()
    if not values.dtype.is_floating_point:
        return (values.byte() if values.dtype is torch.bool else values).numpy()
    # 8-bit floats convert to float32 only.
    return (values.float() if values.element_size() == 1 else values).double().numpy()


def _are_close(a: _Numbers, b: _Numbers, tolerance: Tolerance) -> npt.NDArray[np.bool_]:
    distance = _distances(a, b)
    with np.errstate(over="ignore", invalid="ignore"):
        limit = tolerance.atol + tolerance.rtol * _magnitudes(b)
    if distance.dtype == np.uint64:
        whole = np.fmin(np.fmax(np.floor(limit), 0.0), np.nextafter(2.0**64, 0.0)).astype(np.uint64)
        return (distance <= whole) | (limit >= 2.0**64)
    is_close = (distance <= limit) & np.isfinite(a) & np.isfinite(b)  # nothing else is close to infinity
    return is_close | (np.isnan(a) & np.isnan(b))


def _distances(a: _Numbers, b: _Numbers) -> _Numbers:
    """Absolute differences: float64, or exact uint64 for integers."""
    if a.dtype.kind in "iu":
        return np.maximum(a, b).astype(np.uint64) - np.minimum(a, b).astype(np.uint64)  # modulo 2**64
    with np.errstate(over="ignore", invalid="ignore"):
        return np.abs(a - b)


def _magnitudes(numbers: _Numbers) -> npt.NDArray[np.float64]:
    return np.abs(numbers.astype(np.float64) if numbers.dtype.kind in "iu" else numbers)


def _shown(value: torch.Tensor) -> Any:
    """An element as a number, with just enough digits to tell it from its neighbours of the same dtype."""
    if value.dtype.is_complex:
        parts = torch.view_as_real(value.resolve_conj())
        return str(complex(*map(_shown, parts)))
    if not value.dtype.is_floating_point:
        return value.item()
    return _core.shortest(_numbers(value.view(1))[0].item(), dtype_name(value.dtype))
