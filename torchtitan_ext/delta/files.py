"""Changes into a file and out of one: one file for all ranks."""

from __future__ import annotations

import math
import mmap
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_ext import _core, ops
from torchtitan_ext.checkpoint.operation.arguments import Place, check_seconds, place_of
from torchtitan_ext.checkpoint.operation.phases import TIMEOUT_SECONDS, Phases
from torchtitan_ext.checkpoint.tables.tensor_sums import TensorSums, totals_of_replicas
from torchtitan_ext.delta.saved_changes import (
    NOTE,
    SavedChanges,
    SavedPart,
    TensorTotals,
    decode_note,
    encode_note,
    part_names,
)
from torchtitan_ext.errors import DamagedCheckpointError, Problem, WrongArgumentError, described, refusal
from torchtitan_ext.layout.dtensor import as_bytes, local_view
from torchtitan_ext.ranks.exchange import check_usable
from torchtitan_ext.state.value_digest import sum_box
from torchtitan_ext.storage.commit.staged_target import staged_target, take_place
from torchtitan_ext.storage.formats.safetensors_files import SafetensorsEntry, lay_out, read_header_and_notes
from torchtitan_ext.storage.formats.sparse_files import make_file, sync_files, write_parts
from torchtitan_ext.storage.raw_tensor import DTYPES, dtype_name
from torchtitan_ext.transfer.changes import Changes, HeldTensor

_Box = tuple[tuple[int, ...], tuple[int, ...]]

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

    Of replicas the first one is written; all must have changed alike.

    Args:
        changes: Of this rank, from ``Snapshot.changes``; ``None`` on a rank that has no part of the state.
        path: The file, the same on all ranks, on a file system that all ranks see. An existing one is replaced.
        group: Ranks that hold the state; the default group if left out; without any this process alone.
        timeout_seconds: How long a rank waits for the others in each phase.

    Raises:
        StateRefusedError: (a subclass) Replicas or versions differ, or ranks name different files. Nothing was written.
        CheckpointFailedError: A rank could not write; the file is the old one, or none. The same on every rank.
        LostRankError: A rank is gone or does not take part.
    """
    check_usable("delta.save", group)
    check_seconds("delta.save", timeout_seconds)
    target = Path(path)
    with Phases("save", group, path=path, timeout_seconds=timeout_seconds) as phases, ExitStack() as stack:
        own: list[Part] = []

        def offer() -> _Offer:
            if not isinstance(changes, Changes | None):
                what = f"got {described(changes)}, expected what Snapshot.changes() gives"
                raise WrongArgumentError("save", (Problem("wrong_argument", "changes", what),))
            own.extend([] if changes is None else parts_of(changes))
            return _Offer.of(changes, own)

        def plan(offers: list[_Offer]) -> list[_Place]:
            places, head, num_bytes = _planned(offers)
            staged = stack.enter_context(staged_target(target, take_place))
            make_file(staged, head, num_bytes)
            return [_Place(str(staged), of_rank) for of_rank in places]

        def write(place: _Place) -> None:
            staged = Path(place.path)
            written = [
                (staged, begin, data)
                for part, begins in place.begins.items()
                for begin, data in zip(begins, own[part].data(), strict=True)
            ]
            write_parts(written)
            if written:
                sync_files([staged])

        phases.on_all(
            "prepare", lambda: None, doing="changes were planned; nothing was written", places=[place_of(path)]
        )
        place = phases.through_coordinator("plan", offer, plan, doing="changes were planned; nothing was written")
        phases.on_all("write", lambda: write(place), doing="changes were written; the file is the old one, or none")
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
    check_seconds("delta.load", timeout_seconds)
    with Phases("load", group, path=path, timeout_seconds=timeout_seconds) as phases:
        opened: list[SavedChanges] = []
        place = place_of(path)

        def read() -> _Read:
            opened.append(open_changes(Path(path)))
            return _Read(place, opened[0].digest, _sums_of_new(opened[0], phases.rank, phases.size))

        def read_own_copy() -> None:
            check_sums(opened[0], [_sums_of_new(opened[0])])

        doing = "the file of changes was read"
        found = phases.on_all("read", read, doing=doing, places=[place], hold_the_same=_hold_the_same)
        if all(one.place == place for one in found):
            check_sums(opened[0], [one.sums for one in found])
        else:
            phases.on_all("read own copy", read_own_copy, doing=doing)
    return opened[0]


@dataclass(frozen=True)
class _Read:
    """What a rank has read: where, the digest of the file's note, and the sums of its share of the elements."""

    place: Place
    digest: str
    sums: Mapping[str, int]


