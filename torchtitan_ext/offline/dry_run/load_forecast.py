"""Forecasts what each rank would read, and from which files, by the planner of loads and the checkpoint's chunks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan

from torchtitan_ext import _core
from torchtitan_ext.checkpoint.operation.component_plans import paths_below, read_saved, sort_components
from torchtitan_ext.checkpoint.planners.load_planner import LoadPlanner
from torchtitan_ext.checkpoint.planners.saved_chunks import name_metadata
from torchtitan_ext.checkpoint.rules.load_rules import ComponentPlan, LoadRules, ReadRequest, WhyNotRead, component_of
from torchtitan_ext.checkpoint.rules.report import LoadReport
from torchtitan_ext.checkpoint.tables.component import saved_world
from torchtitan_ext.checkpoint.tables.key_table import KeyEntry, ObjectEntry, TensorEntry, encode_table
from torchtitan_ext.elastic.data.virtual_shards import TooFewShardsError, num_shards_of
from torchtitan_ext.elastic.rng import RngState, rng_of_saved
from torchtitan_ext.errors import Problem, StateRefusedError
from torchtitan_ext.layout.layout import num_elements, shard_of
from torchtitan_ext.offline.dry_run.alike_ranks import AlikeRanks
from torchtitan_ext.offline.dry_run.host_memory import loading_bytes
from torchtitan_ext.offline.dry_run.job import Job, OneRank, Stage, components_of, place_on_mesh
from torchtitan_ext.offline.dry_run.load_source import LoadSource
from torchtitan_ext.storage.metadata.lazy_metadata import LazyDict
from torchtitan_ext.storage.raw_tensor import dtype_name

_NO_FILE = np.iinfo(np.uint32).max


@dataclass(frozen=True)
class RankLoad:
    """What one rank would read.

    Attributes:
        state_bytes: The size of all tensors that the rank holds, loaded or not.
        num_reads: The number of boxes of saved chunks, and of values.
        num_bytes: The size of all reads.
        num_files: The number of files that they come from.
        whole_chunk_bytes: The bytes that a reader of whole chunks, such as stock's, would read.
        buffer_bytes: The most host memory beside the state (``host_memory``).
    """

    rank: int
    state_bytes: int
    num_reads: int
    num_bytes: int
    num_files: int
    whole_chunk_bytes: int
    buffer_bytes: int


@dataclass(frozen=True)
class LoadForecast:
    """What a load would do.

    Attributes:
        ranks: One entry per rank; if the load is refused, what could be read all the same.
        num_bytes: The bytes that all ranks read together.
        saved_bytes: The size of what is read, each saved byte counted once.
        amplification: How many times each byte is read: ``num_bytes / saved_bytes``.
        metadata_bytes: The size of ``.metadata`` and index together, which each rank reads; 0 if it is not known.
        seconds: The time until the slowest rank has read its part, at the given bandwidth.
        metadata_seconds: The time until all ranks have read ``.metadata`` and index, before that.
        problems: Why the load would be refused; empty if it would not.
        report: What becomes of each component.
        file_bytes: The size of each file of the checkpoint, by name.
    """

    ranks: tuple[RankLoad, ...]
    num_bytes: int
    saved_bytes: int
    amplification: float
    metadata_bytes: int
    seconds: float | None
    metadata_seconds: float | None
    problems: tuple[Problem, ...]
    report: LoadReport | None
    file_bytes: Mapping[str, int]


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


@dataclass
class _ReadAlike:
    """Keys whose tensors are held alike and were saved alike.

    Attributes:
        dtype: The saved dtype.
        files: For each key the numbers of the files of its chunks: a row per different list, and no row twice.
    """

    entry: KeyEntry
    chunks: _core.ChunkIndex
    dtype: torch.dtype
    num_keys: int = 0
    files: dict[bytes, None] = field(default_factory=dict)


def forecast_load(job: Job, source: LoadSource) -> LoadForecast:
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
    num_bytes = sum(one.num_bytes for one in ranks)
    saved_bytes = load.saved_bytes(stages)
    metadata_bytes = sum(source.metadata_bytes)
    return LoadForecast(
        ranks=tuple(ranks),
        num_bytes=num_bytes,
        saved_bytes=saved_bytes,
        amplification=num_bytes / saved_bytes if saved_bytes else 1.0,
        metadata_bytes=metadata_bytes,
        seconds=job.bandwidth.seconds([one.num_bytes for one in ranks]),
        metadata_seconds=job.bandwidth.seconds([metadata_bytes] * len(ranks)),
        problems=tuple(dict.fromkeys(problems)),
        report=report,
        file_bytes=source.file_bytes,
    )


class _Load:
    """The load of a checkpoint by a job: what its ranks ask for, what they read, and in which files it lies."""

    def __init__(self, job: Job, source: LoadSource) -> None:
        self._job = job
        self._source = source
        self._opened = source.opened
        self._saved = source.opened.metadata.state_dict_metadata
        self._places = source.opened.metadata.storage_data or {}
        self._columns = self._places.columns if isinstance(self._places, LazyDict) else None
        self._numbers: dict[str, int] = {}

    def planner(self, plans: Mapping[str, ComponentPlan]) -> LoadPlanner:
        """The planner of the load, with the plan of each component."""
        return LoadPlanner(layouts=self._job.layouts).with_rules(self._rules(plans))

    def _rules(self, plans: Mapping[str, ComponentPlan]) -> LoadRules:
        return LoadRules(self._opened.source, policy=self._job.policy, components=plans)

    def asked_by(self, stage: Stage) -> _LoadingStage:
        """Asks for the keys that the stage holds, the policy loads and the checkpoint has."""
        group = stage.ranks
        one, request = self._of_all(stage) if stage.state is None else self._of_state(stage.state, stage)
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
            cut = sort_components(rngs, [self._opened], self._job.policy, self._job.num_ranks, lambda name: None)
            plans |= cut.plans[0]
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

    def _of_state(self, state: Mapping[str, Any], stage: Stage) -> tuple[OneRank, ReadRequest]:
        """The request of a state dict's rank. Values under a name of the rank's own are asked for even if not saved."""
        size = self._job.num_ranks
        state = {key: value.among(size) if isinstance(value, RngState) else value for key, value in state.items()}
        components = sort_components(state, [self._opened], self._job.policy, size, lambda name: None)
        planner = self.planner(components.plans[0])
        planner.set_up_planner(components.values, self._opened.metadata)
        request: ReadRequest = planner.create_local_plan().planner_data
        absent = [fqn for fqn, why in request.not_read.items() if why == "missing" and fqn in stage.ranks.own]
        entries = {**planner.wanted.entries, **dict.fromkeys(absent, ObjectEntry())}
        one = OneRank(dataclasses.replace(planner.wanted, entries=entries), {}).restricted(stage.holds)
        not_read = {fqn: why for fqn, why in request.not_read.items() if fqn not in absent and stage.holds(fqn)}
        return one, dataclasses.replace(request, not_read=not_read)

    def reads(self, group: _LoadingStage) -> Iterator[RankLoad]:
        """What each rank of a stage reads: values, and of tensors its part of each kind, which lies in known files."""
        alike: dict[tuple[int, int, torch.dtype], _ReadAlike] = {}
        of_all: list[str] = []
        for fqn, entry in group.ranks.table.entries.items():
            if isinstance(entry, ObjectEntry):
                of_all.append(fqn)
                continue
            of_tensor = self._saved[fqn]
            assert isinstance(of_tensor, TensorStorageMetadata)
            chunks, dtype = self._source.chunks[fqn], of_tensor.properties.dtype
            of_key = alike.setdefault((id(entry), id(chunks), dtype), _ReadAlike(entry, chunks, dtype))
            of_key.num_keys += 1
            of_key.files.setdefault(self._files_of(fqn))
        kinds = [(one, np.array([np.frombuffer(row, np.uint32) for row in one.files])) for one in alike.values()]
        metadata_bytes, index_bytes = self._source.metadata_bytes
        for rank, state_bytes in zip(group.ranks.ranks, group.stage.ranks.state_bytes(), strict=True):
            own = [name for name in group.ranks.own_names(rank).values() if name in self._saved]
            values = [*of_all, *own, *group.asked]
            value_bytes = list(map(self._value_bytes, values))
            found = {number for fqn in values for number in np.frombuffer(self._files_of(fqn), np.uint32).tolist()}
            num_reads, num_bytes, staged_bytes = len(values), sum(value_bytes), 0
            whole_bytes, is_packed = num_bytes, group.stage.one.is_packed
            for one, files in kinds:
                entry = group.ranks.entry(rank, one.entry)
                assert isinstance(entry, TensorEntry)
                parts = one.chunks.find_overlaps(shard_of(entry.report, group.ranks.steps(one.entry)).chunks)
                of_chunk = [part.saved for part in parts]
                item_bytes = one.num_keys * one.dtype.itemsize
                part_bytes = item_bytes * sum(num_elements(part.sizes) for part in parts)
                num_reads += one.num_keys * len(parts)
                num_bytes += part_bytes
                whole_bytes += item_bytes * sum(num_elements(one.chunks.box(chunk)[1]) for chunk in of_chunk)
                is_cast = entry.dtype != one.dtype
                is_packed |= is_cast
                by_torch = is_cast and not _core.has_cast(dtype_name(one.dtype), dtype_name(entry.dtype))
                if self._job.device != "cpu" or by_torch:
                    staged_bytes += part_bytes
                if of_chunk:
                    found.update(np.unique(files[:, of_chunk]).tolist())
            buffer_bytes = loading_bytes(
                num_reads=num_reads,
                num_bytes=num_bytes,
                value_bytes=value_bytes,
                staged_bytes=staged_bytes,
                device=self._job.device,
                is_packed=is_packed or whole_bytes > num_bytes,
                metadata_bytes=metadata_bytes,
                index_bytes=index_bytes,
            )
            num_files = len(found - {_NO_FILE})
            yield RankLoad(rank, state_bytes, num_reads, num_bytes, num_files, whole_bytes, buffer_bytes)

    def saved_bytes(self, groups: Sequence[_LoadingStage]) -> int:
        """The size of all tensors and values that any rank reads, each counted once."""
        wanted = {fqn for group in groups for fqn in (*group.ranks.table.entries, *group.asked)}
        for group in groups:
            for rank in group.ranks.ranks:
                wanted.update(group.ranks.own_names(rank).values())
        total = 0
        for fqn in wanted:
            entry = self._saved.get(fqn)
            if isinstance(entry, TensorStorageMetadata):
                total += num_elements(entry.size) * entry.properties.dtype.itemsize
            elif entry is not None:
                total += self._value_bytes(fqn)
        return total

    def _files_of(self, fqn: str) -> bytes:
        """The number of the file of each chunk of a tensor, or of a value, as uint32; ``_NO_FILE`` if none is known."""
        number = None if self._columns is None else self._columns.find_key(fqn)
        if self._columns is not None and number is not None:
            return self._columns.paths_of_parts(number)
        entry = self._saved[fqn]
        offsets = [chunk.offsets for chunk in entry.chunks] if isinstance(entry, TensorStorageMetadata) else [None]
        paths = [getattr(self._places.get(MetadataIndex(fqn, offset)), "relative_path", None) for offset in offsets]
        numbers = [_NO_FILE if p is None else self._numbers.setdefault(p, len(self._numbers)) for p in paths]
        return np.array(numbers, np.uint32).tobytes()

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
