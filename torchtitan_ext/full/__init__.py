"""Tensors and models as a whole, from shards of any layout and back. Every function is collective."""

from torchtitan_ext.full.state_dicts import get_full_state_dict, set_full_state_dict
from torchtitan_ext.full.tensors import distribute_tensor, full_tensor

__all__ = ["distribute_tensor", "full_tensor", "get_full_state_dict", "set_full_state_dict"]
