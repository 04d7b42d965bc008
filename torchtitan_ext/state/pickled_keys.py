"""Whether the keys of a pickle can be hashed in time. Imports no torch, and runs nothing that the pickle names.

A key of tuples in tuples, each of which holds the one before twice, is a few bytes of a pickle, and takes for ever to
hash.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import IO, Any

# So many tuples within each other are hashed in about a second; honest keys take fewer than their pickle has bytes.
_HASHED_TUPLES = 1 << 24


class EndlessKeyError(ValueError):
    """Keys of dicts, or members of sets, are tuples that take too long to hash."""


def check_keys(stream: IO[bytes], num_bytes: int, *, num_pickles: int = 1) -> None:
    """Reads pickles that stand behind each other. What else is wrong with them is for those to say who unpickle them.

    Args:
        stream: At the first one.
        num_bytes: No smaller than what these pickles take.

    Raises:
        EndlessKeyError: Whoever unpickles them as they are meant does not come to an end.
    """
    for _ in range(num_pickles):
        try:
            KeyReader(stream, num_bytes).load()
        except EndlessKeyError:
            raise
        except Exception:  # whatever bytes make of a pickle's machine
            return


class Anything:
    """Stands for whatever else a pickle names or makes; takes all that is done with it."""

    __slots__ = ("__name__",)

    def __init__(self, name: str = "") -> None:
        self.__name__ = name

    def __call__(self, *_: Any, **__: Any) -> Anything:
        return self

    append = extend = __call__


_Unpickler: Any = pickle._Unpickler  # the one in C takes the memory that a hostile pickle asks for


class KeyReader(_Unpickler):
    """Makes lists, tuples and numbers alone. Nothing is hashed or put into dicts, sets and objects; what hashing would
    go through is counted instead."""

    def __init__(self, stream: IO[bytes], num_bytes: int) -> None:
        super().__init__(stream)
        self._num_left = _HASHED_TUPLES + 16 * num_bytes
        self._steps: dict[int, tuple[tuple[Any, ...], int]] = {}  # by identity, which a tuple that is kept keeps

    def find_class(self, module: str, name: str) -> Any:
        return Anything(name)

    def persistent_load(self, pid: Any) -> Any:
        return Anything()

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
        self.stack[-2:] = [Anything()]

    def _make_of_three(self) -> None:
        self.stack[-3:] = [Anything()]

    def _make_dict(self) -> None:
        self._drop_pairs()
        self.append(Anything())

    def _make_set(self) -> None:
        self._drop_members()
        self.append(Anything())

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
