"""Checkpoints of other libraries, made without these libraries, as their sources make them.

What is written follows DeepSpeed 0.19.8 (``runtime/engine.py``, ``runtime/zero/stage_1_and_2.py``, ``stage3.py``,
``checkpoint/ds_to_universal.py``) and Megatron-Core 0.16.1 (``dist_checkpointing/serialization.py``, where the tensors
are those of stock DCP). In ``tests/clients/test_deepspeed.py`` and ``test_megatron.py`` the libraries write themselves.
"""

import enum
import json
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

PARTS = ("exp_avg", "exp_avg_sq")
_CLASSES = {
    "LossScaler": "deepspeed.runtime.fp16.loss_scaler",
    "DynamicLossScaler": "deepspeed.runtime.fp16.loss_scaler",
    "fragment_address": "deepspeed.utils.tensor_fragment",
    "ZeroStageEnum": "deepspeed.runtime.zero.config",
}


@dataclass
class Trained:
    """What a job of DeepSpeed holds: trained parameters in two groups, buffers, frozen ones, ties."""

    groups: list[dict[str, tuple[int, ...]]] = field(
        default_factory=lambda: [
            {"emb.weight": (7, 5), "a.weight": (3, 5), "cube": (2, 3, 4)},
            {"b": (3,), "one": (1,)},
        ]
    )
    frozen: dict[str, tuple[int, ...]] = field(default_factory=lambda: {"f.weight": (5, 3), "f.bias": (1,)})
    ties: dict[str, str] = field(default_factory=lambda: {"head.weight": "emb.weight"})
    dtype: torch.dtype = torch.bfloat16
    step: Any = field(default_factory=lambda: torch.tensor(2.0))

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(5)
        shapes = {name: shape for group in self.groups for name, shape in group.items()}
        self.values = {
            name: {part: torch.randn(shape, generator=generator) for part in ("fp32", *PARTS)}
            for name, shape in shapes.items()
        }
        self.frozen_values = {
            name: torch.randn(shape, generator=generator).to(self.dtype) for name, shape in self.frozen.items()
        }
        self.buffers = {"norm.mean": torch.arange(4.0) + 0.25, "norm.count": torch.tensor(9)}

    @property
    def module(self) -> dict[str, torch.Tensor]:
        low = {name: of["fp32"].to(self.dtype) for name, of in self.values.items()}
        return {**low, **{name: low[of] for name, of in self.ties.items()}, **self.frozen_values, **self.buffers}

    def expected(self, step: bool = True) -> dict[str, torch.Tensor]:
        """The tensors of the checkpoint by flat key, as the reader shows them."""
        model = {name: of["fp32"] for name, of in self.values.items()}
        model |= {name: model[of] for name, of in self.ties.items()}
        found = {f"model.{name}": value for name, value in {**model, **self.frozen_values, **self.buffers}.items()}
        for name, of in self.values.items():
            found |= {f"optimizer.state.{name}.{part}": of[part] for part in PARTS}
            found |= {f"optimizer.state.{name}.step": torch.tensor(2.0)} if step else {}
        return found


@contextmanager
def names_of_deepspeed() -> Iterator[Any]:
    """Classes of DeepSpeed's names, which a pickle of this process may name meanwhile."""

    @dataclass
    class fragment_address:
        numel: int
        start: int

    made = {
        "LossScaler": type("LossScaler", (), {}),
        "DynamicLossScaler": type("DynamicLossScaler", (), {"__init__": lambda self: vars(self).update(cur_scale=8.0)}),
        "fragment_address": fragment_address,
        "ZeroStageEnum": enum.Enum("ZeroStageEnum", {"optimizer_states": 1, "gradients": 2, "weights": 3}, type=int),
    }
    names = {".".join(module.split(".")[:end]) for module in _CLASSES.values() for end in range(1, 5)}
    modules = {name: types.ModuleType(name) for name in names}
    for name, one in made.items():
        one.__module__, one.__qualname__ = _CLASSES[name], name
        setattr(modules[_CLASSES[name]], name, one)
    kept = {name: sys.modules.get(name) for name in names}
    sys.modules.update(modules)
    try:
        yield types.SimpleNamespace(**made)
    finally:
        for name, module in kept.items():
            sys.modules.pop(name) if module is None else sys.modules.update({name: module})


