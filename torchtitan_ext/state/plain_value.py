"""Reads non-tensor values of a checkpoint back without running code from it.

``torch.load(weights_only=True)`` takes builtin containers, numbers, strings and tensors. Training state also
holds values of a few standard classes that carry data and nothing else: arguments in a ``Namespace``, NumPy's RNG
state, losses in a ``BytesIO``. ``why_not_plain`` says while saving what would not come back.
"""

from __future__ import annotations

import argparse
import array
import builtins
import codecs
import collections
import datetime
import decimal
import fractions
import io
import ipaddress
import mmap
import pathlib
import pickle
import re
import sys
import types
import uuid
import zipfile
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from torchtitan_ext import _core
from torchtitan_ext.errors import argument_error, check_argument, described, first_line
from torchtitan_ext.state.nested import walk_objects

_NUMPY_RECONSTRUCT: Any = np.empty(0).__reduce__()[0]
_NUMPY_SCALAR: Any = np.float64(0).__reduce__()[0]
_PATHS = (pathlib.PurePosixPath, pathlib.PureWindowsPath, type(pathlib.Path()))

# What may be called, or given its state, while a value is read. NumPy 2 moved its two functions; both names are in use.
_PLAIN_GLOBALS: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = [
    bytes,
    frozenset,
    range,
    slice,
    io.BytesIO,
    decimal.Decimal,
    fractions.Fraction,
    uuid.UUID,
    array.array,
    argparse.Namespace,
    types.SimpleNamespace,
    ipaddress.IPv4Address,
    ipaddress.IPv6Address,
    datetime.date,
    datetime.datetime,
    datetime.time,
    datetime.timedelta,
    datetime.timezone,
    np.ndarray,
    np.dtype,
    *(type(np.dtype(code)) for code in np.typecodes["All"]),
    (_NUMPY_RECONSTRUCT, "numpy.core.multiarray._reconstruct"),
    (_NUMPY_RECONSTRUCT, "numpy._core.multiarray._reconstruct"),
    (_NUMPY_SCALAR, "numpy.core.multiarray.scalar"),
    (_NUMPY_SCALAR, "numpy._core.multiarray.scalar"),
    # Python 3.13 moved these; both names are in use. A path of the other system cannot be made here.
    *((path, f"{module}.{path.__name__}") for path in _PATHS for module in ("pathlib", "pathlib._local")),
]

# torch.load knows these itself.
_PICKLE_GLOBALS: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = [
    *_PLAIN_GLOBALS,
    set,
    bytearray,
    complex,
    collections.OrderedDict,
    torch.device,
    torch.Size,
    (codecs.encode, "_codecs.encode"),
    (array._array_reconstructor, "array._array_reconstructor"),  # type: ignore[attr-defined]
]

# Values of these classes come back whatever they are, and containers where their members do.
_SURELY_PLAIN: frozenset[type] = frozenset({
    type(None), bool, int, float, complex, str, bytes, bytearray, range, torch.dtype, torch.device, torch.Size,
    decimal.Decimal, fractions.Fraction, uuid.UUID, array.array, datetime.date, datetime.timedelta, *_PATHS,
    *(np.dtype(code).type for code in "?bBhHiIlLefdFD"),
})  # fmt: skip
_SURELY_PLAIN_CONTAINERS: frozenset[type] = frozenset(
    {dict, list, tuple, set, frozenset, collections.OrderedDict, argparse.Namespace, types.SimpleNamespace}
)

# Beyond it pickle may not follow: whether it does is tried.
_MAX_SURE_DEPTH = 50

# Before 1.6 torch wrote a magic number, a version and facts about the machine, a pickle each, then the value.
_LEGACY_PICKLES = 4

# torch.load takes nothing of these modules, whatever is allowed. The last is Python 2's: pickle names exceptions by it.
_BLOCKED_MODULES = ("sys", "os", "posix", "nt", "exceptions")


@dataclass(frozen=True)
class NotPlain:
    """Why a value is not plain data.

    Attributes:
        names: All classes and functions that a load does not take by default, as they are named in the pickle.
        can_be_allowed: Whether a load takes the value if the user allows these names. Builtin functions cannot be
            allowed: a pickle that may call ``getattr`` may do anything. Nor does ``torch.load`` fill subclasses of
            lists, dicts and deques.
        advice: What to save instead, where that is known.
    """

    names: tuple[str, ...]
    can_be_allowed: bool
    advice: str = ""

    def __str__(self) -> str:
        return ", ".join(self.names) + (f": {self.advice}" if self.advice else "")


