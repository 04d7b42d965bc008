"""Runs a function on the gloo processes of one world on this machine, so that an example is one command."""

import multiprocessing
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

Result = TypeVar("Result")

# Imported once, in the server that the ranks are forked from: it takes seconds (DTensor imports torch._dynamo later).
PRELOADED = [
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
]


def run_world(function: Callable[..., Result], *args: object, world_size: int) -> Result:
    """Calls `function(*args)` on every rank of a new world and returns what it returned on rank 0.

    `function` must be importable and its arguments and result picklable. A world of one has no process group.
    An exception on any rank ends the world and is raised here as `torch.multiprocessing.ProcessRaisedException`.
    """
    multiprocessing.set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(run_rank, (world_size, folder, function, args), nprocs=world_size, start_method="forkserver")
        result: Result = torch.load(Path(folder, "result"), weights_only=False)
        return result


def run_rank(
    rank: int, world_size: int, folder: str, function: Callable[..., object], args: tuple[object, ...]
) -> None:
    torch.set_num_threads(1)  # The ranks share this machine's cores.
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # A world of one is meant to be.
    if world_size > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world_size)
    result = function(*args)
    if rank == 0:
        torch.save(result, Path(folder, "result"))
    if world_size > 1:
        dist.destroy_process_group()
