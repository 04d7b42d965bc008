"""The virtual shards of one rank: which sample comes next, and what a checkpoint keeps of each shard.

Rank r of W owns the shards v with v % W == r. It takes the next sample from the unfinished shard of its own that has
given the fewest so far, ties to the lowest v. There is no pointer to keep, so any owner can go on, and where all
counts are equal this is round robin. With V = 4 shards a, b, c, d and a global batch of 4:

    W = 1   rank 0: a0 b0 c0 d0 | a1 b1 c1 d1
    W = 2   rank 0: a0 c0 | a1 c1     rank 1: b0 d0 | b1 d1      the same sets in each global batch
    W = 3   rank 0: a0 d0 | a1 d1     rank 1: b0 | b1            rank 2: c0 | c1
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from torchtitan_ext.elastic.data.sampler import Share
from torchtitan_ext.elastic.data.shard_samples import Mark, SamplePosition, ShardSamples
from torchtitan_ext.elastic.data.streams import StreamSource, start_epoch
from torchtitan_ext.elastic.data.workers import SamplesAhead, WorkerOptions, Workers
from torchtitan_ext.errors import CannotReshardError, TorchtitanExtError

# A packed shard may need several epochs of a few tokens until one sequence is full.
_MAX_EMPTY_EPOCHS = 100

_SHARD_KEY = re.compile(r"(?:^|\.)shard_\d+_of_(\d+)$")


@dataclass(eq=False, repr=False)
class TooFewShardsError(TorchtitanExtError, ValueError):
    """More data-parallel ranks than virtual shards: some ranks would have no data.

    What to do: take the ``num_shards`` of the message.
    """

    num_shards: int
    dp_size: int

    def __str__(self) -> str:
        return (
            f"data loader: {self.num_shards} virtual shards cannot feed {self.dp_size} data-parallel ranks, each of "
            f"which needs one of its own; choose num_shards={self.dp_size} or a multiple, best one that all world "
            "sizes to come divide"
        )


@dataclass(eq=False, repr=False)
class EmptyShardError(TorchtitanExtError, RuntimeError):
    """An endless loader met a shard without samples.

    What to do: take a smaller ``num_shards``, so that each shard has data.
    """

    shard: int
    num_shards: int

    def __str__(self) -> str:
        return (
            f"data loader: virtual shard {self.shard} of {self.num_shards} gave no sample in {_MAX_EMPTY_EPOCHS} "
            "epochs; choose a smaller num_shards, so that each has data"
        )


@dataclass(frozen=True)
class EpochEnd:
    """How a shard's last epoch ended: its remainder begins at ``served``; there is none if it was ``read_to_end``."""

    epoch: int
    served: int
    read_to_end: bool


@dataclass
class ShardState:
    """What a checkpoint keeps of a virtual shard.

    ``taken`` samples were served in this epoch, ``total`` over all, ``since`` after the mark whose ``stream`` this is:
    a job that goes on reads these again and skips them. States of version 1 have no ``since``: their marks are exact.
    """

    epoch: int = 0
    taken: int = 0
    total: int = 0
    finished: bool = False
    last_epoch: EpochEnd | None = None
    stream: Any = None
    since: int = 0

    def __post_init__(self) -> None:
        if self.stream is None:  # the mark is the beginning of an epoch
            self.since = max(self.since, self.taken)

    @property
    def place(self) -> SamplePosition:
        return SamplePosition(Mark(self.epoch, self.total - self.since, self.stream), self.since)


def shard_key(shard: int, num_shards: int) -> str:
    """The key of a shard's entry in the state of its owner: ``shard_7_of_16``."""
    return f"shard_{shard}_of_{num_shards}"


def num_shards_of(fqn: str) -> int | None:
    """The number of shards in the flat key of a shard; ``None`` for any other key."""
    match = _SHARD_KEY.search(fqn)
    return None if match is None else int(match[1])


def to_entry(state: ShardState) -> tuple[dict[str, Any]]:
    """A shard's entry. Checkpoints keep a tuple as one value, whatever is in it."""
    last_epoch = None if state.last_epoch is None else asdict(state.last_epoch)
    shallow = {field_.name: getattr(state, field_.name) for field_ in fields(ShardState)}
    return ({**shallow, "last_epoch": last_epoch},)


def from_entry(key: str, saved: Mapping[str, Any]) -> ShardState:
    """The state of a shard; raises ``CannotReshardError`` where the entry is missing or is not one of ours."""
    try:
        (entry,) = saved[key]
        last_epoch = entry["last_epoch"]
        known = {field_.name: {"since": 0, **entry}[field_.name] for field_ in fields(ShardState)}
        return ShardState(**{**known, "last_epoch": None if last_epoch is None else EpochEnd(**last_epoch)})
    except (KeyError, TypeError, ValueError) as error:
        reason = "is missing" if key not in saved else f"is not a shard's ({error!r})"
        raise CannotReshardError(
            f"the checkpoint's entry {key} {reason}",
            "load all data loader entries of one checkpoint, or reset the data loader",
        ) from None


def stream_state(source: StreamSource, shard: int, state: ShardState) -> Any:
    """The state of a shard's stream after all samples that were served. Reads those after the mark once more."""
    if not state.since:
        return state.stream
    return ShardSamples(source, shard, state.place).state()


@dataclass
class _OpenShard:
    """A shard of this rank while it is read.

    Attributes:
        state: Counts the samples that were drawn; its stream is that of ``mark``.
        mark: The latest mark.
    """

    index: int
    state: ShardState
    mark: Mark
    samples: ShardSamples | SamplesAhead = field(init=False)

    def place(self) -> SamplePosition:
        """Where this job reads on."""
        return SamplePosition(self.mark, self.state.total - self.mark.total)

    def to_save(self) -> ShardState:
        return replace(self.state, stream=self.mark.stream, since=self.state.total - self.mark.total)

    def copy(self) -> _OpenShard:
        return _OpenShard(self.index, replace(self.state), self.mark)


