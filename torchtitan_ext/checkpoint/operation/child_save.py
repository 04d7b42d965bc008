"""A save in a child process of each rank, from memory that the rank shares with its child."""

from __future__ import annotations

import dataclasses
import io
import logging
import os
import pickle
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.storage import StorageWriter
from torch.distributed.tensor import DTensor

from torchtitan_ext.checkpoint.operation.phases import Phases
from torchtitan_ext.checkpoint.operation.save_job import SaveJob
from torchtitan_ext.checkpoint.operation.save_phases import SaveResult, save_values
from torchtitan_ext.checkpoint.staging.child_process import ChildProcess
from torchtitan_ext.checkpoint.staging.copies import StateMemory
from torchtitan_ext.checkpoint.staging.host_buffers import mapped_memory
from torchtitan_ext.checkpoint.staging.stager import CpuStager, flat_bytes, tensors_in
from torchtitan_ext.errors import CheckpointFailedError, LostRankError, StateRefusedError, WrongValueError
from torchtitan_ext.layout.dtensor import dtensor_of, made_of
from torchtitan_ext.ranks.side_group import GroupOffer, known_to_all
from torchtitan_ext.ranks.store_address import StoreAddress, address_of_default_store
from torchtitan_ext.storage.commit.branch import remember_step

logger = logging.getLogger(__name__)

_WRITING = "child processes planned and wrote; checkpoints in other directories are as they were"


class SaveInChild:
    """A save by the child processes of all ranks.

    Attributes:
        group_name: The name of the group that this rank's child is in, if any.
        is_complete: Whether all of the state is there, for another attempt.
    """

    is_complete = True

    def __init__(self, values: dict[str, Any], stager: CpuStager, phases: Phases) -> None:
        _check_group(phases)
        self._stager = stager
        self._child = stager.child()  # a new one starts while the state is copied
        self.group_name = self._child.group_name if dist.is_initialized() else None
        memory = StateMemory(values)
        self._copies, buffer = stager.copy(memory.tensors)
        self._file = None if buffer is None else buffer.file
        stream = io.BytesIO()
        _SharingPickler(stream, self._copies).dump(memory.around(self._copies))
        self._content = stream.getvalue()

    def run(self, writer: StorageWriter, job: SaveJob, phases: Phases, offers: Sequence[GroupOffer]) -> SaveResult:
        """Has the children plan and write. Collective; all ranks raise the same error.

        Args:
            offers: Of all ranks: the group that the child is in, and a name for a new one.
        """

        def save() -> SaveResult:
            child = self._child_in_group(phases, offers)
            own = dataclasses.replace(job, storage_writer=writer)
            tensors = [(tensor.shape, tensor.dtype) for tensor in self._copies]
            request = (own, phases.timeout_seconds, os.getcwd(), self._content, tensors, phases.seconds_so_far())
            try:
                return child.call(save_shared, *request, file=self._file)
            except LostRankError as error:  # not of this rank's group, which can go on: the next save has new children
                late = ", ".join(map(str, (*error.silent, *error.late)))
                raise RuntimeError(f"its child process waited for that of rank(s) {late}: {error.reason}") from error

        with self._stager.child_lock:
            try:
                saved = phases.on_all("write", save, doing=_WRITING)[phases.rank]
            except BaseException as error:
                is_of_storage = isinstance(error, CheckpointFailedError) and error.is_of_storage
                # What all children raise leaves them ready for the next save.
                if not is_of_storage and not isinstance(error, StateRefusedError):
                    self._stager.end_child()
                raise
        remember_step(Path(saved.path))
        phases.seconds.update(saved.seconds)
        phases.log_metrics(logger, saved.num_bytes, path=saved.path)
        return dataclasses.replace(saved, seconds=dict(phases.seconds))

    def clear(self) -> None:
        self._copies, self._content, self._file = [], b"", None

    def _child_in_group(self, phases: Phases, offers: Sequence[GroupOffer]) -> ChildProcess:
        if known_to_all(offers) is not None:
            return self._child  # where it died since, its call says so: a new one would wait for the others in vain
        child = self._stager.child()
        if child.group_name == offers[0].new:
            return child  # since an earlier attempt of this save
        if child.group_name is not None:
            self._stager.end_child()
            child = self._stager.child()
        address = _check_group(phases)
        if address is not None:
            child.call(join_ranks, address, offers[0].new, phases.rank, phases.size, phases.timeout_seconds / 2)
            child.group_name = offers[0].new
        return child


