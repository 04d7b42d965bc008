"""What one rank tells the coordinator of its state dict: one entry per key, plain picklable values.

It travels as a ``RankTable``, in ``planner_data`` of the local plan, inside DCP's own gather: planners use no process
group.
"""

from __future__ import annotations

import hashlib
import socket
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn, TypeGuard

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.utils import find_tensor_shard
from torch.distributed.tensor import DTensor

from torchtitan_ext import _core
from torchtitan_ext.checkpoint.tables.component import PER_RANK, nested_stateful
from torchtitan_ext.dcp_private import ShardedTensor, create_chunk_list
from torchtitan_ext.errors import Problem, refusal
from torchtitan_ext.layout.dtensor import (
    Describer,
    has_hooks,
    holds_wrapper,
    is_bare,
    is_on_mesh,
    is_wrapper,
    local_tensor,
    local_view,
    why_not_dense,
)
from torchtitan_ext.layout.layout import Box, LayoutRules, ShardReport, is_on_part, is_replicated, num_elements
from torchtitan_ext.layout.own_boxes import has_own_boxes, own_boxes, why_not_own_boxes
from torchtitan_ext.layout.wrapper import why_not_whole
from torchtitan_ext.state.plain_value import NotPlain, why_not_plain
from torchtitan_ext.state.value_digest import brief_tensors, brief_value, digest_large

# Counters, norms and biases of a test model: comparing them costs less than describing them.
SMALL_TENSOR_BYTES = 64 * 1024

# What one packed message may become: a few bytes of zlib can promise a gigabyte.
_MAX_UNPACKED_BYTES = 1 << 28


@dataclass(frozen=True)
class TensorEntry:
    """A tensor of which this rank holds a part."""

    report: ShardReport
    dtype: torch.dtype
    requires_grad: bool

    @property
    def global_shape(self) -> tuple[int, ...]:
        return self.report.global_shape


@dataclass(frozen=True)
class BoxesEntry:
    """A tensor that describes its own boxes: by its attributes (``layout/own_boxes.py``), through DCP's hooks
    (``__create_chunk_list__``), or as a ShardedTensor.

    Attributes:
        local_offsets: Where each box begins in the rank's local tensor; ``None`` where each is a tensor of its own.
    """

    global_shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: tuple[Box, ...]
    requires_grad: bool = False
    local_offsets: tuple[tuple[int, ...], ...] | None = None


@dataclass(frozen=True)
class ObjectEntry:
    """A value that is not a tensor."""


KeyEntry = TensorEntry | BoxesEntry | ObjectEntry


@dataclass(frozen=True)
class KeyTable:
    """One rank's entries.

    Attributes:
        entries: By flat key, in the order of the state dict.
        digests: Of the values that are compared between replicas, by flat key.
        stock_paths: Where each key stands in the nested state dict, as DCP's metadata records it.
        problems: What this rank alone can already tell to be wrong.
        unread: Values that a load will not read by default: by flat key the classes for which it will not.
        layouts: Whether each pattern of ``layouts=`` matches a key.
        wrappers: Tensors whose local tensor is a wrapper subclass. Other ranks are not told.
        tied: Keys that are left out because they are one memory with another one, which each of them names.
    """

    entries: Mapping[str, KeyEntry]
    digests: Mapping[str, bytes] = field(default_factory=dict)
    stock_paths: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()
    unread: Mapping[str, NotPlain] = field(default_factory=dict)
    layouts: Mapping[str, bool] = field(default_factory=dict)
    wrappers: tuple[str, ...] = ()
    tied: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class RankTable:
    """One rank's table on its way to the coordinator: bytes that ranks which hold alike have in common, and little of
    a rank's own.

    Attributes:
        sections: Columns of keys (``csrc/core/key_columns.h``), packed: tensors on meshes, other values, and values
            that each rank keeps under a name of its own.
        part: Where this rank stands on the meshes of the first section, and its local sizes, packed.
        digests: The digests of the values of each section, packed.
        rest: What the table has beside its columns, with the paths that are no cut of their key at dots.
        host: Digest of the name of the rank's host; empty where the rank does not say.
        planner: The class of the rank's planner, where it plans by methods of its own.
        keeps_shards: Whether shards are written whole: some cannot be cut, or methods of a planner's own give them.
    """

    sections: tuple[bytes, ...]
    part: bytes
    digests: tuple[bytes, ...]
    rest: KeyTable
    host: bytes = b""
    planner: str = ""
    keeps_shards: bool = False

    def __iter__(self) -> NoReturn:
        """A subclass that plans by itself merges what it takes for the default planner's dicts of paths."""
        detail = (
            "its create_global_plan merges the planner_data of local plans, which are no dicts of paths; call "
            "super().create_global_plan(), or extend DCP's default planner instead"
        )
        raise refusal("save", [Problem("planner_subclass", self.planner, detail)])


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


