"""A save on the thread of its caller, or behind it, for all calls that save."""

from __future__ import annotations

from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.staging import AsyncStager

from torchtitan_ext.checkpoint.operation.arguments import check_can_send_from_cpu, check_seconds
from torchtitan_ext.checkpoint.operation.background import save_in_background
from torchtitan_ext.checkpoint.operation.phases import TIMEOUT_SECONDS, Phases, checking_arguments
from torchtitan_ext.checkpoint.operation.save_job import SaveJob
from torchtitan_ext.checkpoint.operation.save_phases import SaveResult, ask_for_states, save_values, writer_at
from torchtitan_ext.checkpoint.operation.soft_failure import save_with_retries
from torchtitan_ext.checkpoint.operation.unasked import raise_unasked
from torchtitan_ext.checkpoint.staging.stager import CpuStager


@dataclass(frozen=True)
class Call:
    """A call of a save by its ranks. See ``tte.save``.

    Attributes:
        name: Of the function that was called; the same on every rank.
    """

    name: str
    process_group: dist.ProcessGroup | None = None
    no_dist: bool = False
    timeout_seconds: float = TIMEOUT_SECONDS

    def checking(self) -> AbstractContextManager[None]:
        """Around checks of arguments: what one rank refuses is raised on all. Collective where they raise."""
        return checking_arguments(self.name, self.process_group, no_dist=self.no_dist)

    def checked(self, job: SaveJob, state_dict: Any) -> SaveJob:
        """The job as a save needs it. Collective where it raises."""
        with self.checking():
            check_seconds(self.name, self.timeout_seconds)
            return job.checked(self.name, state_dict, self.process_group)

    def phases(self, job: SaveJob) -> Phases:
        return Phases(
            "save",
            self.process_group,
            no_dist=self.no_dist,
            path=job.path,
            timeout_seconds=self.timeout_seconds,
            call=self.name,
        )


def save_now(state_dict: dict[str, Any], job: SaveJob, call: Call) -> SaveResult:
    """Saves a state dict. Collective. Raises what ``tte.save`` raises."""
    job = call.checked(job, state_dict)
    with call.phases(job) as phases:
        raise_unasked(phases)
        values, job = ask_for_states(state_dict, job, phases)
        return save_with_retries(lambda attempt: save_values(values, writer_at(attempt), attempt, phases), job, phases)


def save_later(state_dict: dict[str, Any], job: SaveJob, call: Call, stager: AsyncStager | None) -> Future[SaveResult]:
    """Copies a state dict, and saves it in a thread. Collective. Raises what ``tte.async_save`` raises."""
    with call.checking():
        check_can_send_from_cpu(call.name, call.process_group)
    job = call.checked(job, state_dict)
    phases = call.phases(job)
    if stager is not None:
        return save_in_background(state_dict, job, phases, stager)
    made = CpuStager.of_one_save()
    try:
        saved = save_in_background(state_dict, job, phases, made)
    except BaseException:
        made.close()
        raise
    saved.add_done_callback(lambda _: made.close())
    return saved
