"""Counts the modules of the package in which a function runs during one `tte.save` and one `tte.load`.

Each is the second call, which imports nothing: FSDP2 and AdamW on two gloo ranks, native files.

    python benchmarks/count_modules.py [--names]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import torchtitan_ext as tte

PACKAGE = str(Path(tte.__file__).parent)


def modules_passed(function: Callable[[], Any]) -> list[str]:
    """The modules of the package in which a function runs during a call, in any thread."""
    files: set[str] = set()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            files.add(frame.f_code.co_filename)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    ours = [Path(file).relative_to(PACKAGE) for file in files if file.startswith(PACKAGE)]
    return sorted(".".join(file.with_suffix("").parts) for file in ours)


def save_and_load(rank: int, folder: str, show_names: bool) -> None:
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments, "step": 3}
    for name, call in (("save", tte.save), ("load", tte.load)):
        call(state, f"{folder}/checkpoint")
        passed = modules_passed(lambda call=call: call(state, f"{folder}/checkpoint"))
        if rank == 0:
            print(f"tte.{name}: {len(passed)} modules")
            if show_names:
                print("  " + "\n  ".join(passed))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--names", action="store_true", help="name the modules")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(save_and_load, (folder, arguments.names), nprocs=2)


if __name__ == "__main__":
    main()