def encode_table(table: KeyTable) -> EncodedTable:
    """The table as it travels."""
    own = {fqn for fqn in table.entries if "rank" in fqn and PER_RANK.search(fqn)}
    columns = _core.encode_columns(dict(table.entries), dict(table.stock_paths), own)
    odd_paths = {fqn: table.stock_paths[fqn] for fqn in columns.odd_paths}
    names, kind_of, digests = tuple(columns.names), tuple(columns.kind_of), dict(table.digests)
    message = RankTable(
        sections=tuple(map(pack, columns.sections)),
        part=pack(columns.part),
        digests=tuple(
            pack(_core.encode_digests(*columns_of, digests)) for columns_of in zip(names, kind_of, strict=True)
        ),
        rest=replace(table, entries={}, digests={}, stock_paths=odd_paths, wrappers=()),
    )
    return EncodedTable(message, names, kind_of)


def describe_state(
    values: Mapping[str, Any], stock_paths: Mapping[str, tuple[Any, ...]], rules: LayoutRules
) -> KeyTable:
    """The table of a flat state dict, without value digests. Keys whose mesh this rank is not on are left out."""
    describer = Describer(rules)
    known: dict[tuple[int, torch.dtype, bool], TensorEntry] = {}
    entries: dict[str, KeyEntry] = {}
    wrappers: list[str] = []
    reasons: dict[Any, str | None] = {}
    problems: list[Problem] = []
    for fqn, value in values.items():
        if not isinstance(value, torch.Tensor) and not _has_boxes(value):
            entries[fqn] = ObjectEntry()
            continue
        if not is_on_mesh(value):
            continue
        entry = _describe_tensor(fqn, value, describer, known, reasons)
        if isinstance(entry, Problem):
            problems.append(entry)
        else:
            entries[fqn] = entry
            if isinstance(entry, TensorEntry) and holds_wrapper(value):
                wrappers.append(fqn)
    return KeyTable(
        entries=entries,
        stock_paths=dict(stock_paths),
        problems=tuple(problems),
        layouts=rules.matches(values),
        wrappers=tuple(wrappers),
    )


def check_objects(values: Mapping[str, Any], table: KeyTable) -> tuple[dict[str, NotPlain], list[Problem]]:
    """Which values a load will not read by default, and for which classes; and which cannot be written at all."""
    unread: dict[str, NotPlain] = {}
    problems: list[Problem] = []
    for fqn, entry in table.entries.items():
        if isinstance(entry, ObjectEntry):
            try:
                found = why_not_plain(values[fqn])
            except TypeError as error:
                problems.append(Problem("unsupported_value", fqn, f"{error}; keep to plain values"))
            else:
                if found is not None:
                    unread[fqn] = replace(found, advice=nested_stateful(values[fqn]) or "")
    return unread, problems


def how_to_read(unread: Collection[NotPlain]) -> str:
    """What makes a load read these values, as the end of a sentence: all their classes at once."""
    trusting = "weights_only=False to LoadPlanner or tte.install, if you trust the checkpoint"
    not_allowed = {name for found in unread if not found.can_be_allowed for name in found.names}
    if not_allowed:
        return f"pass {trusting}: allow_classes does not help with {', '.join(sorted(not_allowed))}"
    names = {name for found in unread for name in found.names}
    return f"pass allow_classes=[{', '.join(sorted(names))}] to LoadPlanner or tte.install; or {trusting}"


def digest_values(
    values: Mapping[str, Any], table: KeyTable, *, hash_replicas: bool, world_size: int
) -> dict[str, bytes]:
    """What replicas are compared by: of every object, and of tensors that other ranks hold too, or may hold.

    No rank knows alone whether a tensor on a mesh that is smaller than the world is on other meshes too: FSDP2 over TP
    holds norms so, which the TP plan leaves out. Such tensors are always read, whatever their size; other replicas of
    more than ``SMALL_TENSOR_BYTES`` only with ``hash_replicas``. One rank alone has nothing to compare.
    """
    if world_size == 1:
        return {}
    digests: dict[str, bytes] = {}
    small: dict[str, torch.Tensor] = {}
    large: dict[str, torch.Tensor] = {}
    for fqn, entry in table.entries.items():
        if isinstance(entry, ObjectEntry):
            digests[fqn] = brief_value(values[fqn])
        # Ranks that hold nothing of an empty tensor may hold it in different local shapes.
        elif not isinstance(entry, TensorEntry) or local_bytes(entry) == 0 or local_tensor(values[fqn]).is_meta:
            continue
        elif is_replicated(entry.report) or is_on_part(entry.report, world_size):
            if local_bytes(entry) <= SMALL_TENSOR_BYTES:
                small[fqn] = values[fqn]
            elif hash_replicas or is_on_part(entry.report, world_size):
                large[fqn] = values[fqn]
    return {**digests, **brief_tensors(small), **digest_large(large)}


