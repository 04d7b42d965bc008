"""Writes a checkpoint as the ranks of another mesh would save it, without these ranks."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from torchtitan_ext import _core
from torchtitan_ext.layout.layout import Box, local_shards
from torchtitan_ext.layout.world import World
from torchtitan_ext.offline.boxes import Piece, ReadPart
from torchtitan_ext.offline.placement_rules import DimOf, Placed, PlacementRules
from torchtitan_ext.offline.rewrite.targets import refuse_existing
from torchtitan_ext.offline.selection import SelectedKeys, Selection
from torchtitan_ext.offline.sources import DcpSource, FileSource
from torchtitan_ext.offline.workers import Shares, run_tasks
from torchtitan_ext.storage.checkpoint_files import BLOCK_BYTES
from torchtitan_ext.storage.commit.branch import remember_step
from torchtitan_ext.storage.commit.commit import begin_save, encode_index, notes_of_save
from torchtitan_ext.storage.element_types import ELEMENT_TYPES
from torchtitan_ext.storage.metadata.saved_metadata import DCP_VERSION, WORLD_KEY
from torchtitan_ext.storage.progress import OnBytes


@dataclass(frozen=True)
class ReshardReport:
    """What ``reshard`` wrote.

    Attributes:
        num_bytes: Size of all tensors in bytes.
        assumed: Tensors for which nothing says how ``tp`` cuts them; dim 0 of these matrices was cut.
    """

    num_ranks: int
    num_keys: int
    num_bytes: int
    assumed: tuple[str, ...]


def reshard(
    source: FileSource,
    target: str | os.PathLike[str],
    *,
    mesh: Mapping[str, int] | None = None,
    rules: Mapping[str, DimOf] | None = None,
    selection: Selection | None = None,
    dtype: str | None = None,
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
        max_bytes: The bytes of the checkpoint that all processes together hold at a time.
        num_processes: By default one per core. Must be 1 in a process that uses CUDA or a process group.
        progress: Called with the bytes of tensors that were written.

    Raises:
        FileExistsError: The target exists, and ``overwrite`` is false.
        DamagedCheckpointError: Bytes of the source are not those that were saved.
        LayoutError: Tensors are no plain memory, or rules apply to no tensor.
        ValueError: The mesh or the rules do not fit.
        OSError: A file cannot be read or written.
    """
    refuse_existing(Path(target), overwrite)
    placements = None if mesh is None else PlacementRules(mesh, rules, saved=source.state, operation="reshard")
    keys = SelectedKeys(source, selection or Selection(), dtype)
    plan = MeshPlan(keys, placements)
    write_checkpoint(plan, target, keys.divide(max_bytes, num_processes), progress, sync=sync)
    return ReshardReport(plan.num_ranks, len(keys.fqns), keys.num_bytes, tuple(plan.assumed))


def write_checkpoint(
    plan: MeshPlan,
    target: str | os.PathLike[str],
    shares: Shares,
    progress: OnBytes,
    *,
    sync: bool = True,
) -> None:
    """Writes the files of the plan's ranks, and commits them together."""
    save = begin_save(Path(target), uuid.uuid4().hex)
    place = save.place
    try:

        def write(rank: int, on_bytes: OnBytes) -> _core.RankFile | None:
            chunks, values = list(plan.chunks_of(rank)), plan.values_of(rank)
            if not chunks and not values:
                return None
            name = place.data_name(f"__{rank}_")
            file = _core.RecordWriter(os.fsencode(place.directory / name), BLOCK_BYTES, shares.num_threads, sync)
            for key in values:
                content = plan.keys.source.value_record(plan.keys.fqns[key])  # must live until it is written
                file.add_record((key, None, None), "", (), content.ctypes.data, content.nbytes)
                file.write_queued()
            for batch in plan.keys.reader.read_batches([chunk.box for chunk in chunks], shares.part_bytes):
                _write_parts(file, chunks, batch)
                on_bytes(sum(part.num_bytes for *_, part in batch))
            return file.finish(name, bytes.fromhex(place.save_id), rank)

        written = run_tasks(write, plan.num_ranks, shares.num_processes, progress)
        files = [file for file in written if file is not None]
        save.check_names([file.name for file in files])
        content = plan.metadata(target, place.save_id, files)
        index = encode_index(place.save_id, files, content, notes_of_save(plan.num_ranks), has_sums=False)
        save.commit(index, content, sync=sync)
    except BaseException:
        save.abandon()
        raise
    remember_step(place.target)


