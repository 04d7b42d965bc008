"""`check_replicas` of memory that could not be written to; arguments and groups that nothing can be done with."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

import torchtitan_ext as tte
from torchtitan_ext.errors import SyncMismatchError, WrongArgumentError
from torchtitan_ext.sync.slices import SliceTensor, presumed_replicas


def check_read_only(rank: int, world_size: int) -> list[str]:
    mesh = init_device_mesh("cpu", (world_size,))
    whole = torch.arange(6.0)
    state = {
        "expanded": torch.full((1,), 2.0 + rank).expand(4, 3),
        "overlapping": whole.as_strided((3, 3), (1, 1)),
        "part": whole[2:5],
        "same": torch.zeros(1).expand(7),
    }
    found = tte.check_replicas(state, mesh)
    module = nn.Module()
    module.register_buffer("mask", torch.zeros(1).expand(5))
    assert tte.check_replicas(module, mesh) == ()
    with pytest.raises(SyncMismatchError, match="mask: cannot be received into"):
        tte.sync_module_states(module, mesh)
    return [entry.fqn for entry in found]


def test_what_is_only_read_may_share_memory(run_world: Callable[..., list[list[str]]]) -> None:
    assert run_world(2, check_read_only) == [["expanded"]] * 2


def test_what_not_all_ranks_hold_is_presumed_of_none() -> None:
    held = [[SliceTensor(("w", None), "a kind", ranks, 4)] for ranks in ((0, 2), (1, 3), (0, 2), (1, 3))]
    assert presumed_replicas(held) == ({("w", None)}, [])
    assert presumed_replicas(held[:3]) == (set(), ["w"])


def check_one_element(rank: int, world_size: int) -> str:
    mesh = init_device_mesh("cpu", (world_size,))
    one = torch.full((1, 2), float(rank))[:, 0]
    (plain,) = tte.check_replicas({"one": one}, mesh)
    replica = DTensor.from_local(one, mesh, [Replicate()], run_check=False)
    assert tte.full_tensor(replica).tolist() == [float(rank)]
    return plain.fqn


def test_one_element_of_an_odd_stride(run_world: Callable[..., list[str]]) -> None:
    assert run_world(2, check_one_element) == ["one"] * 2


def wrong_arguments(rank: int, world_size: int) -> list[str]:
    mesh = init_device_mesh("cpu", (world_size,))
    texts = []
    calls: list[Callable[[], Any]] = [
        lambda: tte.check_replicas(nn.Linear if rank else nn.Linear(1, 1), mesh),  # type: ignore[arg-type]
        lambda: tte.check_replicas([nn.Linear(1, 1), 3], mesh),  # type: ignore[list-item]
        lambda: tte.sync_module_states(torch.zeros(2), mesh),  # type: ignore[arg-type]
        lambda: tte.sync_module_states(mesh, nn.Linear(1, 1)),  # type: ignore[arg-type]
        lambda: tte.sync.broadcast_tensors(nn.Linear(1, 1)),  # type: ignore[arg-type]
        lambda: tte.sync.broadcast_tensors({"w": torch.zeros(1)} if rank else []),  # type: ignore[arg-type]
    ]
    for call in calls:
        with pytest.raises(TypeError) as caught:
            call()
        texts.append(str(caught.value).splitlines()[-1].strip())
    with pytest.raises(WrongArgumentError):
        calls[0]()
    return texts


def test_wrong_arguments_are_named_on_every_rank(run_world: Callable[..., list[Any]]) -> None:
    assert (
        run_world(2, wrong_arguments)
        == [
            [
                "module: got the class Linear, expected a module, a list of modules or a state dict",
                "module[1]: got 3, expected a module",
                "module: got a Tensor, expected a module, a list of modules or a state dict",
                "sync_module_states: got mesh=a Linear, expected a DeviceMesh",
                "tensors: is a Linear, expected a list of tensors",
                "tensors: is a dict, expected a list of tensors",
            ]
        ]
        * 2
    )


def destroyed(rank: int, world_size: int) -> None:
    mesh, group = init_device_mesh("cpu", (2, 2)), dist.new_group()
    dist.barrier()
    dist.destroy_process_group(group)
    with pytest.raises(ValueError, match="^broadcast_tensors: the process group of group was destroyed; make a new"):
        tte.sync.broadcast_tensors([torch.zeros(1)], group=group)
    with pytest.raises(ValueError, match="^fingerprint: the process group of group was destroyed; make a new"):
        tte.fingerprint({}, process_group=group)
    dist.barrier()
    dist.destroy_process_group(mesh.get_group(0))
    for call in (tte.check_replicas, tte.sync_module_states):
        with pytest.raises(ValueError, match=f"^{call.__name__}: the process group of the mesh was destroyed; make"):
            call(nn.Linear(1, 1), mesh)


def test_a_destroyed_group_is_one_sentence(run_world: Callable[..., list[Any]]) -> None:
    run_world(4, destroyed)
