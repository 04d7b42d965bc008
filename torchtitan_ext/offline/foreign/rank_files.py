"""A file of ``torch.save`` per rank, with the DTensors that the rank held.

The files say themselves which rank they are of, by the coordinates of their DTensors; their names do not count. What
placements leave open is decided over all ranks, as in a save: ``csrc/core/shard_layout.h``.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.distributed.tensor import DTensor

from torchtitan_ext.errors import Problem, named, refusal
from torchtitan_ext.layout.dtensor import Describer, local_tensor, local_view, mesh_ranks, root_mesh
from torchtitan_ext.layout.layout import (
    LayoutRules,
    LocalShard,
    ShardReport,
    decide,
    row_major_position,
    shard_of,
)
from torchtitan_ext.offline.foreign.archives import Archive, ForeignFiles, open_archives
from torchtitan_ext.state.nested import flat_keys
from torchtitan_ext.state.value_digest import digest_value
from torchtitan_ext.storage.formats.safetensors_files import ChunkRecord


def read(directory: Path, *, weights_only: bool) -> ForeignFiles:
    """The state dict whose parts the files of a directory hold.

    Raises:
        StateRefusedError: (a subclass) Files are missing, cut or damaged, or hold no DTensor; names all of these.
        UnsafePickleError: A file names a class that may not be unpickled.
    """
    names = sorted(path.name for path in directory.iterdir() if path.is_file())
    with _quiet_meshes():
        archives = open_archives(directory, names, weights_only=weights_only)
        opened = [_RankFile(archive) for archive in archives.values()]
    files = _by_rank(opened)
    found = ForeignFiles(directory)
    known: _Known = {}
    for fqn in dict.fromkeys(fqn for file in files for fqn in file.values):
        holders = [file for file in files if fqn in file.values]
        path = holders[0].paths[fqn]
        if all(fqn in file.reports for file in holders):
            mesh = getattr(holders[0].reports[fqn], "mesh", None)  # other meshes hold replicas
            holders = [file for file in holders if getattr(file.reports[fqn], "mesh", None) == mesh]
            shards = _shards_of(fqn, [file.reports[fqn] for file in holders], known)
            if isinstance(shards, Problem):
                found.add_problem(path, f"{shards.detail.partition('; state the order')[0]}; leave it out")
            else:
                found.add_tensor(path, _chunks_of(fqn, holders, shards))
        elif _differs([file.with_data[fqn] for file in holders]):
            what = "is no DTensor and differs between ranks: nothing says what each of them has; leave it out"
            found.add_problem(path, what)
        elif holders[0].is_tensor(fqn):
            found.add_tensor(path, holders[0].whole(fqn))
        else:
            found.add_value(path, holders[0].with_data[fqn])
    return found.close()


def _differs(values: Sequence[Any]) -> bool:
    return any(isinstance(one, DTensor) for one in values) or len(set(map(digest_value, values))) > 1


class _RankFile:
    """The file of one rank.

    Attributes:
        values: What it holds by flat key, tensors without their bytes; ``with_data`` with them.
        reports: Of its DTensors; a problem of one that cannot be described.
        rank: The global rank; ``None`` where no DTensor says it.
        world: The ranks that saved, as far as the file says.
    """

    def __init__(self, archive: Archive) -> None:
        self.archive = archive
        flat = flat_keys(archive.value, tuples="as_stock")
        self.values, self.paths = flat.values, flat.stock_paths
        self.with_data = flat_keys(archive.load(), tuples="as_stock").values
        describer = Describer(LayoutRules())
        tensors = {fqn: value for fqn, value in self.with_data.items() if isinstance(value, DTensor)}
        self.reports = {fqn: describer.describe(fqn, value) for fqn, value in tensors.items()}
        self.rank: int | None = None
        self.world: set[int] = set()
        for fqn, report in self.reports.items():
            if isinstance(report, ShardReport) and report.mesh is not None and report.coordinate:
                self.rank = report.mesh.ranks[row_major_position(report.coordinate, report.mesh.shape)]
                self.world |= set(mesh_ranks(root_mesh(tensors[fqn].device_mesh)))

    def is_tensor(self, fqn: str) -> bool:
        return hasattr(self.values[fqn], "untyped_storage")

    def whole(self, fqn: str) -> list[ChunkRecord]:
        return [((0,) * self.values[fqn].dim(), self.archive.record(self.values[fqn]))]


def _by_rank(files: Sequence[_RankFile]) -> list[_RankFile]:
    """The files in order of their ranks. Raises ReshardError if some are missing, of no rank, or of one twice."""
    by_rank = {file.rank: file for file in files if file.rank is not None}
    problems = [
        Problem(
            "broken_checkpoint",
            file.archive.name,
            "holds no DTensor, so nothing says of which rank it is; convert it alone, or move it away",
        )
        for file in files
        if file.rank is None
    ]
    for file in files:
        if file.rank is not None and by_rank[file.rank] is not file:
            detail = f"is of rank {file.rank}, as {by_rank[file.rank].archive.name} is; remove one of them"
            problems.append(Problem("broken_checkpoint", file.archive.name, detail))
    world = set().union(*(file.world for file in files))
    for rank in sorted(world - set(by_rank)):
        detail = f"its file is missing, of ranks {named(sorted(world))}; copy it to the others"
        problems.append(Problem("broken_checkpoint", f"rank {rank}", detail))
    if problems:
        raise refusal("open", problems)
    return [by_rank[rank] for rank in sorted(by_rank)]


_Known = dict[tuple[int, ...], list[LocalShard] | Problem]


def _shards_of(fqn: str, reports: Sequence[ShardReport | Problem], known: _Known) -> list[LocalShard] | Problem:
    """What each rank holds; ``known`` has the answers for reports that were seen before."""
    described = [report for report in reports if isinstance(report, ShardReport)]
    if len(described) < len(reports):
        return next(report for report in reports if isinstance(report, Problem))
    alike = tuple(map(id, reports))  # a describer gives equal tensors one report
    if alike not in known:
        steps = decide(fqn, described)
        known[alike] = steps if isinstance(steps, Problem) else [shard_of(one, steps) for one in described]
    return known[alike]


def _chunks_of(fqn: str, files: Sequence[_RankFile], shards: Sequence[LocalShard]) -> list[ChunkRecord]:
    """Each box once, from the first rank that holds it."""
    chunks: dict[Any, ChunkRecord] = {}
    for file, shard in zip(files, shards, strict=True):
        local = local_tensor(file.values[fqn])
        for chunk in shard.chunks:
            record = file.archive.record(local_view(local, chunk.local_offsets, chunk.sizes))
            chunks.setdefault((chunk.offsets, chunk.sizes), (chunk.offsets, record))
    return list(chunks.values())


@contextmanager
def _quiet_meshes() -> Iterator[None]:
    """Without the warning of each mesh that is read where there is no process group."""
    logger = logging.getLogger("torch.distributed.device_mesh")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
