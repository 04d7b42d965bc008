"""Keys with one memory, as tied weights have them: they are filled once."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from torchtitan_ext.checkpoint.tables.key_table import KeyEntry, TensorEntry
from torchtitan_ext.layout.dtensor import is_wrapper, local_tensor


def tied_keys(values: Mapping[str, Any], entries: Mapping[str, KeyEntry], firsts: Collection[str]) -> dict[str, str]:
    """For each key that has exactly the memory and the layout of an earlier one among ``firsts`` the name of that one.

    A key that has a part of another's memory, or the same memory in another shape or order, has a tie to none. Tensors
    on meta have the memory that they would get: views of one have it in common.
    """
    first_of: dict[Any, str] = {}
    for fqn in firsts:
        memory = _memory_of(values[fqn], entries[fqn])
        if memory is not None:
            first_of.setdefault(memory, fqn)
    tied: dict[str, str] = {}
    for fqn, entry in entries.items() if first_of else ():
        first = first_of.get(_memory_of(values[fqn], entry), fqn)
        if first != fqn and _layout_of(entries[first]) == _layout_of(entry):
            tied[fqn] = first
    return tied


def is_own_memory(tensor: Tensor) -> bool:
    """Whether the elements lie in the tensor's own memory as they are."""
    return not is_wrapper(tensor) and not tensor.is_conj() and not tensor.is_neg()


def _memory_of(value: Any, entry: KeyEntry) -> Any:
    """Equal for tensors that are one; ``None`` where that is not known."""
    local = local_tensor(value) if isinstance(entry, TensorEntry) else None
    if local is None or not is_own_memory(local):
        return None
    storage = local.untyped_storage()._cdata
    return (storage, local.storage_offset(), local.shape, local.stride(), local.dtype)


def _layout_of(entry: KeyEntry) -> Any:
    return entry.report if isinstance(entry, TensorEntry) else None
