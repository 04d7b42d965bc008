"""The samples of one virtual shard, in the process that reads them, and marks from which a job can go on.

A mark is a place between two samples: how many samples come before it, and the stream's state there. Marks are made
while the shard is read and never change, so a checkpoint keeps the latest mark as it is and counts the samples since.
A job that goes on opens the stream at the mark and reads these samples again without giving them:

    s0 s1 ... s15 | s16 s17 s18 ...     a mark after 16 samples; s17 was given last: this mark, and 2 samples since
"""

from __future__ import annotations

import copy
import itertools
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torchtitan_ext.elastic.data.streams import Stream, StreamSource, has_small_state, snapshot, start_epoch

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


Item = Mark | tuple[Any, Mark | None]


class ShardSamples:
    """Iterates over the samples of a shard after a mark: pairs of a sample and the mark after it, None without one.

    A mark that stands for itself is the place at the end of an epoch or at its beginning. Iteration ends with the epoch
    and goes on after ``start_epoch``. The stream is opened when it is needed.

    Args:
        num_given: Samples after the mark that were given before; they are skipped.
    """

    def __init__(self, source: StreamSource, shard: int, mark: Mark, num_given: int) -> None:
        self._source = source
        self._shard = shard
        self._mark = mark
        self._num_given = num_given
        self._stream: Iterable[Any] | None = None
        self._items: Iterator[Item] = self._read()

    def __iter__(self) -> Iterator[Item]:
        return self._items

    def start_epoch(self, total: int) -> None:
        """Leaves the epoch, also before its end. The next item is the mark at the beginning of the next one.

        Args:
            total: What that mark counts: it leaves out samples that were read for a batch that nobody got.
        """
        if self._stream is None and (self._mark.stream is not None or self._num_given):
            # It may keep something from epoch to epoch, which is that after the samples that were given.
            if hasattr(self._open(), "start_epoch"):
                self._resumed()
        epoch = self._mark.epoch + 1
        if not start_epoch(self._stream, epoch):
            self._stream = None
        self._mark = Mark(epoch, total, snapshot(self._stream))
        self._num_given = 0
        self._items = itertools.chain([self._mark], self._read())

    def state(self) -> Any:
        """The stream's state after the samples that were given before. Not once iteration has begun."""
        self._resumed()
        return snapshot(self._stream)

    def _open(self) -> Iterable[Any]:
        self._stream = self._source.open_stream(self._shard, self._mark.epoch)
        if isinstance(self._stream, Stream) and self._mark.stream is not None:
            self._stream.load_state_dict(copy.deepcopy(self._mark.stream))
        return self._stream

    def _resumed(self) -> Iterator[Any]:
        """The samples of the stream after those that were given before."""
        samples = iter(self._open() if self._stream is None else self._stream)
        deque(itertools.islice(samples, self._num_given), maxlen=0)
        return samples

    def _read(self) -> Iterator[Item]:
        samples = self._resumed()
        has_state = isinstance(self._stream, Stream)
        for sample in samples:
            self._num_given += 1
            is_due = has_small_state(self._stream) or (self._mark.total + self._num_given) % _MARK_EVERY == 0
            yield sample, self._new_mark() if has_state and is_due else None
        if has_state:  # it may have read on after its last sample, for example tokens that fill no sequence
            yield self._new_mark()

    def _new_mark(self) -> Mark:
        self._mark = Mark(self._mark.epoch, self._mark.total + self._num_given, snapshot(self._stream))
        self._num_given = 0
        return self._mark
