"""Digests of values, equal for equal values on every rank.

Never a digest of pickle bytes: those depend on object identity, dict order and interned strings, so equal values on two
ranks may pickle differently.

A value is a graph: containers and objects are nodes, what they hold are edges, and an object that is held twice is one
node. Two values are equal where the trees are that one gets by following the edges, however the nodes are shared:
``x = [1]; [x, x]`` and ``[[1], [1]]`` are equal, and so are ``a = [a]`` and ``b = [[b]]``. So

1. each object becomes one node, whatever the number of paths that lead to it;
2. a node whose members all have a digest gets the digest of its label and of these: one pass, from the leaves up;
3. what is left leads to a cycle. These nodes get colours: all the same at first, then again and again the digest of
   label and members' colours, until no round tells more nodes apart. Equal nodes have equal colours in every round,
   so how many nodes stand for one value does not count. The value's digest is that of its colour and of the table
   from each colour to the next: the smallest graph that unfolds to the same tree.

Example: in ``a = [0, a]`` beside ``b = [0, [0, b]]`` all three lists have one colour in each round, and the second
round tells no more apart than the first: both digests are those of a graph with one node.

Steps 1 and 2 are linear in the number of objects and edges; 3 takes as many rounds as there are steps from a node to
what tells it apart, which is few where ``pickle`` can follow at all.
"""

from __future__ import annotations

import hashlib
import inspect
import io
import marshal
import struct
import types
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from torchtitan_ext import ops
from torchtitan_ext.layout.dtensor import as_bytes, is_wrapper, local_tensor
from torchtitan_ext.layout.layout import Chunk, LocalShard
from torchtitan_ext.layout.wrapper import parts_of

_DIGEST_BYTES = 16

# Their marshalled form of version 2, the last without references between objects, depends on nothing but the value.
_ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes})
_MARSHAL_VERSION = 2

# Longer lists are nodes, so that one that is held many times is looked at once.
_MAX_INLINE = 16

# An object that makes new members whenever it is asked has no end; nothing so deep can be pickled.
_MAX_DEPTH = 100_000


def digest_tensor(tensor: torch.Tensor) -> bytes:
    """Digest of dtype, shape and bits of a tensor (of a DTensor: of this rank's local tensor). NaN payloads count.

    Args:
        tensor: Dense and strided, or a wrapper subclass of such tensors; any dtype, device and strides. A tensor on an
            accelerator is copied to the CPU.
    """
    local = local_tensor(tensor)
    if is_wrapper(local):
        return _hash(_class_name(local), *(digest_tensor(part) for part in parts_of(local).values()))
    hasher = hashlib.blake2b(f"{local.dtype}{tuple(local.shape)}".encode(), digest_size=_DIGEST_BYTES)
    if local.numel() > 0:
        hasher.update(as_bytes(local.cpu()).numpy().data)
    return hasher.digest()


def brief_tensor(tensor: torch.Tensor) -> bytes:
    """Bytes that stand for a tensor where replicas are compared: the bits of a single element, which ``shown`` shows,
    or the digest of a larger tensor or of an element of 16 bytes.
    """
    local = local_tensor(tensor)
    if local.numel() != 1 or is_wrapper(local) or local.dtype.itemsize >= _DIGEST_BYTES - 1:
        return digest_tensor(tensor)
    return b"t" + as_bytes(local.cpu()).numpy().tobytes()


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


def bit_sum(local: torch.Tensor) -> torch.Tensor:
    """A hash of the bits of a dense tensor and of their places: 0-d int64 on its device, equal for equal bits.

    Reads at the speed of memory, on the tensor's device; two different tensors have equal sums with a probability of
    2^-64.
    """
    whole = (0,) * local.dim()
    sizes = tuple(local.shape)
    return ops.fingerprint_shard(local, LocalShard(sizes, (Chunk(whole, sizes, whole),)), sizes)


def fetch_sums(sums: Mapping[Any, torch.Tensor]) -> dict[Any, int]:
    """The numbers of 0-d int64 tensors: one transfer per device instead of one per tensor."""
    of_device: dict[torch.device, list[Any]] = {}
    for key, total in sums.items():
        of_device.setdefault(total.device, []).append(key)
    return {
        key: number
        for keys in of_device.values()
        for key, number in zip(keys, torch.stack([sums[key] for key in keys]).tolist(), strict=True)
    }


