"""Which of the tensors that a load fills can be sent to other ranks, and received from them, where they lie."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchtitan_ext.checkpoint.operation.phases import Phases
from torchtitan_ext.checkpoint.operation.sharing.planned_reads import PlannedReads
from torchtitan_ext.checkpoint.tables.key_table import lies_in_local
from torchtitan_ext.layout.dtensor import is_wrapper, may_overlap_itself
from torchtitan_ext.ranks.exchange import has_backend
from torchtitan_ext.storage import FileReader


@dataclass(frozen=True)
class Target:
    """Where an item goes, as far as others who want it need to know."""

    dtype: torch.dtype
    device: str
    item_bytes: int
    is_cut: bool
    is_overwritten: bool


class FilledTensor(NamedTuple):
    """Names a tensor that items fill: a key of one source, and of a tensor in several parts the part."""

    source: int
    fqn: str
    offset: torch.Size | None


def find_targets(sources: Sequence[PlannedReads], phases: Phases) -> list[list[Target | None]]:
    """Per item its target; ``None`` where this rank reads it for itself."""
    places: list[list[FilledTensor]] = []
    tensors: dict[FilledTensor, Tensor] = {}
    for number, source in enumerate(sources):
        entries = source.planner.wanted.entries
        places.append([])
        for item in source.plan.items:
            index = item.dest_index
            place = FilledTensor(number, index.fqn, None if lies_in_local(entries.get(index.fqn)) else index.offset)
            if place not in tensors:
                tensors[place] = source.planner.lookup_tensor(index).detach()
            places[-1].append(place)
    alone, overwritten = _find_ties(tensors, [place for of_source in places for place in of_source])
    devices = {place: tensor.device for place, tensor in tensors.items()}
    first_of_type = {device.type: device for device in reversed(devices.values())}
    usable = {
        place
        for place, tensor in tensors.items()
        if place not in alone
        and _is_memory(tensor)
        and sources[place.source].planner.why_unproved(place.fqn) is None  # nothing but these bytes fills it
        and first_of_type[tensor.device.type] == tensor.device  # an exchange is of one device
        and phases.group is not None
        and has_backend(phases.group, tensor.device.type)
    }
    found: list[list[Target | None]] = []
    for source, of_source in zip(sources, places, strict=True):
        found.append([])
        for place, is_cut in zip(of_source, _are_cut(source), strict=True):
            tensor = tensors[place]
            target = Target(tensor.dtype, tensor.device.type, tensor.itemsize, is_cut, place in overwritten)
            found[-1].append(target if place in usable else None)
    return found


def _is_memory(tensor: Tensor) -> bool:
    """Whether boxes of a tensor can be sent and received where they lie."""
    if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.device.type not in ("cpu", "cuda"):
        return False
    if tensor.is_conj() or tensor.is_neg() or tensor.is_quantized or tensor.is_inference():
        return False
    return tensor.is_contiguous() or not may_overlap_itself(tensor)


def _find_ties(
    tensors: Mapping[FilledTensor, Tensor], in_order: Sequence[FilledTensor]
) -> tuple[set[FilledTensor], set[FilledTensor]]:
    """Tensors that share a part of their memory; and those that another one overwrites, which lies in the same place.

    Args:
        in_order: The tensor of each item, in the order of reading.
    """
    last = {place: position for position, place in enumerate(in_order)}
    tied: dict[Any, list[FilledTensor]] = {}
    for place, tensor in tensors.items():
        if is_wrapper(tensor) or tensor.layout is not torch.strided or tensor.numel() == 0 or tensor.is_meta:
            continue
        key = (tensor.data_ptr(), tensor.device, tensor.shape, tensor.stride(), tensor.dtype, tensor.is_conj())
        tied.setdefault(key, []).append(place)
    alone: set[FilledTensor] = set()
    overwritten: set[FilledTensor] = set()
    extents = []
    for (address, device, shape, stride, dtype, _), places in tied.items():
        *earlier, _ = sorted(places, key=last.__getitem__)
        overwritten.update(earlier)
        num_elements = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
        extents.append((str(device), address, address + num_elements * dtype.itemsize, places))
    reached: tuple[str, int, list[FilledTensor]] = ("", 0, [])
    for on_device, begin, end, places in sorted(extents, key=lambda one: one[:3]):
        if on_device == reached[0] and begin < reached[1]:
            alone.update(places, reached[2])
        if on_device != reached[0] or end > reached[1]:
            reached = (on_device, end, places)
    return alone, overwritten


def _are_cut(source: PlannedReads) -> list[bool]:
    """Per item whether a part of the record can be read without the rest: of others' readers nobody knows."""
    if not isinstance(source.reader, FileReader):
        return [False] * len(source.plan.items)
    return source.reader.are_plain([item.storage_index for item in source.plan.items])
