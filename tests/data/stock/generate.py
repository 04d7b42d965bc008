"""Writes what stock `dcp.save` of the running torch writes: `python generate.py` makes a folder named by its release.

Two ranks save the same state in every release. It needs torch alone, so that any release can run it; a folder that is
there stays as it is.
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

RELEASES = ("2.11", "2.13", "2.15")


def stock_state() -> dict[str, Any]:
    """The whole state: of plain tensors, for any number of ranks."""
    numbers = torch.arange(15, dtype=torch.float32)
    return {
        "model": {
            "rows": numbers.view(5, 3),
            "columns": (numbers[:12] / 4).to(torch.bfloat16).view(3, 4),
            "transposed": numbers[:6].view(2, 3).t(),
            "channels_last": numbers[:8].view(1, 2, 2, 2).to(memory_format=torch.channels_last),
            "scalar": torch.tensor(7, dtype=torch.int64),
            "empty": torch.empty(0, 3),
        },
        "optimizer": {"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": [{"lr": 0.1, "betas": (0.9, 0.999)}]},
        "step": 7,
    }


def save(rank: int, path: str, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    state = stock_state()
    for name, dim in (("rows", 0), ("columns", 1)):  # three rows and two; halves of each row
        state["model"][name] = distribute_tensor(state["model"][name], mesh, [Shard(dim)])
    # A relative path: the checkpoint remembers where it was saved.
    dcp.save(state, checkpoint_id=path)
    dist.destroy_process_group()


if __name__ == "__main__":
    os.chdir(Path(__file__).parent)
    release = ".".join(torch.__version__.split(".")[:2])
    if os.path.exists(release):
        sys.exit(f"{release} is there already")
    store = Path("store").absolute()
    mp.spawn(save, (release, str(store)), nprocs=2)
    store.unlink(missing_ok=True)
