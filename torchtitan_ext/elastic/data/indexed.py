"""Virtual shards over a map-style data set: parts of it, each read in order, that can be dealt to more shards."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from torchtitan_ext.elastic.data.streams import check_num_shards
from torchtitan_ext.errors import CannotReshardError, argument_error

TORCHTITAN_SEED = 42


@dataclass(frozen=True)
class IndexedPart:
    """The samples that a stream gives, and the next one.

    The data set is cut into ``num_splits`` runs of equal length, give or take one; each epoch orders a run in its own
    way. The part gives places ``offset``, ``offset + stride``, ... of that order, from ``next_place`` on. Dealing it to
    k parts multiplies the stride by k, in this epoch from ``next_place`` on and in later ones from ``offset`` on, so
    that the k parts give in each epoch what the one would have given.

    ``split`` is the number of the run, ``num_samples`` counts the samples of the data set.
    """

    num_samples: int
    split: int
    num_splits: int
    offset: int = 0
    stride: int = 1
    next_place: int = 0

    def deal(self, num_parts: int) -> list[IndexedPart]:
        return [
            replace(
                self,
                offset=self.offset + part * self.stride,
                stride=self.stride * num_parts,
                next_place=self.next_place + part * self.stride,
            )
            for part in range(num_parts)
        ]


class IndexedStreams:
    """A source over a map-style data set, cut into runs as Hugging Face's ``split_dataset_by_node`` cuts one.

    In epoch 0 each run is read in the order of the data, in later epochs shuffled by NumPy's generator with
    ``seed + epoch``: as torchtitan 0.3.0 reads a data set. If no stream needs to go over the samples (to pack them),
    pass the data set to the loader instead, which needs no shards then.

    Args:
        data: A data set with ``__len__`` and ``__getitem__``.
        num_shards: Number of virtual shards.
        seed: Seed of the order of later epochs.
    """

    def __init__(self, data: Any, *, num_shards: int, seed: int = TORCHTITAN_SEED) -> None:
        if isinstance(data, type) or not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
            expected = "a map-style data set (__len__ and __getitem__)"
            raise argument_error("IndexedStreams", "data", data, expected)
        check_num_shards("IndexedStreams", num_shards)
        self.num_shards = num_shards
        self._data = data
        self._seed = seed

    def open_stream(self, shard: int, epoch: int) -> IndexedStream:
        return IndexedStream(self._data, IndexedPart(len(self._data), shard, self.num_shards), epoch, self._seed)

    def check_state(self, state: Any) -> None:
        """See ``ChecksStates``."""
        _part_of(self._data, self._seed, state)

    def split_state(self, state: Any, *, shard: int, num_shards: int, num_parts: int) -> list[Any]:
        """See ``SplitsStates``."""
        part = IndexedPart(len(self._data), shard, num_shards)
        if state is not None:
            part = _part_of(self._data, self._seed, state)
        return [{**asdict(dealt), "seed": self._seed} for dealt in part.deal(num_parts)]


class IndexedStream:
    """The samples of one part of a map-style data set; see ``IndexedStreams``."""

    state_is_small = True

    def __init__(self, data: Any, part: IndexedPart, epoch: int, seed: int = TORCHTITAN_SEED) -> None:
        self._data = data
        self._part = part
        self._epoch = epoch
        self._seed = seed

    def __iter__(self) -> Iterator[Any]:
        run = run_of(self._part)
        order = np.random.default_rng(self._seed + self._epoch).permutation(len(run)) if self._epoch else None
        while (place := self._part.next_place) < len(run):
            self._part = replace(self._part, next_place=place + self._part.stride)
            yield self._data[run[place if order is None else int(order[place])]]

    def start_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        self._part = replace(self._part, next_place=self._part.offset)

    def state_dict(self) -> dict[str, Any]:
        return {**vars(self._part), "seed": self._seed}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._part = _part_of(self._data, self._seed, state_dict)


def _part_of(data: Any, seed: int, state: dict[str, Any]) -> IndexedPart:
    """The part that a stream of this data had saved. States of torchtitan have no seed: they have the default one."""
    fields = {"seed": TORCHTITAN_SEED, **state}
    saved_seed = fields.pop("seed")
    if saved_seed != seed:
        raise CannotReshardError(
            f"the checkpoint's documents are ordered by seed {saved_seed}, this source has seed {seed}",
            f"pass seed={saved_seed}, or reset the data loader",
        )
    part = IndexedPart(**fields)
    if part.num_samples != len(data):
        raise CannotReshardError(
            f"the checkpoint was saved over {part.num_samples} documents, this data set has {len(data)}",
            "use the data set it was saved with, or reset the data loader",
        )
    return part


def run_of(part: IndexedPart) -> range:
    """The indices of a part's run: as ``datasets.Dataset.shard(contiguous=True)``."""
    size, rest = divmod(part.num_samples, part.num_splits)
    start = part.split * size + min(part.split, rest)
    return range(start, start + size + (part.split < rest))
