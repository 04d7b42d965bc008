"""What differs between two versions of tensors: found by bits, selected, compared and applied.

Changes of a list of tensors travel in three parts:

* ``counts``: how many elements of each tensor have changed, as plain numbers in the order of the tensors.
* ``positions``: 1-d int64, tensor after tensor, the places of these elements in the row-major order of the *global*
  tensor, ascending and each at most once within a tensor.
* ``values``: 1-d uint8, their new bits in the same order. The values of a tensor are side by side and begin at a
  multiple of 16 bytes; ``change_offsets`` says where. What lies between is undefined.

A shard is described by its ``ShardLike`` and the shape of its global tensor, as for ``fingerprint_shard``, and the sums
are those of ``fingerprint_shard``, over single elements: the sum of a tensor after a change is the sum before it, less
that of the old bits at the changed positions, plus that of the new bits, all modulo 2^64.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchtitan_ext.op_library import (
    bump_version_of,
    call,
    keep_out_of_cuda_graphs,
    listed,
    register_fake,
    register_in_place,
)
from torchtitan_ext.ops.shards import ShardLike, check_shapes, shard_tables

VALUES_ALIGNMENT = 16
"""Bytes. The largest element: the values of a tensor can be viewed as its dtype."""


def change_offsets(item_bytes: Sequence[int], counts: Sequence[int]) -> list[int]:
    """Where the values of each tensor begin in ``values``, in bytes, and behind the last one the bytes of all."""
    offsets, end = [], 0
    for bytes_of_one, count in zip(item_bytes, counts, strict=True):
        offsets.append((end + VALUES_ALIGNMENT - 1) // VALUES_ALIGNMENT * VALUES_ALIGNMENT)
        end = offsets[-1] + bytes_of_one * count
    return [*offsets, end]


def mask_words(tensors: Sequence[Tensor]) -> list[int]:
    """Where the bits of each tensor begin in the mask of ``mark_changes``, in words, and at the end their number."""
    starts = [0]
    for tensor in tensors:
        starts.append(starts[-1] + (tensor.numel() + 63) // 64)
    return starts


def mark_changes(new: Sequence[Tensor], base: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Compares tensors by bits: -0.0 differs from 0.0, and a NaN equals itself if its payload does.

    Args:
        new: Any dtypes and strides, on one device.
        base: The same dtypes and shapes on the same device, any strides.

    Returns:
        The mask, 1-d int64: a bit for each element, set where it differs. Each tensor begins a word (``mask_words``
        says where); its element ``i``, in row-major order of the *local* tensor, is bit ``i % 64`` of word ``i // 64``.
        The counts, int64 of shape ``(len(new),)``: how many elements of each tensor differ. Both are on the device
        of the tensors, which is not waited for.

    Raises:
        ValueError: Numbers, dtypes, shapes or devices of the tensors do not agree.
    """
    given, given_base = listed("mark_changes", "new", new), listed("mark_changes", "base", base)
    if not given and not given_base:
        return torch.empty(0, dtype=torch.int64, device="cpu"), torch.empty(0, dtype=torch.int64, device="cpu")
    mask, counts = call("mark_changes", (given, given_base))
    return mask, counts


