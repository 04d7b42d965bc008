"""Flat state dicts: what goes in comes out, through JSON, into new containers and in place."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from boxed_tensors import boxed, states_of
from models import local_of
from random_layouts import build, random_layouts, random_tensor
from reference import same_bits
from tier import SOAK, of_at_most_four
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.testing._internal.two_tensor import TwoTensor

import torchtitan_ext as tte
from torchtitan_ext import flatten_state_dict, unflatten_state_dict
from torchtitan_ext.errors import WrongValueError
from torchtitan_ext.layout.own_boxes import keep_own_boxes, own_boxes

NESTED = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])


def nested_state() -> dict[str, Any]:
    weight = torch.randn(3, 5)
    return {
        "model": {"embedding": weight, "head": weight, "scale": torch.tensor(2.0).bfloat16()},
        "optimizer": {
            "state": {0: {"step": torch.tensor(3), "exp_avg": torch.randn(4, 6).t()}, 1: {}},
            "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.999), "params": [0, 1], "fused": None}],
        },
        "pair": (torch.arange(3), "text"),
        "flags": torch.tensor([True, False]),
        "empty": torch.empty(0, 4),
        "nan": float("nan"),
        "blob": b"\x00\xff",
        "dtype": torch.float32,
        "device": torch.device("cpu"),
        True: 1,
    }


def assert_equal(left: Any, right: Any) -> None:
    assert type(left) is type(right)
    if isinstance(left, torch.Tensor):
        assert left.dtype == right.dtype and left.shape == right.shape and torch.equal(left, right)
    elif isinstance(left, dict):
        assert list(left) == list(right)
        for key in left:
            assert_equal(left[key], right[key])
    elif isinstance(left, (list, tuple)):
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            assert_equal(one, other)
    else:
        assert left == right or (left != left and right != right)


@pytest.mark.parametrize("alignment", [1, 64])
def test_round_trip_through_json(alignment: int) -> None:
    state = nested_state()
    buffers, manifest = flatten_state_dict(state, alignment=alignment)
    manifest = json.loads(json.dumps(manifest, allow_nan=False))
    restored = unflatten_state_dict(buffers, manifest)
    assert_equal(restored, state)
    assert restored["model"]["embedding"] is restored["model"]["head"]
    assert len(manifest["entries"]) == 7  # the tied weight once
    entry = manifest["entries"][0]
    assert entry["fqn"] == "model.embedding" and entry["dtype"] == "float32" and entry["shape"] == [3, 5]


def test_views_of_one_memory_are_tensors_of_their_own() -> None:
    whole = torch.arange(6.0)
    state = {"whole": whole, "begin": whole[:2], "bits": whole.view(torch.int32), "tied": whole[:]}
    buffers, manifest = flatten_state_dict(state)
    restored = unflatten_state_dict(buffers, json.loads(json.dumps(manifest)))
    assert_equal(restored, state)
    assert restored["tied"] is restored["whole"] and len(manifest["entries"]) == 3


def test_boxes_of_their_own_come_along() -> None:
    _, (state, other) = states_of("several boxes")
    buffers, manifest = flatten_state_dict(state)
    restored = unflatten_state_dict(buffers, json.loads(json.dumps(manifest)))
    assert own_boxes(restored["w"]) == own_boxes(state["w"]) != own_boxes(other["w"])
    assert same_bits(restored["w"].detach(), state["w"].detach())
    other["w"] = boxed(torch.empty_like(state["w"]), (9, 5), [((0, 0), (0, 0), (2, 5))])
    with pytest.raises(ValueError, match="w: own_boxes is "):
        unflatten_state_dict(buffers, manifest, into=other)
    state["w"].global_shape = (1, 1)
    with pytest.raises(
        ValueError, match="flatten_state_dict: w describes its own boxes, and on this rank these make no"
    ):
        flatten_state_dict(state)


def test_into_an_existing_state_dict() -> None:
    state = nested_state()
    buffers, manifest = flatten_state_dict(state)
    target = nested_state()
    target["optimizer"]["param_groups"][0]["lr"] = 5.0
    target["nan"] = 1.0
    memory = {name: target["model"][name].data_ptr() for name in target["model"]}
    versions = target["flags"]._version
    result = unflatten_state_dict(buffers, json.loads(json.dumps(manifest)), into=target)
    assert result is target
    assert_equal(target, state)
    assert {name: target["model"][name].data_ptr() for name in target["model"]} == memory
    assert target["flags"]._version == versions + 1


def test_members_of_a_subclass_of_dict_are_replaced() -> None:
    class Sums(dict):
        def __setitem__(self, key: str, value: int) -> None:
            super().__setitem__(key, self.get(key, 0) + value)

    buffers, manifest = flatten_state_dict({"seen": {"web": 3}})
    target = {"seen": Sums(web=1)}
    unflatten_state_dict(buffers, manifest, into=target)
    assert target["seen"]["web"] == 3


def test_refusals() -> None:
    state = nested_state()
    buffers, manifest = flatten_state_dict(state)
    target = nested_state()
    target["flags"] = torch.tensor([1, 0])
    before = target["model"]["embedding"].clone()
    with pytest.raises(ValueError, match="into does not match: flags: dtype is int64, expected bool"):
        unflatten_state_dict(buffers, manifest, into=target)
    assert torch.equal(target["model"]["embedding"], before)
    target = nested_state()
    target["model"]["head"] = target["model"]["head"].clone()
    with pytest.raises(ValueError, match="it has 8 distinct tensors, expected 7"):
        unflatten_state_dict(buffers, manifest, into=target)
    target = nested_state()
    target["extra"] = 1
    with pytest.raises(ValueError, match="its containers or the places of its tensors differ"):
        unflatten_state_dict(buffers, manifest, into=target)
    with pytest.raises(ValueError, match="expected a tensor, a container or plain data"):
        flatten_state_dict({"generator": torch.Generator()})
    cycle: dict[str, Any] = {}
    cycle["inner"] = [cycle]
    with pytest.raises(ValueError, match="a.inner.0 leads back to a: a container that holds itself"):
        flatten_state_dict({"a": cycle})
    for odd, reason in [(torch.eye(2).to_sparse(), "is torch.sparse_coo; convert"), (NESTED, "is a nested tensor")]:
        with pytest.raises(ValueError, match=f"w {reason}"):
            flatten_state_dict({"w": odd})
    with pytest.raises(ValueError, match="w is on the meta device"):
        flatten_state_dict({"w": torch.empty(3, device="meta")})
    with pytest.raises(ValueError, match="no buffer for cpu"):
        unflatten_state_dict({}, manifest)
    with pytest.raises(ValueError, match="it has 60 bytes from byte 0, the buffer has 16"):
        unflatten_state_dict({"cpu": buffers["cpu"][:16]}, manifest)
    with pytest.raises(ValueError, match="manifest version 9, expected 1"):
        unflatten_state_dict(buffers, {**manifest, "version": 9})


def round_trip_on_mesh(rank: int, world_size: int) -> bool:
    mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(rank)
    local = torch.randn(3 - rank // 2, 4)
    weight = DTensor.from_local(local, mesh, [Shard(0), Replicate()], shape=torch.Size((5, 4)), stride=(4, 1))
    state = {"w": weight, "step": 3}
    buffers, manifest = flatten_state_dict(state)
    manifest = json.loads(json.dumps(manifest))
    restored = unflatten_state_dict(buffers, manifest, meshes=[mesh])
    assert restored["w"].placements == weight.placements and restored["w"].shape == weight.shape
    assert torch.equal(restored["w"].to_local(), local)
    with pytest.raises(ValueError, match="pass that mesh in meshes="):
        unflatten_state_dict(buffers, manifest)
    zeros = DTensor.from_local(
        torch.zeros_like(local), mesh, [Shard(0), Replicate()], shape=torch.Size((5, 4)), stride=(4, 1)
    )
    unflatten_state_dict(buffers, manifest, into={"w": zeros, "step": 0})
    return torch.equal(zeros.to_local(), local)


def test_dtensors(run_world: Callable[..., list[Any]]) -> None:
    assert run_world(4, round_trip_on_mesh) == [True] * 4


def test_tensors_of_tensors_go_by_their_parts() -> None:
    state = {"w": TwoTensor(torch.arange(4.0), torch.ones(4)), "step": 3}
    buffers, manifest = flatten_state_dict(state)
    assert [entry["fqn"] for entry in manifest["entries"]] == ["w.a", "w.b"]
    target = {"w": TwoTensor(torch.zeros(4), torch.zeros(4)), "step": 0}
    unflatten_state_dict(buffers, json.loads(json.dumps(manifest)), into=target)
    assert torch.equal(target["w"].a, torch.arange(4.0)) and torch.equal(target["w"].b, torch.ones(4))
    assert target["step"] == 3
    with pytest.raises(
        WrongValueError, match="w is a TwoTensor, which no manifest can make; pass a state dict in into="
    ):
        unflatten_state_dict(buffers, manifest)
    with pytest.raises(WrongValueError, match="its containers or the places of its tensors differ"):
        unflatten_state_dict(buffers, manifest, into={"w": {"a": torch.zeros(4), "b": torch.zeros(4)}, "step": 0})


def scaled(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    buffers, manifest = flatten_state_dict({"x": first * 2, "y": [second, second], "n": 3})
    back = unflatten_state_dict({"cpu": buffers["cpu"].clone()}, manifest)
    return back["x"] + back["y"][0].sum() + back["n"] + len(manifest["entries"])


def test_compiled() -> None:
    arguments = torch.arange(3.0), torch.ones(2, 2)
    compiled = torch.compile(scaled, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*arguments), scaled(*arguments)) and scaled(*arguments)[0] == 9


def damaged(value: Any, draw: random.Random) -> Any:
    """The same JSON with one value replaced, removed or put at another place."""
    places = list(places_of(value))
    container, key = draw.choice(places)
    odd = [None, -1, 2**62, 2**70, 1.5, "x", [], {}, [[]], {"tensor": 99}, {"tensor": -1}, True, "float128"]
    other, other_key = draw.choice(places)
    container[key] = draw.choice([*odd, other[other_key]])
    if draw.random() < 0.2:
        del container[key]
    return value


def places_of(value: Any) -> Iterator[tuple[Any, Any]]:
    for key in range(len(value)) if isinstance(value, list) else list(value) if isinstance(value, dict) else ():
        yield value, key
        yield from places_of(value[key])


@pytest.mark.parametrize("fills", [False, True])
def test_hostile_manifests_are_refused_or_read_within_the_buffers(fills: bool) -> None:
    state = nested_state()
    state["boxed"] = boxed(torch.arange(6.0).view(2, 3), (4, 3), [((0, 0), (0, 0), (2, 3))])
    buffers, manifest = flatten_state_dict(state)
    text = json.dumps(manifest)
    num_refused = 0
    for seed in range(300 * SOAK):
        manifest = damaged(json.loads(text), random.Random(seed))
        into = {**nested_state(), "boxed": keep_own_boxes(state["boxed"], torch.zeros(2, 3))} if fills else None
        try:
            unflatten_state_dict(buffers, manifest, into=into)
        except WrongValueError:
            num_refused += 1
    assert num_refused > 100 * SOAK
    deep: Any = 1
    for _ in range(100_000):
        deep = {"list": [deep]}
    for odd, message in [
        ({"tree": deep}, "RecursionError"),
        ({"tree": {"list": []}}, "it describes a list, expected a state dict"),
        ({"entries": [{**manifest["entries"][0], "shape": [2**62, 2**62], "offset": 0}]}, "more elements than can be"),
    ]:
        with pytest.raises(WrongValueError, match=message):
            unflatten_state_dict(buffers, {**json.loads(text), **odd})


def flatten_random(rank: int, world_size: int, seeds: list[int]) -> list[str]:
    """Of each state: back on its meshes in place and anew, and by its boxes alone to other layouts."""
    lines = []
    for seed in seeds:
        draw = random.Random(seed)
        truth = {f"w.{number}": random_tensor(draw) for number in range(draw.randint(1, 8))}
        state, orders = build(truth, random_layouts(seed, world_size, truth))
        buffers, manifest = flatten_state_dict({"model": state, "seed": seed}, layouts=orders)
        manifest = json.loads(json.dumps(manifest))
        meshes = {id(tensor.device_mesh): tensor.device_mesh for tensor in state.values()}
        again = unflatten_state_dict(buffers, manifest, meshes=list(meshes.values()))["model"]
        places, _ = build(
            {fqn: torch.zeros_like(whole) for fqn, whole in truth.items()}, random_layouts(seed, world_size, truth)
        )
        unflatten_state_dict(buffers, manifest, into={"model": places, "seed": 0})
        for fqn, tensor in state.items():
            for found in (again[fqn], places[fqn]):
                if not same_bits(local_of(found), local_of(tensor)):
                    lines.append(f"{seed}: {fqn}")
        boxes = unflatten_state_dict(buffers, manifest, boxes=True)["model"]
        target, of_target = build(
            {fqn: torch.zeros_like(whole) for fqn, whole in truth.items()}, random_layouts(seed + 7, world_size, truth)
        )
        tte.transfer.plan_reshard(boxes, target, target_layouts=of_target).run()
        for fqn, tensor in target.items():
            if not same_bits(tte.full_tensor(tensor, layout=of_target.get(fqn)), truth[fqn]):
                lines.append(f"{seed}: {fqn} by boxes")
    return lines


@pytest.mark.parametrize("world_size", of_at_most_four([1, 2, 4, 6, 8]))
def test_random_states(run_world: Callable[..., list[Any]], world_size: int) -> None:
    # Each mesh has groups with threads of their own, which end with their world.
    for first in range(0, 4 if SOAK == 1 else 200, 4):
        assert run_world(world_size, flatten_random, list(range(first, first + 4))) == [[]] * world_size


def without_boxes(rank: int, world_size: int) -> str:
    mesh = init_device_mesh("cpu", (world_size,))
    state = {"sums": DTensor.from_local(torch.ones(3), mesh, [Partial()], run_check=False)}
    buffers, manifest = flatten_state_dict(state)
    assert torch.equal(unflatten_state_dict(buffers, manifest, meshes=[mesh])["sums"].to_local(), torch.ones(3))
    with pytest.raises(WrongValueError) as caught:
        unflatten_state_dict(buffers, manifest, boxes=True)
    return str(caught.value)


def test_a_tensor_whose_boxes_are_open(run_world: Callable[..., list[Any]]) -> None:
    for text in run_world(2, without_boxes):
        assert "sums: the placements [{'kind': 'partial', 'reduce_op': 'sum'}] did not say which boxes" in text
