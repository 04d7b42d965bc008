"""Batches over virtual shards: the ranks agree on the end of an epoch, count what they serve, and reshard."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data._utils.pin_memory import pin_memory

from torchtitan_ext.checkpoint.tables.component import Resharded, World
from torchtitan_ext.elastic.data.sample_position import common_entry
from torchtitan_ext.elastic.data.sampler import Share
from torchtitan_ext.elastic.data.streams import AdoptsStates, ChecksStates, SplitsStates, StreamSource
from torchtitan_ext.elastic.data.virtual_shards import (
    ShardReader,
    ShardState,
    from_entry,
    shard_key,
    stream_state,
    to_entry,
)
from torchtitan_ext.elastic.data.workers import WorkerOptions
from torchtitan_ext.errors import CannotReshardError, Remedy
from torchtitan_ext.ranks.exchange import device_of

_KIND = "streams"


@dataclass
class Counts:
    """Samples of all ranks together, over all epochs; see ``SamplePosition``."""

    samples_seen: int = 0
    dropped: int = 0
    padded: int = 0


class StreamBatches:
    """Local batches of the virtual shards that this rank owns; see ``ElasticDataLoader`` for the arguments."""

    def __init__(
        self,
        source: StreamSource,
        share: Share,
        group: dist.ProcessGroup | None,
        collate_fn: Callable[[list[Any]], Any],
        options: WorkerOptions,
    ) -> None:
        self._reader = ShardReader(source, share, options)
        self._source = source
        self._share = share
        self._group = group
        self._collate_fn = collate_fn
        self._ends_workers = options.num_workers > 0 and not options.persistent_workers
        self._pins = options.pin_memory and torch.accelerator.is_available()
        self.counts = Counts()
        self.num_padding = 0
        # Where there is a process group already, a wrong one is an error here, not at the first batch.
        if share.dp_size > 1 and not share.endless and dist.is_initialized():
            self._check_group()

    @property
    def epoch(self) -> int:
        """The latest epoch of this rank's shards."""
        return self._reader.epoch

    def __iter__(self) -> Iterator[Any]:
        try:
            while (batch := self._next_batch()) is not None:
                yield batch[0]
        finally:
            if self._ends_workers:
                self._reader.close()

    def _next_batch(self) -> tuple[Any] | None:
        """None at the end of the epoch. A batch that fails is not served: the next one has its samples."""
        try:
            return self._read_batch()
        except BaseException:
            self._reader.close()
            raise

    def _read_batch(self) -> tuple[Any] | None:
        samples = self._reader.draw(self._share.batch_size)
        size = self._share.global_batch_size
        served = size if self._share.endless else self._sum_over_ranks(len(samples))
        if served == 0 or (self._share.last == "drop" and served < size):
            self._reader.end_epoch()
            self.counts.dropped += served
            return None
        num_padding = self._share.batch_size - len(samples)
        batch = self._collate_fn(self._fill(samples, num_padding))
        if self._pins:
            batch = pin_memory(batch)
        self._reader.commit()
        self.counts.samples_seen += served
        self.counts.padded += size - served
        self.num_padding = num_padding
        return (batch,)

    def _fill(self, samples: list[Any], num_padding: int) -> list[Any]:
        """Repeats the samples until they fill the batch; without samples, a first one of the data."""
        if num_padding == 0:
            return samples
        repeated = samples or [self._reader.first_sample()]
        return samples + [repeated[i % len(repeated)] for i in range(num_padding)]

    def _sum_over_ranks(self, count: int) -> int:
        if self._share.dp_size == 1:
            return count
        self._check_group()
        total = torch.tensor([count], dtype=torch.int64, device=device_of(self._group or dist.group.WORLD))  # type: ignore[arg-type]
        dist.all_reduce(total, group=self._group)
        return int(total.item())

    def _check_group(self) -> None:
        """Raises ValueError unless the group is that of the data-parallel ranks."""
        size, expected = dist.get_world_size(self._group) if dist.is_initialized() else 0, self._share.dp_size
        if size != expected:
            found = f"has {size} ranks" if size > 0 else "does not hold this rank" if size else "does not exist"
            raise ValueError(
                f"ElasticDataLoader: {expected} data-parallel ranks must agree on the end of an epoch, but the process "
                f"group {found}; pass the data-parallel group as group=, such as mesh['dp'].get_group(), or "
                "endless=True"
            )

    def state_dict(self) -> dict[str, Any]:
        common = {
            "version": 2,
            "kind": _KIND,
            "num_shards": self._source.num_shards,
            "dp_size": self._share.dp_size,
            "global_batch_size": self._share.global_batch_size,
            **asdict(self.counts),
        }
        return {"loader": (common,), **self._entries(self._reader.states())}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        common, states, _ = self._read(state_dict)
        self._reader.load(states)
        self.counts = Counts(common["samples_seen"], common["dropped"], common["padded"])
        self.num_padding = 0

    def reshard(self, saved: Mapping[str, Any], old: World, new: World) -> Resharded:
        common, states, epochs = self._read(saved)
        num_saved = common["num_shards"]
        note = f"adopted from {common['adopted_from']}, " if "adopted_from" in common else ""
        first, last = epochs[0], epochs[-1]
        where = f"epoch {first}" if first == last else f"epochs {first} to {last}"
        note += f"goes on after {common['samples_seen']} samples in {where}, "
        if num_saved == self._source.num_shards:
            note += f"{num_saved} virtual shards, "
        else:
            note += f"virtual shards {num_saved} -> {self._source.num_shards}, each dealt to "
            note += f"{self._source.num_shards // num_saved}, "
        note += f"data-parallel ranks {common['dp_size']} -> {self._share.dp_size}"
        common = {**common, "num_shards": self._source.num_shards}
        return Resharded({"loader": (common,), **self._entries(states)}, note, common["samples_seen"], common["padded"])

    def _entries(self, states: Mapping[int, ShardState]) -> dict[str, Any]:
        return {shard_key(shard, self._source.num_shards): to_entry(state) for shard, state in states.items()}

    def _read(self, saved: Mapping[str, Any]) -> tuple[Mapping[str, Any], dict[int, ShardState], list[int]]:
        """The common entry, the states of this rank's shards, and the epochs of the saved shards.

        Saved shards are split where the loader has more of them.
        """
        if isinstance(self._source, AdoptsStates):
            saved = self._source.adopt(saved) or saved
        common = common_entry(saved, _KIND)
        num_saved: int = common["num_shards"]
        num_parts, rest = divmod(self._source.num_shards, num_saved)
        if rest or (num_parts > 1 and not isinstance(self._source, SplitsStates)):
            reason = "shards cannot be merged"
            if num_parts:
                splits = isinstance(self._source, SplitsStates)
                reason = "shards can be split into equal parts only" if splits else "these streams cannot be split"
            whose = f" (the data-parallel ranks of {common['adopted_from']})" if "adopted_from" in common else ""
            raise CannotReshardError(
                f"the checkpoint has {num_saved} virtual shards{whose}, this loader {self._source.num_shards}, "
                f"and {reason}",
                *self._what_to_choose(num_saved),
            )
        parents = {
            shard: from_entry(shard_key(shard, num_saved), saved)
            for shard in range(num_saved)
            if shard_key(shard, num_saved) in saved or shard in self._parents(num_saved)
        }
        epochs = sorted({state.epoch for state in parents.values()})
        if not self._share.endless and len(epochs) > 1:
            raise CannotReshardError(
                f"the shards of the checkpoint are in epochs {epochs[0]} to {epochs[-1]}, and a loader that is not "
                "endless has all shards in one",
                "pass endless=True, or reset the data loader",
            )
        if isinstance(self._source, ChecksStates):
            for parent in self._parents(num_saved):
                if parents[parent].stream is not None:
                    self._source.check_state(parents[parent].stream)
        if num_parts == 1:
            return common, {shard: parents[shard] for shard in self._reader.own}, epochs
        split = {parent: self._split(parents[parent], parent, num_saved) for parent in self._parents(num_saved)}
        return common, {shard: split[shard % num_saved][shard // num_saved] for shard in self._reader.own}, epochs

    def _parents(self, num_saved: int) -> set[int]:
        """The saved shards that this rank's shards come from: shard v comes from saved shard v % num_saved."""
        return {shard % num_saved for shard in self._reader.own}

    def _split(self, parent: ShardState, shard: int, num_saved: int) -> list[ShardState]:
        num_parts = self._source.num_shards // num_saved
        assert isinstance(self._source, SplitsStates)
        split = partial(self._source.split_state, shard=shard, num_shards=num_saved)
        stream = parent.stream
        if parent.since:
            (whole,) = split(stream, num_parts=1)  # of a stream of this source, which has other shards
            stream = stream_state(self._source, shard, replace(parent, stream=whole))
        streams = split(stream, num_parts=num_parts)
        return [ShardState(epoch=parent.epoch, finished=parent.finished, stream=stream) for stream in streams]

    def _what_to_choose(self, num_saved: int) -> tuple[str, Remedy | None]:
        if isinstance(self._source, SplitsStates):
            fitting = math.lcm(num_saved, self._share.dp_size)
            text = f"choose num_shards={fitting}, or another multiple of {num_saved}"
            return text, Remedy("num_shards", fitting)
        if self._share.dp_size <= num_saved:
            return f"choose num_shards={num_saved}", Remedy("num_shards", num_saved)
        text = f"choose num_shards={num_saved} and at most {num_saved} data-parallel ranks, or reset the data loader"
        return text, None
