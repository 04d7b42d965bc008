# 2 processes; stock: of two ranks
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh

mesh = init_device_mesh("cpu", (2,))
mine = {f"word{i}": f"of rank {dist.get_rank()}" for i in range(8)}
try:
    dcp.save({"rng": mine}, checkpoint_id="/tmp/objects")
except CheckpointException:
    raise SystemExit from None  # refused: as good
loaded = {"rng": dict(mine)}
dcp.load(loaded, checkpoint_id="/tmp/objects")
assert len(set(loaded["rng"].values())) == 1, "of two ranks"
