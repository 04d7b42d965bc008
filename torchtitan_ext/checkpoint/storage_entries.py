"""What metadata says of the files of a checkpoint: every chunk has a place, and none lies outside the directory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from torchtitan_ext import _core
from torchtitan_ext.errors import CheckpointFailedError, Problem
from torchtitan_ext.storage.lazy_metadata import LazyDict
from torchtitan_ext.storage.safetensors_files import files_with_key


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
    paths = {info.relative_path for info in infos if isinstance(info, _StorageInfo)}
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
