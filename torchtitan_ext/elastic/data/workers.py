"""Processes that read a rank's virtual shards ahead of training.

Worker w of N reads each N-th shard of the rank, of each of them what ``ShardSamples`` gives. The trainer's process asks
for items of single shards and takes them in its own order: so batches and states are the same for any N, and what was
read ahead is in no state.

    trainer -> worker 1    4 items of shard 2, 4 of shard 6      ("shard 2 from this mark on": only where it begins)
    worker 1 -> trainer    these items, or an error in place of the first that could not be read

These are not the workers of ``torch.utils.data.DataLoader``: where one of those is killed, an error is raised wherever
the trainer happens to be, by a signal handler.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import multiprocessing
import os
import pickle
import random
import signal
import socket
import traceback
import weakref
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext

import numpy as np
import torch

from torchtitan_ext import clock
from torchtitan_ext.elastic.data.blocks import receive_block, send_block
from torchtitan_ext.elastic.data.shard_samples import Item, Mark, SamplePosition, ShardSamples
from torchtitan_ext.elastic.data.streams import StreamSource
from torchtitan_ext.errors import TorchtitanExtError, check_counts
from torchtitan_ext.ranks.signal_inbox import deaf_child, keep_worker

_SECONDS_TO_END = 1.0  # a sample that takes longer is not waited for
# Ahead of the trainer, of each worker. Each is an open file of the user, who may have as few as 1,024 on a host.
_MOST_ANSWERS = 8
_SECONDS_BETWEEN_LOOKS = 5.0  # whether the trainer is still there


@dataclass(frozen=True)
class WorkerOptions:
    """As in ``torch.utils.data.DataLoader``. Raises TypeError or ValueError where they do not fit each other."""

    num_workers: int = 0
    prefetch_factor: int | None = None
    persistent_workers: bool = False
    pin_memory: bool = False
    multiprocessing_context: str | BaseContext | None = None
    timeout: float = 0

    def __post_init__(self) -> None:
        check_counts("ElasticDataLoader", num_workers=self.num_workers, prefetch_factor=self.prefetch_factor)
        if self.num_workers < 0 or self.timeout < 0 or (self.prefetch_factor is not None and self.prefetch_factor < 1):
            raise ValueError(
                f"ElasticDataLoader: got num_workers={self.num_workers}, prefetch_factor={self.prefetch_factor}, "
                f"timeout={self.timeout}, expected none below 0, and prefetch_factor at least 1"
            )
        if not self.num_workers and (self.prefetch_factor or self.persistent_workers or self.timeout):
            raise ValueError(
                "ElasticDataLoader: prefetch_factor, persistent_workers and timeout need workers; pass num_workers"
            )


@dataclass(eq=False, repr=False)
class StreamWorkerError(TorchtitanExtError, RuntimeError):
    """A worker raised an error or is gone. The loader stands after the latest batch; a new iterator goes on there.

    What to do: repair the data, or give the workers memory; the loader stands after the latest batch, and a new
    iterator goes on there.

    ``__cause__`` has the worker's own traceback.

    Attributes:
        sample: The number of the sample that could not be had among those of the shard, over all epochs.
    """

    shard: int
    num_shards: int
    epoch: int
    sample: int
    problem: str

    def __str__(self) -> str:
        return (
            f"data loader: sample {self.sample} of virtual shard {self.shard} of {self.num_shards}, in epoch "
            f"{self.epoch}, could not be read: {self.problem}; the position is that after the latest batch, from which "
            "a new iterator goes on"
        )


class WorkerFailure(Exception):
    """Why an item of a shard cannot be had; ``str`` of it is the worker's traceback where it raised an error."""

    def __init__(self, problem: str, trace: str = "") -> None:
        super().__init__(trace or problem)
        self.problem = problem


@dataclass(frozen=True)
class _Ask:
    """What the trainer wants of one shard.

    Attributes:
        start: The place to begin at; None to go on.
        next_epoch: What the first mark of the next epoch counts, where that epoch is to begin; else None.
    """

    shard: int
    num_items: int
    start: SamplePosition | None
    next_epoch: int | None


@dataclass(frozen=True)
class _Answer:
    """Fewer items than wanted where the epoch ends, or where an error (its text and traceback) was raised."""

    items: list[Item]
    error: tuple[str, str] | None


