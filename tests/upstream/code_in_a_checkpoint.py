# 1 process; stock: it ran
import os
import pickle

import torch
import torch.distributed.checkpoint as dcp
from preamble import must_refuse


class Code:
    def __reduce__(self):
        return os.mkdir, ("/tmp/it_ran",)


dcp.save({"w": torch.ones(1)}, checkpoint_id="/tmp/code")
with open("/tmp/code/.metadata", "wb") as file:
    pickle.dump(Code(), file)
must_refuse(dcp.load, {"w": torch.zeros(1)}, checkpoint_id="/tmp/code")
assert not os.path.exists("/tmp/it_ran"), "it ran"
