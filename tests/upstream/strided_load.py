# 2 processes; stock: other rows
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard

mesh = init_device_mesh("cpu", (2,))
whole = torch.arange(12)
dcp.save({"w": whole}, checkpoint_id="/tmp/strided_load")
w = DTensor.from_local(torch.zeros(6, dtype=torch.int64), mesh, [_StridedShard(0, split_factor=3)], run_check=False)
dcp.load({"w": w}, checkpoint_id="/tmp/strided_load")
assert torch.equal(w.to_local(), whole.view(3, 2, 2)[:, dist.get_rank()].flatten()), "other rows"