class NotPlainError(ValueError):
    """A value is not plain data; ``found`` says why, ``remedy`` what to do."""

    def __init__(self, found: NotPlain, remedy: str = "") -> None:
        super().__init__(found, remedy)
        self.found = found
        self.remedy = remedy

    def __str__(self) -> str:
        return f"it is not plain data (found {self.found})" + (f"; {self.remedy}" if self.remedy else "")


class DamagedBytesError(ValueError):
    """The bytes of a value cannot be read as one."""


def check_classes(operation: str, allow_classes: Any) -> None:
    """Raises TypeError unless these are classes, or functions that build values, which a load may call."""
    expected = "a list of classes"
    if isinstance(allow_classes, str):
        raise argument_error(operation, "allow_classes", allow_classes, expected)
    check_argument(operation, "allow_classes", allow_classes, Collection, expected)
    for one in allow_classes:
        name = f"{getattr(one, '__module__', '')}.{getattr(one, '__qualname__', '')}"
        if not callable(one) or is_builtin_function(name):
            got = name if callable(one) else described(one)
            raise TypeError(f"{operation}: got {got} in allow_classes, expected classes")


def read_value(
    stream: io.BytesIO | pathlib.Path,
    *,
    weights_only: bool,
    allow_classes: Collection[Callable[..., Any]] = (),
    map_location: str = "cpu",
) -> Any:
    """The value that ``torch.save`` wrote to a stream, or to a file.

    Args:
        stream: A stream at its beginning, or a file, which is mapped: tensors that nobody touches are not read.
        weights_only: Refuse values of classes that are not plain data.
        allow_classes: Take values of these classes too.
        map_location: The device of tensors in the value; on ``"meta"`` their storages say where in a file their bytes
            begin.

    Raises:
        NotPlainError: Says which classes are not plain data.
        DamagedBytesError: Says what is wrong.
    """
    try:
        with _allowed(allow_classes):
            if weights_only:
                _check_keys(stream)
            is_mapped = isinstance(stream, pathlib.Path) and map_location != "meta"
            return torch.load(stream, map_location=map_location, weights_only=weights_only, mmap=is_mapped)
    except pickle.UnpicklingError as error:
        # torch puts advice of its own, which does not fit here, around the reason.
        reason = error.__context__ if isinstance(error.__context__, pickle.UnpicklingError) else error
        unknown = re.search(r"GLOBAL (\S+)", str(error))
        found = unknown or re.search(r"but got <class '(.+)'>", str(reason))
        if not weights_only or found is None:
            raise DamagedBytesError(f"its bytes are damaged ({first_line(reason)})") from None
        names = {found[1], *_names_not_allowed(stream, allow_classes)}
        # What torch knows and does not fill is no matter of permission.
        can_be_allowed = unknown is not None and all(map(_can_be_allowed, names))
        raise NotPlainError(NotPlain(tuple(sorted(names)), can_be_allowed)) from None
    except Exception as error:
        raise DamagedBytesError(f"its bytes are damaged ({type(error).__name__}: {first_line(error)})") from None


def _check_keys(stream: io.BytesIO | pathlib.Path) -> None:
    """Raises ValueError where keys take too long to hash. The storage has checked archives that are files before."""
    if isinstance(stream, pathlib.Path):
        if not zipfile.is_zipfile(stream):
            with stream.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                _core.check_pickle_keys(data, _LEGACY_PICKLES)
    elif zipfile.is_zipfile(stream):
        with zipfile.ZipFile(stream) as archive:
            for name in archive.namelist():
                if name.endswith("data.pkl"):
                    _core.check_pickle_keys(archive.read(name), 1)
        stream.seek(0)
    else:
        with stream.getbuffer() as data:
            _core.check_pickle_keys(data, _LEGACY_PICKLES)
        stream.seek(0)


@contextmanager
def _allowed(classes: Collection[Callable[..., Any]]) -> Iterator[None]:
    """Lets ``torch.load`` take plain data and these classes; what the user has allowed stays allowed afterwards."""
    held = set(torch.serialization.get_safe_globals())
    with torch.serialization.safe_globals([entry for entry in (*_PLAIN_GLOBALS, *classes) if entry not in held]):
        yield


def _names_not_allowed(stream: io.BytesIO | pathlib.Path, classes: Collection[Callable[..., Any]]) -> list[str]:
    """All names in a pickle that ``torch.load`` does not take; none if only unpickling would find them."""
    if isinstance(stream, io.BytesIO):
        stream.seek(0)
    try:
        with _allowed(classes):
            names = torch.serialization.get_unsafe_globals_in_checkpoint(stream)
    except Exception:  # a file of an older torch, or operations of pickle that it does not know
        return []
    return [name.removeprefix("builtins.") for name in names]