def _hold_the_same(found: Sequence[_Read]) -> bool:
    return all(one.digest == found[0].digest for one in found)


def open_changes(path: Path) -> SavedChanges:
    """A file of changes, whose elements are not looked at yet. Not collective.

    Raises:
        DamagedCheckpointError: It is none, or was cut.
    """
    entries, notes = read_header_and_notes(path)
    if NOTE not in notes:
        raise DamagedCheckpointError(f"{path} is no file of changes")
    try:
        base_version, version, totals, digest = decode_note(notes[NOTE])
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise DamagedCheckpointError(f"{path}: {error}") from None
    with path.open("rb") as file:
        content = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), dtype=np.uint8)
    parts = {
        fqn: [_part(path, content, entries, fqn, at, of) for at in range(len(of.boxes))] for fqn, of in totals.items()
    }
    for fqn, of in totals.items():
        if sum(part.values.size for part in parts[fqn]) != of.count * DTYPES[of.dtype].itemsize:
            raise DamagedCheckpointError(f"{path}: {fqn} has not the {of.count} new elements that were written")
    return SavedChanges(str(path), base_version, version, totals, parts, digest)


def open_proved(path: Path) -> SavedChanges:
    """A file of changes, all of which is what was written. Not collective.

    Raises:
        DamagedCheckpointError: It is no file of changes, was cut, or has other bits than were written.
        OSError: It cannot be read.
    """
    changes = open_changes(path)
    check_sums(changes, [_sums_of_new(changes)])
    return changes


def check_sums(changes: SavedChanges, sums: Sequence[Mapping[str, int]]) -> None:
    """Compares the sums of the new elements, of which each rank took a share, with those that were noted.

    Raises:
        DamagedCheckpointError: Names the tensors that differ.
    """
    for fqn, total in changes.totals.items():
        new = sum(of_rank.get(fqn, 0) for of_rank in sums)
        if (total.before - total.replaced + new - total.after) % 2**64 != 0:
            raise DamagedCheckpointError(f"{changes.path}: the new elements of {fqn} are not those that were written")


def _sums_of_new(changes: SavedChanges, rank: int = 0, size: int = 1) -> dict[str, int]:
    """The sums of the new elements in a rank's share of the parts."""
    sums: dict[str, int] = defaultdict(int)
    parts = ((fqn, part) for fqn, of_key in changes.parts.items() for part in of_key)
    for number, (fqn, part) in enumerate(parts):
        if number % size != rank:
            continue
        total = changes.totals[fqn]
        try:
            sums[fqn] += sum_of_part(part, total)
        except ValueError as error:
            raise DamagedCheckpointError(f"{changes.path}: {fqn}: {error}") from None
    return sums


def sum_of_part(part: SavedPart, total: TensorTotals) -> int:
    """The sum of the hashes of the new elements of a part."""
    if part.box is not None:
        return int(sum_box(elements_of(part, total), part.box[0], total.shape).item())
    coded, item_bytes = _core.PositionBlocks(part.blocks, part.offsets), DTYPES[total.dtype].itemsize
    if len(coded) * item_bytes != part.values.size:  # a few bytes can stand for very many positions
        raise ValueError(f"got {len(coded)} positions for {part.values.size} bytes")
    positions = coded.decode()
    if positions.size and positions[-1] >= math.prod(total.shape):
        raise ValueError(f"position {positions[-1]} is outside of shape {total.shape}")
    return _core.sum_at(part.values, item_bytes, positions)


