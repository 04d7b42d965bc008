# 1 process; stock: not refused
import pickle

import torch
import torch.distributed.checkpoint as dcp
from preamble import must_refuse

dcp.save({"w": torch.ones(1)}, checkpoint_id="/tmp/mine")
dcp.save({"w": torch.zeros(1)}, checkpoint_id="/tmp/yours")
with open("/tmp/mine/.metadata", "rb") as file:
    metadata = pickle.load(file)
for entry in metadata.storage_data.values():
    entry.relative_path = "../yours/" + entry.relative_path
with open("/tmp/mine/.metadata", "wb") as file:
    pickle.dump(metadata, file)
must_refuse(dcp.load, {"w": torch.ones(1)}, checkpoint_id="/tmp/mine")
