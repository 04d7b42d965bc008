"""Stand-ins for the parts of torchtitan's main (August 2026) that ``elastic_checkpoint`` meets: same names, same calls.

    python torchtitan_main.py FOLDER RANK WORLD_SIZE NUM_STEPS

A run on a data loader of main's shape: goes on from the latest step there is, trains, saves. Prints the step and what
the data loader has read, or why it was refused.
"""

import logging
import re
import sys
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import torch
import torch.distributed as dist


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


class CheckpointManager:
    @dataclass(kw_only=True, slots=True)
    class Config:
        keep_latest_k: int = 0
        exclude_from_loading: list[str] = field(default_factory=list)

    def __init__(self, config: Config, *, states: dict[str, Any], folder: str) -> None:
        self.enable, self.states, self.folder = True, states, folder
        self.keep_latest_k, self.exclude_from_loading = config.keep_latest_k, config.exclude_from_loading
        self.async_mode, self.sd_adapter, self.pg = AsyncMode.DISABLED, None, None
        self.stager = self.save_future = None

    def _flat_states(self) -> dict[str, Any]:
        return {**{k: v for k, v in self.states.items() if k != "model"}, **self.states["model"].state_dict()}

    def _find_load_step(self, folder: str = "") -> int:
        steps = [re.fullmatch(r"step-(\d+)", path.parent.name) for path in Path(folder).glob("step-*/.metadata")]
        return max((int(step[1]) for step in steps if step), default=-1)

    def _create_checkpoint_id(self, step: int, folder: str = "") -> str:
        return str(Path(folder or self.folder, f"step-{step}"))

    def _should_purge(self) -> bool:
        return self.keep_latest_k > 0 and dist.get_rank() == 0

    def _load(self, step: int = -1) -> bool:
        step = self._find_load_step(self.folder) if step == -1 else step
        if step == -1:
            return False
        self.dcp_load(self._flat_states(), self._create_checkpoint_id(step), from_hf=False, from_quantized=False)
        return True

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        self.dcp_save(
            self._flat_states(),
            self._create_checkpoint_id(curr_step),
            AsyncMode.DISABLED,
            enable_garbage_collection=True,
        )
        self._purge_stale_checkpoints()
        return True

    def _purge_stale_checkpoints(self) -> None:
        raise AssertionError("ours is in its place")


class BaseDataLoader:
    pass


class GrainDataLoader(BaseDataLoader):
    """Its state is that of main's; its data are numbers."""

    def __init__(self, dp_rank: int, dp_world_size: int) -> None:
        self._dp_world_size = dp_world_size
        self._rank_id = f"dp_rank_{dp_rank}"
        self.read: list[int] = []

    def state_dict(self) -> dict[str, Any]:
        return {"version": 1, "dp_world_size": self._dp_world_size, self._rank_id: {"read": list(self.read)}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict:
            assert state_dict["dp_world_size"] == self._dp_world_size
            self.read = list(state_dict[self._rank_id]["read"])


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
    return target(keep_latest_k=config.keep_latest_k, exclude_from_loading=config.exclude_from_loading, **options)


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
    module("torchtitan.config.override", override=override, derive=derive)
    filesystem = ModuleType("torchtitan.tools.filesystem")
    filesystem.is_remote = lambda path: "://" in str(path)  # type: ignore[attr-defined]
    module("torchtitan.tools", filesystem=filesystem)
    module("torchtitan.tools.logging", logger=logging.getLogger())
    module("torchtitan.tools.utils", GarbageCollection=GarbageCollection)


def main(folder: str, rank: int, world_size: int, num_steps: int) -> None:
    install()
    from torchtitan_ext.errors import StateRefusedError
    from torchtitan_ext.integrations import torchtitan as ours

    store = dist.FileStore(f"{folder}/store-{world_size}-{num_steps}", world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    trainer, loader = Trainer(), GrainDataLoader(rank, world_size)
    model = torch.nn.Linear(2, 2)
    states = {"train_state": trainer, "model": ModelWrapper(model), "dataloader": loader}
    config = ours.elastic_checkpoint(CheckpointManager.Config())
    manager = ours.ElasticCheckpointManager(config, states=states, folder=f"{folder}/run")
    assert ours._dp_size(states) == world_size
    try:
        ours.elastic_data  # noqa: B018
    except ImportError as error:
        print("elastic_data:", error)
    try:
        is_loaded = manager._load()
    except StateRefusedError as error:
        print("refused:", error)
        return
    for _ in range(num_steps):
        trainer.step += 1
        trainer.ntokens_seen += 10
        loader.read.append(100 * rank + trainer.step)
    assert manager._save(trainer.step)
    print("ran:", is_loaded, trainer.step, trainer.ntokens_seen, loader.read)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
