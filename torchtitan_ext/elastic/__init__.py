"""Components that cross a change of world size: policies, data loader, LR scheduler, RNG."""

from torchtitan_ext.elastic.component import Reshardable, Resharded, World, reshard_state

__all__ = ["Reshardable", "Resharded", "World", "reshard_state"]