@dataclass(eq=False)
class _Ahead:
    """What was asked of a shard and came, since it was opened or began its epoch. None is the end of the epoch."""

    start: SamplePosition | None
    next_epoch: int | None = None
    items: deque[Item | WorkerFailure | None] = field(default_factory=deque)
    num_asked: int = 0
    num_open: int = 0
    is_whole: bool = False

    def ask(self, shard: int, num_items: int) -> _Ask:
        ask = _Ask(shard, num_items, self.start, self.next_epoch)
        self.start = self.next_epoch = None
        self.num_asked += num_items
        self.num_open += num_items
        return ask

    def add(self, num_items: int, answer: _Answer) -> None:
        self.num_open -= num_items
        if self.is_whole:
            return
        self.items += answer.items
        self.is_whole = len(answer.items) < num_items
        if self.is_whole:
            self.items.append(None if answer.error is None else WorkerFailure(*answer.error))


class SamplesAhead:
    """A shard's samples as ``ShardSamples`` gives them, read by a worker."""

    def __init__(self, workers: Workers, shard: int, place: SamplePosition) -> None:
        self._workers = workers
        self._shard = shard
        self._mark = place.mark
        self._num_given = place.num_given
        self._epoch = place.mark.epoch
        self._is_at_end = False
        self._ahead = workers.open(shard, _Ahead(place))

    def __iter__(self) -> Iterator[Item]:
        return self

    def __next__(self) -> Item:
        try:
            item = self._workers.next_item(self._shard, self._ahead)
        except WorkerFailure as failure:
            place = (self._shard, self._workers.num_shards, self._epoch, self._mark.total + self._num_given)
            raise StreamWorkerError(*place, failure.problem) from failure
        if item is None:
            self._is_at_end = True
            raise StopIteration
        mark = item if isinstance(item, Mark) else item[1]
        if mark is not None:
            self._mark, self._num_given = mark, 0
        else:
            self._num_given += 1
        return item

    def start_epoch(self, total: int) -> None:
        """See ``ShardSamples``. Does not wait. What was read ahead of an epoch that is cut short is read again."""
        start = None if self._is_at_end else SamplePosition(self._mark, self._num_given)
        self._ahead = self._workers.open(self._shard, _Ahead(start, total))
        self._epoch += 1
        self._is_at_end = False


class Workers:
    """The workers of one rank. They are started when a sample is needed, and after ``close`` again."""

    def __init__(self, source: StreamSource, own: Sequence[int], options: WorkerOptions, batch_size: int) -> None:
        self.num_shards = source.num_shards
        self._num_workers = min(options.num_workers, len(own))
        self._source = source
        self._options = options
        self._own = own
        # As many samples ahead as torch's workers read: prefetch_factor batches each. Together they answer one batch,
        # unless that would be too many answers.
        num_batches = options.prefetch_factor or 2
        self._depth = min(num_batches * self._num_workers, _MOST_ANSWERS)
        self._num_items = -(-num_batches * batch_size // self._depth)
        self._ahead: dict[int, _Ahead] = {}
        self._running: list[_Worker] = []
        weakref.finalize(self, _stop, self._running, os.getpid())

    def open(self, shard: int, ahead: _Ahead) -> _Ahead:
        """Reads a shard anew; answers to what was asked of it before are dropped."""
        self._ahead[shard] = ahead
        return ahead

    def next_item(self, shard: int, ahead: _Ahead) -> Item | None:
        """None at the end of the epoch. Raises ``WorkerFailure``."""
        if not self._running:
            self._start()
        worker = self._running[self._own.index(shard) % self._num_workers]
        while not ahead.items:
            self._ask(worker)
            worker.receive(self._options.timeout)
        item = ahead.items.popleft()
        if isinstance(item, WorkerFailure):
            raise item
        return item

    def close(self) -> None:
        """Ends the workers. All shards must be opened again."""
        _stop(self._running, os.getpid())
        self._ahead.clear()

    def _start(self) -> None:
        context = self._options.multiprocessing_context
        if not isinstance(context, BaseContext):
            context = multiprocessing.get_context(context)
        for number in range(self._num_workers):
            self._running.append(_Worker(context, self._source, self._own[number :: self._num_workers], number))
        for worker in self._running:
            self._ask(worker)

    def _ask(self, worker: _Worker) -> None:
        """Asks for items of the shards of which the fewest are ahead."""
        ahead = {shard: self._ahead[shard] for shard in worker.shards if not self._ahead[shard].is_whole}
        while ahead and len(worker.open_asks) < self._depth:
            turns = [(len(one.items) + one.num_open, one.num_asked, shard) for shard, one in ahead.items()]
            heapq.heapify(turns)
            counts: Counter[int] = Counter()
            for _ in range(self._num_items):
                num_ahead, num_asked, shard = turns[0]
                counts[shard] += 1
                heapq.heapreplace(turns, (num_ahead + 1, num_asked + 1, shard))
            worker.ask([(ahead[shard], ahead[shard].ask(shard, count)) for shard, count in counts.items()])


class _Worker:
    """A worker process, and what was asked of it and not answered."""

    def __init__(self, context: BaseContext, source: StreamSource, shards: Sequence[int], number: int) -> None:
        self.shards = shards
        self.open_asks: deque[list[tuple[_Ahead, int]]] = deque()
        self._number = number
        self._connection, theirs = context.Pipe()
        seed = torch.initial_seed() + 1 + number
        # A fork server is the parent of what it starts, and ends with this process.
        parent = None if context.get_start_method() == "forkserver" else os.getpid()
        self.process = context.Process(  # type: ignore[attr-defined]
            target=_serve, args=(theirs, source, seed, parent), daemon=True, name=f"stream worker {number}"
        )
        with deaf_child(context.get_start_method()):
            self.process.start()
        theirs.close()

    def ask(self, asks: list[tuple[_Ahead, _Ask]]) -> None:
        self.open_asks.append([(ahead, ask.num_items) for ahead, ask in asks])
        try:
            self._connection.send([ask for _, ask in asks])
        except OSError:
            pass  # it has ended: this is said where its answer is missing

    def receive(self, timeout: float) -> None:
        """Waits for an answer. Raises ``WorkerFailure`` if the worker has ended, or takes too long."""
        name = f"worker {self._number} (process {self.process.pid})"
        try:
            if not self._connection.poll(timeout or None):
                raise WorkerFailure(f"{name} did not answer within {timeout} seconds")
            answers = receive_block(self._connection)
        except (EOFError, OSError):
            self.process.join(_SECONDS_TO_END)
            code = self.process.exitcode or 0
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"has ended with exit code {code}"
            raise WorkerFailure(f"{name} {how}") from None
        for (ahead, num_items), answer in zip(self.open_asks.popleft(), answers, strict=True):
            ahead.add(num_items, answer)

    def hang_up(self) -> None:
        """Its next look at the connection ends it; closing would not, where other processes inherited our end."""
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self._connection.fileno())) as end:
            end.shutdown(socket.SHUT_RDWR)
        self._connection.close()


