"""Where a load puts what it reads: the targets by flat key, and their places in the nested state dict."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint._sharded_tensor_utils import _flatten_sharded_tensors
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata

from torchtitan_ext.checkpoint.key_table import KeyEntry, ObjectEntry, TensorEntry
from torchtitan_ext.checkpoint.policy import Source
from torchtitan_ext.layout.layout import ShardReport
from torchtitan_ext.layout.wrapper import parts_of, why_not_whole
from torchtitan_ext.state.nested import FlatStateDict, Path, flatten_state_dict


def flatten_targets(
    state_dict: dict[str, Any], saved: Mapping[str, Any], source: Source, *, nested: bool, sharded_tensors: bool
) -> FlatStateDict:
    """The targets by flat key; containers and wrappers that the checkpoint has as one value are kept as one.

    Args:
        saved: What the checkpoint has, by its names.
        source: How it calls keys.
        nested: Whether containers are flattened; else each entry is a target.
        sharded_tensors: Whether nested ``ShardedTensor`` are flattened, as in stock.
    """

    def is_saved_whole(fqn: str) -> bool:
        return isinstance(saved.get(source.saved_name(fqn)), BytesStorageMetadata)

    def is_wrapper_whole(fqn: str, wrapper: torch.Tensor) -> bool:
        """As in the checkpoint; where that has it not, as in what we save."""
        if source.saved_name(fqn) in saved:
            return True
        is_walked = any(source.saved_name(f"{fqn}.{name}") in saved for name in parts_of(wrapper))
        return not is_walked and why_not_whole(wrapper, {}) is None

    if nested:
        flat = flatten_state_dict(state_dict, is_opaque=is_saved_whole, is_whole=is_wrapper_whole)
    else:
        paths: dict[str, Path] = {fqn: (fqn,) for fqn in state_dict}
        flat = FlatStateDict(values=dict(state_dict), paths=paths, stock_paths=paths)
    if sharded_tensors and any(isinstance(value, ShardedTensor) for value in flat.values.values()):
        flat.values = _flatten_sharded_tensors(flat.values)
    return flat


def entry_as_saved(entry: KeyEntry, saved: TensorStorageMetadata | BytesStorageMetadata) -> KeyEntry:
    """The entry of what is read: not that of the target where one of them is a number and the other a tensor."""
    if isinstance(saved, BytesStorageMetadata):
        return ObjectEntry()
    if not isinstance(entry, ObjectEntry):
        return entry
    shape = tuple(saved.size)
    return TensorEntry(ShardReport(global_shape=shape, local_sizes=shape), saved.properties.dtype, False)


def places_of(flat: FlatStateDict, targets: Mapping[str, Any], paths: Mapping[str, Path]) -> dict[str, Path]:
    """Where targets stand in the nested state dict; lacks those of which nothing tells.

    Args:
        flat: What was flattened.
        targets: The same, or what a subclass has made of it: keys renamed, left out or added.
        paths: What the subclass says, as stock DCP records paths; of keys that are not said anew ``flat`` knows better.
    """
    if targets.keys() == flat.paths.keys() and paths == flat.stock_paths:
        return flat.paths
    path_of = {id(value): flat.paths[fqn] for fqn, value in flat.values.items() if isinstance(value, torch.Tensor)}
    places = {}
    for fqn, target in targets.items():
        if fqn in flat.paths and paths.get(fqn, flat.stock_paths[fqn]) == flat.stock_paths[fqn]:
            places[fqn] = flat.paths[fqn]
        elif fqn in paths:
            places[fqn] = paths[fqn]
        elif id(target) in path_of:
            places[fqn] = path_of[id(target)]
    return places
