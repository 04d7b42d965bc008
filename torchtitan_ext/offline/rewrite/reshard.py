"""Writes a checkpoint as the ranks of another mesh would save it, without these ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata
from torch.distributed.checkpoint.planner import SavePlan

from torchtitan_ext import _core
from torchtitan_ext.checkpoint.tables.component import WORLD_KEY, World, world_record
from torchtitan_ext.layout.layout import Box, local_shards
from torchtitan_ext.offline.boxes import Piece, cut
from torchtitan_ext.offline.placement_rules import DimOf, Placed, PlacementRules
from torchtitan_ext.offline.rewrite.changes import ROOM_FOR_CHANGES, ChangeChain, ChangeSums
from torchtitan_ext.offline.rewrite.targets import refuse_existing
from torchtitan_ext.offline.selection import SelectedKeys, Selection
from torchtitan_ext.offline.sources import FileSource
from torchtitan_ext.offline.workers import Shares, run_tasks
from torchtitan_ext.storage.commit.commit import find_place
from torchtitan_ext.storage.native.file_writer import BLOCK_BYTES, FileWriter
from torchtitan_ext.storage.native.shared_files import WrittenFiles
from torchtitan_ext.storage.progress import OnBytes
from torchtitan_ext.storage.raw_tensor import ELEMENT_TYPES, NAMES


@dataclass(frozen=True)
class ReshardReport:
    """What ``reshard`` wrote.

    Attributes:
        num_bytes: Size of all tensors in bytes.
        assumed: Tensors for which nothing says how ``tp`` cuts them; dim 0 of these matrices was cut.
        num_changed: Elements that ``changes`` replaced, those of each file counted.
        version: What the changes led to; ``None`` without any.
    """

    num_ranks: int
    num_keys: int
    num_bytes: int
    assumed: tuple[str, ...]
    num_changed: int = 0
    version: int | None = None


def reshard(
    source: FileSource,
    target: str | os.PathLike[str],
    *,
    mesh: Mapping[str, int] | None = None,
    rules: Mapping[str, DimOf] | None = None,
    selection: Selection | None = None,
    dtype: torch.dtype | None = None,
    changes: Sequence[str | os.PathLike[str]] = (),
    base_version: int | None = None,
    overwrite: bool = False,
    sync: bool = True,
    max_bytes: int = 1 << 30,
    num_processes: int | None = None,
    progress: OnBytes = lambda _: None,
) -> ReshardReport:
    """Writes the files that a save on a mesh would write. The target becomes whole, or stays what it was.

    Args:
        mesh: Size of each axis by name, for example ``{"dp_shard": 4, "tp": 2}``; without it one rank writes all.
        rules: The dims that axes cut where the checkpoint does not say it; see ``PlacementRules``.
        dtype: The dtype that floating-point tensors get; by default they keep theirs.
        changes: Files of ``tte.delta``, in the order of their versions: the new checkpoint has what they lead to. Each
            tensor that the first file knows is compared whole with its base, and the old bits of each element that a
            later one replaces, before anything is committed. Values that are no tensors stay what they are.
        base_version: The version of the source; by default its step, if its name has one.
        max_bytes: The bytes of the checkpoint that all processes together hold at a time.
        num_processes: By default one per core. Must be 1 in a process that uses CUDA or a process group.
        progress: Called with the bytes of tensors that were written.

    Raises:
        FileExistsError: The target exists, and ``overwrite`` is false.
        DamagedCheckpointError: Bytes of the source are not those that were saved.
        LayoutError: Tensors are no plain memory, or rules apply to no tensor.
        ValueError: The mesh or the rules do not fit.
        WrongBaseError: The source is not the base of the changes, or a version between them is missing.
        StateRefusedError: (a subclass) The changes are of tensors that the source lacks, or of other shapes or dtypes.
        OSError: A file cannot be read or written.
    """
    refuse_existing(Path(target), overwrite)
    placements = None if mesh is None else PlacementRules(mesh, rules, metadata=source.metadata, operation="reshard")
    keys = SelectedKeys(source, selection or Selection(), dtype)
    plan = MeshPlan(keys, placements)
    chain = ChangeChain(changes, keys, selection or Selection(), base_version)
    shares = keys.divide(max_bytes // ROOM_FOR_CHANGES if changes else max_bytes, num_processes)
    write_checkpoint(plan, target, shares, progress, sync=sync, chain=chain)
    assumed = tuple(plan.assumed)
    return ReshardReport(plan.num_ranks, len(keys.fqns), keys.num_bytes, assumed, chain.num_changed, chain.version)


def write_checkpoint(
    plan: MeshPlan,
    target: str | os.PathLike[str],
    shares: Shares,
    progress: OnBytes,
    *,
    sync: bool = True,
    chain: ChangeChain | None = None,
) -> None:
    """Writes the files of the plan's ranks, with changes, and commits them together if these fit."""
    writer = FileWriter(target, sync=sync, branch="keep")
    writer.set_up_storage_writer(True, rank=0)
    writer.prepare_global_plan([SavePlan([])])
    try:
        place = find_place(Path(target), 0, is_own=False)

        def write(rank: int, on_bytes: OnBytes) -> tuple[WrittenFiles | None, ChangeSums]:
            sums: ChangeSums = [] if chain is None else chain.no_sums()
            parts, values = list(plan.parts_of(rank, shares.part_bytes)), plan.values_of(rank)
            if not parts and not values:
                return None, sums
            name = place.data_name(f"__{rank}_")
            file = _core.RecordWriter(os.fsencode(place.directory / name), BLOCK_BYTES, shares.num_threads, sync)
            for key in values:
                content = plan.keys.source.value_record(plan.keys.fqns[key])  # must live until it is written
                file.add_record((key, None, None), "", (), content.data_ptr(), content.numel())
                file.write_queued()
            for batch in plan.keys.reader.read_batches(parts, shares.part_bytes):
                if chain is not None:
                    chain.apply(((part.key, part.piece, tensor) for tensor, part in batch), sums)
                _write_parts(file, batch)
                on_bytes(sum(tensor.nbytes for tensor, _ in batch))
            return WrittenFiles([file.finish(name, bytes.fromhex(place.save_id), rank)]), sums

        written = run_tasks(write, plan.num_ranks, shares.num_processes, progress)
        if chain is not None:
            chain.check([sums for _, sums in written])
        writer.finish(plan.metadata(), [files for files, _ in written])
    finally:
        writer.abandon()


