"""Fingerprints of a checkpoint's tensors, read in the order of the files and in bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from torchtitan_ext import ops
from torchtitan_ext.checkpoint.tables.tensor_sums import hex_of_digest
from torchtitan_ext.layout.layout import Chunk, LocalShard
from torchtitan_ext.offline.boxes import BoxReader, Piece, batched, chunks_of, cut, new_buffer, records_of, views
from torchtitan_ext.offline.sources import FileSource
from torchtitan_ext.offline.workers import divide
from torchtitan_ext.storage.progress import OnBytes

_PieceOfShape = tuple[Piece, tuple[int, ...]]
"""A piece, and the shape of the tensor that it is cut from."""


def fingerprint_tensors(
    source: FileSource, fqns: Iterable[str], *, max_bytes: int, num_threads: int, progress: OnBytes = lambda _: None
) -> dict[str, str]:
    """The digest of each tensor, equal to the one that ``tte.fingerprint`` gives it in a state dict.

    Args:
        max_bytes: The bytes that all threads hold together; fewer threads run if this is little.
    """
    reader = BoxReader(source)
    entries = {fqn: reader.entry(fqn) for fqn in fqns}
    sums = dict.fromkeys(entries, 0)
    shares = divide(max_bytes, num_threads)
    num_threads, part_bytes = shares.num_processes, shares.part_bytes
    source.thread_count = shares.num_threads
    # Empty chunks are left out: stock may have saved another chunk at the same offsets.
    chunks = _in_file_order(source, [chunk for chunk in chunks_of(entries) if 0 not in chunk.sizes])
    shapes = {fqn: tuple(entry.size) for fqn, entry in entries.items()}
    pieces = ((piece, shapes[piece.fqn]) for chunk in chunks for piece in cut(chunk, part_bytes))
    free = [(reader.another(), new_buffer(part_bytes)) for _ in range(num_threads)]

    def digest(batch: Sequence[_PieceOfShape]) -> list[int]:
        reader, buffer = free.pop()
        try:
            read = [piece for piece, _ in batch]
            places = views(buffer, read)
            reader.read(read, places)
            return [_sum_of(place, *one) for place, one in zip(places, batch, strict=True)]
        finally:
            free.append((reader, buffer))

    for batch, totals in _map_in_threads(digest, batched(pieces, part_bytes), num_threads):
        for (piece, _), total in zip(batch, totals, strict=True):
            sums[piece.fqn] += total
        progress(sum(piece.num_bytes for piece, _ in batch))
    return {fqn: hex_of_digest(sums[fqn], str(entry.properties.dtype), shapes[fqn]) for fqn, entry in entries.items()}


def _sum_of(values: torch.Tensor, piece: Piece, shape: tuple[int, ...]) -> int:
    chunk = Chunk(piece.offsets, piece.sizes, (0,) * len(piece.sizes))
    return int(ops.fingerprint_shard(values, LocalShard(piece.sizes, (chunk,)), shape).item())


def _in_file_order(source: FileSource, chunks: Sequence[Piece]) -> list[Piece]:
    places = [(record.file, record.offset) for record in records_of(source, chunks)]
    return [chunks[position] for position in sorted(range(len(chunks)), key=places.__getitem__)]


def _map_in_threads(
    function: Callable[[list[_PieceOfShape]], list[int]], batches: Iterator[list[_PieceOfShape]], num_threads: int
) -> Iterator[tuple[list[_PieceOfShape], list[int]]]:
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
