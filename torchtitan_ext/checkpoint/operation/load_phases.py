"""Loads a state dict, all of it or nothing, in four phases: prepare, plan, read, take; and proves it, where asked to.

1. *prepare* reads what components have saved and asks them for their part;
2. *plan* makes the plans of all ranks, and one refusal of what any rank refuses; nothing has changed so far;
3. *read* reads tensors in place; blocks of files of which each rank reads little are then verified by one of them;
4. *take* gives components their new state;
5. *prove* compares the loaded tensors with the fingerprints of the save.

With a planner of stock's the phases are the same, by stock's rules.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.planner import LoadPlanner as StockLoadPlanner
from torch.distributed.checkpoint.storage import StorageReader

from torchtitan_ext import _core
from torchtitan_ext.checkpoint.operation.arguments import place_of
from torchtitan_ext.checkpoint.operation.component_plans import (
    Components,
    OpenSource,
    PlannedSource,
    sort_components,
    world_of,
)
from torchtitan_ext.checkpoint.operation.phases import Phases
from torchtitan_ext.checkpoint.operation.prove import check_has_sums, check_keeps_tensors, prove_load
from torchtitan_ext.checkpoint.operation.share_reads import (
    ShareOffer,
    is_worth_asking,
    offer,
    read_sharing,
)
from torchtitan_ext.checkpoint.planners.load_planner import LoadPlanner
from torchtitan_ext.checkpoint.planners.subclasses import read_metadata, set_up_load
from torchtitan_ext.checkpoint.rules.load_rules import LoadRules
from torchtitan_ext.checkpoint.rules.policy import BY_DEFAULT, ElasticPolicy, Source
from torchtitan_ext.checkpoint.rules.report import (
    LoadReport,
    ReadSharing,
    disagreements,
    warn_of_unproved,
)
from torchtitan_ext.checkpoint.tables.component import is_stateful, saved_world
from torchtitan_ext.dcp_private import storage_setup
from torchtitan_ext.errors import Problem, ReplicaMismatchError, differing, only_printed, refusal
from torchtitan_ext.state.nested import holds_tensor, set_member
from torchtitan_ext.storage import FileReader
from torchtitan_ext.storage.futures import result_of
from torchtitan_ext.storage.location import is_local
from torchtitan_ext.storage.native.planned_items import reads_of, split_plan
from torchtitan_ext.storage.weights.safetensors_reader import reader_at
from torchtitan_ext.transforms.reader import MappedReader

logger = logging.getLogger(__name__)

_ASKING = "components were asked for their part; nothing was changed"
_PLANNING = "the load was planned; nothing was changed"


class OtherMetadataError(ReplicaMismatchError):
    """Ranks read the metadata of different saves: a save committed in between, or the ranks share no files."""


@dataclass(frozen=True)
class LoadJob:
    """One load: the arguments that travel together.

    Attributes:
        state_dict: By component; tensors are filled, ``Stateful`` objects take their new state, other values are
            replaced.
        source: The checkpoint, and which keys come from it.
        planner: Has the options of the load. A policy needs a ``LoadPlanner``, which then also gets the report.
        policy: What to do with each component; ``None``: as stock, for its planners.
        phases: The ranks that load.
        prove: Compare what was loaded with the fingerprints of the save; needs a ``LoadPlanner``.
        share_reads: Read what several ranks want once; needs a ``LoadPlanner``.
    """

    state_dict: dict[Any, Any]
    source: Source
    planner: StockLoadPlanner
    policy: ElasticPolicy | None
    phases: Phases
    prove: bool = False
    share_reads: bool = False


def load_state_dict(job: LoadJob) -> LoadReport:
    """Loads a state dict from a checkpoint. Collective.

    Returns:
        What was done, the same on every rank; without lines of components where a planner of stock's has loaded them.

    Raises:
        StateRefusedError: With the report; nothing was changed. The same on every rank.
        CheckpointFailedError: A rank failed while reading, or while its components took their state; names the
            components that are undefined now.
        ProofFailedError: The loaded tensors are not what was saved.
    """
    job, opened, components = prepare_load(job)
    planned = plan_load(job, opened, components)
    num_bytes, sharing = read_load(job, planned, components)
    with_tensors = take_load(job, components)
    proof = None
    if job.prove:
        proof = prove_load(job.state_dict, components, planned, with_tensors, job.phases)
        if job.phases.is_coordinator:
            warn_of_unproved(proof)
    if sharing is not None and job.phases.is_coordinator:
        with only_printed():
            logger.info("load of %s: %s", opened.name, sharing)
    more = {} if sharing is None else {"share_reads": asdict(sharing)}
    job.phases.log_metrics(logger, num_bytes, path=opened.name, more=more)
    report = planned.report
    if report is None:
        report = LoadReport(saved_world(opened.metadata), world_of(components.values, job.phases.size), ())
    padded = tuple(opened.reader.mapped.padded_tensors()) if isinstance(opened.reader, MappedReader) else ()
    report = replace(report, proof=proof, sharing=sharing, padded=padded)
    if isinstance(job.planner, LoadPlanner):
        job.planner.report = report
    return report


def prepare_load(job: LoadJob) -> tuple[LoadJob, OpenSource, Components]:
    """Reads the metadata and asks the components. Changes nothing.

    Returns:
        The job too: parts of a checkpoint that know nothing of each other are loaded as stock loads them.
    """
    source, policy, phases = job.source, job.policy, job.phases
    opened: OpenSource
    components: Components

    def ask() -> tuple[str, str]:
        nonlocal opened, components, policy
        opened = open_source(source, job.planner, phases.rank)
        has_transform = source.transform is not None
        if opened.is_of_one_rank and policy is BY_DEFAULT:
            policy = None
        if opened.is_of_one_rank and (policy is not None or has_transform):
            detail = (
                "each rank has metadata of its own part alone (use_collectives=False); load it without a "
                f"{'transform' if has_transform else 'policy'}, on the ranks of the save"
            )
            raise refusal("load", [Problem("broken_checkpoint", opened.name, detail)])
        if job.prove:
            check_keeps_tensors(opened)
        asks = isinstance(job.planner, LoadPlanner)
        components = sort_components(job.state_dict, opened, policy, phases.size, phases.at, asks=asks)
        seen = "" if opened.is_of_one_rank else getattr(opened.reader, "metadata_digest", "")
        of_one_rank = ", each rank's own part" if opened.is_of_one_rank else ""
        transform = f", {source.transform!r}" if has_transform else ""
        return f"{policy!r}, {replace(source, path=None)}{of_one_rank}{transform}", seen

    places = [place_of(source.path)]
    answers = phases.on_all("prepare", ask, doing=_ASKING, places=places, hold_the_same=_read_the_same)
    rules, seen = zip(*answers, strict=True)
    problems = disagreements(rules)
    if problems:
        raise refusal("load", problems)
    advice = "give a directory that all ranks share, and load when the save into it has finished"
    problems = differing(opened.name, seen, verb="has metadata of digest", show=str, advice=advice)
    if problems:
        raise OtherMetadataError("load", tuple(problems))
    return replace(job, policy=policy), opened, components


def _read_the_same(answers: Sequence[tuple[str, str]]) -> bool:
    """Whether all ranks read the same metadata bytes: each host may have a copy of the checkpoint on its disk."""
    _, first = answers[0]
    return first != "" and all(seen == first for _, seen in answers)


def open_source(source: Source, planner: StockLoadPlanner, rank: int) -> OpenSource:
    """A source with its metadata, which this rank reads. Not collective."""
    if source.storage_reader is None and source.path is not None and FileReader.validate_checkpoint_id(source.path):
        reader: StorageReader = reader_at(source.path) if source.transform is None else MappedReader(source.path)
    elif source.transform is not None:
        detail = "a transform reads no storage of others; copy the checkpoint to a directory"
        raise refusal("load", [Problem("no_checkpoint", str(source.path), detail)])
    else:
        reader = cast(StorageReader, storage_setup(source.storage_reader, source.path, reader=True))
    name = str(source.path or type(reader).__name__)
    is_directory = isinstance(reader, FileReader) or type(reader) is FileSystemReader
    path = Path(reader.path) if is_directory and is_local(reader.path) else None  # type: ignore[attr-defined]
    options = planner if isinstance(planner, LoadPlanner) else LoadPlanner()
    metadata, is_of_one_rank = read_metadata(reader, name, rank, path)
    if isinstance(reader, MappedReader) and source.transform is not None and not is_of_one_rank:
        metadata = reader.map_metadata(metadata, source.transform)
    return OpenSource(name, source, reader, metadata, is_of_one_rank, options)


def plan_load(job: LoadJob, opened: OpenSource, components: Components) -> PlannedSource:
    """Plans the reads; refuses with all problems together."""
    planner, phases = job.planner, job.phases
    if isinstance(planner, LoadPlanner):
        planner = planner.with_rules(LoadRules(opened.source, job.policy, components.plans, values_first=True))

    def plan_own_part() -> LoadPlan:
        is_alone, values = opened.is_of_one_rank, components.values
        set_up_load(values, opened.reader, planner, opened.metadata, phases.rank, is_of_one_rank=is_alone)
        return opened.reader.prepare_local_plan(planner.create_local_plan())

    def plan_all_parts(plans: list[LoadPlan]) -> list[LoadPlan]:
        return opened.reader.prepare_global_plan(planner.create_global_plan(plans))

    plan = phases.through_coordinator("plan", plan_own_part, plan_all_parts, doing=_PLANNING)
    return PlannedSource(opened, planner, plan)


def read_load(job: LoadJob, planned: PlannedSource, components: Components) -> tuple[int, ReadSharing | None]:
    """Reads non-tensor values first: where one cannot be read, nothing has changed yet.

    Returns:
        The bytes that all ranks have read, as far as the reader says; and how ranks got what several of them want,
        where they were asked to share it.
    """
    phases, reads = job.phases, planned
    is_ours = isinstance(job.planner, LoadPlanner)
    reader = planned.opened.reader if isinstance(planned.opened.reader, FileReader) else None
    sharing: ReadSharing | None = None

    def read_values() -> ShareOffer:
        nonlocal reads
        if job.prove:
            check_has_sums(planned.opened)
        reads = replace(planned, plan=planned.planner.finish_plan(planned.plan))
        if is_ours:
            values, plan_of_tensors = split_plan(reads.plan)
            reads.read(values)
            reads = replace(reads, plan=plan_of_tensors)
        if reader is not None:
            reader.files_reader.leaves_blocks = phases.size > 1  # of which it reads little, to be verified by one rank
        return offer(job.share_reads, reads)

    def read_tensors() -> tuple[int, bool]:
        if sharing is None:
            if is_ours:
                reads.ours.change_targets()
            if reads_of(reads.plan):
                result_of(reads.opened.reader.read_data(reads.plan, reads.planner))
        if is_ours:
            reads.ours.finish_load()
        return (0, False) if reader is None else (reader.num_bytes_read, reader.files_reader.has_unverified_blocks)

    offers = phases.on_all("read values", read_values, doing="values were read; nothing was changed")
    problems = differing("share_reads", [offer.share_reads for offer in offers], advice="pass the same on every rank")
    if problems:
        raise refusal("load", problems)
    loaded = components.loaded(job.policy)
    with phases.changing(loaded, f"tensors were read; these may be part-written: {', '.join(loaded)}"):
        if is_worth_asking(offers):
            sharing = read_sharing(reads, phases)
        num_bytes, have_unverified_blocks = zip(*phases.on_all("read", read_tensors), strict=True)
        if reader is not None and any(have_unverified_blocks):
            # Blocks that ranks have touched and none has verified are read by one rank each.
            files = reader.files_reader
            blocks = phases.through_coordinator("verify", files.describe_blocks, _core.deal_blocks)
            phases.on_all("verify", lambda: files.verify_blocks(blocks))
    return sum(num_bytes), sharing


def take_load(job: LoadJob, components: Components) -> set[str]:
    """Gives components their new state; the planners have filled the tensors in place.

    Returns:
        With a proof, the components of which some rank has loaded tensors.
    """
    state_dict, phases = job.state_dict, job.phases

    def take() -> list[str]:
        with_tensors = [str(key) for key, value in components.values.items() if job.prove and holds_tensor(value)]
        for key, component in state_dict.items():
            if not isinstance(component, torch.Tensor):  # load_state_dict() of others may take long
                phases.at(str(key))
            if key in components.resharded:
                component.load_state_dict(components.resharded[key].state)
            elif key in components.values:
                set_member(state_dict, key, _taken(component, components.value_for(key)))
        # Some planners make the state dict out of the metadata.
        for key, value in components.values.items():
            if key not in state_dict:
                set_member(state_dict, key, value)
        # Last, because reset() may ask other components: RngState asks for the step.
        for key in components.to_reset:
            phases.at(str(key))
            state_dict[key].reset()
        return with_tensors

    changed = components.changed(job.policy)
    with phases.changing(changed, f"components took their state; undefined are {', '.join(changed)}"):
        return {name for names in phases.on_all("take", take) for name in names}


def _taken(component: Any, value: Any) -> Any:
    """The new entry of the state dict, after the values of a component were read; the component itself, if possible."""
    if isinstance(component, nn.Module) and any(held.is_meta for held in component.state_dict().values()):
        component.load_state_dict(value, assign=True)
    elif is_stateful(component):
        component.load_state_dict(value)
    elif isinstance(component, dict) and value is not component:  # the same dict is filled already
        for key, member in value.items():
            set_member(component, key, member)
    else:
        return value
    return component
