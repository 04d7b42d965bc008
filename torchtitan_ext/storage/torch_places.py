"""Files of ``torch.save``: where the tensors in one lie, and new ones that are written without holding the state.

Nothing is unpickled that is not plain data, unless the caller says so, and no tensor is read: ``torch.load`` onto the
meta device notes where the bytes of each storage begin.
"""

from __future__ import annotations

import errno
import mmap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from torchtitan_ext.errors import DamagedCheckpointError, UnsafePickleError
from torchtitan_ext.state.nested import flatten_state_dict
from torchtitan_ext.state.plain_value import NotPlainError, read_value
from torchtitan_ext.storage.checkpoint_files import Record, StoredTensor
from torchtitan_ext.storage.raw_tensor import NAMES

_ARCHIVE_START = b"PK\x03\x04"
_ALIGNMENT = 64

_ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes})

# Of Linux; the module knows it since Python 3.13. Pages that nobody touches count for nothing then.
_MAP_NORESERVE = 0x4000


def load_without_data(path: Path, *, weights_only: bool) -> dict[str, Any]:
    """The state dict in a file, nested, with its tensors on the meta device.

    Raises:
        DamagedCheckpointError: The file is damaged, was written by torch before 1.6, or holds no state dict.
        UnsafePickleError: It holds more than plain data.
    """
    with path.open("rb") as file:
        if file.read(len(_ARCHIVE_START)) != _ARCHIVE_START:
            raise DamagedCheckpointError(
                f"{path} is no archive of torch.save: it is damaged, or of torch before 1.6; load and save it once more"
            )
    try:
        state = read_value(path, weights_only=weights_only, map_location="meta")
        if not _holds_atoms_alone(state):  # other values may hold tensors, too
            state = _with_values_of(state, read_value(path, weights_only=weights_only))
    except NotPlainError as error:
        raise UnsafePickleError(str(path), f"it names {error.found}") from None
    except ValueError as error:
        raise DamagedCheckpointError(f"{path}: {error}") from None
    if not isinstance(state, Mapping):
        raise DamagedCheckpointError(f"{path} holds a {type(state).__name__}, expected a state dict")
    return dict(state)


def record_of(tensor: torch.Tensor, path: Path) -> Record:
    """Where a tensor that ``load_without_data`` gave lies in the file.

    Raises:
        DamagedCheckpointError: It is no plain memory.
    """
    is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    begin = getattr(tensor.untyped_storage(), "_checkpoint_offset", None) if is_plain else None
    if begin is None or tensor.dtype not in NAMES or tensor.is_conj() or tensor.is_neg():
        kind = f"{type(tensor).__name__} of {tensor.dtype}, {tensor.layout}"
        raise DamagedCheckpointError(
            f"{path}: a {kind} is no plain memory, which is all that can be read of such files"
        )
    offset = begin + tensor.storage_offset() * tensor.element_size()
    stored = StoredTensor(NAMES[tensor.dtype], tuple(tensor.shape), tensor.stride(), offset)
    return Record(path.name, offset, tensor.nbytes, stored)


def empty_tensors(tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]]) -> dict[str, torch.Tensor]:
    """Tensors of these dtypes and shapes that take address space and no memory, each with a storage of its own."""
    ends: dict[str, int] = {}
    end = 0
    for fqn, (dtype, sizes) in tensors.items():
        ends[fqn] = end = (end + torch.Size(sizes).numel() * dtype.itemsize + _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    room = mmap.mmap(-1, max(end, 1), flags=flags)
    made, begin = {}, 0
    for fqn, (dtype, sizes) in tensors.items():
        num_bytes = torch.Size(sizes).numel() * dtype.itemsize
        if num_bytes == 0:
            made[fqn] = torch.empty(tuple(sizes), dtype=dtype)
        else:
            flat = torch.frombuffer(room, dtype=torch.uint8, offset=begin, count=num_bytes)
            made[fqn] = flat.view(dtype).view(tuple(sizes))
        begin = ends[fqn]
    return made


def write_without_data(state: Mapping[str, Any], path: Path, *, weights_only: bool) -> dict[str, Record]:
    """Writes a file with room where the bytes of its tensors go, and says where, by flat key. The room is a hole.

    Args:
        weights_only: Whether the file may hold plain data only.

    Raises:
        OSError: The file cannot be written.
    """
    try:
        with torch.serialization.skip_data():
            torch.save(state, path)
    except RuntimeError as error:  # torch's archives say no more of a full disk
        raise OSError(errno.EIO, f"torch.save failed ({str(error).partition(chr(10))[0]})", str(path)) from None
    flat = flatten_state_dict(load_without_data(path, weights_only=weights_only)).values
    return {fqn: record_of(value, path) for fqn, value in flat.items() if isinstance(value, torch.Tensor)}


def _holds_atoms_alone(state: Any) -> bool:
    """Whether what is no tensor is a number or text."""
    if type(state) is dict:
        return all(map(_holds_atoms_alone, state.values()))
    if type(state) in (list, tuple):
        return all(map(_holds_atoms_alone, state))
    return isinstance(state, torch.Tensor) or type(state) in _ATOMS


def _with_values_of(state: Any, values: Any) -> Any:
    """The nested state, with what is no tensor from another reading of the same file."""
    if isinstance(state, torch.Tensor):
        return state
    if type(state) is dict:
        return {key: _with_values_of(member, values[key]) for key, member in state.items()}
    if type(state) in (list, tuple):
        return type(state)(_with_values_of(*pair) for pair in zip(state, values, strict=True))
    return values
