# 4 processes; stock: overlapping chunks
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

mesh = init_device_mesh("cpu", (2, 2))
placements = [Shard(0), _StridedShard(0, split_factor=2)]
w = DTensor.from_local(torch.zeros(4), mesh, placements, run_check=False)
dcp.save({"w": w}, checkpoint_id="/tmp/strided_save")
