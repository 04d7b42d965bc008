"""Plans which boxes of a checkpoint's tensors each rank of another mesh writes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata

from torchtitan_ext.checkpoint.tables.component import WORLD_KEY, World, world_record
from torchtitan_ext.checkpoint.tables.key_table import Box
from torchtitan_ext.offline.boxes import Piece
from torchtitan_ext.offline.placement_rules import Placed, PlacementRules
from torchtitan_ext.offline.selection import SelectedKeys


@dataclass(frozen=True)
class RankBox:
    """A chunk that a rank writes: number ``position`` in the chunk list of the new tensor ``key``.

    ``piece`` is its box under the tensor's name in the source.
    """

    key: str
    position: int
    piece: Piece


@dataclass(frozen=True)
class _Cut:
    """How tensors of one shape are cut, the ranks that hold each box, and the boxes that each rank holds."""

    boxes: list[Box]
    holders: list[list[int]]
    chunks: list[ChunkStorageMetadata]
    boxes_of_rank: Mapping[int, list[int]]


class MeshPlan:
    """The boxes and values that each rank of a mesh writes.

    If several ranks hold a box, they take turns from tensor to tensor, so that their files grow alike.

    Args:
        rules: Place tensors on the mesh. Without rules one rank writes everything.

    Attributes:
        assumed: Tensors for which nothing says how ``tp`` cuts them.

    Raises:
        LayoutError: A rule applies to none of the tensors.
    """

    def __init__(self, keys: SelectedKeys, rules: PlacementRules | None) -> None:
        self.keys = keys
        self.rules = rules
        self.num_ranks = 1 if rules is None else len(rules.mesh.ranks)
        if rules is not None:
            rules.check_used({key: entry.size for key, entry in keys.tensors.items()})
        self.assumed: list[str] = []
        cuts: dict[tuple[tuple[int, ...], Placed], _Cut] = {}
        self._cuts: dict[str, _Cut] = {}
        for key, entry in keys.tensors.items():
            shape = tuple(entry.size)
            placed = Placed(None, ()) if rules is None else rules.place(key, shape, keys.reader.chunk_list(entry))
            self.assumed += [key] if placed.is_assumed else []
            alike = (shape, placed)
            if alike not in cuts:
                cuts[alike] = self._cut(shape, placed)
            self._cuts[key] = cuts[alike]

    def boxes_of(self, rank: int) -> Iterator[RankBox]:
        """The chunks of tensors that a rank writes."""
        for number, (key, entry) in enumerate(self.keys.tensors.items()):
            cut = self._cuts[key]
            for position in cut.boxes_of_rank.get(rank, ()):
                holders = cut.holders[position]
                if holders[number % len(holders)] == rank:
                    offsets, sizes = cut.boxes[position]
                    piece = Piece(self.keys.fqns[key], entry.properties.dtype, offsets, sizes)
                    yield RankBox(key, position, piece)

    def values_of(self, rank: int) -> list[str]:
        """The keys of the values that a rank writes."""
        return self.keys.values[rank :: self.num_ranks]

    def metadata(self) -> Metadata:
        """The metadata of the new checkpoint, without the places of its records."""
        entries = {
            key: replace(self.keys.tensors[key], chunks=self._cuts[key].chunks)
            if key in self.keys.tensors
            else self.keys.source.metadata.state_dict_metadata[fqn]
            for key, fqn in self.keys.fqns.items()
        }
        planner_data: dict[str, object] = dict(self.keys.paths)
        mesh = None if self.rules is None else self.rules.mesh
        axes = {} if mesh is None else dict(zip(mesh.dim_names or (), mesh.shape, strict=True))
        planner_data.setdefault(WORLD_KEY, world_record(World(self.num_ranks, axes)))
        return Metadata(entries, planner_data=planner_data)

    def _cut(self, shape: tuple[int, ...], placed: Placed) -> _Cut:
        # A plain tensor is whole on every rank; a tensor without elements has one empty chunk.
        whole = ((0,) * len(shape), shape)
        holders: dict[Box, list[int]] = {whole: list(range(self.num_ranks))}
        if placed.placements is not None and self.rules is not None and 0 not in shape:
            holders = {}
            for rank, shard in enumerate(self.rules.shards(shape, placed)):
                for chunk in shard.chunks:
                    holders.setdefault((chunk.offsets, chunk.sizes), []).append(rank)
        boxes = sorted(holders)
        boxes_of_rank: dict[int, list[int]] = {}
        for position, box in enumerate(boxes):
            for rank in holders[box]:
                boxes_of_rank.setdefault(rank, []).append(position)
        chunks = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in boxes]
        return _Cut(boxes, [holders[box] for box in boxes], chunks, boxes_of_rank)
