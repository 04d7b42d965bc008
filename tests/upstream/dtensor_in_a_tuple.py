# 2 processes; stock: of another rank
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

mesh = init_device_mesh("cpu", (2,))
mine = torch.full((2,), float(dist.get_rank()))
dcp.save({"pair": (DTensor.from_local(mine, mesh, [Shard(0)]),)}, checkpoint_id="/tmp/tuple")
target = {"pair": (DTensor.from_local(torch.zeros(2), mesh, [Shard(0)]),)}
dcp.load(target, checkpoint_id="/tmp/tuple")
assert torch.equal(target["pair"][0].to_local(), mine), "of another rank"
