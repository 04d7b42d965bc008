"""Digests of values, equal for equal values on every rank.

Never a digest of pickle bytes: those depend on object identity, dict order and interned strings, so equal values on two
ranks may pickle differently.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Any

import numpy as np
import torch

from torchtitan_ext.layout.dtensor import as_bytes, local_tensor

_DIGEST_BYTES = 16


def digest_tensor(tensor: torch.Tensor) -> bytes:
    """Digest of dtype, shape and bits of a tensor (of a DTensor: of this rank's local tensor). NaN payloads count.

    Args:
        tensor: Any dtype, device and strides. A tensor on an accelerator is copied to the CPU.
    """
    local = local_tensor(tensor)
    hasher = hashlib.blake2b(f"{local.dtype}{tuple(local.shape)}".encode(), digest_size=_DIGEST_BYTES)
    if local.numel() > 0:
        hasher.update(as_bytes(local.cpu()).numpy().data)
    return hasher.digest()


def digest_value(value: Any) -> bytes:
    """Canonical digest of a non-tensor value of a state dict.

    Dicts and sets do not depend on order; floats count by their bits; a device counts by its type (``cuda:0`` on one
    rank is ``cuda:1`` on another); other objects count by their class and what ``__reduce_ex__`` gives.
    """
    return _digest(value, {})


def _digest(value: Any, ancestors: dict[int, int]) -> bytes:
    if id(value) in ancestors:  # a cycle: what counts is how far up it points
        return _hash(b"cycle", str(len(ancestors) - ancestors[id(value)]).encode())
    inner = {**ancestors, id(value): len(ancestors)}
    if value is None or isinstance(value, (bool, int)):
        return _hash(type(value).__name__.encode(), repr(value).encode())
    if isinstance(value, (float, complex)):
        number = complex(value)
        return _hash(type(value).__name__.encode(), struct.pack("<dd", number.real, number.imag))
    if isinstance(value, str):
        return _hash(b"str", value.encode("utf-8", "surrogatepass"))
    if isinstance(value, (bytes, bytearray, memoryview)):
        return _hash(b"bytes", bytes(value))
    if isinstance(value, torch.Tensor):
        return _hash(b"tensor", digest_tensor(value))
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype != object:
        return _hash(b"numpy", str(value.dtype).encode(), str(value.shape).encode(), value.tobytes())
    if isinstance(value, torch.device):
        return _hash(b"device", value.type.encode())
    if isinstance(value, Mapping):
        pairs = sorted(_digest(key, inner) + _digest(member, inner) for key, member in value.items())
        return _hash(b"dict", *pairs, *_digest_extras(value, inner))
    if isinstance(value, AbstractSet):
        return _hash(b"set", *sorted(_digest(member, inner) for member in value))
    if isinstance(value, (list, tuple)):
        members = [_digest(member, inner) for member in value]
        return _hash(_class_name(value), *members, *_digest_extras(value, inner))
    if isinstance(value, type) or callable(getattr(value, "__get__", None)):  # classes and functions: by name
        return _hash(b"name", _qualified_name(value))
    if hasattr(value, "getvalue"):  # io.BytesIO and io.StringIO
        return _hash(_class_name(value), _digest(value.getvalue(), inner))
    return _hash(_class_name(value), _digest_reduced(value, inner))


def _digest_extras(value: Any, inner: dict[int, int]) -> list[bytes]:
    """What a subclass of a container holds beside its members."""
    extras = {**getattr(value, "__dict__", {}), "default_factory": getattr(value, "default_factory", None)}
    kept = {name: member for name, member in extras.items() if member is not None}
    return [_digest(kept, inner)] if kept else []


def _digest_reduced(value: Any, inner: dict[int, int]) -> bytes:
    try:
        reduced = value.__reduce_ex__(2)
    except Exception:  # cannot be saved either: the storage writer will say so, with the key
        return b""
    if isinstance(reduced, str):
        return reduced.encode()
    made_by, args, *rest = reduced
    state, list_items, dict_items = (*rest, None, None, None)[:3]
    parts = (args, state, None if list_items is None else list(list_items))
    return _hash(
        _qualified_name(made_by),
        *(_digest(part, inner) for part in parts),
        _digest(None if dict_items is None else dict(dict_items), inner),
    )


def _class_name(value: Any) -> bytes:
    return _qualified_name(type(value))


def _qualified_name(value: Any) -> bytes:
    """Of a class or function, or of the class of another callable."""
    return f"{value.__module__}.{getattr(value, '__qualname__', type(value).__qualname__)}".encode()


def _hash(*parts: bytes) -> bytes:
    hasher = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for part in parts:
        hasher.update(struct.pack("<q", len(part)))
        hasher.update(part)
    return hasher.digest()
