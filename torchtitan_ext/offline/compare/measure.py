"""Where and how far tensors of two checkpoints differ."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from torchtitan_ext import _core
from torchtitan_ext.layout.dtensor import as_bytes
from torchtitan_ext.offline.boxes import Piece, whole
from torchtitan_ext.offline.compare.diff import Tolerance, ValueDifference
from torchtitan_ext.offline.compare.side import Side
from torchtitan_ext.offline.torch_boxes import tensor_of
from torchtitan_ext.storage.element_types import item_bytes_of
from torchtitan_ext.storage.raw_tensor import dtype_name

# For each element that differs: its position, and numbers and distances of 8 or 16 bytes.
_BYTES_PER_DIFFERENT = 96

_Numbers: TypeAlias = npt.NDArray[Any]


def measure(key: str, one: Side, other: Side, tolerance: Tolerance, max_bytes: int) -> ValueDifference | None:
    """How far two tensors are apart; ``None`` if no element differs by more than the tolerance."""
    num_different = 0
    first: tuple[tuple[int, ...], Any, Any] | None = None
    max_abs: list[float] = []
    max_rel: list[float] = []
    for piece, *pair in _pieces_of(key, one, other, max_bytes):
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
    return ValueDifference(num_different, math.prod(one.tensor(key).shape), *first, max(max_abs), max(max_rel))


def _pieces_of(key: str, one: Side, other: Side, max_bytes: int) -> Iterator[tuple[Piece, torch.Tensor, torch.Tensor]]:
    """The pieces of two tensors, in row-major order; the tensors are valid until the next ones are asked for."""
    item_bytes = item_bytes_of(one.tensor(key).dtype)
    # Both pieces, copies of what differs, and the bits of a comparison of all bytes.
    # Allocators keep as much again: half of the memory is left to them.
    num_elements = max(max_bytes // 2 // (5 * item_bytes + _BYTES_PER_DIFFERENT), 1)
    batches = [
        side.reader.read_batches([whole(side.fqns[key], one.tensor(key))], num_elements * item_bytes)
        for side in (one, other)
    ]
    for batch_a, batch_b in zip(*batches, strict=True):
        for (piece, a, _), (_, b, _) in zip(batch_a, batch_b, strict=True):
            yield piece, tensor_of(a, piece), tensor_of(b, piece)


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
