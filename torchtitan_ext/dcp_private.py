"""Names of DCP that are not public, under names without underscores: no other module imports them.

Where a new version of torch moves one of them, this is the place to follow it.
"""

from __future__ import annotations

from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint import _async_process_executor as async_process_executor
from torch.distributed.checkpoint import _async_thread_executor as async_thread_executor
from torch.distributed.checkpoint._extension import ExtensionRegistry, StreamTransformExtension
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint._sharded_tensor_utils import _flatten_sharded_tensors as flatten_sharded_tensors
from torch.distributed.checkpoint._storage_utils import _storage_setup as storage_setup
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner as EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING as MEM_FORMAT_ENCODING
from torch.distributed.checkpoint.planner_helpers import _create_chunk_list as create_chunk_list


def is_fsspec(storage: object) -> bool:
    """Whether this is exactly stock's reader or writer for fsspec, whose module takes a while to import."""
    names = ("FsspecReader", "FsspecWriter")
    return type(storage).__module__ == "torch.distributed.checkpoint._fsspec_filesystem" and (
        type(storage).__name__ in names
    )


__all__ = [
    "EmptyStateDictLoadPlanner",
    "ExtensionRegistry",
    "MEM_FORMAT_ENCODING",
    "ShardedTensor",
    "StorageInfo",
    "StreamTransformExtension",
    "async_process_executor",
    "async_thread_executor",
    "create_chunk_list",
    "flatten_sharded_tensors",
    "is_fsspec",
    "storage_setup",
    "unflatten_state_dict",
]
