"""``save``, ``async_save`` and ``load``: one call each, by the planners of this package.

``operation.save_phases`` and ``operation.load_phases`` have their phases.
"""

from __future__ import annotations

import dataclasses
import os
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.planner import LoadPlanner as StockLoadPlanner
from torch.distributed.checkpoint.planner import SavePlanner as StockSavePlanner
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

from torchtitan_ext.checkpoint.operation.arguments import check_load, check_seconds, check_step
from torchtitan_ext.checkpoint.operation.choose_step import StepChoice, choose_step
from torchtitan_ext.checkpoint.operation.load_phases import LoadJob, OtherMetadataError, load_state_dict
from torchtitan_ext.checkpoint.operation.phases import TIMEOUT_SECONDS, Phases, call_text, checking_arguments
from torchtitan_ext.checkpoint.operation.save_job import SaveJob
from torchtitan_ext.checkpoint.operation.save_phases import SaveResult
from torchtitan_ext.checkpoint.operation.saves import Call, save_later, save_now
from torchtitan_ext.checkpoint.operation.unasked import raise_unasked
from torchtitan_ext.checkpoint.planners.load_planner import LoadPlanner
from torchtitan_ext.checkpoint.planners.save_planner import SavePlanner
from torchtitan_ext.checkpoint.rules.casts import CastPolicy
from torchtitan_ext.checkpoint.rules.policy import BY_DEFAULT, ElasticPolicy, Source, check_rules
from torchtitan_ext.checkpoint.rules.report import LoadReport
from torchtitan_ext.checkpoint.staging.stager import CpuStager
from torchtitan_ext.errors import SavedOverError, WrongValueError, check_argument
from torchtitan_ext.transforms.rules import Transform

# Overwrites are rare: after three attempts the load reports it.
_MAX_ATTEMPTS = 3

__all__ = ["CpuStager", "LoadPlanner", "LoadReport", "SavePlanner", "SaveResult", "async_save", "load", "save"]


def save(
    state_dict: dict[str, Any],
    path: str | os.PathLike[str] | None = None,
    *,
    planner: StockSavePlanner | None = None,
    storage_writer: StorageWriter | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    timeout_seconds: float = TIMEOUT_SECONDS,
    fingerprints: bool = False,
) -> SaveResult:
    """Saves a state dict; any layout, exactly. Collective over ``process_group``.

    Args:
        state_dict: Nested; DTensors on any mesh, plain tensors, ``Stateful`` objects, plain values.
        path: Directory of the checkpoint (``checkpoint_id``).
        planner: A ``SavePlanner`` with options other than the defaults.
        storage_writer: Any DCP storage writer; by default a ``FileWriter`` at ``path``.
        process_group: The ranks that take part; all by default.
        no_dist: Save from this process alone.
        timeout_seconds: How long a rank waits for the others in each phase.
        fingerprints: Store a fingerprint of each saved chunk, taken while it is written, for ``load`` with
            ``prove=True``. A ``FileWriter`` of one's own has the same argument.

    Returns:
        The place, the bytes and the seconds; reads the metadata on request.

    Raises:
        StateRefusedError: Nothing was written; the same on every rank, listing all problems.
        CheckpointFailedError: A rank failed while planning or writing; names the ranks and their errors.
        SaveInProgressError: Another save is under way in the same place; names it.
        LostRankError: A rank died, hangs, or did not come in time; the same on every rank, and names it.
        TypeError: An argument is of another type.
        ValueError: Neither a path nor storage; or what does not go together.
    """
    call = Call("save", process_group, no_dist, timeout_seconds)
    job = SaveJob(
        path,
        storage_writer,
        SavePlanner() if planner is None else planner,
        fingerprints=fingerprints,
    )
    return save_now(state_dict, job, call)


