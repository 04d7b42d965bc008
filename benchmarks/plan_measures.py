"""What bench_plan.py measures of one case: CPU seconds and bytes of the coordinator and of one rank."""

import ctypes
import gc
import os
import pickle
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from plan_cases import Case
from result_file import status_bytes
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from torchtitan_ext import _core
from torchtitan_ext.checkpoint.planners.items import ReadDecision
from torchtitan_ext.checkpoint.planners.load_planner import LoadPlanner
from torchtitan_ext.checkpoint.planners.save_planner import SavePlanner
from torchtitan_ext.checkpoint.rules.load_rules import ReadRequest
from torchtitan_ext.checkpoint.tables.key_table import ObjectEntry, TensorEntry
from torchtitan_ext.layout.layout import shard_of
from torchtitan_ext.storage.metadata.metadata_file import encode_metadata
from torchtitan_ext.storage.native.file_writer import FileWriter

_SHORT_SECONDS = 0.005
RULES = "None, Source()"  # what LoadPlanner() sends


@dataclass
class Measured:
    """The coordinator's part: unpickling what ranks sent, planning, pickling the answers."""

    gather_seconds: float
    plan_seconds: float
    scatter_seconds: float
    gather_bytes: float
    peak_bytes: float
    result: Any = None

    def row(self) -> dict[str, float]:
        return {name: value for name, value in vars(self).items() if name != "result"}

    def times(self, factor: float) -> "Measured":
        return Measured(*(value * factor for value in self.row().values()), self.result)


class Clock:
    """CPU seconds of the best of several rounds, with the garbage collector on or off.

    Args:
        rounds: How many; ten times as many where one takes less than some milliseconds.
    """

    def __init__(self, rounds: int, *, collect: bool) -> None:
        self.rounds = rounds
        self.is_collecting = collect
        gc.freeze()  # torch's own objects make each collection a fifth of a second

    def best(self, once: Callable[[], tuple[float, Any]]) -> tuple[float, Any]:
        """The seconds of the fastest round, and the result of the last."""
        found = []
        result = None
        while not self._is_done(found):
            result = None  # two at a time would take twice the memory
            self._begin(found)
            seconds, result = once()
            gc.enable()
            found.append(seconds)
        return min(found), result

    def coordinator(self, sent: Sequence[bytes], plan: Callable[[list[Any]], Any]) -> Measured:
        """One coordinator's planning; bytes are the longest message times the ranks, because DCP pads."""
        found: list[tuple[float, ...]] = []
        peak_bytes, result = 0, None
        while not self._is_done([sum(seconds) for seconds in found]):
            result = None
            self._begin([sum(seconds) for seconds in found])
            before = status_bytes("VmRSS")
            times = [time.process_time()]
            received = [pickle.loads(message) for message in sent]
            times.append(time.process_time())
            result = plan(received)
            times.append(time.process_time())
            for answer in result[0] if isinstance(result, tuple) else result:
                pickle.dumps(answer)
            times.append(time.process_time())
            gc.enable()
            peak_bytes = max(peak_bytes, status_bytes("VmHWM") - before)
            found.append(tuple(end - begin for begin, end in zip(times, times[1:], strict=False)))
            del received
        best = [min(column) for column in zip(*found, strict=True)]
        return Measured(*best, max(map(len, sent)) * len(sent), peak_bytes, result)

    def _is_done(self, found: Sequence[float]) -> bool:
        return len(found) >= self.rounds * (10 if found and min(found) < _SHORT_SECONDS else 1)

    def _begin(self, found: Sequence[float]) -> None:
        """As after a start: nothing to collect, freed memory given back, the peak begins anew. Once for short ones."""
        if not found or min(found) >= _SHORT_SECONDS:
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)
            Path("/proc/self/clear_refs").write_text("5")
        (gc.enable if self.is_collecting else gc.disable)()


