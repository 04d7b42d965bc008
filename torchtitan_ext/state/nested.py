"""Nested state dicts as flat ones, and back in place.

Keys are those of stock DCP (path components joined by dots), so that either side reads what the other wrote. Beyond
stock: int keys stay ints, tuples that hold tensors can be walked like lists, and tensor subclasses that consist of
inner tensors (``__tensor_flatten__``) and that stock could not load back are walked like dicts.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from torchtitan_ext.dcp_private import ShardedTensor
from torchtitan_ext.layout.dtensor import on_device
from torchtitan_ext.layout.own_boxes import has_own_boxes
from torchtitan_ext.layout.wrapper import parts_of, why_not_whole

Path = tuple[Any, ...]
"""Keys and indices from the root of a state dict to a value, as they stand in the containers."""

Member = tuple[Any, str | int, Any]
"""The key of a member in its container, the key that stock DCP records for it, and the member."""

T = TypeVar("T")

_NUMBERS_AND_TEXT = frozenset({type(None), bool, int, float, complex, str, bytes})


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


def flat_keys(
    state_dict: Mapping[str, Any],
    *,
    is_opaque: Callable[[str], bool] = lambda fqn: False,
    is_whole: Callable[[str, torch.Tensor], bool] | None = None,
    tuples: Literal["walked", "as_stock"] = "walked",
) -> FlatStateDict:
    """Flattens nested dicts, and lists and tuples that hold tensors.

    Args:
        state_dict: The nested state dict; unchanged, and not copied.
        is_opaque: Whether the container at a flat key is kept as one value, because a checkpoint has it so (stock DCP
            pickles tuples whole; before torch 2.4 it did the same with dicts without tensors).
        is_whole: Whether a tensor that consists of others (fp8 weights and their scales) is kept as one value; gets its
            flat key and the tensor. By default tensors are kept that stock DCP can load back so.
        tuples: ``"as_stock"`` keeps tuples of plain tensors as one value. It walks only tuples that would not come back
            from one value: with DTensors or tensors with boxes of their own (each rank would get one rank's shard),
            with tensors that consist of others, and named tuples, whose class no load reads by default.

    Raises:
        ValueError: Two paths give the same flat key, or a container holds itself.
    """
    flat = FlatStateDict()
    is_walked = holds_tensor if tuples == "walked" else _needs_walk
    reasons: dict[Any, str | None] = {}
    keeps_whole = is_whole or (lambda fqn, wrapper: why_not_whole(wrapper, reasons) is None)

    def members_of(at: KeyPath, value: Any) -> list[Member] | None:
        members = _members(at, value, is_walked, keeps_whole)
        return None if members is not None and at.path and is_opaque(at.fqn) else members

    def keep(at: KeyPath, value: Any, members: list[None] | None) -> None:
        if members is not None:
            return
        fqn = at.fqn
        if fqn in flat.values:
            raise ValueError(
                f"state dict: duplicated flatten key {fqn}: it stands at {flat.paths[fqn]} and at {at.path}; "
                "rename one of them"
            )
        flat.values[fqn] = value
        flat.paths[fqn], flat.stock_paths[fqn] = at

    fold_paths(state_dict, members_of, keep)
    return flat


class KeyPath(NamedTuple):
    """Where a value stands in a state dict: its path, and the same path as stock DCP records it."""

    path: Path = ()
    stock_path: Path = ()

    @property
    def fqn(self) -> str:
        return ".".join(map(str, self.path))


ROOT = KeyPath()


def fold_paths(
    value: Any,
    members_of: Callable[[KeyPath, Any], list[Member] | None],
    make: Callable[[KeyPath, Any, list[T] | None], T],
    at: KeyPath = ROOT,
) -> T:
    """Walks nested containers in order and returns what ``make`` makes of the root, which stands at ``at``.

    A value that stands at several places is met at each of them; ``walk_objects`` asks each object once.

    Args:
        members_of: The members of a container; ``None`` for a value that is not walked.
        make: Called for each value after its members, with the results for these (``None`` where it is not walked).

    Raises:
        ValueError: A container holds itself.
    """
    return _fold(value, members_of, make, at, {})


def _fold(
    value: Any,
    members_of: Callable[[KeyPath, Any], list[Member] | None],
    make: Callable[[KeyPath, Any, list[T] | None], T],
    at: KeyPath,
    holders: dict[int, str],
) -> T:
    """``fold_paths`` below the containers around the value, by their ids; no function inside that, which would know
    itself and what ``make`` made, and live until the next garbage collection."""
    members = members_of(at, value)
    if members is None:
        return make(at, value, None)
    if id(value) in holders:
        raise ValueError(
            f"state dict: {at.fqn} leads back to {holders[id(value)] or 'the state dict'}: a container that "
            "holds itself has no flat form; leave that reference out"
        )
    holders[id(value)] = at.fqn
    made = []
    for key, stock_key, member in members:  # no comprehension, which before Python 3.12 is a frame more per level
        inner = KeyPath((*at.path, key), (*at.stock_path, stock_key))
        made.append(_fold(member, members_of, make, inner, holders))
    del holders[id(value)]
    return make(at, value, made)


def set_value(state_dict: dict[str, Any], path: Path, value: Any) -> None:
    """Puts ``value`` at ``path``, in place; tuples on the way are made anew."""
    _replaced(state_dict, path, value)


def on_devices_of(target: Any, loaded: Any) -> Any:
    """A value that was read into CPU memory, with its tensors on the devices that they have in the target."""
    if all(member.device.type == "cpu" for member in nested_members(target) if isinstance(member, torch.Tensor)):
        return loaded
    if isinstance(target, torch.Tensor) and isinstance(loaded, torch.Tensor):
        return loaded.to(load_device(target) if target.is_meta else target.device)
    if type(loaded) in (list, tuple) and isinstance(target, (list, tuple)) and len(target) == len(loaded):
        return type(loaded)(on_devices_of(*pair) for pair in zip(target, loaded, strict=True))
    if type(loaded) is dict and isinstance(target, Mapping):
        return {key: on_devices_of(target.get(key), member) for key, member in loaded.items()}
    return loaded


def holds_shards(value: Any) -> bool:
    """Whether there is a DTensor, or a tensor with boxes of its own, in nested containers."""
    return any(isinstance(member, DTensor) or has_own_boxes(member) for member in nested_members(value))


def materialize_meta(
    state_dict: dict[str, Any], values: dict[str, Any], paths: Mapping[str, Path], fqns: Iterable[str]
) -> None:
    """Gives these meta tensors memory on their mesh's device (plain ones: the process group's), in place in both dicts.

    Others stay on meta: memory that nothing fills would pass for values.

    Args:
        values: The flat state dict.
        paths: Where its keys stand in ``state_dict``.
    """
    for fqn in fqns:
        value = values[fqn]
        if isinstance(value, torch.Tensor) and not isinstance(value, ShardedTensor) and value.is_meta:
            values[fqn] = on_device(value, load_device(value))
            if fqn in paths:
                set_value(state_dict, paths[fqn], values[fqn])


def _members(
    at: KeyPath, value: Any, is_walked: Callable[[Any], bool], is_whole: Callable[[str, torch.Tensor], bool]
) -> list[Member] | None:
    """The members of a container whose members have keys of their own, or ``None``."""
    if isinstance(value, Mapping):
        return [(key, str(key), member) for key, member in value.items()]
    if isinstance(value, (list, tuple)):
        is_container = is_walked(value) if isinstance(value, tuple) else _is_walked_list(value, is_walked)
        return [(index, index, member) for index, member in enumerate(value)] if is_container else None
    if consists_of_tensors(value) and not is_whole(at.fqn, value):
        return [(name, name, part) for name, part in parts_of(value).items()]
    return None


def _is_walked_list(value: list[Any], is_walked: Callable[[Any], bool]) -> bool:
    for member in nested_members(value, list):
        if isinstance(member, tuple):
            if not _NUMBERS_AND_TEXT.issuperset(map(type, member)) and is_walked(member):
                return True
        elif isinstance(member, (torch.Tensor, Mapping)):
            return True
    return False


def holds_tensor(value: Any) -> bool:
    """Whether a value is a tensor, or a container with one somewhere."""
    return any(isinstance(member, torch.Tensor) for member in nested_members(value))


def _needs_walk(value: Any) -> bool:
    return any(
        is_traceable_wrapper_subclass(member)
        or isinstance(member, ShardedTensor)
        or has_own_boxes(member)
        or (isinstance(member, tuple) and type(member) not in (tuple, torch.Size) and holds_tensor(member))
        for member in nested_members(value)
    )


def nested_members(value: Any, containers: Any = (Mapping, list, tuple)) -> Iterator[Any]:
    """A value and, of a container, all that it and nested ones hold; lists of numbers and text count as one object."""

    def members_of(holder: Any) -> Collection[Any]:
        if isinstance(holder, torch.Tensor) or not isinstance(holder, containers):
            return ()
        members = holder.values() if isinstance(holder, Mapping) else holder
        return () if _NUMBERS_AND_TEXT.issuperset(map(type, members)) else members

    return (member for member, _ in walk_objects(value, members_of))


def walk_objects(value: Any, members_of: Callable[[Any], Collection[Any]]) -> Iterator[tuple[Any, int]]:
    """A value and all that it leads to, at any depth, each with the number of containers around it.

    Args:
        members_of: The objects that an object holds. Each object is asked once, so that cycles have an end.
    """
    pending: list[tuple[Any, int]] = [(value, 0)]
    asked: dict[int, Any] = {}  # by id; holds the objects, so that no id is used twice
    while pending:
        value, depth = pending.pop()
        yield value, depth
        if id(value) not in asked and (members := members_of(value)):
            asked[id(value)] = value
            pending += [(member, depth + 1) for member in members]


def consists_of_tensors(value: Any) -> bool:
    """Whether a value is a tensor subclass that is made of inner tensors, and nothing else says how to save it."""
    return (
        isinstance(value, torch.Tensor)
        and type(value) not in (torch.Tensor, torch.nn.Parameter)
        and not isinstance(value, (DTensor, ShardedTensor, AsyncCollectiveTensor))
        and is_traceable_wrapper_subclass(value)
        and not hasattr(value, "__create_write_items__")
        and not has_own_boxes(value)
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
    set_member(container, key, _replaced(container[key], rest, value))
    return container


def set_member(container: Any, key: Any, value: Any) -> None:
    """Replaces a member of a mapping or list; in a dict by dict's own method, since a subclass may have another one.

    ``OrderedDict`` keeps an order of its own, which only its own method knows.
    """
    if isinstance(container, OrderedDict):
        OrderedDict.__setitem__(container, key, value)
    elif isinstance(container, dict):
        dict.__setitem__(container, key, value)
    else:
        container[key] = value


def load_device(tensor: torch.Tensor) -> torch.device:
    """The device on which a load gives memory to a meta tensor: its mesh's, or the process group's, or the default."""
    device_type = tensor.device_mesh.device_type if isinstance(tensor, DTensor) else None
    if device_type is None:
        if not (dist.is_available() and dist.is_initialized()):
            default = torch.get_default_device()
            return torch.device("cpu") if default.type == "meta" else default
        device_type = dist.distributed_c10d._get_pg_default_device().type
    if device_type == "cpu":
        return torch.device("cpu")
    return torch.device(device_type, torch.get_device_module(device_type).current_device())
