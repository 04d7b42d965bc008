"""How changes travel over the plan of a transfer: of each box only the elements that changed.

Both ends of a box know it by its place in their tables, so an element is known by its position in the row-major order
of the box. Three exchanges: how much of each box follows; the changed elements; and, when all ranks have seen that
their targets are what the changes were made from, the boxes that go whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from torchtitan_ext import _core, ops
from torchtitan_ext.errors import Problem, named
from torchtitan_ext.layout.dtensor import to_write
from torchtitan_ext.layout.layout import LocalShard, aligned, part_of_shard, shard_of_box
from torchtitan_ext.transfer.changed.changes import Changes, differing_versions
from torchtitan_ext.transfer.changed.kept import Found
from torchtitan_ext.transfer.endpoint import Endpoint
from torchtitan_ext.transfer.transport import Row, Transport, dtype_of, flat_table, part_of, rows_of, table_of

_WHOLE = -1
# Elements travel as words of their size.
_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}
_ALIGNMENT = 8


class Header(NamedTuple):
    """What the receiver of a box is told first, as int64.

    Attributes:
        num_changed: Changed elements of the box, or -1 where it goes whole.
        num_blocks, num_offsets: Of their ``PositionBlocks``.
        old_sum: Of the hashes of their old bits, at their positions in the box.
        has_base: Whether ``old_sum`` is known.
    """

    num_changed: int = 0
    num_blocks: int = 0
    num_offsets: int = 0
    old_sum: int = 0
    has_base: int = 1

    def num_bytes(self, item_bytes: int) -> int:
        """Of the changes of the box, which follow: blocks, offsets, values."""
        if self.num_changed <= 0:
            return 0
        num_bytes = 8 * self.num_blocks + 2 * self.num_offsets + item_bytes * self.num_changed
        return aligned(num_bytes, _ALIGNMENT)


class PackedChanges(NamedTuple):
    """Header and data of each box that is sent."""

    headers: list[Header]
    data: list[bytes]

    def add(self, in_box: npt.NDArray[np.int64], elements: npt.NDArray[Any], *, old_sum: int = 0) -> None:
        """A box with some changed elements, by their positions in it."""
        coded = _core.PositionBlocks.encode(in_box)
        header = Header(in_box.size, coded.blocks.size // 2, coded.offsets.size, old_sum)
        message = coded.blocks.tobytes() + coded.offsets.tobytes() + elements.tobytes()
        self.headers.append(header)
        self.data.append(message.ljust(header.num_bytes(elements.itemsize), b"\0"))

    def add_whole(self) -> None:
        """A box that goes whole."""
        self.headers.append(Header(_WHOLE))
        self.data.append(b"")

    def extend(self, other: PackedChanges) -> None:
        """The boxes of another one behind these."""
        self.headers.extend(other.headers)
        self.data.extend(other.data)


@dataclass
class ChangesExchange:
    """One run of a plan that sends changes. The steps are called in the order in which they stand here.

    Each collective step begins with its exchange, which the step before has prepared: so no rank fails while others
    wait for it in an exchange.

    Args:
        sources, targets: Memory of this rank's two sides, as for ``Transport.exchange``. The sources as they were when
            the changes were found.
        sends, receives: Its tables.
        find: Finds the changes of the boxes that are sent.
    """

    sources: list[Tensor]
    targets: list[Tensor]
    sends: Tensor
    receives: Tensor
    find: Callable[[Sequence[Row]], PackedChanges]
    transport: Transport
    timeout_seconds: float

    def pack(self) -> None:
        """Makes what this rank sends. Not collective."""
        self._rows_out, self._rows_in = list(rows_of(self.sends)), list(rows_of(self.receives))
        self._headers_out, self._data_out = self.find(self._rows_out)
        width = len(Header._fields)
        numbers = torch.tensor(self._headers_out, dtype=torch.int64, device="cpu").reshape(-1)
        self._prepare_flat(numbers, [width] * len(self._rows_out), [width] * len(self._rows_in))

    def exchange_headers(self) -> None:
        """Collective."""
        self._exchange()
        received = self._received.cpu().view(-1, len(Header._fields))
        self._headers_in = [Header(*row) for row in received.tolist()]
        self._sizes_in = [
            header.num_bytes(self.targets[row.tensor].itemsize)
            for row, header in zip(self._rows_in, self._headers_in, strict=True)
        ]
        sizes_out = [len(part) for part in self._data_out]
        data = torch.empty(sum(sizes_out), dtype=torch.uint8, device="cpu")
        data.numpy()[:] = np.frombuffer(b"".join(self._data_out), dtype=np.uint8)
        self._prepare_flat(data, sizes_out, self._sizes_in)

    def exchange_changes(self) -> None:
        """Collective. The targets stay as they are."""
        self._exchange()
        received = self._received.cpu().numpy()
        items = [self.targets[row.tensor].itemsize for row in self._rows_in]
        self._counts = [max(0, header.num_changed) for header in self._headers_in]
        offsets = ops.change_offsets(items, self._counts)
        self._positions = torch.empty(sum(self._counts), dtype=torch.int64, device="cpu")
        self._values = torch.empty(offsets[-1], dtype=torch.uint8, device="cpu")
        positions, values = self._positions.numpy(), self._values.numpy()
        first_byte = first = 0
        for header, item, size, offset in zip(self._headers_in, items, self._sizes_in, offsets, strict=False):
            if header.num_changed > 0:
                data_of_box = received[first_byte : first_byte + size]
                positions[first : first + header.num_changed], own = _unpacked(data_of_box, header, item)
                values[offset : offset + own.size] = own
            first_byte, first = first_byte + size, first + max(0, header.num_changed)
        sends, receives = (
            table_of(row for row, header in zip(rows, headers, strict=True) if header.num_changed == _WHOLE)
            for rows, headers in ((self._rows_out, self._headers_out), (self._rows_in, self._headers_in))
        )
        self._prepare(self.sources, self.targets, sends, receives)

    def tensors_of_other_base(self) -> list[int]:
        """The tensors of this rank's target whose changed elements are not those that the changes replace."""
        if not self._rows_in:
            return []
        sums = _sums_at(self._parts_in(), self._positions, self._counts)
        return [
            row.tensor
            for row, header, total in zip(self._rows_in, self._headers_in, sums, strict=True)
            if header.num_changed > 0 and header.has_base and total != header.old_sum
        ]

    def exchange_whole(self) -> None:
        """Collective: boxes that go whole, from the sources into the targets."""
        self._exchange()

    def apply(self) -> None:
        """Writes the changed elements into the targets. Not collective."""
        parts = self._parts_in()
        if not parts:
            return
        device = parts[0].device
        with to_write(parts):
            shards, shapes = _shards_of(parts)
            positions, values = self._positions.to(device), self._values.to(device)
            ops.apply_changes_(parts, shards, shapes, positions, values, self._counts)

    @property
    def bytes_to(self) -> dict[int, int]:
        """Bytes of changes to each rank, this one among them; at the end."""
        return _bytes_of_peers(self._rows_out, self._headers_out, self.sources)

    @property
    def bytes_from(self) -> dict[int, int]:
        """Bytes of changes from each rank; at the end."""
        return _bytes_of_peers(self._rows_in, self._headers_in, self.targets)

    def _parts_in(self) -> list[Tensor]:
        return [part_of(self.targets[row.tensor].detach(), row) for row in self._rows_in]

    def _prepare_flat(self, flat: Tensor, sizes_out: Sequence[int], sizes_in: Sequence[int]) -> None:
        """The next exchange is of consecutive parts of a flat tensor, one per row; ``_received`` gets what comes."""
        device = next((tensor.device for tensor in (*self.sources, *self.targets)), torch.device("cpu"))
        self._received = torch.empty(sum(sizes_in), dtype=flat.dtype, device=device)
        sends, receives = flat_table(self._rows_out, sizes_out), flat_table(self._rows_in, sizes_in)
        self._prepare([flat.to(device)], [self._received], sends, receives)

    def _prepare(self, sources: list[Tensor], targets: list[Tensor], sends: Tensor, receives: Tensor) -> None:
        seconds = self.timeout_seconds
        self._exchange = partial(
            self.transport.exchange, sources, targets, sends, receives, number=0, timeout_seconds=seconds
        )


