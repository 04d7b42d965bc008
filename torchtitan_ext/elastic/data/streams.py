"""Data that comes as streams: the protocol of a source of virtual shards, and two sources.

A source cuts the data into ``num_shards`` virtual shards, once and for all, and opens any of them as a stream. Ranks
own shards, and a restart on more or fewer ranks only changes the owners; so ``num_shards`` should be a multiple of
every number of ranks to come.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeGuard, runtime_checkable

from torchtitan_ext.errors import argument_error, check_argument


@runtime_checkable
class Stream(Protocol):
    """Samples in a fixed order, and a reader's position in them: an iterable PyTorch ``Stateful``.

    After ``load_state_dict`` of a state that was taken after n samples, ``iter`` goes on with sample n.

    An iterable without these two methods is a stream as well: to resume it, the loader skips the samples that were
    served.

    A stream may have a method ``start_epoch(epoch) -> None``. The loader then calls it at the end of each epoch instead
    of opening a new stream, and ``iter`` gives the samples of that epoch. So a stream can keep leftover tokens.

    The loader asks for a state after every 16 samples, and copies it. It asks after each sample, and copies nothing,
    where the stream has ``state_is_small``, an attribute that is true: such a state is new and cheap to make.
    """

    def __iter__(self) -> Iterator[Any]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


@runtime_checkable
class StreamSource(Protocol):
    """Data cut into virtual shards, each a stream.

    A source may also have ``split_state`` (see ``SplitsStates``), for a load with a multiple of the saved shards;
    ``check_state`` (see ``ChecksStates``); and ``adopt`` (see ``AdoptsStates``).

    Attributes:
        num_shards: The same on every rank and, unless saved shards are split, in every job that goes on.
    """

    @property
    def num_shards(self) -> int: ...

    def open_stream(self, shard: int, epoch: int) -> Iterable[Any]:
        """The samples of one shard in one epoch, from the beginning. The rank that owns the shard calls it."""
        ...


@runtime_checkable
class AdoptsStates(Protocol):
    """A source that knows the data loader states of another library."""

    def adopt(self, saved: Mapping[str, Any]) -> dict[str, Any] | None:
        """The states as ``ElasticDataLoader`` would have saved them; None if the source does not know them.

        Raises:
            CannotReshardError: The source knows the states, but cannot take them over.
        """
        ...


@runtime_checkable
class ChecksStates(Protocol):
    """A source that refuses at the load, before anything is changed, the states that its streams cannot go on from."""

    def check_state(self, state: Any) -> None:
        """Checks the saved state of one stream, which is not None.

        Raises:
            CannotReshardError: A stream cannot go on from the state, for example because it has other data.
        """
        ...


@runtime_checkable
class SplitsStates(Protocol):
    """A source whose streams can be dealt into more; see ``StreamSource``."""

    def split_state(self, state: Any, *, shard: int, num_shards: int, num_parts: int) -> list[Any]:
        """The states of ``num_parts`` streams that together give the rest of one stream, exactly once, in every epoch.

        Args:
            state: The stream's state; None at the beginning of an epoch.
            shard: The number of the stream among the ``num_shards`` that were saved.

        Raises:
            CannotReshardError: This state cannot be split.
        """
        ...


@dataclass(frozen=True)
class Streams:
    """Streams that a function opens; the function decides what each shard holds.

    Example, with files as shards::

        Streams(lambda shard, num_shards, epoch: JsonLines(files[shard::num_shards], seed=epoch), num_shards=16)

    A ``torchdata.StatefulDataLoader(..., batch_size=None)`` is a stream too: its workers then read ahead for the shard.

    Args:
        open: From shard, number of shards and epoch to a ``Stream`` or another iterable.
        num_shards: Number of virtual shards.
    """

    open: Callable[[int, int, int], Iterable[Any]]
    num_shards: int

    def __post_init__(self) -> None:
        if not callable(self.open):
            raise argument_error("Streams", "open", self.open, "a function of shard, num_shards and epoch")
        check_num_shards("Streams", self.num_shards)

    def open_stream(self, shard: int, epoch: int) -> Iterable[Any]:
        return self.open(shard, self.num_shards, epoch)


class HuggingFaceStreams:
    """A streaming data set of Hugging Face ``datasets``, cut by its own ``split_dataset_by_node``.

    Where the data set has a multiple of ``num_shards`` files, each shard reads its own; otherwise each reads all files
    and keeps every ``num_shards``-th example. A data set that is not streamed needs no source: pass it to the loader.

    Args:
        dataset: A ``datasets.IterableDataset``.
        num_shards: Number of virtual shards.
        resume: ``"state"`` goes on from the data set's own ``state_dict``, which lacks its shuffle buffer: a shuffled
            data set is refused. ``"replay"`` reads and skips the examples that the epoch has served: exact for any data
            set that gives the same examples twice, and slow late in an epoch.

    Raises:
        TypeError: The data set is not a streaming one.
        ValueError: The data set is shuffled and ``resume`` is not ``"replay"``; or ``resume`` is unknown.
    """

    def __init__(self, dataset: Any, *, num_shards: int, resume: Literal["state", "replay"] = "state") -> None:
        if isinstance(dataset, type) or not hasattr(dataset, "set_epoch"):
            expected = "a streaming data set; pass one that is not streamed to the loader as it is"
            raise argument_error("HuggingFaceStreams", "dataset", dataset, expected)
        check_num_shards("HuggingFaceStreams", num_shards)
        if resume not in ("state", "replay"):
            raise ValueError(f"HuggingFaceStreams: got resume={resume!r}, expected 'state' or 'replay'")
        # https://huggingface.co/docs/datasets/stream#save-a-dataset-checkpoint-and-resume-iteration
        if resume == "state" and _has_shuffle_buffer(dataset):
            raise ValueError(
                "HuggingFaceStreams: a streaming data set that is shuffled loses its shuffle buffer when it resumes "
                'from its state; pass resume="replay", or leave the shuffling out'
            )
        self.num_shards = num_shards
        self._dataset = dataset
        self._resume = resume
        self._split = importlib.import_module("datasets.distributed").split_dataset_by_node

    def open_stream(self, shard: int, epoch: int) -> Iterable[Any]:
        part = self._split(self._dataset, rank=shard, world_size=self.num_shards)
        part.set_epoch(epoch)
        # An iterator has no state_dict: it is resumed by skipping.
        return part if self._resume == "state" else iter(part)


def _has_shuffle_buffer(dataset: Any) -> bool:
    """Whether a Hugging Face stream was shuffled: ``datasets`` 3 notes it, version 4 wraps what is read."""
    wraps = getattr(dataset, "_ex_iterable", None)
    while wraps is not None and type(wraps).__name__ != "BufferShuffledExamplesIterable":
        wraps = getattr(wraps, "ex_iterable", None)
    return wraps is not None or getattr(dataset, "_shuffling", None) is not None


def check_num_shards(where: str, num_shards: int) -> None:
    """Raises TypeError unless it is a whole number, ValueError below 1."""
    check_argument(where, "num_shards", num_shards, int, "a whole number")
    if num_shards < 1:
        raise ValueError(f"{where}: got num_shards={num_shards}, expected at least 1")


def start_epoch(stream: Iterable[Any] | None, epoch: int) -> bool:
    """Has a stream go on with an epoch; returns False if a new stream must be opened for it."""
    start = getattr(stream, "start_epoch", None)
    if start is not None:
        start(epoch)
    return start is not None


def has_small_state(stream: Iterable[Any] | None) -> bool:
    """Whether the stream's state, as it is now, may be asked for after each sample; see ``Stream``."""
    return bool(getattr(stream, "state_is_small", False))


def has_state(stream: Iterable[Any] | None) -> TypeGuard[Stream]:
    """Whether an iterable is a ``Stream``. To ask the protocol for each sample would take longer than many a sample."""
    return hasattr(stream, "state_dict") and hasattr(stream, "load_state_dict")


def snapshot(stream: Iterable[Any] | None) -> Any:
    """The stream's state as a value that nobody changes later; None for a stream without a state."""
    if not has_state(stream):
        return None
    is_new = has_small_state(stream)
    return stream.state_dict() if is_new else copy.deepcopy(stream.state_dict())