def why_not_plain(value: Any) -> NotPlain | None:
    """The classes for which ``read_value`` will refuse a value with ``weights_only=True``; ``None`` if it takes it.

    Classes that the user allowed with ``torch.serialization.add_safe_globals`` are taken. Values of builtin classes are
    only looked at; all others are written and read once, without the bytes of their tensors.

    Raises:
        TypeError: The value cannot be pickled.
    """
    odd_class = _first_odd_class(value)
    if odd_class is None:
        return None
    name = f"{odd_class.__module__}.{odd_class.__qualname__}"
    stream = io.BytesIO()
    with torch.serialization.skip_data():
        try:
            torch.save(value, stream)
        except Exception as error:
            raise TypeError(f"cannot be pickled ({type(error).__name__}: {first_line(error)})") from None
        stream.seek(0)
        try:
            read_value(stream, weights_only=True)
        except NotPlainError as error:
            # A function that makes values of a class says less than the class.
            classes = tuple(found for found in error.found.names if not is_builtin_function(found))
            return replace(error.found, names=classes or (name,))
        except ValueError:
            return NotPlain((name,), can_be_allowed=False)
    return None


def _first_odd_class(value: Any) -> type | None:
    """The class of something in a value that a load may not give back; ``None`` if it surely gives back all."""
    for member, depth in walk_objects(value, _members):
        kind = type(member)
        is_container = kind in _SURELY_PLAIN_CONTAINERS and depth <= _MAX_SURE_DEPTH
        if not is_container and kind not in _SURELY_PLAIN and not _is_plain_array(member):
            return kind
    return None


def _members(value: Any) -> Collection[Any]:
    """What a container holds that is not surely plain."""
    if type(value) not in _SURELY_PLAIN_CONTAINERS:
        return ()
    members: Collection[Any] = value
    if isinstance(value, (argparse.Namespace, types.SimpleNamespace)):
        members = vars(value).values()
    elif isinstance(value, dict):
        members = [*value, *value.values(), *getattr(value, "__dict__", {}).values()]
    return () if _SURELY_PLAIN.issuperset(map(type, members)) else members


def _is_plain_array(value: Any) -> bool:
    if type(value) is np.ndarray:
        return not value.dtype.hasobject
    if type(value) not in (torch.Tensor, torch.nn.Parameter):
        return False
    return not value.is_nested and value.layout is torch.strided and not value.is_quantized and not vars(value)


def _can_be_allowed(name: str) -> bool:
    """Whether ``torch.load`` makes values of a class once it is allowed. Nothing is imported to find out."""
    module, _, member = name.rpartition(".")
    if module in _BLOCKED_MODULES or is_builtin_function(name):
        return False
    held = vars(sys.modules[module]).get(member) if module in sys.modules else None
    return not (isinstance(held, type) and issubclass(held, (list, dict, collections.deque)))


def is_builtin_function(found: str) -> bool:
    """Whether a name is that of a function such as ``getattr`` and ``exec``, with which a pickle can do anything."""
    name = found.removeprefix("__builtin__.").removeprefix("builtins.")
    return "." not in name and not isinstance(getattr(builtins, name, None), type)


def read_pickle(data: bytes) -> Any:
    """The value that ``pickle.dumps`` made these bytes of, if it is plain data.

    Builtin containers, numbers, text and bytes, and the classes that ``read_value`` takes; those that the user allowed
    with ``torch.serialization.add_safe_globals`` too.

    Raises:
        NotPlainError: Says which class is not plain data.
        DamagedBytesError: Says what is wrong.
    """
    try:
        return _PlainUnpickler(io.BytesIO(data)).load()
    except NotPlainError:
        raise
    except Exception as error:
        raise DamagedBytesError(f"its bytes are damaged ({type(error).__name__}: {first_line(error)})") from None


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        allowed = {_global_name(entry): entry for entry in _PICKLE_GLOBALS + torch.serialization.get_safe_globals()}
        full_name = f"{module}.{name}"
        found = allowed.get(full_name)
        if found is None:
            can_be_allowed = not is_builtin_function(full_name)
            allowing = "allow its class with torch.serialization.add_safe_globals, or " if can_be_allowed else ""
            raise NotPlainError(NotPlain((full_name,), can_be_allowed), f"{allowing}store plain data instead")
        return found[0] if isinstance(found, tuple) else found


def _global_name(entry: Callable[..., Any] | tuple[Callable[..., Any], str]) -> str:
    return entry[1] if isinstance(entry, tuple) else f"{entry.__module__}.{entry.__qualname__}"
