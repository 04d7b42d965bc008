"""Map-style data: the position is the next sample of the epoch's order, whatever the number of ranks.

Let the order of the epoch be ``order`` (see ``order.py``), the position p, and G the global batch size. The next
global batch is order[p : p + G], and rank r of W has order[p + r], order[p + r + W], ... of it. With 7 samples, G = 4:

    W = 2, p = 0    rank 0: order[0], order[2]    rank 1: order[1], order[3]
    W = 3, p = 0    rank 0: order[0], order[3]    rank 1: order[1]    rank 2: order[2]
    p = 4           three samples left: last="drop" drops them, last="pad" serves them and order[0] once more

With the same W and ``order="randperm"`` this is what ``torch.utils.data.DistributedSampler`` in a ``BatchSampler``
gives.
"""

from __future__ import annotations

import operator
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sized
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from torchtitan_ext.checkpoint.tables.component import Resharded, World
from torchtitan_ext.elastic.data.order import OrderName, check_order, epoch_order
from torchtitan_ext.elastic.data.sample_position import STATE_KEY, SamplePosition, from_entries, to_common
from torchtitan_ext.elastic.own_share import data_rank
from torchtitan_ext.errors import CannotReshardError, check_argument, check_counts

Last = Literal["drop", "pad"]

# Of so many samples indices are made at once: some microseconds of NumPy for each call, and 64 KiB.
_SAMPLES_AT_ONCE = 4096


@dataclass(frozen=True)
class Share:
    """A rank's share of each global batch, and what becomes of the end of an epoch; see ``ElasticDataLoader``.

    Raises:
        TypeError: A size is no whole number.
        ValueError: ``last`` is unknown, the rank does not exist, some rank would get no sample, or ranks would get
            unequally many and that is not asked for.
    """

    global_batch_size: int
    dp_rank: int
    dp_size: int
    last: Last
    endless: bool
    uneven: bool = False

    def __post_init__(self) -> None:
        rank, ranks, size = self.dp_rank, self.dp_size, self.global_batch_size
        if self.last not in get_args(Last):
            raise ValueError(f'data loader: last is {self.last!r}, expected "drop" or "pad"')
        check_counts("data loader", dp_rank=rank, dp_size=ranks, global_batch_size=size)
        if not 0 <= rank < ranks:
            raise ValueError(f"data loader: dp_rank is {rank}, expected 0 <= dp_rank < dp_size = {ranks}")
        if size < ranks:
            raise ValueError(
                f"data loader: a global batch of {size} leaves some of {ranks} data-parallel ranks without a sample; "
                f"choose a multiple of {ranks} as global_batch_size"
            )
        if size % ranks and not self.uneven:
            less = size - size % ranks
            raise ValueError(
                f"data loader: a global batch of {size} on {ranks} data-parallel ranks gives ranks {-(-size // ranks)} "
                f"and {size // ranks} samples, and an average over ranks of their means weighs these unequally; choose "
                f"global_batch_size={less} or {less + ranks}, or pass uneven=True and weigh each rank's mean by its "
                "samples"
            )

    @property
    def batch_size(self) -> int:
        """This rank's samples of a full global batch. Where they do not divide evenly, low ranks have one more."""
        return len(range(self.dp_rank, self.global_batch_size, self.dp_size))


Reached = Callable[[], SamplePosition]
"""Gives the position after a batch: made when somebody asks for it."""


class LocalBatch(NamedTuple):
    """A rank's part of a global batch, which ends in ``num_padding`` repeats, and where the job is after it."""

    indices: list[int]
    num_padding: int
    reached: Reached


