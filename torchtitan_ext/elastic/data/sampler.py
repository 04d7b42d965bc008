"""Map-style data: the position is the next sample of the epoch's order, whatever the number of ranks.

Let the order of the epoch be ``order`` (see ``index_order``), the position p, and G the global batch size. The next
global batch is order[p : p + G], and rank r of W has order[p + r], order[p + r + W], ... of it. With 7 samples, G = 4:

    W = 2, p = 0    rank 0: order[0], order[2]    rank 1: order[1], order[3]
    W = 3, p = 0    rank 0: order[0], order[3]    rank 1: order[1]    rank 2: order[2]
    p = 4           three samples left: last="drop" drops them, last="pad" serves them and order[0] once more

With the same W this is what ``torch.utils.data.DistributedSampler`` in a ``BatchSampler`` gives.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sized
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, get_args

import torch
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from torchtitan_ext.checkpoint.tables.component import Resharded, SampleAccount, World
from torchtitan_ext.errors import CannotReshardError, check_argument, check_counts

Last = Literal["drop", "pad"]

_STATE_KEY = "loader"
_KIND = "samples"


@dataclass(frozen=True)
class SamplePosition:
    """Where in the data a job is. Counts are global: of all ranks together, and equal on all of them.

    Attributes:
        num_samples: Of the data set.
        shuffle: Whether the order of an epoch is shuffled.
        seed: Of the order, together with the epoch.
        epoch: The current epoch.
        next_sample: Position in this epoch's order of the first sample that was not served.
        samples_seen: Samples served so far, over all epochs, without padding.
        dropped: Samples left out so far because they did not fill a global batch at the end of an epoch.
        padded: Samples served twice so far to fill one.
    """

    num_samples: int
    shuffle: bool
    seed: int
    epoch: int = 0
    next_sample: int = 0
    samples_seen: int = 0
    dropped: int = 0
    padded: int = 0


@dataclass(frozen=True)
class LocalBatch:
    """A rank's part of a global batch.

    Attributes:
        indices: Of samples of the data set.
        num_padding: How many of them, at the end, are repeats that fill the last batch of an epoch.
        position: Where the job is once this batch is served.
    """

    indices: list[int]
    num_padding: int
    position: SamplePosition


class ElasticBatchSampler:
    """A batch sampler for ``torch.utils.data.DataLoader`` whose state is independent of the number of ranks.

    It yields lists of indices. Its state counts the batches that were served: a ``DataLoader`` with workers asks for
    batches ahead of the training loop, so the sampler goes by that loader's own count, and an epoch has ended with its
    last batch. Whatever else reads ahead (a wrapper that looks for the last batch) is not known to it;
    ``ElasticDataLoader`` counts what it has served itself.

    Args:
        data: The data set, or anything whose length is its number of samples.
        global_batch_size: Samples of all ranks together in one step; need not be a multiple of ``dp_size``.
        dp_rank: Of this process among the data-parallel ranks.
        dp_size: Number of data-parallel ranks; at most ``global_batch_size``.
        shuffle: Whether each epoch has its own random order, else the order of the data.
        seed: Of that order; the same on every rank.
        last: What becomes of the samples at the end of an epoch that fill no global batch: left out, or served
            together with the first ones of the epoch's order. Every rank has the same number of batches either way.
        endless: Whether iteration goes on with the next epoch. Otherwise it ends, and the next ``iter`` goes on.

    Raises:
        ValueError: For sizes that leave a rank, or every epoch, without a batch.
    """

    def __init__(
        self,
        data: Sized,
        *,
        global_batch_size: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        shuffle: bool = True,
        seed: int = 0,
        last: Last = "drop",
        endless: bool = False,
    ) -> None:
        check_argument("ElasticBatchSampler", "data", data, Sized, "a data set with a length")
        check_serving(last, dp_rank, dp_size, global_batch_size)
        num_samples = len(data)
        if num_samples < (global_batch_size if last == "drop" else 1):
            raise ValueError(
                f"ElasticBatchSampler: the data set has {num_samples} samples, less than one global batch of "
                f'{global_batch_size}; choose a smaller global_batch_size, or last="pad"'
            )
        self.global_batch_size = global_batch_size
        self.dp_rank = dp_rank
        self.dp_size = dp_size
        self.last = last
        self.endless = endless
        self._ahead: _Ahead | None = None
        self._position = SamplePosition(num_samples, shuffle, seed)

    @property
    def position(self) -> SamplePosition:
        """Where the job is after the batches that were served.

        Raises:
            ValueError: A loader serves batches in another order than it asks for them.
        """
        return self._position if self._ahead is None else self._ahead.position()

    @position.setter
    def position(self, position: SamplePosition) -> None:
        self._position, self._ahead = position, None

    def __len__(self) -> int:
        """Batches of a whole epoch."""
        rest = self.global_batch_size - 1 if self.last == "pad" else 0
        return (self._position.num_samples + rest) // self.global_batch_size

    def __iter__(self) -> Iterator[list[int]]:
        # A loader tells its batch sampler nothing, but it is who calls this. No generator: a loader that keeps its
        # workers sets its count back right after this call.
        reader = sys._getframe(1).f_locals.get("self")
        self.position = self.position
        if isinstance(reader, _MultiProcessingDataLoaderIter):
            self._ahead = _Ahead(reader, self._position)
        return self._indices(self._ahead)

    def _indices(self, ahead: _Ahead | None) -> Iterator[list[int]]:
        for batch in self.batches():
            if ahead is None:
                self.position = batch.position
            else:
                ahead.add(batch.position)
            yield batch.indices
        if ahead is None:
            self.end_epoch()
        else:
            ahead.end_epoch()

    def batches(self) -> Iterator[LocalBatch]:
        """The local batches from the present position to the end of the epoch, or without end; moves nothing."""
        position = self.position
        while True:
            order = index_order(
                position.num_samples, shuffle=position.shuffle, seed=position.seed, epoch=position.epoch
            )
            while (span := self._next_span(position)) is not None:
                mine = range(span.start + self.dp_rank, span.stop, self.dp_size)
                num_padding = sum(place >= position.num_samples for place in mine)
                position = _served(position, span)
                yield LocalBatch([order[place % position.num_samples] for place in mine], num_padding, position)
            if not self.endless:
                return
            position = _next_epoch(position)

    def end_epoch(self) -> None:
        """Declares what is left of the epoch dropped, and goes to the next one."""
        self.position = _next_epoch(self.position)

    def _next_span(self, position: SamplePosition) -> range | None:
        """Places in the order of the next global batch, padding from ``num_samples`` on; None at the end."""
        left = position.num_samples - position.next_sample
        if left <= 0 or (self.last == "drop" and left < self.global_batch_size):
            return None
        return range(position.next_sample, position.next_sample + self.global_batch_size)

    def state_dict(self) -> dict[str, Any]:
        """One entry, equal on all ranks. Its value is a tuple, which checkpoints keep as one value."""
        saved = {"version": 1, "kind": _KIND, "global_batch_size": self.global_batch_size, **asdict(self.position)}
        return {_STATE_KEY: ({**saved, "dp_size": self.dp_size},)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes a state of any number of ranks and any global batch size; its seed and shuffle count from now on.

        Raises:
            CannotReshardError: It is of other data.
        """
        self.position = self._position_of(state_dict)

    def sample_account(self) -> SampleAccount:
        """See ``CountsSamples``."""
        return SampleAccount(served=self.position.samples_seen, padded=self.position.padded)

    def reshard(self, saved: Mapping[str, Any], old: World, new: World) -> Resharded:
        """See ``Reshardable``."""
        position = self._position_of(saved)
        (common,) = saved[_STATE_KEY]
        note = (
            f"goes on at sample {position.next_sample} of {position.num_samples} of epoch {position.epoch}, "
            f"data-parallel ranks {common['dp_size']} -> {self.dp_size}"
        )
        if common["global_batch_size"] != self.global_batch_size:
            note += f", global batch {common['global_batch_size']} -> {self.global_batch_size}"
        return Resharded({_STATE_KEY: saved[_STATE_KEY]}, note, position.samples_seen, position.padded)

    def _position_of(self, saved: Mapping[str, Any]) -> SamplePosition:
        common = common_entry(saved, _KIND)
        position = SamplePosition(**{field.name: common[field.name] for field in fields(SamplePosition)})
        if position.num_samples != self.position.num_samples:
            raise CannotReshardError(
                f"the checkpoint was saved over {position.num_samples} samples, this data set has "
                f"{self.position.num_samples}: a position in one means nothing in the other",
                "use the data set it was saved with, or reset the data loader to begin a new epoch",
            )
        return position


