"""What metadata says of the files of a checkpoint: every chunk has a place, and none lies outside the directory."""

from __future__ import annotations

from collections.abc import Iterable
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
    # Counting is cheap; every chunk is looked up only where the numbers do not match.
    saved = metadata.state_dict_metadata
    num_chunks = sum(len(one.chunks) if isinstance(one, TensorStorageMetadata) else 1 for one in saved.values())
    if num_chunks != len(entries):
        problems += [problem for fqn in sorted(fqns) if (problem := _lost_problem(fqn, metadata)) is not None]
    return problems


def name_metadata(metadata: Metadata) -> str:
    """Equal for ranks that read the same metadata; its first file tells those apart that a rank wrote for itself."""
    places = metadata.storage_data or {}
    first = next(iter(places), None)  # of a million places in a lazy dict only this one is made
    return f"{len(metadata.state_dict_metadata)} keys, {None if first is None else places[first]}"


def name_files_of_overlap(problem: Problem, metadata: Metadata) -> Problem:
    """The same problem, with the safetensors files where several hold its key: DCP takes each for a part."""
    place = next((index for index in metadata.storage_data or () if index.fqn == problem.fqn), None)
    path = None if place is None else getattr(metadata.storage_data[place], "relative_path", None)
    if "overlap" not in problem.detail or not str(path).endswith(".safetensors"):
        return problem
    files = files_with_key(Path(str(path)).parent, problem.fqn)
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


def _lost_problem(fqn: str, metadata: Metadata) -> Problem | None:
    saved = metadata.state_dict_metadata[fqn]
    if isinstance(saved, TensorStorageMetadata):
        indices = [MetadataIndex(fqn, chunk.offsets) for chunk in saved.chunks]
    else:
        indices = [MetadataIndex(fqn)]
    lost = [index for index in indices if index not in (metadata.storage_data or {})]
    if not lost:
        return None
    detail = f"{len(lost)} of its {len(indices)} part(s) are in no file of the checkpoint; load another checkpoint"
    return Problem("broken_checkpoint", fqn, detail)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())
