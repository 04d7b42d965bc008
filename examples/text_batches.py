"""Batches of real text, as a function of the step alone, so that every mesh trains on the same ones."""

import functools
import os
from pathlib import Path

import torch
from torch import Tensor

NUM_ROWS, ROW_BYTES = 8, 64  # of one batch, all ranks together
# Python's own library: it is everywhere, and nobody edits it while a job trains.
TEXTS = sorted(Path(os.__file__).parent.glob("*.py"))


def read_batch(step: int) -> Tensor:
    """Bytes of the texts as int64 tokens, shaped (NUM_ROWS, ROW_BYTES + 1)."""
    tokens = read_tokens()
    starts = torch.randint(len(tokens) - ROW_BYTES, (NUM_ROWS,), generator=torch.Generator().manual_seed(step))
    return rows_at(tokens, starts)


def read_rows(num_rows: int) -> Tensor:
    """As many rows, from the beginning of the texts to their end, shaped (num_rows, ROW_BYTES + 1)."""
    tokens = read_tokens()
    return rows_at(tokens, torch.arange(num_rows) * (len(tokens) - ROW_BYTES) // num_rows)


def rows_at(tokens: Tensor, starts: Tensor) -> Tensor:
    return torch.stack([tokens[start : start + ROW_BYTES + 1] for start in starts.tolist()]).long()


@functools.cache
def read_tokens() -> Tensor:
    text = b"".join(path.read_bytes() for path in TEXTS)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)
