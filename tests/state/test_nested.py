"""Nested state dicts as flat ones, and values put back where they were."""

import copy
from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
from simulated_ranks import mesh_at
from torch.distributed.checkpoint._nested_dict import flatten_state_dict as stock_flatten
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.two_tensor import TwoTensor

from torchtitan_ext.state.nested import flat_keys, materialize_meta, nested_members, set_value

Pair = namedtuple("Pair", "weight step")
T = torch.zeros(2)

# (nested, flat keys)
NESTED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "nothing": ({}, []),
    "dicts": ({"a": {"b": {"c": 1}}, "d": OrderedDict(e=T)}, ["a.b.c", "d.e"]),
    "int keys": ({"state": {0: {"step": 1}, 10: {"step": 2}}}, ["state.0.step", "state.10.step"]),
    "lists with tensors": ({"a": [T, 1, {"b": 2}]}, ["a.0", "a.1", "a.2.b"]),
    "plain lists are values": ({"a": [1, [2, 3]]}, ["a"]),
    "nested lists with tensors": ({"a": [1, [2, T]]}, ["a.0", "a.1.0", "a.1.1"]),
    "tuples with tensors": ({"a": (1, [T])}, ["a.0", "a.1.0"]),
    "plain tuples are values": ({"a": (1, {"b": 2})}, ["a"]),
    "named tuples": ({"a": Pair(T, 3)}, ["a.0", "a.1"]),
    "no values": ({"a": None, "b": {"c": None}}, ["a", "b.c"]),
    "empty dicts vanish": ({"a": {}, "b": {"c": {}}}, []),
    "empty sequences are values": ({"a": [], "b": ()}, ["a", "b"]),
    "sets are values": ({"a": {1, 2}}, ["a"]),
    "made of tensors": ({"a": TwoTensor(T, T)}, ["a.a", "a.b"]),
    "dots in keys": ({"a.b": {"c": 1}, "a": {"d": 1}}, ["a.b.c", "a.d"]),
}


@pytest.mark.parametrize("name", NESTED)
def test_flat_keys(name: str) -> None:
    nested, keys = NESTED[name]
    flat = flat_keys(nested)
    assert list(flat.values) == list(flat.paths) == list(flat.stock_paths) == keys
    for fqn, value in flat.values.items():
        found: Any = nested
        for key in flat.paths[fqn]:
            found = getattr(found, key) if isinstance(found, torch.Tensor) else found[key]
        assert found is value


@pytest.mark.parametrize("name", sorted(NESTED.keys() - {"tuples with tensors", "named tuples", "made of tensors"}))
def test_keys_and_recorded_paths_are_those_of_stock(name: str) -> None:
    nested, _ = NESTED[name]
    flat = flat_keys(nested)
    values, paths = stock_flatten(nested)
    assert list(flat.values) == list(values)
    assert flat.stock_paths == paths


def test_containers_that_a_checkpoint_has_as_one_value_stay_whole() -> None:
    nested = {"a": {"b": (T, 1), "c": {"d": 1}}}
    assert list(flat_keys(nested, is_opaque={"a.b"}.__contains__).values) == ["a.b", "a.c.d"]
    assert list(flat_keys(nested, is_opaque={"a"}.__contains__).values) == ["a"]


def test_tuples_of_plain_tensors_stay_whole_as_in_stock() -> None:
    mesh = mesh_at(0, (1,))
    sharded = DTensor.from_local(T, mesh, [Shard(0)], run_check=False)
    nested = {
        "plain": (T, 1), "deep": (1, [{"x": T}]), "in a list": [T, (T, 2)], "list of tuples": [(T,), (T,)],
        "parameter": (torch.nn.Parameter(T),),
        "sharded": (sharded, 1), "deep and sharded": (1, [{"x": sharded}]), "list of sharded": [(sharded,)],
        "wrapper": (TwoTensor(T, T),), "named": Pair(T, 3), "named inside": (Pair(T, 3), 1), "named int": Pair(1, 2),
    }  # fmt: skip
    keys = list(flat_keys(nested, tuples="as_stock").values)
    assert keys == [
        "plain", "deep", "in a list.0", "in a list.1", "list of tuples", "parameter",
        "sharded.0", "sharded.1", "deep and sharded.0", "deep and sharded.1.0.x", "list of sharded.0.0",
        "wrapper.0.a", "wrapper.0.b", "named.0", "named.1", "named inside.0.0", "named inside.0.1", "named inside.1",
        "named int",
    ]  # fmt: skip
    plain = {name: value for name, value in nested.items() if name in keys or name == "in a list"}
    assert list(flat_keys(plain, tuples="as_stock").values) == list(stock_flatten(plain)[0])


