# 1 process; stock: not refused
import torch
import torch.distributed.checkpoint as dcp
from preamble import must_refuse

dcp.save({"w": torch.ones(2)}, checkpoint_id="/tmp/partial")
planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
must_refuse(dcp.load, {"misspelt": torch.zeros(2)}, checkpoint_id="/tmp/partial", planner=planner)
