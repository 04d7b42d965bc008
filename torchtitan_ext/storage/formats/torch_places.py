"""Where the tensors of ``torch.save`` files lie, and new files that are written without the state in memory.

Only plain data is unpickled, unless the caller allows more, and no tensor is read: ``torch.load`` onto the meta device
notes where the bytes of each storage begin.
"""

from __future__ import annotations

import errno
import io
import mmap
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from torchtitan_ext.errors import DamagedCheckpointError
from torchtitan_ext.state.nested import FlatStateDict
from torchtitan_ext.storage.checkpoint_files import Record, StoredTensor
from torchtitan_ext.storage.element_types import elements_needed
from torchtitan_ext.storage.formats.archives import find_entries
from torchtitan_ext.storage.formats.sparse_files import write_parts
from torchtitan_ext.storage.formats.torch_files import flat_form, load_file
from torchtitan_ext.storage.raw_tensor import NAMES

_ALIGNMENT = 64

_ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes})

# Linux: untouched pages are not counted as memory. Python's mmap has the name since 3.13.
_MAP_NORESERVE = 0x4000


class TorchFile(NamedTuple):
    """The contents of a file by flat key; ``paths`` are the keys' paths in the nested state dict."""

    tensors: dict[str, Record]
    values: dict[str, Any]
    paths: dict[str, tuple[Any, ...]]


def read_torch_file(path: Path, *, weights_only: bool) -> TorchFile:
    """The values of the state dict in a file, and the places of its tensors.

    Raises:
        DamagedCheckpointError: The file is damaged, was written by torch before 1.6 or on a machine with another byte
            order, or contains no state dict of plain memory.
        UnsafePickleError: The file contains more than plain data.
    """
    sizes = dict(find_entries(path).values())
    flat = _load(path, weights_only, "meta")
    tensors = {
        fqn: _record_of(value, path, sizes) for fqn, value in flat.values.items() if isinstance(value, torch.Tensor)
    }
    values = {fqn: value for fqn, value in flat.values.items() if fqn not in tensors}
    if not _ATOMS.issuperset(map(type, values.values())):  # other values may hold tensors, too
        with_data = _load(path, weights_only, "cpu").values
        values = {fqn: with_data[fqn] for fqn in values}
    return TorchFile(tensors, values, flat.stock_paths)


def empty_tensors(tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]]) -> dict[str, torch.Tensor]:
    """Tensors that take address space but no memory, each with a storage of its own."""
    ends: dict[str, int] = {}
    end = 0
    for fqn, (dtype, sizes) in tensors.items():
        ends[fqn] = end = (end + torch.Size(sizes).numel() * dtype.itemsize + _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    memory = mmap.mmap(-1, max(end, 1), flags=flags)
    made, begin = {}, 0
    for fqn, (dtype, sizes) in tensors.items():
        num_bytes = torch.Size(sizes).numel() * dtype.itemsize
        if num_bytes == 0:
            made[fqn] = torch.empty(tuple(sizes), dtype=dtype, device="cpu")
        else:
            flat = torch.frombuffer(memory, dtype=torch.uint8, offset=begin, count=num_bytes)
            made[fqn] = flat.view(dtype).view(tuple(sizes))
        begin = ends[fqn]
    return made


def write_without_data(state: Mapping[str, Any], path: Path, *, weights_only: bool) -> dict[str, Record]:
    """Writes a file with holes for the bytes of its tensors, and returns the place of each by flat key.

    Tensors inside other values, such as tuples, are written with their bytes.

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
    records = read_torch_file(path, weights_only=weights_only).tensors
    offsets = {record.offset for record in records.values()}
    begins = {name: begin for name, (begin, _) in find_entries(path).items()}
    for number, storage in enumerate(_StorageList(state).storages):
        begin = begins[f"data/{number}"]
        if begin not in offsets and storage.nbytes():
            write_parts([(path, begin, torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage))])
    return records


class _StorageList(pickle.Pickler):
    """The storages of all tensors in a value, in the order of ``torch.save``."""

    def __init__(self, value: Any) -> None:
        super().__init__(io.BytesIO(), protocol=torch.serialization.DEFAULT_PROTOCOL)
        self._found: dict[int, torch.UntypedStorage] = {}
        self.dump(value)

    @property
    def storages(self) -> list[torch.UntypedStorage]:
        return list(self._found.values())

    def persistent_id(self, value: Any) -> str | None:
        if isinstance(value, torch.storage.TypedStorage):
            value = value._untyped_storage
        if not isinstance(value, torch.UntypedStorage):
            return None
        self._found.setdefault(value._cdata, value)
        return "storage"


def _load(path: Path, weights_only: bool, location: str) -> FlatStateDict:
    state = load_file(path, weights_only=weights_only, map_location=location)
    if not isinstance(state, Mapping):
        raise DamagedCheckpointError(f"{path} holds a {type(state).__name__}, expected a state dict")
    return flat_form(path, state)


def _record_of(tensor: torch.Tensor, path: Path, sizes: Mapping[int, int]) -> Record:
    """Where a tensor on the meta device lies in the file; ``sizes`` of the entries by their first bytes."""
    is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    begin = getattr(tensor.untyped_storage(), "_checkpoint_offset", None) if is_plain else None
    if begin is None or tensor.dtype not in NAMES or tensor.is_conj() or tensor.is_neg():
        kind = f"{type(tensor).__name__} of {tensor.dtype}, {tensor.layout}"
        raise DamagedCheckpointError(
            f"{path}: a {kind} is no plain memory, which is all that can be read of such files"
        )
    offset = begin + tensor.storage_offset() * tensor.element_size()
    stored = StoredTensor(NAMES[tensor.dtype], tuple(tensor.shape), tensor.stride(), offset)
    end = elements_needed(tensor.shape, tensor.stride(), int(tensor.storage_offset())) * tensor.element_size()
    if end > sizes.get(begin, 0):
        raise DamagedCheckpointError(
            f"{path}: a tensor needs {end} bytes of its storage at byte {begin}, which has {sizes.get(begin, 0)}"
        )
    return Record(path.name, offset, tensor.nbytes, stored)