class _Ahead:
    """The positions after batches that a loader with workers has asked for, and the loader's count of those served.

    Args:
        loader: An iterator over a ``DataLoader`` with workers.
        position: Where it begins.
    """

    def __init__(self, loader: _MultiProcessingDataLoaderIter, position: SamplePosition) -> None:
        self._loader = loader
        self._num_served = 0
        # The first is that after the last batch that was served.
        self._positions = deque([position])

    def add(self, position: SamplePosition) -> None:
        self._forget_served()
        self._positions.append(position)

    def end_epoch(self) -> None:
        self._positions[-1] = _next_epoch(self._positions[-1])

    def position(self) -> SamplePosition:
        self._forget_served()
        if len(self._positions) > 1 and not self._loader._in_order:
            raise ValueError("ElasticBatchSampler: in_order=False has no position to resume from; leave it out")
        return self._positions[0]

    def _forget_served(self) -> None:
        while self._num_served < self._loader._num_yielded:
            self._positions.popleft()
            self._num_served += 1


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


def check_serving(last: object, dp_rank: int, dp_size: int, global_batch_size: int) -> None:
    """Raises ValueError for an unknown ``last``, a rank that does not exist, or a rank without a sample."""
    if last not in get_args(Last):
        raise ValueError(f'data loader: last is {last!r}, expected "drop" or "pad"')
    check_counts("data loader", dp_rank=dp_rank, dp_size=dp_size, global_batch_size=global_batch_size)
    if not 0 <= dp_rank < dp_size:
        raise ValueError(f"data loader: dp_rank is {dp_rank}, expected 0 <= dp_rank < dp_size = {dp_size}")
    if global_batch_size < dp_size:
        raise ValueError(
            f"data loader: a global batch of {global_batch_size} leaves some of {dp_size} data-parallel ranks without "
            f"a sample; choose global_batch_size >= {dp_size}"
        )