class ShardReader:
    """Reads the shards of one rank in turn. No communication. In an endless loader each shard has its own epochs."""

    def __init__(self, source: StreamSource, share: Share, options: WorkerOptions) -> None:
        if share.dp_size > source.num_shards:
            raise TooFewShardsError(source.num_shards, share.dp_size)
        self._source = source
        self._endless = share.endless
        self.own = range(share.dp_rank, source.num_shards, share.dp_size)
        self._workers = Workers(source, self.own, options, share.batch_size) if options.num_workers else None
        self.load({index: ShardState() for index in self.own})

    @property
    def epoch(self) -> int:
        """The latest epoch of this rank's shards."""
        return max(shard.state.epoch for shard in self._shards.values())

    def states(self) -> dict[int, ShardState]:
        """The state of each of this rank's shards. The states of their streams are not copied: change none."""
        return {index: shard.to_save() for index, shard in self._shards.items()}

    def load(self, states: Mapping[int, ShardState]) -> None:
        """Goes on from these states of this rank's shards. Streams are opened when they are needed."""
        self._before: dict[int, _OpenShard] = {}
        self._shards: dict[int, _OpenShard] = {}
        for index in self.own:
            state = states[index]
            self._reopen(_OpenShard(index, replace(state), state.place.mark))
        self._queue()

    def draw(self, size: int) -> list[Any]:
        """The next samples of this rank, fewer where all its shards are finished.

        Counts them as served. Until ``commit`` says that they were, ``close`` takes them back.
        """
        samples: list[Any] = []
        while self._turns and len(samples) < size:
            index = heapq.heappop(self._turns)[-1]
            shard = self._shards[index]
            if index not in self._before:
                self._before[index] = shard.copy()
            drawn = self._next(shard)
            if drawn is not None:
                samples.append(drawn[0])
                heapq.heappush(self._turns, self._turn(shard))
        return samples

    def commit(self) -> None:
        """What was drawn was served."""
        self._before.clear()

    def close(self) -> None:
        """Goes back to the latest ``commit``, and ends the workers: what they read ahead is read again when needed."""
        if self._workers is not None:
            self._workers.close()
            self._before = {**self._shards, **self._before}
        for shard in self._before.values():
            self._reopen(shard)
        self._before.clear()
        self._queue()

    def end_epoch(self) -> None:
        """Goes to the next epoch with all shards. Samples that were drawn after the latest ``commit`` do not count."""
        for index, shard in self._shards.items():
            before = self._before.setdefault(index, shard.copy())
            shard.state = replace(shard.state, taken=before.state.taken, total=before.state.total)
            self._leave_epoch(shard)
        for shard in self._shards.values():  # workers can begin the epoch in all shards at once
            self._enter_epoch(shard)
        self.commit()
        self._queue()

    def first_sample(self) -> Any:
        """A sample to pad with: from the first shard that has one in this epoch or later ones, own shards first.

        It may take later epochs: a packed sequence may need the tokens of several epochs.
        """
        first = self._shards[self.own.start].state.epoch
        shards = dict.fromkeys([*self.own, *range(self._source.num_shards)])
        streams: dict[int, Iterable[Any]] = {}
        for epoch in range(first, first + _MAX_EMPTY_EPOCHS):
            for index in shards:
                if not start_epoch(streams.get(index), epoch):
                    streams[index] = self._source.open_stream(index, epoch)
                for sample in streams[index]:
                    return sample
        raise RuntimeError("data loader: no shard has a sample to pad with, but one was served; please report")

    def _reopen(self, shard: _OpenShard) -> None:
        self._shards[shard.index] = shard
        if self._workers is None:
            shard.samples = ShardSamples(self._source, shard.index, shard.place())
        else:
            shard.samples = SamplesAhead(self._workers, shard.index, shard.place())

    def _queue(self) -> None:
        # An endless loader goes on with the next epoch of a shard that a loader with an end had finished.
        shards = self._shards.values()
        self._turns = [self._turn(one) for one in shards if self._endless or not one.state.finished]
        heapq.heapify(self._turns)

    def _turn(self, shard: _OpenShard) -> tuple[int, int]:
        # Endless shards are in different epochs: by `taken`, shards with few samples would come again and again.
        return (shard.state.total if self._endless else shard.state.taken, shard.index)

    def _next(self, shard: _OpenShard) -> tuple[Any] | None:
        """The next sample of a shard, None at the end of its epoch."""
        for _ in range(_MAX_EMPTY_EPOCHS):
            # A loaded stream that stands at its end may begin again, as torchdata's do: it is not asked for more.
            for item in () if shard.state.finished else shard.samples:
                if isinstance(item, Mark):
                    shard.mark = item
                    continue
                sample, mark = item
                shard.state.taken += 1
                shard.state.total += 1
                shard.mark = mark or shard.mark
                return (sample,)
            shard.state.finished = True
            if not self._endless:
                return None
            self._leave_epoch(shard)
            self._enter_epoch(shard)
        raise EmptyShardError(shard.index, self._source.num_shards)

    def _leave_epoch(self, shard: _OpenShard) -> None:
        state = shard.state
        ended = EpochEnd(state.epoch, state.taken, state.finished)
        shard.state = ShardState(epoch=state.epoch + 1, total=state.total, last_epoch=ended)
        shard.samples.start_epoch(state.total)

    def _enter_epoch(self, shard: _OpenShard) -> None:
        first = next(iter(shard.samples))
        assert isinstance(first, Mark)
        shard.mark = first
