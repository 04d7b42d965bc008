"""The samples of one virtual shard, in the process that reads them, and marks from which a job can go on.

A mark is a place between two samples: how many samples come before it, and the stream's state there. Marks are made
while the shard is read and never change, so a checkpoint keeps the latest mark as it is and counts the samples since.
A job that goes on opens the stream at the mark and reads these samples again, without giving them:

    s0 s1 ... s15 | s16 s17 s18 ...     a mark after 16 samples; s17 was given last: this mark, and 2 samples since
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torchtitan_ext.elastic.data.streams import StreamSource, has_small_state, has_state, snapshot, start_epoch

# A state may hold a shuffle buffer: copying it after each sample would cost more than reading the sample.
_MARK_EVERY = 16


@dataclass(frozen=True)
class Mark:
    """A place in a shard that comes after ``total`` samples, those of earlier epochs among them.

    ``stream`` is the stream's state there, which nobody changes. It is None at the beginning of an epoch, and for a
    stream that has no state.
    """

    epoch: int = 0
    total: int = 0
    stream: Any = None


@dataclass(frozen=True)
class SamplePosition:
    """Where reading goes on: ``num_given`` samples after a mark, in its epoch."""

    mark: Mark
    num_given: int


Item = Mark | tuple[Any, Mark | None]


class ShardSamples:
    """Iterates over the samples of a shard from a place on: pairs of a sample and the mark after it, None without one.

    A mark that stands for itself is the place at the end of an epoch or at its beginning. Iteration ends with the epoch
    and goes on after ``start_epoch``. The stream is opened when it is needed.
    """

    def __init__(self, source: StreamSource, shard: int, place: SamplePosition) -> None:
        self._source = source
        self._shard = shard
        self._place = place
        self._epoch = place.mark.epoch
        self._total = place.mark.total
        self._stream: Iterable[Any] | None = None
        self._samples: Iterator[Any] | None = None
        self._items: Iterator[Item] = self._read()

    def __iter__(self) -> Iterator[Item]:
        return self._items

    def start_epoch(self, total: int) -> None:
        """Leaves the epoch, also before its end. The next item is the mark at the beginning of the next one.

        Args:
            total: What that mark counts: it leaves out samples that were read for a batch that nobody got.
        """
        place = self._place
        if self._stream is None and (place.mark.stream is not None or place.num_given):
            # It may keep something from epoch to epoch, which is that after the samples that were given.
            self._open()
            if hasattr(self._stream, "start_epoch"):
                self._skip_given()
        self._leave_epoch()
        self._total = total
        mark = self._mark()
        self._place = SamplePosition(mark, 0)
        self._items = itertools.chain([mark], self._read())

    def state(self) -> Any:
        """The stream's state after the samples that were given before. Not once iteration has begun."""
        self._skip_given()
        return snapshot(self._stream)

    def _open(self) -> Iterator[Any]:
        """The samples from where the stream stands; of one that is not open, from the mark or the epoch's beginning."""
        if self._stream is None:
            mark = self._place.mark
            self._stream = self._source.open_stream(self._shard, self._epoch)
            if self._epoch == mark.epoch and mark.stream is not None and has_state(self._stream):
                self._stream.load_state_dict(copy.deepcopy(mark.stream))
        self._samples = iter(self._stream)
        return self._samples

    def _leave_epoch(self) -> None:
        self._epoch += 1
        self._samples = None
        if not start_epoch(self._stream, self._epoch):
            self._stream = None

    def _skip_given(self) -> Iterator[Any]:
        """Reads what was given before; returns the samples behind it."""
        samples = self._open()
        for _ in itertools.islice(samples, self._place.num_given):
            self._total += 1
        return samples

    def _read(self) -> Iterator[Item]:
        samples = self._skip_given() if self._samples is None else self._samples
        keeps_state = has_state(self._stream)
        for sample in samples:
            self._total += 1
            is_due = has_small_state(self._stream) or self._total % _MARK_EVERY == 0
            yield sample, self._mark() if keeps_state and is_due else None
        if keeps_state:  # it may have read on after its last sample, for example tokens that fill no sequence
            yield self._mark()

    def _mark(self) -> Mark:
        return Mark(self._epoch, self._total, snapshot(self._stream))
