"""The ranks that save or load a checkpoint, and how a checkpoint records those that saved it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch.distributed.checkpoint.metadata import Metadata

from torchtitan_ext.checkpoint.key_table import KeyTable, TensorEntry


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


WORLD_KEY = "torchtitan_ext.world"
"""Where a save's metadata says which world wrote it: in ``planner_data``, which readers look up by key only."""


def world_record(tables: Sequence[KeyTable]) -> dict[str, object]:
    """What a save writes of its world."""
    return {"size": len(tables), "mesh": dict(mesh_axes(tables))}


def saved_world(metadata: Metadata) -> World:
    """The world that saved a checkpoint; of size 0 where stock DCP wrote it, which does not say."""
    record = (metadata.planner_data or {}).get(WORLD_KEY) if isinstance(metadata.planner_data, dict) else None
    return World(record["size"], record["mesh"]) if record else World(0)


def mesh_axes(tables: Sequence[KeyTable]) -> dict[str, int]:
    """Size of each named axis of the meshes that the tensors of all ranks lie on."""
    meshes = {
        entry.report.mesh: None
        for table in tables
        for entry in table.entries.values()
        if isinstance(entry, TensorEntry) and entry.report.mesh is not None
    }
    return named_axes((mesh.dim_names, mesh.shape) for mesh in meshes)


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
