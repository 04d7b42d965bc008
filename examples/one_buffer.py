"""A 2D state dict as one buffer in shared memory, taken up by another job: on the same mesh, and on another one.

torchrun --nproc-per-node 4 examples/one_buffer.py write; torchrun --nproc-per-node 4 examples/one_buffer.py read"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import torchtitan_ext as tte

FOLDER = Path("/dev/shm/one_buffer")  # memory, which outlives a job


def whole_state() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {"embedding": torch.randn(1003, 12), "norm": torch.randn(12).bfloat16()}  # 1003: no rank's share is equal


def write() -> None:
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole = whole_state()
    state = {
        "model": {
            "embedding": distribute_tensor(whole["embedding"], mesh, [Shard(0), Shard(0)]),
            "norm": distribute_tensor(whole["norm"], mesh, [Shard(0), Replicate()]),
        },
        "step": 7,
    }
    buffers, manifest = tte.flatten_state_dict(state)
    FOLDER.mkdir(exist_ok=True)
    rank = dist.get_rank()
    (FOLDER / f"{rank}.json").write_text(json.dumps(manifest))
    path = str(FOLDER / f"{rank}.buffer")
    torch.from_file(path, shared=True, size=buffers["cpu"].numel(), dtype=torch.uint8).copy_(buffers["cpu"])
    print(f"rank {rank}: {len(manifest['entries'])} tensors in {buffers['cpu'].numel():,} bytes")


def read() -> None:
    rank, whole = dist.get_rank(), whole_state()
    manifest = json.loads((FOLDER / f"{rank}.json").read_text())
    path = FOLDER / f"{rank}.buffer"
    buffers = {"cpu": torch.from_file(str(path), shared=True, size=path.stat().st_size, dtype=torch.uint8)}

    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    same = tte.unflatten_state_dict(buffers, manifest, meshes=[mesh])  # its tensors are views into the buffer
    is_equal = [torch.equal(tte.full_tensor(same["model"][name]), whole[name]) for name in whole]

    line = dist.init_device_mesh("cpu", (4,))
    boxes = tte.unflatten_state_dict(buffers, manifest, boxes=True)  # needs no mesh of the job that wrote it
    target: dict[str, DTensor] = {
        name: distribute_tensor(torch.zeros_like(tensor), line, [Shard(tensor.dim() - 1)])
        for name, tensor in whole.items()
    }
    tte.reshard(boxes["model"], target)
    is_equal += [torch.equal(tte.full_tensor(target[name]), whole[name]) for name in whole]
    print(f"rank {rank}: step {same['step']}, equal on both meshes: {all(is_equal)}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    {"write": write, "read": read}[sys.argv[1]]()
    dist.destroy_process_group()
