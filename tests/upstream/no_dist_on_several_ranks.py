# 2 processes; stock: not refused
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from preamble import must_refuse
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

mesh = init_device_mesh("cpu", (2,))
path = f"/tmp/no_dist_{dist.get_rank()}"
must_refuse(dcp.save, {"w": distribute_tensor(torch.ones(4), mesh, [Shard(0)])}, checkpoint_id=path, no_dist=True)
