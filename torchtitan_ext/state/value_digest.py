"""Digests of values, equal for equal values on every rank.

Never a digest of pickle bytes: those depend on object identity, dict order and interned strings, so equal values on two
ranks may pickle differently. See ``csrc/core/value_graph.h``.
"""

from __future__ import annotations

import hashlib
import inspect
import io
import itertools
import struct
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from torchtitan_ext import _core, ops
from torchtitan_ext._core import ValueNode, hash_parts, qualified_name
from torchtitan_ext.layout.dtensor import as_bytes, is_wrapper, local_tensor
from torchtitan_ext.layout.layout import LocalShard, shard_of_box
from torchtitan_ext.layout.wrapper import parts_of
from torchtitan_ext.state.host_copies import host_copies

_DIGEST_BYTES = 16

# Of shards that are summed in one call, some of which may be copies that were made for it.
_BATCH_BYTES = 256 << 20


def digest_tensor(tensor: torch.Tensor) -> bytes:
    """Digest of dtype, shape and bits of a tensor (of a DTensor: of this rank's local tensor). NaN payloads count.

    Args:
        tensor: Dense and strided, or a wrapper subclass of such tensors; any dtype, device and strides. A tensor on an
            accelerator is copied to the CPU.
    """
    local = local_tensor(tensor)
    if is_wrapper(local):
        return hash_parts(qualified_name(type(local)), *(digest_tensor(part) for part in parts_of(local).values()))
    hasher = hashlib.blake2b(_kind_of(local), digest_size=_DIGEST_BYTES)
    if local.numel() > 0:
        hasher.update(as_bytes(local.cpu()).numpy().data)
    return hasher.digest()


def _kind_of(tensor: torch.Tensor) -> bytes:
    return f"{tensor.dtype}{tuple(tensor.shape)}".encode()


def brief_tensor(tensor: torch.Tensor) -> bytes:
    """Bytes that stand for a tensor where replicas are compared: the bits of a single element, which ``shown`` shows,
    or a digest of a larger tensor or of an element of 16 bytes.
    """
    local = local_tensor(tensor)
    if is_wrapper(local) or local.numel() == 0:
        return digest_tensor(tensor)
    memory = as_bytes(local.cpu()).numpy()
    if local.numel() == 1 and local.dtype.itemsize < _DIGEST_BYTES - 1:
        return b"t" + memory.tobytes()
    return hash_parts(_kind_of(local), _core.digest(memory).to_bytes(8, "little"))


