"""Loaders of all ranks of a world, driven step by step in one process; no process group."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torchtitan_ext.elastic import ElasticDataLoader


class Counted:
    """A stream of given samples that knows its position, as a ``Stateful``."""

    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples
        self.position = 0

    def __iter__(self) -> Iterator[Any]:
        while self.position < len(self.samples):
            self.position += 1
            yield self.samples[self.position - 1]

    def state_dict(self) -> dict[str, Any]:
        # Nested and with an empty list, as real states are.
        return {"position": self.position, "buffer": {"tokens": [], "ids": [self.position]}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


# How many times more cases a soak run tries.

# Ranks that wait for each other need a thread each.
MAX_RANKS = 16
_THREADS = ThreadPoolExecutor(MAX_RANKS)


class Ranks:
    """The loaders of ``dp_size`` ranks that all step together.

    Args:
        make: From dp_rank and dp_size to a loader.
        dp_size: How many.
        saved: What the ranks of another world saved, merged by key.
        by_reshard: Whether it goes through ``reshard``, or is loaded as stock DCP would.
    """

    def __init__(
        self,
        make: Callable[[int, int], ElasticDataLoader],
        dp_size: int,
        saved: dict[str, Any] | None = None,
        by_reshard: bool = True,
    ) -> None:
        self.loaders = [make(rank, dp_size) for rank in range(dp_size)]
        share = getattr(self.loaders[0]._batches, "_share", None)  # streams have one
        self._agree = dp_size > 1 and share is not None and not share.endless
        self._barrier = threading.Barrier(dp_size)
        self._counts = [0] * dp_size
        for rank, loader in enumerate(self.loaders):
            if hasattr(loader._batches, "_sum_over_ranks"):
                loader._batches._sum_over_ranks = lambda count, rank=rank: self._sum(rank, count)
            if saved is None:
                continue
            if by_reshard:
                loader.load_state_dict(loader.reshard(saved, None, None).state)
            else:
                loader.load_state_dict({key: saved[key] for key in loader.state_dict()})
        self._iterators: list[Any] = [None] * dp_size

    def step(self) -> list[Any] | None:
        """One local batch of each rank, or None where all have come to the end of an epoch; never some of them."""
        ranks = range(len(self.loaders))
        batches = list(_THREADS.map(self._next, ranks)) if self._agree else [self._next(rank) for rank in ranks]
        ended = [batch is None for batch in batches]
        assert all(ended) or not any(ended), f"some ranks end, others do not: {ended}"
        return None if ended[0] else batches

    def state(self) -> dict[str, Any]:
        """What all ranks save, merged by key; equal where several save the same key."""
        merged: dict[str, Any] = {}
        for loader in self.loaders:
            for key, value in loader.state_dict().items():
                assert merged.setdefault(key, value) == value, f"{key} differs between ranks"
        return merged

    def _next(self, rank: int) -> Any:
        if self._iterators[rank] is None:
            self._iterators[rank] = iter(self.loaders[rank])
        try:
            return next(self._iterators[rank])
        except StopIteration:
            self._iterators[rank] = None
            return None

    def _sum(self, rank: int, count: int) -> int:
        self._counts[rank] = count
        self._barrier.wait(200)
        total = sum(self._counts)
        self._barrier.wait(200)
        return total
