"""A job of the real DeepSpeed on the CPU: trains two steps, saves, and notes what each tensor is as a whole.

    torchrun --nproc-per-node 3 deepspeed_job.py STAGE DTYPE DIRECTORY

Writes ``saved``, in DeepSpeed's form, and ``expected.pt``: the tensors by the flat keys of our reader.
"""

import os
import sys
from pathlib import Path

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch import nn


class Model(nn.Module):
    """Tied weights, a frozen layer, a buffer, sizes that no number of ranks shares evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.first, self.frozen = nn.Embedding(7, 5), nn.Linear(5, 3), nn.Linear(3, 3)
        self.last, self.head = nn.Linear(3, 5, bias=False), nn.Linear(5, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.tensor([1.5]))
        self.register_buffer("shift", torch.arange(5.0) + 0.5)
        for parameter in self.frozen.parameters():
            parameter.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.last(self.frozen(self.first(self.embedding(tokens)))) * self.scale
        return self.head(hidden + self.shift.to(hidden.dtype)).float().square().mean()


def main(stage: int, dtype: str, directory: Path) -> None:
    torch.manual_seed(0)
    model = Model()
    frozen = {name: value.detach().clone() for name, value in model.named_parameters() if not value.requires_grad}
    trained = [value for value in model.parameters() if value.requires_grad]
    groups = [
        {"params": [value for value in trained if value.dim() > 1], "weight_decay": 0.1},
        {"params": [value for value in trained if value.dim() == 1], "weight_decay": 0.0},
    ]
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3}},
    }
    if dtype != "fp32":
        config[dtype] = {"enabled": True}
    engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=groups, config=config)
    for _ in range(2):
        engine.backward(engine(torch.tensor([[1, 2, 3 + dist.get_rank()]])))
        engine.step()
    # ds_to_universal.py asks for it.
    engine.save_checkpoint(directory / "saved", client_state={"epoch": 4, "universal_checkpoint_info": {}})
    expected = {"model.shift": model.shift.detach().clone()}
    low = {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
    expected |= {f"model.{name}": value.to(low) for name, value in frozen.items()}
    for name, value in model.named_parameters():
        if value.requires_grad:
            expected[f"model.{name}"] = safe_get_full_fp32_param(value).clone().view(-1)
            # Of the other stages DeepSpeed does not say it; its ds_to_universal.py does.
            for part in ("exp_avg", "exp_avg_sq") if stage == 3 else ():
                full = safe_get_full_optimizer_state(value, part)
                expected[f"optimizer.state.{name}.{part}"] = full.clone().view(-1)
    expected["model.head.weight"] = expected["model.embedding.weight"]
    if dist.get_rank() == 0:
        torch.save(expected, directory / "expected.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
