"""Writes the golden checkpoint of the current format version: `python generate.py`, only when the version goes up."""

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from torchtitan_ext.storage import FileWriter


def golden_state() -> dict[str, Any]:
    """The same for every version and every torch."""
    numbers = torch.arange(15, dtype=torch.float32).view(3, 5)
    return {
        "matrix": numbers,
        "transposed": (numbers / 4).to(torch.bfloat16).t(),
        "float8": (numbers / 8).to(torch.float8_e4m3fn),
        "complex": torch.complex(numbers, -numbers),
        "flags": numbers > 7,
        "scalar": torch.tensor(7, dtype=torch.int64),
        "empty": torch.empty(0, 3),
        "page": torch.arange(70_000, dtype=torch.int32) // 512,
        "step": 7,
        "names": ["a", "b"],
    }


def small_golden_state() -> dict[str, Any]:
    """The same without the tensor that fills pages."""
    return {key: value for key, value in golden_state().items() if key != "page"}


def shared_golden_state() -> dict[str, Any]:
    """That of ``version_1_shared``, which version 0.2 saved: most of it lies in a file of an earlier checkpoint."""
    return small_golden_state() | {"large": torch.arange(3000, dtype=torch.int16)}


if __name__ == "__main__":
    os.chdir(Path(__file__).parent)
    # A relative path: the checkpoint remembers where it was saved.
    dcp.save(golden_state(), storage_writer=FileWriter("version_1"), no_dist=True)