def elements_of(part: SavedPart, total: TensorTotals) -> Tensor:
    """The elements of a part that gives a box whole, in its shape. Read-only memory."""
    assert part.box is not None
    flat = torch.from_numpy(part.values.copy()) if part.values.size else torch.empty(0, dtype=torch.uint8, device="cpu")
    return flat.view(DTYPES[total.dtype]).view(part.box[1])


def _part(
    path: Path,
    content: np.ndarray,
    entries: Mapping[str, SafetensorsEntry],
    fqn: str,
    number: int,
    total: TensorTotals,
) -> SavedPart:
    box = total.boxes[number]
    arrays = []
    for name, (dtype, sizes) in zip(part_names(fqn, number, box), _FORMS if box is None else _FORMS[2:], strict=True):
        entry = entries.get(name)
        if entry is None or entry.dtype != dtype or entry.sizes[1:] != sizes or len(entry.sizes) != 1 + len(sizes):
            raise DamagedCheckpointError(f"{path}: {name} is not what was written")
        arrays.append(content[entry.begin : entry.begin + entry.num_bytes])
    if box is not None:
        if arrays[0].size != math.prod(box[1]) * DTYPES[total.dtype].itemsize:
            raise DamagedCheckpointError(f"{path}: {name} is not what was written")
        return SavedPart(box, np.empty(0, np.int32), np.empty(0, np.uint16), arrays[0])
    return SavedPart(None, arrays[0].view(np.int32), arrays[1].view(np.uint16), arrays[2])


@dataclass(frozen=True)
class Part:
    """What a rank would write of one of its tensors."""

    held: HeldTensor
    box: _Box | None
    count: int
    tensors: tuple[Tensor, ...]

    def shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        """Dtype and shape of each of the part's tensors in the file."""
        if self.box is not None:
            (elements,) = self.tensors
            return [("uint8", (elements.numel() * elements.itemsize,))]
        return [(dtype_name(tensor.dtype), tuple(tensor.shape)) for tensor in self.tensors]

    def data(self) -> list[Tensor]:
        """These tensors, contiguous."""
        return [tensor.contiguous() for tensor in self.tensors]


def parts_of(changes: Changes) -> Iterator[Part]:
    """What is written of each tensor that has changed."""
    offsets = ops.change_offsets(changes.item_bytes, changes.counts)
    first = 0
    for at, (held, count) in enumerate(zip(changes.tensors, changes.counts, strict=True)):
        if count > 0:
            positions = changes.positions[first : first + count]
            values = changes.values[offsets[at] : offsets[at] + count * changes.item_bytes[at]]
            coded = _core.PositionBlocks.encode(positions.numpy())
            blocks, inside = torch.from_numpy(coded.blocks).view(-1, 2), torch.from_numpy(coded.offsets)
            yield Part(held, None, count, (blocks, inside, values))
        elif at in changes.whole:
            for chunk in held.shard.chunks:
                elements = local_view(changes.whole[at], chunk.local_offsets, chunk.sizes)
                yield Part(held, (chunk.offsets, chunk.sizes), elements.numel(), (as_bytes(elements),))
        first += count


class _OfferedPart(NamedTuple):
    """A part of which the coordinator hears: ``box_key`` is the box in ``TensorSums``."""

    fqn: str
    box_key: _Box | None
    box: _Box | None
    num_changed: int
    shapes: list[tuple[str, tuple[int, ...]]]


@dataclass(frozen=True)
class _Offer:
    """What a rank tells the coordinator of a save."""

    versions: tuple[int, int] | None
    sums: Mapping[str, tuple[TensorSums, TensorSums, TensorSums]]
    parts: Sequence[_OfferedPart]

    @staticmethod
    def of(changes: Changes | None, own: Sequence[Part]) -> _Offer:
        if changes is None:
            return _Offer(None, {}, [])
        sums = {fqn: (changes.before[fqn], changes.replaced[fqn], changes.after[fqn]) for fqn in changes.before}
        parts = [_OfferedPart(part.held.fqn, part.held.box, part.box, part.count, part.shapes()) for part in own]
        return _Offer((changes.base_version, changes.version), sums, parts)