def a_rank_of(case: Case) -> int:
    """A rank that is neither the first nor the coordinator's neighbour."""
    return min(case.num_ranks // 2 + 1, case.num_ranks - 1)


def measure_our_save(case: Case, clock: Clock) -> Measured:
    """The coordinator's part of a save; the plans and the metadata are its result."""
    planner = SavePlanner()
    planner.is_coordinator = True
    sent = [pickle.dumps(SavePlan([], planner_data=message)) for message in case.messages()]
    return clock.coordinator(sent, planner.create_global_plan)


def measure_our_load(case: Case, metadata: Metadata, clock: Clock) -> Measured:
    """The coordinator's part of a load on a world."""
    requests = [
        LoadPlan([], planner_data=ReadRequest(message, "one", RULES)) for message in case.messages(with_digests=False)
    ]
    planner = LoadPlanner()
    planner.metadata = metadata
    return clock.coordinator([pickle.dumps(plan) for plan in requests], planner.create_global_plan)


def measure_stock_save(case: Case, clock: Clock) -> Measured:
    """The same of stock."""
    sent = [pickle.dumps(_stock_plan(case, rank)) for rank in range(case.num_ranks)]
    return clock.coordinator(sent, DefaultSavePlanner().create_global_plan)


def measure_stock_load(num_ranks: int, plan_of_rank: LoadPlan, clock: Clock) -> Measured:
    """The coordinator's part of a stock load: it hands on what ranks sent, all as much as this rank."""
    planner = DefaultLoadPlanner()
    return clock.coordinator([pickle.dumps(plan_of_rank)] * num_ranks, planner.create_global_plan)


def _stock_plan(case: Case, rank: int) -> SavePlan:
    """What a rank of stock sends: one item per shard, as its default planner makes them."""
    items = []
    table = case.table(rank)
    chunks: dict[int, Any] = {}  # keys of one kind have one entry
    for fqn, entry in table.entries.items():
        if isinstance(entry, ObjectEntry):
            items.append(WriteItem(MetadataIndex(fqn), WriteItemType.BYTE_IO))
            continue
        assert isinstance(entry, TensorEntry)
        if id(entry) not in chunks:
            (chunks[id(entry)],) = shard_of(entry.report).chunks
        chunk = chunks[id(entry)]
        # Stock makes objects of its own for every item.
        made = TensorWriteData(
            chunk=ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes)),
            properties=TensorProperties(dtype=entry.dtype),
            size=torch.Size(entry.report.global_shape),
        )
        item_type = WriteItemType.TENSOR if entry.report.mesh is None else WriteItemType.SHARD
        items.append(WriteItem(MetadataIndex(fqn, torch.Size(chunk.offsets)), item_type, tensor_data=made))
    return SavePlan(items, planner_data=dict(table.stock_paths))


def measure_rank_save(state: dict[str, Any], make: type, answer: SavePlan | None, clock: Clock) -> float:
    """One rank's part of a save: before the gather, and after the scatter.

    Args:
        answer: What the coordinator told the rank; stock's is as the rank's own plan.
    """

    def once() -> tuple[float, None]:
        planner = make()
        begin = time.process_time()
        planner.set_up_planner(state, is_coordinator=False)
        plan = planner.create_local_plan()
        end = time.process_time()
        new_plan = plan if answer is None else pickle.loads(pickle.dumps(answer))
        middle = time.process_time()
        planner.finish_plan(new_plan)
        return end - begin + time.process_time() - middle, None

    return clock.best(once)[0]


def measure_rank_load(
    state: dict[str, Any], metadata: Metadata, make: type, clock: Clock
) -> tuple[float, LoadPlan, LoadPlan]:
    """One rank's part of a load; what it sends, and what it reads."""

    def once() -> tuple[float, tuple[LoadPlan, LoadPlan]]:
        planner = make()
        begin = time.process_time()
        planner.set_up_planner(state, metadata, is_coordinator=False)
        sent = planner.create_local_plan()
        answer = replace(sent, planner_data=ReadDecision({}, True, None)) if make is LoadPlanner else sent
        plan = planner.finish_plan(answer)
        return time.process_time() - begin, (sent, plan)

    seconds, plans = clock.best(once)
    return seconds, *plans


