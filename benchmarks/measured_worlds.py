"""Worlds of gloo processes, one thread each, that share a dict of results."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run_worlds(
    work: Callable[..., None], world_sizes: Iterable[int], directory: str | Path | None, *args: Any
) -> dict[str, Any]:
    """What the ranks of each world leave in ``results``.

    Args:
        work: A module-level function, called as ``work(rank, world_size, folder, *args, results)`` on each rank, in a
            default process group.
        directory: Where each world gets a folder, which is removed after it.
    """
    with mp.Manager() as manager:
        results = manager.dict()
        for world_size in world_sizes:
            with tempfile.TemporaryDirectory(prefix="tte_", dir=directory) as folder:
                mp.spawn(_run, (work, world_size, Path(folder), args, results), nprocs=world_size)
        return dict(results)


def _run(
    rank: int, work: Callable[..., None], world_size: int, folder: Path, args: tuple[Any, ...], results: Any
) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    work(rank, world_size, folder, *args, results)
    dist.barrier()
    dist.destroy_process_group()
