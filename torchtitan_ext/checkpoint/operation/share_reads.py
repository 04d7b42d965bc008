"""Ranks that want the same bytes of a checkpoint read them once: one of them reads, and the others get them from it.

1. Each rank tells the coordinator which boxes of saved chunks it wants (``WantedReads``).
2. The coordinator cuts them into parts, and gives each part to one rank (``csrc/core/shared_reads.h``).
3. In rounds, each rank reads its parts straight into its targets, while the parts of the round before travel from
   these targets to those of the other ranks. No rank sends before all have read, and verified, the round.

What a planner fills by methods of its own, wrappers, lazy views, numbers, and tensors that share memory in part, each
rank reads itself.
"""

from __future__ import annotations

import math
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass, replace
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.storage import StorageReader

from torchtitan_ext import _core, ops
from torchtitan_ext.checkpoint.operation.phases import Phases
from torchtitan_ext.checkpoint.planners.items import ReadDecision, in_file_order, items_of
from torchtitan_ext.checkpoint.planners.load_planner import LoadPlanner
from torchtitan_ext.checkpoint.planners.saved_chunks import name_metadata
from torchtitan_ext.checkpoint.rules.report import ReadSharing
from torchtitan_ext.checkpoint.tables.key_table import host_digest, lies_in_local, number_hosts, pack, unpack
from torchtitan_ext.errors import Problem
from torchtitan_ext.layout.dtensor import is_wrapper, may_overlap_itself
from torchtitan_ext.ranks.exchange import has_backend
from torchtitan_ext.storage import FileReader
from torchtitan_ext.storage.futures import result_of

R = TypeVar("R")

ShareReads = Literal["auto", "host"] | bool
"""Whether ranks share what several of them want: all ranks, those of one host, none, or as measured."""

# For "auto". Below these, a load is so short that nothing is worth trying.
_MIN_WANTED_BYTES = 64 << 20
_MIN_SECONDS = 0.5
# What is tried: so much at most, and this fraction of what several ranks want, since the worse way costs its time.
_MOST_SAMPLE_BYTES = 64 << 20
_FEWEST_SAMPLE_BYTES = 1 << 20
_SAMPLE = 0.01
# A part of a trial that lasted so long says how fast the storage is.
_ENOUGH_SECONDS = 0.01
# Of the first round of a sample, which tells whether the network is by far too slow.
_FIRST_SAMPLE = 1 / 16
_FAR_TOO_SLOW = 4.0
# Reading and exchange overlap in all rounds but the first and the last.
_MOST_ROUNDS = 16


@dataclass(frozen=True)
class PlannedReads:
    """What this rank reads of the tensors of one checkpoint: the plan has items of tensors only."""

    reader: StorageReader
    planner: LoadPlanner
    plan: LoadPlan

    def read(self, items: Sequence[ReadItem]) -> None:
        """Reads items, or parts of items, into their targets."""
        if items:
            ordered = in_file_order(list(items), self.planner.metadata)
            result_of(self.reader.read_data(replace(self.plan, items=ordered), self.planner))

    def split(self, num_bytes: int) -> tuple[list[ReadItem], PlannedReads]:
        """The first items of about so many bytes, and all others. One is cut where parts can be read alone."""
        first: list[ReadItem] = []
        others: list[ReadItem] = []
        for item in self.plan.items:
            of_item = _bytes_of(item, self)
            if of_item <= num_bytes:
                first.append(item)
                num_bytes -= of_item
                continue
            rows = math.floor(max(item.lengths, default=1) * num_bytes / of_item)
            if rows > 0 and isinstance(self.reader, FileReader):
                head, item = _cut_in_two(item, rows)
                first.append(head)
            others.append(item)
            num_bytes = 0
        return first, replace(self, plan=replace(self.plan, items=others))


