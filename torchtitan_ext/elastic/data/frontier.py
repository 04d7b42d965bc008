"""The trained frontier: samples of a rank that were handed out and are not trained yet.

A position counts samples that were handed out. Where they wait in queues (for rollouts, for other ranks) a checkpoint
of such a position would lose those that were still open. So the training loop acknowledges what it has trained, in any
order, and the state keeps what is in flight:

    handed out      0 1 2 3 4 5 6 7
    acknowledged    0 1   3   5         a resume gives 2, 4, 6 and 7 again, then 8, 9, ...
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from torchtitan_ext.errors import TorchtitanExtError, argument_error, named

Ids = npt.NDArray[np.int64]

NO_IDS: Ids = np.empty(0, np.int64)


@dataclass(eq=False, repr=False)
class TooManyInFlightError(TorchtitanExtError, RuntimeError):
    """The next batch would exceed ``max_in_flight``. Nothing has changed: acknowledge samples, then ask again.

    What to do: ``acknowledge`` samples that were trained, then call ``next`` again: the loader and its iterator are
    unchanged.
    """

    num_in_flight: int
    batch_size: int
    max_in_flight: int

    def __str__(self) -> str:
        return (
            f"data loader: {self.num_in_flight} samples of this rank are in flight, and the next batch of "
            f"{self.batch_size} would exceed max_in_flight={self.max_in_flight}; call acknowledge(ids) of samples that "
            "were trained, then ask for the batch again"
        )


@dataclass(eq=False, repr=False)
class EpochInFlightError(TorchtitanExtError, RuntimeError):
    """An epoch of streams has ended and is not wholly acknowledged. Nothing has changed: acknowledge, then iterate.

    What to do: ``acknowledge`` them, then iterate again: nothing has changed.
    """

    num_in_flight: int
    dp_rank: int
    epoch: int

    def __str__(self) -> str:
        return (
            f"data loader: {self.num_in_flight} samples of epoch {self.epoch} are in flight on data-parallel rank "
            f"{self.dp_rank}, and the next epoch of streams that are not endless begins when all were trained; call "
            "acknowledge(ids) of these, then iterate again"
        )


@dataclass(eq=False, repr=False)
class UnknownSamplesError(TorchtitanExtError, ValueError):
    """Samples were acknowledged that are not in flight on this rank, or twice in one call. Nothing has changed.

    What to do: acknowledge each id once, on the rank whose ``sample_ids`` had it.

    Attributes:
        ids: The ids of these samples.
        dp_rank: The data-parallel rank.
    """

    ids: tuple[int, ...]
    dp_rank: int

    def __str__(self) -> str:
        return (
            f"data loader: samples were acknowledged that are not in flight on data-parallel rank {self.dp_rank}, or "
            f"twice: {named(self.ids)}; acknowledge each id once, on the rank whose sample_ids had it, and none of "
            "before a load"
        )


class InFlight:
    """The samples of this rank that were handed out and not acknowledged: at most ``max_in_flight``."""

    def __init__(self, max_in_flight: int, dp_rank: int) -> None:
        self._max_in_flight = max_in_flight
        self._dp_rank = dp_rank
        self._ids: set[int] = set()

    def check_room(self, batch_size: int) -> None:
        """Raises ``TooManyInFlightError`` if a batch of this size would exceed the bound."""
        if len(self._ids) + batch_size > self._max_in_flight:
            raise TooManyInFlightError(len(self._ids), batch_size, self._max_in_flight)

    def hand_out(self, ids: Ids) -> None:
        self._ids.update(ids.tolist())

    def acknowledge(self, ids: Ids) -> None:
        """Removes them. Raises ``UnknownSamplesError`` and changes nothing unless all are in flight, and named once."""
        wanted = ids.tolist()
        unique = set(wanted)
        unknown = unique - self._ids
        if unknown or len(unique) < len(wanted):
            values, counts = np.unique(ids, return_counts=True)
            raise UnknownSamplesError(tuple(sorted(unknown.union(values[counts > 1].tolist()))), self._dp_rank)
        self._ids -= unique

    def ids(self) -> list[int]:
        """In ascending order."""
        return sorted(self._ids)

    def clear(self) -> None:
        self._ids.clear()


def read_ids(ids: Sequence[int] | Ids | torch.Tensor) -> Ids:
    """Ids as an array of one dim; raises TypeError where they are no whole numbers."""
    array = np.asarray(ids.cpu() if isinstance(ids, torch.Tensor) else ids)
    if array.size == 0:
        return NO_IDS
    if array.dtype.kind not in "iu":
        raise argument_error("ElasticDataLoader.acknowledge", "ids", ids, "whole numbers: ids of sample_ids")
    return array.astype(np.int64).reshape(-1)
