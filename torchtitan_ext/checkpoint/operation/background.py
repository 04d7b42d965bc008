"""Saves that go on while training does: copy, then plan and write in a thread."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from torch.distributed.checkpoint.staging import AsyncStager

from torchtitan_ext.checkpoint.operation.phases import Phases
from torchtitan_ext.checkpoint.operation.save_job import SaveJob
from torchtitan_ext.checkpoint.operation.save_phases import SaveResult, ask_for_states, save_values, writer_at
from torchtitan_ext.checkpoint.operation.soft_failure import save_with_retries
from torchtitan_ext.checkpoint.operation.unasked import SaveFuture, note_failure, raise_unasked
from torchtitan_ext.errors import clear_frames
from torchtitan_ext.ranks.side_group import GroupOffer
from torchtitan_ext.threads import naming_the_limit

_COPYING = "values were copied to the CPU"


def save_in_background(
    state_dict: dict[str, Any], job: SaveJob, phases: Phases, stager: AsyncStager
) -> Future[SaveResult]:
    """Copies the state dict, then saves the copy in a thread. Collective.

    When the save has ended nothing holds the copies, for which the next save may wait: neither the planner, which may
    be used again, nor an exception, which may be kept.
    """
    saved = SaveFuture(warns=job.on_storage_error.on_error == "warn", prints=phases.is_coordinator)
    copied: dict[str, Any] = {}

    def stage() -> GroupOffer | None:
        nonlocal copied
        staged = stager.stage(values)
        copied = staged.result() if isinstance(staged, Future) else staged
        with naming_the_limit():
            thread.submit(int).result()  # begins here, where all ranks hear of it if it cannot
        return phases.offer_side_group()

    def save_copied() -> SaveResult:
        nonlocal copied
        try:
            with phases:
                try:
                    return save_with_retries(run, job, phases)
                except BaseException as error:
                    note_failure(phases, saved, error)
                    raise
        except BaseException as error:
            clear_frames(error)
            raise
        finally:
            copied = {}
            if "state_dict" in vars(job.planner):  # as planners derived from the default one have it
                job.planner.state_dict = {}  # type: ignore[attr-defined]

    def run(attempt: SaveJob) -> SaveResult:
        return save_values(copied, writer if attempt is job else writer_at(attempt), attempt, phases)

    thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="torchtitan_ext.async_save")
    try:
        raise_unasked(phases)
        values, job = ask_for_states(state_dict, job, phases)
        writer = writer_at(job)
        phases.use_side_group(phases.on_all("stage", stage, doing=_COPYING))
        saved.set_running_or_notify_cancel()
    except BaseException as error:
        copied = {}
        phases.close(error)
        thread.shutdown(wait=False)
        raise
    # From here on the values and the phases are the thread's, even where an interrupt ends this call.
    thread.submit(_finish, save_copied, saved)
    thread.shutdown(wait=False)
    return saved


def _finish(save: Callable[[], SaveResult], saved: SaveFuture) -> None:
    try:
        saved.set_result(save())
    except BaseException as error:
        saved.set_exception(error)
    finally:
        del save, saved  # which the error's frames would hold
