# 2 processes; stock: not refused
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from preamble import must_refuse
from torch.distributed.device_mesh import init_device_mesh

init_device_mesh("cpu", (2,))
state = {"w": torch.zeros(3, dtype=[torch.float32, torch.int64][dist.get_rank()])}
must_refuse(dcp.save, state, checkpoint_id="/tmp/dtypes")