def load(
    state_dict: dict[str, Any],
    path: str | os.PathLike[str] | Source | None = None,
    *,
    step: StepChoice | None = None,
    step_pattern: str | None = None,
    planner: StockLoadPlanner | None = None,
    storage_reader: StorageReader | None = None,
    policy: ElasticPolicy | None = None,
    transform: Transform | None = None,
    cast: CastPolicy = "exact",
    prove: bool = False,
    share_reads: bool = False,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> LoadReport:
    """Loads a checkpoint into a state dict of any layout, in place. Collective over ``process_group``.

    Every component crosses to this world by its own rule, or all of it is refused in one report before anything is
    changed; see ``tte.elastic.ElasticPolicy``. A part of a checkpoint may be loaded: of what the checkpoint has and
    the state dict lacks the load only warns, unless a policy says otherwise.

    Args:
        state_dict: The targets; tensors are filled, other values replaced.
        path: Directory of the checkpoint (``checkpoint_id``); with a step that of the run. Or safetensors, a file or a
            directory with some, of Hugging Face or of DCP's writer; each rank reads what its shards need. Or a
            ``tte.elastic.Source``: a place, which keys come from there, and under which names; without a policy what
            it has and nothing asks for is refused.
        step: A number, or ``"latest"``, of ``<run>/step-<number>``; or ``"last-good"``: the latest step whose files are
            all whole, which the ranks verify by reading them; a warning names the skipped steps.
        step_pattern: How the run names its steps, where that is not ``step-<number>``: ``"ckpt-{step}"``. Names of
            other trainers, such as ``checkpoint-500``, are known where all steps of the run have names of one kind.
        planner: A ``LoadPlanner`` with options other than the defaults.
        storage_reader: Any DCP storage reader; by default a ``FileReader`` at ``path``.
        policy: What to do with each component, and about missing and unexpected keys, where that is not the default.
        transform: How the checkpoint's tensors become those of the state dict, see ``tte.transforms``; each rank reads
            what its shards need. A ``Source`` has its own. Together with ``prove`` only one that renames and leaves out
            whole tensors.
        cast: Dtype changes, see ``LoadPlanner``: ``"exact"``, ``"allow"`` or ``"forbid"``; not together with a planner.
        prove: Compare the loaded tensors with the fingerprints that ``save(..., fingerprints=True)`` stored, on all
            ranks; objects are asked for their state again. What cannot be compared is in the report's ``proof``.
        share_reads: Whether what several ranks want is read once, by one of them, and sent to the others through
            ``process_group``. The same on every rank. See docs/reference/storage.md.
        process_group: The ranks that take part; all by default.
        no_dist: Load into this process alone.
        timeout_seconds: How long a rank waits for the others in each phase.

    Returns:
        A report of what was done with each component, the same on every rank. With a planner of stock's it has the
        worlds alone.

    Raises:
        StateRefusedError: No target was changed; the same on every rank, listing all problems.
        CheckpointFailedError: A rank failed while reading; targets may be part-written, and it names them.
        NoCheckpointError: The run has no such step, or none that is good.
        ProofFailedError: Loaded tensors are not what was saved; the same on every rank, and names them, the files and
            the ranks.
        LostRankError: A rank died, hangs, or did not come in time; the same on every rank, and names it.
        TypeError: An argument is of another type.
        ValueError: Two policies, or ``cast`` and a planner; a transform or ``storage_reader`` beside a ``Source``, a
            transform beside ``storage_reader``, or beside ``prove`` one that changes tensors; a policy or ``prove``
            for a planner that knows none; or ``prove`` and a checkpoint without fingerprints.
    """
    with checking_arguments("load", process_group, no_dist=no_dist):
        check_rules("load", policy)
        given = path if isinstance(path, Source) else None
        place = path if not isinstance(path, Source) else path.path
        check_load(state_dict, place, given, planner, storage_reader, transform, process_group)
        check_seconds("load", timeout_seconds)
        check_step(place, step, step_pattern)
        if cast != "exact" and planner is not None:
            raise ValueError(
                f"load: got cast={cast!r} and a planner; give it to the planner: LoadPlanner(cast={cast!r})"
            )
        planner = LoadPlanner(cast=cast) if planner is None else planner
        policy = _policy_of_load(policy, planner, has_source=given is not None)
        for name, value in (("prove", prove), ("share_reads", share_reads)):
            check_argument("load", name, value, bool, "True or False")
            if value and not isinstance(planner, LoadPlanner):
                raise WrongValueError(f"load: got {name}=True and a {type(planner).__name__}, expected a LoadPlanner")
    phases_at = partial(
        Phases,
        "load",
        process_group,
        no_dist=no_dist,
        timeout_seconds=timeout_seconds,
        call=call_text("load", prove=prove),
    )
    if place is not None and step is not None:
        with phases_at(path=place) as phases:
            raise_unasked(phases)
            place = choose_step(place, step, phases, step_pattern)
    if given is None:
        source = planner.rules.source if isinstance(planner, LoadPlanner) else Source()
        transform = transform or source.transform
        source = dataclasses.replace(source, path=place, storage_reader=storage_reader, transform=transform)
    else:
        source = dataclasses.replace(given, path=place)
    with phases_at(path=place) as phases:
        raise_unasked(phases)
        return _load_unless_overwritten(LoadJob(state_dict, source, planner, policy, phases, prove, share_reads))


def _policy_of_load(
    policy: ElasticPolicy | None, planner: StockLoadPlanner, *, has_source: bool
) -> ElasticPolicy | None:
    """The given policy or the planner's own, or the default one; planners of stock's have none.

    Raises:
        ValueError: There are two policies, or the planner takes none.
    """
    if not isinstance(planner, LoadPlanner):
        if policy is not None or has_source:
            raise ValueError(f"load: got a policy or a Source and a {type(planner).__name__}, expected a LoadPlanner")
        return None
    if policy is not None and planner.rules.policy is not None:
        raise ValueError("load: got a policy and a planner with a policy, expected one of them")
    return policy or planner.rules.policy or (ElasticPolicy() if has_source else BY_DEFAULT)


def _load_unless_overwritten(job: LoadJob) -> LoadReport:
    """Loads; starts again where another save replaced the checkpoint before anything was read. Collective."""
    for _ in range(_MAX_ATTEMPTS - 1):
        try:
            return load_state_dict(job)
        except (SavedOverError, OtherMetadataError):  # the same on every rank
            job.phases.num_retries += 1
    return load_state_dict(job)


def async_save(
    state_dict: dict[str, Any],
    path: str | os.PathLike[str] | None = None,
    *,
    planner: StockSavePlanner | None = None,
    storage_writer: StorageWriter | None = None,
    process_group: dist.ProcessGroup | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
    fingerprints: bool = False,
    stager: AsyncStager | None = None,
) -> Future[SaveResult]:
    """Copies the state dict to the CPU (``staging``), then saves it in a thread. Collective over ``process_group``.

    The next save or load on this group begins when this one has ended. The thread uses connections of its own (gloo,
    made by the first call on a group, which connects each rank with each other), so that training may use the group
    meanwhile. Only where there is no gloo or no store (MPI) it uses the group itself, and nothing else may then.

    Args:
        state_dict: And all that is not named here: as in ``save``.
        stager: A ``CpuStager`` that keeps its host memory between saves; or a stager of DCP. By default a save takes
            the memory of the last one that has ended, which is kept for five minutes where the host has three times as
            much left, or new memory: it waits for no other save.

    Returns:
        A future of what ``save`` returns; it raises what ``save`` raises. The caller may change the state dict at once.
        Where no rank asks it for its ``result`` or ``exception``, the next save or load on the group raises the error,
        or with ``on_error="warn"`` the coordinator warns; at the exit of the process the coordinator prints it.

    Raises:
        CheckpointFailedError: A component, the copy, for which a host may lack memory, or connecting the ranks failed
            on a rank; names the ranks and their errors. Nothing was written.
        LostRankError: A rank did not come to the copy in time; the same on every rank, and names it.
        TypeError: An argument is of another type.
        ValueError: As in ``save``; or there is no gloo and the group cannot send from CPU memory.
    """
    call = Call("async_save", process_group, timeout_seconds=timeout_seconds)
    job = SaveJob(
        path,
        storage_writer,
        SavePlanner() if planner is None else planner,
        fingerprints=fingerprints,
    )
    return save_later(state_dict, job, call, stager)
