"""Safetensors, the weight files of Hugging Face's libraries, saved from and loaded into any layout.

Every function is collective. It is a module of its own, because such files are no checkpoints of a run: they have
tensors and nothing else, no checksums, and the names that other libraries want.
"""

from __future__ import annotations

import os
from concurrent.futures import Future
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.staging import AsyncStager

from torchtitan_ext import checkpoint
from torchtitan_ext.checkpoint import LoadReport, SavePlanner, SaveResult
from torchtitan_ext.checkpoint.operation.phases import TIMEOUT_SECONDS, checking_arguments
from torchtitan_ext.checkpoint.operation.save_job import SaveJob
from torchtitan_ext.checkpoint.operation.saves import Call, save_later, save_now
from torchtitan_ext.checkpoint.rules.casts import CastPolicy
from torchtitan_ext.errors import WrongValueError
from torchtitan_ext.storage.weights.safetensors_reader import SafetensorsReader, reader_at
from torchtitan_ext.storage.weights.writer import MAX_FILE_BYTES
from torchtitan_ext.transforms.rules import Transform

__all__ = ["async_save", "load", "save"]


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
        path: A directory, on one machine or shared by the ranks.
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
) -> Future[SaveResult]:
    """Copies the state dict to the CPU, then does what ``save`` does, in a thread. Collective.

    Args:
        stager: As in ``tte.async_save``, whose rules hold here.
    """
    call = Call("weights.async_save", process_group, timeout_seconds=timeout_seconds)
    return save_later(state_dict, _job(path, planner, max_file_bytes, transform), call, stager)


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
    share_reads: bool = False,
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