@dataclass(frozen=True)
class ShareOffer:
    """What each rank tells the others before they agree to share.

    Attributes:
        share_reads: The argument.
        wanted_bytes: Of this rank's items.
        can_share: Whether all planners are ours and all ranks read the same metadata, as far as this rank sees.
    """

    share_reads: ShareReads
    wanted_bytes: int
    can_share: bool


def offer(share_reads: ShareReads, sources: Sequence[PlannedReads]) -> ShareOffer:
    """This rank's offer, before its targets change. Not collective."""
    decisions = [source.plan.planner_data for source in sources]
    can_share = bool(sources) and all(isinstance(one, ReadDecision) and one.is_cover_checked for one in decisions)
    num_bytes = (
        0 if share_reads is False else sum(_bytes_of(item, source) for source in sources for item in source.plan.items)
    )
    return ShareOffer(share_reads, num_bytes, can_share)


def differing_offers(offers: Sequence[ShareOffer]) -> list[Problem]:
    """The problem that ranks do not all give one ``share_reads``."""
    first = offers[0].share_reads
    other = next((rank for rank, one in enumerate(offers) if one.share_reads != first), None)
    if other is None:
        return []
    detail = f"is {first!r} on rank 0, {offers[other].share_reads!r} on rank {other}; pass the same on every rank"
    return [Problem("ranks_disagree", "share_reads", detail)]


def is_worth_asking(offers: Sequence[ShareOffer]) -> bool:
    """Whether ranks go on to tell what they want: the same answer on every rank."""
    first = offers[0].share_reads
    if first is False or len(offers) == 1 or not all(one.can_share for one in offers):
        return False
    return first != "auto" or sum(one.wanted_bytes for one in offers) >= _MIN_WANTED_BYTES


def _cut_in_two(item: ReadItem, rows: int) -> tuple[ReadItem, ReadItem]:
    """The first rows of its longest dim, and the others."""
    dim = max(range(len(item.lengths)), key=lambda one: item.lengths[one])

    def moved(offsets: torch.Size) -> torch.Size:
        return torch.Size((*offsets[:dim], offsets[dim] + rows, *offsets[dim + 1 :]))

    def of_rows(count: int) -> torch.Size:
        return torch.Size((*item.lengths[:dim], count, *item.lengths[dim + 1 :]))

    rest = replace(
        item,
        dest_offsets=moved(item.dest_offsets),
        storage_offsets=moved(item.storage_offsets),
        lengths=of_rows(item.lengths[dim] - rows),
    )
    return replace(item, lengths=of_rows(rows)), rest


def _bytes_of(item: ReadItem, source: PlannedReads) -> int:
    saved = source.planner.metadata.state_dict_metadata[item.storage_index.fqn]
    assert isinstance(saved, TensorStorageMetadata)
    return math.prod(item.lengths) * saved.properties.dtype.itemsize


@dataclass(frozen=True)
class _Request:
    """What a rank tells the coordinator."""

    wanted: bytes
    own_bytes: int
    host: bytes
    host_name: str
    marks: tuple[str, ...]
    is_rounded: bool


@dataclass(frozen=True)
class _Answer:
    """What the coordinator tells a rank.

    Attributes:
        told: For ``_core.SharedPart``; ``None`` where each rank reads for itself.
        number: Of this plan, the same on all ranks.
        sample_bytes: Of the rounds that try it, counted once; empty if nothing is tried.
        repeated_bytes, shared_bytes: What several ranks want, counted for each of them, and once.
        between_hosts: Bytes from host to host if ranks share.
    """

    told: bytes | None
    number: int
    devices: tuple[str, ...]
    sample_bytes: tuple[int, ...]
    sharing: ReadSharing
    repeated_bytes: int
    shared_bytes: int
    between_hosts: Mapping[tuple[str, str], int]


