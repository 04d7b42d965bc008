"""The order in which the samples of a map-style data set are served in an epoch, and how a rank finds its own.

Everything here is a pure function of (number of samples, seed, epoch) and of a position in samples: no world size is
part of it, which is why a position saved by 8 ranks means the same to 16.
"""

from __future__ import annotations

import torch


def index_order(num_samples: int, *, shuffle: bool, seed: int, epoch: int) -> list[int] | range:
    """The indices 0 .. num_samples - 1 in the order of an epoch; the same on every rank.

    Shuffled as ``torch.utils.data.DistributedSampler`` does: ``torch.randperm`` from a generator seeded with
    ``seed + epoch``.
    """
    if not shuffle:
        return range(num_samples)
    generator = torch.Generator()
    generator.manual_seed(seed + epoch)
    order: list[int] = torch.randperm(num_samples, generator=generator, dtype=torch.int64, device="cpu").tolist()
    return order


def local_size(global_batch_size: int, *, dp_rank: int, dp_size: int) -> int:
    """How many samples of a global batch are a rank's; where they do not divide evenly low ranks have one more."""
    return len(range(dp_rank, global_batch_size, dp_size))
