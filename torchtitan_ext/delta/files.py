"""Changes into a file and out of one: one file for all ranks."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_ext import _core, ops
from torchtitan_ext._core import SumTable
from torchtitan_ext.checkpoint.operation.arguments import PlaceOfRank, check_seconds, place_of
from torchtitan_ext.checkpoint.operation.phases import TIMEOUT_SECONDS, Phases, checking_arguments
from torchtitan_ext.delta.part_reads import sum_of_part, zero_sums
from torchtitan_ext.delta.saved_changes import (
    NOTE,
    SavedChanges,
    SavedPart,
    TensorTotals,
    decode_note,
    encode_note,
    part_names,
)
from torchtitan_ext.errors import (
    DamagedCheckpointError,
    Problem,
    WrongArgumentError,
    described,
    named,
    refusal,
)
from torchtitan_ext.layout.dtensor import as_bytes, local_view
from torchtitan_ext.layout.layout import Box
from torchtitan_ext.ranks.exchange import check_usable
from torchtitan_ext.storage.commit.staged_target import staged_target, take_place
from torchtitan_ext.storage.formats.opened_safetensors import OpenedSafetensors
from torchtitan_ext.storage.formats.safetensors_files import lay_out
from torchtitan_ext.storage.formats.sparse_files import make_file, write_parts
from torchtitan_ext.storage.raw_tensor import DTYPES
from torchtitan_ext.storage.weights.layout import name_problems
from torchtitan_ext.transfer.changed.changes import Changes, HeldTensor, differing_versions
from torchtitan_ext.transfer.changed.kept import Found

# Of the tensors of a part, the dtypes and the sizes behind the first.
_FORMS: tuple[tuple[str, tuple[int, ...]], ...] = (("int32", (2,)), ("uint16", ()), ("uint8", ()))


def save(
    changes: Changes | None,
    path: str | os.PathLike[str],
    *,
    group: dist.ProcessGroup | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> None:
    """Writes the changes of all ranks into one file, which appears when it is whole. Collective.

    Of replicas the first one is written; all must have changed alike. Together the ranks give all of each tensor of the
    snapshot, changed or not.

    Args:
        changes: Of this rank, from ``Snapshot.changes``; ``None`` on a rank that has no part of the state, or one that
            other ranks give too.
        path: The file, the same on all ranks, on a file system that all ranks see. An existing one is replaced.
        group: Ranks that hold the state; the default group if left out; without any this process alone.
        timeout_seconds: How long a rank waits for the others in each phase.

    Raises:
        LayoutError: A rank that has a part of a tensor gave none and no other rank has it, or files cannot have the
            tensor's dtype or name. Nothing was written.
        StateRefusedError: (a subclass) Replicas or versions differ, or ranks name different files. Nothing was written.
        CheckpointFailedError: A rank could not write; the file is the old one, or none. The same on every rank.
        LostRankError: A rank is gone or does not take part.
    """
    check_usable("delta.save", group)
    with checking_arguments("delta.save", group):
        check_seconds("delta.save", timeout_seconds)
    target = Path(path)
    with (
        Phases("save", group, path=path, timeout_seconds=timeout_seconds, call="delta.save") as phases,
        ExitStack() as stack,
    ):
        own: list[WrittenPart] = []

        def offer() -> _Offer:
            if not isinstance(changes, Changes | None):
                what = f"got {described(changes)}, expected what Snapshot.changes() gives"
                raise WrongArgumentError("save", (Problem("wrong_argument", "changes", what),))
            own.extend([] if changes is None else parts_of(changes, changes.tensors, changes.item_bytes))
            return _offer(changes, own)

        def plan(offers: list[_Offer]) -> list[tuple[str, dict[int, list[int]]]]:
            places, head, num_bytes = _planned(offers)
            staged = stack.enter_context(staged_target(target, take_place))
            make_file(staged, head, num_bytes)
            return [(str(staged), of_rank) for of_rank in places]

        def write(path: str, begins_of: Mapping[int, Sequence[int]]) -> None:
            staged = Path(path)
            written = [
                (staged, begin, data.data_ptr(), data.nbytes)
                for part, begins in begins_of.items()
                for begin, data in zip(begins, own[part].tensors, strict=True)
            ]
            write_parts(written, sync=True)

        phases.on_all(
            "prepare", lambda: None, doing="changes were planned; nothing was written", places=[place_of(path)]
        )
        place = phases.through_coordinator("plan", offer, plan, doing="changes were planned; nothing was written")
        phases.on_all("write", lambda: write(*place), doing="changes were written; the file is the old one, or none")
        phases.on_all("commit", stack.close, doing="the file of changes took its place")


def load(
    path: str | os.PathLike[str], *, group: dist.ProcessGroup | None = None, timeout_seconds: float = TIMEOUT_SECONDS
) -> SavedChanges:
    """Opens a file of changes, and proves that all of it is what was written. Collective: each rank reads a share.

    Args:
        path: A file that ``delta.save`` or ``torchtitan-ext diff --delta`` wrote.
        group: Ranks that will apply it; the default group if left out; without any this process alone.
        timeout_seconds: How long a rank waits for the others.

    Raises:
        DamagedCheckpointError: The file is no file of changes, was cut, or has other bits than were written. The same
            on every rank.
        CheckpointFailedError: It cannot be read.
        LostRankError: A rank is gone or does not take part.
    """
    check_usable("delta.load", group)
    with checking_arguments("delta.load", group):
        check_seconds("delta.load", timeout_seconds)
    with Phases("load", group, path=path, timeout_seconds=timeout_seconds, call="delta.load") as phases:
        opened: list[SavedChanges] = []
        place = place_of(path)

        def read() -> tuple[PlaceOfRank, str, SumTable]:
            opened.append(open_changes(Path(path)))
            return place, opened[0].digest, _sums_of_new(opened[0], phases.rank, phases.size)

        def hold_the_same(found: Sequence[tuple[PlaceOfRank, str, SumTable]]) -> bool:
            return len({digest for _, digest, _ in found}) == 1

        def read_own_copy() -> None:
            check_sums(opened[0], [_sums_of_new(opened[0])])

        doing = "the file of changes was read"
        found = phases.on_all("read", read, doing=doing, places=[place], hold_the_same=hold_the_same)
        if all(of_rank == place for of_rank, _, _ in found):
            check_sums(opened[0], [sums for _, _, sums in found])
        else:
            phases.on_all("read own copy", read_own_copy, doing=doing)
    return opened[0]


def open_changes(path: Path) -> SavedChanges:
    """A file of changes, whose elements are not looked at yet. Not collective.

    Raises:
        DamagedCheckpointError: It is none, or was cut.
    """
    file = OpenedSafetensors(path)
    if NOTE not in file.notes:
        raise DamagedCheckpointError(f"{path} is no file of changes")
    try:
        base_version, version, totals, digest = decode_note(file.notes[NOTE])
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise DamagedCheckpointError(f"{path}: its note of the changes: {error}") from None
    parts = {fqn: [_part(file, fqn, at, of) for at in range(len(of.boxes))] for fqn, of in totals.items()}
    for fqn, of in totals.items():
        if sum(part.values.num_bytes for part in parts[fqn]) != of.count * DTYPES[of.dtype].itemsize:
            raise DamagedCheckpointError(f"{path}: {fqn} has not the {of.count} new elements that were written")
    return SavedChanges(str(path), file, base_version, version, totals, parts, digest)


def open_proved(path: Path) -> SavedChanges:
    """A file of changes, all of which is what was written. Not collective.

    Raises:
        DamagedCheckpointError: It is no file of changes, was cut, or has other bits than were written.
        OSError: It cannot be read.
    """
    changes = open_changes(path)
    check_sums(changes, [_sums_of_new(changes)])
    return changes


def check_sums(changes: SavedChanges, sums: Sequence[SumTable]) -> None:
    """Compares the sums of the new elements, of which each rank took a share, with those that were noted.

    Raises:
        DamagedCheckpointError: Names the first tensor that differs.
    """
    for fqn in SumTable.merge(sums).differing({fqn: total.new for fqn, total in changes.totals.items()}):
        raise DamagedCheckpointError(f"{changes.path}: the new elements of {fqn} are not those that were written")


def _sums_of_new(changes: SavedChanges, rank: int = 0, size: int = 1) -> SumTable:
    """The sums of the new elements in a rank's share of the parts."""
    sums = zero_sums(changes.totals)
    parts = ((fqn, part) for fqn, of_key in changes.parts.items() for part in of_key)
    for number, (fqn, part) in enumerate(parts):
        if number % size == rank:
            sums.add(fqn, sum_of_part(changes, fqn, part))
    return sums