def whole_sources(sources: list[Tensor], changes: Changes) -> list[Tensor]:
    """The sources; those that go whole as they were when the changes were found."""
    result = list(sources)
    for tensor, values in changes.whole.items():
        result[tensor] = values.to(result[tensor].device)
    return result


def packed_changes(rows: Sequence[Row], changes: Changes | None) -> PackedChanges:
    """Of each box of a rank's tensors what a snapshot has found in it; ``None`` of a rank that has no tensors."""
    if changes is None:
        return PackedChanges([Header()] * len(rows), [b""] * len(rows))
    value_offsets = ops.change_offsets(changes.item_bytes, changes.counts)
    first_of = np.cumsum([0, *changes.counts])
    positions, values = changes.positions.numpy(), changes.values.numpy()
    packed = PackedChanges([], [])
    selected = []
    for row in rows:
        if row.tensor in changes.whole:
            packed.add_whole()
            selected.append(np.empty(0, dtype=np.int64))
            continue
        held, item_bytes = changes.tensors[row.tensor], changes.item_bytes[row.tensor]
        own = positions[first_of[row.tensor] : first_of[row.tensor + 1]]
        (chunk,) = part_of_shard(held.shard, row.offsets, row.sizes).chunks  # no more: a plan moves parts of chunks
        in_box, indices = _core.select_positions(own, held.global_shape, chunk.offsets, row.sizes)
        begin = value_offsets[row.tensor]
        packed.add(in_box, values[begin : begin + item_bytes * own.size].view(_WORDS[item_bytes])[indices])
        selected.append(in_box)
    if not changes.base:
        return PackedChanges([header._replace(has_base=0) for header in packed.headers], packed.data)
    if rows:
        parts = [part_of(changes.base[row.tensor], row) for row in rows]
        flat = torch.from_numpy(np.concatenate(selected))
        sums = _sums_at(parts, flat, [of_row.size for of_row in selected])
        headers = [header._replace(old_sum=total) for header, total in zip(packed.headers, sums, strict=True)]
        return PackedChanges(headers, packed.data)
    return packed