def lies_in_local(entry: KeyEntry | None) -> TypeGuard[TensorEntry | BoxesEntry]:
    """Whether what a rank holds of a key is boxes of its one local tensor."""
    return isinstance(entry, TensorEntry) or (isinstance(entry, BoxesEntry) and entry.local_offsets is not None)


def local_bytes(entry: TensorEntry) -> int:
    """Bytes of the rank's local tensor."""
    return num_elements(entry.report.local_sizes) * entry.dtype.itemsize


def box_tensors(value: Any, entry: BoxesEntry) -> Iterator[torch.Tensor]:
    """The rank's memory of each box of a tensor that describes itself, plain and detached, in the entry's order."""
    if entry.local_offsets is None:
        for position, (offsets, _) in enumerate(entry.boxes):
            yield local_tensor(find_tensor_shard(value, MetadataIndex("", torch.Size(offsets), position)))
        return
    local = local_tensor(value)
    for (_, sizes), local_offsets in zip(entry.boxes, entry.local_offsets, strict=True):
        yield local_view(local, local_offsets, sizes)


def host_digest() -> bytes:
    """Stands for this rank's host: equal on ranks of one host only."""
    return hashlib.blake2b(socket.gethostname().encode(), digest_size=8).digest()


def number_hosts(hosts: Sequence[bytes]) -> list[int]:
    """Per rank the number of its host, from the ``host_digest`` of each; who does not say has a host for itself."""
    numbers: dict[bytes | int, int] = {}
    return [numbers.setdefault(host or rank, len(numbers)) for rank, host in enumerate(hosts)]


def pack(data: bytes) -> bytes:
    """Compressed."""
    return zlib.compress(data, 9)


def unpack(data: bytes) -> bytes:
    """What was packed. Raises ValueError for bytes that were not, or that become too many."""
    stream = zlib.decompressobj()
    try:
        unpacked = stream.decompress(data, _MAX_UNPACKED_BYTES)
    except zlib.error as error:
        raise ValueError(f"packed bytes are broken: {error}") from None
    if not stream.eof or stream.unused_data:
        raise ValueError(f"packed bytes are cut off, or become more than {_MAX_UNPACKED_BYTES}")
    return unpacked


def _has_boxes(value: Any) -> bool:
    return isinstance(value, ShardedTensor) or (not isinstance(value, type) and hasattr(value, "__create_chunk_list__"))


def _describe_tensor(
    fqn: str,
    value: Any,
    describer: Describer,
    known: dict[tuple[int, torch.dtype, bool], TensorEntry],
    reasons: dict[Any, str | None],
) -> TensorEntry | BoxesEntry | Problem:
    """The entry of a tensor, the same object for tensors that share a report, which the entry keeps alive."""
    bare = is_bare(value)
    if not bare and has_own_boxes(value):
        return _describe_own_boxes(fqn, value)
    if not bare and has_hooks(value):
        chunks = create_chunk_list(value)
        boxes = tuple((tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in chunks)
        return BoxesEntry(tuple(value.size()), value.dtype, boxes, bool(getattr(value, "requires_grad", False)))
    local = local_tensor(value)
    reason = why_not_whole(local, reasons) if is_wrapper(local) else why_not_dense(local)
    if reason is not None:
        return Problem("unsupported_tensor", fqn, reason)
    unknown = None if bare else _why_not_plain_to_stock(fqn, value)
    report = unknown or describer.describe(fqn, value)
    if isinstance(report, Problem):
        return report
    alike = (id(report), value.dtype, value.requires_grad)
    if alike not in known:
        known[alike] = TensorEntry(report, *alike[1:])
    return known[alike]


def _why_not_plain_to_stock(fqn: str, value: torch.Tensor) -> Problem | None:
    """Refuses what the installed torch takes for shards where we see a plain tensor: it may know more descriptions."""
    if isinstance(value, DTensor):
        return None
    chunks = create_chunk_list(value)
    if [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in chunks] == [((0,) * value.dim(), tuple(value.shape))]:
        return None
    held = ", ".join(f"{tuple(chunk.offsets)}+{tuple(chunk.sizes)}" for chunk in chunks[:4]) or "nothing"
    detail = (
        f"torch {torch.__version__} takes it for shards, of which this rank holds {held}, by a description that this "
        "package does not know; use a DTensor, or the attributes of CheckpointableTensor"
    )
    return Problem("unsupported_tensor", fqn, detail)


def _describe_own_boxes(fqn: str, tensor: torch.Tensor) -> BoxesEntry | Problem:
    reason = why_not_dense(local_tensor(tensor))
    if reason is not None:
        return Problem("unsupported_tensor", fqn, reason)
    reason = why_not_own_boxes(tensor)
    if reason is not None:
        return Problem("layout_matches_nothing", fqn, reason)
    shape, chunks = own_boxes(tensor)
    boxes = tuple((chunk.offsets, chunk.sizes) for chunk in chunks)
    local_offsets = tuple(chunk.local_offsets for chunk in chunks)
    return BoxesEntry(shape, tensor.dtype, boxes, tensor.requires_grad, local_offsets)
