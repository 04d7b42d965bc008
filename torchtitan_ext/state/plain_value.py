"""Reads non-tensor values of a checkpoint back without running code from it.

``torch.load(weights_only=True)`` takes builtin containers, numbers, strings and tensors. Training state also
holds values of a few standard classes that carry data and nothing else: NumPy's RNG state, losses in a ``BytesIO``.
"""

from __future__ import annotations

import codecs
import collections
import datetime
import decimal
import io
import pathlib
import pickle
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

_NUMPY_RECONSTRUCT: Any = np.empty(0).__reduce__()[0]
_NUMPY_SCALAR: Any = np.float64(0).__reduce__()[0]

# What may be called, or given its state, while a value is read. NumPy 2 moved its two functions; both names are in use.
_PLAIN_GLOBALS: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = [
    bytes,
    frozenset,
    range,
    slice,
    io.BytesIO,
    decimal.Decimal,
    pathlib.PosixPath,
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
]


def read_value(stream: io.BytesIO, *, weights_only: bool) -> Any:
    """The value that ``torch.save`` wrote to a stream; tensors in it are on the CPU.

    Args:
        stream: At its beginning.
        weights_only: Refuse values of classes that are not plain data.

    Raises:
        ValueError: The value is not plain data, or the bytes are damaged; says which class or what is wrong.
    """
    try:
        with torch.serialization.safe_globals(_PLAIN_GLOBALS):
            return torch.load(stream, map_location="cpu", weights_only=weights_only)
    except pickle.UnpicklingError as error:
        # torch puts advice of its own, which does not fit here, around the reason.
        reason = error.__context__ if isinstance(error.__context__, pickle.UnpicklingError) else error
        found = re.search(r"GLOBAL (\S+)", str(error)) or re.search(r"but got <class '(.+)'>", str(reason))
        if not weights_only or found is None:
            raise ValueError(f"its bytes are damaged ({_first_line(reason)})") from None
        raise ValueError(
            f"it is not plain data (found {found[1]}); allow its class with torch.serialization.add_safe_globals, "
            "or pass weights_only=False if you trust the checkpoint"
        ) from None
    except Exception as error:
        raise ValueError(f"its bytes are damaged ({type(error).__name__}: {_first_line(error)})") from None


def read_pickle(data: bytes) -> Any:
    """The value that ``pickle.dumps`` made these bytes of, if it is plain data.

    Builtin containers, numbers, text and bytes, and the classes that ``read_value`` takes; those that the user allowed
    with ``torch.serialization.add_safe_globals`` too.

    Raises:
        ValueError: The value is not plain data, or the bytes are damaged; says which class or what is wrong.
    """
    try:
        return _PlainUnpickler(io.BytesIO(data)).load()
    except _NotPlainError as error:
        raise ValueError(
            f"it is not plain data (found {error}); allow its class with torch.serialization.add_safe_globals"
        ) from None
    except Exception as error:
        raise ValueError(f"its bytes are damaged ({type(error).__name__}: {_first_line(error)})") from None


class _NotPlainError(Exception):
    """A pickle names something that is not allowed."""


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        allowed = {_global_name(entry): entry for entry in _PICKLE_GLOBALS + torch.serialization.get_safe_globals()}
        found = allowed.get(f"{module}.{name}")
        if found is None:
            raise _NotPlainError(f"{module}.{name}")
        return found[0] if isinstance(found, tuple) else found


def _global_name(entry: Callable[..., Any] | tuple[Callable[..., Any], str]) -> str:
    return entry[1] if isinstance(entry, tuple) else f"{entry.__module__}.{entry.__qualname__}"


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0]