def digest_large(tensors: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
    """Digests of tensors by their ``bit_sum``, for tensors that are too large for ``digest_tensor``.

    The digest of a DTensor is that of this rank's local tensor.
    """
    digests: dict[str, bytes] = {}
    sums: dict[tuple[str, int], torch.Tensor] = {}
    parts = {fqn: list(_dense_parts(local_tensor(tensor))) for fqn, tensor in tensors.items()}
    with torch.no_grad():
        for fqn, dense in parts.items():
            try:
                sums.update({(fqn, at): bit_sum(part.resolve_conj().resolve_neg()) for at, part in enumerate(dense)})
            except (RuntimeError, ValueError):  # a dtype or device that the operator does not know
                digests[fqn] = digest_tensor(tensors[fqn])
    numbers = fetch_sums(sums)
    for fqn, dense in parts.items():
        if fqn not in digests:
            what = (f"{part.dtype}{tuple(part.shape)}{numbers[fqn, at]}".encode() for at, part in enumerate(dense))
            digests[fqn] = _hash(b"large", *what)
    return digests


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
    graph = _Graph()
    if not graph.add(value):
        return _hash(b"endless" + _class_name(value))
    digests = _digests_from_leaves(graph)
    return digests[0] or _digest_of_cycles(graph, digests)


@dataclass(frozen=True)
class _Node:
    """The label of an object, and the values that it holds."""

    label: bytes
    members: Sequence[Any] = ()
    is_ordered: bool = True


class _Graph:
    """The objects that a value consists of, numbered; the value itself is node 0.

    Attributes:
        labels: The label of each node.
        edges: The members of each node: the number of a node, or the bytes that stand for an atom.
        is_ordered: Whether the order of a node's members counts.
    """

    def __init__(self) -> None:
        self.labels: list[bytes] = []
        self.edges: list[list[int | bytes]] = []
        self.is_ordered: list[bool] = []
        self._numbers: dict[int, int] = {}
        self._objects: list[Any] = []  # kept, so that no id is given twice

    def add(self, root: Any) -> bool:
        """Adds an object and all objects that it leads to; returns False if these have no end."""
        pending = [(self._number(root), 0)]
        while pending:
            number, depth = pending.pop()
            if depth > _MAX_DEPTH:
                return False
            node = _node_of(self._objects[number])
            self.labels[number] = _short(node.label)
            self.is_ordered[number] = node.is_ordered
            edges = self.edges[number]
            for member in node.members:
                inline = _inline(member)
                if inline is not None:
                    edges.append(inline)
                    continue
                num_known = len(self._objects)
                edges.append(self._number(member))
                if len(self._objects) > num_known:
                    pending.append((num_known, depth + 1))
        return True

    def _number(self, value: Any) -> int:
        number = self._numbers.get(id(value))
        if number is None:
            number = self._numbers[id(value)] = len(self._objects)
            self._objects.append(value)
            self.labels.append(b"")
            self.edges.append([])
            self.is_ordered.append(True)
        return number

    def digest(self, number: int, names: Mapping[int, bytes] | Sequence[bytes]) -> bytes:
        """The digest of a node, given the names of its members."""
        members = [edge if isinstance(edge, bytes) else names[edge] for edge in self.edges[number]]
        return _hash(self.labels[number], *(members if self.is_ordered[number] else sorted(members)))


def _digests_from_leaves(graph: _Graph) -> list[bytes]:
    """The digest of each node, empty for those that lead to a cycle."""
    digests = [b""] * len(graph.edges)
    holders: list[list[int]] = [[] for _ in graph.edges]
    num_unknown = [0] * len(graph.edges)
    for number, edges in enumerate(graph.edges):
        for edge in edges:
            if isinstance(edge, int):
                holders[edge].append(number)
                num_unknown[number] += 1
    ready = [number for number, count in enumerate(num_unknown) if count == 0]
    while ready:
        number = ready.pop()
        digests[number] = graph.digest(number, digests)
        for holder in holders[number]:
            num_unknown[holder] -= 1
            if num_unknown[holder] == 0:
                ready.append(holder)
    return digests


def _digest_of_cycles(graph: _Graph, digests: Sequence[bytes]) -> bytes:
    """The digest of node 0, which leads to a cycle as all nodes do that have none yet."""
    cyclic = [number for number, digest in enumerate(digests) if not digest]
    colours = list(digests)
    while True:
        finer = list(digests)
        for number in cyclic:
            finer[number] = graph.digest(number, colours)
        steps = {(colours[number], finer[number]) for number in cyclic}
        if len(steps) == len({colours[number] for number in cyclic}):
            return _hash(b"cycle", colours[0], *(colour + next_colour for colour, next_colour in sorted(steps)))
        colours = finer


def _node_of(value: Any) -> _Node:
    try:
        if isinstance(value, _Node):
            return value
        if isinstance(value, (Mapping, AbstractSet, list, tuple)):
            return _with_extras(value, _container(value))
        if isinstance(value, torch.Tensor):
            return _tensor(value)
        return _leaf(value) or _reduced(value)
    except Exception:  # cannot be saved either: the planner says so, with the key
        return _Node(b"unreadable " + _class_name(value))


def _container(value: Any) -> _Node:
    """Atoms go into the label at once: a list of a million numbers is one node without members."""
    if isinstance(value, Mapping):
        if not _ATOMS.issuperset(map(type, value)):
            return _Node(b"dict", list(value.items()), is_ordered=False)
        items = sorted(((_atom(key), member) for key, member in value.items()), key=itemgetter(0))
        return _sequence(b"dict" + _hash(*map(itemgetter(0), items)), list(map(itemgetter(1), items)))
    if isinstance(value, AbstractSet):
        if not _ATOMS.issuperset(map(type, value)):
            return _Node(b"set", list(value), is_ordered=False)
        return _Node(b"atoms" + _hash(*sorted(map(_atom, value))))
    return _sequence(_class_name(value), value)


def _sequence(label: bytes, members: Sequence[Any]) -> _Node:
    if _ATOMS.issuperset(map(type, members)):
        return _Node(label + b" of atoms" + _atom(list(members)))
    return _Node(label, members)


def _with_extras(value: Any, node: _Node) -> _Node:
    """The node, together with what a subclass of a container holds beside its members."""
    if type(value) in (dict, list, tuple, set, frozenset):
        return node
    extras = {**getattr(value, "__dict__", {}), "default_factory": getattr(value, "default_factory", None)}
    kept = {name: member for name, member in extras.items() if member is not None}
    return _Node(b"with extras", [node, kept]) if kept else node


def _tensor(value: torch.Tensor) -> _Node:
    if value.is_quantized:
        return _Node(b"quantised", [value.int_repr(), value.dequantize()])
    if value.is_meta:
        return _Node(f"meta tensor {value.dtype} {tuple(value.shape)}".encode())
    if value.is_nested or value.layout is not torch.strided or is_traceable_wrapper_subclass(local_tensor(value)):
        return _reduced(value)
    return _Node(b"tensor" + digest_tensor(value))


def _leaf(value: Any) -> _Node | None:
    """The node of a value that holds no other values, or ``None``."""
    kind = type(value).__name__.encode()
    if isinstance(value, (bool, int)):
        return _Node(kind + hex(value).encode())
    if (
        isinstance(value, (np.ndarray, np.generic))
        and type(value) is not np.ma.MaskedArray
        and not value.dtype.hasobject
    ):
        return _Node(b"numpy" + _hash(str(value.dtype).encode(), str(value.shape).encode(), value.tobytes()))
    if isinstance(value, (float, complex)):
        number = complex(value)
        return _Node(kind + struct.pack("<dd", number.real, number.imag))
    if isinstance(value, str):
        return _Node(b"str" + value.encode("utf-8", "surrogatepass"))
    if isinstance(value, (bytes, bytearray, memoryview)):
        return _Node(b"bytes" + bytes(value))
    if isinstance(value, torch.device):
        return _Node(b"device" + value.type.encode())
    if isinstance(value, type) or _is_function(value):
        return _Node(b"name" + _qualified_name(value))
    if isinstance(value, (io.BytesIO, io.StringIO)):
        return _Node(_class_name(value), [value.getvalue()])
    return None


def _reduced(value: Any) -> _Node:
    """The node of an object whose members are the parts that pickle would save."""
    reduced = value.__reduce_ex__(2)
    if isinstance(reduced, str):
        return _Node(_class_name(value) + reduced.encode())
    made_by, args, *rest = reduced
    state, list_items, dict_items = (*rest, None, None, None)[:3]
    members = None if list_items is None else list(list_items)
    items = None if dict_items is None else dict(dict_items)
    return _Node(_class_name(value) + _qualified_name(made_by), [args, state, members, items])


def _is_function(value: Any) -> bool:
    """Whether pickle saves it by name; methods are saved with the object that they are bound to."""
    bound_to = getattr(value, "__self__", None)
    return inspect.isroutine(value) and (bound_to is None or isinstance(bound_to, types.ModuleType))


def _class_name(value: Any) -> bytes:
    return _qualified_name(type(value))


def _qualified_name(value: Any) -> bytes:
    """The name of a class or function; for another callable the name of its class."""
    return f"{value.__module__}.{getattr(value, '__qualname__', type(value).__qualname__)}".encode()


def _inline(value: Any) -> bytes | None:
    """Bytes that stand for an atom, or for a short list or tuple of atoms, which needs no node; else ``None``."""
    kind = type(value)
    if kind in _ATOMS:
        return b"atom" + _atom(value)
    if (kind is tuple or kind is list) and len(value) <= _MAX_INLINE and _ATOMS.issuperset(map(type, value)):
        return kind.__name__.encode() + _atom(list(value))
    return None


def _atom(value: Any) -> bytes:
    """Bytes that stand for an atom or a list of atoms."""
    return _short(marshal.dumps(value, _MARSHAL_VERSION))


def _short(data: bytes) -> bytes:
    return data if len(data) <= 2 * _DIGEST_BYTES else b"long" + _hash(data)


def _hash(*parts: bytes) -> bytes:
    """The digest of the parts and their lengths."""
    return hashlib.blake2b(marshal.dumps(parts, _MARSHAL_VERSION), digest_size=_DIGEST_BYTES).digest()
