"""The order of an epoch of map-style data: which sample stands at which place, the same on all ranks.

``"feistel-1"`` is a keyed permutation (``csrc/core/index_order.h``): any place at once, no memory. ``"randperm"`` is
that of ``torch.utils.data.DistributedSampler``: ``torch.randperm`` from a generator seeded with ``seed + epoch``, a
permutation of the whole epoch in memory. A state has the name of its order, so an order never changes under its name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

import numpy as np
import torch

from torchtitan_ext import _core
from torchtitan_ext.elastic.data.frontier import Ids

OrderName = Literal["feistel-1", "randperm"]
_UINT64 = 2**64 - 1
ORDERS: tuple[str, ...] = get_args(OrderName)

EpochOrder = Callable[[Ids], Ids]
"""A permutation of the indices 0 .. num_samples - 1: from places to the indices of the samples there."""


def check_order(where: str, order: object) -> None:
    """Raises ValueError unless it is the name of an order."""
    if order not in ORDERS:
        raise ValueError(f'{where}: order is {order!r}, expected "feistel-1" or "randperm"')


def epoch_order(num_samples: int, *, shuffle: bool, order: str, seed: int, epoch: int) -> EpochOrder:
    """The order of an epoch; ``"randperm"`` is made here: 8 bytes per sample, and time in proportion."""
    if not shuffle:
        return lambda places: places
    if order == "feistel-1":
        return _core.IndexOrder(num_samples, seed & _UINT64, epoch).indices_at
    generator = torch.Generator()
    generator.manual_seed((seed + epoch) & _UINT64)
    indices: Ids = torch.randperm(num_samples, generator=generator, dtype=torch.int64, device="cpu").numpy()
    return lambda places: indices[places]


class OrderedData:
    """The orders of the epochs that a job is in, by ids (epoch * num_samples + place), each made when it is needed."""

    def __init__(self, num_samples: int, shuffle: bool, order: str, seed: int) -> None:
        self._num_samples = num_samples
        self._shuffle = shuffle
        self._order = order
        self._seed = seed
        self._orders: dict[int, EpochOrder] = {}

    def indices_of(self, ids: Ids) -> Ids:
        """The indices of the samples with these ids, at least one, in an array of the same shape.

        Forgets the orders of epochs that these have none of.
        """
        first, last = int(ids.min()) // self._num_samples, int(ids.max()) // self._num_samples
        epochs = ids // self._num_samples if first < last else None
        found = [first] if epochs is None else np.unique(epochs).tolist()
        self._orders = {epoch: self._orders.get(epoch) or self._make(epoch) for epoch in found}
        if epochs is None:
            return self._orders[first](ids - first * self._num_samples)
        indices = np.empty_like(ids)
        for epoch, order in self._orders.items():
            indices[epochs == epoch] = order(ids[epochs == epoch] - epoch * self._num_samples)
        return indices

    def _make(self, epoch: int) -> EpochOrder:
        return epoch_order(self._num_samples, shuffle=self._shuffle, order=self._order, seed=self._seed, epoch=epoch)
