"""Writes a checkpoint as the ranks of another mesh would save it, without these ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch.distributed.checkpoint.planner import SavePlan

from torchtitan_ext import _core
from torchtitan_ext.offline.boxes import Piece, cut
from torchtitan_ext.offline.placement_rules import DimOf, PlacementRules
from torchtitan_ext.offline.rewrite.mesh_plan import MeshPlan, RankBox
from torchtitan_ext.offline.rewrite.targets import refuse_existing
from torchtitan_ext.offline.selection import SelectedKeys, Selection
from torchtitan_ext.offline.sources import FileSource
from torchtitan_ext.offline.workers import Shares, run_tasks
from torchtitan_ext.storage.commit.commit import find_place
from torchtitan_ext.storage.native.file_writer import FileWriter
from torchtitan_ext.storage.native.rank_file import RankFileWriter
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
    dtype: torch.dtype | None = None,
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
    placements = None if mesh is None else PlacementRules(mesh, rules, metadata=source.metadata)
    keys = SelectedKeys(source, selection or Selection(), dtype)
    plan = MeshPlan(keys, placements)
    write_checkpoint(plan, target, keys.divide(max_bytes, num_processes), progress, sync=sync)
    return ReshardReport(plan.num_ranks, len(keys.fqns), keys.num_bytes, tuple(plan.assumed))


def write_checkpoint(
    plan: MeshPlan, target: str | os.PathLike[str], shares: Shares, progress: OnBytes, *, sync: bool = True
) -> None:
    """Writes the files of the plan's ranks and commits them together."""
    writer = FileWriter(target, sync=sync)
    writer.set_up_storage_writer(True, rank=0)
    writer.prepare_global_plan([SavePlan([])])
    try:
        place = find_place(Path(target), 0, is_own=False)

        def write(rank: int, on_bytes: OnBytes) -> _core.RankFile | None:
            parts, values = list(_parts_of(plan, rank, shares.part_bytes)), plan.values_of(rank)
            if not parts and not values:
                return None
            file = RankFileWriter(place, rank, num_threads=shares.num_threads, sync=sync)
            for key in values:
                content = plan.keys.source.value_record(plan.keys.fqns[key])  # must live until it is written
                file.add_value(key, content)
                file.write()
            for batch in plan.keys.reader.read_batches(parts, shares.part_bytes):
                _write_parts(file, batch)
                on_bytes(sum(tensor.nbytes for tensor, _ in batch))
            return file.finish()

        files = run_tasks(write, plan.num_ranks, shares.num_processes, progress)
        writer.finish(plan.metadata(), files)
    finally:
        writer.abandon()


class _PartOfBox(NamedTuple):
    box: RankBox
    is_first: bool
    is_last: bool


def _parts_of(plan: MeshPlan, rank: int, max_bytes: int) -> Iterator[tuple[Piece, _PartOfBox]]:
    """The chunks that a rank writes, in pieces of at most ``max_bytes``; an empty chunk is one empty piece."""
    for box in plan.boxes_of(rank):
        pieces = list(cut(box.piece, max_bytes)) or [box.piece]
        for number, piece in enumerate(pieces):
            yield piece, _PartOfBox(box, number == 0, number == len(pieces) - 1)


def _write_parts(file: RankFileWriter, batch: Sequence[tuple[torch.Tensor, _PartOfBox]]) -> None:
    for tensor, part in batch:
        whole = part.box.piece
        if part.is_first:
            file.begin_tensor(part.box.key, whole.offsets, part.box.position, whole.dtype, whole.sizes)
        file.add_part(tensor)
        if part.is_last:
            file.end_tensor()
    file.write()
