"""Save and load in one call, with the package's planners and its own errors instead of DCP's wrapper."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter
from torch.distributed.checkpoint.utils import _DistWrapper

from torchtitan_ext.checkpoint.dcp_failure import own_errors
from torchtitan_ext.checkpoint.load import load_components
from torchtitan_ext.checkpoint.load_planner import LoadPlanner
from torchtitan_ext.checkpoint.policy import ElasticPolicy, Source
from torchtitan_ext.checkpoint.report import LoadReport
from torchtitan_ext.checkpoint.save_planner import SavePlanner
from torchtitan_ext.checkpoint.staging import CpuStager


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
        LostRankError: A rank died or hangs; raised where that was noticed, and names it.
        ValueError: Neither a path nor storage.
    """
    _check_place("save", path, storage_writer)
    values = _values_of(state_dict, "save", process_group, no_dist)
    with own_errors("save", process_group, no_dist=no_dist):
        return state_dict_saver.save(
            values,
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
    policy: ElasticPolicy | None = None,
    sources: Sequence[Source] = (),
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
) -> LoadReport | None:
    """Loads a checkpoint into a state dict of any layout, in place. Collective over ``process_group``.

    With a policy, or sources, every component crosses to this world by its own rule, or all of it is refused in one
    report before anything is changed; see ``tte.elastic.ElasticPolicy``.

    Args:
        state_dict: The targets; tensors are filled, other values replaced.
        path: Directory of the checkpoint (``checkpoint_id``).
        planner: A ``LoadPlanner`` with options other than the defaults.
        storage_reader: Any DCP storage reader; by default the stock file reader at ``path``.
        policy: What to do with each component, and about missing and unexpected keys.
        sources: Several checkpoints and which keys come from each, instead of ``path``.
        process_group: The ranks that take part; all by default.
        no_dist: Load into this process alone.

    Returns:
        With a policy or sources what was done, the same on every rank.

    Raises:
        StateRefusedError: No target was changed; the same on every rank, listing all problems.
        CheckpointFailedError: A rank failed while reading; targets may be part-written, and it names them.
        LostRankError: A rank died or hangs; raised where that was noticed, and names it.
        ValueError: Both ``path`` and ``sources``, or two policies; or a policy for a planner that knows none.
    """
    planner = LoadPlanner() if planner is None else planner
    if sources and (path is not None or storage_reader is not None):
        raise ValueError("load: got sources and a path or storage_reader, expected one of them")
    is_ours = isinstance(planner, LoadPlanner)
    if not is_ours and (policy is not None or sources):
        raise ValueError(f"load: got a policy or sources and a {type(planner).__name__}, expected a LoadPlanner")
    given = planner.policy if is_ours else None
    if policy is not None and given is not None:
        raise ValueError("load: got a policy and a planner with a policy, expected one of them")
    if not sources:
        _check_place("load", path, storage_reader)
    if policy is not None or given is not None or sources:
        return load_components(
            state_dict,
            sources or [dataclasses.replace(planner.source, path=path, storage_reader=storage_reader)],
            planner,
            policy or given or ElasticPolicy(),
            process_group=process_group,
            no_dist=no_dist,
        )
    values = _values_of(state_dict, "load", process_group, no_dist)
    with own_errors("load", process_group, no_dist=no_dist):
        state_dict_loader.load(
            values,
            checkpoint_id=path,
            storage_reader=storage_reader,
            planner=planner,
            process_group=process_group,
            no_dist=no_dist,
        )
    for key, component in state_dict.items():
        if isinstance(component, Stateful):
            component.load_state_dict(values[key])
        else:
            state_dict[key] = values[key]
    return None


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
    _check_place("save", path, storage_writer)
    values = _values_of(state_dict, "save", process_group, False)
    with own_errors("save", no_dist=True):
        response = state_dict_saver.async_save(
            values,
            checkpoint_id=path,
            storage_writer=storage_writer,
            planner=SavePlanner() if planner is None else planner,
            process_group=process_group,
            async_stager=CpuStager(),
        )
    upload: Future[Any] = response.upload_completion if isinstance(response, AsyncSaveResponse) else response
    finished: Future[Metadata] = Future()

    def pass_on(done: Future[Metadata]) -> None:
        try:
            with own_errors("save", process_group):
                finished.set_result(done.result())
        except BaseException as error:
            finished.set_exception(error)

    upload.add_done_callback(pass_on)
    return finished


def _values_of(
    state_dict: dict[str, Any], operation: str, process_group: dist.ProcessGroup | None, no_dist: bool
) -> dict[str, Any]:
    """What DCP sees. It would ask ``Stateful`` objects itself, outside of its collectives: where one of them raises,
    the other ranks would wait for this one."""
    values: dict[str, Any] = {}

    def ask() -> None:
        for key, value in state_dict.items():
            values[key] = value.state_dict() if isinstance(value, Stateful) else value

    no_dist = no_dist or not (dist.is_available() and dist.is_initialized())
    group = _DistWrapper(process_group, not no_dist, 0)
    phase = "components were asked for their state; nothing was changed"
    with own_errors(operation, process_group, no_dist=no_dist, phase=phase):
        group.all_gather("state_dict", ask)
    return values


def _check_place(
    operation: str, path: str | os.PathLike[str] | None, storage: StorageReader | StorageWriter | None
) -> None:
    if path is None and storage is None:
        raise ValueError(f"{operation}: got neither a path nor storage, expected one of them")
