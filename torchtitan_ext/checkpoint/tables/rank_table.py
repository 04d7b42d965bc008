"""A key table as it travels: bytes that ranks which hold alike have in common, and little of a rank's own.

The keys lie in three *sections*, each with columns of its own (``csrc/core/key_columns.h``), so that a key which only
one rank has does not make all of its table another one: tensors on meshes, other values, and values that each rank
keeps under a name of its own. Only the first section has a part per rank.
"""

from __future__ import annotations

import hashlib
import socket
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np

from torchtitan_ext import _core
from torchtitan_ext.checkpoint.tables.component import PER_RANK
from torchtitan_ext.checkpoint.tables.key_table import BoxesEntry, KeyEntry, KeyTable, TensorEntry
from torchtitan_ext.errors import Problem, refusal
from torchtitan_ext.layout.layout import MeshLayout
from torchtitan_ext.state.plain_value import NotPlain

# As csrc/core/key_columns.h numbers them.
NONE, OBJECT, TENSOR, BOXES = range(4)

_ON_MESHES, _OTHERS, _OWN = range(3)
_NUM_SECTIONS = 3

# What one packed message may become: a few bytes of zlib can promise a gigabyte.
_MAX_UNPACKED_BYTES = 1 << 28

# Below this the bytes of an empty zlib stream are not earned back.
_MIN_PACKED_BYTES = 100


@dataclass(frozen=True)
class RankTable:
    """One rank's table on its way to the coordinator.

    Attributes:
        sections: Columns of keys, packed.
        part: Where this rank stands on the meshes of the first section, and its local sizes, packed.
        digests: Of the values of each section, packed.
        problems: What this rank alone can already tell to be wrong.
        odd_paths: Paths that are no cut of their key at dots.
        unread: Values that a load will not read by default: by flat key the classes for which it will not.
        layouts: Whether each pattern of ``layouts=`` matches a key.
        host: Digest of the name of the rank's host; empty where it does not say. No part of the structure.
        planner: The class of the rank's planner, where it plans by methods of its own. No part of the structure.
    """

    sections: tuple[bytes, ...]
    part: bytes
    digests: tuple[bytes, ...]
    problems: tuple[Problem, ...] = ()
    odd_paths: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    unread: Mapping[str, NotPlain] = field(default_factory=dict)
    layouts: Mapping[str, bool] = field(default_factory=dict)
    host: bytes = b""
    planner: str = ""

    def __iter__(self) -> NoReturn:
        """A subclass that plans by itself merges what it takes for the default planner's dicts of paths."""
        detail = (
            "its create_global_plan merges the planner_data of local plans, which are no dicts of paths; call "
            "super().create_global_plan(), or extend DCP's default planner instead"
        )
        raise refusal("save", [Problem("planner_subclass", self.planner, detail)])

    def structure(self) -> str:
        """Digest of what the state is: keys, dtypes, shapes, meshes, placements, paths; not values, nor the host."""
        hasher = hashlib.blake2b(digest_size=16)
        for part in (
            *self.sections,
            self.part,
            repr((self.problems, self.odd_paths, self.unread, self.layouts)).encode(),
        ):
            hasher.update(len(part).to_bytes(8, "little"))
            hasher.update(part)
        return hasher.hexdigest()


@dataclass(frozen=True)
class EncodedTable:
    """What a rank keeps of its encoded table: the order of keys that positions in a decision refer to.

    Attributes:
        message: What it sends.
        names: The keys of each section.
        kind_of: The kind of each key, by section.
    """

    message: RankTable
    names: tuple[list[str], ...]
    kind_of: tuple[list[int], ...]