def _flat(values: Sequence[torch.Tensor], length: int) -> torch.Tensor:
    joined = torch.cat([value.reshape(-1) for value in values])
    return torch.cat([joined, torch.full((length - joined.numel(),), 777.0, dtype=joined.dtype)])


def _param_groups(state: Trained) -> list[dict[str, Any]]:
    return [{"lr": 0.01, "weight_decay": 0.1 * number, "params": [number]} for number in range(len(state.groups))]


def _model_states(state: Trained, num_ranks: int, module: Mapping[str, Any], fragments: Any) -> dict[str, Any]:
    return {
        "module": module,
        "buffer_names": list(state.buffers),
        "optimizer": None,
        "param_shapes": [{name: torch.Size(shape) for name, shape in group.items()} for group in state.groups],
        "frozen_param_shapes": {name: torch.Size(shape) for name, shape in state.frozen.items()},
        "shared_params": dict(state.ties),
        "frozen_param_fragments": fragments,
        "lr_scheduler": {"last_batch_iteration": 1},
        "skipped_steps": 0,
        "global_steps": 2,
        "global_samples": 6,
        "dp_world_size": num_ranks,
        "mp_world_size": 1,
        "ds_config": {"train_micro_batch_size_per_gpu": 1},
        "ds_version": "0.19.8",
        "epoch": 4,
    }


def write_zero_2(path: Path, state: Trained, num_ranks: int, *, stage: int = 2) -> Path:
    """Stages 1 and 2: the groups, flat and padded to two elements per rank, in one partition per rank."""
    path.mkdir(parents=True)
    with names_of_deepspeed() as deepspeed:
        model = _model_states(state, num_ranks, state.module, state.frozen_values)
        torch.save(model, path / "mp_rank_00_model_states.pt")
        for rank in range(num_ranks):
            torch.save(_partitions_2(state, num_ranks, rank, stage, deepspeed), path / optim_name(rank))
    return path


def optim_name(rank: int) -> str:
    return f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


