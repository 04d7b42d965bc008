"""Layouts, cover and plans over plain values (pybind11 over csrc/core, where the definitions stand).

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
