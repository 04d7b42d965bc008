"""The contents of a file of ``torch.save``.

Tensors are loaded without memory (meta). Only tensors and plain values are unpickled, unless the caller allows more.
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from torchtitan_ext.errors import DamagedCheckpointError, UnsafePickleError
from torchtitan_ext.state.nested import FlatStateDict, flatten_state_dict
from torchtitan_ext.state.plain_value import NotPlainError, read_value
from torchtitan_ext.storage.checkpoint_files import StoredTensor
from torchtitan_ext.storage.commit.steps import step_of
from torchtitan_ext.storage.element_types import ITEM_BYTES
from torchtitan_ext.storage.formats.archives import find_entries
from torchtitan_ext.storage.formats.contents import ContentChunk, ContentFile, ContentKey, Contents, Scalar
from torchtitan_ext.storage.formats.detect import ZIP_START
from torchtitan_ext.storage.formats.scalars import read_number
from torchtitan_ext.storage.raw_tensor import dtype_name

# torch 2.14 looks at the indices of sparse tensors, which have none on the meta device, and then says this.
_NO_INDICES = "Cannot copy out of meta tensor"


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


def load_file(path: Path, *, weights_only: bool, map_location: str) -> Any:
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
        flat = flatten_state_dict(state, tuples="as_stock")
        for fqn in flat.values:
            fqn.encode()
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpointError(f"{path}: {error}") from None
    return flat


def _load_on_meta(path: Path, unsafe_unpickle: bool) -> Any:
    is_zip = zipfile.is_zipfile(path)
    if not is_zip and _begins_as_zip(path):
        raise DamagedCheckpointError(f"{path}: the archive has no end: the file was cut, or is still being written")
    if is_zip:
        find_entries(path)  # torch crashes on the meta device if the numbers have another byte order
    try:
        return load_file(path, weights_only=not unsafe_unpickle, map_location="meta")
    except SparseOnMetaError:
        return load_file(path, weights_only=not unsafe_unpickle, map_location="cpu")


def _begins_as_zip(path: Path) -> bool:
    with path.open("rb") as stream:
        return stream.read(len(ZIP_START)) == ZIP_START


def _key(fqn: str, value: Any) -> ContentKey:
    if not isinstance(value, torch.Tensor):
        return ContentKey(fqn, None, None, 0, 0)
    return ContentKey(fqn, dtype_name(value.dtype), tuple(value.shape), value.numel() * value.element_size(), 1)


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
                    found |= read_number(file.fileno(), fqn, StoredTensor(dtype, (), (), offset))
    return found


def _chunk(key: ContentKey, name: str) -> ContentChunk:
    offsets = None if key.sizes is None else (0,) * len(key.sizes)
    return ContentChunk(offsets, key.sizes, name, None, key.num_bytes)
