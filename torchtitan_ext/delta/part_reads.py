"""New elements out of a file of changes, into memory of this process.

The file may be another one in its bytes than when it was opened. So whoever uses what is read here compares its sums
with those of the note, which was read once, after it was read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from torchtitan_ext import _core
from torchtitan_ext.delta.saved_changes import BLOCK_POSITIONS, SavedChanges, SavedPart
from torchtitan_ext.errors import DamagedCheckpointError
from torchtitan_ext.state.value_digest import sum_box
from torchtitan_ext.storage.formats.safetensors_files import SafetensorsEntry
from torchtitan_ext.storage.raw_tensor import DTYPES
from torchtitan_ext.transfer.changed.kept import positions_of


class ListedPart(NamedTuple):
    """A part that gives positions, or those of its blocks that have positions from ``first`` to ``last``."""

    fqn: str
    part: SavedPart
    first: int
    last: int


class Listed(NamedTuple):
    """Ascending positions in a global tensor, and the bytes of their new elements."""

    positions: npt.NDArray[np.int64]
    values: npt.NDArray[np.uint8]


def read_listed(changes: SavedChanges, wanted: Sequence[ListedPart]) -> list[Listed]:
    """The elements of each part, by two reads of the file.

    Raises:
        DamagedCheckpointError: The file does not have what was written.
    """
    blocks = changes.file.read([one.part.blocks for one in wanted])
    windows = [_window(changes, one, data) for one, data in zip(wanted, blocks, strict=True)]
    data = changes.file.read([found for _, *ranges in windows for found in ranges])
    found = []
    for one, (blocks_of, *_), offsets, values in zip(wanted, windows, data[::2], data[1::2], strict=True):
        total = changes.totals[one.fqn]
        try:
            positions = _core.PositionBlocks(blocks_of, offsets.view(np.uint16)).decode()
        except ValueError as error:
            raise DamagedCheckpointError(f"{changes.path}: {one.fqn}: {error}") from None
        if positions.size and positions[-1] >= math.prod(total.shape):
            what = f"position {positions[-1]} is outside of shape {total.shape}"
            raise DamagedCheckpointError(f"{changes.path}: {one.fqn}: {what}")
        found.append(Listed(positions, values))
    return found


def sum_of_part(changes: SavedChanges, fqn: str, part: SavedPart) -> int:
    """The sum of the hashes of the new elements of a part.

    Raises:
        DamagedCheckpointError: The file does not have what was written.
    """
    total = changes.totals[fqn]
    dtype = DTYPES[total.dtype]
    if part.box is None:
        (listed,) = read_listed(changes, [ListedPart(fqn, part, 0, math.prod(total.shape))])
        return _core.sum_at(listed.values, dtype.itemsize, listed.positions)
    offsets, sizes = part.box
    elements = changes.file.read_box(part.values.begin, sizes, dtype, (0,) * len(sizes), sizes)
    return int(sum_box(elements, offsets, total.shape).item())


def zero_sums(fqns: Iterable[str]) -> _core.SumTable:
    """Sums of nothing yet; those of several processes add up to one."""
    sums = _core.SumTable()
    for fqn in fqns:
        sums.add_key(fqn, {None: 0}, replica="shares")
    return sums


def read_tensor(changes: SavedChanges, fqn: str) -> Listed:
    """All new elements of a tensor, part by part, which are what was written; those of boxes too are listed.

    Raises:
        DamagedCheckpointError: The file does not have what was written.
    """
    total, found = changes.totals[fqn], []
    for part in changes.parts[fqn]:
        if part.box is None:
            found += read_listed(changes, [ListedPart(fqn, part, 0, math.prod(total.shape))])
        else:
            found.append(Listed(positions_of(*part.box, total.shape).numpy(), *changes.file.read([part.values])))
    positions, values = map(np.concatenate, zip(*found, strict=True))
    if _core.sum_at(values, DTYPES[total.dtype].itemsize, positions) != total.new:
        raise DamagedCheckpointError(f"{changes.path}: the new elements of {fqn} are not those that were written")
    return Listed(positions, values)


def _window(
    changes: SavedChanges, wanted: ListedPart, data: npt.NDArray[np.uint8]
) -> tuple[npt.NDArray[np.int32], SafetensorsEntry, SafetensorsEntry]:
    """The wanted blocks of a part, and where their offsets and values lie in the file."""
    part, item_bytes = wanted.part, DTYPES[changes.totals[wanted.fqn].dtype].itemsize
    pairs = data.view(np.int32).reshape(-1, 2)
    counts = pairs[:, 1].astype(np.int64)
    in_offsets, in_values = (
        np.concatenate([[0], np.cumsum(of_block)]) for of_block in (np.maximum(counts, 1), np.abs(counts))
    )
    # A few bytes can stand for very many positions.
    if (2 * in_offsets[-1], item_bytes * in_values[-1]) != (part.offsets.num_bytes, part.values.num_bytes):
        what = f"got blocks of {in_values[-1]} positions for {part.values.num_bytes} bytes"
        raise DamagedCheckpointError(f"{changes.path}: {wanted.fqn}: {what}")
    begin, end = np.searchsorted(pairs[:, 0], (wanted.first // BLOCK_POSITIONS, wanted.last // BLOCK_POSITIONS + 1))
    return (
        pairs[begin : max(begin, end)].reshape(-1),
        _cut(part.offsets, 2 * in_offsets[begin], 2 * in_offsets[max(begin, end)]),
        _cut(part.values, item_bytes * in_values[begin], item_bytes * in_values[max(begin, end)]),
    )


def _cut(whole: SafetensorsEntry, begin: np.int64, end: np.int64) -> SafetensorsEntry:
    return whole._replace(begin=whole.begin + int(begin), num_bytes=int(end - begin))
