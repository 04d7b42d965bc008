"""The chunks that a checkpoint has of each tensor: do they hold all of it, and are they in its files?"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from torchtitan_ext import _core
from torchtitan_ext.checkpoint.tables.agreement import Agreement
from torchtitan_ext.dcp_private import StorageInfo
from torchtitan_ext.errors import Problem
from torchtitan_ext.storage.formats.safetensors_files import files_with_key
from torchtitan_ext.storage.metadata.lazy_metadata import LazyDict, columns_behind
from torchtitan_ext.storage.metadata.saved_state import lost_problem, version_problems


def cover_problems(
    agreement: Agreement, wanted: dict[str, str], metadata: Metadata, chunks: _core.SavedChunks
) -> list[Problem]:
    """Problems of tensors whose saved chunks do not hold every element exactly once; ``wanted`` has the saved names."""
    problems = []
    known: dict[tuple[int, int], Problem | None] = {}  # thousands of keys may share a list
    for key, of_class, index in _core.find_uncovered(agreement.joint, wanted, chunks):
        fqn = agreement.names[key]
        if (id(index), of_class) not in known:
            known[id(index), of_class] = _cover_problem(fqn, agreement, of_class, index)
        problem = known[id(index), of_class]
        problems += [] if problem is None else [dataclasses.replace(problem, fqn=fqn)]
    return _name_files_of_overlaps(problems, metadata)


def _cover_problem(fqn: str, agreement: Agreement, of_class: int, index: _core.ChunkIndex) -> Problem | None:
    # A checkpoint of use_collectives=False has metadata per rank: all that this rank wants must be there.
    if agreement.joint.num_ranks == 1 and agreement.joint.is_filled(of_class, index):
        return None
    defect = _core.describe_cover_defect(agreement.kinds[of_class].global_shape, index.boxes(), None)
    return None if defect is None else Problem("broken_checkpoint", fqn, defect)


def storage_problems(metadata: Metadata, fqns: Iterable[str]) -> list[Problem]:
    """What is wrong with the files of a checkpoint by its metadata alone, for the saved keys that are to be read."""
    problems = version_problems(getattr(metadata, "version", None))
    if problems:
        return problems
    entries = metadata.storage_data
    if not isinstance(entries, dict) or not isinstance(next(iter(entries), None), MetadataIndex):
        return []
    # FileReader has refused such paths; its lazy mapping would make all entries here.
    infos = () if isinstance(entries, LazyDict) else entries.values()
    paths = {info.relative_path for info in infos if isinstance(info, StorageInfo)}
    outside = sorted(path for path in paths if _core.leads_outside(path))
    problems = [
        Problem("broken_checkpoint", path, "is named as a file of the checkpoint and lies outside its directory")
        for path in outside
    ]
    # Counting is cheap; every chunk is looked for only where the numbers do not match.
    saved, columns = metadata.state_dict_metadata, columns_behind(metadata.state_dict_metadata)
    if columns is not None:
        num_chunks = columns.num_chunks
    else:
        num_chunks = sum(len(one.chunks) if isinstance(one, TensorStorageMetadata) else 1 for one in saved.values())
    return problems if num_chunks == len(entries) else problems + _lost_problems(sorted(fqns), saved, entries)


def name_metadata(metadata: Metadata) -> str:
    """A name that is equal on ranks that read the same metadata.

    The first file is part of it: it differs where each rank wrote metadata of its own (``use_collectives=False``).
    """
    places = metadata.storage_data or {}
    first = next(iter(places), None)  # of a million places in a lazy dict only this one is made
    return f"{len(metadata.state_dict_metadata)} keys, {None if first is None else places[first]}"


def _name_files_of_overlaps(problems: Sequence[Problem], metadata: Metadata) -> list[Problem]:
    """The same problems; an overlap names the safetensors files that hold the key, since DCP takes each for a part."""
    overlaps = {problem.fqn for problem in problems if "overlap" in problem.detail}
    paths: dict[str, str] = {}
    places = metadata.storage_data or {}
    for index in places if overlaps else ():
        if index.fqn in overlaps and index.fqn not in paths:
            paths[index.fqn] = str(getattr(places[index], "relative_path", None))
    named = []
    for problem in problems:
        path = paths.get(problem.fqn, "")
        files = files_with_key(Path(path).parent, problem.fqn) if path.endswith(".safetensors") else []
        listed = f"{', '.join(files[:4])}{', ...' if len(files) > 4 else ''}"
        detail = f"stands in {len(files)} files ({listed}); leave it in one"
        named.append(problem if len(files) < 2 else Problem(problem.kind, problem.fqn, detail))
    return named


def _lost_problems(fqns: Sequence[str], saved: Mapping[str, Any], places: Iterable[MetadataIndex]) -> list[Problem]:
    """Problems of keys with a chunk, or a value, that is in no file. Each shared chunk list is read once."""
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
            problems.append(lost_problem(fqn, num_lost, len(wanted)))
    return problems
