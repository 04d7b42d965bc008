"""torchtitan 0.3.0's own trainer on CPU with gloo: `torchrun torchtitan_on_cpu.py <arguments of torchtitan.train>`.

The trainer is the released one; what a CPU, gloo and torch 2.13 lack is stood in for here. It expects a tokenizer and
the data set c4_test where torchtitan's own tests have them: `tests/assets` of the working directory.
"""

import types
from typing import Any

import torch
import torch._utils
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

NOTHING: Any = lambda *_, **__: None  # noqa: E731


class CpuModule:
    """torch.cpu, with the calls about memory and devices that the trainer makes of torch.cuda."""

    def __getattr__(self, name: str) -> Any:
        known = {
            "get_device_properties": lambda *_: types.SimpleNamespace(total_memory=8 << 30, name="cpu"),
            "get_device_name": lambda *_: "cpu",
            "device_count": lambda: 8,
            "current_device": lambda: 0,
            "memory_stats": lambda *_: {},
            "memory_allocated": lambda *_: 0,
            "max_memory_allocated": lambda *_: 0,
            "memory_reserved": lambda *_: 0,
            "max_memory_reserved": lambda *_: 0,
            "is_bf16_supported": lambda: True,
        }
        silent = ("set_device", "reset_peak_memory_stats", "empty_cache", "manual_seed_all", "set_sync_debug_mode")
        if name in known or name in silent:
            return known.get(name, NOTHING)
        return getattr(torch.cpu, name)


real_device_module = torch._utils._get_device_module
torch._utils._get_device_available_type = lambda: "cpu"  # type: ignore[attr-defined]
torch._utils._get_available_device_type = lambda: "cpu"
torch._utils._get_device_module = lambda kind=None: (
    CpuModule() if str(kind).startswith("cpu") else real_device_module(kind)
)
torch.distributed.set_timeout = NOTHING  # type: ignore[attr-defined]  # of a newer torch


def masked_attention(q: Any, k: Any, v: Any, *, block_mask: Any, scale: Any, enable_gqa: bool, **_: Any) -> Any:
    """What flex attention computes, by a dense mask: it has no backward on CPU."""
    num_queries, num_keys = q.shape[-2], k.shape[-2]
    query, key = torch.arange(num_queries)[:, None], torch.arange(num_keys)[None, :]
    zero = torch.zeros((), dtype=torch.int64)
    masks = [block_mask.mask_mod(torch.full_like(zero, batch), zero, query, key) for batch in range(q.shape[0])]
    mask = torch.stack([one.expand(num_queries, num_keys) for one in masks])[:, None]
    attend = torch.nn.functional.scaled_dot_product_attention
    return attend(q, k, v, attn_mask=mask, scale=scale, enable_gqa=enable_gqa), None


def set_divide_factor(module: FSDPModule, factor: float) -> None:
    """Gloo has no PREMUL_SUM: a plain sum, then the division."""
    real_divide_factor(module, factor)
    module.set_force_sum_reduction_for_comms(True)


real_divide_factor = FSDPModule.set_gradient_divide_factor
FSDPModule.set_gradient_divide_factor = set_divide_factor  # type: ignore[method-assign]


def with_microbatches(step: Any) -> Any:
    """torchtitan 0.3.0 gives a pipeline its microbatches as lists; torch 2.13 cuts them itself, or takes them below."""

    def step_microbatches(
        schedule: Any, *, arg_mbs: Any, kwarg_mbs: Any, target_mbs: Any, losses: Any, loss_kwargs: Any, **_: Any
    ) -> None:
        stages = schedule._stages if isinstance(schedule, PipelineScheduleMulti) else [schedule._stage]
        for stage in stages:
            stage.has_backward = schedule._has_backward
            stage.clear_runtime_states()
        args = arg_mbs or [()] * schedule._n_microbatches
        schedule._step_microbatches(args, kwarg_mbs, target_mbs, losses, False, loss_kwargs=loss_kwargs)

    return step_microbatches


for schedule_class in (PipelineScheduleSingle, PipelineScheduleMulti):
    schedule_class.step = with_microbatches(schedule_class.step)  # type: ignore[method-assign]

import torchtitan.models.common.attention as attention  # noqa: E402  after the device was settled
from torchtitan.train import main  # noqa: E402

attention.FlexAttention.compiled_flex_attn = staticmethod(masked_attention)

if __name__ == "__main__":
    main()