def _ask(sources: Sequence[PlannedReads], phases: Phases) -> _Request:
    """What this rank wants. Its targets have memory by now. Not collective."""
    wanted = _core.WantedReads()
    tags: dict[tuple[str, str, int, bool, bool], int] = {}
    own_bytes = 0
    for number, (source, targets) in enumerate(zip(sources, _find_targets(sources, phases), strict=True)):
        tag_of = []
        for item, target in zip(source.plan.items, targets, strict=True):
            if target is None or item.storage_index.index is None:
                tag_of.append(-1)
                own_bytes += _bytes_of(item, source)
                continue
            tag = (f"{number} {target.dtype}", target.device, target.item_bytes, target.is_cut, target.is_overwritten)
            tag_of.append(tags.setdefault(tag, len(tags)))
        keys = {fqn: position for position, fqn in enumerate(sorted(source.planner.metadata.state_dict_metadata))}
        wanted.add(source.plan.items, tag_of, keys)
    message = pack(wanted.message(list(tags)))
    is_rounded = all(isinstance(source.reader, FileReader) for source in sources)
    return _Request(message, own_bytes, host_digest(), socket.gethostname(), tuple(map(_mark, sources)), is_rounded)


def _answer(share_reads: ShareReads, requests: Sequence[_Request]) -> list[_Answer]:
    """The part of each rank. Runs on the coordinator."""
    hosts = number_hosts([request.host for request in requests])
    plan = _core.SharePlan(
        [unpack(request.wanted) for request in requests],
        [request.own_bytes for request in requests],
        hosts,
        share_reads == "host",
    )
    sharing = ReadSharing(False, "", plan.wanted_bytes, plan.wanted_bytes - plan.repeated_bytes + plan.shared_bytes)
    sample: list[float] = []
    why_not = ""
    if any(request.marks != requests[0].marks for request in requests):
        why_not = "ranks have read different metadata"
    elif plan.shared_bytes == 0:
        why_not = "no bytes are wanted by several ranks"
    elif share_reads == "auto":
        tried = max(_SAMPLE * plan.shared_bytes, _FEWEST_SAMPLE_BYTES)
        tried = min(tried, _MOST_SAMPLE_BYTES) / plan.shared_bytes
        sample = [tried * _FIRST_SAMPLE, tried, tried]
        if 2 * plan.repeated_bytes < plan.wanted_bytes:
            why_not = "less than half of the bytes is wanted by several ranks"
        elif sum(sample) > 0.5:
            why_not = "the state is too small to try it"
    if why_not:
        sharing = replace(sharing, reason=why_not)
        return [_Answer(None, 0, (), (), sharing, 0, 0, {})] * len(requests)
    plan.assign(sample, _MOST_ROUNDS if all(request.is_rounded for request in requests) else 1)
    between: dict[tuple[str, str], int] = {}
    for (reading, wanting), num_bytes in plan.bytes_between.items():
        pair = requests[reading].host_name, requests[wanting].host_name
        between[pair] = between.get(pair, 0) + num_bytes
    common = _Answer(
        b"",
        secrets.randbits(62),
        tuple(plan.devices),
        tuple(plan.sample_bytes),
        replace(sharing, chosen="host" if share_reads == "host" else True),
        plan.repeated_bytes,
        plan.shared_bytes,
        between,
    )
    return [replace(common, told=pack(plan.told(rank))) for rank in range(len(requests))]


def _mark(source: PlannedReads) -> str:
    """Equal on ranks that number keys and chunks alike."""
    return getattr(source.reader, "metadata_digest", "") or name_metadata(source.planner.metadata)


@dataclass(frozen=True)
class _Target:
    """Where an item goes, as far as others who want it need to know."""

    dtype: torch.dtype
    device: str
    item_bytes: int
    is_cut: bool
    is_overwritten: bool


class _Place(NamedTuple):
    """Names a tensor that items fill: a key of one source, and of a tensor in several parts the part."""

    source: int
    fqn: str
    offset: torch.Size | None


