# 1 process; stock: not refused
import torch
import torch.distributed.checkpoint as dcp
from preamble import must_refuse

dcp.save({"w": torch.tensor([1.5])}, checkpoint_id="/tmp/cast")
must_refuse(dcp.load, {"w": torch.tensor([0])}, checkpoint_id="/tmp/cast")
