"""Nested state dicts as flat ones, and back in place.

Keys are those of stock DCP (path components joined by dots), so that either side reads what the other wrote. Beyond
stock: int keys stay ints, tuples that hold tensors are walked like lists, and tensor subclasses that consist of inner
tensors (``__tensor_flatten__``) are walked like dicts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from torchtitan_ext.layout.dtensor import on_device

Path = tuple[Any, ...]
"""Keys and indices from the root of a state dict to a value, as they stand in the containers."""


@dataclass
class FlatStateDict:
    """A flattened state dict.

    Attributes:
        values: Value of each flat key.
        paths: Where the value stands in the nested state dict.
        stock_paths: The same as stock DCP records it: dict keys as strings, positions in sequences as ints.
    """

    values: dict[str, Any] = field(default_factory=dict)
    paths: dict[str, Path] = field(default_factory=dict)
    stock_paths: dict[str, Path] = field(default_factory=dict)


def flatten_state_dict(
    state_dict: Mapping[str, Any], *, opaque: Collection[str] = (), walk_wrappers: bool = True
) -> FlatStateDict:
    """Flattens nested dicts, and lists and tuples that hold tensors.

    Args:
        state_dict: The nested state dict; unchanged, and not copied.
        opaque: Flat keys of containers that are kept as one value, because a checkpoint has them so (stock DCP pickles
            tuples whole; before torch 2.4 it did the same with dicts without tensors).
        walk_wrappers: Whether tensors that consist of others (fp8 weights and their scales) are flattened too.

    Raises:
        ValueError: Two paths give the same flat key.
    """
    flat = FlatStateDict()

    def visit(path: Path, stock_path: Path, value: Any) -> None:
        fqn = ".".join(map(str, path))
        if path and fqn not in opaque:
            if isinstance(value, Mapping):
                for key, member in value.items():
                    visit((*path, key), (*stock_path, str(key)), member)
                return
            if isinstance(value, (list, tuple)) and _is_walked(value):
                for index, member in enumerate(value):
                    visit((*path, index), (*stock_path, index), member)
                return
            if walk_wrappers and _consists_of_tensors(value):
                for name in value.__tensor_flatten__()[0]:
                    visit((*path, name), (*stock_path, name), getattr(value, name))
                return
        if fqn in flat.values:
            raise ValueError(
                f"state dict: duplicated flatten key {fqn}: it stands at {flat.paths[fqn]} and at {path}; "
                "rename one of them"
            )
        flat.values[fqn] = value
        flat.paths[fqn] = path
        flat.stock_paths[fqn] = stock_path

    for key, value in state_dict.items():
        visit((key,), (str(key),), value)
    return flat


def set_value(state_dict: dict[str, Any], path: Path, value: Any) -> None:
    """Puts ``value`` at ``path``, in place; tuples on the way are made anew."""
    _replaced(state_dict, path, value)


def materialize_meta(state_dict: dict[str, Any], flat: FlatStateDict, fqns: Iterable[str]) -> None:
    """Gives these meta tensors memory on their mesh's device (plain ones: the process group's), in place in both dicts.

    Others stay on meta: memory that nothing fills would pass for values.
    """
    for fqn in fqns:
        value = flat.values[fqn]
        if isinstance(value, torch.Tensor) and not isinstance(value, ShardedTensor) and value.is_meta:
            flat.values[fqn] = on_device(value, load_device(value))
            set_value(state_dict, flat.paths[fqn], flat.values[fqn])


def _is_walked(value: list[Any] | tuple[Any, ...]) -> bool:
    if isinstance(value, tuple):
        return _holds_tensor(value)
    return any(
        isinstance(member, (torch.Tensor, Mapping)) or (isinstance(member, (list, tuple)) and _is_walked(member))
        for member in value
    )


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_holds_tensor, value.values()))
    if isinstance(value, (list, tuple)):
        return any(map(_holds_tensor, value))
    return isinstance(value, torch.Tensor)


def _consists_of_tensors(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and not isinstance(value, (DTensor, ShardedTensor, AsyncCollectiveTensor))
        and is_traceable_wrapper_subclass(value)
        and not hasattr(value, "__create_write_items__")
    )


def _replaced(container: Any, path: Path, value: Any) -> Any:
    if not path:
        return value
    key, rest = path[0], path[1:]
    if isinstance(container, tuple):
        members = list(container)
        members[key] = _replaced(members[key], rest, value)
        return type(container)(*members) if hasattr(container, "_fields") else type(container)(members)
    if isinstance(container, torch.Tensor):
        setattr(container, key, _replaced(getattr(container, key), rest, value))
        return container
    container[key] = _replaced(container[key], rest, value)
    return container


def load_device(tensor: torch.Tensor) -> torch.device:
    device_type = tensor.device_mesh.device_type if isinstance(tensor, DTensor) else None
    if device_type is None:
        if not (dist.is_available() and dist.is_initialized()):
            return torch.get_default_device()
        device_type = dist.distributed_c10d._get_pg_default_device().type
    if device_type == "cpu":
        return torch.device("cpu")
    return torch.device(device_type, torch.get_device_module(device_type).current_device())