def brief_tensors(tensors: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
    """``brief_tensor`` of each. Those of an accelerator come to the host together."""
    briefs = {}
    for name, copied in host_copies({name: local_tensor(tensor) for name, tensor in tensors.items()}):
        briefs[name] = brief_tensor(copied)
    return {name: briefs[name] if name in briefs else brief_tensor(tensor) for name, tensor in tensors.items()}


def brief_value(value: Any) -> bytes:
    """Bytes that stand for a value that is no tensor: a short scalar itself, or the digest of any other value."""
    if type(value) is float:
        return b"f" + struct.pack("<d", value)
    is_number = value is None or type(value) is bool or (type(value) is int and value.bit_length() < 64)
    if is_number or (type(value) is str and len(value) < _DIGEST_BYTES):
        text = repr(value).encode("utf-8", "surrogatepass")
        if len(text) < _DIGEST_BYTES - 1:
            return b"r" + text
    return digest_value(value)


def shown(brief: bytes, dtype: torch.dtype | None) -> str | None:
    """The value that a ``brief_tensor`` (of this dtype) or ``brief_value`` holds; ``None`` where it is a digest."""
    kind, bits = brief[:1], brief[1:]
    if len(brief) >= _DIGEST_BYTES:
        return None
    if kind == b"r":
        return bits.decode("utf-8", "backslashreplace")
    if kind == b"f" and len(bits) == 8:
        return scalar_text(bits, torch.float64)
    if kind == b"t" and dtype is not None and len(bits) == dtype.itemsize:
        return scalar_text(bits, dtype)
    return None


def scalar_text(bits: bytes, dtype: torch.dtype) -> str:
    """One element as text, with its bits where other elements have the same text."""
    try:
        text = repr(torch.frombuffer(bytearray(bits), dtype=dtype).item())
    except (RuntimeError, ValueError, TypeError):  # a dtype without numbers in Python
        text = ""
    return text if text and "nan" not in text else f"{text or dtype} (0x{bits[::-1].hex()})"


Key = TypeVar("Key")


def bit_sums(tensors: Mapping[Key, torch.Tensor]) -> tuple[dict[Key, int], dict[Key, Exception]]:
    """A hash of the bits of each dense tensor and of their places, equal for equal bits; why others have none.

    Reads at the speed of memory, on the tensors' devices; two different tensors have equal sums with a probability of
    2^-64.
    """
    sums = ShardSums[Key]()
    for key, local in tensors.items():
        sums.add_box(key, local, (0,) * local.dim(), tuple(local.shape))
    return sums.found()


class ShardSums(Generic[Key]):
    """The sums of many shards (``ops.fingerprint_shards``), by keys of the caller's: few calls of the operator, and one
    transfer per device."""

    def __init__(self) -> None:
        self._errors: dict[Key, Exception] = {}
        self._waiting: dict[torch.device, dict[Key, tuple[torch.Tensor, LocalShard, tuple[int, ...]]]] = {}
        self._waiting_bytes = 0
        self._sums: dict[torch.device, list[tuple[Sequence[Key], torch.Tensor]]] = {}

    def add(self, key: Key, elements: torch.Tensor, shard: LocalShard, global_shape: tuple[int, ...]) -> None:
        """Adds a shard, whose elements may be read later: they must not change before ``numbers``, or ``found``."""
        try:
            plain = elements.resolve_conj().resolve_neg()
            self._waiting.setdefault(plain.device, {})[key] = plain, shard, global_shape
            self._waiting_bytes += plain.numel() * plain.itemsize
        except Exception as error:
            self._errors[key] = error
        if self._waiting_bytes >= _BATCH_BYTES:
            self._sum()

    def add_box(
        self, key: Key, elements: torch.Tensor, offsets: tuple[int, ...], global_shape: tuple[int, ...]
    ) -> None:
        """Adds one box of a global tensor."""
        self.add(key, elements, shard_of_box(offsets, tuple(elements.shape)), global_shape)

    def numbers(self) -> dict[Key, int]:
        """The sums, on each device in the order in which shards were added.

        Raises:
            Exception: One of them has none: whatever the operator raises for it.
        """
        numbers, errors = self.found()
        if errors:
            raise next(iter(errors.values()))
        return numbers

    def found(self) -> tuple[dict[Key, int], dict[Key, Exception]]:
        """The sums; and why other shards have none, such as a dtype or device that the operator does not know."""
        self._sum()
        numbers: dict[Key, int] = {}
        for batches in filter(None, self._sums.values()):
            keys = itertools.chain.from_iterable(of_batch for of_batch, _ in batches)
            numbers.update(zip(keys, torch.cat([sums for _, sums in batches]).tolist(), strict=True))
        return numbers, self._errors

    def _sum(self) -> None:
        for device, waiting in self._waiting.items():
            batches = self._sums.setdefault(device, [])
            try:
                batches.append((list(waiting), _sums_of(list(waiting.values()))))
            except Exception:  # one by one, to know which
                for key, part in waiting.items():
                    try:
                        batches.append(([key], sum_shard(*part).view(1)))
                    except Exception as error:
                        self._errors[key] = error
        self._waiting, self._waiting_bytes = {}, 0


def _sums_of(parts: Sequence[tuple[torch.Tensor, LocalShard, tuple[int, ...]]]) -> torch.Tensor:
    elements, shards, shapes = zip(*parts, strict=True)
    with torch.no_grad():
        return ops.fingerprint_shards(elements, shards, shapes)


def sum_box(elements: torch.Tensor, offsets: tuple[int, ...], global_shape: tuple[int, ...]) -> torch.Tensor:
    """The sum of one box of a global tensor (``ops.fingerprint_shard``): 0-d int64, on the device of its elements."""
    return sum_shard(elements, shard_of_box(offsets, tuple(elements.shape)), global_shape)


def sum_shard(elements: torch.Tensor, shard: LocalShard, global_shape: tuple[int, ...]) -> torch.Tensor:
    """The same of a shard."""
    with torch.no_grad():
        return ops.fingerprint_shard(elements.resolve_conj().resolve_neg(), shard, global_shape)


def digest_large(tensors: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
    """Digests of tensors by their ``bit_sums``, for tensors that are too large for ``digest_tensor``.

    The digest of a DTensor is that of this rank's local tensor.
    """
    parts = {
        (fqn, at): part for fqn, tensor in tensors.items() for at, part in enumerate(_dense_parts(local_tensor(tensor)))
    }
    sums, errors = bit_sums(parts)
    texts: dict[str, list[bytes]] = {fqn: [] for fqn in tensors}
    for (fqn, at), part in parts.items():
        texts[fqn].append(f"{part.dtype}{tuple(part.shape)}{sums.get((fqn, at))}".encode())
    unknown = {fqn for fqn, _ in errors}
    return {
        fqn: digest_tensor(tensors[fqn]) if fqn in unknown else hash_parts(b"large", *of_parts)
        for fqn, of_parts in texts.items()
    }


def _dense_parts(local: torch.Tensor) -> Iterator[torch.Tensor]:
    if not is_wrapper(local):
        yield local
        return
    for part in parts_of(local).values():
        yield from _dense_parts(local_tensor(part))


def digest_value(value: Any) -> bytes:
    """Canonical digest of a non-tensor value of a state dict.

    Dicts and sets do not depend on order; floats count by their bits; a device counts by its type (``cuda:0`` on one
    rank is ``cuda:1`` on another); other objects count by their class and what ``__reduce_ex__`` gives.
    """
    return _core.digest_value(value, _described)


def _described(value: Any) -> ValueNode:
    return _tensor(value) if isinstance(value, torch.Tensor) else _leaf(value) or _reduced(value)


def _tensor(value: torch.Tensor) -> ValueNode:
    if value.is_quantized:
        return ValueNode(b"quantised", [value.int_repr(), value.dequantize()])
    if value.is_meta:
        return ValueNode(f"meta tensor {value.dtype} {tuple(value.shape)}".encode())
    if value.is_nested or value.layout is not torch.strided or is_traceable_wrapper_subclass(local_tensor(value)):
        return _reduced(value)
    return ValueNode(b"tensor" + digest_tensor(value))


def _leaf(value: Any) -> ValueNode | None:
    """The node of a value that holds no other values, or ``None``."""
    kind = type(value).__name__.encode()
    if isinstance(value, (bool, int)):
        return ValueNode(kind + hex(value).encode())
    if (
        isinstance(value, (np.ndarray, np.generic))
        and type(value) is not np.ma.MaskedArray
        and not value.dtype.hasobject
    ):
        return ValueNode(b"numpy" + hash_parts(str(value.dtype).encode(), str(value.shape).encode(), value.tobytes()))
    if isinstance(value, (float, complex)):
        number = complex(value)
        return ValueNode(kind + struct.pack("<dd", number.real, number.imag))
    if isinstance(value, str):
        return ValueNode(b"str" + value.encode("utf-8", "surrogatepass"))
    if isinstance(value, (bytes, bytearray, memoryview)):
        return ValueNode(b"bytes" + bytes(value))
    if isinstance(value, torch.device):
        return ValueNode(b"device" + value.type.encode())
    if isinstance(value, type) or _is_function(value):
        return ValueNode(b"name" + qualified_name(value))
    if isinstance(value, (io.BytesIO, io.StringIO)):
        return ValueNode(qualified_name(type(value)), [value.getvalue()])
    return None


def _reduced(value: Any) -> ValueNode:
    """The node of an object whose members are the parts that pickle would save."""
    reduced = value.__reduce_ex__(2)
    if isinstance(reduced, str):
        return ValueNode(qualified_name(type(value)) + reduced.encode())
    made_by, args, *rest = reduced
    state, list_items, dict_items = (*rest, None, None, None)[:3]
    members = None if list_items is None else list(list_items)
    items = None if dict_items is None else dict(dict_items)
    return ValueNode(qualified_name(type(value)) + qualified_name(made_by), [args, state, members, items])


def _is_function(value: Any) -> bool:
    """Whether pickle saves it by name; methods are saved with the object that they are bound to."""
    bound_to = getattr(value, "__self__", None)
    return inspect.isroutine(value) and (bound_to is None or isinstance(bound_to, types.ModuleType))