@register_fake("mark_changes")
def _(new: Sequence[Tensor], base: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    first = new[0]
    mask = first.new_empty(mask_words(new)[-1], dtype=torch.int64)
    return mask, first.new_empty(len(new), dtype=torch.int64)


def changed_elements_(
    new: Sequence[Tensor],
    base: Sequence[Tensor],
    shards: Sequence[ShardLike],
    global_sizes: Sequence[Sequence[int]],
    mask: Tensor,
    counts: Sequence[int],
    positions: Tensor,
    values: Tensor,
) -> Tensor:
    """Writes the changed elements into the caller's buffers, and adds up the hashes of their old and new bits.

    Args:
        new: The tensors that ``mark_changes`` compared.
        base: Their earlier bits.
        shards: What part of its global tensor each of them is.
        global_sizes: Shapes of the global tensors.
        mask: What ``mark_changes`` gave for these tensors. Bits behind the last element of a tensor stand for none.
        counts: Its counts, as plain numbers; 0 leaves a tensor out, whatever changed.
        positions: Filled. 1-d int64 on the device of the tensors, ``sum(counts)`` long or longer.
        values: Filled. 1-d uint8 there, as long as the last of ``change_offsets`` or longer.

    Returns:
        int64 of shape ``(2, len(new))`` on the device: for each tensor the sum of the hashes of its old bits at the
        changed positions, and behind them those of the new bits. 0 for tensors left out.

    Raises:
        ValueError: A count is another one than the mask's (on CUDA, where nothing waits for the device, elements beyond
            the count are left out), a buffer is too short, or an argument does not fit the others. The buffers are
            unchanged then.
    """
    name = "changed_elements_"
    given, given_base = listed(name, "new", new), listed(name, "base", base)
    tables = shard_tables(name, given, shards, global_sizes)
    check_shapes(name, given, shards)
    if not given:
        return torch.zeros(2, 0, dtype=torch.int64, device="cpu")
    sums: Tensor = call(name, (given, given_base, tables, mask, list(counts), positions, values))
    return sums


@register_fake("changed_elements_")
def _(
    new: Sequence[Tensor],
    base: Sequence[Tensor],
    tables: Sequence[int],
    mask: Tensor,
    counts: Sequence[int],
    positions: Tensor,
    values: Tensor,
) -> Tensor:
    return new[0].new_empty(2, len(new), dtype=torch.int64)


bump_version_of("changed_elements_", 5, 6)


def find_changes(
    new: Sequence[Tensor],
    base: Sequence[Tensor],
    shards: Sequence[ShardLike],
    global_sizes: Sequence[Sequence[int]],
    limits: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``mark_changes`` and ``changed_elements_`` at once: one pass over tensors in host memory, into new buffers.

    Args:
        new: Any dtypes and strides, on one device.
        base: Their earlier bits: the same dtypes and shapes on the same device, any strides.
        shards: What part of its global tensor each of them is.
        global_sizes: Shapes of the global tensors.
        limits: Of a tensor in which more elements differ than its limit none is listed, and its sums are 0: who sends
            such a tensor whole passes the number from which on this is shorter.

    Returns:
        Positions and values, on the device of the tensors. The counts of all elements that differ, also where they are
        more than the limit: int64 of shape ``(len(new),)`` in host memory. The sums of ``changed_elements_``.
        The device of the tensors is waited for.

    Raises:
        ValueError: An argument does not fit the others.
    """
    name = "find_changes"
    given, given_base = listed(name, "new", new), listed(name, "base", base)
    tables = shard_tables(name, given, shards, global_sizes)
    check_shapes(name, given, shards)
    if not given:
        empty = torch.empty(0, dtype=torch.int64, device="cpu")
        return empty, empty.to(torch.uint8), empty, empty.view(2, 0)
    positions, values, counts, sums = call(name, (given, given_base, tables, list(limits)))
    return positions, values, counts, sums


@register_fake("find_changes")
def _(
    new: Sequence[Tensor], base: Sequence[Tensor], tables: Sequence[int], limits: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    context = torch.library.get_ctx()
    positions = new[0].new_empty(context.new_dynamic_size(), dtype=torch.int64)
    values = new[0].new_empty(context.new_dynamic_size(), dtype=torch.uint8)
    counts = torch.empty(len(new), dtype=torch.int64, device="cpu")
    return positions, values, counts, new[0].new_empty(2, len(new), dtype=torch.int64)


def sum_elements(
    locals: Sequence[Tensor],
    shards: Sequence[ShardLike],
    global_sizes: Sequence[Sequence[int]],
    positions: Tensor,
    counts: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """Adds up the hashes of the bits that shards hold at given positions of their global tensors.

    Args:
        locals: The shards, any dtypes and strides, on one device.
        shards: What part of its global tensor each of them is.
        global_sizes: Shapes of the global tensors.
        positions: As ``changed_elements_`` gives them, on the same device; those outside of a shard are passed over.
        counts: How many of them each tensor has.

    Returns:
        The sums modulo 2^64, int64 of shape ``(len(locals),)``, and how many of the positions lie in each shard, of the
        same dtype and shape. Both are on the device, which is not waited for.

    Raises:
        ValueError: Positions of a tensor do not ascend or lie outside of the global tensor (on CUDA not looked at), or
            an argument does not fit the others.
    """
    name = "sum_elements"
    given = listed(name, "locals", locals)
    tables = shard_tables(name, given, shards, global_sizes)
    check_shapes(name, given, shards)
    if not given:
        return torch.zeros(0, dtype=torch.int64, device="cpu"), torch.zeros(0, dtype=torch.int64, device="cpu")
    sums, found = call(name, (given, tables, positions, list(counts)))
    return sums, found


@register_fake("sum_elements")
def _(shards: Sequence[Tensor], tables: Sequence[int], positions: Tensor, counts: Sequence[int]) -> tuple[Tensor, ...]:
    return tuple(shards[0].new_empty(len(shards), dtype=torch.int64) for _ in range(2))


def apply_changes_(
    locals: Sequence[Tensor],
    shards: Sequence[ShardLike],
    global_sizes: Sequence[Sequence[int]],
    positions: Tensor,
    values: Tensor,
    counts: Sequence[int],
) -> None:
    """Writes changed elements into the shards that hold them, in place.

    Args:
        locals: The shards, any dtypes and strides, on one device. No two may share memory.
        shards: What part of its global tensor each of them is.
        global_sizes: Shapes of the global tensors.
        positions: As ``changed_elements_`` gives them, on the same device. Those outside of a shard are passed over, so
            every rank can apply the changes of the whole tensor.
        values: Their bits.
        counts: How many of them each tensor has.

    Raises:
        ValueError: Positions of a tensor do not ascend or lie outside of the global tensor (on CUDA not looked at), or
            an argument does not fit the others. Nothing is written then.
    """
    name = "apply_changes_"
    given = listed(name, "locals", locals)
    tables = shard_tables(name, given, shards, global_sizes)
    check_shapes(name, given, shards)
    if given:
        call(name, (given, tables, positions, list(counts), values))


register_in_place("apply_changes_", 0)

# Their tables lie in the host's memory during the call.
keep_out_of_cuda_graphs("mark_changes", "changed_elements_", "find_changes", "sum_elements", "apply_changes_")
