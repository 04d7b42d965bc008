"""Tries the package where it will run, on the backends and devices of the job: a line per point, and an exit code.

torchrun --nproc-per-node 8 -m torchtitan_ext.selftest
"""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard

import torchtitan_ext as tte
from torchtitan_ext.layout.layout import Chunk, LocalShard

_TIMEOUT = timedelta(seconds=60)


def check_operators(mesh: DeviceMesh) -> None:
    """On the device of the job they give the bits that they give on the CPU."""
    shard = LocalShard((5, 7), (Chunk((1, 0), (2, 7), (0, 0)), Chunk((6, 0), (3, 7), (2, 0))))
    whole = torch.arange(63, dtype=torch.float32, device="cpu").view(9, 7)
    local = tte.ops.pack_shard(whole.to(mesh.device_type), shard)
    assert torch.equal(local.cpu(), tte.ops.pack_shard(whole, shard))
    flat = tte.ops.flatten_tensors([local, local.bfloat16()])
    assert torch.equal(flat.cpu(), tte.ops.flatten_tensors([local.cpu(), local.cpu().bfloat16()]))


def check_checkpoint(mesh: DeviceMesh) -> None:
    """A save of uneven rows loads into uneven columns."""
    folders = [tempfile.mkdtemp() if mesh.get_rank() == 0 else ""]
    dist.broadcast_object_list(folders)
    path = os.path.join(folders[0], "step")
    tte.save({"w": tte.full.distribute_tensor(_whole(mesh), mesh, [Shard(0)]), "step": 3}, path)
    state: dict[str, Any] = {
        "w": tte.full.distribute_tensor(torch.zeros_like(_whole(mesh)), mesh, [Shard(1)]),
        "step": 0,
    }
    tte.load(state, path)
    assert torch.equal(tte.full_tensor(state["w"]), _whole(mesh)) and state["step"] == 3


def check_idle_rank(mesh: DeviceMesh) -> None:
    """A reshard in which the last rank has nothing to send or receive. It comes before other calls of its group."""
    rows = max(1, mesh.size() - 1)
    whole = torch.arange(3 * rows, device=mesh.device_type, dtype=torch.float32).view(rows, 3)
    source = {"w": tte.full.distribute_tensor(whole, mesh, [Shard(0)])}
    target = {"w": tte.full.distribute_tensor(torch.zeros_like(whole.flip(0)), mesh, [Shard(0)])}
    tte.reshard(source, target)
    assert torch.equal(tte.full_tensor(target["w"]), whole)


def check_sync(mesh: DeviceMesh) -> None:
    """The weights and buffers of rank 0 reach all ranks."""
    model = torch.nn.BatchNorm1d(5, device=mesh.device_type)
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data.fill_(mesh.get_rank() + 1)
    tte.sync_module_states(model, mesh)
    assert all(bool((tensor == 1).all()) for tensor in (*model.parameters(), *model.buffers()))


def check_full_tensor(mesh: DeviceMesh) -> None:
    """Uneven shards and replicas become the tensor that they were made of."""
    for placement in (Shard(0), Shard(1), Replicate()):
        tensor = tte.full.distribute_tensor(_whole(mesh), mesh, [placement])
        assert torch.equal(tte.full_tensor(tensor), _whole(mesh))


POINTS: dict[str, Callable[[DeviceMesh], None]] = {
    "operators equal those of the CPU": check_operators,
    "reshard with an idle rank": check_idle_rank,
    "save, and load on another layout": check_checkpoint,
    "sync of a module": check_sync,
    "full tensors": check_full_tensor,
}


def _whole(mesh: DeviceMesh) -> torch.Tensor:
    rows = 2 * mesh.size() + 1
    return torch.arange(5 * rows, dtype=torch.float32, device=mesh.device_type).view(rows, 5)


def main() -> int:
    """Runs all points on the devices that the job has; 0 where all ranks passed all of them."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    devices = ["cpu", *([accelerator.type] if accelerator else [])]
    if accelerator:
        torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", "0")) % torch.accelerator.device_count())
    dist.init_process_group(timeout=_TIMEOUT)
    failures = 0
    for device in devices:
        mesh = init_device_mesh(device, (dist.get_world_size(),))
        backend = dist.get_backend_config(mesh.get_group())
        for name, check in POINTS.items():
            failures += _failed(check, mesh, f"{device} ({backend}): {name}")
    dist.destroy_process_group()
    return int(failures > 0)


def _failed(check: Callable[[DeviceMesh], None], mesh: DeviceMesh, title: str) -> bool:
    try:
        check(mesh)
        own = ""
    except Exception as error:
        traceback.print_exc()
        own = f"{type(error).__name__}: {error}"
    outcomes: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(outcomes, own)
    failed = [rank for rank, outcome in enumerate(outcomes) if outcome]
    if dist.get_rank() == 0:
        verdict = "ok" if not failed else f"FAILED on rank(s) {failed}: {outcomes[failed[0]].splitlines()[0]}"
        print(f"{title:66} {verdict}", flush=True)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
