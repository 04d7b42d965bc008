"""Process groups whose backend is none of c10d's own, as those of torchcomms (pytorch#174202)."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from models import differences
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import torchtitan_ext as tte

TRUTH = {"w": torch.arange(9.0)}


def make_gloo(store: dist.Store, rank: int, size: int, timeout: object) -> dist.ProcessGroupGloo:
    return dist.ProcessGroupGloo(store, rank, size, timeout)


def whole_story(rank: int, world_size: int, path: Path, backend: str) -> list[str]:
    if not hasattr(dist.Backend, "ANOTHER"):
        dist.Backend.register_backend("another", make_gloo, devices=["cpu"])
    group = dist.new_group(backend=backend)
    assert dist.get_backend(group) == backend
    mesh = init_device_mesh("cpu", (world_size,))
    state = {"w": distribute_tensor(TRUTH["w"], mesh, [Shard(0)])}
    tte.save(state, path, process_group=group)
    state["w"].to_local().zero_()
    tte.load(state, path, process_group=group)
    lines = differences({"w": tte.full_tensor(state["w"])}, TRUTH)
    tte.async_save(state, path / "later", process_group=group).result()
    whole = {"w": torch.zeros(9)}
    tte.load(whole, path / "later", process_group=group, share_reads=True)
    lines += differences(whole, TRUTH)
    tte.reshard(state, moved := {"w": torch.zeros(9)}, group, verify=True)
    lines += differences(moved, TRUTH)
    weights = [torch.full((3,), float(rank)), torch.full((2, 2), rank)]
    tte.sync.broadcast_tensors(weights, group=group, src=0)
    lines += [f"rank {rank} has {weight}" for weight in weights if weight.any()]
    assert tte.fingerprint({"w": weights[0]}) == tte.fingerprint({"w": torch.zeros(3)})
    return lines


@pytest.mark.parametrize("backend", ["another", "cpu:gloo"])
def test_a_group_of_another_backend_saves_loads_and_syncs(run_world, tmp_path: Path, backend: str) -> None:
    """Under torchcomms a group of gloo calls itself "cpu:gloo" (pytorch#189070)."""
    assert run_world(2, whole_story, tmp_path, backend) == [[], []]