def _stop(running: list[_Worker], pid: int) -> None:
    """Ends the workers and empties the list. In a child of the trainer's process they are not ours to end."""
    if os.getpid() == pid:
        for worker in running:
            worker.hang_up()
        deadline = clock.now() + _SECONDS_TO_END
        for worker in running:
            worker.process.join(max(0.0, deadline - clock.now()))
            worker.process.kill()
            worker.process.join()
    running.clear()


def _serve(connection: Connection, source: StreamSource, seed: int, parent: int | None) -> None:
    """What a worker process does until the trainer hangs up or is gone."""
    keep_worker()  # Ctrl-C, and what a launcher sends, goes to all processes; the trainer ends its workers
    torch.set_num_threads(1)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    parent = parent or os.getppid()
    shards: dict[int, ShardSamples] = {}
    with contextlib.suppress(EOFError, OSError):
        while os.getppid() == parent:
            if connection.poll(_SECONDS_BETWEEN_LOOKS):
                asks = connection.recv()
                answers = [_answer(source, shards, ask) for ask in asks]
                try:
                    send_block(connection, answers)
                except OSError:
                    raise
                except Exception:  # samples of no pickle
                    send_block(connection, [_with_pickle(answer) for answer in answers])


def _answer(source: StreamSource, shards: dict[int, ShardSamples], ask: _Ask) -> _Answer:
    items: list[Item] = []
    try:
        if ask.start is not None:
            shards[ask.shard] = ShardSamples(source, ask.shard, ask.start)
        samples = shards[ask.shard]
        if ask.next_epoch is not None:
            samples.start_epoch(ask.next_epoch)
        for item in itertools.islice(samples, ask.num_items):
            items.append(item)
    except Exception as error:
        return _Answer(items, _described(error))
    return _Answer(items, None)


def _with_pickle(answer: _Answer) -> _Answer:
    """The items before the first that cannot be pickled, and the error of that one."""
    for number, item in enumerate(answer.items):
        try:
            pickle.dumps(item)
        except Exception as error:
            return _Answer(answer.items[:number], _described(error))
    return answer


def _described(error: Exception) -> tuple[str, str]:
    """Its own text, and its traceback."""
    lines = traceback.format_exception(error)
    return lines[-1].strip(), "".join(lines)
