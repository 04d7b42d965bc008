"""The Grain data loaders of torchtitan's main by virtual shards. Needs the loader of revision b5bcd76c or a later one.

That loader builds its graph of data sets for one data-parallel rank and refuses another degree
(https://github.com/pytorch/torchtitan/blob/b5bcd76c/torchtitan/components/data/loader.py). Here virtual shard v of V is
the graph that torchtitan builds for rank v of V, up to its rows: mixtures, packing and shuffling stay inside a shard,
and a shard goes on from the state of its graph, whichever rank owns it. Batches are collated from rows, by torchtitan's
collator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import grain.python as grain
from grain.experimental import ThreadPrefetchIterDataset
from torchtitan.components.data.loader import BaseDataLoader, GrainDataLoader
from torchtitan.components.data.types import DatasetBuildContext, DatasetIterationPolicy
from torchtitan.config.override import derive
from torchtitan.tools.logging import logger

from torchtitan_ext.elastic import ElasticDataLoader
from torchtitan_ext.elastic.data.virtual_shards import ShardState, from_entry, shard_key, to_entry
from torchtitan_ext.errors import CannotReshardError, WrongValueError


class _Rows:
    """The rows of a shard as a ``Stream``, read ahead by a thread, which copies the graph's state with each row."""

    state_is_small = True

    def __init__(self, rows: Any) -> None:
        self._rows = rows

    def __iter__(self) -> Iterator[Any]:
        return iter(self._rows)

    def state_dict(self) -> Any:
        return self._rows.get_state()

    def load_state_dict(self, state_dict: Any) -> None:
        self._rows.set_state(state_dict)


class GrainShards:
    """A ``StreamSource`` over a function that builds the graph of data sets of one shard.

    It takes over the states of torchtitan's ``GrainDataLoader`` where ``num_shards`` is the number of data-parallel
    ranks that saved them.
    """

    def __init__(self, build: Callable[[int], grain.IterDataset], num_shards: int) -> None:
        self._build = build
        self.num_shards = num_shards
        self._opened: dict[int, Any] = {}

    def open_stream(self, shard: int, epoch: int) -> _Rows:
        """See ``StreamSource``. The graphs repeat their data themselves, or end with the one epoch."""
        self.close(shard)
        rows = self._opened[shard] = iter(self._build(shard))
        return _Rows(rows)

    def close(self, *shards: int) -> None:
        """Ends the threads that read ahead, by default those of all shards."""
        for shard in shards or list(self._opened):
            if shard in self._opened:
                self._opened.pop(shard).close()

    def adopt(self, saved: Mapping[str, Any]) -> dict[str, Any] | None:
        """See ``AdoptsStates``."""
        if "loader" in saved or "dp_world_size" not in saved:  # ours, or another loader's
            return None
        size = saved["dp_world_size"]
        missing = [rank for rank in range(size) if f"dp_rank_{rank}" not in saved]
        if saved.get("version") != 1 or missing:
            raise CannotReshardError(
                f"torchtitan's Grain loader saved its state in version {saved.get('version')} on {size} data-parallel "
                f"ranks, and the checkpoint lacks those of ranks {missing}; expected version 1 and all ranks",
                "load all data loader entries of one checkpoint, or reset the data loader",
            )
        common = {"version": 1, "kind": "streams", "num_shards": size, "dp_size": size, "global_batch_size": None}
        common |= {"samples_seen": 0, "dropped": 0, "padded": 0, "adopted_from": "torchtitan"}
        states = {shard_key(rank, size): ShardState(stream=saved[f"dp_rank_{rank}"]) for rank in range(size)}
        return {"loader": (common,), **{key: to_entry(state) for key, state in states.items()}}


class ElasticGrainDataLoader(ElasticDataLoader, BaseDataLoader):
    """torchtitan's ``GrainDataLoader`` by virtual shards: goes on with any number of data-parallel ranks."""

    @dataclass(kw_only=True, slots=True)
    class Config(GrainDataLoader.Config):
        num_shards: int = 48
        """A multiple of every data-parallel degree to come, or the degree of a checkpoint that is to be taken over.
        Each shard has a shuffle buffer of its own, and reads ahead ``num_prefetch_batches``."""

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        tokenizer: Any,
        max_context_length: int,
        num_tokens_per_batch: int,
        **_: Any,
    ) -> None:
        if dp_world_size > 1 and not config.repeat:
            raise WrongValueError(
                f"elastic_data: got repeat=False on {dp_world_size} data-parallel ranks, whose data would end at "
                "different steps; set repeat=True and a number of steps"
            )
        if config.num_shards % dp_world_size:
            logger.warning(
                f"dataloader.num_shards={config.num_shards} is no multiple of {dp_world_size} data-parallel ranks: "
                "some read more shards than others, and global batches are other sets than on ranks that divide it"
            )
        options, num_own = config.read_options, -(-config.num_shards // dp_world_size)
        context = DatasetBuildContext(
            tokenizer=tokenizer,
            max_context_length=max_context_length,
            num_tokens_per_batch=num_tokens_per_batch,
            read_options=grain.ReadOptions(  # those of a rank, shared by its shards
                num_threads=-(-options.num_threads // num_own),
                prefetch_buffer_size=-(-options.prefetch_buffer_size // num_own),
            ),
        )
        collator = config.collator.build(context=context)
        num_rows = collator.num_rows_per_batch()

        def build(shard: int) -> grain.IterDataset:
            policy = DatasetIterationPolicy(
                seed=config.seed,
                shuffle=config.shuffle,
                repeat=config.repeat,
                dp_rank=shard,
                dp_world_size=config.num_shards,
                streaming_shuffle_buffer_size=config.streaming_shuffle_buffer_size,
            )
            dataset = config.dataset.build(context=context, dataset_iteration_policy=policy)
            if isinstance(dataset, grain.MapDataset):
                dataset = dataset.to_iter_dataset(read_options=context.read_options)
            return ThreadPrefetchIterDataset(dataset, prefetch_buffer_size=config.num_prefetch_batches * num_rows)

        self._source = GrainShards(build, config.num_shards)
        super().__init__(
            self._source,
            batch_size=num_rows,
            dp_rank=dp_rank,
            dp_size=dp_world_size,
            endless=config.repeat,
            collate_fn=collator,
        )

    def state_dict(self) -> dict[str, Any]:
        """As in ``ElasticDataLoader``. With as many shards as ranks the state of torchtitan's own loader stands beside
        it, so that torchtitan alone can go on."""
        state = super().state_dict()
        if self._source.num_shards == self.dp_size:
            theirs = from_entry(shard_key(self.dp_rank, self.dp_size), state).stream  # after each row, never older
            if theirs is not None:
                state |= {"version": 1, "dp_world_size": self.dp_size, f"dp_rank_{self.dp_rank}": theirs}
        return state

    def close(self) -> None:
        """Ends the threads that read ahead. Not collective."""
        self._source.close()


def elastic_data(config: GrainDataLoader.Config, **options: Any) -> ElasticGrainDataLoader.Config:
    """Options: ``num_shards``."""
    return derive(config, ElasticGrainDataLoader.Config, **options)
