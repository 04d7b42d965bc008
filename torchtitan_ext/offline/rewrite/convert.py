"""A checkpoint written in another format, without the memory that it would take as a whole."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from torchtitan_ext.checkpoint.planners.targets import is_exact
from torchtitan_ext.dcp_private import unflatten_state_dict
from torchtitan_ext.errors import Problem, refusal
from torchtitan_ext.offline.rewrite.filled_files import TensorPlace, fill_files
from torchtitan_ext.offline.rewrite.reshard import reshard
from torchtitan_ext.offline.rewrite.targets import refuse_existing
from torchtitan_ext.offline.selection import SelectedKeys, Selection
from torchtitan_ext.offline.sources import Source
from torchtitan_ext.offline.workers import divide, room_for_casts
from torchtitan_ext.storage.checkpoint_files import sync_directory
from torchtitan_ext.storage.commit.staged_target import staged_target, take_place
from torchtitan_ext.storage.element_types import num_bytes_of
from torchtitan_ext.storage.formats.safetensors_files import NAME_OF_DTYPE
from torchtitan_ext.storage.formats.safetensors_places import INDEX_NAME, index_of, lay_out
from torchtitan_ext.storage.formats.sparse_files import make_file, sync_files
from torchtitan_ext.storage.formats.torch_places import empty_tensors, write_without_data
from torchtitan_ext.storage.formats.weights_directory import refuse_irreplaceable, replace_weights
from torchtitan_ext.storage.progress import OnBytes
from torchtitan_ext.storage.raw_tensor import NAMES

NewFormat = Literal["dcp", "hf", "torch"]


@dataclass(frozen=True)
class ConvertReport:
    """What was written.

    Attributes:
        num_bytes: Of tensors.
        dropped: Keys of values that the format has no room for.
        cast: Keys of tensors whose dtype was changed.
        is_exact: Whether every value of these is what it was, by their dtypes alone.
    """

    num_keys: int
    num_bytes: int
    num_files: int
    dropped: tuple[str, ...]
    cast: tuple[str, ...] = ()
    is_exact: bool = True


def convert(
    source: Source,
    target: str | os.PathLike[str],
    *,
    to: NewFormat,
    selection: Selection | None = None,
    dtype: torch.dtype | None = None,
    max_file_bytes: int = 5 * 10**9,
    overwrite: bool = False,
    max_bytes: int = 1 << 30,
    num_processes: int | None = None,
    weights_only: bool = True,
    progress: OnBytes = lambda _: None,
) -> ConvertReport:
    """Writes a checkpoint of DCP (``"dcp"``), a directory of safetensors (``"hf"``), or a file of ``torch.save``.

    The target is whole at the end, or what it was before; ``replace_weights`` says what that is of a directory of
    safetensors that holds other files, too, which stay.

    Args:
        dtype: Cast floating-point tensors to it on the way; values can change then, as with ``cast="allow"``.
        max_file_bytes: Of safetensors files; one that holds a larger tensor is as large as that.
        max_bytes: What all processes hold of tensors at a time.
        num_processes: By default one per core. More than one cannot be where CUDA or a process group is in use.
        weights_only: As the source was opened; files of ``torch.save`` get values that are more than plain data only
            without it.

    Raises:
        FileExistsError: There is something at the target, and ``overwrite`` is false, or it is of another kind.
        StateRefusedError: Tensors are no plain memory, or of a dtype that the format does not have.
        DamagedCheckpointError: Bytes of the source are not what was written.
        WrongValueError: A number is too large for ``dtype``, or nothing is selected.
        CheckpointReadError: A value is more than plain data.
        OSError: A file cannot be read or written.
    """
    refuse_existing(Path(target), overwrite)
    _refuse_other_kind(Path(target), to)
    chosen = selection or Selection()
    if to == "dcp":
        report = reshard(
            source,
            target,
            selection=chosen,
            dtype=dtype,
            overwrite=overwrite,
            max_bytes=max_bytes,
            num_processes=num_processes,
            progress=progress,
        )
        casts = ((), True) if dtype is None else _casts_of(SelectedKeys(source, chosen, dtype), dtype)
        return ConvertReport(report.num_keys, report.num_bytes, report.num_ranks, (), *casts)
    keys = SelectedKeys(source, chosen, dtype)
    shares = divide(room_for_casts(max_bytes, keys.cast.values(), dtype), num_processes)
    with staged_target(Path(target), replace_weights if to == "hf" else take_place) as staged:
        places = (
            _lay_out_safetensors(keys, staged, max_file_bytes)
            if to == "hf"
            else _lay_out_torch(keys, staged, weights_only)
        )
        fill_files(keys.reader, places, shares, progress)
        paths = sorted({place.path for place in places}) or [staged]
        sync_files(paths)
        if to == "hf":
            sync_directory(staged)
    dropped = tuple(keys.values) if to == "hf" else ()
    num_keys = len(keys.fqns) - len(dropped)
    return ConvertReport(num_keys, keys.num_bytes, len(paths), dropped, *_casts_of(keys, dtype))


def _casts_of(keys: SelectedKeys, dtype: torch.dtype | None) -> tuple[tuple[str, ...], bool]:
    return tuple(keys.cast), all(is_exact(saved, dtype or saved) for saved in keys.cast.values())


def _lay_out_safetensors(keys: SelectedKeys, directory: Path, max_file_bytes: int) -> list[TensorPlace]:
    """Makes the files, without data, and the index where there are several."""
    tensors = {key: (NAMES[entry.properties.dtype], tuple(entry.size)) for key, entry in keys.tensors.items()}
    odd = [key for key, (dtype, _) in tensors.items() if dtype not in NAME_OF_DTYPE]
    if odd:
        problems = [
            Problem(
                "wrong_dtype",
                key,
                f"is {tensors[key][0]}, which safetensors files have no name for; "
                "leave it out with --only, or convert to dcp or torch",
            )
            for key in odd
        ]
        raise refusal("convert", problems)
    groups = _grouped({key: num_bytes_of(*tensor) for key, tensor in tensors.items()}, max_file_bytes)
    directory.mkdir()
    places = []
    weight_map: dict[str, str] = {}
    for number, group in enumerate(groups, start=1):
        name = f"model-{number:05}-of-{len(groups):05}.safetensors" if len(groups) > 1 else "model.safetensors"
        file = lay_out({key: tensors[key] for key in group})
        make_file(directory / name, file.header, file.num_bytes)
        places += [
            TensorPlace(keys.fqns[key], keys.tensors[key].properties.dtype, directory / name, offset)
            for key, offset in file.offsets.items()
        ]
        weight_map |= dict.fromkeys(group, name)
    if len(groups) > 1:
        text = index_of(weight_map, keys.num_bytes)
        make_file(directory / INDEX_NAME, text, len(text))
        sync_files([directory / INDEX_NAME])
    return sorted(places, key=lambda place: (place.path, place.offset))


def _lay_out_torch(keys: SelectedKeys, path: Path, weights_only: bool) -> list[TensorPlace]:
    """Makes the file, with its values and without the data of tensors."""
    leaves: dict[str, Any] = dict(
        empty_tensors({key: (entry.properties.dtype, entry.size) for key, entry in keys.tensors.items()})
    )
    leaves |= {key: keys.source.read_value(keys.fqns[key]) for key in keys.values}
    ordered = {key: leaves[key] for key in keys.fqns}
    state = unflatten_state_dict(ordered, {key: keys.paths[key] for key in ordered})
    records = write_without_data(state, path, weights_only=weights_only)
    places = [
        TensorPlace(keys.fqns[key], entry.properties.dtype, path, records[key].offset)
        for key, entry in keys.tensors.items()
    ]
    return sorted(places, key=lambda place: place.offset)


def _grouped(num_bytes: Mapping[str, int], max_bytes: int) -> list[list[str]]:
    """Tensors in the order of the checkpoint, in files of at most so many bytes; at least one file."""
    groups: list[list[str]] = [[]]
    total = 0
    for key, size in num_bytes.items():
        if groups[-1] and total + size > max_bytes:
            groups.append([])
            total = 0
        groups[-1].append(key)
        total += size
    return groups


def _refuse_other_kind(target: Path, to: NewFormat) -> None:
    """What is replaced must be of the kind that is written: a file, or a directory without a checkpoint of DCP."""
    if to == "torch" and target.is_dir():
        raise FileExistsError(f"{target} is a directory, and a file is to be written there")
    if to == "hf" and target.is_dir():
        refuse_irreplaceable(target)
