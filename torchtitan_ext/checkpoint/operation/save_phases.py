"""Saves the values of a state dict: plan, write, commit, by calls to planner and storage in DCP's order."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any, cast

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult

from torchtitan_ext import _core
from torchtitan_ext.checkpoint.operation.arguments import PlaceOfRank, place_of
from torchtitan_ext.checkpoint.operation.phases import Phases
from torchtitan_ext.checkpoint.operation.save_job import SaveJob
from torchtitan_ext.checkpoint.planners.save_planner import SavePlanner
from torchtitan_ext.checkpoint.planners.subclasses import check_final_items, set_up_save
from torchtitan_ext.checkpoint.tables.component import is_stateful
from torchtitan_ext.dcp_private import storage_setup
from torchtitan_ext.errors import CheckpointFailedError, differing, only_printed, refusal, warn
from torchtitan_ext.ranks.exchange import has_backend
from torchtitan_ext.storage import FileWriter
from torchtitan_ext.storage.futures import result_of
from torchtitan_ext.storage.location import is_in_object_store, is_plain_url, names_object_store, place_at
from torchtitan_ext.storage.native.object_writer import ObjectWriter
from torchtitan_ext.storage.runs.retention import remove_old_steps
from torchtitan_ext.storage.weights.one_writer import WriterRanks
from torchtitan_ext.storage.weights.safetensors_reader import reader_at
from torchtitan_ext.storage.weights.writer import SafetensorsWriter
from torchtitan_ext.transforms.weights import TransformedTensors

logger = logging.getLogger(__name__)

_ASKING = "components were asked for their state; nothing was changed"
_OURS = (FileWriter, SafetensorsWriter)
_RUNS_AT_URLS: set[str] = set()
"""The runs of which this process has warned."""
_WITH_OBSTORE = ", and in this store with torchtitan-ext[remote]"
_EXCHANGING = "ranks exchanged plans and results; checkpoints in other directories are as they were"


@dataclass(frozen=True)
class SaveResult:
    """What a save wrote.

    Attributes:
        path: The checkpoint, as far as the storage says: the absolute path of a ``FileWriter``, of other storage DCP's
            ``checkpoint_id``. The same on every rank.
        save_id: The name of this save. The same on every rank.
        num_bytes: Bytes that all ranks wrote, as far as the storage says.
        seconds: Duration of each phase on this rank: ``prepare``, ``plan`` and ``write``, which ends with the commit.
        error: With ``on_error="warn"``, why nothing was saved; path and id are empty then.
    """

    path: str
    save_id: str
    num_bytes: int
    seconds: Mapping[str, float]
    error: str = ""

    @property
    def metadata(self) -> Metadata:
        """The checkpoint's metadata, read from its files: at thousands of ranks it is large. Not collective."""
        return reader_at(self.path).read_metadata()


def writer_at(job: SaveJob) -> StorageWriter:
    """The storage of a save, set to its path; by default our files, for a remote path DCP's.

    Raises:
        ValueError: ``keep`` for a place that is no step of a run.
    """
    path, writer = job.path, job.storage_writer
    if job.format == "safetensors" and path is not None:
        weights_map = None if job.transform is None else TransformedTensors(job.transform)
        return SafetensorsWriter(path, max_file_bytes=job.max_file_bytes, weights_map=weights_map)
    if writer is None and path is not None and is_in_object_store(path):
        return ObjectWriter(path, fingerprints=job.fingerprints)
    if writer is None and path is not None and FileWriter.validate_checkpoint_id(path):
        made = FileWriter(path, fingerprints=job.fingerprints, step_pattern=job.step_pattern)
        made.sets_aside = job.sets_aside
        own = os.path.realpath(made.target.parent)
        made.beside = tuple(run for run in job.runs if os.path.realpath(run) != own)
        return made
    return cast(StorageWriter, storage_setup(writer, path, reader=False))


def ask_for_states(state_dict: Mapping[Any, Any], job: SaveJob, phases: Phases) -> tuple[dict[Any, Any], SaveJob]:
    """The values of a state dict, and the job with what the ranks have agreed on. Collective.

    Asks ``Stateful`` objects for their values. DCP would ask them outside of its collectives: where one raised, the
    other ranks would wait for this rank.

    Raises:
        ReplicaMismatchError: Ranks name different places, or write different formats.
    """
    values: dict[Any, Any] = {}

    def ask() -> tuple[str, str | None]:
        for key, value in state_dict.items():
            if is_stateful(value):
                phases.at(str(key))
                value = value.state_dict()
            values[key] = value
        if phases.is_coordinator:
            _warn_of_url(job)
        return _form_of(job), job.on_storage_error.place_of(job.path)

    asked = phases.on_all("prepare", ask, doing=_ASKING, places=_places_of(job))
    problems = differing(
        "format",
        [form for form, _ in asked],
        show=str,
        advice="make the same call with the same transform on all ranks",
    )
    if problems:
        raise refusal("save", problems)
    return values, dataclasses.replace(job, fallback_place=asked[0][1])


def _form_of(job: SaveJob) -> str:
    """What ranks must agree on, because each writes its part by itself."""
    if job.format == "dcp":
        return "no safetensors"
    return "safetensors" if job.transform is None else f"safetensors through {job.transform!r}"