def _partitions_2(state: Trained, num_ranks: int, rank: int, stage: int, deepspeed: Any) -> dict[str, Any]:
    masters, held, mappings, paddings = [], {}, [], []
    for number, group in enumerate(state.groups):
        count = sum(torch.Size(shape).numel() for shape in group.values())
        size = -(-count // (2 * num_ranks)) * 2
        begin = rank * size
        part = {
            name: _flat([state.values[one][name] for one in group], size * num_ranks)[begin : begin + size].clone()
            for name in ("fp32", *PARTS)
        }
        paddings.append(size * num_ranks - count if rank == num_ranks - 1 else 0)
        masters.append(part.pop("fp32")[: size - paddings[-1]])
        held[number] = {"step": state.step, **part}
        mapping, offset = {}, 0
        for name, shape in group.items():
            first, last = max(offset, begin), min(offset + torch.Size(shape).numel(), begin + size)
            if first < last:
                mapping[name] = deepspeed.fragment_address(numel=last - first, start=first - begin)
            offset += torch.Size(shape).numel()
        mappings.append(mapping)
    return {
        "optimizer_state_dict": {
            "loss_scaler": deepspeed.LossScaler(),
            "dynamic_loss_scale": False,
            "overflow": False,
            "clip_grad": 1.0,
            "base_optimizer_state": {"state": held, "param_groups": _param_groups(state)},
            "single_partition_of_fp32_groups": masters,
            "zero_stage": deepspeed.ZeroStageEnum(stage),
            "group_paddings": paddings,
            "param_alignment_paddings": [[0] * len(group) for group in state.groups],
            "partition_count": [num_ranks] * len(state.groups),
            "ds_version": "0.19.8",
            "param_slice_mappings": mappings,
        },
        "ds_config": {},
        "ds_version": "0.19.8",
    }


def _dealt(value: torch.Tensor, num_ranks: int, rank: int) -> torch.Tensor:
    size = -(-value.numel() // num_ranks)
    return _flat([value], size * num_ranks)[rank * size : (rank + 1) * size]


def write_zero_3(path: Path, state: Trained, num_ranks: int) -> Path:
    """Stage 3: each rank has its part of each parameter, one behind the other, and of frozen ones too."""
    path.mkdir(parents=True)
    with names_of_deepspeed() as deepspeed:
        for rank in range(num_ranks):
            module = {name: torch.empty(0, dtype=value.dtype) for name, value in state.module.items()} | state.buffers
            frozen = {name: _dealt(value, num_ranks, rank).clone() for name, value in state.frozen_values.items()}
            model = _model_states(state, num_ranks, module, frozen)
            if rank:
                model["shared_params"] = {}  # only the first rank fills it
            torch.save(model, path / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
            flat = [
                {
                    part: torch.cat([_dealt(state.values[name][part], num_ranks, rank) for name in group])
                    for part in ("fp32", *PARTS)
                }
                for group in state.groups
            ]
            masters = [one.pop("fp32") for one in flat]
            held = {number: {"step": state.step, **one} for number, one in enumerate(flat)}
            optim = {
                "zero_stage": deepspeed.ZeroStageEnum(3),
                "loss_scaler": deepspeed.DynamicLossScaler(),
                "dynamic_loss_scale": False,
                "overflow": False,
                "partition_count": num_ranks,
                "optimizer_state_dict": {"state": held, "param_groups": _param_groups(state)},
                "fp32_flat_groups": masters,
            }
            torch.save(
                {"optimizer_state_dict": optim, "ds_config": {}, "ds_version": "0.19.8"}, path / optim_name(rank)
            )
    return path


def write_universal(path: Path, state: Trained, *, flat: bool = False) -> Path:
    """Whole parameters in a folder each; flat ones, without their step, where stage 3 was the source."""
    for name, of_name in state.values.items():
        (path / "zero" / name).mkdir(parents=True)
        for part, value in of_name.items():
            saved = value.reshape(-1) if flat else {"cat_dim": 0, "param": value}
            torch.save(saved, path / "zero" / name / f"{part}.pt")
        if not flat:
            torch.save(state.step, path / "zero" / name / "step.pt")
    for name, value in state.module.items():
        if name not in state.values and not flat:  # newer versions repeat them, rounded as the module is
            (path / "zero" / name).mkdir()
            torch.save({"param": value}, path / "zero" / name / "fp32.pt")
    torch.save({"param_groups": _param_groups(state), "clip_grad": 1.0}, path / "zero" / "optimizer_state.pt")
    torch.save(_model_states(state, 1, state.module, state.frozen_values), path / "mp_rank_00_model_states.pt")
    return path


def write_torch_dist(path: Path, tensors: Mapping[str, torch.Tensor]) -> Path:
    """What Megatron-Core writes: tensors and sharded objects in DCP, without a nested form, and two files beside it.
    Called by all ranks, with DTensors."""
    objects = {f"rng_state/shard_{number}_2": [{"seed": number}] for number in range(2)}
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
    dcp.save({**tensors, **objects}, checkpoint_id=path, planner=planner)
    config = {"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch"}
    (path / "metadata.json").write_text(json.dumps({**config, "common_backend_version": 1}))
    common = {"iteration": 7, "args": {"lr": 0.1}, "optimizer": {"param_groups": [{"lr": 0.1}]}}
    torch.save(common, path / "common.pt")
    return path
