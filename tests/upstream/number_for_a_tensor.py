# 1 process; stock: not refused
import torch
import torch.distributed.checkpoint as dcp
from preamble import must_refuse

dcp.save({"w": 3}, checkpoint_id="/tmp/number")
must_refuse(dcp.load, {"w": torch.zeros(2)}, checkpoint_id="/tmp/number")
