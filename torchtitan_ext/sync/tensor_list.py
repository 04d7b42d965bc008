"""A list of plain tensors as replicas along one process group, named by their positions."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from torchtitan_ext.errors import Problem, described
from torchtitan_ext.layout.dtensor import local_tensor
from torchtitan_ext.sync.faults import inner_tensors, listed_fault
from torchtitan_ext.sync.replicas import Batch, ListBatch, Replicas, ReplicaTensor


def collect_list(tensors: Sequence[Tensor], group: dist.ProcessGroup, src: int) -> Replicas:
    """The one batch of a list. Tensors that are equal views of one memory (tied weights) are in it once."""
    found = Replicas()
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
    addresses = _addresses(tensors) if _is_plain(tensors) else None
    if addresses is not None and len(set(addresses)) == len(addresses):
        # Thousands of tensors: nothing is looked at one by one.
        found.batches[0, ranks, tensors[0].device.type] = ListBatch(group, src, list(tensors))
    else:
        _add_each(found, tensors, ranks, group, src)
    return found


def _is_plain(tensors: Sequence[Any]) -> bool:
    """Whether these are tensors without a class of their own, on one kind of device, with memory."""
    if not set(map(type, tensors)) <= {Tensor, nn.Parameter}:
        return False
    kinds = {device.type for device in set(map(attrgetter("device"), tensors))}
    return len(kinds) == 1 and "meta" not in kinds and not any(map(attrgetter("is_nested"), tensors))


def _addresses(tensors: Sequence[Tensor]) -> list[int] | None:
    try:
        return list(map(Tensor.data_ptr, tensors))
    except RuntimeError:  # one has none: sparse, or quantized in a way without one
        return None


def _add_each(
    found: Replicas, tensors: Sequence[Any], ranks: tuple[int, ...], group: dist.ProcessGroup, src: int
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
        # Plain and untied on another rank perhaps, and alike.
        positions = () if len(whole) == len(tensors) else tuple(whole)
        found.batches = {key: ListBatch(group, src, batch.locals, positions) for key, batch in found.batches.items()}


def _memory_of(tensor: Tensor) -> tuple[Any, ...]:
    # A tensor whose storage was freed has no address, and is refused later by its own name.
    address = tensor.data_ptr() or id(tensor)
    return tensor.device, address, tensor.dtype, tensor.shape, tensor.stride()