def encode_table(table: KeyTable, forms: dict[MeshLayout, Any] | None = None) -> EncodedTable:
    """The table as it travels.

    Args:
        forms: Of meshes that were encoded before: to find one costs a pass over its ranks. New ones are added.
    """
    forms = {} if forms is None else forms
    sections = [_Section(forms) for _ in range(_NUM_SECTIONS)]
    odd_paths: dict[str, tuple[Any, ...]] = {}
    paths = table.stock_paths
    for fqn, entry in table.entries.items():
        section = sections[_section_of(fqn, entry)]
        if not section.add(fqn, entry, paths.get(fqn)):
            odd_paths[fqn] = paths[fqn]
    for fqn, path in paths.items():
        if fqn not in table.entries and not sections[_OTHERS].add(fqn, None, path):
            odd_paths[fqn] = path
    first = sections[_ON_MESHES]
    message = RankTable(
        sections=tuple(pack(section.columns()) for section in sections),
        part=pack(_core.encode_part(first.standings, first.local_sizes, first.unusual, first.boxes)),
        digests=tuple(pack(section.digests(table.digests)) for section in sections),
        problems=table.problems,
        odd_paths=odd_paths,
        unread=table.unread,
        layouts=table.layouts,
    )
    return EncodedTable(message, tuple(s.names for s in sections), tuple(s.kind_of for s in sections))


def host_digest() -> bytes:
    """Stands for this rank's host: equal on ranks of one host only."""
    return hashlib.blake2b(socket.gethostname().encode(), digest_size=8).digest()


def number_hosts(tables: Sequence[RankTable]) -> list[int]:
    """Per rank the number of its host; where it does not say, it has one for itself."""
    numbers: dict[bytes | int, int] = {}
    return [numbers.setdefault(table.host or rank, len(numbers)) for rank, table in enumerate(tables)]


def pack(data: bytes) -> bytes:
    """Compressed, where that makes it smaller."""
    if len(data) >= _MIN_PACKED_BYTES:
        packed = zlib.compress(data, 9)
        if len(packed) < len(data):
            return b"z" + packed
    return b"r" + data


def unpack(data: bytes) -> bytes:
    """What was packed. Raises ValueError for bytes that were not, or that become too many."""
    if data[:1] == b"r":
        return data[1:]
    if data[:1] != b"z":
        raise ValueError(f"packed bytes begin with {data[:1]!r}, expected b'r' or b'z'")
    stream = zlib.decompressobj()
    try:
        unpacked = stream.decompress(data[1:], _MAX_UNPACKED_BYTES)
    except zlib.error as error:
        raise ValueError(f"packed bytes are broken: {error}") from None
    if not stream.eof or stream.unused_data:
        raise ValueError(f"packed bytes are cut off, or become more than {_MAX_UNPACKED_BYTES}")
    return unpacked


def _section_of(fqn: str, entry: KeyEntry) -> int:
    if isinstance(entry, BoxesEntry) or (isinstance(entry, TensorEntry) and entry.report.mesh is not None):
        return _ON_MESHES
    return _OWN if "rank" in fqn and PER_RANK.search(fqn) else _OTHERS


