"""A checkpoint written anew, as the ranks of another mesh would save it; without these ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.distributed.checkpoint.planner import SavePlan

from torchtitan_ext.offline.boxes import Piece, batched, cut, new_buffer, views
from torchtitan_ext.offline.placement_rules import DimOf, PlacementRules
from torchtitan_ext.offline.rewrite.mesh_plan import MeshPlan, RankBox
from torchtitan_ext.offline.rewrite.targets import refuse_existing
from torchtitan_ext.offline.selection import SelectedKeys, Selection
from torchtitan_ext.offline.sources import Source
from torchtitan_ext.offline.workers import Shares, divide, room_for_casts, run_tasks
from torchtitan_ext.storage.checkpoint_files import RankFile
from torchtitan_ext.storage.commit.commit import SavePlace, find_place
from torchtitan_ext.storage.native.file_writer import FileWriter
from torchtitan_ext.storage.native.rank_file import RankFileWriter
from torchtitan_ext.storage.progress import OnBytes


@dataclass(frozen=True)
class ReshardReport:
    """What was written.

    Attributes:
        num_bytes: Of tensors.
        assumed: Tensors of which nothing says how ``tp`` cuts them: dim 0 of matrices.
    """

    num_ranks: int
    num_keys: int
    num_bytes: int
    assumed: tuple[str, ...]


def reshard(
    source: Source,
    target: str | os.PathLike[str],
    *,
    mesh: Mapping[str, int] | None = None,
    rules: Mapping[str, DimOf] | None = None,
    selection: Selection | None = None,
    dtype: torch.dtype | None = None,
    overwrite: bool = False,
    sync: bool = True,
    max_bytes: int = 1 << 30,
    num_processes: int | None = None,
    progress: OnBytes = lambda _: None,
) -> ReshardReport:
    """Writes the files that a save on a mesh would write. The target is whole, or what it was before.

    Args:
        mesh: Size of each axis by name, for example ``{"dp_shard": 4, "tp": 2}``; without it one rank writes all.
        rules: Which dims axes cut where the checkpoint does not say; see ``PlacementRules``.
        dtype: Of the floating-point tensors that are written; by default as in the source.
        max_bytes: What all processes hold of the checkpoint at a time.
        num_processes: By default one per core. More than one cannot be where CUDA or a process group is in use.
        progress: Is told bytes of tensors.

    Raises:
        FileExistsError: There is something at the target, and ``overwrite`` is false.
        DamagedCheckpointError: Bytes of the source are not what was written.
        LayoutError: Tensors are no plain memory, or rules apply to none.
        ValueError: The mesh or the rules do not fit.
        OSError: A file cannot be read or written.
    """
    refuse_existing(Path(target), overwrite)
    placements = None if mesh is None else PlacementRules(mesh, rules, metadata=source.metadata)
    keys = SelectedKeys(source, selection or Selection(), dtype)
    plan = MeshPlan(keys, placements)
    writer = FileWriter(target, sync=sync)
    writer.set_up_storage_writer(True, rank=0)
    writer.prepare_global_plan([SavePlan([])])
    try:
        place = find_place(Path(target), 0, is_own=False)
        job = _RankFiles(plan, place, divide(room_for_casts(max_bytes, keys.cast.values(), dtype), num_processes), sync)
        files = run_tasks(job.write, plan.num_ranks, job.shares.num_processes, progress)
        writer.finish(plan.metadata(), files)
    finally:
        writer.abandon()
    return ReshardReport(plan.num_ranks, len(keys.fqns), keys.num_bytes, tuple(plan.assumed))


@dataclass(frozen=True)
class _Part:
    """A part of a chunk: small enough to be held."""

    box: RankBox
    piece: Piece
    is_first: bool
    is_last: bool

    @property
    def num_bytes(self) -> int:
        return self.piece.num_bytes


class _RankFiles:
    """Writes the files of a plan's ranks, each in bounded parts."""

    def __init__(self, plan: MeshPlan, place: SavePlace, shares: Shares, sync: bool) -> None:
        self.shares = shares
        self._plan = plan
        self._place = place
        self._sync = sync
        self._source = plan.keys.source
        self._fqns = plan.keys.fqns
        self._reader = plan.keys.reader
        self._source.thread_count = shares.num_threads

    def write(self, rank: int, progress: OnBytes) -> RankFile | None:
        """The file of one rank; none where it has nothing to write."""
        boxes = list(self._plan.boxes_of(rank))
        values = self._plan.values_of(rank)
        if not boxes and not values:
            return None
        file = RankFileWriter(self._place, rank, num_threads=self.shares.num_threads, sync=self._sync)
        for key in values:
            content = self._source.value_record(self._fqns[key])
            file.add_value(key, content)
            file.write()
        buffer = new_buffer(self.shares.part_bytes)
        for batch in batched(self._parts_of(boxes), self.shares.part_bytes):
            self._copy(batch, buffer, file)
            progress(sum(part.num_bytes for part in batch))
        return file.finish()

    def _parts_of(self, boxes: list[RankBox]) -> Iterator[_Part]:
        for box in boxes:
            pieces = list(cut(box.piece, self.shares.part_bytes)) or [box.piece]
            for number, piece in enumerate(pieces):
                yield _Part(box, piece, number == 0, number == len(pieces) - 1)

    def _copy(self, batch: list[_Part], buffer: torch.Tensor, file: RankFileWriter) -> None:
        places = views(buffer, [part.piece for part in batch])
        saved = [replace(part.piece, fqn=self._fqns[part.piece.fqn]) for part in batch]
        self._reader.read(saved, places)
        for part, place in zip(batch, places, strict=True):
            whole = part.box.piece
            if part.is_first:
                file.begin_tensor(whole.fqn, whole.offsets, part.box.position, whole.dtype, whole.sizes)
            file.add_part(place)
            if part.is_last:
                file.end_tensor()
        file.write()
