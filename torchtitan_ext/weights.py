"""Safetensors, the weight files of Hugging Face's libraries, saved from and loaded into any layout.

Every function but ``average`` is collective. It is a module of its own, because such files are no checkpoints of a run:
they have tensors and nothing else, no checksums, and the names that other libraries want.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.staging import AsyncStager

from torchtitan_ext import checkpoint
from torchtitan_ext.checkpoint import LoadReport, SavePlanner, SaveResult
from torchtitan_ext.checkpoint.operation.phases import TIMEOUT_SECONDS, checking_arguments
from torchtitan_ext.checkpoint.operation.save_job import SaveJob
from torchtitan_ext.checkpoint.operation.saves import Call, save_later, save_now
from torchtitan_ext.checkpoint.operation.sharing.requests import ShareReads
from torchtitan_ext.checkpoint.rules.casts import CastPolicy
from torchtitan_ext.errors import WrongValueError, check_count
from torchtitan_ext.offline.rewrite.convert import NewFormat
from torchtitan_ext.offline.rewrite.merge import Accumulate, MergeReport, Others, merge
from torchtitan_ext.offline.selection import Selection
from torchtitan_ext.offline.sources import open_source
from torchtitan_ext.storage.runs.retention import newest_steps
from torchtitan_ext.storage.weights.safetensors_reader import SafetensorsReader, reader_at
from torchtitan_ext.storage.weights.writer import MAX_FILE_BYTES
from torchtitan_ext.transforms.rules import Transform

__all__ = ["async_save", "average", "load", "save"]


def save(
    state_dict: dict[str, Any],
    path: str | os.PathLike[str],
    *,
    transform: Transform | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
    planner: SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> SaveResult:
    """Saves tensors as ``model-00001-of-00002.safetensors`` and so on with their index. Collective.

    The ranks write straight into the files, each what it holds. Old weights in the directory are replaced at once;
    other files there stay, such as a tokenizer.

    Args:
        state_dict: Tensors and ``Stateful`` objects that have tensors, of any layout; of dtypes that the format has.
        path: A directory, on one machine or shared by the ranks; or a folder without weights of an object store
            (docs/use/object_stores.md).
        transform: How the state's tensors become those of the files, see ``tte.transforms``: each rank writes what it
            holds to where that belongs. All but ``dequantize``.
        max_file_bytes: The most bytes of tensors in a file; one that is larger gets a file of its own.
        planner, process_group, no_dist, timeout_seconds: As in ``tte.save``.

    Returns:
        The place, the bytes and the seconds.

    Raises:
        What ``tte.save`` raises.
    """
    call = Call("weights.save", process_group, no_dist, timeout_seconds)
    return save_now(state_dict, _job(path, planner, max_file_bytes, transform), call)


def async_save(
    state_dict: dict[str, Any],
    path: str | os.PathLike[str],
    *,
    transform: Transform | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
    planner: SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
    stager: AsyncStager | None = None,
    process: bool = False,
) -> Future[SaveResult]:
    """Copies the state dict to the CPU, then does what ``save`` does, in a thread. Collective.

    Args:
        stager, process: As in ``tte.async_save``, whose rules hold here.
    """
    call = Call("weights.async_save", process_group, timeout_seconds=timeout_seconds)
    return save_later(state_dict, _job(path, planner, max_file_bytes, transform), call, stager, process=process)


def _job(
    path: str | os.PathLike[str], planner: SavePlanner | None, max_file_bytes: int, transform: Transform | None
) -> SaveJob:
    planner = SavePlanner() if planner is None else planner
    return SaveJob(path, planner=planner, format="safetensors", max_file_bytes=max_file_bytes, transform=transform)


def load(
    state_dict: dict[str, Any],
    path: str | os.PathLike[str],
    *,
    transform: Transform | None = None,
    cast: CastPolicy = "exact",
    share_reads: ShareReads = False,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> LoadReport:
    """Loads tensors of safetensors into a state dict of any layout, in place. Collective.

    ``tte.load`` recognises safetensors too; this one refuses what is none.

    Args:
        path: A file, or a directory with some, with or without an index: of ``save``, of Hugging Face, of DCP's writer.
        transform, cast, share_reads, process_group, no_dist, timeout_seconds: As in ``tte.load``.

    Returns:
        What ``tte.load`` returns.

    Raises:
        WrongValueError: There are no safetensors at ``path``.
        And what ``tte.load`` raises.
    """
    with checking_arguments("weights.load", process_group, no_dist=no_dist):
        if not isinstance(reader_at(path), SafetensorsReader):
            raise WrongValueError(
                f"weights.load: got {str(path)!r}, expected a safetensors file, or a directory with some; tte.load "
                "loads checkpoints"
            )
    return checkpoint.load(
        state_dict,
        path,
        transform=transform,
        cast=cast,
        share_reads=share_reads,
        process_group=process_group,
        no_dist=no_dist,
        timeout_seconds=timeout_seconds,
    )


def average(
    run: str | os.PathLike[str],
    last: int = 5,
    *,
    out: str | os.PathLike[str],
    to: NewFormat | None = None,
    weights: Sequence[float] | None = None,
    accumulate: Accumulate = "float32",
    others: Others = "equal",
    only: Sequence[str] = (),
    prefix: str = "",
    step_pattern: str | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
    overwrite: bool = False,
    max_bytes: int = 1 << 30,
    num_processes: int | None = None,
) -> MergeReport:
    """Writes the mean of the newest steps of a run, saved on any layouts. Not collective: one rank calls it, or no job.

    Forked processes read and write in bounded memory. ``out`` becomes whole, or stays what it was.

    Args:
        run: A directory or URL with finished steps; those that it has left behind do not count.
        last: How many of the newest steps; a run with fewer is refused.
        out: A directory on a disk; a file for ``to="torch"``. ``overwrite`` replaces what is there.
        to: ``"dcp"``, ``"safetensors"``, which holds tensors alone, or ``"torch"``; by default the format of the steps.
        weights: One for each step, oldest first, divided by their sum; by default equal ones.
        accumulate: The dtype of the sums, which are rounded once; of elements of 64 bits it is float64 in any case.
        others: Integers, bools and values, such as the step: ``"equal"`` refuses what is not equal in all steps,
            ``"last"`` takes what the newest one has.
        only, prefix: Globs of keys; only keys below this one, such as ``"model"``, by the rest of their names.
        step_pattern: How the run names its steps, as in ``tte.load``.
        max_file_bytes: The most bytes of tensors in a safetensors file.
        max_bytes: The bytes of tensors that all processes together hold at a time.
        num_processes: By default one per core. Must be 1 in a process that uses CUDA or a process group.

    Returns:
        Keys, bytes and files; the steps, and by which weights they were multiplied.

    Raises:
        FileExistsError: There is something at ``out``, and ``overwrite`` is false.
        WrongValueError: The run has fewer steps, weights do not fit, or nothing is selected.
        StateRefusedError: Keys differ, or have a dtype without a mean (float8). All are named; nothing was written.
        DamagedCheckpointError: A step is damaged.
        OSError: A file cannot be read or written.
    """
    check_count("weights.average", "last", last)
    steps = newest_steps(run, last, step_pattern=step_pattern)
    if len(steps) < last:
        raise WrongValueError(f"weights.average: got last={last}, and {run} has {len(steps)} finished steps", "last")
    return merge(
        [open_source(step) for step in steps],
        out,
        to=to,
        weights=weights,
        accumulate=accumulate,
        others=others,
        selection=Selection(tuple(only), prefix),
        max_file_bytes=max_file_bytes,
        overwrite=overwrite,
        max_bytes=max_bytes,
        num_processes=num_processes,
    )
