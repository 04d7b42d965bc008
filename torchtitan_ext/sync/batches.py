"""What ranks send to each other: batches of tensors. Here those of a plain list, in ``replicas`` those of modules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from torchtitan_ext.errors import Problem, described
from torchtitan_ext.layout.dtensor import local_tensor
from torchtitan_ext.sync.tensors import inner_tensors, listed_fault

BatchKey = tuple[int, tuple[int, ...], str]
"""Round, global ranks of the group, device type. Every rank sends its batches in the order of these keys."""


@dataclass(frozen=True)
class MeshSlice:
    """The mesh of a tensor, where it does not hold all ranks of the call: other slices may hold the tensor too.

    ``place`` is this rank's coordinate on the axes that shard, ``None`` on those that replicate. Where the whole mesh
    has an axis "pp", ``stage`` is this rank's: other stages have tensors of their own, perhaps with the same names.
    ``num_peers`` counts the ranks of the stage, or all.
    """

    shape: tuple[int, ...]
    place: tuple[int | None, ...]
    stage: int | None
    num_peers: int


@dataclass(frozen=True)
class ReplicaTensor:
    """One rank's replica of a tensor: its memory, a plain, detached tensor, and the coordinate on its mesh.

    Attributes:
        layout: Global shape and placements as text; replicas must agree on it.
        replica_set: Equal for all replicas of one shard and for no other: the mesh's ranks, and ``MeshSlice.place``.
        mesh_slice: The tensor's mesh, where other ranks may hold the tensor on meshes of their own (see ``slices``).
    """

    fqn: str
    local: Tensor
    layout: str
    replica_set: tuple[Any, ...]
    coordinate: tuple[int, ...]
    mesh_slice: MeshSlice | None = None


@dataclass
class Batch:
    """Tensors that are sent together. ``src`` is the source's rank in the group."""

    group: dist.ProcessGroup
    src: int
    tensors: list[ReplicaTensor] = field(default_factory=list)

    @property
    def locals(self) -> list[Tensor]:
        """This rank's memory of each tensor."""
        return [tensor.local for tensor in self.tensors]

    @property
    def names(self) -> list[str]:
        """What ranks must agree on besides dtypes and shapes."""
        return [text for tensor in self.tensors for text in (tensor.fqn, tensor.layout)]


@dataclass
class ListBatch:
    """A ``Batch`` of a plain list. It makes names from positions only when asked: a list may have thousands of tensors.

    Where tied tensors are left out, ``positions`` are those of the others.
    """

    group: dist.ProcessGroup
    src: int
    locals: list[Tensor]
    positions: tuple[int, ...] = ()

    @property
    def tensors(self) -> list[ReplicaTensor]:
        ranks = tuple(dist.get_process_group_ranks(self.group))
        positions = self.positions or range(len(self.locals))
        return [
            ReplicaTensor(f"tensors[{position}]", local, "", ranks, ())
            for position, local in zip(positions, self.locals, strict=True)
        ]

    @property
    def names(self) -> list[str]:
        return [str(position) for position in self.positions]


@dataclass
class ReplicaBatches:
    """All batches of one rank, the tensors in them, each once, and the problems of tensors that cannot take part.

    Attributes:
        owners: The user's tensors; ``tensors`` are their local memory.
        tied: The name of each tensor that is left out because it has the memory of another one: that one's name.
        num_listed: Length of a plain list, tied tensors included.
    """

    batches: dict[BatchKey, Batch | ListBatch] = field(default_factory=dict)
    tensors: list[ReplicaTensor] = field(default_factory=list)
    owners: list[Tensor] = field(default_factory=list)
    tied: dict[str, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    num_listed: int = 0


def collect_list(tensors: Sequence[Tensor], group: dist.ProcessGroup, src: int) -> ReplicaBatches:
    """The one batch of a list. Equal views of one memory (tied weights) are in it once."""
    found = ReplicaBatches()
    ranks = tuple(dist.get_process_group_ranks(group))
    if not isinstance(src, int) or not 0 <= src < len(ranks):
        what = f"got {src!r}, expected a rank of the group, 0 to {len(ranks) - 1}"
        found.problems.append(Problem("cannot_sync", "src", what))
    if isinstance(tensors, str) or not isinstance(tensors, Sequence):
        what = f"is {described(tensors)}, expected a list of tensors"
        found.problems.append(Problem("wrong_argument", "tensors", what))
    if found.problems or not tensors:
        return found
    found.num_listed = len(tensors)
    addresses = _plain_addresses(tensors)
    if addresses and len(set(addresses)) == len(addresses):
        # A list may have thousands of tensors: do not look at each.
        found.batches[0, ranks, tensors[0].device.type] = ListBatch(group, src, list(tensors))
    else:
        _add_each(found, tensors, ranks, group, src)
    return found


def _plain_addresses(tensors: Sequence[Any]) -> list[int]:
    """The address of each, where all are plain tensors or parameters with memory, on one kind of device; else none."""
    if not set(map(type, tensors)) <= {Tensor, nn.Parameter}:
        return []
    kinds = {device.type for device in set(map(attrgetter("device"), tensors))}
    if len(kinds) > 1 or "meta" in kinds or any(map(attrgetter("is_nested"), tensors)):
        return []
    try:
        return list(map(Tensor.data_ptr, tensors))
    except RuntimeError:  # a sparse tensor has no address
        return []


def _add_each(
    found: ReplicaBatches, tensors: Sequence[Any], ranks: tuple[int, ...], group: dist.ProcessGroup, src: int
) -> None:
    first: dict[Any, str] = {}
    whole: list[int] = []
    for position, tensor in enumerate(tensors):
        name = f"tensors[{position}]"
        problem = listed_fault(name, tensor)
        if problem is not None:
            found.problems.append(problem)
            continue
        found.owners.append(tensor)
        for fqn, local in inner_tensors(name, local_tensor(tensor)):
            other = first.setdefault(_memory_of(local), fqn) if local.numel() > 0 else fqn
            if other != fqn:
                found.tied[fqn] = other
                continue
            batch = found.batches.setdefault((0, ranks, local.device.type), Batch(group, src))
            batch.tensors.append(ReplicaTensor(fqn, local, "", ranks, ()))
            whole += [position] if fqn == name else []
    if len(found.batches) == 1 and len(whole) == sum(len(batch.tensors) for batch in found.batches.values()):
        # Another rank may have made a ListBatch of the same tensors: both must have equal names.
        positions = () if len(whole) == len(tensors) else tuple(whole)
        found.batches = {key: ListBatch(group, src, batch.locals, positions) for key, batch in found.batches.items()}


def _memory_of(tensor: Tensor) -> tuple[Any, ...]:
    # A tensor whose storage was freed has address 0; it is refused later, by its own name.
    address = tensor.data_ptr() or id(tensor)
    return tensor.device, address, tensor.dtype, tensor.shape, tensor.stride()
