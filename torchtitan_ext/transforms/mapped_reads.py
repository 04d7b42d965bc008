"""The elements of mapped tensors: which runs of which sources a box of them needs."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from operator import add

import torch

from torchtitan_ext.errors import CheckpointReadError, DamagedCheckpointError
from torchtitan_ext.layout.dtensor import view_of
from torchtitan_ext.storage.native.fills import Elements
from torchtitan_ext.storage.native.open_files import OpenFiles
from torchtitan_ext.storage.raw_tensor import DTYPES, dtype_name
from torchtitan_ext.transforms.mapped import MappedState

_NOT_PLAIN = "it is a tensor subclass, quantised or sparse: a transform takes plain tensors; load it without"


def mapped_elements(mapped: MappedState, files: OpenFiles, fqn: str, offsets: Sequence[int]) -> Elements:
    """The elements of a target from these offsets on. Reading them raises:

    Raises:
        CheckpointReadError: A source is no plain memory.
        DamagedCheckpointError: A source has another dtype or shape than the metadata says.
    """
    read_into = functools.partial(_read_into, mapped, files, fqn, offsets)
    dtypes, scale_dtype = mapped.dtypes(fqn), mapped.scale_dtype(fqn)
    scales = None if scale_dtype is None else (scale_dtype, functools.partial(read_into, scale_dtype, scales=True))
    return Elements(dtypes, functools.partial(read_into, dtypes[0]), scales)


def _read_into(
    mapped: MappedState,
    files: OpenFiles,
    fqn: str,
    begin: Sequence[int],
    dtype: torch.dtype,
    inside: Sequence[int],
    place: torch.Tensor,
    *,
    scales: bool = False,
) -> None:
    if 0 in place.shape:
        return
    offsets = tuple(map(add, begin, inside))
    parts = mapped.parts(fqn, offsets, tuple(place.shape), place.stride(), scales=scales)
    if not scales:
        for value, view in mapped.fills(fqn, offsets, tuple(place.shape)):
            view_of(place, view).fill_(value)
    chunks = [mapped.chunk_of(part) for part in parts]
    records = files.source.find_records([index for index, _ in chunks])
    for part, (index, sizes), record in zip(parts, chunks, records, strict=True):
        if record.tensor is None:
            raise CheckpointReadError(index.fqn, _NOT_PLAIN)
        if DTYPES[record.tensor.dtype] != dtype or record.tensor.sizes != sizes:
            raise DamagedCheckpointError(f"{record.file}: {index.fqn} is not of the dtype and shape in .metadata")
        stored = part.stored(record.tensor)
        address = place.data_ptr() + part.memory_offset * place.itemsize
        origin, strides = (0,) * len(stored.sizes), part.memory_strides
        files.add_box(record.file, stored, origin, stored.sizes, address, strides, dtype_name(place.dtype))
