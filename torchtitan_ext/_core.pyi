"""Layouts, cover and plans over plain values, and files (pybind11 over csrc/core and csrc/storage, their definitions).

Sizes and offsets count elements. A step is (axis, dim, split_factor); a box is (offsets, sizes); a chunk is
(offsets, sizes, local_offsets); a shard is (local sizes, chunks). Bad arguments raise ValueError, int64 overflow
raises OverflowError.
"""

from collections.abc import Sequence
from typing import Any, Literal

_Sizes = tuple[int, ...]
_Step = tuple[int, int, int]
_Box = tuple[Sequence[int], Sequence[int]]
_Chunk = tuple[_Sizes, _Sizes, _Sizes]
_Shard = tuple[_Sizes, tuple[_Chunk, ...]]

def read_placements(
    placements: Sequence[tuple[int, int]], mesh_shape: Sequence[int], reading: Literal["left_to_right", "nested"]
) -> list[_Step]: ...
def shard_at(
    global_shape: Sequence[int], mesh_shape: Sequence[int], steps: Sequence[_Step], coordinate: Sequence[int]
) -> _Shard: ...
def all_shards(global_shape: Sequence[int], mesh_shape: Sequence[int], steps: Sequence[_Step]) -> list[_Shard]: ...
def resolve_steps(
    global_shape: Sequence[int],
    mesh_shape: Sequence[int],
    candidates: Sequence[Sequence[_Step]],
    observations: Sequence[tuple[Sequence[int], Sequence[int]]],
) -> tuple[Literal["decided", "in_doubt", "no_match"], int, int, _Sizes]: ...
def find_cover_defect(
    global_shape: Sequence[int], boxes: Sequence[_Box]
) -> tuple[Literal["gap", "overlap", "out_of_bounds"], _Sizes, list[int]] | None: ...
def find_overlaps(
    wanted: Sequence[tuple[Sequence[int], Sequence[int], Sequence[int]]], saved: Sequence[_Box]
) -> list[tuple[int, int, _Sizes, _Sizes, _Sizes]]: ...
def may_overlap_itself(sizes: Sequence[int], strides: Sequence[int]) -> bool: ...
def assign_writers(shards: Sequence[tuple[Sequence[int], int]], num_ranks: int) -> list[int]: ...
def read_metadata_pickle(data: bytes) -> dict[str, Any]: ...

# Files. Addresses are those of tensors' memory (data_ptr), which the caller keeps alive. System calls that fail raise
# OSError with the path; damaged bytes raise FormatError.

_Key = tuple[str, Sequence[int] | None, int | None]
_File = tuple[str, int, int, int, int, bytes]

class FormatError(ValueError): ...

class ElementType:
    def __init__(self, storage_class: str, dtype: str, item_bytes: int) -> None: ...

class RecordWriter:
    def __init__(self, path: str, block_bytes: int, num_threads: int, sync: bool) -> None: ...
    def add_tensor(
        self, key: _Key, dtype: str, sizes: Sequence[int], type: ElementType, address: int, strides: Sequence[int], /
    ) -> None: ...
    def begin_tensor(self, key: _Key, dtype: str, sizes: Sequence[int], type: ElementType, /) -> None: ...
    def add_bytes(self, address: int, num_bytes: int, /) -> None: ...
    def end_tensor(self) -> None: ...
    def add_record(self, key: _Key, dtype: str, sizes: Sequence[int], address: int, num_bytes: int, /) -> None: ...
    @property
    def queued_bytes(self) -> int: ...
    def write_queued(self) -> None: ...
    def finish(self, save_id: bytes, rank: int, /) -> tuple[int, int, int, bytes]:
        """Size of the file, where its footer begins, the footer's digest, the records for the index."""

class RunReader:
    def add_file(self, path: str, num_bytes: int, /) -> int:
        """A file without checksums; its size is checked where ``num_bytes`` is not negative."""
    def add_checked_file(
        self, path: str, num_bytes: int, footer_offset: int, footer_digest: int, save_id: bytes, /
    ) -> int: ...
    def add_box(
        self,
        file: int,
        data_offset: int,
        item_bytes: int,
        stored_sizes: Sequence[int],
        stored_strides: Sequence[int],
        offsets: Sequence[int],
        sizes: Sequence[int],
        address: int,
        strides: Sequence[int],
        /,
    ) -> None: ...
    def add_bytes(self, file: int, offset: int, num_bytes: int, address: int, /) -> None: ...
    def read(self, num_threads: int, verify: str, /) -> list[tuple[int, int, int]]:
        """Blocks that do not match their checksums: file, first byte, one past the last byte."""

def frame_tensor(type: ElementType, sizes: Sequence[int], record_offset: int, alignment: int, /) -> tuple[bytes, bytes]:
    """What stands before and behind a tensor's bytes in its record."""

def digest(bytes: bytes, /) -> int: ...
def encode_index(
    save_id: bytes,
    metadata_bytes: int,
    metadata_digest: int,
    notes: Sequence[tuple[str, str]],
    files: Sequence[_File],
) -> bytes: ...
def parse_index(bytes: bytes, where: str) -> tuple[bytes, int, int, list[tuple[str, str]], list[_File]]: ...
def parse_records(
    bytes: bytes, footer_offset: int, where: str
) -> list[tuple[str, _Sizes | None, int | None, str, _Sizes, int, int, int]]:
    """fqn, offsets, index hint, dtype (empty for no tensor), sizes, record offset, record bytes, data offset."""

def find_tensors(
    path: str, places: Sequence[tuple[int, int]], num_threads: int
) -> list[tuple[str, str, _Sizes, _Sizes, int, int, int] | None]:
    """Storage class, dtype, sizes, strides, storage offset, data offset in the file, data bytes; None for others."""
