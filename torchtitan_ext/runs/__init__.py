"""A run: what a trainer does with its checkpoints, step after step."""

from torchtitan_ext.ranks.signal_inbox import keep_worker
from torchtitan_ext.runs.checkpoint_manager import CheckpointManager

__all__ = ["CheckpointManager", "keep_worker"]
