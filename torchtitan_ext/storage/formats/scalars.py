"""Reads single numbers and texts of a checkpoint, numbers in their shortest form. Imports no torch.

Nothing that a pickle names is made: see ``plain_records``.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from torchtitan_ext import _core
from torchtitan_ext.storage.checkpoint_files import find_stock_tensors
from torchtitan_ext.storage.formats.contents import Scalar
from torchtitan_ext.storage.formats.plain_records import RecordPlace, containers_of, read_places, read_records
from torchtitan_ext.storage.location import Location
from torchtitan_ext.storage.metadata.saved_metadata import SavedMetadata

# A record of torch.save with one value in it has some 1,300 bytes; a longer text is nothing for a table.
_MAX_RECORD_BYTES = 1 << 14

_VALUES = (type(None), bool, int, float, str)


def plain_value_of(pickled: bytes) -> Scalar:
    """The value of a pickle that is one number, text, truth value or ``None``.

    Raises:
        ValueError: It is more, or none.
    """
    value: Scalar = containers_of(pickled)
    if type(value) not in _VALUES:
        raise ValueError(f"{type(value).__name__} is more than a plain value")
    return value


def read_number(descriptor: int, fqn: str, stored: _core.StoredTensor) -> dict[str, Scalar]:
    """The element of a tensor without dims, by its name; empty if it cannot be read."""
    data = os.pread(descriptor, stored.item_bytes, stored.data_offset)
    number = _core.number_of(data, stored.dtype) if len(data) == stored.item_bytes else None
    return {} if number is None else {fqn: number}


def read_scalars(path: Path | Location, saved: SavedMetadata, keys: Iterable[tuple[str, bool]]) -> dict[str, Scalar]:
    """Single plain values of a DCP checkpoint; values that cannot be read are left out. Compares no checksums.

    Args:
        keys: Names of keys, each with whether it is a tensor.
    """
    is_tensor = dict(keys)

    def read(name: str, descriptor: int, places: Sequence[RecordPlace]) -> Iterator[tuple[str, Scalar]]:
        lengths = {offset: num_bytes for _, offset, num_bytes in places}
        stored = _stored(path / name, saved, name, lengths, descriptor)
        for fqn, offset, _ in places:
            tensor = stored.get(offset)
            if tensor is not None and not tensor.sizes:
                yield from read_number(descriptor, fqn, tensor).items()

    texts = [fqn for fqn in is_tensor if not is_tensor[fqn]]
    values: dict[str, Scalar] = read_records(path, saved, texts, max_bytes=_MAX_RECORD_BYTES, loads=plain_value_of)
    return values | read_places(path, saved, ((fqn, ()) for fqn in is_tensor if is_tensor[fqn]), read)


def _stored(
    path: Path | Location, saved: SavedMetadata, name: str, tensors: dict[int, int], descriptor: int
) -> dict[int, _core.StoredTensor | None]:
    """The tensors in a file, by the offsets of their records."""
    known = {} if saved.index is None or name not in saved.index.files else saved.index.tensors(name)
    unknown = {offset: size for offset, size in tensors.items() if offset not in known}
    return {**known, **find_stock_tensors(path, unknown, 1, descriptor)}
