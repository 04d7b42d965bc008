"""Syncs of an accelerator's tensors: on the device "late" (``late_device.cpp``), whose streams run behind the host."""

from collections.abc import Callable
from typing import Any

import late
import torch
from states import DTYPES, bits, random_tensor
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import torchtitan_ext as tte


def test_modules_are_synced_and_compared(run_late_world: Callable[..., Any]) -> None:
    first, second = run_late_world(2, sync_module)
    assert first == second


def sync_module(rank: int, world_size: int) -> list[bytes]:
    late.set_delay(0.005)
    torch.manual_seed(rank)
    mesh = init_device_mesh("late", (world_size,))
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3, dtype=torch.bfloat16)).to("late")
    names = {difference.fqn for difference in tte.check_replicas(model, mesh=mesh)}
    assert names == {"0.weight", "0.bias", "2.weight", "2.bias"}
    tte.sync_module_states(model, mesh=mesh)
    assert not tte.check_replicas(model, mesh=mesh)
    late.set_delay(0.0015)
    return [bits(value.cpu()).numpy().tobytes() for value in model.state_dict().values()]


def test_tensors_of_every_dtype_and_stride(run_late_world: Callable[..., Any]) -> None:
    first, second = run_late_world(2, broadcast)
    assert first == second


def broadcast(rank: int, world_size: int) -> list[bytes]:
    late.set_delay(0.002)
    tensors = [random_tensor((9, 70), dtype, seed=rank).to("late") for dtype in DTYPES]
    tensors += [tensor.clone().t() for tensor in tensors]
    tte.sync.broadcast_tensors(tensors, bucket_bytes=1 << 10)
    late.set_delay(0.0015)
    return [bits(value.cpu()).numpy().tobytes() for value in tensors]
