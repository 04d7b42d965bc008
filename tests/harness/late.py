"""The device "late": PyTorch's PrivateUse1 in CPU memory, with streams that run late (``late_device.cpp``).

A process has one accelerator: load it in processes of its own, as the fixture ``run_late_world`` does.
"""

import functools
import os
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from missing_tools import skip_or_fail

from torchtitan_ext import ops

ROOT = Path(__file__).resolve().parents[2]
BACKENDS = "cpu:gloo,late:gloo"
FRESH_BYTE = 0xA5
"""What memory of the device and pinned memory is filled with when it is made."""


def library() -> Path:
    """What ``make`` has built of ``late_device.cpp``, beside the torch of this environment."""
    path = Path(os.environ.get("TTE_LATE_DEVICE", ROOT / "build" / "dev" / "late_device.so"))
    if not path.exists():
        skip_or_fail(f"{path}, the device `late`, is not there: `make build/dev/late_device.so` builds it")
    return path


def load() -> None:
    """Makes "late" the accelerator of this process."""
    if "late" in vars(torch):
        return
    torch.ops.load_library(library())
    torch.utils.rename_privateuse1_backend("late")
    torch._register_device_module("late", _device_module())
    torch.utils.generate_methods_for_privateuse1_backend(unsupported_dtype=[])


def set_delay(seconds: float) -> None:
    """How long a stream sleeps before each copy and kernel; 1.5 ms unless set."""
    torch.ops.late.set_delay(int(seconds * 1e6))


@contextmanager
def held() -> Iterator[None]:
    """Within the block a stream makes its copies and kernels only while somebody waits for it."""
    torch.ops.late.hold(True)
    try:
        yield
    finally:
        torch.ops.late.hold(False)


@dataclass(frozen=True)
class Copies:
    to_host: int
    to_device: int
    within_device: int


def count_copies() -> Copies:
    """The copies of this process since the last call, those of the CPU fallback and of ``item()`` included."""
    return Copies(*torch.ops.late.count_copies())


def count_bytes() -> tuple[int, int]:
    """Bytes of the device in use, and the most of them since the last call."""
    used, peak = torch.ops.late.count_bytes()
    return used, peak


def _device_module() -> types.ModuleType:
    """What PyTorch looks for in ``torch.late``: DTensor, FSDP2 and the checkpoint code ask it."""
    module = types.ModuleType("torch.late")
    module.is_available = lambda: True
    module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module.device_count = lambda: 1
    module.current_device = lambda: 0
    module.set_device = lambda device: None
    module.synchronize = lambda device=None: torch.accelerator.synchronize()
    module.current_stream = lambda device=None: torch.accelerator.current_stream()
    module.set_stream = torch.accelerator.set_stream
    module.stream = lambda stream: stream
    module.Stream = lambda device=None, priority=0: torch.Stream("late", priority=priority)
    module.Event = lambda **options: torch.Event("late", **options)
    module.manual_seed_all = lambda seed: None
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    return module


class HostExchange:
    """As ``ops.PlannedExchange``, for tensors of the device, which gloo moves by way of host memory."""

    def __init__(self, sources: list[torch.Tensor], targets: list[torch.Tensor], *tables: Any, **options: Any) -> None:
        assert {tensor.device.type for tensor in (*sources, *targets)} <= {"late"}
        self.arguments = sources, targets, tables, options

    def run(self, **options: Any) -> None:
        sources, targets, tables, others = self.arguments
        filled = [tensor.cpu() for tensor in targets]
        _PlannedExchange([tensor.cpu() for tensor in sources], filled, *tables, **others).run(**options)
        for tensor, values in zip(targets, filled, strict=True):
            tensor.copy_(values)


_PlannedExchange = ops.PlannedExchange


def exchanging_over_hosts(work: Callable[..., Any]) -> Callable[..., Any]:
    """A rank's work, in which transfers of tensors of the device go over host memory."""

    @functools.wraps(work)
    def patched(*arguments: Any) -> Any:
        with mock.patch.object(ops, "PlannedExchange", HostExchange):
            return work(*arguments)

    return patched
