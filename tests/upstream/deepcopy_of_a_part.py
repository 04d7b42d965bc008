# 1 process; stock: invalid python storage
import copy

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

copy.deepcopy(DTensor.from_local(torch.arange(4)[2:], init_device_mesh("cpu", (1,)), [Shard(0)]))
