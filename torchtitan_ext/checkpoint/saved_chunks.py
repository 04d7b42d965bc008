"""The chunk lists of a checkpoint's metadata: many keys have equal ones, and each different one is indexed once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata

from torchtitan_ext import _core
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