def _part(file: OpenedSafetensors, fqn: str, number: int, total: TensorTotals) -> SavedPart:
    box = total.boxes[number]
    ranges = []
    for name, (dtype, sizes) in zip(part_names(fqn, number, box), _FORMS if box is None else _FORMS[2:], strict=True):
        entry = file.entries.get(name)
        if entry is None or entry.dtype != dtype or entry.sizes[1:] != sizes or len(entry.sizes) != 1 + len(sizes):
            raise DamagedCheckpointError(f"{file.path}: {name} is not what was written")
        ranges.append(entry)
    if box is None:
        return SavedPart(None, *ranges)
    if ranges[0].num_bytes != math.prod(box[1]) * DTYPES[total.dtype].itemsize:
        raise DamagedCheckpointError(f"{file.path}: {name} is not what was written")
    nothing = ranges[0]._replace(num_bytes=0)
    return SavedPart(box, nothing, nothing, ranges[0])


class WrittenPart(NamedTuple):
    """What a rank would write of the tensor ``at`` of its changes: these tensors of the file."""

    at: int
    box: Box | None
    num_changed: int
    tensors: Sequence[Tensor]


def parts_of(found: Found | Changes, held: Sequence[HeldTensor], item_bytes: Sequence[int]) -> Iterator[WrittenPart]:
    """What is written of each tensor that has changed."""
    offsets = ops.change_offsets(item_bytes, found.counts)
    first = 0
    for at, count in enumerate(found.counts):
        if count > 0:
            coded = _core.PositionBlocks.encode(found.positions[first : first + count].numpy())
            blocks, inside = torch.from_numpy(coded.blocks).view(-1, 2), torch.from_numpy(coded.offsets)
            values = found.values[offsets[at] : offsets[at] + count * item_bytes[at]]
            yield WrittenPart(at, None, count, [blocks, inside, values])
        elif at in found.whole:
            for chunk in held[at].shard.chunks:
                elements = local_view(found.whole[at], chunk.local_offsets, chunk.sizes)
                yield WrittenPart(at, (chunk.offsets, chunk.sizes), elements.numel(), [as_bytes(elements)])
        first += count


