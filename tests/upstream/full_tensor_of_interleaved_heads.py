# 4 processes; stock: other rows
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard

mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
qkv = torch.arange(12.0)
mine = qkv.view(3, 2, 2)[:, mesh["tp"].get_local_rank()].flatten()
model = nn.Module()
model.w = nn.Parameter(DTensor.from_local(mine, mesh["tp"], [_StridedShard(0, split_factor=3)], run_check=False))
assert torch.equal(fully_shard(model, mesh=mesh["dp"]).w.full_tensor(), qkv), "other rows"
