"""Rounds of a load that shares reads: this rank reads its parts while those of the round before travel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.distributed.checkpoint.planner import ReadItem

from torchtitan_ext import _core, ops
from torchtitan_ext.checkpoint.operation.component_plans import PlannedSource
from torchtitan_ext.checkpoint.operation.phases import Phases
from torchtitan_ext.checkpoint.operation.sharing.requests import ShareDecision
from torchtitan_ext.checkpoint.planners.items import in_file_order
from torchtitan_ext.checkpoint.tables.key_table import unpack

R = TypeVar("R")


class Rounds:
    """The rounds of one load on this rank."""

    def __init__(
        self,
        source: PlannedSource,
        reads: _core.RankReads,
        decision: ShareDecision,
        phases: Phases,
        reader: ThreadPoolExecutor,
    ) -> None:
        assert decision.part is not None, "ranks share nothing, please report"
        reads.share(unpack(decision.part))
        self._source = source
        self._reads = reads
        self._decision = decision
        self._phases = phases
        self._reader = reader
        self._unsent: list[_Sent] = []

    def step(self, number: int | None) -> None:
        """Reads this rank's part of a round, if one is left, while the one before travels. Collective."""

        def read() -> None:
            self._unsent = []
            if number is not None:
                found = self._reads.reads(number)
                self._unsent = self._prepare(number)
                self._source.read(in_file_order(found.items, self._source.ours.metadata))

        def work() -> None:
            unsent = self._unsent
            if not unsent:
                return read()
            # Whatever fails in the other thread: this rank takes part in the exchange, for which others wait.
            reading = self._reader.submit(_like_this_thread(read))
            try:
                self._exchange(unsent)
            finally:
                error = reading.exception()  # nothing is left behind that writes into targets
            if error is not None:
                raise error

        self._phases.on_all("read", work)

    def _prepare(self, number: int) -> list[_Sent]:
        """What a round sends to those who want it too, once it is read, per device."""
        prepared = []
        for device, name in enumerate(self._decision.devices):
            found = self._reads.exchange(number, device)
            sources, targets = ([self._tensor_of(item) for item in side] for side in (found.sources, found.targets))
            tables = torch.from_numpy(found.sends), torch.from_numpy(found.receives)
            prepared.append(_Sent(name, sources, targets, *tables))
        return prepared

    def _exchange(self, unsent: Sequence[_Sent]) -> None:
        for sent in unsent:
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
                torch.cuda.current_stream().synchronize()  # what fails on the device fails in this phase

    def _tensor_of(self, item: ReadItem) -> Tensor:
        return self._source.ours.resolve_tensor(item).detach()


class _Sent(NamedTuple):
    """The arguments of an exchange between targets on one kind of device."""

    device: str
    sources: list[Tensor]
    targets: list[Tensor]
    sends: Tensor
    receives: Tensor


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
