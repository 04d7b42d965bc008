"""accelerate's FSDP2 on gloo processes: without GPUs it chooses DDP, whatever its plugin says."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from accelerate import PartialState
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedType


@contextmanager
def fsdp_on_cpu() -> Iterator[None]:
    """Lets an ``Accelerator`` or ``Trainer`` made inside take gloo ranks for GPUs; their state lives in modules."""
    # accelerate chooses a number of threads where none is set.
    with mock.patch.dict(os.environ, OMP_NUM_THREADS="1"):
        take_ranks_for_gpus()
        try:
            yield
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()


def take_ranks_for_gpus() -> None:
    """``TrainingArguments`` undoes it."""
    PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU
