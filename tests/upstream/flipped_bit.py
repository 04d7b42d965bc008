# 1 process; stock: not refused
import torch
import torch.distributed.checkpoint as dcp
from preamble import must_refuse

dcp.save({"w": torch.ones(1000)}, checkpoint_id="/tmp/bit")
with open("/tmp/bit/__0_0.distcp", "r+b") as file:
    place = file.read().index(torch.ones(1000).numpy().tobytes()) + 2000
    file.seek(place)
    file.write(b"\x01")
must_refuse(dcp.load, {"w": torch.zeros(1000)}, checkpoint_id="/tmp/bit")
