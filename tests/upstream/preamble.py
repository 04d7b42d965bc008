"""What several of these programs use: a model under FSDP2 over TP, and a call that must raise."""

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module


def fsdp_over_tp(rows: int) -> nn.Module:
    mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(3, rows, bias=False))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
    return fully_shard(model, mesh=mesh["dp"])


def must_refuse(function: Callable[..., Any], *args: Any, **options: Any) -> None:
    try:
        function(*args, **options)
    except (Exception, CheckpointException):
        return
    raise AssertionError("not refused")
