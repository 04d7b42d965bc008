"""Ranks that want the same bytes of a checkpoint read them once: one of them reads, and the others get them from it.

1. Each rank tells the coordinator which boxes of saved chunks it wants (``RankReads``).
2. The coordinator cuts them into parts, and gives each part to one rank (``csrc/core/shared_reads.h``).
3. In rounds, each rank reads its parts straight into its targets, while the parts of the round before travel from
   these targets to those of the other ranks. No rank sends before all have read, and verified, the round.

What a planner fills by methods of its own, wrappers, lazy views, numbers, and tensors that share memory in part, each
rank reads itself.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.distributed.checkpoint.planner import ReadItem

from torchtitan_ext import _core, ops
from torchtitan_ext.checkpoint.operation.component_plans import PlannedSource
from torchtitan_ext.checkpoint.operation.phases import Phases
from torchtitan_ext.checkpoint.planners.items import ReadDecision, in_file_order
from torchtitan_ext.checkpoint.planners.saved_chunks import name_metadata
from torchtitan_ext.checkpoint.rules.report import ReadSharing
from torchtitan_ext.checkpoint.tables.key_table import host_digest, lies_in_local, number_hosts, pack, unpack
from torchtitan_ext.layout.dtensor import is_plain_memory, is_wrapper
from torchtitan_ext.ranks.exchange import has_backend
from torchtitan_ext.storage import FileReader

R = TypeVar("R")

TargetKey = tuple[str, torch.Size | None]
"""Names a tensor that items fill: a key, and of a tensor in several parts the part."""

# Reading and exchange overlap in all rounds but the first and the last.
_MOST_ROUNDS = 16


@dataclass(frozen=True)
class ShareOffer:
    """What each rank tells the others before they agree to share.

    Attributes:
        share_reads: The argument.
        can_share: Whether the planner is ours and all ranks read the same metadata, as far as this rank sees.
    """

    share_reads: bool
    can_share: bool


def offer(share_reads: bool, source: PlannedSource) -> ShareOffer:
    """This rank's offer, before its targets change. Not collective."""
    decision = source.plan.planner_data
    return ShareOffer(share_reads, isinstance(decision, ReadDecision) and decision.is_cover_checked)


def is_worth_asking(offers: Sequence[ShareOffer]) -> bool:
    """Whether ranks go on to tell what they want: the same answer on every rank."""
    return len(offers) > 1 and all(one.share_reads and one.can_share for one in offers)


def read_sharing(source: PlannedSource, phases: Phases) -> ReadSharing:
    """Changes the targets and reads the tensors; says how. Collective, where ``is_worth_asking``."""
    reads = _core.RankReads(source.plan.items, source.ours.metadata.state_dict_metadata)

    def ask() -> _Request:
        source.ours.change_targets()
        return _request_of(source, reads, phases)

    def read_all() -> None:
        source.read(in_file_order(source.plan.items, source.ours.metadata))

    decision = phases.through_coordinator("share", ask, _decide)
    if decision.part is None:
        phases.on_all("read", read_all)
        return decision.sharing
    with ThreadPoolExecutor(1, "torchtitan_ext.share_reads") as reader:
        rounds = Rounds(source, reads, decision, phases, reader)
        for number in [*range(reads.num_rounds), None]:
            rounds.step(number)
    return decision.sharing


@dataclass(frozen=True)
class _Request:
    """What a rank tells the coordinator."""

    wanted: bytes
    own_bytes: int
    host: bytes
    mark: str
    is_rounded: bool


@dataclass(frozen=True)
class _Decision:
    """What the coordinator tells a rank.

    Attributes:
        part: For ``_core.RankReads.share``; ``None`` where each rank reads for itself.
        number: Of this plan, the same on all ranks.
    """

    part: bytes | None
    number: int
    devices: tuple[str, ...]
    sharing: ReadSharing


