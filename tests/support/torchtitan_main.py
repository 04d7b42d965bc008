"""Stand-ins for the parts of torchtitan's main that our adapters meet: same names, same calls, over the real Grain.

They copy the interfaces of revision b5bcd76c66d0acb1a08b176d9639425bc55e0b2a (2026-08-21): ``BaseCheckpointManager``
with its hooks, ``CheckpointStorage``, and data loaders that build a graph of Grain for one data-parallel rank.

    python torchtitan_main.py FOLDER RANK WORLD_SIZE NUM_STEPS NUM_SHARDS [die]

A run that goes on from the latest step there is, trains and saves, on a loader by virtual shards, or on main's own
where there are 0 of them. Prints what it has read in each step, or why it was refused. With ``die`` rank 1 is killed in
the middle of the last save.
"""

import json
import logging
import os
import re
import signal
import sys
from abc import ABC, abstractmethod
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar, Protocol, runtime_checkable

import grain.python as grain
import numpy as np
import torch
import torch.distributed as dist
from grain.experimental import ConcatThenSplitIterDataset, ThreadPrefetchIterDataset

MICROBATCHES = 8  # of all ranks together in a step
SEQUENCE = 16  # tokens


class AsyncMode(str, Enum):
    DISABLED = "disabled"
    ASYNC = "async"
    ASYNC_WITH_PINNED_MEM = "async_with_pinned_mem"


class ModelWrapper:
    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model

    def state_dict(self) -> dict[str, Any]:
        return self.model.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.model.load_state_dict(state_dict, strict=False)


@runtime_checkable
class CheckpointStorage(Protocol):
    def isdir(self, path: str) -> bool: ...
    def isfile(self, path: str) -> bool: ...
    def listdir(self, path: str) -> list[str]: ...
    def remove(self, path: str) -> None: ...


class FileStorage:
    isdir, isfile, listdir = staticmethod(os.path.isdir), staticmethod(os.path.isfile), staticmethod(os.listdir)

    def remove(self, path: str) -> None:
        raise AssertionError("our saves remove old steps")


class Configurable:
    """``Config.build`` makes the class in which the config stands."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        _owner: ClassVar[Any] = None

        def build(self, **options: Any) -> Any:
            return self._owner(config=self, **options)

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "Config" in vars(cls):
            cls.Config._owner = cls


class BaseCheckpointManager(Configurable, ABC):
    """The public methods ask whether the manager is enabled; subclasses have the hooks."""

    enable: bool
    save_future: Future[Any] | None
    _storage: CheckpointStorage

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        enable: bool = False
        interval: int = 1
        keep_latest_k: int = 2
        exclude_from_loading: list[str] = field(default_factory=list)
        load_only: bool = False

    def load(self, step: int = -1) -> bool:
        return self.enable and self._load(step)

    def save(self, curr_step: int, last_step: bool = False) -> bool:
        return self.enable and self._save(curr_step, last_step)

    def close(self) -> None:
        if getattr(self, "enable", False):
            self._close()

    def maybe_wait_for_saving(self) -> None:
        if self.enable and self.save_future is not None:
            self._wait_for_saving()

    def _should_purge(self) -> bool:
        return self.keep_latest_k > 0 and dist.get_rank() == 0 and self._storage.isdir(self.folder)

    @abstractmethod
    def _wait_for_saving(self) -> None: ...

    @abstractmethod
    def _load(self, step: int = -1) -> bool: ...

    @abstractmethod
    def _save(self, curr_step: int, last_step: bool = False) -> bool: ...

    @abstractmethod
    def _maybe_wait_for_staging(self) -> None: ...

    @abstractmethod
    def _close(self) -> None: ...


class CheckpointManager(BaseCheckpointManager):
    """That over DCP."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):
        async_mode: str = "disabled"

    def __init__(self, config: Config, *, dataloader: Any, model: Any, states: dict[str, Any], folder: str) -> None:
        self.enable = config.enable
        if not self.enable:
            return
        self.states, self.folder, self._storage = states, folder, FileStorage()
        states.update({"model": ModelWrapper(model), "dataloader": dataloader})
        self.interval, self.load_only = config.interval, config.load_only
        self.keep_latest_k, self.exclude_from_loading = config.keep_latest_k, config.exclude_from_loading
        self.async_mode, self.sd_adapter = AsyncMode(config.async_mode), None
        self.pg = None if self.async_mode == AsyncMode.DISABLED else dist.new_group(backend="gloo")
        self.stager = self.save_future = None

    def _flat_states(self) -> dict[str, Any]:
        return {**{k: v for k, v in self.states.items() if k != "model"}, **self.states["model"].state_dict()}

    def _find_load_step(self, folder: str = "") -> int:
        folder = folder or self.folder
        names = self._storage.listdir(folder) if self._storage.isdir(folder) else []
        steps = [re.search(r"step-(\d+)", name) for name in names if self._storage.isfile(f"{folder}/{name}/.metadata")]
        return max((int(step[1]) for step in steps if step), default=-1)

    def _create_checkpoint_id(self, step: int, folder: str = "") -> str:
        return str(Path(folder or self.folder, f"step-{step}"))

    def _load(self, step: int = -1) -> bool:
        step = self._find_load_step() if step == -1 else step
        if step == -1:
            return False
        self.dcp_load(self._flat_states(), self._create_checkpoint_id(step), from_hf=False, from_quantized=False)
        return True

    def _should_save(self, curr_step: int, last_step: bool = False) -> bool:
        return not self.load_only and (last_step or curr_step % self.interval == 0)

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        self.maybe_wait_for_saving()
        if not self._should_save(curr_step, last_step):
            return False
        arguments = self._flat_states(), self._create_checkpoint_id(curr_step), self.async_mode
        saved = self.dcp_save(*arguments, enable_garbage_collection=True)
        self.save_future = saved if self.async_mode == AsyncMode.ASYNC else None
        self._purge_stale_checkpoints()
        return True

    def _maybe_wait_for_staging(self) -> None:
        pass

    def _wait_for_saving(self) -> None:
        raise AssertionError("ours is in its place")

    def _purge_stale_checkpoints(self) -> None:
        raise AssertionError("ours is in its place")

    def _close(self) -> None:
        pass


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetBuildContext:
    tokenizer: Any
    max_context_length: int
    num_tokens_per_batch: int
    read_options: grain.ReadOptions


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetIterationPolicy:
    seed: int
    shuffle: bool
    repeat: bool
    dp_rank: int
    dp_world_size: int
    streaming_shuffle_buffer_size: int


