# 1 process; stock: a BaseException
from torch.distributed.checkpoint.api import CheckpointException

assert issubclass(CheckpointException, Exception), "a BaseException"