class _Chunk(NamedTuple):
    """A chunk that a rank writes: number ``position`` in the chunk list of the new tensor ``key``.

    ``box`` is under the tensor's name in the source.
    """

    key: str
    position: int
    box: Piece


def _write_parts(file: _core.RecordWriter, chunks: Sequence[_Chunk], batch: Sequence[ReadPart]) -> None:
    for _, memory, part in batch:
        key, position, box = chunks[part.box]
        if part.first_byte == 0:
            file.begin_tensor((key, box.offsets, position), box.dtype, box.sizes, ELEMENT_TYPES[box.dtype])
        file.add_bytes(memory.ctypes.data, memory.nbytes)
        if part.is_last:
            file.end_tensor()
    file.write_queued()


@dataclass(frozen=True)
class _Cut:
    """How tensors of one shape are cut, the ranks that hold each box, and the boxes that each rank holds."""

    boxes: list[Box]
    holders: list[list[int]]
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
            rules.check_used({key: entry.shape for key, entry in keys.tensors.items()})
        self.assumed: list[str] = []
        cuts: dict[tuple[tuple[int, ...], Placed], _Cut] = {}
        self._cuts: dict[str, _Cut] = {}
        for key, entry in keys.tensors.items():
            placed = Placed(None, ()) if rules is None else rules.place(key, entry.shape, entry.chunks)
            self.assumed += [key] if placed.is_assumed else []
            alike = (entry.shape, placed)
            if alike not in cuts:
                cuts[alike] = self._cut(entry.shape, placed)
            self._cuts[key] = cuts[alike]

    def chunks_of(self, rank: int) -> Iterator[_Chunk]:
        """The chunks that a rank writes."""
        for number, (key, entry) in enumerate(self.keys.tensors.items()):
            of_key = self._cuts[key]
            for position in of_key.boxes_of_rank.get(rank, ()):
                holders = of_key.holders[position]
                if holders[number % len(holders)] == rank:
                    yield _Chunk(key, position, Piece(self.keys.fqns[key], entry.dtype, *of_key.boxes[position]))

    def values_of(self, rank: int) -> list[str]:
        """The keys of the values that a rank writes."""
        return self.keys.values[rank :: self.num_ranks]

    def metadata(self, target: str | os.PathLike[str], save_id: str, files: Sequence[_core.RankFile]) -> bytes:
        """The ``.metadata`` of the new checkpoint."""
        source, columns = self.keys.source, _core.MetadataColumns()
        saved = source.columns if isinstance(source, DcpSource) else None
        lists: dict[int, int] = {}
        for key, fqn in self.keys.fqns.items():
            entry = self.keys.tensors.get(key)
            if entry is None:
                columns.add_value(key)
                continue
            of_key = self._cuts[key]
            if id(of_key) not in lists:
                lists[id(of_key)] = columns.add_chunk_list(of_key.boxes)
            number = None if saved is None else saved.find_key(fqn)
            like = None if saved is None or number is None else saved.key(number)
            columns.add_tensor(key, entry.dtype, entry.shape, lists[id(of_key)], like)
        for file in files:
            columns.add_records(file)
        planner_data: dict[str, object] = dict(self.keys.paths)
        mesh = None if self.rules is None else self.rules.mesh
        axes = {} if mesh is None else dict(zip(mesh.dim_names or (), mesh.shape, strict=True))
        planner_data.setdefault(WORLD_KEY, World(self.num_ranks, axes).record())
        storage_meta: dict[str, object] = {
            "checkpoint_id": (os.fspath(target),),
            "save_id": save_id,
            "load_id": None,
            "modules": [],
        }
        content = columns.to_pickle(planner_data, storage_meta, DCP_VERSION)
        assert content is not None, "paths of keys are plain, please report"
        return content

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
        return _Cut(boxes, [holders[box] for box in boxes], boxes_of_rank)