class PackedMixture:
    """A ``DatasetConfig``: two sets of documents, mixed two to one and packed. A document repeats its own number."""

    def build(self, *, context: DatasetBuildContext, dataset_iteration_policy: DatasetIterationPolicy) -> Any:
        policy, parts = dataset_iteration_policy, []
        for first, num_documents in ((1, 60), (1001, 40)):
            lengths = np.random.default_rng(first).integers(3, 30, num_documents)
            documents = [{"tokens": np.full(n, first + i)} for i, n in enumerate(lengths)]
            dataset = grain.MapDataset.source(documents)
            dataset = dataset.shuffle(seed=policy.seed) if policy.shuffle else dataset
            dataset = dataset[policy.dp_rank :: policy.dp_world_size]
            parts.append(dataset.repeat() if policy.repeat else dataset)
        mixed = grain.MapDataset.mix(parts, weights=[2.0, 1.0]).to_iter_dataset(read_options=context.read_options)
        length = context.num_tokens_per_batch
        packed = ConcatThenSplitIterDataset(mixed, length_struct={"tokens": length})
        return packed.filter(lambda row: bool((row["tokens_segment_ids"] != 0).all())).map(lambda row: row["tokens"])


class Collator(Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        pass

    def __init__(self, config: Config, *, context: DatasetBuildContext) -> None:
        pass

    def __call__(self, rows: Any) -> Any:
        (row,) = rows
        return {"input": torch.as_tensor(row)}, torch.as_tensor(row)

    def num_rows_per_batch(self) -> int:
        return 1


class BaseDataLoader(Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        pass

    def close(self) -> None:
        pass


class GrainDataLoader(BaseDataLoader):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        dataset: Any = field(default_factory=PackedMixture)
        collator: Any = field(default_factory=Collator.Config)
        seed: int = 42
        shuffle: bool = True
        repeat: bool = True
        streaming_shuffle_buffer_size: int = 1_000
        read_options: grain.ReadOptions = field(default_factory=lambda: grain.ReadOptions(num_threads=2))
        num_prefetch_batches: int = 2

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        tokenizer: Any,
        max_context_length: int,
        num_tokens_per_batch: int,
    ) -> None:
        self._dp_world_size, self._rank_id = dp_world_size, f"dp_rank_{dp_rank}"
        context = DatasetBuildContext(
            tokenizer=tokenizer,
            max_context_length=max_context_length,
            num_tokens_per_batch=num_tokens_per_batch,
            read_options=config.read_options,
        )
        names = ("seed", "shuffle", "repeat", "streaming_shuffle_buffer_size")
        policy = DatasetIterationPolicy(
            dp_rank=dp_rank, dp_world_size=dp_world_size, **{name: getattr(config, name) for name in names}
        )
        dataset = config.dataset.build(context=context, dataset_iteration_policy=policy)
        collator = config.collator.build(context=context)
        dataset = dataset.batch(collator.num_rows_per_batch(), drop_remainder=config.repeat, batch_fn=collator)
        dataset = ThreadPrefetchIterDataset(dataset, prefetch_buffer_size=config.num_prefetch_batches)
        self._iterator = iter(dataset)

    def __iter__(self) -> Any:
        return self._iterator

    def state_dict(self) -> dict[str, Any]:
        return {"version": 1, "dp_world_size": self._dp_world_size, self._rank_id: self._iterator.get_state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict["dp_world_size"] != self._dp_world_size:
            raise ValueError("cannot resume after changing the effective data-parallel degree")
        self._iterator.set_state(state_dict[self._rank_id])

    def close(self) -> None:
        self._iterator.close()


class Trainer:
    config = SimpleNamespace(override=SimpleNamespace(imports=["torchtitan_ext.integrations.torchtitan.elastic_data"]))
    step = ntokens_seen = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "ntokens_seen": self.ntokens_seen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step, self.ntokens_seen = state_dict["step"], state_dict["ntokens_seen"]


def override(**_: Any) -> Any:
    return lambda function: function


def derive(config: Any, target: Any, **options: Any) -> Any:
    return target(**{name: getattr(config, name) for name in fields_of(config)}, **options)


def fields_of(config: Any) -> list[str]:
    return [name for name in config.__dataclass_fields__ if not name.startswith("_")]


class GarbageCollection:
    collected: ClassVar[list[str]] = []
    collect = collected.append


def module(name: str, **attributes: Any) -> None:
    made = ModuleType(name)
    made.__path__ = []
    made.__dict__.update(attributes)
    sys.modules[name] = made


def install() -> None:
    """No ``torchtitan.components.dataloader`` and no text loader of 0.3.0."""
    names = {"MODEL": "model", "DATALOADER": "dataloader", "TRAIN_STATE": "train_state"}
    for name in ("torchtitan", "torchtitan.components", "torchtitan.config"):
        module(name)
    module("torchtitan.components.checkpointer", AsyncMode=AsyncMode, CheckpointManager=CheckpointManager, **names)
    module("torchtitan.components.data")
    module("torchtitan.components.data.loader", BaseDataLoader=BaseDataLoader, GrainDataLoader=GrainDataLoader)
    types = {"DatasetBuildContext": DatasetBuildContext, "DatasetIterationPolicy": DatasetIterationPolicy}
    module("torchtitan.components.data.types", **types)
    module("torchtitan.config.override", override=override, derive=derive)
    filesystem = ModuleType("torchtitan.tools.filesystem")
    filesystem.is_remote = lambda path: "://" in str(path)  # type: ignore[attr-defined]
    module("torchtitan.tools", filesystem=filesystem)
    module("torchtitan.tools.logging", logger=logging.getLogger())
    module("torchtitan.tools.utils", GarbageCollection=GarbageCollection)


def main(folder: str, rank: int, world_size: int, num_steps: int, num_shards: int, dies: bool) -> None:
    install()
    import torchtitan_ext as tte
    from torchtitan_ext.errors import StateRefusedError
    from torchtitan_ext.integrations import torchtitan as ours

    os.makedirs(folder, exist_ok=True)
    store = dist.FileStore(f"{folder}/store-{os.environ['TTE_RUN']}", world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    data = GrainDataLoader.Config()
    if num_shards:
        data = ours.elastic_data(data, num_shards=num_shards)
    sizes = {"max_context_length": SEQUENCE, "num_tokens_per_batch": SEQUENCE}
    loader = data.build(dp_rank=rank, dp_world_size=world_size, tokenizer=None, **sizes)
    trainer = Trainer()
    config = ours.elastic_checkpoint(
        CheckpointManager.Config(enable=True, async_mode="async" if num_shards else "disabled")
    )
    options = {"dataloader": loader, "model": torch.nn.Linear(2, 2), "folder": f"{folder}/run"}
    manager = config.build(states={"train_state": trainer}, **options)
    assert isinstance(manager, BaseCheckpointManager)
    assert ours._dp_size(manager.states) == world_size
    try:
        is_loaded = manager.load()
    except StateRefusedError as error:
        print("refused:", error)
        return
    batches = iter(loader)
    for i in range(num_steps):
        trainer.step += 1
        trainer.ntokens_seen += MICROBATCHES * SEQUENCE // world_size
        read = [next(batches)[0]["input"].tolist() for _ in range(MICROBATCHES // world_size)]
        print(json.dumps({"loaded": is_loaded, "step": trainer.step, "read": read}), flush=True)
        if dies and i == num_steps - 1:
            manager.maybe_wait_for_saving()  # the steps before are committed
        if dies and i == num_steps - 1 and rank == 1:
            tte.FileWriter.write_data = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        assert manager.save(trainer.step)
    manager.maybe_wait_for_saving()
    manager.close()
    loader.close()
    print("tokens:", trainer.ntokens_seen, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:6]), sys.argv[6:] == ["die"])