def test_containers_that_hold_themselves_are_refused_by_name() -> None:
    inner: dict[str, Any] = {"w": T}
    inner["parent"] = {"again": inner}
    with pytest.raises(ValueError, match=r"state dict: model.parent.again leads back to model: a container .* leave"):
        flat_keys({"model": inner})
    root: dict[str, Any] = {}
    root["self"] = root
    with pytest.raises(ValueError, match=r"state dict: self leads back to the state dict: "):
        flat_keys(root)
    tensors: list[Any] = [T]
    tensors.append(tensors)
    with pytest.raises(ValueError, match=r"state dict: a.1 leads back to a: "):
        flat_keys({"a": tensors})


def test_what_holds_itself_without_keys_of_its_own_is_one_value() -> None:
    numbers: list[Any] = [1]
    numbers.append(numbers)
    assert list(flat_keys({"a": numbers, "b": (numbers, 1)}).values) == ["a", "b"]


def test_the_same_container_twice_is_no_cycle() -> None:
    shared = {"w": T}
    assert list(flat_keys({"a": shared, "b": [shared, shared]}).values) == ["a.w", "b.0.w", "b.1.w"]


@pytest.mark.parametrize("nested", [{"a.b": 1, "a": {"b": 2}}, {"s": {0: 1, "0": 2}}])
def test_two_paths_of_one_key_are_refused(nested: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"duplicated flatten key .* it stands at .* and at .*; rename"):
        flat_keys(nested)


@pytest.mark.parametrize("name", NESTED)
def test_values_are_put_back_where_they_were(name: str) -> None:
    nested = copy.deepcopy(NESTED[name][0])
    flat = flat_keys(nested)
    new = {fqn: torch.ones(2) if isinstance(value, torch.Tensor) else object() for fqn, value in flat.values.items()}
    for fqn, path in flat.paths.items():
        set_value(nested, path, new[fqn])
    again = flat_keys(nested)
    assert again.paths == flat.paths
    assert all(again.values[fqn] is value for fqn, value in new.items())


def test_tuples_are_made_anew_and_keep_their_class() -> None:
    held = [1]
    nested = {"a": Pair(T, (held, 2))}
    set_value(nested, ("a", 1, 1), 3)
    assert nested["a"] == Pair(T, ([1], 3)) and type(nested["a"]) is Pair
    assert nested["a"].weight is T and nested["a"].step[0] is held


def test_meta_tensors_get_memory_in_both_dicts() -> None:
    real = torch.ones(2)
    nested = {"a": {"w": torch.empty(2, 3, device="meta", dtype=torch.bfloat16)}, "pair": (real, 1), "step": 1}
    nested["left"] = torch.empty(1, device="meta")
    flat = flat_keys(nested)
    materialize_meta(nested, flat.values, flat.paths, ["a.w", "step"])
    made = nested["a"]["w"]
    assert (made.device.type, made.shape, made.dtype) == ("cpu", (2, 3), torch.bfloat16)
    assert flat.values["a.w"] is made and nested["pair"][0] is real
    assert nested["left"].is_meta


def test_a_walk_over_objects_has_an_end_at_any_depth_and_with_any_sharing() -> None:
    deep: list[Any] = [torch.ones(1)]
    doubled = deep
    for _ in range(60):
        doubled = [doubled, doubled]
    for _ in range(10_000):
        deep = [deep]
    cycle: list[Any] = [deep, {"doubled": doubled}]
    cycle.append(cycle)
    assert sum(isinstance(member, torch.Tensor) for member in nested_members(cycle)) == 1
