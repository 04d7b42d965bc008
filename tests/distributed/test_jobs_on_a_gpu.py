"""Jobs whose state lies on a GPU: one rank over NCCL, and several that share the GPU over gloo.

NCCL wants a GPU for each rank. Its calls, streams and buffers are the same with one rank; what ranks say to each other
is tested over gloo.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo_worlds import WorldPool, on_a_gpu
from models import leaves, local_of
from states import DTYPES, bits, random_tensor
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

import torchtitan_ext as tte
from torchtitan_ext import ops, transforms
from torchtitan_ext.transforms import Rule, Transform

pytestmark = pytest.mark.needs_cuda


@pytest.fixture(scope="module", params=["cpu:gloo,cuda:nccl", "nccl"])
def run_nccl_world(request: pytest.FixtureRequest) -> Iterator[Callable[..., list[Any]]]:
    """NCCL alone is what torchtitan asks for unless something lies in host memory."""
    pool = WorldPool(backend=request.param)
    yield pool.run
    pool.close()


def tensors_in(state: Any) -> dict[str, Tensor]:
    return {name: local_of(value).detach() for name, value in leaves(state) if isinstance(value, Tensor)}


def copied(state: Any) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors_in(state).items()}


def wrong(state: Any, truth: dict[str, Tensor]) -> list[str]:
    found = tensors_in(state)
    names = sorted(found.keys() ^ truth.keys())
    return names + [
        name for name in found.keys() & truth.keys() if not torch.equal(bits(found[name]), bits(truth[name]))
    ]


# ---- one rank over NCCL: FSDP2 over TP, trained ----


class Trained:
    """A model on a (1, 1) mesh of the GPU and its optimizer, after steps of its own gradients."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.mesh = init_device_mesh("cuda", (1, 1), mesh_dim_names=("dp", "tp"))
        self.model = nn.Sequential(nn.Linear(33, 65), nn.ReLU(), nn.Linear(65, 17), nn.BatchNorm1d(17)).cuda()
        parallelize_module(self.model, self.mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(self.model, mesh=self.mesh["dp"])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1, foreach=False)
        self.step()

    def step(self) -> float:
        generator = torch.Generator("cuda").manual_seed(1)
        loss = self.model(torch.randn(8, 33, device="cuda", generator=generator)).float().square().sum()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss)

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}


def save_and_load_over_nccl(rank: int, world_size: int, path: Path) -> list[str]:
    job, other = Trained(0), Trained(1)
    truth = copied(job.state())
    tte.save(job.state(), path / "saved")
    future = tte.async_save(job.state(), path / "saved behind")
    job.step()  # while that save is under way
    future.result()
    tte.weights.save({"model": job.state()["model"]}, path / "weights")
    lines = []
    for name in ("saved", "saved behind"):
        other.step()
        state = other.state()
        tte.load(state, path / name, share_reads=name == "saved behind")
        lines += [f"{name}: {line}" for line in wrong(state, truth)]
    later = {"model": other.state()["model"]}
    tte.load(later, path / "weights")
    lines += [f"weights: {line}" for line in wrong(later, copied({"model": job.state()["model"]}))]
    return lines


def test_save_and_load_of_a_trained_model_over_nccl(run_nccl_world: Callable[..., Any], tmp_path: Path) -> None:
    assert run_nccl_world(1, on_a_gpu, save_and_load_over_nccl, tmp_path) == [[]]


def in_memory_over_nccl(rank: int, world_size: int) -> list[str]:
    job, other = Trained(0), Trained(1)
    truth = copied(job.state())
    state = other.state()
    tte.reshard(job.state(), state, verify=True)
    lines = [f"reshard: {line}" for line in wrong(state, truth)]

    buffers, manifest = tte.flatten_state_dict(job.state())
    assert {tensor.device.type for tensor in buffers.values()} <= {"cuda", "cpu"}
    manifest = json.loads(json.dumps(manifest))
    back = tte.unflatten_state_dict(buffers, manifest, meshes=[job.mesh, job.mesh["dp"], job.mesh["tp"]])
    lines += [f"flatten: {line}" for line in wrong(back, truth)]

    plan = tte.transfer.plan_reshard(job.model, other.model)
    plan.run(version=0)
    job.step()
    plan.run(version=1)
    lines += [f"plan: {line}" for line in wrong(other.model.state_dict(), copied(job.model.state_dict()))]

    turned = Transform([Rule("0.weight", "w", [transforms.transpose(0, 1)])], drop=["**"])
    generator = {"w": torch.zeros(33, 65, dtype=torch.bfloat16, device="cuda")}
    plan = tte.transfer.plan_reshard(job.model, generator, transform=turned, cast="allow")
    plan.run(version=0, verify=True)
    job.step()
    plan.run(version=1, verify=True)
    whole = tte.full_tensor(job.model.state_dict()["0.weight"])
    if not torch.equal(generator["w"], whole.T.bfloat16()):
        lines.append("reshard through a transform")

    before = copied(job.model.state_dict())
    tte.sync_module_states(job.model, mesh=job.mesh["dp"])
    assert not tte.check_replicas(job.model, mesh=job.mesh["dp"])
    lines += [f"sync: {line}" for line in wrong(job.model.state_dict(), before)]
    for name, tensor in job.model.state_dict().items():
        whole = tte.full_tensor(tensor) if isinstance(tensor, DTensor) else tensor
        if not torch.equal(whole, local_of(tensor)):
            lines.append(f"full tensor: {name}")
    return lines


def test_moves_in_memory_over_nccl(run_nccl_world: Callable[..., Any]) -> None:
    assert run_nccl_world(1, on_a_gpu, in_memory_over_nccl) == [[]]