_Offer = tuple[tuple[int, int] | None, _core.DeltaOffer]
"""What a rank tells the coordinator of a save: the versions of its changes, and what they have."""


def _offer(changes: Changes | None, own: Sequence[WrittenPart]) -> _Offer:
    told = _core.DeltaOffer()
    if changes is None:
        return None, told
    for fqn in changes.elsewhere:
        told.add_elsewhere(fqn)
    for held in changes.tensors:
        boxes = [(chunk.offsets, chunk.sizes) for chunk in held.shard.chunks]
        told.add_held(held.fqn, boxes, held.box, changes.before, changes.replaced, changes.after)
    for part in own:
        told.add_part(part.at, part.box, part.num_changed, [len(tensor) for tensor in part.tensors])
    return (changes.base_version, changes.version), told


def _planned(offers: Sequence[_Offer]) -> tuple[list[dict[int, list[int]]], bytes, int]:
    """The places of all ranks, the head of the file and its size.

    Raises:
        StateRefusedError: (a subclass) Of all keys that do not make one whole file.
    """
    of_ranks = [versions for versions, _ in offers]
    versions = set(of_ranks) - {None}
    if len(versions) != 1:
        none_given = Problem("ranks_disagree", "changes", "were given on no rank")
        raise refusal("save", differing_versions(of_ranks) or [none_given])
    plan = _core.plan_delta([told for _, told in offers], list(DTYPES))
    problems = _problems(plan, [rank for rank, given in enumerate(of_ranks) if given is None])
    if problems:
        raise refusal("save", problems)
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    names = [part_names(part.key, part.number, part.box) for part in plan.writes]
    for part, of_part in zip(plan.writes, names, strict=True):
        for name, (dtype, more), length in zip(of_part, _FORMS[-len(of_part) :], part.lengths, strict=True):
            tensors[name] = dtype, (length, *more)
    totals = {fqn: TensorTotals(*of_key) for fqn, of_key in plan.totals.items()}
    ((base_version, version),) = filter(None, versions)
    file = lay_out(tensors, {NOTE: encode_note(base_version, version, totals)})
    places: list[dict[int, list[int]]] = [{} for _ in offers]
    for part, of_part in zip(plan.writes, names, strict=True):
        places[part.rank][part.part] = [file.offsets[name] for name in of_part]
    return places, file.header, file.num_bytes


def _problems(plan: _core.DeltaPlan, silent: Sequence[int]) -> list[Problem]:
    """Why there is no whole file. ``silent`` ranks gave no changes."""
    remedy = "save with a group of all ranks that hold it"
    if silent:
        remedy = f"rank(s) {named(silent)} gave None: pass there what Snapshot.changes() gives"
    problems = [Problem("incomplete_cover", fqn, f"no rank gave changes of it; {remedy}") for fqn in plan.nowhere]
    problems += name_problems(plan.keys)
    for fault in plan.faults:
        what = fault.detail
        if fault.kind == "incomplete_cover":
            what = f"rank(s) {named(fault.ranks)} gave changes that {what}; {remedy}"
        problems.append(Problem(fault.kind, fault.key, what))
    return problems