def with_places(metadata: Metadata, plan: LoadPlan) -> Metadata:
    """The metadata with a place in a file for each chunk that a rank reads: planners look these up."""
    places = {item.storage_index: _StorageInfo(f"__{at % 8}_0.distcp", at, 1) for at, item in enumerate(plan.items)}
    return replace(metadata, storage_data=places)


def measure_finish(case: Case, metadata: Metadata, clock: Clock) -> dict[str, Any]:
    """What the coordinator makes of the ranks' write results: ours and stock's, for the same records.

    ``finish_seconds`` has the making of ``.metadata`` in it, which is measured alone as well; the files are small.
    """
    written = [written_by(case, rank) for rank in range(case.num_ranks)]
    rows: dict[str, Any] = {}
    with TemporaryDirectory() as directory:
        ours = [rank_file(Path(directory), rank, records) for rank, records in enumerate(written)]
        stock = [
            [
                WriteResult(MetadataIndex(*record), 1, _StorageInfo(f"__{rank}_0.distcp", at, 1))
                for at, record in enumerate(records)
            ]
            for rank, records in enumerate(written)
        ]
        rows["ours"] = _measure_writer(metadata, ours, FileWriter(directory, sync=False), encode_metadata, clock)
        writer = FileSystemWriter(directory, sync_files=False)
        writer.set_up_storage_writer(True)
        rows["stock"] = _measure_writer(
            _unshared(metadata), stock, writer, lambda finished, _: pickle.dumps(finished), clock
        )
    return rows


def _measure_writer(
    metadata: Metadata,
    results: list[Any],
    writer: Any,
    encode: Callable[[Metadata, list[Any]], bytes],
    clock: Clock,
) -> dict[str, float]:
    sent = [pickle.dumps(result) for result in results]

    def finish() -> tuple[float, tuple[float, int]]:
        stored = replace(metadata)
        writer.prepare_global_plan([])
        begin = time.process_time()
        received = [pickle.loads(result) for result in sent]
        writer.finish(metadata=stored, results=received)
        end = time.process_time()
        size = len(encode(stored, received))
        return end - begin, (time.process_time() - end, size)

    seconds, (metadata_seconds, metadata_bytes) = clock.best(finish)
    return {
        "gather_bytes": max(map(len, sent)) * len(sent),
        "finish_seconds": seconds,
        "metadata_seconds": metadata_seconds,
        "metadata_bytes": metadata_bytes,
    }


def written_by(case: Case, rank: int) -> list[tuple[str, Any, int | None]]:
    """Key, offsets and hint of what a rank writes where each writes all it holds of what is its own."""
    written: list[tuple[str, Any, int | None]] = []
    chunks: dict[int, Any] = {}
    for fqn, entry in case.table(rank).entries.items():
        if isinstance(entry, ObjectEntry):
            written.append((fqn, None, None))
        elif isinstance(entry, TensorEntry) and (entry.report.mesh is not None or rank == 0):
            if id(entry) not in chunks:
                (chunks[id(entry)],) = shard_of(entry.report).chunks
            written.append((fqn, torch.Size(chunks[id(entry)].offsets), rank))
    return written


def rank_file(directory: Path, rank: int, records: Sequence[tuple[str, Any, int | None]]) -> _core.RankFile:
    name = f"__{rank}_0.distcp"
    writer = _core.RecordWriter(os.fsencode(directory / name), 1 << 20, 1, False)
    byte = ctypes.c_uint8()
    address = ctypes.addressof(byte)
    for fqn, offsets, hint in records:
        writer.add_record((fqn, offsets, hint), "", () if offsets is None else (0,) * len(offsets), address, 1)
    writer.write_queued()
    return writer.finish(name, bytes(16), rank)


def _unshared(metadata: Metadata) -> Metadata:
    """As stock has it: lists, sizes and properties of its own for each key."""
    return Metadata({fqn: pickle.loads(pickle.dumps(saved)) for fqn, saved in metadata.state_dict_metadata.items()})