def broadcast_over_nccl(rank: int, world_size: int) -> list[str]:
    """Kernels before and behind each collective, on streams that run late, with many buckets in flight."""
    group = dist.new_group(backend="nccl")
    lines = []
    for bucket_bytes in (1 << 16, 1 << 20, ops.DEFAULT_BUCKET_BYTES):
        for round_number in range(20):
            seed = 1000 * round_number
            tensors = [random_tensor((90, 70), dtype, seed=seed + i).cuda().t() for i, dtype in enumerate(DTYPES)]
            tensors += [torch.full((768, 1024), round_number, dtype=torch.int32, device="cuda")[:, 3:1000]]
            truth = [tensor.clone() for tensor in tensors]
            torch.cuda._sleep(5_000_000)
            for tensor in tensors:
                tensor.copy_(tensor.clone())
            ops.broadcast_coalesced_(tensors, group.group_name, bucket_bytes=bucket_bytes)
            copies = [tensor.clone() for tensor in tensors]
            for tensor in tensors:
                tensor.zero_()  # behind the broadcast on its stream
            pairs = zip(copies, truth, strict=True)
            lines += [f"{bucket_bytes} {one.dtype}" for one, two in pairs if not torch.equal(bits(one), bits(two))]
    return lines


def test_broadcasts_over_nccl(run_nccl_world: Callable[..., Any]) -> None:
    assert run_nccl_world(1, on_a_gpu, broadcast_over_nccl) == [[]]


def broadcast_in_compiled_code(rank: int, world_size: int) -> list[bool]:
    name = dist.group.WORLD.group_name

    def step(first: Tensor, second: Tensor) -> Tensor:
        sent = [first * 2, second + 1]
        ops.broadcast_coalesced_(sent, name)
        return sent[0].sum() + sent[1].square().sum()

    compiled = torch.compile(step, fullgraph=True, mode="reduce-overhead")
    given = [(torch.full((30, 20), float(n), device="cuda"), torch.ones(7, device="cuda")) for n in range(4)]
    return [torch.equal(compiled(*tensors), step(*tensors)) for tensors in given]


def test_broadcasts_stand_between_cuda_graphs(run_nccl_world: Callable[..., Any]) -> None:
    assert run_nccl_world(1, on_a_gpu, broadcast_in_compiled_code) == [[True] * 4]


# ---- several ranks that share the GPU over gloo ----


LAYOUTS: list[tuple[tuple[int, ...], tuple[Any, ...]]] = [
    ((4,), (Shard(0),)),
    ((4,), (Shard(1),)),
    ((2, 2), (Shard(0), Shard(1))),
    ((2, 2), (_StridedShard(0, split_factor=2), Shard(0))),
    ((2, 2), (Replicate(), Shard(0))),
]


def spread(whole: dict[str, Tensor], sizes: tuple[int, ...], placements: tuple[Any, ...]) -> dict[str, Tensor]:
    mesh = init_device_mesh("cuda", sizes)
    return {name: tte.full.distribute_tensor(tensor.cuda(), mesh, placements) for name, tensor in whole.items()}


def every_layout_into_every_other(rank: int, world_size: int, path: Path) -> list[str]:
    torch.manual_seed(0)
    whole = {f"{dtype}": random_tensor((13, 9), dtype, seed=7) for dtype in DTYPES}
    whole["large"] = torch.randn(1003, 701)
    blanks = {name: torch.zeros_like(tensor) for name, tensor in whole.items()}
    lines = []
    for number, source in enumerate(LAYOUTS):
        state = spread(whole, *source)
        tte.save(state, path / str(number), fingerprints=True)
        for target in LAYOUTS:
            loaded, moved = spread(blanks, *target), spread(blanks, *target)
            tte.load(loaded, path / str(number), prove=True, share_reads=number % 2 == 0)
            tte.reshard(state, moved)
            truth = copied(spread(whole, *target))
            lines += [f"load {source} {target}: {line}" for line in wrong(loaded, truth)]
            lines += [f"reshard {source} {target}: {line}" for line in wrong(moved, truth)]
        for name, tensor in state.items():
            if not torch.equal(bits(tte.full_tensor(tensor)), bits(whole[name].cuda())):
                lines.append(f"full tensor {source}: {name}")
    return lines


def test_every_layout_into_every_other_on_a_gpu(run_world: Callable[..., Any], tmp_path: Path) -> None:
    assert run_world(4, on_a_gpu, every_layout_into_every_other, tmp_path) == [[]] * 4


def replicas(rank: int, world_size: int) -> list[str]:
    torch.manual_seed(rank)
    mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("replicate", "dp"))
    model = nn.Sequential(nn.Linear(33, 65), nn.BatchNorm1d(65), nn.Linear(65, 17, dtype=torch.bfloat16)).cuda()
    fully_shard(model, mesh=mesh)
    assert tte.check_replicas(model, mesh=mesh)
    tte.sync_module_states(model, mesh=mesh)
    assert not tte.check_replicas(model, mesh=mesh)
    source = rank % 2  # the rank of the first replica that holds the same shards
    mine = [tensor.cpu().view(-1).view(torch.uint8) for tensor in copied(model.state_dict()).values()]
    all_of_them: list[Any] = [None] * world_size
    dist.all_gather_object(all_of_them, mine)
    return [f"{at}" for at, pair in enumerate(zip(mine, all_of_them[source], strict=True)) if not torch.equal(*pair)]


def test_replicas_on_a_gpu_are_synced(run_world: Callable[..., Any]) -> None:
    assert run_world(4, on_a_gpu, replicas) == [[]] * 4
