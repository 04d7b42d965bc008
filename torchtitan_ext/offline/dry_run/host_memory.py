"""The most host memory that one rank needs for a save or a load, beside the state.

Counted are the blocks of threads, tensors that pass through the host or are cast, values as they are written and read,
the metadata, and Python's objects, as this package's storage and planners hold them. The numbers below were measured
(``benchmarks/bench_dry_run_memory.py``). Other storage needs other amounts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torchtitan_ext.storage.checkpoint_files import BLOCK_BYTES, thread_count_of
from torchtitan_ext.storage.native.device_buckets import host_buffer_bytes
from torchtitan_ext.storage.native.file_writer import BATCH_BYTES as WRITTEN_BATCH_BYTES
from torchtitan_ext.storage.native.fills import BUFFER_BYTES
from torchtitan_ext.storage.native.read_batch import BATCH_BYTES as READ_BATCH_BYTES

Device = Literal["cpu", "cuda"]
"""Where a job's tensors lie."""

# Exchanged messages, stacks of threads and the allocator's reserve: from 0.2 to 2.7 MB, from run to run.
_LEAST_BYTES = 2_500_000
# Python's objects: per tensor or value that is saved, and per part that is read.
_RECORD_BYTES = 3_000
_READ_BYTES = 2_500
# Frames between the elements of two tensors touch a page or two of a thread's block.
_FRAME_BYTES = 8 << 10
# A stream of pickled bytes has an eighth more room than it needs.
_STREAM_ROOM = 9 / 8
# The coordinator makes the index from the records that ranks have sent, and copies all of it several times.
_INDEX_COPIES = 5
# Copies of `.metadata` alone, and of `.metadata` and index together, until they are columns.
_METADATA_COPIES, _WITH_INDEX_COPIES = 6.5, 3


def saving_bytes(
    *, num_records: int, num_bytes: int, value_bytes: Sequence[int], is_packed: bool, is_staged: bool
) -> int:
    """The memory that a rank needs while it writes its file.

    Args:
        num_records: The number of tensor chunks and values that the rank writes.
        num_bytes: The size of all records.
        value_bytes: The size of each value.
        is_packed: Whether elements lie in another order in memory than in the file, so that they are copied.
        is_staged: Whether tensors come from another device.
    """
    writing = _blocks_bytes(num_records, num_bytes, is_packed=is_packed)
    writing += host_buffer_bytes(num_bytes - sum(value_bytes)) if is_staged else 0
    writing += int(_batch_bytes(value_bytes, WRITTEN_BATCH_BYTES) * _STREAM_ROOM)
    return _LEAST_BYTES + num_records * _RECORD_BYTES + writing


def committing_bytes(num_records: int, metadata_bytes: int, index_bytes: int) -> int:
    """The memory that the coordinator, which has written so many records, needs while it writes metadata and index."""
    return _LEAST_BYTES + num_records * _RECORD_BYTES + metadata_bytes + _INDEX_COPIES * index_bytes


def loading_bytes(
    *,
    num_reads: int,
    num_bytes: int,
    value_bytes: Sequence[int],
    staged_bytes: int,
    device: Device,
    is_packed: bool,
    metadata_bytes: int,
    index_bytes: int,
) -> int:
    """The memory that a rank needs while it loads.

    Args:
        num_reads: The number of boxes of saved chunks, and of values, that it reads.
        num_bytes: The size of all reads.
        value_bytes: The size of each value.
        staged_bytes: The size of tensors that are read into other memory first, to be cast by torch or moved to another
            device.
        device: Where the targets lie.
        is_packed: Whether it casts, reads parts of chunks, or fills tensors whose elements lie otherwise in memory.
        metadata_bytes, index_bytes: The sizes of ``.metadata`` and index, which every rank reads; 0 if there is none.
    """
    metadata = _METADATA_COPIES * metadata_bytes
    if index_bytes:
        metadata = max(metadata, _WITH_INDEX_COPIES * (metadata_bytes + index_bytes))
    values = sum(value_bytes)
    # The value that is unpickled is held as a stream and as a record, too.
    reading_values = values + _batch_bytes(value_bytes, READ_BATCH_BYTES) + 2 * max(value_bytes, default=0)
    reading = values + _blocks_bytes(num_reads, num_bytes, is_packed=is_packed)
    if device == "cpu":
        reading += min(staged_bytes, BUFFER_BYTES)
    elif staged_bytes > 0:
        reading += host_buffer_bytes(staged_bytes)
    return _LEAST_BYTES + num_reads * _READ_BYTES + int(metadata) + max(reading_values, reading)


def _blocks_bytes(num_parts: int, num_bytes: int, *, is_packed: bool) -> int:
    """The part of the threads' blocks that is touched."""
    whole = min(num_bytes, thread_count_of(None) * BLOCK_BYTES)
    return whole if is_packed else min(whole, num_parts * _FRAME_BYTES)


def _batch_bytes(value_bytes: Sequence[int], batch_bytes: int) -> int:
    """The size of the values that are held at a time: a batch ends with the value that fills it."""
    return min(sum(value_bytes), batch_bytes + max(value_bytes, default=0))