def common_entry(saved: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    """The entry that all ranks save equally, checked to be of a kind of loader.

    Raises:
        CannotReshardError: It is missing, of another kind or of a later version.
    """
    entry = saved.get(_STATE_KEY)
    if not isinstance(entry, tuple) or not entry or not isinstance(entry[0], Mapping):
        keys = ", ".join(sorted(map(str, saved))[:3]) or "nothing"
        adopt = "read the data with tte.elastic.TorchtitanTextStreams, which adopts torchtitan's states, or "
        raise CannotReshardError(
            f"the checkpoint's data loader state is none of ElasticDataLoader's (it has {keys}, but no {_STATE_KEY!r})",
            (adopt if "dp_rank_0" in saved else "") + "reset the data loader",
        )
    common: Mapping[str, Any] = entry[0]
    if common.get("kind") != kind:
        raise CannotReshardError(
            f"the checkpoint was saved over {common.get('kind')}, this loader reads {kind}",
            "use the same kind of data as the job that saved it, or reset the data loader",
        )
    if common.get("version") != 1:
        raise CannotReshardError(
            f"the checkpoint's data loader state has version {common.get('version')}, this package reads 1",
            "load it with the version of torchtitan_ext that saved it, or a later one",
        )
    return common


def _served(position: SamplePosition, span: range) -> SamplePosition:
    num_real = min(span.stop, position.num_samples) - span.start
    return replace(
        position,
        next_sample=span.start + num_real,
        samples_seen=position.samples_seen + num_real,
        padded=position.padded + len(span) - num_real,
    )


def _next_epoch(position: SamplePosition) -> SamplePosition:
    left = position.num_samples - position.next_sample
    return replace(position, epoch=position.epoch + 1, next_sample=0, dropped=position.dropped + left)
