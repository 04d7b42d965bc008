"""How changes travel over the plan of a transfer: of each box only the elements that changed.

Both ends of a box know it by its place in their tables, so an element is known by its position in the row-major order
of the box. Three exchanges: how much of each box follows; the changed elements; and, when all ranks have seen that
their targets are what the changes were made from, the boxes that go whole.
"""

from __future__ import annotations

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
from torchtitan_ext.layout.layout import LocalShard, shard_of_box
from torchtitan_ext.transfer.changed.changes import Changes, differing_versions
from torchtitan_ext.transfer.endpoint import Endpoint
from torchtitan_ext.transfer.transport import GroupTransport, exchange_table, part_of


@dataclass
class ChangesExchange:
    """One run of a plan that sends changes. The steps are called in the order in which they stand here.

    Each collective step begins with its exchange, which the step before has prepared: so no rank fails while others
    wait for it in an exchange.

    Args:
        sources, targets: Memory of this rank's two sides, as for ``GroupTransport.exchange``. The sources as they were
            when the changes were found.
        sends, receives: Its tables.
        find: Finds the changes of the boxes that are sent.
    """

    sources: list[Tensor]
    targets: list[Tensor]
    sends: Tensor
    receives: Tensor
    find: Callable[[_core.ExchangeTable], _core.OutgoingChanges]
    transport: GroupTransport
    timeout_seconds: float

    def pack(self) -> None:
        """Makes what this rank sends. Not collective."""
        self._out = self.find(exchange_table(self.sends, self.sources))
        receives = exchange_table(self.receives, self.targets)
        self._in = _core.IncomingChanges(receives, [tensor.itemsize for tensor in self.targets])
        self._boxes_in = _Boxes.of([part_of(self.targets[box.tensor].detach(), box) for box in receives.boxes])
        tables = self._out.headers_table, self._in.headers_table
        self._prepare_flat(self._out.headers, self._in.num_header_numbers, *tables)

    def exchange_headers(self) -> None:
        """Collective."""
        self._exchange()
        self._in.take_headers(self._received.cpu().numpy())
        self._prepare_flat(self._out.data, self._in.num_data_bytes, self._out.data_table, self._in.data_table)

    def exchange_changes(self) -> None:
        """Collective. The targets stay as they are."""
        self._exchange()
        self._positions, self._values = map(torch.from_numpy, self._in.unpack(self._received.cpu().numpy()))
        self._prepare(self.sources, self.targets, self._out.whole_table, self._in.whole_table)

    def tensors_of_other_base(self) -> list[int]:
        """The tensors of this rank's target whose changed elements are not those that the changes replace."""
        return self._in.tensors_of_other_base(_sums_at(self._boxes_in, self._positions, self._in.counts))

    def exchange_whole(self) -> None:
        """Collective: boxes that go whole, from the sources into the targets."""
        self._exchange()

    def apply(self) -> None:
        """Writes the changed elements into the targets. Not collective."""
        parts, shards, shapes = self._boxes_in
        if not parts:
            return
        device = parts[0].device
        with to_write(parts):
            positions, values = self._positions.to(device), self._values.to(device)
            ops.apply_changes_(parts, shards, shapes, positions, values, self._in.counts)

    @property
    def bytes_to(self) -> dict[int, int]:
        """Bytes of changes to each rank, this one among them; at the end."""
        return self._out.bytes_of_peer

    @property
    def bytes_from(self) -> dict[int, int]:
        """Bytes of changes from each rank; at the end."""
        return self._in.bytes_of_peer

    def _prepare_flat(
        self, flat: npt.NDArray[Any], num_received: int, sends: npt.NDArray[np.int64], receives: npt.NDArray[np.int64]
    ) -> None:
        """The next exchange is of ranges of a flat tensor; ``_received`` gets what comes."""
        device = next((tensor.device for tensor in (*self.sources, *self.targets)), torch.device("cpu"))
        source = torch.from_numpy(flat).to(device)
        self._received = torch.empty(num_received, dtype=source.dtype, device=device)
        self._prepare([source], [self._received], sends, receives)

    def _prepare(
        self,
        sources: list[Tensor],
        targets: list[Tensor],
        sends: npt.NDArray[np.int64],
        receives: npt.NDArray[np.int64],
    ) -> None:
        tables, seconds = map(torch.from_numpy, (sends, receives)), self.timeout_seconds
        self._exchange = partial(self.transport.exchange, sources, targets, *tables, number=0, timeout_seconds=seconds)


def whole_sources(sources: list[Tensor], changes: Changes) -> list[Tensor]:
    """The sources; those that go whole as they were when the changes were found."""
    result = list(sources)
    for tensor, values in changes.whole.items():
        result[tensor] = values.to(result[tensor].device)
    return result


def packed_changes(table: _core.ExchangeTable, changes: Changes | None) -> _core.OutgoingChanges:
    """Of each box of a rank's tensors what a snapshot has found in it; ``None`` of a rank that has no tensors."""
    packed = _core.PackedBoxes()
    if changes is not None:
        found = (
            changes.item_bytes,
            changes.counts,
            list(changes.whole),
            changes.positions.numpy(),
            changes.values.numpy(),
        )
        packed.add_parts(*found, table, [(held.global_shape, held.shard.chunks) for held in changes.tensors])
        if changes.base:
            boxes = _Boxes.of([part_of(changes.base[box.tensor], box) for box in table.boxes])
            packed.set_old_sums(_sums_at(boxes, torch.from_numpy(packed.positions), packed.counts))
    return _core.OutgoingChanges(table, packed, range(len(packed)))


class _Boxes(NamedTuple):
    """Parts of tensors, each as a global tensor of its own, and as the only shard of it."""

    parts: Sequence[Tensor]
    shards: Sequence[LocalShard]
    shapes: Sequence[tuple[int, ...]]

    @staticmethod
    def of(parts: Sequence[Tensor]) -> _Boxes:
        shapes = [tuple(part.shape) for part in parts]
        return _Boxes(parts, [shard_of_box((0,) * len(sizes), sizes) for sizes in shapes], shapes)


def _sums_at(boxes: _Boxes, positions: Tensor, counts: Sequence[int]) -> list[int]:
    """Of each part the sum of the hashes of its elements at positions."""
    if not boxes.parts:
        return []
    with torch.no_grad():
        sums, _ = ops.sum_elements(*boxes, positions.to(boxes.parts[0].device), counts)
    numbers: list[int] = sums.tolist()
    return numbers


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