def packed_found(found: Found, item_bytes: Sequence[int]) -> PackedChanges:
    """Of boxes that were compared one by one, as tensors of their own, what was found in each."""
    value_offsets = ops.change_offsets(item_bytes, found.counts)
    first_of = np.cumsum([0, *found.counts])
    positions, values = found.positions.numpy(), found.values.numpy()
    packed = PackedChanges([], [])
    for at, (size, count) in enumerate(zip(item_bytes, found.counts, strict=True)):
        if at in found.whole:
            packed.add_whole()
            continue
        begin = value_offsets[at]
        elements: npt.NDArray[Any] = values[begin : begin + size * count].view(_WORDS[size])
        packed.add(positions[first_of[at] : first_of[at + 1]], elements, old_sum=found.old_sums[at])
    return packed


def _unpacked(
    data: npt.NDArray[np.uint8], header: Header, item_bytes: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]:
    """Positions and values of a box. The header's numbers are those of the sender."""
    ends = np.cumsum([8 * header.num_blocks, 2 * header.num_offsets, item_bytes * header.num_changed])
    blocks, offsets, values, _ = np.split(data, ends)
    coded = _core.PositionBlocks(blocks.view(np.int32), offsets.view(np.uint16))
    return coded.decode(), values


def _sums_at(parts: Sequence[Tensor], positions: Tensor, counts: Sequence[int]) -> list[int]:
    shards, shapes = _shards_of(parts)
    with torch.no_grad():
        sums, _ = ops.sum_elements(parts, shards, shapes, positions.to(parts[0].device), counts)
    numbers: list[int] = sums.tolist()
    return numbers


def _shards_of(parts: Sequence[Tensor]) -> tuple[list[LocalShard], list[tuple[int, ...]]]:
    """Each box as a global tensor of its own, and as the only shard of it."""
    shapes = [tuple(part.shape) for part in parts]
    return [shard_of_box((0,) * len(sizes), sizes) for sizes in shapes], shapes


def _bytes_of_peers(rows: Sequence[Row], headers: Sequence[Header], tensors: Sequence[Tensor]) -> dict[int, int]:
    num_bytes: dict[int, int] = {}
    for row, header in zip(rows, headers, strict=True):
        item_bytes = dtype_of(row, tensors).itemsize
        of_box = math.prod(row.sizes) * item_bytes if header.num_changed == _WHOLE else header.num_bytes(item_bytes)
        num_bytes[row.peer] = num_bytes.get(row.peer, 0) + of_box
    return num_bytes


@dataclass(frozen=True)
class OfferedChanges:
    """What a rank tells the others of changes, before a run.

    Attributes:
        versions: Of their base and of what they lead to; ``None`` where the rank gives none.
        has_source, has_target: Whether the rank has a part of the side.
        target_version: What its target holds.
    """

    versions: tuple[int, int] | None
    has_source: bool
    has_target: bool
    target_version: int | None


def changes_problems(offers: Sequence[OfferedChanges]) -> list[Problem]:
    """Why changes cannot be sent, as far as their versions say. ``offers`` by rank."""
    given = {offer.versions for offer in offers if offer.versions is not None}
    if not given:
        return []
    lacking = [rank for rank, offer in enumerate(offers) if offer.has_source and offer.versions is None]
    if lacking:
        what = f"were not given on rank(s) {named(lacking)}, which have a part of the source"
        return [Problem("ranks_disagree", "changes", what)]
    if len(given) > 1:
        return differing_versions([offer.versions for offer in offers])
    base, version = next(iter(given))
    other = {offer.target_version for offer in offers if offer.has_target and offer.target_version != base}
    return [
        Problem(
            "other_base",
            "changes",
            f"lead from version {base} to {version}, and the target holds "
            f"{'no known version' if held is None else f'version {held}'}; "
            f"send the changes from there, or run the plan without changes and with version={version}",
        )
        for held in sorted(other, key=lambda held: -1 if held is None else held)
    ]


def why_not_sent(changes: Changes, source: Endpoint, changed: Sequence[str]) -> list[Problem]:
    """Why this rank's changes cannot travel over a plan with this source, and with keys that change on their way."""
    kinds = source.kinds()
    other = [fqn for fqn in {**kinds, **changes.kinds} if kinds.get(fqn) != changes.kinds.get(fqn)]
    if other or [held.fqn for held in changes.tensors] != source.names:
        what = "are of other tensors than the source that was planned, or of tensors of other dtypes or layouts"
        return [Problem("other_base", "changes", f"{what}: {named(other or source.names)}")]
    what = (
        "is cast or mapped on its way, which changes cannot follow; plan it with keep_sent=True, and run it with "
        "changed_only=True"
    )
    return [Problem("wrong_dtype", fqn, what) for fqn in changed]
