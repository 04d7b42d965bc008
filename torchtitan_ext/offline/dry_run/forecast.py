"""Forecasts what each rank would write and read, by the planners of saves and loads and the checkpoint's chunks."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan

from torchtitan_ext import _core
from torchtitan_ext.checkpoint.operation.component_plans import paths_below, read_saved, sort_components
from torchtitan_ext.checkpoint.planners.load_planner import LoadPlanner
from torchtitan_ext.checkpoint.planners.save_planner import SavePlanner
from torchtitan_ext.checkpoint.planners.saved_chunks import name_metadata
from torchtitan_ext.checkpoint.rules.load_rules import ComponentPlan, LoadRules, ReadRequest, WhyNotRead, component_of
from torchtitan_ext.checkpoint.rules.report import LoadReport
from torchtitan_ext.checkpoint.tables.component import saved_world
from torchtitan_ext.checkpoint.tables.key_table import EncodedTable, KeyEntry, ObjectEntry, TensorEntry, encode_table
from torchtitan_ext.elastic.data.virtual_shards import TooFewShardsError, num_shards_of
from torchtitan_ext.elastic.rng import RngState, rng_of_saved
from torchtitan_ext.errors import Problem, StateRefusedError
from torchtitan_ext.layout.layout import num_elements, shard_of
from torchtitan_ext.offline.dry_run.alike_ranks import AlikeRanks
from torchtitan_ext.offline.dry_run.job import Job, OneRank, Stage, components_of, place_on_mesh
from torchtitan_ext.offline.dry_run.load_source import LoadSource


@dataclass(frozen=True)
class RankBytes:
    """What one rank would write or read.

    Attributes:
        state_bytes: The size of all tensors that the rank holds, whoever writes them, loaded or not.
        num_bytes: The size of all tensor chunks and values that it writes or reads, without frames around them.
    """

    rank: int
    state_bytes: int
    num_bytes: int


@dataclass(frozen=True)
class Forecast:
    """What a save or a load would do.

    Attributes:
        ranks: One entry per rank. In a save that is refused they write nothing, in a load what could be read counts.
        problems: Why it would be refused; empty if it would not.
        report: What becomes of each component in a load.
    """

    ranks: tuple[RankBytes, ...]
    problems: tuple[Problem, ...]
    report: LoadReport | None = None


@dataclass(frozen=True)
class _LoadingStage:
    """The ranks of a stage, which ask for the same keys.

    Attributes:
        stage: The stage, with all that its ranks hold.
        ranks: The ranks, with the keys that they read as their table.
        request: What one of them sends to the coordinator.
        asked: The saved keys that components read before anything is planned, to work out their part.
    """

    stage: Stage
    ranks: AlikeRanks
    request: ReadRequest
    asked: tuple[str, ...]


def forecast_save(job: Job) -> Forecast:
    """What a save of all ranks of a job would do."""
    groups = [stage.ranks for stage in job.stages]
    encoded = {rank: group.encoded(rank) for group in groups for rank in group.ranks}
    plans = [SavePlan([], planner_data=encoded[rank].message) for rank in sorted(encoded)]
    problems = [problem for group in groups for problem in group.problems]
    planner = SavePlanner(layouts=job.layouts)
    planner.is_coordinator = True
    written: Mapping[int, int] = {}
    try:
        answers, _ = planner.create_global_plan(plans)
    except StateRefusedError as error:
        problems += error.problems
    else:
        written = {
            rank: _written_bytes(answers[rank].planner_data.writes, stage, rank, encoded[rank])
            for stage in job.stages
            for rank in stage.ranks.ranks
        }
    held = {rank: size for group in groups for rank, size in zip(group.ranks, group.state_bytes(), strict=True)}
    ranks = tuple(RankBytes(rank, held[rank], written.get(rank, 0)) for rank in sorted(held))
    return Forecast(ranks, tuple(dict.fromkeys(problems)))


def _written_bytes(decision: bytes, stage: Stage, rank: int, encoded: EncodedTable) -> int:
    """The size of what the planner tells a rank to write."""
    entries, own_of = stage.ranks.table.entries, {name: fqn for fqn, name in stage.ranks.own_names(rank).items()}
    num_bytes = 0
    for one in _core.read_decision(decision, encoded.kind_of):
        fqns = [encoded.names[one.section][key] for key in one.keys]
        base = entries[fqns[0]] if fqns[0] in entries else stage.ranks.own[own_of[fqns[0]]]
        if isinstance(base, ObjectEntry):
            num_bytes += sum(stage.one.value_bytes[own_of.get(fqn, fqn)] for fqn in fqns)
            continue
        entry = stage.ranks.entry(rank, base)
        assert isinstance(entry, TensorEntry)
        boxes = [box for _, box in one.boxes] or _core.written_boxes(entry, one.steps)
        num_bytes += len(fqns) * entry.dtype.itemsize * sum(num_elements(sizes) for _, sizes in boxes)
    return num_bytes


def forecast_load(job: Job, source: LoadSource) -> Forecast:
    """What a load of a checkpoint by all ranks of a job would do."""
    load = _Load(job, source)
    stages = [load.asked_by(stage) for stage in job.stages]
    problems = [
        *source.problems,
        *(one for stage in stages for one in (*stage.ranks.problems, *_shard_problems(stage))),
    ]
    sent = dict(request for stage in stages for request in load.requests(stage))
    planner = load.planner({})
    planner.set_up_planner({}, source.opened.metadata, is_coordinator=True)
    try:
        plans = planner.create_global_plan([LoadPlan([], planner_data=sent[rank]) for rank in sorted(sent)])
        report = plans[0].planner_data.report
    except StateRefusedError as error:
        problems += error.problems
        report = error.report
    ranks = sorted((one for stage in stages for one in load.reads(stage)), key=lambda one: one.rank)
    return Forecast(tuple(ranks), tuple(dict.fromkeys(problems)), report)


class _Load:
    """The load of a checkpoint by a job: what its ranks ask for, and what they read."""

    def __init__(self, job: Job, source: LoadSource) -> None:
        self._job = job
        self._source = source
        self._opened = source.opened
        self._saved = source.opened.metadata.state_dict_metadata
        self._places = source.opened.metadata.storage_data or {}

    def planner(self, plans: Mapping[str, ComponentPlan]) -> LoadPlanner:
        """The planner of the load, with the plan of each component."""
        return LoadPlanner(layouts=self._job.layouts).with_rules(self._rules(plans))

    def _rules(self, plans: Mapping[str, ComponentPlan]) -> LoadRules:
        return LoadRules(self._opened.source, policy=self._job.policy, components=plans)

    def asked_by(self, stage: Stage) -> _LoadingStage:
        """Asks for the keys that the policy loads and the checkpoint has."""
        group = stage.ranks
        one, request = self._of_all(stage) if stage.state is None else self._of_state(stage.state, stage.ranks.own)
        if stage.rules is not None:
            one = place_on_mesh(one, stage.rules, self._source.chunks)
        ranks = AlikeRanks(group.ranks, one.table, mesh=group.mesh, own=group.own.keys())
        prefixes = [plan.saved_prefix for plan in request.components.values() if plan.saved_prefix is not None]
        asked = tuple(fqn for prefix in prefixes for fqn in paths_below(prefix, self._opened.metadata))
        return _LoadingStage(stage, ranks, request, asked)

    def requests(self, group: _LoadingStage) -> Iterator[tuple[int, ReadRequest]]:
        """The request that each rank of a stage sends to the coordinator."""
        for rank in group.ranks.ranks:
            table = group.ranks.encoded(rank, has=self._saved.__contains__).message
            names = group.ranks.own_names(rank).values()
            absent: dict[str, WhyNotRead] = {name: "missing" for name in names if name not in self._saved}
            yield rank, dataclasses.replace(group.request, table=table, not_read={**group.request.not_read, **absent})

    def _of_all(self, stage: Stage) -> tuple[OneRank, ReadRequest]:
        """The request of a job for all of a checkpoint. Random generators work out their part, as in the job."""
        one = stage.one
        is_tensor = {fqn: isinstance(entry, TensorEntry) for fqn, entry in one.table.entries.items()}
        plans = components_of(is_tensor, one.table.stock_paths, self._job.policy)
        rngs = self._generators(plans, stage.ranks.num_data_parallel)
        if rngs:
            cut = sort_components(rngs, self._opened, self._job.policy, self._job.num_ranks, lambda name: None)
            plans |= cut.plans
            is_kept = {fqn: component_of(fqn, plans, is_tensor=tensor) not in rngs for fqn, tensor in is_tensor.items()}
            one = one.restricted(is_kept.__getitem__)
        rules = self._rules(plans)
        loaded = one.restricted(lambda fqn: rules.is_loaded(fqn, is_tensor=is_tensor[fqn]))
        left: dict[str, WhyNotRead] = {fqn: "left" for fqn in one.table.entries if fqn not in loaded.table.entries}
        message, names = encode_table(loaded.table).message, name_metadata(self._opened.metadata)
        return loaded, ReadRequest(message, names, not_read=left, components=plans)

    def _generators(self, components: Iterable[str], num_data_parallel: int) -> dict[str, RngState]:
        """The components that ``RngState`` has saved: they load by its rule."""
        metadata = self._opened.metadata
        policy, rngs = self._job.policy, dict[str, RngState]()
        if self._source.problems:
            return rngs
        for name in components:
            key = self._opened.source.saved_prefix(name) + ".common"
            if key in metadata.state_dict_metadata and policy.object_action(name) in ("reshard", "reset", "omit"):
                common = read_saved(self._opened, key)
                rng = rng_of_saved(common, saved_world(metadata), self._job.num_ranks, num_data_parallel)
                rngs |= {} if rng is None else {name: rng}
        return rngs

    def _of_state(self, state: Mapping[str, Any], own: Collection[str]) -> tuple[OneRank, ReadRequest]:
        """The request of a state dict's rank. Values under a name of the rank's own are asked for even if not saved."""
        size = self._job.num_ranks
        state = {key: value.among(size) if isinstance(value, RngState) else value for key, value in state.items()}
        components = sort_components(state, self._opened, self._job.policy, size, lambda name: None)
        planner = self.planner(components.plans)
        planner.set_up_planner(components.values, self._opened.metadata)
        request: ReadRequest = planner.create_local_plan().planner_data
        absent = [fqn for fqn, why in request.not_read.items() if why == "missing" and fqn in own]
        entries = {**planner.wanted.entries, **dict.fromkeys(absent, ObjectEntry())}
        one = OneRank(dataclasses.replace(planner.wanted, entries=entries), {})
        not_read = {fqn: why for fqn, why in request.not_read.items() if fqn not in absent}
        return one, dataclasses.replace(request, not_read=not_read)

    def reads(self, group: _LoadingStage) -> Iterator[RankBytes]:
        """What each rank of a stage reads: values, and of tensors its part of each kind."""
        alike: Counter[tuple[int, int, torch.dtype]] = Counter()
        kinds: dict[tuple[int, int, torch.dtype], tuple[KeyEntry, _core.ChunkIndex]] = {}
        of_all = list(group.asked)
        for fqn, entry in group.ranks.table.entries.items():
            if isinstance(entry, ObjectEntry):
                of_all.append(fqn)
                continue
            of_tensor = self._saved[fqn]
            assert isinstance(of_tensor, TensorStorageMetadata)
            chunks = self._source.chunks[fqn]
            kind = (id(entry), id(chunks), of_tensor.properties.dtype)
            kinds[kind] = entry, chunks
            alike[kind] += 1
        for rank, state_bytes in zip(group.ranks.ranks, group.stage.ranks.state_bytes(), strict=True):
            own = [name for name in group.ranks.own_names(rank).values() if name in self._saved]
            num_bytes = sum(map(self._value_bytes, (*of_all, *own)))
            for kind, (base, chunks) in kinds.items():
                entry = group.ranks.entry(rank, base)
                assert isinstance(entry, TensorEntry)
                parts = chunks.find_overlaps(shard_of(entry.report, group.ranks.steps(base)).chunks)
                num_bytes += alike[kind] * kind[2].itemsize * sum(num_elements(part.sizes) for part in parts)
            yield RankBytes(rank, state_bytes, num_bytes)

    def _value_bytes(self, fqn: str) -> int:
        """The size of a value's record."""
        return int(getattr(self._places.get(MetadataIndex(fqn)), "length", 0))


def _shard_problems(group: _LoadingStage) -> Iterator[Problem]:
    """Data loaders of the checkpoint whose virtual shards are fewer than the data-parallel ranks that ask for all."""
    num_data_parallel = group.ranks.num_data_parallel
    fqns = group.ranks.table.entries if group.stage.state is None else ()
    found = {fqn.rpartition(".")[0]: num_shards for fqn in fqns if (num_shards := num_shards_of(fqn)) is not None}
    for name, num_shards in found.items():
        if num_shards < num_data_parallel:
            yield Problem("cannot_reshard", name, str(TooFewShardsError(num_shards, num_data_parallel)))