def _request_of(source: PlannedSource, reads: _core.RankReads, phases: Phases) -> _Request:
    """What this rank wants. Its targets have memory by now. Not collective."""
    message = pack(reads.wanted(_find_tags(source, reads.items, phases)))
    # Equal on ranks that number keys and chunks alike.
    mark = getattr(source.opened.reader, "metadata_digest", "") or name_metadata(source.ours.metadata)
    return _Request(message, reads.own_bytes, host_digest(), mark, source.can_cut)


def _decide(requests: Sequence[_Request]) -> list[_Decision]:
    """The part of each rank. Runs on the coordinator."""
    hosts = number_hosts([request.host for request in requests])
    plan = _core.SharePlan(
        [unpack(request.wanted) for request in requests],
        [request.own_bytes for request in requests],
        hosts,
    )
    sharing = ReadSharing(False, "", plan.wanted_bytes, plan.wanted_bytes - plan.repeated_bytes + plan.shared_bytes)
    why_not = ""
    if any(request.mark != requests[0].mark for request in requests):
        why_not = "ranks have read different metadata"
    elif plan.shared_bytes == 0:
        why_not = "no bytes are wanted by several ranks"
    if why_not:
        sharing = replace(sharing, reason=why_not)
        return [_Decision(None, 0, (), sharing)] * len(requests)
    plan.assign(_MOST_ROUNDS if all(request.is_rounded for request in requests) else 1)
    common = _Decision(
        b"",
        secrets.randbits(62),
        tuple(plan.devices),
        replace(sharing, chosen=True),
    )
    return [replace(common, part=pack(plan.part_message(rank))) for rank in range(len(requests))]


class Rounds:
    """The rounds of one load on this rank."""

    def __init__(
        self,
        source: PlannedSource,
        reads: _core.RankReads,
        decision: _Decision,
        phases: Phases,
        reader: ThreadPoolExecutor,
    ) -> None:
        assert decision.part is not None, "ranks share nothing, please report"
        reads.share(unpack(decision.part))
        self._source = source
        self._reads = reads
        self._decision = decision
        self._phases = phases
        self._reader = reader
        self._unsent: list[_Sent] = []

    def step(self, number: int | None) -> None:
        """Reads this rank's part of a round, if one is left, while the one before travels. Collective."""

        def read() -> None:
            self._unsent = []
            if number is not None:
                found = self._reads.reads(number)
                self._unsent = self._prepare(number)
                self._source.read(in_file_order(found.items, self._source.ours.metadata))

        def work() -> None:
            unsent = self._unsent
            if not unsent:
                return read()
            # Whatever fails in the other thread: this rank takes part in the exchange, for which others wait.
            reading = self._reader.submit(_like_this_thread(read))
            try:
                self._exchange(unsent)
            finally:
                error = reading.exception()  # nothing is left behind that writes into targets
            if error is not None:
                raise error

        self._phases.on_all("read", work)

    def _prepare(self, number: int) -> list[_Sent]:
        """What a round sends to those who want it too, once it is read, per device."""
        prepared = []
        for device, name in enumerate(self._decision.devices):
            found = self._reads.exchange(number, device)
            sources, targets = ([self._tensor_of(item) for item in side] for side in (found.sources, found.targets))
            tables = torch.from_numpy(found.sends), torch.from_numpy(found.receives)
            prepared.append(_Sent(name, sources, targets, *tables))
        return prepared

    def _exchange(self, unsent: Sequence[_Sent]) -> None:
        for sent in unsent:
            ops.exchange_runs_(
                sent.sources,
                sent.targets,
                sent.sends,
                sent.receives,
                group_name="" if self._phases.group is None else self._phases.group.group_name,
                digest=self._decision.number,
                timeout_seconds=self._phases.timeout_seconds,
            )
            if sent.device == "cuda":
                torch.cuda.current_stream().synchronize()  # what fails on the device fails in this phase

    def _tensor_of(self, item: ReadItem) -> Tensor:
        return self._source.ours.resolve_tensor(item).detach()


class _Sent(NamedTuple):
    """The arguments of an exchange between targets on one kind of device."""

    device: str
    sources: list[Tensor]
    targets: list[Tensor]
    sends: Tensor
    receives: Tensor


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


def _find_tags(
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