def _find_targets(sources: Sequence[PlannedReads], phases: Phases) -> list[list[_Target | None]]:
    """Per item its target; ``None`` where this rank reads it for itself."""
    places: list[list[_Place]] = []
    tensors: dict[_Place, Tensor] = {}
    for number, source in enumerate(sources):
        entries = source.planner.wanted.entries
        places.append([])
        for item in source.plan.items:
            index = item.dest_index
            place = _Place(number, index.fqn, None if lies_in_local(entries.get(index.fqn)) else index.offset)
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
    found: list[list[_Target | None]] = []
    for source, of_source in zip(sources, places, strict=True):
        found.append([])
        for place, is_cut in zip(of_source, _are_cut(source), strict=True):
            tensor = tensors[place]
            target = _Target(tensor.dtype, tensor.device.type, tensor.itemsize, is_cut, place in overwritten)
            found[-1].append(target if place in usable else None)
    return found


def _is_memory(tensor: Tensor) -> bool:
    """Whether boxes of a tensor can be sent and received where they lie."""
    if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.device.type not in ("cpu", "cuda"):
        return False
    if tensor.is_conj() or tensor.is_neg() or tensor.is_quantized or tensor.is_inference():
        return False
    return tensor.is_contiguous() or not may_overlap_itself(tensor)


def _find_ties(tensors: Mapping[_Place, Tensor], in_order: Sequence[_Place]) -> tuple[set[_Place], set[_Place]]:
    """Tensors that share a part of their memory; and those that another one overwrites, which lies in the same place.

    Args:
        in_order: The tensor of each item, in the order of reading.
    """
    last = {place: position for position, place in enumerate(in_order)}
    tied: dict[Any, list[_Place]] = {}
    for place, tensor in tensors.items():
        if is_wrapper(tensor) or tensor.layout is not torch.strided or tensor.numel() == 0 or tensor.is_meta:
            continue
        key = (tensor.data_ptr(), tensor.device, tensor.shape, tensor.stride(), tensor.dtype, tensor.is_conj())
        tied.setdefault(key, []).append(place)
    alone: set[_Place] = set()
    overwritten: set[_Place] = set()
    extents = []
    for (address, device, shape, stride, dtype, _), places in tied.items():
        *earlier, _ = sorted(places, key=last.__getitem__)
        overwritten.update(earlier)
        num_elements = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
        extents.append((str(device), address, address + num_elements * dtype.itemsize, places))
    reached: tuple[str, int, list[_Place]] = ("", 0, [])
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


def read_sharing(
    share_reads: ShareReads,
    sources: Sequence[PlannedReads],
    offers: Sequence[ShareOffer],
    phases: Phases,
    *,
    doing: str,
    undefined: tuple[str, ...],
) -> ReadSharing:
    """Changes the targets and reads the tensors of all sources; says how. Collective, where ``is_worth_asking``.

    Args:
        doing, undefined: As in ``Phases.on_all``.
    """

    seconds_of_each: float | None = None
    if share_reads == "auto":
        left = list(sources)

        def read_some() -> float | None:
            for source in sources:
                source.planner.change_targets()
            return _read_some(left)

        speeds = phases.on_all("read", read_some, doing=doing, undefined=undefined)
        sources = left
        wanted_bytes = sum(one.wanted_bytes for one in offers)
        times = [one.wanted_bytes * speed for one, speed in zip(offers, speeds, strict=True) if speed is not None]
        if len(times) == len(offers):
            # Of all ranks the mean: one may have waited for its core.
            seconds_of_each = sum(times) / len(times) / wanted_bytes
            if seconds_of_each * wanted_bytes < _MIN_SECONDS:
                _read_each(sources, phases, doing, undefined)
                return ReadSharing(False, f"that takes less than {_MIN_SECONDS} s", wanted_bytes)

    def ask() -> _Request:
        if share_reads != "auto":
            for source in sources:
                source.planner.change_targets()
        return _ask(sources, phases)

    told = phases.through_coordinator(
        "share", ask, lambda requests: _answer(share_reads, requests), doing=doing, undefined=undefined
    )
    if told.told is None:
        _read_each(sources, phases, doing, undefined)
        return told.sharing
    with ThreadPoolExecutor(1, "torchtitan_ext.share_reads") as reader:
        rounds = _Rounds(sources, told, phases, reader, doing, undefined)
        sharing = _read_rounds(rounds, told, seconds_of_each)
    seconds = max(rounds.done.exchange_seconds, 1e-9)
    return replace(
        sharing,
        bytes_exchanged=rounds.done.bytes_received,
        read_gb_per_second=rounds.done.bytes_read / max(rounds.done.read_seconds, 1e-9) / 1e9,
        exchange_gb_per_second=rounds.done.bytes_received / seconds / 1e9,
        between_hosts={
            pair: num_bytes / seconds / 1e9
            for pair, num_bytes in told.between_hosts.items()
            if sharing.chosen and len(told.between_hosts) > 1
        },
    )