def _warn_of_url(job: SaveJob) -> None:
    """Warns, once for a run, that stock's writer is taken."""
    if job.path is None or not is_plain_url(job.path) or job.storage_writer is not None:
        return
    run = os.fspath(job.path).rstrip("/").rpartition("/")[0]
    if run not in _RUNS_AT_URLS:
        _RUNS_AT_URLS.add(run)
        warn(
            f"{job.path}: at this URL the files are stock's, by fsspec: no commit, so that a save over an earlier one "
            "that dies leaves neither, and no checksums, so that loads see no damage; on a mounted directory there "
            f"are both{_WITH_OBSTORE if names_object_store(job.path) else ''}"
        )


def _places_of(job: SaveJob) -> list[PlaceOfRank]:
    """Where our files go; storage of others may have a directory per rank, which cannot be compared."""
    fallback, is_ours = job.on_storage_error.fallback, isinstance(job.storage_writer, (*_OURS, NoneType))
    return [place_of(job.place if is_ours else None), *([] if fallback is None else [place_of(fallback)])]


def save_values(values: dict[Any, Any], writer: StorageWriter, job: SaveJob, phases: Phases) -> SaveResult:
    """Plans, writes and commits; then removes old steps of the run, where ``keep`` says so. Collective."""
    planner = job.planner
    metadata: Metadata | None = None

    def plan_own_part() -> SavePlan:
        set_up_save(values, writer, planner, phases.rank)
        if isinstance(planner, SavePlanner):
            planner.num_ranks = phases.size
        if isinstance(writer, SafetensorsWriter):
            writer.ranks = _ranks_of(phases)
        return writer.prepare_local_plan(planner.create_local_plan())

    def plan_all_parts(plans: list[SavePlan]) -> list[SavePlan]:
        nonlocal metadata
        plans, metadata = planner.create_global_plan(plans)
        if isinstance(writer, SafetensorsWriter):
            writer.take_metadata(metadata, planner)
        return writer.prepare_global_plan(plans)

    def write() -> Any:
        try:
            final_plan = planner.finish_plan(plan)
            if isinstance(planner, SavePlanner) and final_plan is not planner.plan:
                check_final_items(planner, planner.plan.items, final_plan.items)
            written = result_of(writer.write_data(final_plan, planner))
            _check_all_written(final_plan, written, phases.rank)
            return written
        except BaseException:
            if isinstance(writer, SafetensorsWriter):
                writer.refuse(plan)
            raise

    def commit(results: list[Any]) -> SaveResult:
        assert metadata is not None, "the coordinator has no metadata, please report"
        if isinstance(writer, _OURS):
            writer.confirm = phases.confirm
        if isinstance(writer, FileWriter):
            writer.seconds = phases.seconds_so_far
        writer.finish(metadata=metadata, results=results)
        storage_meta = writer.storage_meta()
        path = writer.target if isinstance(writer, _OURS) else getattr(storage_meta, "checkpoint_id", None)
        return SaveResult(
            str(path or type(writer).__name__),
            str(getattr(storage_meta, "save_id", "")),
            _num_bytes(results),
            {},
        )

    try:
        plan = phases.through_coordinator("plan", plan_own_part, plan_all_parts, doing=_EXCHANGING)
        saved = phases.to_coordinator("write", write, commit, then="commit", doing=_EXCHANGING)
    except BaseException:
        if isinstance(writer, _OURS):
            writer.abandon()
        raise
    if job.keep is not None and phases.is_coordinator:
        with only_printed():
            remove_old_steps(place_at(saved.path), job.keep, job.step_pattern)
    phases.log_metrics(logger, saved.num_bytes, path=saved.path)
    return dataclasses.replace(saved, seconds=dict(phases.seconds))


def _ranks_of(phases: Phases) -> WriterRanks | None:
    """How ranks send each other what they write; ``None`` where they cannot."""
    if phases.group is None or phases.is_beside or not has_backend(phases.group, "cpu"):
        return None
    return WriterRanks(phases.group.group_name, phases.rank, phases.size, phases.timeout_seconds)


def _check_all_written(plan: SavePlan, results: Any, rank: int) -> None:
    """Raises CheckpointFailedError where storage reports an item of a plan not as written.

    Stock's writer loses errors of its threads. Only DCP's own form of results, a list of ``WriteResult``, is checked.
    """
    if not isinstance(results, list) or not all(isinstance(result, WriteResult) for result in results):
        return
    written = {result.index for result in results}
    lost = [item.index.fqn for item in plan.items if item.index not in written]
    if lost:
        names = ", ".join(dict.fromkeys(lost[:10]))
        text = f"{len(lost)} of {len(plan.items)} items were not written, without an error: {names}"
        raise CheckpointFailedError("save", {rank: text})


def _num_bytes(results: Sequence[Any]) -> int:
    """The bytes in the results of all ranks: of our files, numbers, or lists of ``WriteResult`` from storage of DCP."""
    lists = [result for result in results if isinstance(result, list)]
    ours = sum(result.num_bytes for result in results if isinstance(result, _core.RankFile))
    ours += sum(result for result in results if isinstance(result, int))
    return ours + sum(one.size_in_bytes for result in lists for one in result if isinstance(one, WriteResult))