def _check_group(phases: Phases) -> StoreAddress | None:
    """Where the children of all ranks find each other; ``None`` without a process group.

    Raises:
        WrongValueError: The save is not one of all ranks, or no other process reaches their store.
    """
    if not dist.is_initialized():
        return None
    address = address_of_default_store()
    if address is None or phases.size != dist.get_world_size():
        raise WrongValueError(
            "async_save: CpuStager(process=True) needs a process group of all ranks, whose store is a TCPStore "
            f"or a FileStore; this one has {phases.size} of {dist.get_world_size()} ranks, and "
            f"{'such a' if address is not None else 'another'} store"
        )
    return address


def join_ranks(address: StoreAddress, name: str, rank: int, size: int, timeout_seconds: float) -> None:
    """In the child: makes the group of the children of all ranks. Collective over them."""
    timeout = timedelta(seconds=timeout_seconds)
    dist.init_process_group("gloo", store=address.connect(name, timeout), rank=rank, world_size=size, timeout=timeout)


def save_shared(
    job: SaveJob,
    timeout_seconds: float,
    directory: str,
    content: bytes,
    shared: list[tuple[torch.Size, torch.dtype]],
    seconds: dict[str, float],
    file: int | None = None,
) -> SaveResult:
    """In the child: plans and writes. Collective over the children of all ranks.

    Args:
        directory: The working directory, to which a path of the storage may be relative.
        content: The pickled state dict; its tensors are numbers.
        shared: Shapes and dtypes of the tensors, in their order in the file, the memory that both processes see.
        seconds: What each phase of the parent has taken so far.
    """
    os.chdir(directory)
    tensors: list[torch.Tensor] = []
    if file is not None:
        like = [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in shared]
        tensors = tensors_in(mapped_memory(file, flat_bytes(like)), like)
        os.close(file)
    values: dict[str, Any] = _SharingUnpickler(io.BytesIO(content), tensors).load()
    assert job.storage_writer is not None, "a child got no storage, please report"
    with Phases("save", path=job.path, timeout_seconds=timeout_seconds) as phases:
        phases.seconds |= seconds
        return save_values(values, job.storage_writer, job, phases)


class _SharingPickler(pickle.Pickler):
    """Writes tensors in shared memory as their position there, whether they require grad, and their attributes.

    Not by ``persistent_id``: pickle calls that for each object, and a DTensor consists of some sixty.
    """

    def __init__(self, stream: io.BytesIO, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__(stream)
        self._positions = {tensor.data_ptr(): position for position, tensor in enumerate(tensors) if tensor.numel() > 0}

    def reducer_override(self, value: Any) -> Any:
        if type(value) is DTensor:
            return dtensor_of, made_of(value), vars(value), None, None, _set_attributes
        if type(value) is not torch.Tensor or value.layout is not torch.strided or value.is_meta:
            return NotImplemented
        position = self._positions.get(value.data_ptr())
        return NotImplemented if position is None else (_shared, (position, value.requires_grad, vars(value)))


class _SharingUnpickler(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__(stream)
        self._tensors = tensors

    def find_class(self, module: str, name: str) -> Any:
        return self._tensor if (module, name) == (__name__, _shared.__name__) else super().find_class(module, name)

    def _tensor(self, position: int, requires_grad: bool, attributes: dict[str, Any]) -> torch.Tensor:
        tensor = self._tensors[position].detach().requires_grad_(requires_grad)
        _set_attributes(tensor, attributes)
        return tensor


def _shared(position: int, requires_grad: bool, attributes: dict[str, Any]) -> torch.Tensor:
    """Stands for a tensor in shared memory, which a ``_SharingUnpickler`` has."""
    raise pickle.UnpicklingError("a tensor in memory that is not shared here")


def _set_attributes(tensor: torch.Tensor, attributes: dict[str, Any]) -> None:
    vars(tensor).update(attributes)
