# 2 processes; stock: not refused
import torch
import torch.distributed as dist
from preamble import must_refuse
from torch.distributed.device_mesh import init_device_mesh

init_device_mesh("cpu", (2,))
shape = [(2, 3), (3, 2)][dist.get_rank()]
must_refuse(dist._broadcast_coalesced, dist.group.WORLD, [torch.zeros(shape)], 1024, 0)
