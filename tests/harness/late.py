"""The device "late": PyTorch's PrivateUse1 in CPU memory, with streams that run late (``late_device.cpp``).

A process has one accelerator: load it in processes of its own, as the fixture ``run_late_world`` does.
"""

import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
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

SOURCE = Path(__file__).with_name("late_device.cpp")
BACKENDS = "cpu:gloo,late:gloo"
COMPILER = os.environ.get("CXX", "c++")
FRESH_BYTE = 0xA5
"""What memory of the device and pinned memory is filled with when it is made."""


def skip_without_compiler() -> None:
    if shutil.which(COMPILER) is None:
        skip_or_fail("no C++ compiler, which the device `late` needs")


def build() -> Path:
    """The compiled library; made once for a source, a torch and a user of this machine."""
    root = Path(torch.__file__).parent
    includes = [f"-isystem{root / 'include'}", f"-isystem{root / 'include/torch/csrc/api/include'}"]
    libraries = [f"-L{root / 'lib'}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{root / 'lib'}"]
    command = [COMPILER, "-std=c++20", "-O1", "-shared", "-fPIC", *includes, str(SOURCE), *libraries]
    digest = hashlib.sha256(f"{torch.__version__} {command}".encode() + SOURCE.read_bytes()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"tte_late_{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    library = folder / f"late_{digest}.so"
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            made = library.with_suffix(".new")
            subprocess.run([*command, "-o", str(made)], check=True)
            made.rename(library)
    return library


def load() -> None:
    """Makes "late" the accelerator of this process."""
    if "late" in vars(torch):
        return
    torch.ops.load_library(build())
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
