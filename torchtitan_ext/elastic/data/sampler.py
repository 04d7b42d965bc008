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
class Share:
    """A rank's share of each global batch, and what becomes of the end of an epoch; see ``ElasticDataLoader``.

    Raises:
        TypeError: A size is no whole number.
        ValueError: ``last`` is unknown, the rank does not exist, or some rank would get no sample.
    """

    global_batch_size: int
    dp_rank: int
    dp_size: int
    last: Last
    endless: bool

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
                f"choose global_batch_size >= {ranks}"
            )

    @property
    def batch_size(self) -> int:
        """This rank's samples of a full global batch. Where they do not divide evenly, low ranks have one more."""
        return len(range(self.dp_rank, self.global_batch_size, self.dp_size))


@dataclass(frozen=True)
class SamplePosition:
    """Where in the data a job is: equal on all ranks, since all counts are of all ranks together.

    Attributes:
        num_samples: Samples of the data set.
        shuffle: Whether the order of an epoch is shuffled, by ``seed`` and the epoch.
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
    """A rank's part of a global batch, which ends in ``num_padding`` repeats, and the position when it is served."""

    indices: list[int]
    num_padding: int
    position: SamplePosition


class ElasticBatchSampler:
    """A batch sampler for ``torch.utils.data.DataLoader`` whose state is independent of the number of ranks.

    It yields lists of indices. Its state counts batches that were served. A ``DataLoader`` with workers asks for
    batches ahead of the training loop, so the sampler reads that loader's own count. It cannot know of anything else
    that reads ahead, such as a wrapper that looks for the last batch; ``ElasticDataLoader`` counts what it serves.

    Args:
        data: The data set, or anything whose length is its number of samples.
        global_batch_size: Samples of all ranks together in one step; need not be a multiple of ``dp_size``.
        dp_rank: This process's data-parallel rank.
        dp_size: Number of data-parallel ranks; at most ``global_batch_size``.
        shuffle: Whether each epoch has its own random order; otherwise it has the order of the data.
        seed: Seed of the random order; the same on every rank.
        last: What becomes of samples at the end of an epoch that fill no global batch: ``"drop"`` leaves them out,
            ``"pad"`` serves them with the first ones of the epoch's order. All ranks have equally many batches.
        endless: Whether iteration goes on with the next epoch. Otherwise it ends, and the next ``iter`` goes on.

    Raises:
        ValueError: The sizes leave a rank, or every epoch, without a batch.
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
        Share(global_batch_size, dp_rank, dp_size, last, endless)  # checks these
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
        self.position = SamplePosition(num_samples, shuffle, seed)

    @property
    def position(self) -> SamplePosition:
        """Where the job is after the batches that were served.

        Raises:
            ValueError: The loader serves batches in another order than it asks for them.
        """
        return self._position if self._ahead is None else self._ahead.position()

    @position.setter
    def position(self, position: SamplePosition) -> None:
        self._position = position
        self._ahead: _Ahead | None = None

    def __len__(self) -> int:
        """Number of batches in an epoch."""
        rest = self.global_batch_size - 1 if self.last == "pad" else 0
        return (self._position.num_samples + rest) // self.global_batch_size

    def __iter__(self) -> Iterator[list[int]]:
        # A loader passes its batch sampler nothing, but calls this: it is in the caller's frame. This is no generator,
        # because a loader that keeps its workers sets its count back right after the call.
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
        """The local batches from the position to the end of the epoch, or without end. Does not move the position."""
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
        """Drops what is left of the epoch, and goes to the next one."""
        self.position = _next_epoch(self.position)

    def _next_span(self, position: SamplePosition) -> range | None:
        """Places of the next global batch in the epoch's order, padding from ``num_samples`` on; None at the end."""
        left = position.num_samples - position.next_sample
        if left <= 0 or (self.last == "drop" and left < self.global_batch_size):
            return None
        return range(position.next_sample, position.next_sample + self.global_batch_size)

    def state_dict(self) -> dict[str, Any]:
        """One entry, equal on all ranks, in a tuple: a checkpoint keeps a tuple as one value."""
        saved = {"version": 1, "kind": _KIND, "global_batch_size": self.global_batch_size, **asdict(self.position)}
        return {_STATE_KEY: ({**saved, "dp_size": self.dp_size},)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on from the state of any number of ranks and any global batch size, with its seed and ``shuffle``.

        Raises:
            CannotReshardError: The state was saved over other data.
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
    """The position after each batch that a ``DataLoader`` with workers has asked for and not yet served."""

    def __init__(self, loader: _MultiProcessingDataLoaderIter, position: SamplePosition) -> None:
        self._loader = loader
        self._num_served = 0
        # The first is the position after the last batch that was served.
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
    """The indices 0 .. num_samples - 1 in the order of an epoch; the same for any rank and number of ranks.

    They are shuffled as ``torch.utils.data.DistributedSampler`` does: ``torch.randperm`` from a generator seeded with
    ``seed + epoch``.
    """
    if not shuffle:
        return range(num_samples)
    generator = torch.Generator()
    generator.manual_seed(seed + epoch)
    order: list[int] = torch.randperm(num_samples, generator=generator, dtype=torch.int64, device="cpu").tolist()
    return order


def common_entry(saved: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    """The entry that is equal on all ranks. Refuses a missing one, one of another kind of loader or version."""
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
    end = min(span.stop, position.num_samples)
    seen, padded = position.samples_seen + end - span.start, position.padded + span.stop - end
    return replace(position, next_sample=end, samples_seen=seen, padded=padded)


def _next_epoch(position: SamplePosition) -> SamplePosition:
    left = position.num_samples - position.next_sample
    return replace(position, epoch=position.epoch + 1, next_sample=0, dropped=position.dropped + left)
