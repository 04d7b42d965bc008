"""A run: what a trainer does with its checkpoints, step after step."""

from torchtitan_ext.ranks.signal_inbox import keep_worker
from torchtitan_ext.runs.checkpoint_manager import CheckpointManager
from torchtitan_ext.storage.runs.retention import Keep

__all__ = ["CheckpointManager", "Keep", "keep_worker"]
