"""Rounds of a load that shares reads: this rank reads its parts while those of the round before travel."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass, replace
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.distributed.checkpoint.planner import ReadItem

from torchtitan_ext import _core, ops
from torchtitan_ext.checkpoint.operation.phases import Phases
from torchtitan_ext.checkpoint.operation.sharing.planned_reads import PlannedReads, bytes_of
from torchtitan_ext.checkpoint.operation.sharing.requests import ShareDecision
from torchtitan_ext.checkpoint.planners.items import items_of
from torchtitan_ext.checkpoint.tables.key_table import unpack

R = TypeVar("R")


class Rounds:
    """The rounds of one load on this rank.

    Attributes:
        done: What all ranks have done; the seconds are those of the slowest rank in each step.
    """

    def __init__(
        self,
        sources: Sequence[PlannedReads],
        decision: ShareDecision,
        phases: Phases,
        reader: ThreadPoolExecutor,
        doing: str,
        undefined: tuple[str, ...],
    ) -> None:
        self.done = Done()
        assert decision.part is not None, "ranks share nothing, please report"
        self._sources = sources
        self._decision = decision
        self._phases = phases
        self._reader = reader
        self._doing = doing
        self._undefined = undefined
        self._part = _core.SharedPart(unpack(decision.part))
        self._items = [item for source in sources for item in source.plan.items]
        self._source_of = [number for number, source in enumerate(sources) for _ in source.plan.items]
        self._own = self._own_by_round()
        self._unsent: list[list[_Sent]] = []

    @property
    def num_rounds(self) -> int:
        return self._part.num_rounds

    def forget(self) -> None:
        """What was read last is not sent to those who want it too."""
        self._unsent = []

    def step(self, rounds: Sequence[int], *, is_shared: bool = True) -> Done:
        """Reads rounds while the one before travels, on all ranks. Collective.

        Args:
            rounds: One, of which this rank reads its own part; or if not ``is_shared`` several, of which it reads all
                that it wants.

        Returns:
            The bytes of all ranks and the seconds of the slowest one.
        """

        def read() -> Done:
            parts = [part for number in rounds for part in self._reads_of(number, is_shared=is_shared)]
            self._unsent = [self._prepare(number, parts) for number in rounds] if is_shared else []
            return self._read(parts)

        def work() -> Done:
            begin, unsent = time.perf_counter(), self._unsent
            if not unsent:
                return read().after(begin)
            # Whatever fails in the other thread: this rank takes part in the exchange, for which others wait.
            reading = self._reader.submit(_like_this_thread(read))
            try:
                exchanged = self._exchange(unsent)
            finally:
                error = reading.exception()  # nothing is left behind that writes into targets
            if error is not None:
                raise error
            return (exchanged + reading.result()).after(begin)

        of_ranks = self._phases.on_all("read", work, doing=self._doing, undefined=self._undefined)
        done = Done(
            read_seconds=max(one.read_seconds for one in of_ranks),
            exchange_seconds=max(one.exchange_seconds for one in of_ranks),
            bytes_read=sum(one.bytes_read for one in of_ranks),
            bytes_received=sum(one.bytes_received for one in of_ranks),
            seconds=max(one.seconds for one in of_ranks),
        )
        self.done += done
        return done

    def _own_by_round(self) -> dict[int, list[_SourceItem]]:
        """What this rank reads for itself, in equal parts behind the rounds of a sample."""
        shared = set(self._part.items)
        own = [position for position in range(len(self._items)) if position not in shared]
        sizes = [bytes_of(self._items[one], self._sources[self._source_of[one]]) for one in own]
        first = len(self._decision.sample_bytes)
        num_rounds, total, before = self.num_rounds - first, sum(sizes), 0
        rounds: dict[int, list[_SourceItem]] = {}
        for position, num_bytes in zip(own, sizes, strict=True):
            number = first + min(num_rounds - 1, before * num_rounds // max(total, 1))
            rounds.setdefault(number, []).append(_SourceItem(self._source_of[position], self._items[position]))
            before += num_bytes
        return rounds

    def _reads_of(self, number: int, *, is_shared: bool) -> list[_SourceItem]:
        """What this rank reads in a round: the parts that it sends on come first."""
        parts = self._cut(self._part.reads(number, self._items, torch.Size))
        if not is_shared:
            parts += self._cut(self._part.receives(number, self._items, torch.Size))
        return parts + self._own.get(number, [])

    def _cut(self, columns: _core.PartColumns) -> list[_SourceItem]:
        items = items_of(
            ReadItem,
            type=columns.types,
            dest_index=columns.dest_indices,
            dest_offsets=columns.dest_offsets,
            storage_index=columns.storage_indices,
            storage_offsets=columns.storage_offsets,
            lengths=columns.lengths,
        )
        return [
            _SourceItem(self._source_of[position], item) for position, item in zip(columns.items, items, strict=True)
        ]

    def _read(self, parts: Sequence[_SourceItem]) -> Done:
        begin = time.perf_counter()
        for number, source in enumerate(self._sources):
            source.read([part.item for part in parts if part.source == number])
        num_bytes = sum(bytes_of(part.item, self._sources[part.source]) for part in parts)
        return Done(read_seconds=time.perf_counter() - begin, bytes_read=num_bytes)

    def _prepare(self, number: int, read: Sequence[_SourceItem]) -> list[_Sent]:
        """What a round sends to those who want it too, once it is read, per device."""
        received = self._cut(self._part.receives(number, self._items, torch.Size))
        prepared = []
        for device, name in enumerate(self._decision.devices):
            tables = self._part.exchange(number, device)
            sources = [self._tensor_of(read[position]) for position in tables.sources]
            targets = [self._tensor_of(received[position]) for position in tables.targets]
            prepared.append(_Sent(name, sources, targets, _as_tensor(tables.sends), _as_tensor(tables.receives)))
        return prepared

    def _exchange(self, rounds: Sequence[Sequence[_Sent]]) -> Done:
        begin, num_bytes = time.perf_counter(), 0
        for sent in (one for of_round in rounds for one in of_round):
            ops.exchange_runs_(
                sent.sources,
                sent.targets,
                sent.sends,
                sent.receives,
                group_name="" if self._phases.group is None else self._phases.group.group_name,
                digest=self._decision.number,
                timeout_seconds=self._phases.timeout_seconds,
            )
            if sent.device == "cuda":
                torch.cuda.current_stream().synchronize()  # else the time says nothing
            num_bytes += sum(target.nbytes for target in sent.targets)
        return Done(exchange_seconds=time.perf_counter() - begin, bytes_received=num_bytes)

    def _tensor_of(self, part: _SourceItem) -> Tensor:
        return self._sources[part.source].planner.resolve_tensor(part.item).detach()


class _SourceItem(NamedTuple):
    """An item, or a part of one, and the position of its source."""

    source: int
    item: ReadItem


class _Sent(NamedTuple):
    """The arguments of an exchange between targets on one kind of device."""

    device: str
    sources: list[Tensor]
    targets: list[Tensor]
    sends: Tensor
    receives: Tensor


@dataclass(frozen=True)
class Done:
    """What one rank has done in a step."""

    read_seconds: float = 0.0
    exchange_seconds: float = 0.0
    bytes_read: int = 0
    bytes_received: int = 0
    seconds: float = 0.0

    def __add__(self, other: Done) -> Done:
        return Done(*(mine + theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))

    def after(self, begin: float) -> Done:
        return replace(self, seconds=time.perf_counter() - begin)


def _like_this_thread(work: Callable[[], R]) -> Callable[[], R]:
    """Work for another thread, with what torch keeps per thread: the mode of autograd, and the current device."""
    is_inference = torch.is_inference_mode_enabled()
    is_grad = torch.is_grad_enabled()
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def on_other_thread() -> R:
        if device is not None:
            torch.cuda.set_device(device)
        with torch.inference_mode(is_inference), torch.set_grad_enabled(is_grad):
            return work()

    return on_other_thread


def _as_tensor(table: bytes) -> Tensor:
    if not table:
        return torch.empty(0, dtype=torch.int64, device="cpu")
    return torch.frombuffer(bytearray(table), dtype=torch.int64)
