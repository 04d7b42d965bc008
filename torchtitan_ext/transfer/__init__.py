"""Moves state from layout to layout through the memory of ranks, without files.

A transfer is a load whose storage is other ranks' memory: the same key tables, the same agreement on layouts, the same
refusals. The walk of a call:

    state_dicts | dtensors -> endpoint (each rank's two sides) -> planning (the coordinator)
        -> plan (kept, runs each step) -> ops.exchange_runs_

``key_sources`` says of which keys a transform makes others on the way.
"""

from torchtitan_ext.transfer.dtensors import redistribute
from torchtitan_ext.transfer.plan import TransferPlan, TransferResult
from torchtitan_ext.transfer.state_dicts import plan_reshard, reshard

__all__ = [
    "TransferPlan",
    "TransferResult",
    "plan_reshard",
    "redistribute",
    "reshard",
]