def _read_each(sources: Sequence[PlannedReads], phases: Phases, doing: str, undefined: tuple[str, ...]) -> None:
    """Every rank reads what it wants. Collective."""

    def read() -> None:
        for source in sources:
            source.read(source.plan.items)

    phases.on_all("read", read, doing=doing, undefined=undefined)


def _read_some(sources: list[PlannedReads]) -> float | None:
    """Reads the first few of this rank's bytes, of which it leaves the others: the seconds per byte, if any were read.

    All ranks read theirs: so few bytes at first that a slow store has them soon, and more as long as that says little.
    """
    speed = None
    num_bytes = _FEWEST_SAMPLE_BYTES // 4  # files are opened, and memory is made
    while num_bytes <= _MOST_SAMPLE_BYTES:
        num_read, left, begin = 0, num_bytes, time.perf_counter()
        for position, source in enumerate(sources):
            items, sources[position] = source.split(left)
            source.read(items)
            read = sum(_bytes_of(item, source) for item in items)
            num_read, left = num_read + read, left - read
        if 2 * num_read < num_bytes:
            break
        seconds = time.perf_counter() - begin
        if num_bytes >= _FEWEST_SAMPLE_BYTES:
            speed = seconds / num_read
        if seconds > _ENOUGH_SECONDS:
            break
        num_bytes *= 4
    return speed


def _read_rounds(rounds: _Rounds, told: _Answer, seconds_of_each: float | None) -> ReadSharing:
    """Reads all rounds, and those of a sample first: then what is left in the faster way. Collective.

    Args:
        seconds_of_each: Per byte that a rank wants, if each reads its own; ``None`` if that is not known.
    """
    sharing, sample = told.sharing, told.sample_bytes
    rest = list(range(len(sample), rounds.num_rounds))
    if sample:
        rounds.step([0])
        first = rounds.step([1])  # while round 0 travels
        if seconds_of_each is None:  # as if storage read as fast as until now, for however many
            seconds_of_each = first.read_seconds / max(first.bytes_read, 1)
        each = told.repeated_bytes * seconds_of_each
        of_first = first.exchange_seconds / max(sample[0], 1) * told.shared_bytes
        if of_first > _FAR_TOO_SLOW * each:
            sharing = _chosen_by(sharing, once=of_first, each=each)
            rounds.forget()
            rest = [1, *rest]
        else:
            second = rounds.step([2])  # while round 1 travels: as long as any round from here on
            sharing = _chosen_by(sharing, once=second.seconds / max(sample[2], 1) * told.shared_bytes, each=each)
    if sharing.chosen:
        for number in rest:
            rounds.step([number])
        rounds.step([])
    else:
        rounds.step(rest, is_shared=False)
    return sharing


