"""torchtitan 0.3.0's own trainer on another number of ranks, switched on by two of its config overrides.

    --override.imports torchtitan_ext.integrations.torchtitan.elastic_checkpoint \
                       'torchtitan_ext.integrations.torchtitan.elastic_data={"num_shards": 48}'

The first saves and loads with this package; the second reads the text data by virtual shards, from where torchtitan's
own data loader stood if need be. Needs torchtitan, whose ``config/override.py`` says what an override is; nothing here
imports it.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torchtitan.components.checkpointer import DATALOADER, MODEL, TRAIN_STATE, AsyncMode, CheckpointManager
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.config.override import derive, override
from torchtitan.hf_datasets.text_datasets import DATASETS, HuggingFaceTextDataLoader
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import GarbageCollection

from torchtitan_ext.checkpoint import async_save, load, save
from torchtitan_ext.checkpoint.policy import Action, Strict
from torchtitan_ext.elastic import ElasticDataLoader, ElasticPolicy, TorchtitanTextStreams
from torchtitan_ext.errors import Problem, refusal
from torchtitan_ext.storage import FileReader


class ElasticCheckpointManager(CheckpointManager):
    """torchtitan's checkpoint manager, with ``tte.save`` and ``tte.load`` in the place of DCP's.

    Folders, intervals, and safetensors of Hugging Face stay torchtitan's. A load that cannot go is refused with one
    report before anything is changed; one that goes logs it.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        policy: dict[str, Action] = field(default_factory=dict)
        """What to do with a component, or with a glob of flat keys: see ``ElasticPolicy``."""

        strict: Strict = "error"
        """What to do about missing and unexpected keys."""

        def __post_init__(self) -> None:
            CheckpointManager.Config.__post_init__(self)
            if self.async_mode == AsyncMode.ASYNC_WITH_PINNED_MEM:
                raise ValueError('checkpoint.async_mode: got "async_with_pinned_mem", expected "disabled" or "async"')

    def __init__(self, config: Config, **components: Any) -> None:
        super().__init__(config, **components)
        self.policy = ElasticPolicy(config.policy, strict=config.strict)

    @torch.no_grad()
    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: AsyncMode,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
    ) -> Future[Any] | None:
        """Collective, as torchtitan calls it; a future where the mode is ``async``."""
        if to_hf:
            return super().dcp_save(state_dict, checkpoint_id, async_mode, enable_garbage_collection, to_hf)
        if async_mode == AsyncMode.ASYNC:
            return async_save(state_dict, checkpoint_id, process_group=self.pg)
        save(state_dict, checkpoint_id)
        if enable_garbage_collection:
            GarbageCollection.collect("GC collection invoked by checkpointer.")
        return None

    def dcp_load(self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool) -> None:
        """Collective, as torchtitan calls it; raises what ``tte.load`` raises."""
        if from_hf:
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
            return
        self._refuse_model_alone(state_dict, checkpoint_id)
        logger.info(f"{checkpoint_id}: {load(state_dict, checkpoint_id, policy=self.policy)}")
        if MODEL in self.states:
            self.states[MODEL].load_state_dict(state_dict)
        # torchtitan saves the tokens of one rank, and logs them times the ranks.
        loader = self.states[DATALOADER]
        if isinstance(loader, ElasticTextDataLoader):
            trainer = self.states[TRAIN_STATE]
            trainer.ntokens_seen = trainer.ntokens_seen * loader.saved_dp_size // loader.dp_size

    def _refuse_model_alone(self, state_dict: dict[str, Any], checkpoint_id: str) -> None:
        """A run that goes on without its step would overwrite the steps that it has: no policy answers that."""
        others = tuple(name for name in self.states if name != MODEL)
        asked = [name for name in others if name in state_dict]
        saved = FileReader(checkpoint_id).read_metadata().state_dict_metadata
        if not asked or any(key.split(".")[0] in others for key in saved):
            return
        detail = (
            f"{checkpoint_id} has a model and nothing else (last_save_model_only): training cannot go on from it; pass "
            "--checkpoint.load_step of a step that was saved whole, or begin a new run in another --checkpoint.folder "
            "with --checkpoint.initial_load_path"
        )
        raise refusal("load", [Problem("missing_key", asked[0], detail)])


class ElasticTextDataLoader(ElasticDataLoader, BaseDataLoader):
    """torchtitan's text data by virtual shards; see ``TorchtitanTextStreams`` for what of its states it takes over."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        infinite: bool = True
        """As in torchtitan's. Where it is false, the data-parallel ranks have to be all ranks."""

        num_shards: int = 48
        """A multiple of every data-parallel degree to come, and of the one whose checkpoint is taken over."""

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
        super().__init__(
            source, batch_size=local_batch_size, dp_rank=dp_rank, dp_size=dp_world_size, endless=config.infinite
        )
        self.saved_dp_size = dp_world_size

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See ``ElasticDataLoader``; ``saved_dp_size`` is then the number of data-parallel ranks that saved."""
        super().load_state_dict(state_dict)
        self.saved_dp_size = state_dict["loader"][0]["dp_size"]


@override(target=CheckpointManager.Config, exact=True, description="checkpoints that load on any number of ranks")
def elastic_checkpoint(config: CheckpointManager.Config, **options: Any) -> ElasticCheckpointManager.Config:
    """Options: ``policy``, ``strict``."""
    return derive(config, ElasticCheckpointManager.Config, **options)


@override(target=HuggingFaceTextDataLoader.Config, exact=True, fqns=["dataloader"], description="data by shards")
def elastic_data(config: HuggingFaceTextDataLoader.Config, **options: Any) -> ElasticTextDataLoader.Config:
    """Options: ``num_shards``."""
    if config.num_workers:
        logger.warning(f"dataloader.num_workers={config.num_workers} is not used: the trainer's process reads the data")
    return derive(config, ElasticTextDataLoader.Config, **options)
