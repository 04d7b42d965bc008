# 1 process; stock: torch.float32
import torch
import torch.distributed.checkpoint as dcp

for dtype in (torch.float32, torch.bfloat16):
    planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
    dcp.save({"w": torch.ones(2, dtype=dtype)}, checkpoint_id=f"/tmp/cached_{dtype}", planner=planner)
metadata = dcp.FileSystemReader(f"/tmp/cached_{dtype}").read_metadata()
assert metadata.state_dict_metadata["w"].properties.dtype == dtype, metadata.state_dict_metadata["w"].properties.dtype
