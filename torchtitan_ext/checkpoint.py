"""Save and load in one call, with the package's planners and its own errors instead of DCP's wrapper."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

from torchtitan_ext.errors import CheckpointFailedError, TorchtitanExtError
from torchtitan_ext.load_planner import LoadPlanner
from torchtitan_ext.save_planner import SavePlanner
from torchtitan_ext.staging import CpuStager


def save(
    state_dict: dict[str, Any],
    path: str | os.PathLike[str] | None = None,
    *,
    planner: SavePlanner | None = None,
    storage_writer: StorageWriter | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
) -> Metadata:
    """Saves a state dict; any layout, exactly. Collective over ``process_group``.

    Args:
        state_dict: Nested; DTensors on any mesh, plain tensors, ``Stateful`` objects, plain values.
        path: Directory of the checkpoint (``checkpoint_id``).
        planner: A ``SavePlanner`` with options other than the defaults.
        storage_writer: Any DCP storage writer; by default the stock file writer at ``path``.
        process_group: The ranks that take part; all by default.
        no_dist: Save from this process alone.

    Raises:
        StateRefusedError: Nothing was written; the same on every rank, listing all problems.
        CheckpointFailedError: A rank failed while planning or writing; names the ranks and their errors.
    """
    with _typed_errors("save"):
        return state_dict_saver.save(
            state_dict,
            checkpoint_id=path,
            storage_writer=storage_writer,
            planner=SavePlanner() if planner is None else planner,
            process_group=process_group,
            no_dist=no_dist,
        )


def load(
    state_dict: dict[str, Any],
    path: str | os.PathLike[str] | None = None,
    *,
    planner: LoadPlanner | None = None,
    storage_reader: StorageReader | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
) -> None:
    """Loads a checkpoint into a state dict of any layout, in place. Collective over ``process_group``.

    Args:
        state_dict: The targets; tensors are filled, other values replaced.
        path: Directory of the checkpoint (``checkpoint_id``).
        planner: A ``LoadPlanner`` with options other than the defaults.
        storage_reader: Any DCP storage reader; by default the stock file reader at ``path``.
        process_group: The ranks that take part; all by default.
        no_dist: Load into this process alone.

    Raises:
        StateRefusedError: No target was changed; the same on every rank, listing all problems.
        CheckpointFailedError: A rank failed while reading; targets may be part-written.
    """
    with _typed_errors("load"):
        state_dict_loader.load(
            state_dict,
            checkpoint_id=path,
            storage_reader=storage_reader,
            planner=LoadPlanner() if planner is None else planner,
            process_group=process_group,
            no_dist=no_dist,
        )


def async_save(
    state_dict: dict[str, Any],
    path: str | os.PathLike[str] | None = None,
    *,
    planner: SavePlanner | None = None,
    storage_writer: StorageWriter | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> Future[Metadata]:
    """Copies the state dict to the CPU (``staging``), then saves it in a thread. Collective over ``process_group``.

    Returns:
        A future of the metadata; it raises what ``save`` raises. The caller may change the state dict at once.
    """
    with _typed_errors("save"):
        response = state_dict_saver.async_save(
            state_dict,
            checkpoint_id=path,
            storage_writer=storage_writer,
            planner=SavePlanner() if planner is None else planner,
            process_group=process_group,
            async_stager=CpuStager(),
        )
    upload: Future[Any] = response.upload_completion if isinstance(response, AsyncSaveResponse) else response
    finished: Future[Metadata] = Future()

    def pass_on(done: Future[Metadata]) -> None:
        error = done.exception()
        if isinstance(error, CheckpointException):
            finished.set_exception(_typed("save", error))
        elif error is not None:
            finished.set_exception(error)
        else:
            finished.set_result(done.result())

    upload.add_done_callback(pass_on)
    return finished


@contextmanager
def _typed_errors(operation: str) -> Iterator[None]:
    try:
        yield
    except CheckpointException as error:
        raise _typed(operation, error) from None


def _typed(operation: str, error: CheckpointException) -> TorchtitanExtError:
    """Our own error where a rank raised one, else one that names every rank that failed."""
    failures = {rank: failure for rank, (failure, _) in error.failures.items()}
    for failure in failures.values():
        if isinstance(failure, TorchtitanExtError):
            return failure
    return CheckpointFailedError(
        operation, {rank: f"{type(failure).__name__}: {failure}" for rank, failure in failures.items()}
    )
