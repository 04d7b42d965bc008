"""What a save and a load of a job would do, worked out in one process: by the planners that a job has, for all ranks.

The story: describe what one rank holds (``one_rank``), work out the others (``alike_ranks``), hand all tables to the
planners' coordinator, and add up what it tells each rank (``save_forecast``, ``load_forecast``).
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from types import NoneType
from typing import Any

import torch.distributed as dist

from torchtitan_ext.checkpoint.component import is_stateful
from torchtitan_ext.checkpoint.component_plans import OpenSource, cut_by_component
from torchtitan_ext.checkpoint.key_table import KeyEntry, KeyTable, ObjectEntry, TensorEntry
from torchtitan_ext.checkpoint.load_phases import open_source
from torchtitan_ext.checkpoint.load_planner import LoadPlanner
from torchtitan_ext.checkpoint.load_rules import ComponentPlan, LoadRules, ReadRequest
from torchtitan_ext.checkpoint.policy import ElasticPolicy, Source, check_rules
from torchtitan_ext.checkpoint.rank_table import encode_table
from torchtitan_ext.checkpoint.save_planner import SavePlanner
from torchtitan_ext.checkpoint.saved_chunks import ChunkList
from torchtitan_ext.checkpoint.storage_entries import name_metadata
from torchtitan_ext.checkpoint.world import World, named_axes
from torchtitan_ext.elastic.virtual_shards import TooFewShardsError, num_shards_of
from torchtitan_ext.errors import Problem, WrongValueError, check_argument, refusal
from torchtitan_ext.layout.layout import MeshLayout, num_elements
from torchtitan_ext.layout.rules import ShardOrder
from torchtitan_ext.offline.alike_ranks import AlikeRanks, moved, rank_of
from torchtitan_ext.offline.amounts import Bandwidth
from torchtitan_ext.offline.dry_run_result import DryRun
from torchtitan_ext.offline.load_forecast import LoadForecast, LoadingRanks, forecast_load
from torchtitan_ext.offline.one_rank import OneRank, place_on_mesh, rank_of_checkpoint, rank_of_state
from torchtitan_ext.offline.placement_rules import DimOf, PlacementRules, saved_chunk_lists
from torchtitan_ext.offline.save_forecast import SavingRanks, forecast_save
from torchtitan_ext.storage.checkpoint_files import data_file_bytes, is_local

_MAX_NAMED_KEYS = 3


def dry_run(
    state: Mapping[str, Any] | Sequence[Mapping[str, Any]] | str | os.PathLike[str],
    *,
    mesh: Mapping[str, int] | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    components: Sequence[str] = (),
    placements: Mapping[str, DimOf] | None = None,
    layouts: Mapping[str, ShardOrder] | None = None,
    policy: ElasticPolicy | None = None,
    bandwidth_bytes_per_second: float | None = None,
    shared_bandwidth_bytes_per_second: float | None = None,
) -> DryRun:
    """Says what a save and a load would do on every rank of a job, without its processes, and changes nothing.

    Args:
        state: What the job saves and loads, in one of three forms:
            - the state dict of any one rank, with DTensors on its meshes: on the meta device, over a process group of
              the backend ``"fake"``, or as it is in a job. Of a pipeline a list: one of any rank of each stage, on
              meshes of its own ranks, or of ranks from 0 on for each;
            - a state dict of whole tensors, on any device, and ``mesh``;
            - the path of a checkpoint, and ``mesh``: the job asks for all that is in it.
        mesh: Size of each axis of the job's mesh by name, ``{"dp_shard": 4, "tp": 2}``. How axes cut tensors says
            ``torchtitan_ext/offline/placement_rules.py``.
        checkpoint: What is loaded; without one there is only a save.
        components: What is loaded of it: components, and globs of flat keys. All by default.
        placements: With ``mesh``, which dim each axis cuts, by canonical fqn or glob: ``{"*.wo.weight": {"tp": 1}}``.
        layouts: Sharding orders, as of the planners.
        policy: As of ``tte.load``. Objects of the state dict that reshard by a rule of their own are asked.
        bandwidth_bytes_per_second: Of one rank.
        shared_bandwidth_bytes_per_second: Of the storage, for all ranks together.

    Returns:
        Bytes, files, reads and memory of each rank, and what would be refused and why.

    Raises:
        TypeError: An argument is of another type.
        WrongValueError: Arguments that do not go together, or a mesh that says too little.
        StateRefusedError: The checkpoint has no metadata that can be read.
    """
    _check_arguments(state, mesh, checkpoint, components, placements, policy)
    bandwidth = _bandwidth(bandwidth_bytes_per_second, shared_bandwidth_bytes_per_second)
    path = state if isinstance(state, (str, os.PathLike)) else checkpoint
    source = Source(path, include=tuple(components) or ("*",))
    opened = None if path is None else _opened(source)
    metadata = None if opened is None else opened.metadata
    rules = None if mesh is None else PlacementRules(mesh, placements, metadata=metadata)
    chunks = {} if metadata is None else saved_chunk_lists(metadata)
    if isinstance(state, (str, os.PathLike)):
        assert opened is not None
        jobs = [_Job(None, rank_of_checkpoint(opened.metadata, source.selects))]
    else:
        states = [state] if isinstance(state, Mapping) else state
        jobs = [_Job(one, rank_of_state(_values_of(one), layouts)) for one in states]
    if rules is not None:
        rules.check_used([fqn for job in jobs for fqn in job.one.table.entries])
        jobs = [dataclasses.replace(job, one=place_on_mesh(job.one, rules, chunks)) for job in jobs]
    groups = _groups(jobs, rules)
    notes = _notes(jobs, groups)
    with _warnings_as(notes):
        saving = [SavingRanks(group, job.one.value_bytes) for job, group in zip(jobs, groups, strict=True)]
        save = forecast_save(saving, SavePlanner(layouts=layouts), bandwidth)
    load = None
    if opened is not None:
        run = _LoadRun(opened, policy, layouts, rules, chunks, sum(len(group.ranks) for group in groups))
        with _warnings_as(notes):
            load = run.forecast(jobs, groups, bandwidth)
    return DryRun(_world(groups, rules), _copies(groups), save, load, tuple(dict.fromkeys(notes)))


@dataclass(frozen=True)
class _Job:
    """What one rank of a group holds, and its state dict, where there is one."""

    state: Mapping[str, Any] | None
    one: OneRank


@dataclass(frozen=True)
class _LoadRun:
    """A load of a checkpoint by a job."""

    opened: OpenSource
    policy: ElasticPolicy | None
    layouts: Mapping[str, ShardOrder] | None
    rules: PlacementRules | None
    chunks: Mapping[str, ChunkList]
    num_ranks: int

    def forecast(self, jobs: Sequence[_Job], groups: Sequence[AlikeRanks], bandwidth: Bandwidth) -> LoadForecast:
        loading = [self._loading(job, group) for job, group in zip(jobs, groups, strict=True)]
        path = self.opened.source.path
        sizes = data_file_bytes(Path(path)) if path is not None and is_local(path) else {}
        planner = self._planner({})
        return forecast_load(loading, planner, self.opened.metadata, self.chunks, bandwidth, sizes)

    def _loading(self, job: _Job, group: AlikeRanks) -> LoadingRanks:
        """What the ranks of a group ask for: of what they hold what the policy loads and the checkpoint has."""
        if job.state is None:
            one, request = self._ask_for_all(job.one)
        else:
            one, request = self._ask_for_state(job.state, group)
        if self.rules is not None:
            one = place_on_mesh(one, self.rules, self.chunks)
        ranks = AlikeRanks(group.ranks, one.table, group.viewer, group.mesh, own=set(group.own_names(group.viewer)))
        problems = _shard_problems(one.table, ranks.num_data_parallel) if job.state is None else ()
        return LoadingRanks(ranks, request, list(group.state_bytes()), problems)

    def _ask_for_all(self, one: OneRank) -> tuple[OneRank, ReadRequest]:
        """A job that asks for all of a checkpoint."""
        paths = one.table.stock_paths
        tops = {fqn: str(paths[fqn][0]) if paths.get(fqn) else fqn.split(".")[0] for fqn in one.table.entries}
        plans: dict[str, ComponentPlan] = {}
        if self.policy is not None:
            named = {top for fqn, top in tops.items() if top != fqn or isinstance(one.table.entries[fqn], ObjectEntry)}
            names = dict.fromkeys(top for top in tops.values() if top in named)
            plans = {name: ComponentPlan(self.policy.component_action(name)) for name in names}
        load_rules = LoadRules(self.opened.source, policy=self.policy, components=plans)
        entries: dict[str, KeyEntry] = {}
        left = []
        for fqn, entry in one.table.entries.items():
            if load_rules.is_loaded(fqn, is_tensor=isinstance(entry, TensorEntry)):
                entries[fqn] = entry
            else:
                left.append(fqn)
        table = dataclasses.replace(one.table, entries=entries)
        request = ReadRequest(
            encode_table(table).message, name_metadata(self.opened.metadata), left=tuple(left), components=plans
        )
        return OneRank(table, one.value_bytes), request

    def _ask_for_state(self, state: Mapping[str, Any], group: AlikeRanks) -> tuple[OneRank, ReadRequest]:
        """What the rank of a state dict asks for. What it keeps for itself is asked for whether it was saved or not."""
        components = cut_by_component(state, [self.opened], self.policy, self.num_ranks, lambda name: None)
        planner = self._planner(components.plans[0] if self.policy is not None else {})
        planner.set_up_planner(components.values, self.opened.metadata)
        request: ReadRequest = planner.create_local_plan().planner_data
        absent = [fqn for fqn in request.missing if fqn in group.own_names(group.viewer)]
        entries = {**planner.wanted.entries, **dict.fromkeys(absent, ObjectEntry())}
        missing = tuple(fqn for fqn in request.missing if fqn not in absent)
        table = dataclasses.replace(planner.wanted, entries=entries)
        return OneRank(table, {}), dataclasses.replace(request, missing=missing)

    def _planner(self, plans: Mapping[str, ComponentPlan]) -> LoadPlanner:
        load_rules = LoadRules(self.opened.source, policy=self.policy, components=plans)
        return LoadPlanner(layouts=self.layouts).with_rules(load_rules)


def _check_arguments(state: Any, mesh: Any, checkpoint: Any, components: Any, placements: Any, policy: Any) -> None:
    check_argument("dry_run", "checkpoint", checkpoint, (str, os.PathLike, NoneType), "a directory")
    check_argument("dry_run", "components", components, (list, tuple), "a list of components and globs")
    check_rules("dry_run", policy)
    is_path = isinstance(state, (str, os.PathLike))
    if is_path and checkpoint is not None:
        raise WrongValueError("dry_run: got the path of a checkpoint twice; give one of them, or a state dict")
    if is_path and mesh is None:
        raise WrongValueError("dry_run: got a checkpoint and no mesh, expected mesh={'dp': 8, 'tp': 2} or a state dict")
    if placements is not None and mesh is None:
        raise WrongValueError(
            "dry_run: got placements and no mesh; state dicts with DTensors have placements of their own"
        )
    if components and not is_path and checkpoint is None:
        raise WrongValueError("dry_run: got components and no checkpoint, expected checkpoint= with these in it")
    if is_path:
        return
    expected = "a state dict, a list with that of each pipeline stage, or the path of a checkpoint"
    check_argument("dry_run", "state", state, (Mapping, list, tuple), expected)
    stages = [state] if isinstance(state, Mapping) else state
    for one in stages:
        check_argument("dry_run", "state", one, Mapping, expected)
    if not stages:
        raise WrongValueError("dry_run: got no state dict, expected one per pipeline stage")
    if len(stages) > 1 and mesh is not None:
        raise WrongValueError("dry_run: got several stages and a mesh; give stages DTensors on meshes of their ranks")


def _bandwidth(of_rank: Any, shared: Any) -> Bandwidth:
    for name, given in (("bandwidth_bytes_per_second", of_rank), ("shared_bandwidth_bytes_per_second", shared)):
        check_argument("dry_run", name, given, (Real, NoneType), "a number of bytes")
        if given is not None and not given > 0:
            raise WrongValueError(f"dry_run: got {name}={given}, expected more than 0")
    return Bandwidth(of_rank, shared)


def _opened(source: Source) -> OpenSource:
    opened = open_source(source, LoadPlanner(), 0)
    if opened.is_of_one_rank:
        detail = (
            "each rank has metadata of its own part alone (use_collectives=False): it loads on the ranks of its save"
        )
        raise refusal("dry run", [Problem("broken_checkpoint", opened.name, detail)])
    return opened


def _values_of(state: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value.state_dict() if is_stateful(value) else value for key, value in state.items()}


def _groups(jobs: Sequence[_Job], rules: PlacementRules | None) -> list[AlikeRanks]:
    """The ranks of each job's table: of the described mesh, or of the meshes that its tensors lie on."""
    if rules is not None:
        return [AlikeRanks(rules.mesh.ranks, job.one.table, 0, rules.mesh) for job in jobs]
    if len(jobs) == 1:
        viewer, own = _ranks_of(jobs[0].one.table)
        num_ranks = dist.get_world_size() if dist.is_initialized() else 1
        return [AlikeRanks(range(max(num_ranks, own[-1] + 1)), jobs[0].one.table, viewer)]
    tables = [job.one.table for job in jobs]
    if all(_ranks_of(table)[1][0] == 0 for table in tables):
        # Each stage is described on a world of its own: they follow each other.
        ends = list(itertools.accumulate(len(_ranks_of(table)[1]) for table in tables))
        tables = [moved(table, first) for table, first in zip(tables, [0, *ends], strict=False)]
    groups = []
    for table in tables:
        viewer, own = _ranks_of(table)
        groups.append(AlikeRanks(own, table, viewer))
    together = sorted(rank for group in groups for rank in group.ranks)
    if together != list(range(len(together))):
        raise WrongValueError(
            f"dry_run: the meshes of the stages have ranks {', '.join(map(str, together[:8]))}, ...; expected each "
            "rank of the job in one of them, or ranks from 0 on for each"
        )
    return groups


