"""The chunk lists of a checkpoint's metadata: many keys have equal ones, and each different one is indexed once."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, TensorStorageMetadata

from torchtitan_ext import _core
from torchtitan_ext.checkpoint.agreement import Agreement, HeldShard, ObjectAgreement, TensorAgreement, check_cover
from torchtitan_ext.checkpoint.key_table import Box
from torchtitan_ext.errors import Problem
from torchtitan_ext.layout.layout import Chunk

Part = tuple[torch.Size, int, torch.Size, torch.Size, int, torch.Size, torch.Size]
"""Of a wanted chunk: its offsets, its position, offsets in the local tensor; of the saved chunk that has this part: its
offsets, its position, offsets in it; the part's sizes."""


class ChunkList:
    """One of the different chunk lists.

    Attributes:
        index: The chunks, sorted.
    """

    def __init__(self, index: _core.ChunkIndex) -> None:
        self.index = index
        self._covers: dict[tuple[int, ...], bool] = {}

    def covers(self, shape: tuple[int, ...]) -> bool:
        """Whether the chunks hold every element of a tensor of this shape exactly once."""
        if shape not in self._covers:
            self._covers[shape] = self.index.covers(shape)
        return self._covers[shape]

    def find_parts(self, wanted: Sequence[Chunk]) -> list[Part]:
        """The parts of saved chunks that make up the wanted ones."""
        return [
            (
                torch.Size(wanted[position].offsets),
                position,
                torch.Size(local_offsets),
                torch.Size(self.index.box(chunk)[0]),
                chunk,
                torch.Size(saved_offsets),
                torch.Size(sizes),
            )
            for position, chunk, saved_offsets, local_offsets, sizes in self.index.find_overlaps(wanted)
        ]


class SavedChunks:
    """Finds the chunk list of each tensor, the same object for equal lists.

    Our saves share the lists themselves, which pickle keeps; for those of stock the contents are compared.
    """

    def __init__(self) -> None:
        self._by_identity: dict[int, tuple[list[ChunkStorageMetadata], ChunkList]] = {}
        self._by_content: dict[bytes, ChunkList] = {}

    def of(self, saved: TensorStorageMetadata) -> ChunkList:
        """The chunk list of a tensor."""
        known = self._by_identity.get(id(saved.chunks))
        if known is None:
            index = _core.ChunkIndex(saved.chunks)
            # Holding the list keeps its identity from being another one's.
            known = (saved.chunks, self._by_content.setdefault(index.to_bytes(), ChunkList(index)))
            self._by_identity[id(saved.chunks)] = known
        return known[1]


def cover_problems(
    agreement: Agreement, wanted: Mapping[str, str], metadata: Metadata, chunks: SavedChunks
) -> list[Problem]:
    """Tensors of which the saved chunks do not hold every element exactly once.

    Args:
        wanted: Names in the checkpoint of the keys that are to be read.
        chunks: Of this metadata.
    """
    problems = []
    known: dict[tuple[int, int], Problem | None] = {}  # thousands of keys may share a list
    for key, of_class in agreement.numbers():
        fqn, kind = agreement.names[key], agreement.kind(of_class)
        saved = metadata.state_dict_metadata[wanted[fqn]]
        if kind.is_object or not isinstance(saved, TensorStorageMetadata):
            continue
        chunk_list = chunks.of(saved)
        if chunk_list.covers(kind.global_shape):
            continue
        if (id(chunk_list), of_class) not in known:
            known[id(chunk_list), of_class] = _cover_problem(fqn, agreement, of_class, chunk_list)
        problem = known[id(chunk_list), of_class]
        problems += [] if problem is None else [dataclasses.replace(problem, fqn=fqn)]
    return problems


def is_covered(shape: Sequence[int], boxes: Sequence[Box]) -> bool:
    """Whether boxes hold every element of a shape exactly once."""
    return _core.find_cover_defect(shape, boxes) is None


def _cover_problem(fqn: str, agreement: Agreement, of_class: int, chunk_list: ChunkList) -> Problem | None:
    # A checkpoint of use_collectives=False has metadata per rank: all that this rank wants must be there.
    if agreement.world.num_ranks == 1 and _is_covered_for(agreement.agreed(of_class), chunk_list):
        return None
    shards = [HeldShard((), (box,)) for box in chunk_list.index.boxes()]
    return check_cover(fqn, agreement.kind(of_class).global_shape, shards, "broken_checkpoint")


def _is_covered_for(agreed: TensorAgreement | ObjectAgreement, chunk_list: ChunkList) -> bool:
    assert isinstance(agreed, TensorAgreement)
    saved_boxes = chunk_list.index.boxes()
    if any(o + s > n for box in saved_boxes for o, s, n in zip(*box, agreed.global_shape, strict=True)):
        return False
    wanted = [box for replica in agreed.replicas for held in replica for box in held.boxes]
    parts: list[list[Box]] = [[] for _ in wanted]
    from_zero = [(offsets, sizes, (0,) * len(sizes)) for offsets, sizes in wanted]
    for position, _, _, offsets, sizes in chunk_list.index.find_overlaps(from_zero):
        parts[position].append((offsets, sizes))
    return all(map(is_covered, [sizes for _, sizes in wanted], parts))
