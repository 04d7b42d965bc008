"""torchtitan 0.3.0's text data by virtual shards."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.hf_datasets.text_datasets import DATASETS
from torchtitan.tools.logging import logger

from torchtitan_ext.elastic import ElasticDataLoader, TorchtitanTextStreams
from torchtitan_ext.elastic.data.virtual_shards import from_entry, shard_key


class ElasticTextDataLoader(ElasticDataLoader, BaseDataLoader):
    """torchtitan's text data by virtual shards. ``TorchtitanTextStreams`` takes over its states."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        infinite: bool = True
        """As in torchtitan. If it is false, all ranks must be data-parallel ranks."""

        num_shards: int = 48
        """A multiple of every data-parallel degree to come, and of that of a checkpoint to be taken over."""

        num_workers: int = 0
        """As the three below, as in torchtitan's own loader: processes that read and tokenize ahead of training."""

        persistent_workers: bool = False

        pin_memory: bool = False

        prefetch_factor: int | None = None

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        tokenizer: Any,
        seq_len: int,
        local_batch_size: int,
        **_: Any,
    ) -> None:
        if config.num_shards % dp_world_size:
            logger.warning(
                f"dataloader.num_shards={config.num_shards} is no multiple of {dp_world_size} data-parallel ranks: "
                "some read more shards than others, and global batches are other sets than on ranks that divide it"
            )
        dataset = DATASETS[config.dataset.lower()]
        source = TorchtitanTextStreams(
            dataset.loader(config.dataset_path or dataset.path),
            partial(tokenizer.encode, add_bos=True, add_eos=True),
            seq_len=seq_len,
            num_shards=config.num_shards,
            text=dataset.sample_processor,
        )
        workers: dict[str, Any] = {"pin_memory": config.pin_memory, "num_workers": config.num_workers}
        if config.num_workers:  # torchtitan ignores these without workers
            workers |= {"persistent_workers": config.persistent_workers, "prefetch_factor": config.prefetch_factor}
        self._source = source  # the state, which the loader's class asks for at once, looks at it
        super().__init__(
            source,
            batch_size=local_batch_size,
            dp_rank=dp_rank,
            dp_size=dp_world_size,
            endless=config.infinite,
            **workers,
        )

    def __iter__(self) -> Iterator[Any]:
        """As in ``ElasticDataLoader``; logs the epochs that begin, as torchtitan does."""
        epoch = self.epoch
        for batch in super().__iter__():
            if self.epoch > epoch:
                epoch = self.epoch
                logger.warning(f"the data is being re-looped (epoch {epoch})")
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """As in ``ElasticDataLoader``. With as many shards as ranks the state of torchtitan's own loader stands beside
        it, so that torchtitan alone can go on."""
        state = super().state_dict()
        if self._source.num_shards == self.dp_size:
            key = shard_key(self.dp_rank, self.dp_size)
            served = self.samples_seen // self.dp_size
            theirs = self._source.as_torchtitan(
                self.dp_rank, from_entry(key, state), samples_served=served, batch_size=self.batch_size
            )
            state |= {} if theirs is None else {f"dp_rank_{self.dp_rank}": theirs, "world_size": self.dp_size}
        return state
