"""Flat state dicts: what goes in comes out, through JSON, into new containers and in place."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from boxed_tensors import boxed, states_of
from reference import same_bits
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from torchtitan_ext.layout.own_boxes import own_boxes
from torchtitan_ext.state.flat_buffer import pack_state_dict, unpack_state_dict

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
    buffers, manifest = pack_state_dict(state, alignment=alignment)
    manifest = json.loads(json.dumps(manifest, allow_nan=False))
    restored = unpack_state_dict(buffers, manifest)
    assert_equal(restored, state)
    assert restored["model"]["embedding"] is restored["model"]["head"]
    assert len(manifest["entries"]) == 7  # the tied weight once
    entry = manifest["entries"][0]
    assert entry["fqn"] == "model.embedding" and entry["dtype"] == "float32" and entry["shape"] == [3, 5]


def test_boxes_of_their_own_come_along() -> None:
    _, (state, other) = states_of("several boxes")
    buffers, manifest = pack_state_dict(state)
    restored = unpack_state_dict(buffers, json.loads(json.dumps(manifest)))
    assert own_boxes(restored["w"]) == own_boxes(state["w"]) != own_boxes(other["w"])
    assert same_bits(restored["w"].detach(), state["w"].detach())
    other["w"] = boxed(torch.empty_like(state["w"]), (9, 5), [((0, 0), (0, 0), (2, 5))])
    with pytest.raises(ValueError, match="w: own_boxes is "):
        unpack_state_dict(buffers, manifest, into=other)
    state["w"].global_shape = (1, 1)
    with pytest.raises(ValueError, match="pack_state_dict: w describes its own boxes, and on this rank these make no"):
        pack_state_dict(state)


def test_into_an_existing_state_dict() -> None:
    state = nested_state()
    buffers, manifest = pack_state_dict(state)
    target = nested_state()
    target["optimizer"]["param_groups"][0]["lr"] = 5.0
    target["nan"] = 1.0
    memory = {name: target["model"][name].data_ptr() for name in target["model"]}
    versions = target["flags"]._version
    result = unpack_state_dict(buffers, json.loads(json.dumps(manifest)), into=target)
    assert result is target
    assert_equal(target, state)
    assert {name: target["model"][name].data_ptr() for name in target["model"]} == memory
    assert target["flags"]._version == versions + 1


def test_members_of_a_subclass_of_dict_are_replaced() -> None:
    class Sums(dict):
        def __setitem__(self, key: str, value: int) -> None:
            super().__setitem__(key, self.get(key, 0) + value)

    buffers, manifest = pack_state_dict({"seen": {"web": 3}})
    target = {"seen": Sums(web=1)}
    unpack_state_dict(buffers, manifest, into=target)
    assert target["seen"]["web"] == 3


def test_refusals() -> None:
    state = nested_state()
    buffers, manifest = pack_state_dict(state)
    target = nested_state()
    target["flags"] = torch.tensor([1, 0])
    before = target["model"]["embedding"].clone()
    with pytest.raises(ValueError, match="into does not match: flags: dtype is int64, expected bool"):
        unpack_state_dict(buffers, manifest, into=target)
    assert torch.equal(target["model"]["embedding"], before)
    target = nested_state()
    target["model"]["head"] = target["model"]["head"].clone()
    with pytest.raises(ValueError, match="it has 8 distinct tensors, expected 7"):
        unpack_state_dict(buffers, manifest, into=target)
    target = nested_state()
    target["extra"] = 1
    with pytest.raises(ValueError, match="its containers or the places of its tensors differ"):
        unpack_state_dict(buffers, manifest, into=target)
    with pytest.raises(ValueError, match="expected a tensor, a container or plain data"):
        pack_state_dict({"generator": torch.Generator()})
    cycle: dict[str, Any] = {}
    cycle["inner"] = [cycle]
    with pytest.raises(ValueError, match="a.inner.0 leads back to a: a container that holds itself"):
        pack_state_dict({"a": cycle})
    for odd, reason in [(torch.eye(2).to_sparse(), "is torch.sparse_coo; convert"), (NESTED, "is a nested tensor")]:
        with pytest.raises(ValueError, match=f"w {reason}"):
            pack_state_dict({"w": odd})
    with pytest.raises(ValueError, match="w is on the meta device"):
        pack_state_dict({"w": torch.empty(3, device="meta")})
    with pytest.raises(ValueError, match="no buffer for cpu"):
        unpack_state_dict({}, manifest)
    with pytest.raises(ValueError, match="the buffer has 16"):
        unpack_state_dict({"cpu": buffers["cpu"][:16]}, manifest)
    with pytest.raises(ValueError, match="manifest version 9, expected 1"):
        unpack_state_dict(buffers, {**manifest, "version": 9})


def round_trip_on_mesh(rank: int, world_size: int) -> bool:
    mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(rank)
    local = torch.randn(3 - rank // 2, 4)
    weight = DTensor.from_local(local, mesh, [Shard(0), Replicate()], shape=torch.Size((5, 4)), stride=(4, 1))
    state = {"w": weight, "step": 3}
    buffers, manifest = pack_state_dict(state)
    manifest = json.loads(json.dumps(manifest))
    restored = unpack_state_dict(buffers, manifest, meshes=[mesh])
    assert restored["w"].placements == weight.placements and restored["w"].shape == weight.shape
    assert torch.equal(restored["w"].to_local(), local)
    with pytest.raises(ValueError, match="pass that mesh in meshes="):
        unpack_state_dict(buffers, manifest)
    zeros = DTensor.from_local(
        torch.zeros_like(local), mesh, [Shard(0), Replicate()], shape=torch.Size((5, 4)), stride=(4, 1)
    )
    unpack_state_dict(buffers, manifest, into={"w": zeros, "step": 0})
    return torch.equal(zeros.to_local(), local)


def test_dtensors(run_world: Callable[..., list[Any]]) -> None:
    assert run_world(4, round_trip_on_mesh) == [True] * 4
