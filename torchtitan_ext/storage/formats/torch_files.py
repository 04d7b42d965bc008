"""Files of ``torch.save``: their contents, and where their tensors lie.

Tensors are loaded without memory (meta), which notes where the bytes of each storage begin. Only tensors and plain
values are unpickled, unless the caller allows more.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from torchtitan_ext import _core
from torchtitan_ext._core import ChunkSummary, KeySummary
from torchtitan_ext.errors import DamagedCheckpointError, UnsafePickleError
from torchtitan_ext.state.nested import FlatStateDict, flat_keys
from torchtitan_ext.state.plain_value import NotPlainError, read_value
from torchtitan_ext.storage.checkpoint_files import Record
from torchtitan_ext.storage.commit.steps import step_of
from torchtitan_ext.storage.element_types import ITEM_BYTES
from torchtitan_ext.storage.formats.archives import find_entries
from torchtitan_ext.storage.formats.contents import ContentFile, Contents, Scalar
from torchtitan_ext.storage.formats.detect import ZIP_START
from torchtitan_ext.storage.formats.plain_files import PlainFiles
from torchtitan_ext.storage.formats.scalars import read_number
from torchtitan_ext.storage.raw_tensor import NAMES, dtype_name

# torch 2.14 looks at the indices of sparse tensors, which have none on the meta device, and then says this.
_NO_INDICES = "Cannot copy out of meta tensor"

_ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes})


class SparseOnMetaError(DamagedCheckpointError):
    """A file holds sparse tensors, which this torch does not load onto the meta device."""


def describe_torch(path: Path, *, unsafe_unpickle: bool = False) -> Contents:
    """The contents of a file of ``torch.save``, nested keys joined by dots; arguments and errors as in ``describe``."""
    value = _load_on_meta(path, unsafe_unpickle)
    state = flat_form(path, value) if isinstance(value, Mapping) else FlatStateDict({"": value}, {}, {})
    values = {str(fqn): member for fqn, member in state.values.items()}
    keys = [_key(fqn, member) for fqn, member in values.items()]
    by_name = {key.fqn: key for key in keys}
    files = [ContentFile(path.name, path.stat().st_size, sum(key.dtype is not None for key in keys))]
    return Contents(
        path,
        "torch",
        keys,
        files,
        lambda fqn: [_chunk(by_name[fqn], path.name)],
        lambda wanted: _scalars(path, {key.fqn: values[key.fqn] for key in wanted}),
        state.stock_paths,
        step=step_of(path.parent),
        versions={"torch.save": "zip" if zipfile.is_zipfile(path) else "legacy"},
    )


def _load_file(path: Path, *, weights_only: bool, map_location: str) -> Any:
    """The value in a file of ``torch.save``, with its tensors on a device.

    Raises:
        DamagedCheckpointError: The file cannot be read.
        SparseOnMetaError: This torch does not load the file's sparse tensors onto the meta device.
        UnsafePickleError: The pickle names something that is not plain data.
    """
    try:
        return read_value(path, weights_only=weights_only, map_location=map_location)
    except NotPlainError as error:
        raise UnsafePickleError(str(path), f"it names {error.found}") from None
    except ValueError as error:
        if map_location == "meta" and _NO_INDICES in str(error):
            kind = "a sparse tensor is no plain memory, which is all that can be read of such files"
            raise SparseOnMetaError(f"{path}: {kind}") from None
        raise DamagedCheckpointError(f"{path}: {error}") from None


def flat_form(path: Path, state: Mapping[Any, Any]) -> FlatStateDict:
    """The state dict of a file with the flat keys of DCP.

    Raises:
        DamagedCheckpointError: Two values have one key, a dict contains itself, or a key is no Unicode text.
    """
    try:
        flat = flat_keys(state, tuples="as_stock")
        for fqn in flat.values:
            fqn.encode()
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpointError(f"{path}: {error}") from None
    return flat


def read_torch_file(path: Path, *, weights_only: bool) -> PlainFiles:
    """The state dict in a file, with the places of its tensors.

    Raises:
        DamagedCheckpointError: The file is damaged, was written by torch before 1.6 or on a machine with another byte
            order, or contains no state dict of plain memory.
        UnsafePickleError: The file contains more than plain data.
    """
    sizes = dict(find_entries(path).values())
    flat = _load(path, weights_only, "meta")
    tensors = {fqn: _record_of(one, path, sizes) for fqn, one in flat.values.items() if isinstance(one, torch.Tensor)}
    values = {fqn: value for fqn, value in flat.values.items() if fqn not in tensors}
    if not _ATOMS.issuperset(map(type, values.values())):  # other values may hold tensors, too
        with_data = _load(path, weights_only, "cpu").values
        values = {fqn: with_data[fqn] for fqn in values}
    places = {fqn: [((0,) * flat.values[fqn].dim(), record)] for fqn, record in tensors.items()}
    return PlainFiles(path, places, values, flat.stock_paths, _saved)


def _saved(value: Any) -> npt.NDArray[np.uint8]:
    """The bytes of a value as ``torch.save`` writes it."""
    stream = io.BytesIO()
    torch.save(value, stream)
    return np.frombuffer(stream.getbuffer(), dtype=np.uint8)


def _load_on_meta(path: Path, unsafe_unpickle: bool) -> Any:
    is_zip = zipfile.is_zipfile(path)
    if not is_zip and _begins_as_zip(path):
        raise DamagedCheckpointError(f"{path}: the archive has no end: the file was cut, or is still being written")
    if is_zip:
        find_entries(path)  # torch crashes on the meta device if the numbers have another byte order
    try:
        return _load_file(path, weights_only=not unsafe_unpickle, map_location="meta")
    except SparseOnMetaError:
        return _load_file(path, weights_only=not unsafe_unpickle, map_location="cpu")


def _begins_as_zip(path: Path) -> bool:
    with path.open("rb") as stream:
        return stream.read(len(ZIP_START)) == ZIP_START


def _key(fqn: str, value: Any) -> KeySummary:
    if not isinstance(value, torch.Tensor):
        return KeySummary(fqn, None, None, 0, 0)
    return KeySummary(fqn, dtype_name(value.dtype), tuple(value.shape), value.numel() * value.element_size(), 1)


def _scalars(path: Path, values: Mapping[str, Any]) -> dict[str, Scalar]:
    """Single values, and the elements of tensors without dims, which are read from the file."""
    found: dict[str, Scalar] = {}
    with path.open("rb") as file:
        for fqn, value in values.items():
            if value is None or type(value) in (bool, int, float, complex, str):
                found[fqn] = value
            elif type(value) is torch.Tensor and value.layout is torch.strided and value.dim() == 0:
                begin = getattr(value.untyped_storage(), "_checkpoint_offset", None)
                dtype = dtype_name(value.dtype)
                if begin is not None and dtype in ITEM_BYTES:
                    offset = begin + int(value.storage_offset()) * ITEM_BYTES[dtype]
                    found |= read_number(file.fileno(), fqn, _core.StoredTensor(dtype, (), (), offset))
    return found


def _chunk(key: KeySummary, name: str) -> ChunkSummary:
    offsets = None if key.sizes is None else (0,) * len(key.sizes)
    return ChunkSummary(offsets, key.sizes, name, None, key.num_bytes)


def _load(path: Path, weights_only: bool, location: str) -> FlatStateDict:
    state = _load_file(path, weights_only=weights_only, map_location=location)
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
    stored = _core.StoredTensor(NAMES[tensor.dtype], tuple(tensor.shape), tensor.stride(), offset)
    end = _core.elements_needed(tensor.shape, tensor.stride(), int(tensor.storage_offset())) * tensor.element_size()
    if end > sizes.get(begin, 0):
        raise DamagedCheckpointError(
            f"{path}: a tensor needs {end} bytes of its storage at byte {begin}, which has {sizes.get(begin, 0)}"
        )
    return Record(path.name, offset, tensor.nbytes, stored)