def _chosen_by(sharing: ReadSharing, *, once: float, each: float) -> ReadSharing:
    """The faster way, by the seconds that both would take."""
    reason = f"by a sample, {once:.3g} s if what several ranks want is read once, {each:.3g} s if by each"
    return replace(sharing, chosen=sharing.chosen if once < each else False, reason=reason)


class _Rounds:
    """The rounds of one load on this rank.

    Attributes:
        done: What all ranks have done; the seconds are those of the slowest rank in each step.
    """

    def __init__(
        self,
        sources: Sequence[PlannedReads],
        told: _Answer,
        phases: Phases,
        reader: ThreadPoolExecutor,
        doing: str,
        undefined: tuple[str, ...],
    ) -> None:
        self.done = _Done()
        assert told.told is not None, "ranks share nothing, please report"
        self._sources = sources
        self._told = told
        self._phases = phases
        self._reader = reader
        self._doing = doing
        self._undefined = undefined
        self._part = _core.SharedPart(unpack(told.told))
        self._items = [item for source in sources for item in source.plan.items]
        self._source_of = [number for number, source in enumerate(sources) for _ in source.plan.items]
        self._own = self._own_by_round()
        self._unsent: list[list[_Sent]] = []

    @property
    def num_rounds(self) -> int:
        return self._part.num_rounds

    def forget(self) -> None:
        """What was read last is not sent to those who want it too."""
        self._unsent = []

    def step(self, rounds: Sequence[int], *, is_shared: bool = True) -> _Done:
        """Reads rounds while the one before travels, on all ranks. Collective.

        Args:
            rounds: One, of which this rank reads its own part; or if not ``is_shared`` several, of which it reads all
                that it wants.

        Returns:
            The bytes of all ranks and the seconds of the slowest one.
        """

        def read() -> _Done:
            parts = [part for number in rounds for part in self._reads_of(number, is_shared=is_shared)]
            self._unsent = [self._prepare(number, parts) for number in rounds] if is_shared else []
            return self._read(parts)

        def work() -> _Done:
            begin, unsent = time.perf_counter(), self._unsent
            if not unsent:
                return read().after(begin)
            # Whatever fails in the other thread: this rank takes part in the exchange, for which others wait.
            reading = self._reader.submit(_like_this_thread(read))
            try:
                exchanged = self._exchange(unsent)
            finally:
                error = reading.exception()  # nothing is left behind that writes into targets
            if error is not None:
                raise error
            return (exchanged + reading.result()).after(begin)

        of_ranks = self._phases.on_all("read", work, doing=self._doing, undefined=self._undefined)
        done = _Done(
            read_seconds=max(one.read_seconds for one in of_ranks),
            exchange_seconds=max(one.exchange_seconds for one in of_ranks),
            bytes_read=sum(one.bytes_read for one in of_ranks),
            bytes_received=sum(one.bytes_received for one in of_ranks),
            seconds=max(one.seconds for one in of_ranks),
        )
        self.done += done
        return done

    def _own_by_round(self) -> dict[int, list[_Part]]:
        """What this rank reads for itself, in equal parts behind the rounds of a sample."""
        shared = set(self._part.items)
        own = [position for position in range(len(self._items)) if position not in shared]
        sizes = [_bytes_of(self._items[one], self._sources[self._source_of[one]]) for one in own]
        first = len(self._told.sample_bytes)
        num_rounds, total, before = self.num_rounds - first, sum(sizes), 0
        rounds: dict[int, list[_Part]] = {}
        for position, num_bytes in zip(own, sizes, strict=True):
            number = first + min(num_rounds - 1, before * num_rounds // max(total, 1))
            rounds.setdefault(number, []).append(_Part(self._source_of[position], self._items[position]))
            before += num_bytes
        return rounds

    def _reads_of(self, number: int, *, is_shared: bool) -> list[_Part]:
        """What this rank reads in a round: the parts that it sends on come first."""
        parts = self._cut(self._part.reads(number, self._items, torch.Size))
        if not is_shared:
            parts += self._cut(self._part.receives(number, self._items, torch.Size))
        return parts + self._own.get(number, [])

    def _cut(self, columns: _core.PartColumns) -> list[_Part]:
        items = items_of(
            ReadItem,
            type=columns.types,
            dest_index=columns.dest_indices,
            dest_offsets=columns.dest_offsets,
            storage_index=columns.storage_indices,
            storage_offsets=columns.storage_offsets,
            lengths=columns.lengths,
        )
        return [_Part(self._source_of[position], item) for position, item in zip(columns.items, items, strict=True)]

    def _read(self, parts: Sequence[_Part]) -> _Done:
        begin = time.perf_counter()
        for number, source in enumerate(self._sources):
            source.read([part.item for part in parts if part.source == number])
        num_bytes = sum(_bytes_of(part.item, self._sources[part.source]) for part in parts)
        return _Done(read_seconds=time.perf_counter() - begin, bytes_read=num_bytes)

    def _prepare(self, number: int, read: Sequence[_Part]) -> list[_Sent]:
        """What a round sends to those who want it too, once it is read, per device."""
        received = self._cut(self._part.receives(number, self._items, torch.Size))
        prepared = []
        for device, name in enumerate(self._told.devices):
            tables = self._part.exchange(number, device)
            sources = [self._tensor_of(read[position]) for position in tables.sources]
            targets = [self._tensor_of(received[position]) for position in tables.targets]
            prepared.append(_Sent(name, sources, targets, _as_tensor(tables.sends), _as_tensor(tables.receives)))
        return prepared

    def _exchange(self, rounds: Sequence[Sequence[_Sent]]) -> _Done:
        begin, num_bytes = time.perf_counter(), 0
        for sent in (one for of_round in rounds for one in of_round):
            ops.exchange_runs_(
                sent.sources,
                sent.targets,
                sent.sends,
                sent.receives,
                group_name="" if self._phases.group is None else self._phases.group.group_name,
                digest=self._told.number,
                timeout_seconds=self._phases.timeout_seconds,
            )
            if sent.device == "cuda":
                torch.cuda.current_stream().synchronize()  # else the time says nothing
            num_bytes += sum(target.nbytes for target in sent.targets)
        return _Done(exchange_seconds=time.perf_counter() - begin, bytes_received=num_bytes)

    def _tensor_of(self, part: _Part) -> Tensor:
        return self._sources[part.source].planner.resolve_tensor(part.item).detach()


class _Part(NamedTuple):
    """An item, or a part of one, and the position of its source."""

    source: int
    item: ReadItem


class _Sent(NamedTuple):
    """The arguments of an exchange between targets on one kind of device."""

    device: str
    sources: list[Tensor]
    targets: list[Tensor]
    sends: Tensor
    receives: Tensor


@dataclass(frozen=True)
class _Done:
    """What one rank has done in a step."""

    read_seconds: float = 0.0
    exchange_seconds: float = 0.0
    bytes_read: int = 0
    bytes_received: int = 0
    seconds: float = 0.0

    def __add__(self, other: _Done) -> _Done:
        return _Done(*(mine + theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))

    def after(self, begin: float) -> _Done:
        return replace(self, seconds=time.perf_counter() - begin)


def _like_this_thread(work: Callable[[], R]) -> Callable[[], R]:
    """Work for another thread, with what torch keeps per thread: the mode of autograd, and the current device."""
    is_inference = torch.is_inference_mode_enabled()
    is_grad = torch.is_grad_enabled()
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def on_other_thread() -> R:
        if device is not None:
            torch.cuda.set_device(device)
        with torch.inference_mode(is_inference), torch.set_grad_enabled(is_grad):
            return work()

    return on_other_thread


def _as_tensor(table: bytes) -> Tensor:
    if not table:
        return torch.empty(0, dtype=torch.int64, device="cpu")
    return torch.frombuffer(bytearray(table), dtype=torch.int64)
