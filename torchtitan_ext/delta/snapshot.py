"""A version of a state to which later ones are compared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import NoneType

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_ext import ops
from torchtitan_ext.checkpoint.operation.arguments import check_seconds
from torchtitan_ext.checkpoint.operation.phases import TIMEOUT_SECONDS
from torchtitan_ext.checkpoint.tables.key_table import BoxesEntry, TensorEntry
from torchtitan_ext.checkpoint.tables.tensor_sums import TensorSummer, TensorSums, with_numbers
from torchtitan_ext.delta.held import agree_on_steps, held_tensors
from torchtitan_ext.errors import Problem, WrongValueError, check_argument, check_counts, refusal
from torchtitan_ext.layout.layout import ShardOrder
from torchtitan_ext.ranks.exchange import check_usable
from torchtitan_ext.transfer.changes import Changes, HeldTensor
from torchtitan_ext.transfer.endpoint import Endpoint, State, describe_endpoint
from torchtitan_ext.transfer.phases import transfer_phases

_OFFSET_BYTES = 2  # of a position inside its block


class Snapshot:
    """A version of the tensors of a state, to find what later versions change. Copies them to host memory.

    Args:
        state: A nested state dict of tensors, of any layout that ``tte.save`` takes, or a module; ``None`` on a rank
            that has no part of it. Values that are no tensors are refused.
        version: The number of this version, such as the training step.
        group: Ranks that hold the state; the default group if left out. Collective over it.
        layouts: Sharding orders that placements cannot express, by canonical fqn or glob.
        timeout_seconds: How long a rank waits for the others.

    Attributes:
        version: Of the state that it holds now.

    Raises:
        StateRefusedError: (a subclass) The state cannot be described, on some rank; the same on every rank.
        LostRankError: A rank is gone or does not take part.
    """

    def __init__(
        self,
        state: State,
        *,
        version: int = 0,
        group: dist.ProcessGroup | None = None,
        layouts: Mapping[str, ShardOrder] | None = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> None:
        check_argument("Snapshot", "group", group, (dist.ProcessGroup, NoneType), "a process group or None")
        check_usable("Snapshot", group)
        check_counts("Snapshot", version=version)
        check_seconds("Snapshot", timeout_seconds)
        self.version = version
        self._layouts = layouts
        self._endpoint = describe_endpoint("source", state, layouts, is_filled=False)
        with transfer_phases(group, timeout_seconds) as phases:
            steps = agree_on_steps(phases, self._endpoint, "snapshot", every_rank_reports=True)
            phases.on_all("copy", lambda: self._copy(steps), doing="ranks copied their tensors")
        self._changes: Changes | None = None

    @property
    def num_bytes(self) -> int:
        """Host memory of the copies."""
        return sum(tensor.numel() * tensor.itemsize for tensor in self._base)

    def changes(self, state: State = None, *, version: int | None = None) -> Changes:
        """What differs from the snapshot now, by bits. Not collective; reads both versions once.

        Args:
            state: The later version: of the same keys, shapes and layouts; by default what the snapshot was made of.
            version: Its number; one more than the snapshot's by default.

        Raises:
            StateRefusedError: The state has other tensors or another layout than the snapshot.
        """
        version = self.version + 1 if version is None else version
        check_counts("Snapshot.changes", version=version)
        if version <= self.version:
            raise WrongValueError(f"Snapshot.changes: got version={version}, expected more than {self.version}")
        endpoint = (
            self._endpoint if state is None else describe_endpoint("source", state, self._layouts, is_filled=False)
        )
        problems = list(endpoint.problems)
        if state is None and (reason := endpoint.why_changed()) is not None:
            problems = [Problem("cannot_reshard", "state", f"{reason}; pass the state to changes()")]
        elif endpoint.table.message != self._endpoint.table.message:
            what = "has other tensors or layouts than the snapshot; make a new snapshot"
            problems.append(Problem("cannot_reshard", "state", what))
        if problems:
            raise refusal("changes", problems)
        found = _Found.of(endpoint.memory_to_read(), self._base, self._held)
        replaced = {fqn: of_key._replace(sums=dict.fromkeys(of_key.sums, 0)) for fqn, of_key in self._sums.items()}
        after = {fqn: of_key._replace(sums=dict(of_key.sums)) for fqn, of_key in self._sums.items()}
        for held, old, new in zip(self._held, found.old_sums, found.new_sums, strict=True):
            if held.box in after[held.fqn].sums:
                replaced[held.fqn].sums[held.box] = old % 2**64  # type: ignore[index]
                total = after[held.fqn].sums[held.box]
                after[held.fqn].sums[held.box] = (total - old + new) % 2**64  # type: ignore[index]
        self._changes = Changes(
            base_version=self.version,
            version=version,
            tensors=self._held,
            item_bytes=[tensor.itemsize for tensor in self._base],
            counts=found.counts,
            positions=found.positions,
            values=found.values,
            whole=found.whole,
            base=self._base,
            before=self._sums,
            replaced=replaced,
            after=after,
        )
        return self._changes

    def advance(self) -> None:
        """Makes the version of the last ``changes`` the snapshot's own. Not collective.

        To be called when the changes were saved or sent: after an error there they are found again, from the same base.

        Raises:
            WrongValueError: ``changes`` was not called since.
        """
        changes = self._changes
        if changes is None:
            raise WrongValueError("Snapshot.advance: call changes() first")
        self._changes = None
        shards, shapes = [held.shard for held in self._held], [held.global_shape for held in self._held]
        with torch.no_grad():
            ops.apply_changes_(self._base, shards, shapes, changes.positions, changes.values, changes.counts)
            for tensor, values in changes.whole.items():
                self._base[tensor].copy_(values)
        self._sums = dict(changes.after)
        self.version = changes.version

    def _copy(self, steps: Mapping[str, tuple[tuple[int, int, int], ...]]) -> None:
        self._held: list[HeldTensor] = held_tensors(self._endpoint, dict(steps))
        pin = torch.accelerator.is_available()
        self._base: list[Tensor] = []
        with torch.no_grad():
            for tensor in self._endpoint.memory_to_read():
                copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pin)
                self._base.append(copy.copy_(tensor))
        self._sums = _sums_of(self._endpoint, steps)


def _sums_of(endpoint: Endpoint, steps: Mapping[str, tuple[tuple[int, int, int], ...]]) -> dict[str, TensorSums]:
    summer, sums = TensorSummer(), {}
    for fqn, entry in endpoint.entries.items():
        if isinstance(entry, TensorEntry | BoxesEntry):
            sums[fqn] = summer.sum(endpoint.values[fqn], entry, steps.get(fqn))
    return with_numbers(sums)


@dataclass
class _Found:
    """What differs in a list of tensors; see ``Changes``."""

    counts: list[int]
    positions: Tensor
    values: Tensor
    whole: dict[int, Tensor]
    old_sums: list[int]
    new_sums: list[int]

    @staticmethod
    def of(new: list[Tensor], base: list[Tensor], held: list[HeldTensor]) -> _Found:
        parts = [_Found._of_batch(new, base, held, batch) for batch in _batches(new)]
        if len(parts) == 1:
            return parts[0]
        counts = [count for part in parts for count in part.counts]
        sizes = ops.change_offsets([tensor.itemsize for tensor in new], counts)
        values = torch.empty(sizes[-1], dtype=torch.uint8, device="cpu")
        first = 0
        for part in parts:
            begin = sizes[first] if part.counts else 0
            values[begin : begin + part.values.numel()] = part.values
            first += len(part.counts)
        no_positions = torch.empty(0, dtype=torch.int64, device="cpu")
        return _Found(
            counts=counts,
            positions=torch.cat([no_positions, *(part.positions for part in parts)]),
            values=values,
            whole={tensor: values for part in parts for tensor, values in part.whole.items()},
            old_sums=[total for part in parts for total in part.old_sums],
            new_sums=[total for part in parts for total in part.new_sums],
        )

    @staticmethod
    def _of_batch(all_new: list[Tensor], all_base: list[Tensor], all_held: list[HeldTensor], batch: range) -> _Found:
        """Of the tensors at some positions, where they lie; the base comes there."""
        new, held = [all_new[at].detach() for at in batch], [all_held[at] for at in batch]
        base = [all_base[at].to(all_new[at].device, non_blocking=True) for at in batch]
        shards, shapes = [one.shard for one in held], [one.global_shape for one in held]
        with torch.no_grad():
            mask, num_changed = ops.mark_changes(new, base)
            counts = num_changed.tolist()
            is_whole = [
                count > 0 and count * (tensor.itemsize + _OFFSET_BYTES) >= tensor.numel() * tensor.itemsize
                for count, tensor in zip(counts, new, strict=True)
            ]
            counts = [0 if whole else count for count, whole in zip(counts, is_whole, strict=True)]
            num_bytes = ops.change_offsets([tensor.itemsize for tensor in new], counts)[-1]
            device = mask.device
            positions = torch.empty(sum(counts), dtype=torch.int64, device=device)
            values = torch.empty(num_bytes, dtype=torch.uint8, device=device)
            sums = ops.changed_elements_(new, base, shards, shapes, mask, counts, positions, values)
            old_sums, new_sums = sums.tolist()
            whole = {}
            for at, goes_whole in enumerate(is_whole):
                if not goes_whole:
                    continue
                whole[batch[at]] = new[at].to("cpu", copy=True, memory_format=torch.contiguous_format)
                old_sums[at] = _sum_of(base[at], held[at])
                new_sums[at] = _sum_of(new[at], held[at])
        return _Found(counts, positions.cpu(), values.cpu(), whole, old_sums, new_sums)


def _sum_of(tensor: Tensor, held: HeldTensor) -> int:
    return int(ops.fingerprint_shard(tensor, held.shard, held.global_shape).item())


def _batches(tensors: list[Tensor]) -> Iterator[range]:
    """Ranges of tensors that are compared at once: all in host memory; elsewhere the base comes there in parts."""
    if all(tensor.device.type == "cpu" for tensor in tensors):
        yield range(len(tensors))
        return
    first = num_bytes = 0
    for at, tensor in enumerate(tensors):
        if at > first and num_bytes + tensor.numel() * tensor.itemsize > ops.DEFAULT_BUCKET_BYTES:
            yield range(first, at)
            first, num_bytes = at, 0
        num_bytes += tensor.numel() * tensor.itemsize
    yield range(first, len(tensors))
