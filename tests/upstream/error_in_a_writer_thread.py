# 1 process; stock: KeyError: MetadataIndex
import os

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

state = {"a": torch.ones(2), "b": torch.ones(2)}
for attempt in range(5):  # which thread takes the first file is a matter of luck
    path = f"/tmp/threads{attempt}"
    os.makedirs(f"{path}/__0_0.distcp")  # this file cannot be written
    try:
        dcp.save(state, storage_writer=dcp.FileSystemWriter(path, thread_count=2))
    except CheckpointException:
        continue
    dcp.load(state, checkpoint_id=path)
