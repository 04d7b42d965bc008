"""Saves that go on while training does: copy, then plan and write in a thread, or in a process of their own."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.storage import StorageWriter

from torchtitan_ext.checkpoint.operation.child_save import SaveInChild
from torchtitan_ext.checkpoint.operation.phases import Phases
from torchtitan_ext.checkpoint.operation.save_job import SaveJob
from torchtitan_ext.checkpoint.operation.save_phases import SaveResult, ask_for_states, save_values, writer_at
from torchtitan_ext.checkpoint.operation.soft_failure import save_with_retries
from torchtitan_ext.checkpoint.operation.unasked import SaveFuture, note_failure, raise_unasked
from torchtitan_ext.checkpoint.staging.copies import StateMemory
from torchtitan_ext.checkpoint.staging.portions import Portions
from torchtitan_ext.checkpoint.staging.stager import CpuStager, flat_bytes
from torchtitan_ext.errors import WrongValueError, clear_frames
from torchtitan_ext.ranks.side_group import GroupOffer
from torchtitan_ext.storage import FileWriter
from torchtitan_ext.storage.weights.writer import SafetensorsWriter
from torchtitan_ext.threads import naming_the_limit

logger = logging.getLogger(__name__)

_COPYING = "values were copied to the CPU"


class _SaveHere:
    """A save by this process: of copies, or of the caller's own tensors in portions."""

    group_name: str | None = None

    def __init__(self, values: dict[str, Any], portions: Portions | None = None) -> None:
        self.portions = portions
        self._values = values

    def run(self, writer: StorageWriter, job: SaveJob, phases: Phases, offers: Sequence[GroupOffer]) -> SaveResult:
        return save_values(self._values, writer, job, phases, self.portions)

    @property
    def is_complete(self) -> bool:
        """Whether all of the state is still there: the caller goes on when the rest of portions is written."""
        return self.portions is None or not (self.portions.rest_is_written.is_set() or self.portions.is_given_up)

    def clear(self) -> None:
        self._values = {}
        if self.portions is not None:
            self.portions.clear()


def save_in_background(
    state_dict: dict[str, Any], job: SaveJob, phases: Phases, stager: AsyncStager
) -> Future[SaveResult]:
    """Copies the state dict, then saves the copy in a thread, which may leave the work to a child. Collective.

    Returns when the caller may change the state dict: at once, or where a ``CpuStager`` may not copy all of it, when
    the rest is written. When the save has ended nothing holds the copies, for which the next save may wait: neither the
    planner, which may be used again, nor an exception, which may be kept.
    """
    saved = SaveFuture(warns=job.on_storage_error.on_error == "warn", prints=phases.is_coordinator)
    staged: _SaveHere | SaveInChild = _SaveHere({})

    def stage() -> tuple[GroupOffer | None, GroupOffer]:
        nonlocal staged
        staged = _staged_by(stager, values, writer, phases)
        with naming_the_limit():
            thread.submit(int).result()  # begins here, where all ranks hear of it if it cannot
        return phases.offer_side_group(), GroupOffer(staged.group_name, uuid.uuid4().hex)

    def save_staged() -> SaveResult:
        try:
            with phases:
                try:
                    return save_with_retries(run, job, phases, can_go_on=lambda: staged.is_complete)
                except BaseException as error:
                    note_failure(phases, saved, error)
                    raise
        except BaseException as error:
            clear_frames(error)
            raise
        finally:
            staged.clear()
            if "state_dict" in vars(job.planner):  # as planners derived from the default one have it
                job.planner.state_dict = {}  # type: ignore[attr-defined]

    def run(attempt: SaveJob) -> SaveResult:
        return staged.run(writer if attempt is job else writer_at(attempt), attempt, phases, offers_of_children)

    thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="torchtitan_ext.async_save")
    try:
        raise_unasked(phases)
        values, job = ask_for_states(state_dict, job, phases)
        writer = writer_at(job)
        offers, offers_of_children = zip(*phases.on_all("stage", stage, doing=_COPYING), strict=True)
        phases.use_side_group(offers)
        saved.set_running_or_notify_cancel()
    except BaseException as error:
        staged.clear()
        phases.close(error)
        thread.shutdown(wait=False)
        raise
    # From here on the values and the phases are the thread's, even where an interrupt ends this call.
    thread.submit(_finish, save_staged, saved)
    thread.shutdown(wait=False)
    if isinstance(staged, _SaveHere) and staged.portions is not None:
        _wait_for_rest(staged.portions, saved)
    return saved


def _staged_by(
    stager: AsyncStager, values: dict[str, Any], writer: StorageWriter, phases: Phases
) -> _SaveHere | SaveInChild:
    if not isinstance(stager, CpuStager):
        staged = stager.stage(values)
        return _SaveHere(staged.result() if isinstance(staged, Future) else staged)
    if stager.process:
        return SaveInChild(values, stager, phases)
    portions = _portions_of(values, stager, writer)
    return _SaveHere(stager.stage(values)) if portions is None else _SaveHere(dict(values), portions)


def _portions_of(values: dict[str, Any], stager: CpuStager, writer: StorageWriter) -> Portions | None:
    """The portions of a save, where the stager has no room for all of the state.

    The thread that writes them has streams of its own: what the caller's have to do for the state is done here.

    Raises:
        WrongValueError: The storage writes in an order of its own.
    """
    if stager.host_memory_bytes is None:
        return None
    tensors = StateMemory(values).tensors
    num_bytes = flat_bytes(tensors)
    if stager.has_room(num_bytes):
        return None
    if not isinstance(writer, (FileWriter, SafetensorsWriter)):
        raise WrongValueError(
            f"async_save: the state needs {num_bytes} bytes of host memory, host_memory_bytes is "
            f"{stager.host_memory_bytes}, and only a FileWriter writes a state in portions; this save has a "
            f"{type(writer).__name__}"
        )
    accelerator = torch.accelerator.current_accelerator()
    for device in {tensor.device for tensor in tensors}:
        if accelerator is not None and device.type == accelerator.type:
            torch.accelerator.current_stream(device).synchronize()
    return Portions(stager)


def _finish(save: Callable[[], SaveResult], saved: SaveFuture) -> None:
    try:
        saved.set_result(save())
    except BaseException as error:
        saved.set_exception(error)
    finally:
        del save, saved  # which the error's frames would hold


def _wait_for_rest(portions: Portions, saved: SaveFuture) -> None:
    saved.add_done_callback(lambda _: portions.rest_is_written.set())
    try:
        portions.rest_is_written.wait()
    except BaseException:
        portions.is_given_up = saved.was_asked = True  # nobody gets the future
        raise
    logger.info(
        "async_save: the state is larger than host_memory_bytes: %d bytes of it were written before the call returned",
        portions.rest_bytes,
    )
