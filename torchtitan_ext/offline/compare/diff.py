"""What two checkpoints differ in, whatever their formats and layouts.

Tensors are compared by their fingerprints: each checkpoint is read once, in the order of its files, and nothing is
gathered. Only tensors of which these differ are read side by side, where it is asked how far they are apart.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from torchtitan_ext.errors import CheckpointReadError
from torchtitan_ext.layout.dtensor import as_bytes
from torchtitan_ext.offline.boxes import BoxReader, Piece, cut, new_buffer, views
from torchtitan_ext.offline.compare.difference_map import DifferenceMap
from torchtitan_ext.offline.compare.fingerprints import fingerprint_tensors
from torchtitan_ext.offline.selection import Selection
from torchtitan_ext.offline.sources import DcpSource, Source
from torchtitan_ext.state.value_digest import digest_value
from torchtitan_ext.storage.formats.scalars import shortest
from torchtitan_ext.storage.progress import OnBytes
from torchtitan_ext.storage.raw_tensor import dtype_name

DifferenceKind = Literal["only_in_a", "only_in_b", "type", "dtype", "shape", "values", "unreadable"]

# Of an element that differs: its position, and numbers and distances of 8 or 16 bytes.
_BYTES_PER_DIFFERENT = 96

_MAX_SHOWN = 60

_Numbers: TypeAlias = npt.NDArray[Any]


@dataclass(frozen=True)
class ValueDifference:
    """How far two tensors of one dtype and shape are apart.

    Attributes:
        num_different: Elements that differ, beyond the tolerance where there is one.
        first_index: Of the first of them, in row-major order, in the global tensor.
        max_abs, max_rel: Largest difference of numbers, and in proportion to the larger of the two; infinite ones and
            NaNs do not count. ``max_abs`` of integers is an exact int.
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
        a, b: What each has there; ``None`` where it has nothing.
        values: Where tensors differ, if that was asked for.
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
        num_equal: Keys that are in both, and equal.
    """

    differences: tuple[Difference, ...]
    num_equal: int


@dataclass(frozen=True)
class Tolerance:
    """Numbers count as equal where ``|a - b| <= atol + rtol * |b|``, and NaNs where both are."""

    rtol: float = 0.0
    atol: float = 0.0

    @property
    def is_exact(self) -> bool:
        return self.rtol == 0 and self.atol == 0


def diff(
    a: Source,
    b: Source,
    *,
    selection: Selection | None = None,
    values: bool = False,
    tolerance: Tolerance | None = None,
    max_bytes: int = 256 << 20,
    num_threads: int = 2,
    progress: OnBytes = lambda _: None,
) -> DiffReport:
    """Compares two checkpoints, key by key: bits of tensors, NaNs too, and values by their digests.

    Args:
        selection: Keys to compare. In a source that has no key below its prefix all are taken as they are.
        values: Say also where tensors differ.
        tolerance: Tensors whose numbers are as close as that are equal.
        max_bytes: Memory for what is read.
        progress: Is told bytes; ``num_bytes_to_read`` is their sum.
    """
    chosen = selection or Selection()
    chosen.check_finds(a, b)
    keys_a, keys_b = (chosen.within(source).keys_of(source) for source in (a, b))
    differences = [Difference(key, "only_in_a", a=described(a, keys_a[key])) for key in keys_a.keys() - keys_b.keys()]
    differences += [Difference(key, "only_in_b", b=described(b, keys_b[key])) for key in keys_b.keys() - keys_a.keys()]
    both = sorted(keys_a.keys() & keys_b.keys())
    for source, keys in ((a, keys_a), (b, keys_b)):
        source.check_files(keys[key] for key in both)
    tensors = []
    for key in both:
        found = _differs_by_metadata(key, a, keys_a[key], b, keys_b[key])
        if found is not None:
            differences.append(found)
        elif isinstance(a.metadata.state_dict_metadata[keys_a[key]], TensorStorageMetadata):
            tensors.append(key)
    digests = [
        fingerprint_tensors(
            source, [keys[key] for key in tensors], max_bytes=max_bytes, num_threads=num_threads, progress=progress
        )
        for source, keys in ((a, keys_a), (b, keys_b))
    ]
    comparison = _TensorComparison(a, b, tolerance or Tolerance(), max_bytes)
    for key in tensors:
        if digests[0][keys_a[key]] == digests[1][keys_b[key]]:
            continue
        found = Difference(key, "values", described(a, keys_a[key]), described(b, keys_b[key]))
        if values or not comparison.tolerance.is_exact:
            measured = comparison.measure(keys_a[key], keys_b[key])
            if measured is None:
                continue
            found = replace(found, values=measured if values else None)
        differences.append(found)
    ordered = tuple(sorted(differences, key=lambda difference: difference.key))
    return DiffReport(ordered, len(both) - sum(found.kind not in ("only_in_a", "only_in_b") for found in ordered))


def map_differences(
    a: Source,
    b: Source,
    key: str,
    *,
    selection: Selection | None = None,
    tolerance: Tolerance | None = None,
    max_bytes: int = 256 << 20,
) -> DifferenceMap:
    """Where a tensor differs that ``diff`` found to differ in its values. Arguments as there."""
    keys = ((selection or Selection()).within(source).keys_of(source)[key] for source in (a, b))
    return _TensorComparison(a, b, tolerance or Tolerance(), max_bytes).map(*keys)


def num_bytes_to_read(a: Source, b: Source, selection: Selection | None = None) -> int:
    """What a comparison reads of the selected tensors."""
    return sum((selection or Selection()).within(source).num_bytes_of(source) for source in (a, b))


def described(source: Source, fqn: str) -> str:
    """What a checkpoint has for a key, in a few words: ``float32 [4096, 512]``, ``3``."""
    return _part_from(_text_of(source, fqn), 0)


def _parts_around(a: str, b: str) -> tuple[str, str]:
    """Of two long texts the parts in which they begin to differ."""
    same = len(os.path.commonprefix([a, b]))
    begin = max(0, same - _MAX_SHOWN // 2) if max(len(a), len(b)) > _MAX_SHOWN else 0
    return _part_from(a, begin), _part_from(b, begin)


def _part_from(text: str, begin: int) -> str:
    end = begin + _MAX_SHOWN
    return f"{'...' if begin else ''}{text[begin:end]}{'...' if end < len(text) else ''}"


def _text_of(source: Source, fqn: str) -> str:
    entry = source.metadata.state_dict_metadata[fqn]
    if isinstance(entry, TensorStorageMetadata):
        return f"{str(entry.properties.dtype).removeprefix('torch.')} {list(entry.size)}"
    try:
        return repr(source.read_value(fqn))
    except CheckpointReadError:
        return "a value that is more than plain data"


class _TensorComparison:
    """Measures how far tensors of two checkpoints are apart, piece by piece."""

    def __init__(self, a: Source, b: Source, tolerance: Tolerance, max_bytes: int) -> None:
        self.tolerance = tolerance
        self._readers = (BoxReader(a), BoxReader(b))
        self._max_bytes = max_bytes

    def measure(self, fqn_a: str, fqn_b: str) -> ValueDifference | None:
        """``None`` where all elements are equal, or as close as the tolerance wants."""
        parts = [_compare(piece, one, other, self.tolerance) for piece, one, other in self._pieces(fqn_a, fqn_b)]
        found = [part for part in parts if part is not None]
        if not found:
            return None
        return replace(
            found[0],
            num_different=sum(part.num_different for part in found),
            num_elements=self._readers[0].entry(fqn_a).size.numel(),
            max_abs=max(part.max_abs for part in found),
            max_rel=max(part.max_rel for part in found),
        )

    def map(self, fqn_a: str, fqn_b: str) -> DifferenceMap:
        """How many elements differ, by place."""
        found = DifferenceMap(tuple(self._readers[0].entry(fqn_a).size))
        for piece, one, other in self._pieces(fqn_a, fqn_b):
            found.add(piece.offsets, piece.sizes, _positions_apart(one.view(-1), other.view(-1), self.tolerance))
        return found

    def _pieces(self, fqn_a: str, fqn_b: str) -> Iterator[tuple[Piece, torch.Tensor, torch.Tensor]]:
        """The pieces of two tensors, in memory that the next ones are read into."""
        entry = self._readers[0].entry(fqn_a)
        dtype, shape = entry.properties.dtype, tuple(entry.size)
        # Both pieces, copies of what differs, and the bits of a comparison of all bytes.
        # Half of the memory is for what allocators keep of these.
        num_elements = max(self._max_bytes // 2 // (5 * dtype.itemsize + _BYTES_PER_DIFFERENT), 1)
        piece_bytes = num_elements * dtype.itemsize
        buffers = [new_buffer(piece_bytes) for _ in self._readers]
        for piece in cut(Piece(fqn_a, dtype, (0,) * len(shape), shape), piece_bytes):
            pair = []
            for reader, buffer, fqn in zip(self._readers, buffers, (fqn_a, fqn_b), strict=True):
                own = replace(piece, fqn=fqn)
                (place,) = views(buffer, [own])
                reader.read([own], [place])
                pair.append(place)
            yield piece, pair[0], pair[1]


def _differs_by_metadata(key: str, a: Source, fqn_a: str, b: Source, fqn_b: str) -> Difference | None:
    """In type, dtype, shape, or in a value that is no tensor."""
    one, other = a.metadata.state_dict_metadata[fqn_a], b.metadata.state_dict_metadata[fqn_b]
    kind: DifferenceKind | None = None
    if isinstance(one, TensorStorageMetadata) and isinstance(other, TensorStorageMetadata):
        if one.size != other.size:
            kind = "shape"
        elif one.properties.dtype != other.properties.dtype:
            kind = "dtype"
    elif isinstance(one, TensorStorageMetadata) or isinstance(other, TensorStorageMetadata):
        kind = "type"
    else:
        kind = _compare_values(a, fqn_a, b, fqn_b)
    if kind is None:
        return None
    return Difference(key, kind, *_parts_around(_text_of(a, fqn_a), _text_of(b, fqn_b)))


def _compare_values(a: Source, fqn_a: str, b: Source, fqn_b: str) -> DifferenceKind | None:
    try:
        is_equal = digest_value(a.read_value(fqn_a)) == digest_value(b.read_value(fqn_b))
    except CheckpointReadError:
        # What is not to be unpickled is equal where its bytes are.
        if isinstance(a, DcpSource) and isinstance(b, DcpSource):
            if torch.equal(a.value_record(fqn_a), b.value_record(fqn_b)):
                return None
        return "unreadable"
    return None if is_equal else "values"


def _compare(piece: Piece, a: torch.Tensor, b: torch.Tensor, tolerance: Tolerance) -> ValueDifference | None:
    flat_a, flat_b = a.view(-1), b.view(-1)
    positions = _positions_apart(flat_a, flat_b, tolerance)
    if positions.numel() == 0:
        return None
    numbers_a, numbers_b = _numbers(flat_a[positions]), _numbers(flat_b[positions])
    distance = _distances(numbers_a, numbers_b)
    with np.errstate(invalid="ignore"):  # 0 and -0, or two infinities
        relative = distance / np.maximum(_magnitudes(numbers_a), _magnitudes(numbers_b))
    is_finite = np.isfinite(distance)
    first = int(positions[0])
    return ValueDifference(
        num_different=positions.numel(),
        num_elements=piece.num_bytes // piece.dtype.itemsize,
        first_index=_index_of(first, piece),
        first_a=_shown(flat_a[first]),
        first_b=_shown(flat_b[first]),
        max_abs=distance[is_finite].max(initial=0).item(),
        max_rel=np.nan_to_num(relative[is_finite]).max(initial=0.0).item(),
    )


def _positions_apart(a: torch.Tensor, b: torch.Tensor, tolerance: Tolerance) -> torch.Tensor:
    """Of the elements of two vectors that differ, beyond the tolerance where there is one."""
    if torch.equal(as_bytes(a), as_bytes(b)):
        return torch.empty(0, dtype=torch.int64, device="cpu")
    positions = _positions_of_other_bits(a, b)
    if tolerance.is_exact:
        return positions
    return positions[torch.from_numpy(~_are_close(_numbers(a[positions]), _numbers(b[positions]), tolerance))]


def _positions_of_other_bits(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    item_bytes = a.element_size()
    is_other = as_bytes(a).view(-1, item_bytes) != as_bytes(b).view(-1, item_bytes)
    return is_other.any(dim=1).nonzero().view(-1)


def _numbers(values: torch.Tensor) -> _Numbers:
    """As float64 or complex128, and integers as they are: a float64 does not hold all of 64 bits."""
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
    """Absolute differences: float64, of integers exactly as uint64."""
    if a.dtype.kind in "iu":
        return np.maximum(a, b).astype(np.uint64) - np.minimum(a, b).astype(np.uint64)  # modulo 2**64
    with np.errstate(over="ignore", invalid="ignore"):
        return np.abs(a - b)


def _magnitudes(numbers: _Numbers) -> npt.NDArray[np.float64]:
    return np.abs(numbers.astype(np.float64) if numbers.dtype.kind in "iu" else numbers)


def _index_of(position: int, piece: Piece) -> tuple[int, ...]:
    """In the global tensor, of an element of a piece that is counted in row-major order."""
    index = []
    for offset, size in zip(reversed(piece.offsets), reversed(piece.sizes), strict=True):
        index.append(offset + position % size)
        position //= size
    return tuple(reversed(index))


def _shown(value: torch.Tensor) -> Any:
    """An element as a number with as few digits as tell it from others of its dtype."""
    if value.dtype.is_complex:
        parts = torch.view_as_real(value.resolve_conj())
        return str(complex(*map(_shown, parts)))
    if not value.dtype.is_floating_point:
        return value.item()
    return shortest(_numbers(value.view(1))[0].item(), dtype_name(value.dtype))
