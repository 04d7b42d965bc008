"""Fingerprints of a checkpoint's tensors: those that its save stored, or read in the order of the files and in bounded
memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from torchtitan_ext import _core
from torchtitan_ext._core import SumTable
from torchtitan_ext.layout.layout import Box
from torchtitan_ext.offline.boxes import BoxReader, Piece, batches_of, chunks_of, new_buffer, records_of
from torchtitan_ext.offline.sources import DcpSource, FileSource, open_source
from torchtitan_ext.offline.workers import divide
from torchtitan_ext.storage.element_types import item_bytes_of
from torchtitan_ext.storage.inspect.dcp_damage import Damage, Verdict
from torchtitan_ext.storage.metadata.saved_state import ChunkKey
from torchtitan_ext.storage.progress import OnBytes


def prove_checkpoint(
    verdict: Verdict, *, max_bytes: int, num_threads: int, progress: OnBytes = lambda _: None
) -> Verdict:
    """Reads all tensors of a checkpoint that has no other damage, and compares them with its fingerprints.

    Raises:
        FileNotFoundError: Each rank has metadata of its own.
    """
    source = open_source(verdict.path)
    if not isinstance(source, DcpSource) or not source.has_sums:
        return verdict
    # What checksums would find first is found here too, and named by its tensor.
    source.verify = "none"
    stored = stored_sums(source, tensors_of(source))
    proved = list(stored)
    sums = sum_chunks(source, proved, max_bytes=max_bytes, num_threads=num_threads, progress=progress)
    wrong = []
    for fqn in proved:
        expected, found = stored[fqn].sums, sums[fqn].sums
        for offsets, sizes in source.state.tensors[fqn].chunks.boxes():
            if 0 not in sizes and found[offsets, sizes] != expected[offsets, sizes]:
                file = source.file_of(ChunkKey(fqn, offsets))
                rows = ", ".join(f"{first}:{first + size}" for first, size in zip(offsets, sizes, strict=True))
                what = f"{source.path / file}: {fqn}[{rows}] is not what was saved"
                wrong.append((fqn, Damage(file, what, "fingerprint")))
    return replace(
        verdict,
        damages=[damage for _, damage in wrong],
        num_proved=len(proved) - len({fqn for fqn, _ in wrong}),
        without_fingerprints=[fqn for fqn in tensors_of(source) if fqn not in stored],
    )


def tensors_of(source: FileSource) -> list[str]:
    """The keys of the tensors in a checkpoint."""
    return list(source.state.tensors)


def stored_sums(source: FileSource, fqns: Iterable[str]) -> SumTable:
    """The sums that the save stored, by chunks, of those tensors all of whose chunks have one. Reads nothing."""
    stored = SumTable()
    if not isinstance(source, DcpSource) or not source.has_sums:
        return stored
    for fqn in fqns:
        entry = source.state.entries[fqn]
        chunks = [] if entry is None else [box for box in entry.chunks.boxes() if 0 not in box[1]]
        sums = source.find_sums([ChunkKey(fqn, offsets) for offsets, _ in chunks])
        known: dict[Box | None, int] = {box: one for box, one in zip(chunks, sums, strict=True) if one is not None}
        if len(known) == len(chunks):
            stored.add_key(fqn, known)
    return stored


def sum_tensors(
    source: FileSource,
    fqns: Iterable[str],
    *,
    max_bytes: int,
    num_threads: int,
    progress: OnBytes = lambda _: None,
    stored: SumTable | None = None,
) -> dict[str, int]:
    """The sum over all elements of each tensor, modulo 2^64.

    Args:
        max_bytes: The bytes that all threads hold together; fewer threads run if this is little.
        stored: Sums that are taken as they are; these tensors are not read.
    """
    known = stored or SumTable()
    unread = [fqn for fqn in fqns if fqn not in known]
    read = sum_chunks(source, unread, max_bytes=max_bytes, num_threads=num_threads, progress=progress)
    return {fqn: table.replicas(fqn)[0].sums[None] for table in (known, read) for fqn in table}


def sum_chunks(
    source: FileSource, fqns: Iterable[str], *, max_bytes: int, num_threads: int, progress: OnBytes = lambda _: None
) -> SumTable:
    """Reads tensors, and sums each of their chunks. The arguments are those of ``sum_tensors``."""
    reader = BoxReader(source)
    entries = {fqn: reader.entry(fqn) for fqn in fqns}
    sums = SumTable()
    for fqn in entries:
        sums.add_key(fqn, {})
    shares = divide(max_bytes, num_threads)
    num_threads, part_bytes = shares.num_processes, shares.part_bytes
    reader.files.thread_count = shares.num_threads
    # Empty chunks are left out: stock may have saved another chunk at the same offsets.
    chunks = _in_file_order(source, [chunk for chunk in chunks_of(entries) if 0 not in chunk.sizes])
    free = [(BoxReader(source), new_buffer(part_bytes)) for _ in range(num_threads)]

    def sum_batch(batch: Sequence[_core.BoxPart]) -> list[int]:
        reader, buffer = free.pop()
        try:
            return [
                _core.sum_box(
                    memory.ctypes.data, item_bytes_of(one.dtype), one.offsets, one.sizes, entries[one.fqn].shape
                )
                for one, memory, _ in reader.read_parts(chunks, batch, buffer)
            ]
        finally:
            free.append((reader, buffer))

    for batch, totals in _map_in_threads(sum_batch, batches_of(chunks, part_bytes), num_threads):
        for part, total in zip(batch, totals, strict=True):
            chunk = chunks[part.box]
            sums.add(chunk.fqn, total, (chunk.offsets, chunk.sizes))
        progress(sum(part.num_bytes for part in batch))
    return sums


def _in_file_order(source: FileSource, chunks: Sequence[Piece]) -> list[Piece]:
    places = [(record.file, record.offset) for record in records_of(source, chunks)]
    return [chunks[position] for position in sorted(range(len(chunks)), key=places.__getitem__)]


def _map_in_threads(
    function: Callable[[list[_core.BoxPart]], list[int]], batches: Iterable[list[_core.BoxPart]], num_threads: int
) -> Iterator[tuple[list[_core.BoxPart], list[int]]]:
    """The result of each batch, in order; at most ``num_threads`` batches are in memory."""
    with ThreadPoolExecutor(num_threads) as pool:
        running = []
        for batch in batches:
            running.append((batch, pool.submit(function, batch)))
            if len(running) == num_threads:
                first, future = running.pop(0)
                yield first, future.result()
        for batch, future in running:
            yield batch, future.result()
