# 1 process; stock: not conjugated; as with us
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh

init_device_mesh("cpu", (1,))
z = torch.tensor([1 + 2j]).conj()
dcp.async_save({"z": z}, checkpoint_id="/tmp/conjugated").result()
loaded = {"z": torch.zeros(1, dtype=torch.complex64)}
dcp.load(loaded, checkpoint_id="/tmp/conjugated")
assert torch.equal(loaded["z"], z), "not conjugated"
