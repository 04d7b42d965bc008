"""A checkpoint's metadata: made of an agreement for a save; for a load its chunk lists, and the files that hold them.

Many keys have equal chunk lists, and each different one is indexed once. Every chunk must have a place in a file, and
no file may lie outside of the directory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from torchtitan_ext import _core
from torchtitan_ext.checkpoint.tables.agreement import (
    Agreement,
    HeldShard,
    ObjectAgreement,
    TensorAgreement,
    check_cover,
)
from torchtitan_ext.checkpoint.tables.key_table import Box, RankTable
from torchtitan_ext.dcp_private import StorageInfo
from torchtitan_ext.errors import CheckpointFailedError, Problem
from torchtitan_ext.layout.layout import Chunk
from torchtitan_ext.storage.formats.safetensors_files import files_with_key
from torchtitan_ext.storage.metadata.lazy_metadata import LazyDict

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


def storage_problems(metadata: Metadata, fqns: Iterable[str]) -> list[Problem]:
    """What the metadata alone shows to be wrong with the files of a checkpoint, before any is read.

    Args:
        fqns: The saved keys that are to be read.
    """
    version = getattr(metadata, "version", None)
    if version is not None and _numbers(version) > _numbers(CURRENT_DCP_VERSION):
        detail = (
            f"has format version {version}, this torch reads up to {CURRENT_DCP_VERSION}; load it with a newer torch"
        )
        return [Problem("broken_checkpoint", "checkpoint", detail)]
    entries = metadata.storage_data
    if not isinstance(entries, dict) or not isinstance(next(iter(entries), None), MetadataIndex):
        return []
    # FileReader refuses such paths when it reads the metadata, and its entries are made when they are asked for.
    read_by_us = isinstance(entries, LazyDict)
    infos = () if read_by_us else entries.values()
    paths = {info.relative_path for info in infos if isinstance(info, StorageInfo)}
    outside = sorted(path for path in paths if _core.leads_outside(path))
    problems = [
        Problem("broken_checkpoint", path, "is named as a file of the checkpoint and lies outside its directory")
        for path in outside
    ]
    # Counting is cheap; every chunk is looked for only where the numbers do not match.
    saved = metadata.state_dict_metadata
    num_chunks = sum(len(one.chunks) if isinstance(one, TensorStorageMetadata) else 1 for one in saved.values())
    return problems if num_chunks == len(entries) else problems + _lost_problems(sorted(fqns), saved, entries)


def name_metadata(metadata: Metadata) -> str:
    """Equal for ranks that read the same metadata; its first file tells those apart that a rank wrote for itself."""
    places = metadata.storage_data or {}
    first = next(iter(places), None)  # of a million places in a lazy dict only this one is made
    return f"{len(metadata.state_dict_metadata)} keys, {None if first is None else places[first]}"


def name_files_of_overlaps(problems: Sequence[Problem], metadata: Metadata) -> list[Problem]:
    """The same problems, with the safetensors files where several hold a key: DCP takes each for a part."""
    overlaps = {problem.fqn for problem in problems if "overlap" in problem.detail}
    paths: dict[str, str] = {}
    places = metadata.storage_data or {}
    for index in places if overlaps else ():
        if index.fqn in overlaps and index.fqn not in paths:
            paths[index.fqn] = str(getattr(places[index], "relative_path", None))
    return [_with_files(problem, paths.get(problem.fqn, "")) for problem in problems]


def _with_files(problem: Problem, path: str) -> Problem:
    files = files_with_key(Path(path).parent, problem.fqn) if path.endswith(".safetensors") else []
    if len(files) < 2:
        return problem
    detail = (
        f"stands in {len(files)} files ({', '.join(files[:4])}{', ...' if len(files) > 4 else ''}); leave it in one"
    )
    return Problem(problem.kind, problem.fqn, detail)


def check_all_written(plan: SavePlan, results: Any, rank: int) -> None:
    """That storage reports every item of a plan as written; stock's writer loses what one of its threads could not.

    Args:
        results: What ``write_data`` came to; only DCP's own form, a list of ``WriteResult``, can be checked.

    Raises:
        CheckpointFailedError: Names what is missing.
    """
    if not isinstance(results, list) or not all(isinstance(result, WriteResult) for result in results):
        return
    written = {result.index for result in results}
    lost = [item.index.fqn for item in plan.items if item.index not in written]
    if lost:
        names = ", ".join(dict.fromkeys(lost[:10]))
        text = f"{len(lost)} of {len(plan.items)} items were not written, without an error: {names}"
        raise CheckpointFailedError("save", {rank: text})


def _lost_problems(fqns: Sequence[str], saved: Mapping[str, Any], places: Iterable[MetadataIndex]) -> list[Problem]:
    """Chunks, and values, that have no place. Keys that share a list of chunks, of which a file may say thousands, do
    not go through it one by one."""
    placed: dict[str, set[Any]] = {fqn: set() for fqn in fqns}
    for place in places:
        placed.get(place.fqn, set()).add(place.offset)
    of_list: dict[int, set[Any]] = {}
    problems = []
    for fqn in fqns:
        wanted: set[Any] = {None}
        if isinstance(saved[fqn], TensorStorageMetadata):
            chunks = saved[fqn].chunks
            if id(chunks) not in of_list:
                of_list[id(chunks)] = {tuple(chunk.offsets) for chunk in chunks}
            wanted = of_list[id(chunks)]
        num_lost = len(wanted) - len(wanted & placed[fqn])  # goes through the smaller one
        if num_lost > 0:
            detail = (
                f"{num_lost} of its {len(wanted)} part(s) are in no file of the checkpoint; load another checkpoint"
            )
            problems.append(Problem("broken_checkpoint", fqn, detail))
    return problems


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())


def stored_entries(agreement: Agreement) -> dict[str, Any]:
    """What is stored of each key. Keys of a class share what describes them: pickle then writes it once."""
    shared: dict[int, tuple[TensorProperties, torch.Size, list[ChunkStorageMetadata]] | None] = {}
    entries: dict[str, Any] = {}
    for key, of_class in agreement.numbers():
        if of_class not in shared:
            shared[of_class] = _shared_parts(agreement, of_class)
        parts = shared[of_class]
        entries[agreement.names[key]] = BytesStorageMetadata() if parts is None else TensorStorageMetadata(*parts)
    return entries


def stored_paths(agreement: Agreement, tables: Sequence[RankTable]) -> dict[str, tuple[Any, ...]]:
    """Where each key of any rank stands in the nested state dict."""
    paths = {fqn: path for table in reversed(tables) for fqn, path in table.odd_paths.items()}
    of_keys = zip(agreement.names, agreement.world.paths(), strict=True)
    return {**paths, **{fqn: path for fqn, path in of_keys if path is not None}}


def _shared_parts(
    agreement: Agreement, of_class: int
) -> tuple[TensorProperties, torch.Size, list[ChunkStorageMetadata]] | None:
    kind = agreement.kind(of_class)
    if kind.dtype is None:
        return None
    chunks = [
        ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        for offsets, sizes in agreement.world.written_boxes(of_class)
    ]
    properties = TensorProperties(dtype=kind.dtype, requires_grad=kind.requires_grad)
    return properties, torch.Size(kind.global_shape), chunks
