# 1 process; stock: half of a state
import os

import torch
import torch.distributed.checkpoint as dcp
from preamble import must_refuse

dcp.save({"a": torch.ones(2), "b": torch.ones(1000)}, checkpoint_id="/tmp/half")
os.truncate("/tmp/half/__0_0.distcp", os.path.getsize("/tmp/half/__0_0.distcp") - 3000)
state = {"a": torch.zeros(2), "b": torch.zeros(1000)}
must_refuse(dcp.load, state, checkpoint_id="/tmp/half")
assert not state["a"].any(), "half of a state"
