"""Process groups need not be sorted by rank: meshes that keep the order of their ranks, and groups like theirs."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from models import differences, distribute_by_index, left_to_right, poison, random_whole
from rank_order import ordered_group, ordered_mesh
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import torchtitan_ext as tte
from torchtitan_ext.ranks.exchange import (
    Opening,
    all_gather_bytes,
    broadcast_bytes,
    gather_values,
    ranks_along,
    scope_ranks,
)

RANKS = [[3, 1], [0, 2]]
NAMES = ("dp", "tp")
OPENING = Opening("test", "values")


def groups_are_unsorted(mesh: DeviceMesh) -> bool:
    """Of the column 3, 0 and the row 3, 1."""
    orders = gather_values([dist.get_process_group_ranks(mesh.get_group(axis)) for axis in (0, 1)], opening=OPENING)
    return orders == [[[3, 0], [0, 2]], [[1, 2], [3, 1]], [[1, 2], [0, 2]], [[3, 0], [3, 1]]]


def exchanged(rank: int, world_size: int) -> list[Any]:
    mesh = ordered_mesh(RANKS, NAMES)
    assert groups_are_unsorted(mesh)
    assert gather_values(rank, mesh, opening=OPENING) == scope_ranks(mesh) == [3, 1, 0, 2]
    own = torch.tensor([rank], dtype=torch.uint8)
    for axis in (0, 1):
        assert all_gather_bytes(mesh, own, [axis]).flatten().tolist() == ranks_along(mesh, axis)
    assert all_gather_bytes(mesh, own, [0, 1]).flatten().tolist() == [3, 1, 0, 2]
    group = ordered_group([2, 3, 0])
    if rank in (2, 3, 0):
        assert gather_values(rank, group, opening=OPENING) == scope_ranks(group) == [2, 3, 0]
        of_group = own.clone()
        broadcast_bytes(of_group, group, src=1)
        assert of_group.item() == 3
    broadcast_bytes(own, mesh, src=1)
    return [own.item()]


def test_values_and_bytes(run_world) -> None:
    assert run_world(4, exchanged) == [[2]] * 4


class Model(nn.Module):
    def __init__(self, mesh: DeviceMesh | None, whole: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.wide = nn.Linear(3, 9, bias=False)
        self.norm = nn.Parameter(torch.empty(5))
        self.wide.weight.data.copy_(whole["wide.weight"])
        self.norm.data.copy_(whole["norm"])
        if mesh is not None:
            parallelize_module(self, mesh["tp"], {"wide": ColwiseParallel()})
            fully_shard(self, mesh=mesh["dp"])


def whole_state() -> dict[str, torch.Tensor]:
    return {"wide.weight": random_whole((9, 3), torch.float32, 0), "norm": random_whole((5,), torch.float32, 1)}


def steps_of(mesh: DeviceMesh, path: Path, share_reads: bool) -> list[str]:
    """The state of a model that was saved on another mesh, there and in this mesh's tensors."""
    model = Model(mesh, {key: torch.zeros_like(value) for key, value in whole_state().items()})
    state = {"model": model.state_dict(), "step": 0}
    tte.load(state, path, share_reads=share_reads, prove=True)
    found = {key: tte.full_tensor(value) for key, value in state["model"].items()}
    lines = [key for key, value in whole_state().items() if not torch.equal(found[key], value)]
    return lines + ([] if state["step"] == 7 else ["step"])


def saved_and_loaded(rank: int, world_size: int, folder: Path) -> list[str]:
    meshes = {
        "kept": ordered_mesh(RANKS, NAMES),
        "sorted": DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=NAMES),
    }
    lines = []
    for name, mesh in meshes.items():
        state = {"model": Model(mesh, whole_state()).state_dict(), "step": 7}
        tte.save(state, folder / name, fingerprints=True)
        handle = tte.async_save(state, folder / f"{name}-async", fingerprints=True)
        handle.result()
        sums = tte.fingerprint(state["model"])
        for other, target in meshes.items():
            for source in (name, f"{name}-async"):
                for share_reads in (False, True):
                    lines += [f"{source} on {other}: {line}" for line in steps_of(target, folder / source, share_reads)]
            again = Model(target, {key: torch.zeros_like(value) for key, value in whole_state().items()}).state_dict()
            tte.reshard(state["model"], again)
            if tte.fingerprint(again) != sums:
                lines.append(f"resharded from {name} to {other}")
    return lines


def test_saves_loads_and_transfers(run_world, tmp_path: Path) -> None:
    assert run_world(4, saved_and_loaded, tmp_path) == [[]] * 4
    state = {"model": {key: torch.zeros_like(value) for key, value in whole_state().items()}, "step": 0}
    tte.load(state, tmp_path / "kept", no_dist=True)
    assert differences(state["model"], whole_state()) == [] and state["step"] == 7


def synced(rank: int, world_size: int) -> list[Any]:
    mesh = ordered_mesh(RANKS, NAMES)
    told: list[Any] = []
    for src in (0, 1):
        layout = left_to_right("", (2, 2), Replicate(), Shard(0))
        whole = random_whole((7, 2), torch.float32, 3)
        tensor = distribute_by_index(whole, mesh, layout)
        source = ranks_along(mesh, 0)[src]
        if rank != source:
            poison({"weight": tensor})
        different = tte.check_replicas({"weight": tensor}, mesh)
        told.append([one.ranks for one in different])
        module = nn.Module()
        module.weight = nn.Parameter(tensor)
        tte.sync_module_states(module, mesh, src=src)
        told.append(differences({"weight": module.weight.data}, {"weight": whole}, list(layout.steps)))
        assert tte.check_replicas(module, mesh) == ()
    group = ordered_group([2, 3, 0])
    if rank in (2, 3, 0):
        plain = torch.full((3,), float(rank))
        tte.sync.broadcast_tensors([plain], group=group, src=1)
        told.append(plain.tolist())
    return told


def test_syncs(run_world) -> None:
    answers = run_world(4, synced)
    for rank, answer in enumerate(answers):
        replicas = [((0,), (3,)), ((1,), (2,))]
        assert answer == [replicas, [], replicas, [], *([] if rank == 1 else [[3.0] * 3])], rank


def in_a_group(rank: int, world_size: int, folder: Path) -> list[str]:
    """Three of four ranks save and load; the first of the group is the coordinator."""
    group = ordered_group([2, 3, 0])
    if rank == 1:
        return []
    position = [2, 3, 0].index(rank)
    state = {"w": torch.arange(5.0), "step": 7, f"rank_{position}": {"value": rank}}
    lines = []
    tte.save(state, folder / "sync", process_group=group)
    tte.async_save(state, folder / "async", process_group=group).result()
    for source in ("sync", "async"):
        for share_reads in (False, True):
            again = {"w": torch.zeros(5), "step": 0, f"rank_{position}": {"value": None}}
            tte.load(again, folder / source, process_group=group, share_reads=share_reads)
            if (
                again["step"] != 7
                or not torch.equal(again["w"], state["w"])
                or again[f"rank_{position}"]["value"] != rank
            ):
                lines.append(f"{source} with share_reads={share_reads}: {again}")
    target = {"w": torch.zeros(5)}
    tte.reshard({"w": state["w"] + 1}, target, group)
    return lines if torch.equal(target["w"], state["w"] + 1) else [*lines, "resharded"]


def test_a_group_of_some_ranks(run_world, tmp_path: Path) -> None:
    assert run_world(4, in_a_group, tmp_path) == [[]] * 4
