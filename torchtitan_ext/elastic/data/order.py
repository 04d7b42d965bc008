"""The order of an epoch of map-style data: which sample stands at which place, the same on all ranks.

``"feistel-1"`` is a keyed permutation (``csrc/core/index_order.h``): any place at once, no memory. ``"randperm"`` is
that of ``torch.utils.data.DistributedSampler``: ``torch.randperm`` from a generator seeded with ``seed + epoch``, a
permutation of the whole epoch in memory. A state has the name of its order, so an order never changes under its name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt
import torch

from torchtitan_ext import _core

OrderName = Literal["feistel-1", "randperm"]
_UINT64 = 2**64 - 1
ORDERS: tuple[str, ...] = get_args(OrderName)

Indices = npt.NDArray[np.int64]
EpochOrder = Callable[[Indices], Indices]
"""A permutation of the indices 0 .. num_samples - 1: from places to the indices of the samples there."""


def check_order(order: object) -> None:
    """Raises ValueError unless it is the name of an order."""
    if order not in ORDERS:
        raise ValueError(f'ElasticBatchSampler: order is {order!r}, expected "feistel-1" or "randperm"')


def epoch_order(num_samples: int, *, shuffle: bool, order: str, seed: int, epoch: int) -> EpochOrder:
    """The order of an epoch; ``"randperm"`` is made here: 8 bytes per sample, and time in proportion."""
    if not shuffle:
        return lambda places: places
    if order == "feistel-1":
        return _core.IndexOrder(num_samples, seed & _UINT64, epoch).indices_at
    generator = torch.Generator()
    generator.manual_seed((seed + epoch) & _UINT64)
    indices: Indices = torch.randperm(num_samples, generator=generator, dtype=torch.int64, device="cpu").numpy()
    return lambda places: indices[places]