@dataclass(frozen=True)
class _Place:
    """Where a rank writes: per part of its own the first bytes of the part's tensors."""

    path: str
    begins: Mapping[int, Sequence[int]]


def _planned(offers: Sequence[_Offer]) -> tuple[list[dict[int, list[int]]], bytes, int]:
    """The places of all ranks, the head of the file and its size."""
    versions = {offer.versions for offer in offers if offer.versions is not None}
    if len(versions) != 1:
        shown = ", ".join(f"{base} to {version}" for base, version in sorted(versions)) or "none on any rank"
        raise refusal("save", [Problem("ranks_disagree", "changes", f"expected those of one version, got {shown}")])
    writers, totals = _writers_and_totals(offers)
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    names: dict[tuple[int, int], list[str]] = {}
    boxes: dict[str, list[_Box | None]] = defaultdict(list)
    counts: dict[str, int] = defaultdict(int)
    written: set[tuple[str, _Box | None]] = set()
    for rank, offer in enumerate(offers):
        for number, part in enumerate(offer.parts):
            if rank not in writers[part.fqn, part.box_key]:
                continue
            if part.box_key is not None and (part.fqn, part.box_key) in written:
                continue  # the rank holds the box several times
            written.add((part.fqn, part.box_key))
            names[rank, number] = part_names(part.fqn, len(boxes[part.fqn]), part.box)
            tensors.update(zip(names[rank, number], part.shapes, strict=True))
            boxes[part.fqn].append(part.box)
            counts[part.fqn] += part.num_changed
    noted = {fqn: replace(of, count=counts[fqn], boxes=tuple(boxes[fqn])) for fqn, of in totals.items()}
    ((base_version, version),) = versions
    file = lay_out(tensors, {NOTE: encode_note(base_version, version, noted)})
    places: list[dict[int, list[int]]] = [{} for _ in offers]
    for (rank, number), of_part in names.items():
        places[rank][number] = [file.offsets[name] for name in of_part]
    return places, file.header, file.num_bytes


def _writers_and_totals(
    offers: Sequence[_Offer],
) -> tuple[dict[tuple[str, _Box | None], set[int]], dict[str, TensorTotals]]:
    """Which ranks write a key, or one of its boxes: those of the first replica; and the totals of that."""
    holders: dict[str, list[tuple[int, tuple[TensorSums, ...]]]] = defaultdict(list)
    for rank, offer in enumerate(offers):
        for fqn, sums in offer.sums.items():
            holders[fqn].append((rank, sums))
    writers: dict[tuple[str, _Box | None], set[int]] = {}
    totals: dict[str, TensorTotals] = {}
    differing = []
    for fqn, of_key in holders.items():
        replicas = [totals_of_replicas((rank, sums[which]) for rank, sums in of_key) for which in range(3)]
        if any(one.total % 2**64 != kind[0].total % 2**64 for kind in replicas for one in kind):
            differing.append(fqn)
        before, replaced, after = (kind[0].total % 2**64 for kind in replicas)
        dtype, shape = replicas[0][0].dtype, replicas[0][0].shape
        totals[fqn] = TensorTotals(dtype.removeprefix("torch."), tuple(shape), 0, before, replaced, after, ())
        for rank, (sums, *_) in reversed(of_key):
            for box in sums.sums:
                writers[fqn, box] = {rank}
        if (fqn, None) in writers:
            writers[fqn, None] = set(replicas[0][0].ranks)
    if differing:
        what = "has replicas that differ, before or after; tte.sync_module_states makes them equal"
        raise refusal("save", [Problem("replicas_differ", fqn, what) for fqn in differing])
    return writers, totals