def _ranks_of(table: KeyTable) -> tuple[int, list[int]]:
    """The rank that made a table, and those of the largest mesh that its tensors lie on."""
    reports = [entry.report for entry in table.entries.values() if isinstance(entry, TensorEntry)]
    largest = max(
        (report for report in reports if report.mesh is not None),
        key=lambda report: len(report.mesh.ranks) if report.mesh is not None else 0,
        default=None,
    )
    if largest is None or largest.mesh is None:
        viewer = dist.get_rank() if dist.is_initialized() else 0
        return viewer, [viewer]
    return rank_of(largest), sorted(largest.mesh.ranks)


def _shard_problems(table: KeyTable, num_data_parallel: int) -> tuple[Problem, ...]:
    """Data loaders whose virtual shards, which the checkpoint names, are too few."""
    found: dict[str, int] = {}
    for fqn in table.entries:
        num_shards = num_shards_of(fqn)
        if num_shards is not None and num_shards < num_data_parallel:
            found.setdefault(fqn.rpartition(".")[0], num_shards)
    return tuple(
        Problem("cannot_reshard", name, str(TooFewShardsError(num_shards, num_data_parallel)))
        for name, num_shards in found.items()
    )


def _world(groups: Sequence[AlikeRanks], rules: PlacementRules | None) -> World:
    meshes: list[MeshLayout] = [mesh for group in groups for mesh in group.meshes()]
    meshes = meshes if rules is None else [rules.mesh]
    size = sum(len(group.ranks) for group in groups)
    return World(size, named_axes((mesh.dim_names, mesh.shape) for mesh in meshes))