class _Section:
    """The columns of one section while they grow."""

    def __init__(self, forms: dict[MeshLayout, Any]) -> None:
        self._forms = forms
        self.names: list[str] = []
        self.kind_of: list[int] = []
        self.boxes: list[tuple[int, Any]] = []
        self.standings: list[tuple[int, Any]] = []
        self.local_sizes: list[Any] = []
        self.unusual: list[tuple[int, Any]] = []
        self._kinds: list[Any] = []
        self._number_of_kind: dict[Any, int] = {}
        self._form_of: list[int] = []
        self._number_of_form: dict[Any, int] = {}
        self._meshes: list[Any] = []
        self._number_of_mesh: dict[Any, int] = {}
        self._mesh_by_id: dict[Any, int] = {}

    def add(self, fqn: str, entry: KeyEntry | None, path: tuple[Any, ...] | None) -> bool:
        """Adds a key; false where its path cannot be told by how it cuts the key."""
        form = _path_form(fqn, path)
        number = 0 if form is None else self._number_of_form.setdefault(form, len(self._number_of_form) + 1)
        self._form_of.append(number)
        position = len(self.names)
        self.names.append(fqn)
        self.kind_of.append(self._kind(entry, position))
        return path is None or form is not None

    def columns(self) -> bytes:
        names = [name.encode("utf-8", "surrogatepass") for name in self.names]
        forms = list(self._number_of_form)
        return _core.encode_columns(self._meshes, self._kinds, forms, names, self.kind_of, self._form_of)

    def digests(self, digests: Mapping[str, bytes]) -> bytes:
        return _encode_digests(self.names, self.kind_of, digests)

    def _kind(self, entry: KeyEntry | None, position: int) -> int:
        if isinstance(entry, TensorEntry):
            report = entry.report
            mesh = self._mesh(report.mesh, report.coordinate)
            key: Any = (entry.dtype, entry.requires_grad, report.global_shape, mesh, report.placements, report.order)
            number = self._number_of_kind.get(key)
            if number is None:
                dtype = (TENSOR, str(entry.dtype), entry.dtype.itemsize, entry.requires_grad)
                order = None if report.order is None else list(report.order)
                number = self._new_kind(
                    key,
                    (*dtype, report.global_shape, mesh, report.placements, order),
                    report.local_sizes if mesh >= 0 else (),
                )
            elif mesh >= 0 and self.local_sizes[number] != report.local_sizes:
                self.unusual.append((position, report.local_sizes))
            return number
        if isinstance(entry, BoxesEntry):
            self.boxes.append((position, entry.boxes))
            key = (entry.dtype, entry.requires_grad, entry.global_shape)
            dtype = (BOXES, str(entry.dtype), entry.dtype.itemsize, entry.requires_grad)
            kind = (*dtype, entry.global_shape, -1, (), None)
        else:
            key = entry is None
            kind = (NONE if entry is None else OBJECT, "", 0, False, (), -1, (), None)
        number = self._number_of_kind.get(key)
        return self._new_kind(key, kind, ()) if number is None else number

    def _new_kind(self, key: Any, kind: Any, local_sizes: Any) -> int:
        self._number_of_kind[key] = len(self._kinds)
        self._kinds.append(kind)
        self.local_sizes.append(local_sizes)
        return len(self._kinds) - 1

    def _mesh(self, mesh: MeshLayout | None, coordinate: tuple[int, ...]) -> int:
        """Comparing two meshes costs a pass over their ranks: tables share the objects, so it is done once for each."""
        if mesh is None:
            return -1
        number = self._mesh_by_id.get((id(mesh), coordinate))
        if number is None:
            number = self._number_of_mesh.setdefault((mesh, coordinate), len(self._meshes))
            if number == len(self._meshes):
                if mesh not in self._forms:
                    self._forms[mesh] = _mesh_form(mesh)
                origin, form = self._forms[mesh]
                self._meshes.append(form)
                self.standings.append((origin, coordinate))
            self._mesh_by_id[id(mesh), coordinate] = number
        return number


def _encode_digests(names: Sequence[str], kind_of: list[int], digests: Mapping[str, bytes]) -> bytes:
    return _core.encode_digests(kind_of, max(kind_of, default=-1) + 1, [digests.get(name) for name in names])


def _path_form(fqn: str, path: tuple[Any, ...] | None) -> tuple[tuple[int, bool], ...] | None:
    """Per part of a path how many dots it holds, and whether it is an index; None where that is not enough."""
    if path is None or ".".join(map(str, path)) != fqn:
        return None
    form = []
    for part in path:
        if isinstance(part, str):
            form.append((part.count("."), False))
        elif type(part) is int and 0 <= part < 1 << 32:
            form.append((0, True))
        else:
            return None
    return tuple(form)


def _mesh_form(mesh: MeshLayout) -> tuple[int, Any]:
    """The rank at the origin, and the rest: strides per axis, or all ranks where these do not tell them."""
    names = None if mesh.dim_names is None else list(mesh.dim_names)
    ranks = np.asarray(mesh.ranks, dtype=np.int64).reshape(mesh.shape)
    if ranks.size == 0:
        return 0, (mesh.shape, False, mesh.ranks, names)
    origin = int(ranks.flat[0])
    strides = []
    told = np.zeros((1,) * ranks.ndim, dtype=np.int64) + origin
    for axis, size in enumerate(mesh.shape):
        line = np.moveaxis(ranks, axis, 0).reshape(size, -1)[:, 0]
        strides.append(int(line[1] - line[0]) if size > 1 else 0)
        steps = np.arange(size) * strides[-1]
        told = told + steps.reshape([-1 if other == axis else 1 for other in range(ranks.ndim)])
    if np.array_equal(told, ranks):
        return origin, (mesh.shape, True, strides, names)
    return 0, (mesh.shape, False, mesh.ranks, names)
