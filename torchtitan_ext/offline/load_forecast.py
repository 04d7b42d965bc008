"""What each rank would read, and of which files: by the planner that loads, and the chunks of the checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan

from torchtitan_ext.checkpoint.key_table import KeyEntry, ObjectEntry, TensorEntry
from torchtitan_ext.checkpoint.load_planner import LoadPlanner
from torchtitan_ext.checkpoint.load_rules import ReadRequest
from torchtitan_ext.checkpoint.read_items import wanted_chunks
from torchtitan_ext.checkpoint.report import LoadReport
from torchtitan_ext.checkpoint.saved_chunks import ChunkList
from torchtitan_ext.errors import Problem, StateRefusedError
from torchtitan_ext.layout.layout import num_elements
from torchtitan_ext.offline.alike_ranks import AlikeRanks
from torchtitan_ext.offline.amounts import Bandwidth
from torchtitan_ext.storage.file_reader import BATCH_BYTES
from torchtitan_ext.storage.file_writer import BLOCK_BYTES
from torchtitan_ext.storage.lazy_metadata import LazyDict
from torchtitan_ext.storage.threads import MAX_THREADS

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
        buffer_bytes: At most, in the memory of the host, beside the state: what is copied to a GPU, cast or unpickled.
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
        seconds: Until the slowest rank has read its part, at the given bandwidth.
        problems: Why it would be refused; none where it would not.
        report: What becomes of each component, where there is a policy.
        file_bytes: Bytes of each file of the checkpoint, by name.
    """

    ranks: tuple[RankLoad, ...]
    num_bytes: int
    saved_bytes: int
    amplification: float
    seconds: float | None
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
        problems: What their objects would refuse, as far as the checkpoint tells.
    """

    ranks: AlikeRanks
    request: ReadRequest
    state_bytes: Sequence[int]
    problems: tuple[Problem, ...] = ()


@dataclass
class _ReadAlike:
    """Keys whose tensors are held alike and were saved alike.

    Attributes:
        files: The numbers of the files of the chunks of each key, without repeats: a row per chunk list.
    """

    entry: KeyEntry
    chunks: ChunkList
    itemsize: int
    num_keys: int = 0
    files: dict[bytes, None] = field(default_factory=dict)


def forecast_load(
    groups: Sequence[LoadingRanks],
    planner: LoadPlanner,
    metadata: Metadata,
    chunks: Mapping[str, ChunkList],
    bandwidth: Bandwidth,
    file_bytes: Mapping[str, int],
) -> LoadForecast:
    """What a load by all ranks would do.

    Args:
        groups: Together ranks 0, 1, ... of the job.
        planner: With the options and rules of the load.
        chunks: How tensors were saved.
        file_bytes: Bytes of each file of the checkpoint.
    """
    problems = [problem for group in groups for problem in (*group.ranks.problems, *group.problems)]
    requests = dict(request for group in groups for request in _requests(group, metadata))
    plans = [LoadPlan([], planner_data=requests[rank]) for rank in sorted(requests)]
    planner.set_up_planner({}, metadata, is_coordinator=True)
    try:
        report = planner.create_global_plan(plans)[0].planner_data.report
    except StateRefusedError as error:
        problems += error.problems
        report = error.report
    files = _Files(metadata)
    ranks = sorted((one for group in groups for one in _ranks(group, metadata, chunks, files)), key=lambda o: o.rank)
    num_bytes = sum(one.num_bytes for one in ranks)
    saved_bytes = _saved_bytes(groups, metadata)
    return LoadForecast(
        tuple(ranks),
        num_bytes,
        saved_bytes,
        num_bytes / saved_bytes if saved_bytes else 1.0,
        bandwidth.seconds([one.num_bytes for one in ranks]),
        tuple(dict.fromkeys(problems)),
        report,
        file_bytes,
    )


def _requests(group: LoadingRanks, metadata: Metadata) -> Iterator[tuple[int, ReadRequest]]:
    """What each rank sends to the coordinator."""
    saved = metadata.state_dict_metadata
    for rank in group.ranks.ranks:
        table = group.ranks.encoded(rank, has=saved.__contains__).message
        absent = [name for name in group.ranks.own_names(rank).values() if name not in saved]
        yield rank, dataclasses.replace(group.request, table=table, missing=(*group.request.missing, *absent))


def _ranks(
    group: LoadingRanks, metadata: Metadata, chunks: Mapping[str, ChunkList], files: _Files
) -> Iterator[RankLoad]:
    """What each rank reads."""
    saved = metadata.state_dict_metadata
    alike: dict[tuple[int, int, int], _ReadAlike] = {}
    values: list[str] = []
    for fqn, entry in group.ranks.table.entries.items():
        if isinstance(entry, ObjectEntry):
            values.append(fqn)
            continue
        of_tensor = saved[fqn]
        assert isinstance(of_tensor, TensorStorageMetadata)
        itemsize = of_tensor.properties.dtype.itemsize
        key = (id(entry), id(chunks[fqn]), itemsize)
        of_key = alike.setdefault(key, _ReadAlike(entry, chunks[fqn], itemsize))
        of_key.num_keys += 1
        of_key.files.setdefault(files.of(fqn))
    value_bytes = sum(map(files.value_bytes, values))
    value_files = {number for fqn in values for number in np.frombuffer(files.of(fqn), np.uint32).tolist()}
    of_files = {key: np.array([np.frombuffer(row, np.uint32) for row in one.files]) for key, one in alike.items()}
    for rank, state_bytes in zip(group.ranks.ranks, group.state_bytes, strict=True):
        own = [name for name in group.ranks.own_names(rank).values() if name in saved]
        found = set(value_files).union(*(np.frombuffer(files.of(name), np.uint32).tolist() for name in own))
        num_reads = len(values) + len(own)
        held_bytes = num_bytes = whole_bytes = value_bytes + sum(map(files.value_bytes, own))
        largest = 0
        for key, one in alike.items():
            entry = group.ranks.entry(rank, one.entry)
            assert isinstance(entry, TensorEntry)
            parts = one.chunks.find_parts(wanted_chunks(entry, group.ranks.steps(one.entry)))
            of_chunk = [part[4] for part in parts]
            sizes = [num_elements(part[6]) * one.itemsize for part in parts]
            num_reads += one.num_keys * len(parts)
            num_bytes += one.num_keys * sum(sizes)
            whole = (num_elements(one.chunks.index.box(chunk)[1]) for chunk in of_chunk)
            whole_bytes += one.num_keys * sum(whole) * one.itemsize
            largest = max(largest, *sizes) if sizes else largest
            if of_chunk:
                found.update(np.unique(of_files[key][:, of_chunk]).tolist())
        buffers = held_bytes + MAX_THREADS * BLOCK_BYTES + BATCH_BYTES + largest
        yield RankLoad(
            rank, state_bytes, num_reads, num_bytes, len(found - {_NO_FILE}), whole_bytes, min(num_bytes, buffers)
        )


def _saved_bytes(groups: Sequence[LoadingRanks], metadata: Metadata) -> int:
    """Bytes of all tensors and values that any rank reads, each once."""
    saved, files = metadata.state_dict_metadata, _Files(metadata)
    wanted = {fqn for group in groups for fqn in group.ranks.table.entries}
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