class ElasticBatchSampler:
    """A batch sampler for ``torch.utils.data.DataLoader`` whose state is independent of the number of ranks.

    It yields lists of indices. Its state counts batches that were served. A ``DataLoader`` with workers asks for
    batches ahead of the training loop, so the sampler reads that loader's own count. It cannot know of anything else
    that reads ahead, such as a wrapper that looks for the last batch; ``ElasticDataLoader`` counts what it serves.

    Args:
        data: The data set, or anything whose length is its number of samples.
        global_batch_size: Samples of all ranks together in one step: a multiple of ``dp_size``, unless ``uneven``.
        dp_rank: This process's data-parallel rank; with ``dp_size``, or neither: see ``ElasticDataLoader``.
        dp_size: Number of data-parallel ranks; at most ``global_batch_size``.
        mesh: The mesh of the data-parallel ranks, instead of both.
        shuffle: Whether each epoch has its own random order; otherwise it has the order of the data.
        seed: Seed of the random order; the same on every rank.
        order: The random order: ``"feistel-1"`` needs no memory and no time to start, whatever the number of samples;
            ``"randperm"`` is that of ``torch.utils.data.DistributedSampler``. A loaded state brings its own.
        last: What becomes of samples at the end of an epoch that fill no global batch: ``"drop"`` leaves them out,
            ``"pad"`` serves them with the first ones of the epoch's order. All ranks have equally many batches.
        endless: Whether iteration goes on with the next epoch. Otherwise it ends, and the next ``iter`` goes on.
        uneven: Whether low ranks may get one sample more than the others.

    Raises:
        ValueError: The sizes leave a rank, or every epoch, without a batch; ranks would get unequally many samples; or
            nothing says which data-parallel rank this is.
    """

    def __init__(
        self,
        data: Sized,
        *,
        global_batch_size: int,
        dp_rank: int | None = None,
        dp_size: int | None = None,
        mesh: DeviceMesh | None = None,
        shuffle: bool = True,
        seed: int = 0,
        last: Last = "drop",
        endless: bool = False,
        order: OrderName = "feistel-1",
        uneven: bool = False,
    ) -> None:
        check_order(order)
        check_argument("ElasticBatchSampler", "data", data, Sized, "a data set with a length")
        own = data_rank("ElasticBatchSampler", dp_rank, dp_size, mesh)
        Share(global_batch_size, own.rank, own.size, last, endless, uneven)  # checks these
        num_samples = len(data)
        if num_samples < (global_batch_size if last == "drop" else 1):
            raise ValueError(
                f"ElasticBatchSampler: the data set has {num_samples} samples, less than one global batch of "
                f'{global_batch_size}; choose a smaller global_batch_size, or last="pad"'
            )
        self.global_batch_size = global_batch_size
        self.dp_rank = own.rank
        self.dp_size = own.size
        self.last = last
        self.endless = endless
        self.position = SamplePosition(num_samples, shuffle, operator.index(seed), order=order)

    @property
    def position(self) -> SamplePosition:
        """Where the job is after the batches that were served.

        Raises:
            ValueError: The loader serves batches in another order than it asks for them.
        """
        return self._reached() if self._ahead is None else self._ahead.reached()()

    @position.setter
    def position(self, position: SamplePosition) -> None:
        self.serve(partial(position.after, 0))

    def serve(self, reached: Reached) -> None:
        """Moves the position to the end of a batch."""
        self._reached = reached
        self._ahead: _Ahead | None = None

    def __len__(self) -> int:
        """Number of batches in an epoch."""
        rest = self.global_batch_size - 1 if self.last == "pad" else 0
        return (self._reached().num_samples + rest) // self.global_batch_size

    def __iter__(self) -> Iterator[list[int]]:
        # A loader passes its batch sampler nothing, but calls this: it is in the caller's frame. This is no generator,
        # because a loader that keeps its workers sets its count back right after the call.
        reader = sys._getframe(1).f_locals.get("self")
        self.position = self.position
        if isinstance(reader, _MultiProcessingDataLoaderIter):
            self._ahead = _Ahead(reader, self._reached)
        return self._indices(self._ahead)

    def _indices(self, ahead: _Ahead | None) -> Iterator[list[int]]:
        for batch in self.batches():
            if ahead is None:
                self.serve(batch.reached)
            else:
                ahead.add(batch.reached)
            yield batch.indices
        if ahead is None:
            self.end_epoch()
        else:
            ahead.end_epoch()

    def batches(self) -> Iterator[LocalBatch]:
        """The local batches from the position to the end of the epoch, or without end. Does not move the position."""
        position = self.position
        while True:
            yield from self._epoch_batches(position)
            if not self.endless:
                return
            position = position.after(self._num_batches(position) * self.global_batch_size).next_epoch()

    def _epoch_batches(self, start: SamplePosition) -> Iterator[LocalBatch]:
        """The batches from a position to the end of its epoch; arrays hold the samples of many batches at once."""
        size, num_samples = self.global_batch_size, start.num_samples
        order = epoch_order(num_samples, shuffle=start.shuffle, order=start.order, seed=start.seed, epoch=start.epoch)
        own_places = np.arange(self.dp_rank, size, self.dp_size)
        num_batches = self._num_batches(start)
        step = max(1, _SAMPLES_AT_ONCE // len(own_places))
        for first in range(0, num_batches, step):
            last = min(first + step, num_batches)
            places = start.next_sample + own_places + np.arange(first, last)[:, np.newaxis] * size
            if last * size > start.num_left:  # padding: the beginning of the epoch
                places %= num_samples
            for batch, indices in enumerate(order(places).tolist(), first + 1):
                num_padding = 0
                if batch * size > start.num_left:
                    num_real = np.searchsorted(own_places, start.num_left - (batch - 1) * size)
                    num_padding = len(indices) - int(num_real)
                yield LocalBatch(indices, num_padding, partial(start.after, batch * size))

    def end_epoch(self) -> None:
        """Drops what is left of the epoch, and goes to the next one."""
        self.position = self.position.next_epoch()

    def _num_batches(self, position: SamplePosition) -> int:
        """Batches from a position to the end of its epoch."""
        rest = self.global_batch_size - 1 if self.last == "pad" else 0
        return (position.num_left + rest) // self.global_batch_size

    def state_dict(self) -> dict[str, Any]:
        """One entry, equal on all ranks, in a tuple: a checkpoint keeps a tuple as one value."""
        common = to_common(self.position, global_batch_size=self.global_batch_size, dp_size=self.dp_size)
        return {STATE_KEY: (common,)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on from the state of any number of ranks and any global batch size, with its seed and ``shuffle``.

        Raises:
            CannotReshardError: The state was saved over other data.
        """
        self.position, _ = self._read(state_dict)

    def reshard(self, saved: Mapping[str, Any], old: World, new: World) -> Resharded:
        """See ``Reshardable``."""
        position, common = self._read(saved)
        note = (
            f"goes on at sample {position.next_sample} of {position.num_samples} of epoch {position.epoch}, "
            f"data-parallel ranks {common['dp_size']} -> {self.dp_size}"
        )
        if common["global_batch_size"] != self.global_batch_size:
            note += f", global batch {common['global_batch_size']} -> {self.global_batch_size}"
        own = self.position
        for option in ("shuffle", "seed", "order") if position.shuffle or own.shuffle else ():
            now, before = getattr(own, option), getattr(position, option)
            if now != before and (option == "shuffle" or position.shuffle):
                note += f", {option} {before} as saved, not {now}"
        size = common["global_batch_size"]
        merged = to_common(position, global_batch_size=size, dp_size=common["dp_size"])
        return Resharded({STATE_KEY: (merged,)}, note, position.samples_seen, position.padded)

    def _read(self, saved: Mapping[str, Any]) -> tuple[SamplePosition, Mapping[str, Any]]:
        position, common = from_entries(saved)
        if position.num_samples != self.position.num_samples:
            raise CannotReshardError(
                f"the checkpoint was saved over {position.num_samples} samples, this data set has "
                f"{self.position.num_samples}: a position in one means nothing in the other",
                "use the data set it was saved with, or reset the data loader to begin a new epoch",
            )
        return position, common


class _Ahead:
    """The position after each batch that a ``DataLoader`` with workers has asked for and not yet served."""

    def __init__(self, loader: _MultiProcessingDataLoaderIter, reached: Reached) -> None:
        self._loader = loader
        self._num_served = 0
        # The first is the position after the last batch that was served.
        self._reached = deque([reached])

    def add(self, reached: Reached) -> None:
        self._forget_served()
        self._reached.append(reached)

    def end_epoch(self) -> None:
        self._reached[-1] = partial(self._reached[-1]().next_epoch().after, 0)

    def reached(self) -> Reached:
        self._forget_served()
        if len(self._reached) > 1 and not self._loader._in_order:
            raise ValueError("ElasticBatchSampler: in_order=False has no position to resume from; leave it out")
        return self._reached[0]

    def _forget_served(self) -> None:
        while self._num_served < self._loader._num_yielded:
            self._reached.popleft()
            self._num_served += 1
