"""The ranks that save or load a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class World:
    """The ranks that save or load a checkpoint.

    Attributes:
        size: How many; 0 where a checkpoint does not say.
        mesh: Size of each named mesh axis that its tensors lie on, for example ``{"dp_shard": 4, "tp": 2}``.
    """

    size: int
    mesh: Mapping[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        if not self.size:
            return "an unknown number of ranks"
        axes = " x ".join(f"{name} {size}" for name, size in self.mesh.items())
        ranks = f"{self.size} rank{'s' if self.size > 1 else ''}"
        return f"{ranks} ({axes})" if axes else ranks

    def record(self) -> dict[str, object]:
        """What a save writes of its world."""
        return {"size": self.size, "mesh": dict(self.mesh)}
