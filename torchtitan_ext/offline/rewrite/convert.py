"""Writes a checkpoint in another format, in bounded memory."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Literal, get_args

from torchtitan_ext.errors import Problem, WrongValueError, named, refusal
from torchtitan_ext.offline.boxes import Piece, batches_of, piece_of, whole
from torchtitan_ext.offline.rewrite.reshard import MeshPlan, write_checkpoint
from torchtitan_ext.offline.rewrite.targets import refuse_existing
from torchtitan_ext.offline.selection import SelectedKeys, Selection
from torchtitan_ext.offline.sources import FileSource
from torchtitan_ext.offline.workers import Shares, run_tasks
from torchtitan_ext.storage.checkpoint_files import sync_directory
from torchtitan_ext.storage.commit.staged_target import staged_target
from torchtitan_ext.storage.element_types import is_exact_cast
from torchtitan_ext.storage.formats.safetensors_files import NAME_OF_DTYPE
from torchtitan_ext.storage.formats.sparse_files import sync_files, write_parts
from torchtitan_ext.storage.formats.weights_directory import refuse_irreplaceable, replace_weights
from torchtitan_ext.storage.progress import OnBytes
from torchtitan_ext.storage.weights.layout import lay_out_weights, make_weights

# A task is large enough that its start does not count, and small enough that processes end together.
_TASK_BYTES = 256 << 20

NewFormat = Literal["dcp", "safetensors"]


@dataclass(frozen=True)
class ConvertReport:
    """What ``convert`` wrote.

    Attributes:
        num_bytes: Size of all tensors in bytes.
        dropped: Keys of values that the format cannot hold.
        cast: Keys of tensors whose dtype was changed.
        is_exact: Whether these casts keep every value, judged by the dtypes alone.
    """

    num_keys: int
    num_bytes: int
    num_files: int
    dropped: tuple[str, ...]
    cast: tuple[str, ...] = ()
    is_exact: bool = True


def convert(
    source: FileSource,
    target: str | os.PathLike[str],
    *,
    to: NewFormat,
    selection: Selection | None = None,
    dtype: str | None = None,
    max_file_bytes: int = 5 * 10**9,
    overwrite: bool = False,
    max_bytes: int = 1 << 30,
    num_processes: int | None = None,
    progress: OnBytes = lambda _: None,
) -> ConvertReport:
    """Writes a checkpoint of DCP (``"dcp"``), or a directory of safetensors.

    The target becomes whole, or stays what it was. A directory of safetensors keeps files that are no weights;
    ``replace_weights`` says what its readers see meanwhile.

    Args:
        to: ``"dcp"``, ``"safetensors"``.
        dtype: Cast floating-point tensors to it on the way; values can change then, as with ``cast="allow"``.
        max_file_bytes: The largest size of a safetensors file; a tensor that is larger gets a file of its own.
        max_bytes: The bytes of tensors that all processes together hold at a time.
        num_processes: By default one per core. Must be 1 in a process that uses CUDA or a process group.

    Raises:
        FileExistsError: The target exists, and ``overwrite`` is false or the target is of another kind.
        StateRefusedError: Tensors are no plain memory, or have a dtype that the format lacks.
        DamagedCheckpointError: Bytes of the source are not those that were saved.
        WrongValueError: A number is too large for ``dtype``, or nothing is selected.
        CheckpointReadError: A value is more than plain data.
        OSError: A file cannot be read or written.
    """
    if to not in get_args(NewFormat):
        raise WrongValueError(f"convert: got to={to!r}, expected one of {named(get_args(NewFormat))}")
    refuse_existing(Path(target), overwrite)
    if to == "safetensors" and Path(target).is_dir():
        refuse_irreplaceable(Path(target))
    keys = SelectedKeys(source, selection or Selection(), dtype)
    shares = keys.divide(max_bytes, num_processes)
    num_files = 1
    dropped: tuple[str, ...] = ()
    if to == "dcp":
        write_checkpoint(MeshPlan(keys, None), target, shares, progress)
    else:
        with staged_target(Path(target), replace_weights) as staged:
            places = _lay_out_safetensors(keys, staged, max_file_bytes)
            _fill_files(keys, places, shares, progress)
            paths = sorted({path for _, (path, _) in places}) or [staged]
            sync_files(paths)
            sync_directory(staged)
        num_files, dropped = len(paths), tuple(keys.values)
    is_exact = all(is_exact_cast(saved, dtype or saved) for saved in keys.cast.values())
    return ConvertReport(len(keys.fqns) - len(dropped), keys.num_bytes, num_files, dropped, tuple(keys.cast), is_exact)


_Destination = tuple[Piece, tuple[Path, int]]
"""A box of the source, and the file and the byte where its elements go, row by row."""


def _fill_files(keys: SelectedKeys, places: Sequence[_Destination], shares: Shares, progress: OnBytes) -> None:
    """Writes the elements of tensors to their places in files that exist already."""
    boxes = [box for box, _ in places]
    tasks = list(batches_of(boxes, _TASK_BYTES, max_parts=sys.maxsize))

    def fill(number: int, on_bytes: OnBytes) -> None:
        task = tasks[number]
        for batch in keys.reader.read_batches([piece_of(boxes, part) for part in task], shares.part_bytes):
            written = []
            for _, memory, inner in batch:
                outer = task[inner.box]
                path, begin = places[outer.box][1]
                written.append((path, begin + outer.first_byte + inner.first_byte, memory.ctypes.data, memory.nbytes))
            write_parts(written)
            on_bytes(sum(part.num_bytes for *_, part in batch))

    run_tasks(fill, len(tasks), shares.num_processes, progress)


def _lay_out_safetensors(keys: SelectedKeys, directory: Path, max_file_bytes: int) -> list[_Destination]:
    """Makes the files without data, and an index if there are several files."""
    tensors = {key: (entry.dtype, entry.shape) for key, entry in keys.tensors.items()}
    odd = [key for key, (dtype, _) in tensors.items() if dtype not in NAME_OF_DTYPE]
    if odd:
        what = "is {}, which safetensors files have no name for; leave it out with --only, or convert to dcp"
        raise refusal("convert", [Problem("wrong_dtype", key, what.format(tensors[key][0])) for key in odd])
    files = lay_out_weights(tensors, max_file_bytes)
    paths = make_weights(files, directory)
    if len(files) > 1:
        sync_files([paths[-1]])
    places = [
        (whole(keys.fqns[key], keys.tensors[key]), (directory / name, offset))
        for name, file in files.items()
        for key, offset in file.offsets.items()
    ]
    return sorted(places, key=itemgetter(1))
