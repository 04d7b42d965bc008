# 4 processes; stock: Expected cond to be True
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

mesh = init_device_mesh("cpu", (2, 2))
whole = torch.arange(12)
row, column = divmod(dist.get_rank(), 2)
local = whole.view(3, 2, 2)[:, row].flatten().view(2, 3)[column]
w = DTensor.from_local(local, mesh, [_StridedShard(0, split_factor=3), Shard(0)], run_check=False)
assert torch.equal(w.full_tensor(), whole), "other rows"
