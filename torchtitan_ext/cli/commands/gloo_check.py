"""One of two processes that add a number over gloo: ``python -m torchtitan_ext.cli.commands.gloo_check RANK FILE``."""

from __future__ import annotations

import sys
from datetime import timedelta

import torch
import torch.distributed as dist

_WORLD_SIZE = 2
_TIMEOUT = timedelta(seconds=60)


def main(rank: int, store_file: str) -> None:
    """Prints the sum of the numbers of both processes."""
    dist.init_process_group(
        "gloo", init_method=f"file://{store_file}", rank=rank, world_size=_WORLD_SIZE, timeout=_TIMEOUT
    )
    number = torch.tensor([rank + 1], dtype=torch.int64, device="cpu")
    dist.all_reduce(number)
    dist.destroy_process_group()
    print(int(number))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
