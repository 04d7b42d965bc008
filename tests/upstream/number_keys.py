# 1 process; stock: {'1': 5}; as with us
import torch.distributed.checkpoint as dcp

dcp.save({"groups": {1: 5}}, checkpoint_id="/tmp/numbers")
loaded = dcp.state_dict_loader._load_state_dict_from_keys(checkpoint_id="/tmp/numbers")["groups"]
assert loaded == {1: 5}, loaded
