"""The phases of a transfer: those of a save or load, with an error of their own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from torchtitan_ext.checkpoint.operation.phases import Phases
from torchtitan_ext.errors import CheckpointFailedError, TransferFailedError


@contextmanager
def transfer_phases(group: dist.ProcessGroup | None, timeout_seconds: float) -> Iterator[Phases]:
    """Phases over a group. What would be a CheckpointFailedError is a TransferFailedError."""
    try:
        with Phases("reshard", group, timeout_seconds=timeout_seconds) as phases:
            yield phases
    except CheckpointFailedError as error:
        raise TransferFailedError(error.operation, error.failures, error.undefined, error.step) from None
