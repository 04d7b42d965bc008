"""State that survives a change of cluster: exact distributed checkpoints, resharding and replica sync for PyTorch."""

from torchtitan_ext import elastic, errors, ops
from torchtitan_ext.checkpoint import async_save, load, save
from torchtitan_ext.checkpoint.load_planner import LoadPlanner
from torchtitan_ext.checkpoint.save_planner import SavePlanner
from torchtitan_ext.fingerprint import fingerprint
from torchtitan_ext.full_tensor import distribute_tensor, full_tensor, get_full_state_dict, set_full_state_dict
from torchtitan_ext.layout.rules import ShardOrder
from torchtitan_ext.sync import broadcast_tensors, sync_module_states
from torchtitan_ext.sync.check import check_replicas

__version__ = "0.1.0"

__all__ = [
    "LoadPlanner",
    "SavePlanner",
    "ShardOrder",
    "async_save",
    "broadcast_tensors",
    "check_replicas",
    "distribute_tensor",
    "elastic",
    "errors",
    "fingerprint",
    "full_tensor",
    "get_full_state_dict",
    "load",
    "ops",
    "save",
    "set_full_state_dict",
    "sync_module_states",
]
