# 2 processes; stock: AssertionError
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

distribute_tensor(torch.arange(5), init_device_mesh("cpu", (2,)), [_StridedShard(0, split_factor=2)])
