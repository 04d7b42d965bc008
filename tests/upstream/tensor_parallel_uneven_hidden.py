# 2 processes; stock: a and b must have same reduction dim
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

mesh = init_device_mesh("cpu", (2,))
model = nn.Sequential(nn.Linear(4, 7), nn.Linear(7, 4))
parallelize_module(model, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
model(torch.zeros(2, 4))
