"""What each rank would read, and of which files: by the planner that loads, and the chunks of the checkpoint."""

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
from torchtitan_ext.checkpoint.planners.load_planner import LoadPlanner
from torchtitan_ext.checkpoint.planners.saved_metadata import ChunkList
from torchtitan_ext.checkpoint.rules.load_rules import ReadRequest
from torchtitan_ext.checkpoint.rules.report import LoadReport
from torchtitan_ext.checkpoint.tables.key_table import KeyEntry, ObjectEntry, TensorEntry
from torchtitan_ext.errors import Problem, StateRefusedError
from torchtitan_ext.layout.layout import num_elements
from torchtitan_ext.offline.amounts import Bandwidth
from torchtitan_ext.offline.dry_run.alike_ranks import AlikeRanks
from torchtitan_ext.offline.dry_run.host_memory import Device, loading_bytes
from torchtitan_ext.offline.dry_run.load_source import LoadSource
from torchtitan_ext.storage.metadata.lazy_metadata import LazyDict

_NO_FILE = np.iinfo(np.uint32).max


@dataclass(frozen=True)
class RankLoad:
    """What one rank would read.

    Attributes:
        state_bytes: Of its tensors, those that are not loaded too.
        num_reads: Boxes of saved chunks, and values.
        num_bytes: Of these.
        num_files: That they lie in.
        whole_chunk_bytes: What a reader reads that takes each chunk as a whole, as stock's does.
        buffer_bytes: At most, in the memory of the host, beside the state (``host_memory``).
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
        ranks: One each; where the load is refused, what could be read all the same.
        num_bytes: All ranks together.
        saved_bytes: Of what is read, each byte once.
        amplification: How many times the same bytes are read: the former over the latter.
        metadata_bytes: Of ``.metadata`` and index together, which each rank reads; 0 where that is not known.
        seconds: Until the slowest rank has read its part, at the given bandwidth.
        metadata_seconds: Until all ranks have read ``.metadata`` and index, which comes before.
        problems: Why it would be refused; none where it would not.
        report: What becomes of each component, where there is a policy.
        file_bytes: Bytes of each file of the checkpoint, by name.
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
class LoadingRanks:
    """Ranks that ask for the same of a checkpoint.

    Attributes:
        ranks: With what they read as the table.
        request: What one of them asks for.
        state_bytes: Of each rank the bytes of its tensors.
        is_packed: Whether some of their tensors lie otherwise in memory than row by row.
        problems: What their objects would refuse, as far as the checkpoint tells.
        asked: The saved keys that objects read to work out their part.
    """

    ranks: AlikeRanks
    request: ReadRequest
    state_bytes: Sequence[int]
    is_packed: bool
    problems: tuple[Problem, ...] = ()
    asked: tuple[str, ...] = ()


@dataclass
class _ReadAlike:
    """Keys whose tensors are held alike and were saved alike.

    Attributes:
        dtype: That was saved.
        files: The numbers of the files of the chunks of each key, without repeats: a row per chunk list.
    """

    entry: KeyEntry
    chunks: ChunkList
    dtype: torch.dtype
    num_keys: int = 0
    files: dict[bytes, None] = field(default_factory=dict)


def forecast_load(
    groups: Sequence[LoadingRanks],
    planner: LoadPlanner,
    source: LoadSource,
    chunks: Mapping[str, ChunkList],
    bandwidth: Bandwidth,
    device: Device,
) -> LoadForecast:
    """What a load by all ranks would do.

    Args:
        groups: Together ranks 0, 1, ... of the job.
        planner: With the options and rules of the load.
        source: The checkpoint.
        chunks: How its tensors were saved.
        device: Where the ranks' tensors lie.
    """
    metadata = source.opened.metadata
    problems = [
        *source.problems,
        *(problem for group in groups for problem in (*group.ranks.problems, *group.problems)),
    ]
    requests = dict(request for group in groups for request in _requests(group, metadata))
    plans = [LoadPlan([], planner_data=requests[rank]) for rank in sorted(requests)]
    planner.set_up_planner({}, metadata, is_coordinator=True)
    try:
        report = planner.create_global_plan(plans)[0].planner_data.report
    except StateRefusedError as error:
        problems += error.problems
        report = error.report
    files = _Files(metadata)
    reading = _Reading(source, chunks, files, device)
    ranks = sorted((one for group in groups for one in reading.ranks(group)), key=lambda one: one.rank)
    num_bytes = sum(one.num_bytes for one in ranks)
    saved_bytes = _saved_bytes(groups, metadata, files)
    metadata_bytes = sum(source.metadata_bytes)
    return LoadForecast(
        tuple(ranks),
        num_bytes,
        saved_bytes,
        num_bytes / saved_bytes if saved_bytes else 1.0,
        metadata_bytes,
        bandwidth.seconds([one.num_bytes for one in ranks]),
        bandwidth.seconds([metadata_bytes] * len(ranks)),
        tuple(dict.fromkeys(problems)),
        report,
        source.file_bytes,
    )


def _requests(group: LoadingRanks, metadata: Metadata) -> Iterator[tuple[int, ReadRequest]]:
    """What each rank sends to the coordinator."""
    saved = metadata.state_dict_metadata
    for rank in group.ranks.ranks:
        table = group.ranks.encoded(rank, has=saved.__contains__).message
        absent = [name for name in group.ranks.own_names(rank).values() if name not in saved]
        yield rank, dataclasses.replace(group.request, table=table, missing=(*group.request.missing, *absent))


class _Reading:
    """What ranks read of a checkpoint.

    Args:
        chunks: How its tensors were saved.
        files: Where its parts lie.
        device: Where the ranks' tensors lie.
    """

    def __init__(self, source: LoadSource, chunks: Mapping[str, ChunkList], files: _Files, device: Device) -> None:
        self._source = source
        self._saved = source.opened.metadata.state_dict_metadata
        self._chunks = chunks
        self._device = device
        self._files = files

    def ranks(self, group: LoadingRanks) -> Iterator[RankLoad]:
        """What each rank of a group reads."""
        alike: dict[tuple[int, int, torch.dtype], _ReadAlike] = {}
        values: list[str] = []
        for fqn, entry in group.ranks.table.entries.items():
            if isinstance(entry, ObjectEntry):
                values.append(fqn)
                continue
            of_tensor = self._saved[fqn]
            assert isinstance(of_tensor, TensorStorageMetadata)
            chunks, dtype = self._chunks[fqn], of_tensor.properties.dtype
            of_key = alike.setdefault((id(entry), id(chunks), dtype), _ReadAlike(entry, chunks, dtype))
            of_key.num_keys += 1
            of_key.files.setdefault(self._files.of(fqn))
        kinds = [(one, np.array([np.frombuffer(row, np.uint32) for row in one.files])) for one in alike.values()]
        for rank, state_bytes in zip(group.ranks.ranks, group.state_bytes, strict=True):
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
        """What one rank reads.

        Args:
            values: Keys of what is no tensor.
            kinds: Of tensors, each with the files of its keys.
        """
        value_bytes = list(map(self._files.value_bytes, values))
        found = {number for fqn in values for number in np.frombuffer(self._files.of(fqn), np.uint32).tolist()}
        num_reads = len(values)
        num_bytes = whole_bytes = sum(value_bytes)
        staged_bytes = largest_staged_bytes = 0
        for one, files in kinds:
            entry = group.ranks.entry(rank, one.entry)
            assert isinstance(entry, TensorEntry)
            parts = one.chunks.find_parts(wanted_chunks(entry, group.ranks.steps(one.entry)))
            of_chunk = [part[4] for part in parts]
            sizes = [num_elements(part[6]) * one.dtype.itemsize for part in parts]
            num_reads += one.num_keys * len(parts)
            num_bytes += one.num_keys * sum(sizes)
            whole = (num_elements(one.chunks.index.box(chunk)[1]) for chunk in of_chunk)
            whole_bytes += one.num_keys * sum(whole) * one.dtype.itemsize
            if self._device != "cpu" or entry.dtype != one.dtype:
                staged_bytes += one.num_keys * sum(sizes)
                largest_staged_bytes = max(largest_staged_bytes, *sizes) if sizes else largest_staged_bytes
            if of_chunk:
                found.update(np.unique(files[:, of_chunk]).tolist())
        buffer_bytes = loading_bytes(
            num_reads=num_reads,
            num_bytes=num_bytes,
            value_bytes=value_bytes,
            is_packed=group.is_packed or whole_bytes > num_bytes,
            staged_bytes=staged_bytes,
            largest_staged_bytes=largest_staged_bytes,
            metadata_bytes=self._source.metadata_bytes[0],
            index_bytes=self._source.metadata_bytes[1],
        )
        return RankLoad(rank, state_bytes, num_reads, num_bytes, len(found - {_NO_FILE}), whole_bytes, buffer_bytes)


def _saved_bytes(groups: Sequence[LoadingRanks], metadata: Metadata, files: _Files) -> int:
    """Bytes of all tensors and values that any rank reads, each once."""
    saved = metadata.state_dict_metadata
    wanted = {fqn for group in groups for fqn in (*group.ranks.table.entries, *group.asked)}
    for group in groups:
        for rank in group.ranks.ranks:
            wanted.update(group.ranks.own_names(rank).values())
    total = 0
    for fqn in wanted:
        entry = saved.get(fqn)
        if isinstance(entry, TensorStorageMetadata):
            total += num_elements(entry.size) * entry.properties.dtype.itemsize
        elif entry is not None:
            total += files.value_bytes(fqn)
    return total


class _Files:
    """Where the parts of a checkpoint lie, with numbers for its files."""

    def __init__(self, metadata: Metadata) -> None:
        self._entries = metadata.state_dict_metadata
        self._places = metadata.storage_data or {}
        self._columns = self._places.columns if isinstance(self._places, LazyDict) else None
        self._numbers: dict[str, int] = {}

    def of(self, fqn: str) -> bytes:
        """The file of each chunk of a tensor, or of a value, as uint32; ``_NO_FILE`` for none."""
        number = None if self._columns is None else self._columns.find_key(fqn)
        if self._columns is not None and number is not None:
            return self._columns.paths_of_parts(number)
        entry = self._entries[fqn]
        offsets = [chunk.offsets for chunk in entry.chunks] if isinstance(entry, TensorStorageMetadata) else [None]
        paths = [getattr(self._places.get(MetadataIndex(fqn, offset)), "relative_path", None) for offset in offsets]
        numbers = [_NO_FILE if p is None else self._numbers.setdefault(p, len(self._numbers)) for p in paths]
        return np.array(numbers, np.uint32).tobytes()

    def value_bytes(self, fqn: str) -> int:
        """Bytes of a value's record."""
        return int(getattr(self._places.get(MetadataIndex(fqn)), "length", 0))
