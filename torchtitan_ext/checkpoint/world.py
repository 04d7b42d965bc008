"""The ranks that save or load a checkpoint, and how a checkpoint records those that saved it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch.distributed.checkpoint.metadata import Metadata

from torchtitan_ext.storage.saved_metadata import WORLD_KEY as WORLD_KEY
from torchtitan_ext.storage.saved_metadata import recorded_world


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


def world_of(meshes: Sequence[tuple[Sequence[int], Sequence[str] | None]], held: Sequence[Hashable]) -> World:
    """The world of ranks that hold tensors on these meshes, with an axis ``pp`` for the stages of a pipeline.

    A stage's tensors lie on a mesh of its own, which does not know of the others: stages are told from the ranks, where
    these hold different keys in groups as large as the mesh. Groups of experts that hold keys of their own in the same
    way, and none that are everybody's, look alike.

    Args:
        meshes: Shape and axis names of each; those of all stages are one.
        held: Per rank what stands for the keys that it holds on meshes, equal for equal keys.

    Example:
        >>> str(world_of([((4,), ("dp",))], ["stage 0"] * 4 + ["stage 1"] * 4))
        '8 ranks (pp 2 x dp 4)'
    """
    axes = named_axes((names, shape) for shape, names in meshes)
    stages = Counter(held)
    largest = max((math.prod(shape) for shape, _ in meshes), default=0)
    if len(stages) > 1 and set(stages.values()) == {largest} and "pp" not in axes:
        axes = {"pp": len(stages), **axes}
    return World(len(held), axes)


def world_record(world: World) -> dict[str, object]:
    """What a save writes of its world."""
    return {"size": world.size, "mesh": dict(world.mesh)}


def saved_world(metadata: Metadata) -> World:
    """The world that saved a checkpoint; of size 0 where stock DCP wrote it, which does not say, or it is no world."""
    recorded = recorded_world(metadata.planner_data)
    return World(0) if recorded is None else World(*recorded)


def named_axes(meshes: Iterable[tuple[Sequence[str] | None, Sequence[int]]]) -> dict[str, int]:
    """Size of each axis by name; where meshes share a name that of the mesh with more axes counts.

    Args:
        meshes: Axis names and shape of each.
    """
    axes: dict[str, int] = {}
    for names, shape in sorted(meshes, key=lambda mesh: -len(mesh[1])):
        for name, size in zip(names or (), shape, strict=False):
            axes.setdefault(name, size)
    return axes