def _write_parts(file: _core.RecordWriter, batch: Sequence[tuple[torch.Tensor, _WrittenPart]]) -> None:
    for tensor, part in batch:
        if part.is_first:
            chunk = part.chunk
            key = (part.key, chunk.offsets, part.position)
            file.begin_tensor(key, NAMES[chunk.dtype], chunk.sizes, ELEMENT_TYPES[chunk.dtype])
        file.add_bytes(tensor.data_ptr(), tensor.nbytes)
        if part.is_last:
            file.end_tensor()
    file.write_queued()


class _WrittenPart(NamedTuple):
    """A part of a chunk that a rank writes: number ``position`` in the chunk list of the new tensor ``key``.

    ``chunk`` is its box under the tensor's name in the source, ``piece`` the part of it.
    """

    key: str
    position: int
    chunk: Piece
    piece: Piece
    is_first: bool
    is_last: bool


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

    def parts_of(self, rank: int, max_bytes: int) -> Iterator[tuple[Piece, _WrittenPart]]:
        """The chunks that a rank writes, in pieces of at most ``max_bytes``; an empty chunk is one empty piece."""
        for number, (key, entry) in enumerate(self.keys.tensors.items()):
            of_key = self._cuts[key]
            for position in of_key.boxes_of_rank.get(rank, ()):
                holders = of_key.holders[position]
                if holders[number % len(holders)] == rank:
                    chunk = Piece(self.keys.fqns[key], entry.properties.dtype, *of_key.boxes[position])
                    pieces = list(cut(chunk, max_bytes)) or [chunk]
                    for piece in pieces:
                        yield piece, _WrittenPart(key, position, chunk, piece, piece is pieces[0], piece is pieces[-1])

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
            for rank, shard in enumerate(local_shards(shape, self.rules.mesh.shape, placed.steps)):
                for chunk in shard.chunks:
                    holders.setdefault((chunk.offsets, chunk.sizes), []).append(rank)
        boxes = sorted(holders)
        boxes_of_rank: dict[int, list[int]] = {}
        for position, box in enumerate(boxes):
            for rank in holders[box]:
                boxes_of_rank.setdefault(rank, []).append(position)
        chunks = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in boxes]
        return _Cut(boxes, [holders[box] for box in boxes], chunks, boxes_of_rank)
