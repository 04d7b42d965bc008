"""Which of the tensors that a load fills can be sent to other ranks, and received from them, where they lie."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.planner import ReadItem

from torchtitan_ext.checkpoint.operation.component_plans import PlannedSource
from torchtitan_ext.checkpoint.operation.phases import Phases
from torchtitan_ext.checkpoint.tables.key_table import lies_in_local
from torchtitan_ext.layout.dtensor import is_plain_memory, is_wrapper
from torchtitan_ext.ranks.exchange import has_backend
from torchtitan_ext.storage import FileReader

TargetKey = tuple[str, torch.Size | None]
"""Names a tensor that items fill: a key, and of a tensor in several parts the part."""


def find_tags(
    source: PlannedSource, items: Sequence[ReadItem], phases: Phases
) -> list[tuple[str, str, int, bool, bool] | None]:
    """Of each item what others who want it need to know of its target (``ShareTag`` in
    ``csrc/core/shared_reads.h``); ``None`` where this rank reads it for itself."""
    places: list[TargetKey] = []
    tensors: dict[TargetKey, Tensor] = {}
    entries, reader = source.ours.wanted.entries, source.opened.reader
    stored = [item.storage_index for item in items]
    # Whether a part of the record can be read without the rest.
    are_cut = reader.are_plain(stored) if isinstance(reader, FileReader) else [False] * len(items)
    for item in items:
        index = item.dest_index
        place = (index.fqn, None if lies_in_local(entries.get(index.fqn)) else index.offset)
        if place not in tensors:
            tensors[place] = source.ours.lookup_tensor(index).detach()
        places.append(place)
    alone, overwritten = _find_ties(tensors, places)
    first_of_type = {tensor.device.type: tensor.device for tensor in reversed(tensors.values())}
    usable = {
        place
        for place, tensor in tensors.items()
        if place not in alone
        and _is_memory(tensor)
        and source.ours.why_unproved(place[0]) is None  # nothing but these bytes fills it
        and first_of_type[tensor.device.type] == tensor.device  # an exchange is of one device
        and phases.group is not None
        and has_backend(phases.group, tensor.device.type)
    }
    tags: list[tuple[str, str, int, bool, bool] | None] = []
    for place, is_cut in zip(places, are_cut, strict=True):
        tensor = tensors[place]
        tag = (str(tensor.dtype), tensor.device.type, tensor.itemsize, is_cut, place in overwritten)
        tags.append(tag if place in usable else None)
    return tags


def _is_memory(tensor: Tensor) -> bool:
    """Whether boxes of a tensor can be sent and received where they lie."""
    if tensor.device.type not in ("cpu", "cuda") or tensor.is_quantized or tensor.is_inference():
        return False
    return is_plain_memory(tensor)


def _find_ties(
    tensors: Mapping[TargetKey, Tensor], in_order: Sequence[TargetKey]
) -> tuple[set[TargetKey], set[TargetKey]]:
    """Tensors that share a part of their memory; and those that another one overwrites, which lies in the same place.

    Args:
        in_order: The tensor of each item, in the order of reading.
    """
    last = {place: position for position, place in enumerate(in_order)}
    tied: dict[Any, list[TargetKey]] = {}
    for place in sorted(tensors, key=last.__getitem__):
        tensor = tensors[place]
        if is_wrapper(tensor) or tensor.layout is not torch.strided or tensor.numel() == 0 or tensor.is_meta:
            continue
        begin, layout = tensor.data_ptr(), (tensor.shape, tensor.stride(), tensor.dtype, tensor.is_conj())
        last_element = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
        extent = (str(tensor.device), begin, begin + (1 + last_element) * tensor.itemsize)
        tied.setdefault((extent, layout), []).append(place)
    overwritten = {place for places in tied.values() for place in places[:-1]}
    alone: set[TargetKey] = set()
    reached: tuple[str, int, list[TargetKey]] = ("", 0, [])
    for ((on_device, begin, end), _), places in sorted(tied.items(), key=lambda one: one[0][0]):
        if on_device == reached[0] and begin < reached[1]:
            alone.update(places, reached[2])
        if on_device != reached[0] or end > reached[1]:
            reached = (on_device, end, places)
    return alone, overwritten
