"""How many bytes the tensors of a pickle by ``torch.save`` need of each storage. Imports no torch, and runs nothing
that the pickle names.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torchtitan_ext.storage.element_types import ITEM_BYTES, UNTYPED, dtype_name_of, elements_needed

_REBUILD = ("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3")

# Behind strides, in the arguments of _rebuild_tensor_v3, whose storages are untyped.
_DTYPE_POSITION = 2


# So many tuples within each other are hashed in about a second; honest keys take fewer than their pickle has bytes.
_HASHED_TUPLES = 1 << 24


class EndlessKeyError(ValueError):
    """Keys of dicts, or members of sets, are tuples that take too long to hash."""


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


class _Anything:
    """Stands for whatever else a pickle names or makes; takes all that is done with it."""

    __slots__ = ("__name__",)

    def __init__(self, name: str = "") -> None:
        self.__name__ = name

    def __call__(self, *_: Any, **__: Any) -> _Anything:
        return self

    append = extend = __call__


_Unpickler: Any = pickle._Unpickler  # the one in C takes the memory that a hostile pickle asks for


class _StorageReader(_Unpickler):
    """Makes lists, tuples and numbers alone. Nothing is hashed or put into dicts, sets and objects: a key of tuples in
    tuples, each of which holds the one before twice, takes for ever to hash. How long is counted instead."""

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self.needed: dict[str, int] = {}
        self._num_left = _HASHED_TUPLES + 16 * len(data)
        self._steps: dict[int, tuple[tuple[Any, ...], int]] = {}  # by identity, which a tuple that is kept keeps

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch._utils" and name in _REBUILD:
            return self._add_tensor
        return _Anything(name)

    def persistent_load(self, pid: Any) -> Any:
        kind, storage_class, name, _, num_elements = pid
        if kind != "storage" or type(name) is not str:
            raise ValueError("a persistent id is none of a storage")
        storage = _Storage(name, storage_class.__name__)
        item_bytes = 1 if storage.storage_class == UNTYPED else _item_bytes(storage, "")
        self._add(storage, item_bytes, _whole([num_elements])[0])
        return storage

    def _add_tensor(self, storage: _Storage, offset: Any, sizes: Any, strides: Any, *rest: Any) -> _Anything:
        dtype = rest[_DTYPE_POSITION] if len(rest) > _DTYPE_POSITION else None
        item_bytes = _item_bytes(storage, getattr(dtype, "__name__", ""))
        self._add(storage, item_bytes, elements_needed(_whole(sizes), _whole(strides), *_whole([offset])))
        return _Anything()

    def _add(self, storage: _Storage, item_bytes: int, num_elements: int) -> None:
        self.needed[storage.name] = max(self.needed.get(storage.name, 0), item_bytes * num_elements)

    def _hash(self, keys: Sequence[Any]) -> None:
        self._num_left -= sum(self._steps_of(key) for key in keys)
        if self._num_left < 0:
            raise EndlessKeyError("keys of dicts, or members of sets, are tuples that take too long to hash")

    def _steps_of(self, value: Any) -> int:
        """How many values are gone through to hash one."""
        if type(value) is not tuple:
            return 1
        known = self._steps.get(id(value))
        if known is None:
            known = self._steps[id(value)] = value, 1 + sum(map(self._steps_of, value))
        return known[1]

    def _call(self) -> None:
        """What is called may hash the members of a list, or of lists in it: pairs of keys and values."""
        for argument in self.stack[-1]:
            for member in argument if type(argument) is list else ():
                self._hash(member if type(member) is list else (member,))
        _Unpickler.load_reduce(self)

    def _drop_two(self) -> None:
        self._hash(self.stack[-2:-1])
        del self.stack[-2:]

    def _make_of_two(self) -> None:
        self.stack[-2:] = [_Anything()]

    def _make_of_three(self) -> None:
        self.stack[-3:] = [_Anything()]

    def _make_dict(self) -> None:
        self._drop_pairs()
        self.append(_Anything())

    def _make_set(self) -> None:
        self._drop_members()
        self.append(_Anything())

    def _read_bytearray(self) -> None:
        self.append(self.read(int.from_bytes(self.read(8), "little")))  # no more than there is

    def _drop_pairs(self) -> None:
        self._hash(self.pop_mark()[::2])

    def _drop_members(self) -> None:
        self._hash(self.pop_mark())

    def _drop_one(self) -> None:
        del self.stack[-1]

    dispatch: dict[int, Callable[[Any], Any]] = {
        **_Unpickler.dispatch,
        pickle.SETITEM[0]: _drop_two,
        pickle.SETITEMS[0]: _drop_pairs,
        pickle.ADDITEMS[0]: _drop_members,
        pickle.DICT[0]: _make_dict,
        pickle.FROZENSET[0]: _make_set,
        pickle.REDUCE[0]: _call,
        pickle.NEWOBJ[0]: _make_of_two,
        pickle.NEWOBJ_EX[0]: _make_of_three,
        pickle.BUILD[0]: _drop_one,
        pickle.BYTEARRAY8[0]: _read_bytearray,
    }


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
