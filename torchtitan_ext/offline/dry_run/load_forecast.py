"""Forecasts what each rank would read, and from which files, by the planner of loads and the checkpoint's chunks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan

from torchtitan_ext.checkpoint.planners.items import wanted_chunks
from torchtitan_ext.checkpoint.planners.saved_chunks import ChunkList
from torchtitan_ext.checkpoint.rules.load_rules import ReadRequest
from torchtitan_ext.checkpoint.rules.report import LoadReport
from torchtitan_ext.checkpoint.tables.key_table import KeyEntry, ObjectEntry, TensorEntry
from torchtitan_ext.errors import Problem, StateRefusedError
from torchtitan_ext.layout.layout import num_elements
from torchtitan_ext.offline.dry_run.host_memory import Device, Reads, loading_bytes
from torchtitan_ext.offline.dry_run.job import Job
from torchtitan_ext.offline.dry_run.load_requests import LoadingRanks, LoadRequests
from torchtitan_ext.offline.dry_run.load_source import LoadSource
from torchtitan_ext.storage.metadata.lazy_metadata import LazyDict

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
        report: What becomes of each component; ``None`` without a policy.
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


@dataclass
class _ReadAlike:
    """Keys whose tensors are held alike and were saved alike.

    Attributes:
        dtype: The saved dtype.
        files: For each key the numbers of the files of its chunks: a row per different list, and no row twice.
    """

    entry: KeyEntry
    chunks: ChunkList
    dtype: torch.dtype
    num_keys: int = 0
    files: dict[bytes, None] = field(default_factory=dict)


def forecast_load(job: Job, source: LoadSource) -> LoadForecast:
    """What a load of a checkpoint by all ranks of a job would do."""
    metadata = source.opened.metadata
    requests = LoadRequests(job, source)
    groups = [requests.of_stage(stage) for stage in job.stages]
    problems = [*source.problems, *(one for group in groups for one in (*group.ranks.problems, *group.problems))]
    sent = dict(request for group in groups for request in _requests(group, metadata))
    planner = requests.planner({})
    planner.set_up_planner({}, metadata, is_coordinator=True)
    try:
        plans = planner.create_global_plan([LoadPlan([], planner_data=sent[rank]) for rank in sorted(sent)])
        report = plans[0].planner_data.report
    except StateRefusedError as error:
        problems += error.problems
        report = error.report
    reading = _Reading(source, job.device)
    ranks = sorted((one for group in groups for one in reading.ranks(group)), key=lambda one: one.rank)
    num_bytes = sum(one.num_bytes for one in ranks)
    saved_bytes = reading.saved_bytes(groups)
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


def _requests(group: LoadingRanks, metadata: Metadata) -> Iterator[tuple[int, ReadRequest]]:
    """The request that each rank sends to the coordinator."""
    saved = metadata.state_dict_metadata
    for rank in group.ranks.ranks:
        table = group.ranks.encoded(rank, has=saved.__contains__).message
        absent = [name for name in group.ranks.own_names(rank).values() if name not in saved]
        yield rank, dataclasses.replace(group.request, table=table, missing=(*group.request.missing, *absent))


class _Reading:
    """Works out what ranks, whose tensors lie on ``device``, read of a checkpoint, and in which files it lies."""

    def __init__(self, source: LoadSource, device: Device) -> None:
        metadata = source.opened.metadata
        self._source = source
        self._device = device
        self._saved = metadata.state_dict_metadata
        self._places = metadata.storage_data or {}
        self._columns = self._places.columns if isinstance(self._places, LazyDict) else None
        self._numbers: dict[str, int] = {}

    def ranks(self, group: LoadingRanks) -> Iterator[RankLoad]:
        alike: dict[tuple[int, int, torch.dtype], _ReadAlike] = {}
        values: list[str] = []
        for fqn, entry in group.ranks.table.entries.items():
            if isinstance(entry, ObjectEntry):
                values.append(fqn)
                continue
            of_tensor = self._saved[fqn]
            assert isinstance(of_tensor, TensorStorageMetadata)
            chunks, dtype = self._source.chunks[fqn], of_tensor.properties.dtype
            of_key = alike.setdefault((id(entry), id(chunks), dtype), _ReadAlike(entry, chunks, dtype))
            of_key.num_keys += 1
            of_key.files.setdefault(self._files_of(fqn))
        kinds = [(one, np.array([np.frombuffer(row, np.uint32) for row in one.files])) for one in alike.values()]
        for rank, state_bytes in zip(group.ranks.ranks, group.stage.ranks.state_bytes(), strict=True):
            own = [name for name in group.ranks.own_names(rank).values() if name in self._saved]
            yield self._rank(rank, state_bytes, [*values, *own, *group.asked], kinds, group)

    def _rank(
        self,
        rank: int,
        state_bytes: int,
        values: Sequence[str],
        kinds: Sequence[tuple[_ReadAlike, NDArray[np.uint32]]],
        group: LoadingRanks,
    ) -> RankLoad:
        """What one rank reads: these values, and of tensors its part of each kind, which lies in the given files."""
        value_bytes = list(map(self._value_bytes, values))
        found = {number for fqn in values for number in np.frombuffer(self._files_of(fqn), np.uint32).tolist()}
        reads = Reads(len(values), sum(value_bytes), value_bytes)
        whole_bytes = reads.num_bytes
        for one, files in kinds:
            entry = group.ranks.entry(rank, one.entry)
            assert isinstance(entry, TensorEntry)
            parts = one.chunks.find_parts(wanted_chunks(entry, group.ranks.steps(one.entry)))
            of_chunk = [part[4] for part in parts]
            sizes = [num_elements(part[6]) * one.dtype.itemsize for part in parts]
            reads.num_reads += one.num_keys * len(parts)
            reads.num_bytes += one.num_keys * sum(sizes)
            whole = (num_elements(one.chunks.index.box(chunk)[1]) for chunk in of_chunk)
            whole_bytes += one.num_keys * sum(whole) * one.dtype.itemsize
            if self._device != "cpu" or entry.dtype != one.dtype:
                reads.staged_bytes += one.num_keys * sum(sizes)
                reads.largest_staged_bytes = max([reads.largest_staged_bytes, *sizes])
            if of_chunk:
                found.update(np.unique(files[:, of_chunk]).tolist())
        metadata_bytes, index_bytes = self._source.metadata_bytes
        is_packed = group.stage.one.is_packed or whole_bytes > reads.num_bytes
        buffer_bytes = loading_bytes(reads, is_packed=is_packed, metadata_bytes=metadata_bytes, index_bytes=index_bytes)
        num_files = len(found - {_NO_FILE})
        return RankLoad(rank, state_bytes, reads.num_reads, reads.num_bytes, num_files, whole_bytes, buffer_bytes)

    def saved_bytes(self, groups: Sequence[LoadingRanks]) -> int:
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
