"""What changed, and nothing else: exact deltas between two versions of a state, on any layout.

    Snapshot -> changes -> TransferPlan.run(changes=)     to other ranks, within a job or between two
                        -> save -> file -> load -> apply  onto any layout

An element is known by its position in the row-major order of its global tensor, so changes of one layout are changes of
any other. Nothing is written into a target that is not the base of the changes.
"""

from torchtitan_ext.delta.application import DeltaResult, apply
from torchtitan_ext.delta.files import load, save
from torchtitan_ext.delta.saved_changes import SavedChanges
from torchtitan_ext.delta.snapshot import Snapshot
from torchtitan_ext.transfer.changed.changes import Changes

__all__ = ["Changes", "DeltaResult", "SavedChanges", "Snapshot", "apply", "load", "save"]
