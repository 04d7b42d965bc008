"""How many bytes the tensors of a pickle by ``torch.save`` need of each storage. Imports no torch, and runs nothing
that the pickle names.
"""

from __future__ import annotations

import io
from typing import Any, NamedTuple

from torchtitan_ext.state.pickled_keys import Anything, EndlessKeyError, KeyReader
from torchtitan_ext.storage.element_types import ITEM_BYTES, UNTYPED, dtype_name_of, elements_needed

_REBUILD = ("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3")

# Behind strides, in the arguments of _rebuild_tensor_v3, whose storages are untyped.
_DTYPE_POSITION = 2


def find_storages(data: bytes) -> dict[str, int]:
    """The bytes that are needed of each storage, by its name in the archive.

    Raises:
        EndlessKeyError: Whoever unpickles it as it is meant does not come to an end.
        ValueError: It is no pickle, or one of something else.
    """
    reader = _StorageReader(data)
    try:
        reader.load()
    except EndlessKeyError:
        raise
    except Exception as error:  # whatever bytes make of a pickle's machine
        raise ValueError(f"its pickle cannot be read: {type(error).__name__}, {error}") from None
    return reader.needed


class _Storage(NamedTuple):
    name: str
    storage_class: str


class _StorageReader(KeyReader):
    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data), len(data))
        self.needed: dict[str, int] = {}

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch._utils" and name in _REBUILD:
            return self._add_tensor
        return Anything(name)

    def persistent_load(self, pid: Any) -> Any:
        kind, storage_class, name, _, num_elements = pid
        if kind != "storage" or type(name) is not str:
            raise ValueError("a persistent id is none of a storage")
        storage = _Storage(name, storage_class.__name__)
        item_bytes = 1 if storage.storage_class == UNTYPED else _item_bytes(storage, "")
        self._add(storage, item_bytes, _whole([num_elements])[0])
        return storage

    def _add_tensor(self, storage: _Storage, offset: Any, sizes: Any, strides: Any, *rest: Any) -> Anything:
        dtype = rest[_DTYPE_POSITION] if len(rest) > _DTYPE_POSITION else None
        item_bytes = _item_bytes(storage, getattr(dtype, "__name__", ""))
        self._add(storage, item_bytes, elements_needed(_whole(sizes), _whole(strides), *_whole([offset])))
        return Anything()

    def _add(self, storage: _Storage, item_bytes: int, num_elements: int) -> None:
        self.needed[storage.name] = max(self.needed.get(storage.name, 0), item_bytes * num_elements)


def _whole(numbers: Any) -> list[int]:
    """Sizes, strides and the like as a list. Raises ValueError where they are something else, such as lists, of which a
    multiple is a longer list."""
    found = list(numbers)
    if not all(type(number) is int and 0 <= number < 2**63 for number in found):
        raise ValueError("a tensor has sizes, strides or an offset that no tensor has")
    return found


def _item_bytes(storage: _Storage, dtype: str) -> int:
    """0 where they are not known, as of quantised numbers."""
    name = dtype_name_of(storage.storage_class, dtype)
    return 0 if name is None else ITEM_BYTES[name]