def _copies(groups: Sequence[AlikeRanks]) -> float:
    held = sum(num_bytes for group in groups for num_bytes in group.state_bytes())
    sizes = {
        fqn: num_elements(entry.report.global_shape) * entry.dtype.itemsize
        for group in groups
        for fqn, entry in group.table.entries.items()
        if isinstance(entry, TensorEntry)
    }
    return held / sum(sizes.values()) if sum(sizes.values()) else 1.0


def _notes(jobs: Sequence[_Job], groups: Sequence[AlikeRanks]) -> list[str]:
    notes = []
    assumed = [fqn for job in jobs for fqn in job.one.assumed]
    if assumed:
        notes.append(
            f"nothing says which dims tp cuts of {len(assumed)} tensors ({_named(assumed)}): of matrices dim 0 is "
            "assumed, of vectors none; state it with placements={'*.wo.weight': {'tp': 1}}, on the command line --shard"
        )
    uneven = [fqn for group in groups for fqn in group.uneven]
    if uneven:
        named = _named(uneven)
        notes.append(f"{named}: this rank's shape does not tell in which order axes cut; FSDP2's order is assumed")
    for group in groups:
        for own in group.own_names(group.viewer):
            notes.append(f"each rank is taken to ask for a value of its own, such as {own}")
    has_values = any(isinstance(entry, ObjectEntry) for job in jobs for entry in job.one.table.entries.values())
    if has_values and any(job.state is None for job in jobs):
        notes.append("how the job's objects (data loader, random generators) take what was saved, they alone know")
    return notes


def _named(fqns: Sequence[str]) -> str:
    return ", ".join(fqns[:_MAX_NAMED_KEYS]) + (", ..." if len(fqns) > _MAX_NAMED_KEYS else "")


@contextmanager
def _warnings_as(notes: list[str]) -> Iterator[None]:
    """What planners warn of becomes notes."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    notes += [str(warning.message) for warning in caught]
