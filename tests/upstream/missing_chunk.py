# 2 processes; stock: not refused
import pickle

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from preamble import must_refuse
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

mesh = init_device_mesh("cpu", (2,))
dcp.save({"w": distribute_tensor(torch.ones(4), mesh, [Shard(0)])}, checkpoint_id="/tmp/chunk")
if dist.get_rank() == 0:
    with open("/tmp/chunk/.metadata", "rb") as file:
        metadata = pickle.load(file)
    del metadata.state_dict_metadata["w"].chunks[1]
    with open("/tmp/chunk/.metadata", "wb") as file:
        pickle.dump(metadata, file)
dist.barrier()
must_refuse(dcp.load, {"w": torch.zeros(4)}, checkpoint_id="/tmp/chunk")
