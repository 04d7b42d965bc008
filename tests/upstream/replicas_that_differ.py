# 2 processes; stock: not refused
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from preamble import must_refuse
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

mesh = init_device_mesh("cpu", (2,))
w = DTensor.from_local(torch.full((3,), float(dist.get_rank())), mesh, [Replicate()], run_check=False)
must_refuse(dcp.save, {"w": w}, checkpoint_id="/tmp/replicas")
