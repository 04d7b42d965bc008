"""What a save or a load holds in the memory of the host, beside the state: of one rank, at most.

By what our storage and planners hold: blocks of threads, tensors that pass through the host or are cast, values as they
are written and read, the metadata, and Python's objects. The numbers below were measured
(``benchmarks/bench_dry_run_memory.py``). Storage of others holds other things.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torchtitan_ext.storage.checkpoint_files import thread_count_of
from torchtitan_ext.storage.native.file_reader import BATCH_BYTES as READ_BATCH_BYTES
from torchtitan_ext.storage.native.file_writer import BATCH_BYTES as WRITTEN_BATCH_BYTES
from torchtitan_ext.storage.native.file_writer import BLOCK_BYTES
from torchtitan_ext.storage.raw_tensor import STAGING_BYTES

Device = Literal["cpu", "cuda"]
"""Where tensors of a job lie."""

# What is exchanged, stacks of threads, and what the allocator keeps: from 0.2 to 2.7 MB, from run to run.
_LEAST_BYTES = 2_500_000
# Python's objects: of a tensor or value that is saved, and of a part that is read.
_RECORD_BYTES = 3_000
_READ_BYTES = 2_500
# Frames between the elements of two tensors go through the block of a thread, a page or two of it.
_FRAME_BYTES = 8 << 10
# A stream of pickled bytes has an eighth more room than it needs.
_STREAM_ROOM = 9 / 8
# The coordinator makes the index of the records that ranks have sent, with copies of all of it.
_INDEX_COPIES = 5
# Of `.metadata` alone, and where there is an index with it, until they are columns.
_METADATA_COPIES, _WITH_INDEX_COPIES = 6.5, 3


def saving_bytes(
    *,
    num_records: int,
    num_bytes: int,
    value_bytes: Sequence[int],
    is_packed: bool,
    is_staged: bool,
    metadata_bytes: int = 0,
    index_bytes: int = 0,
) -> int:
    """What a rank takes while it saves.

    Args:
        num_records: Tensor chunks and values that it writes.
        num_bytes: Of these.
        value_bytes: Of each value.
        is_packed: Whether elements of tensors lie otherwise in memory than in the file, so that they are copied.
        is_staged: Whether tensors come from another device.
        metadata_bytes: Of ``.metadata``, for the rank that writes it.
        index_bytes: Of the index, for the same.
    """
    writing = _blocks_bytes(num_records, num_bytes, is_packed=is_packed) + (STAGING_BYTES if is_staged else 0)
    writing += int(_batch_bytes(value_bytes, WRITTEN_BATCH_BYTES) * _STREAM_ROOM)
    committing = metadata_bytes + _INDEX_COPIES * index_bytes
    return _LEAST_BYTES + num_records * _RECORD_BYTES + max(writing, committing)


def loading_bytes(
    *,
    num_reads: int,
    num_bytes: int,
    value_bytes: Sequence[int],
    is_packed: bool,
    staged_bytes: int,
    largest_staged_bytes: int,
    metadata_bytes: int,
    index_bytes: int,
) -> int:
    """What a rank takes while it loads.

    Args:
        num_reads: Boxes of saved chunks, and values.
        num_bytes: Of these.
        value_bytes: Of each value.
        is_packed: Whether it wants parts of chunks, or fills tensors whose elements lie otherwise than in the file.
        staged_bytes: Of tensors that are read into memory of their own first: they are cast, or lie on another device.
        largest_staged_bytes: Of one read of these.
        metadata_bytes: Of ``.metadata``, which every rank reads.
        index_bytes: Of the index; 0 where there is none.
    """
    metadata = _METADATA_COPIES * metadata_bytes
    if index_bytes:
        metadata = max(metadata, _WITH_INDEX_COPIES * (metadata_bytes + index_bytes))
    values = sum(value_bytes)
    # Of the one that is unpickled there are a stream and its record, too.
    reading_values = values + _batch_bytes(value_bytes, READ_BATCH_BYTES) + 2 * max(value_bytes, default=0)
    reading = values + _blocks_bytes(num_reads, num_bytes, is_packed=is_packed)
    reading += min(staged_bytes, READ_BATCH_BYTES + largest_staged_bytes)
    return _LEAST_BYTES + num_reads * _READ_BYTES + int(metadata) + max(reading_values, reading)


def _blocks_bytes(num_parts: int, num_bytes: int, *, is_packed: bool) -> int:
    """Of the threads' blocks what is touched."""
    whole = min(num_bytes, thread_count_of(None) * BLOCK_BYTES)
    return whole if is_packed else min(whole, num_parts * _FRAME_BYTES)


def _batch_bytes(value_bytes: Sequence[int], batch_bytes: int) -> int:
    """Of the values that are held at a time: a batch ends behind the value that fills it."""
    return min(sum(value_bytes), batch_bytes + max(value_bytes, default=0))
