"""Ranks that want the same bytes of a checkpoint read them once: one of them reads, and the others get them from it.

1. Each rank tells the coordinator which boxes of saved chunks it wants (``RankReads``).
2. The coordinator cuts them into parts, and gives each part to one rank (``csrc/core/shared_reads.h``).
3. In rounds, each rank reads its parts straight into its targets, while the parts of the round before travel from
   these targets to those of the other ranks. No rank sends before all have read, and verified, the round.

What a planner fills by methods of its own, wrappers, lazy views, numbers, and tensors that share memory in part, each
rank reads itself.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from torchtitan_ext import _core
from torchtitan_ext.checkpoint.operation.component_plans import PlannedSource
from torchtitan_ext.checkpoint.operation.phases import Phases
from torchtitan_ext.checkpoint.operation.sharing.requests import (
    FEWEST_SAMPLE_BYTES,
    MOST_SAMPLE_BYTES,
    ShareDecision,
    ShareReads,
    ShareRequest,
    decide,
    request_of,
)
from torchtitan_ext.checkpoint.operation.sharing.rounds import Rounds
from torchtitan_ext.checkpoint.planners.items import ReadDecision, in_file_order
from torchtitan_ext.checkpoint.rules.report import ReadSharing
from torchtitan_ext.storage.native.planned_items import ListedReads, reads_of

# For "auto". Below these, a load is so short that nothing is worth trying.
_MIN_WANTED_BYTES = 64 << 20
_MIN_SECONDS = 0.5
# A part of a trial that lasted so long says how fast the storage is.
_ENOUGH_SECONDS = 0.01
_FAR_TOO_SLOW = 4.0


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


def offer(share_reads: ShareReads, sources: Sequence[PlannedSource]) -> ShareOffer:
    """This rank's offer, before its targets change. Not collective."""
    decisions = [source.plan.planner_data for source in sources]
    can_share = bool(sources) and all(isinstance(one, ReadDecision) and one.is_cover_checked for one in decisions)
    return ShareOffer(share_reads, 0 if share_reads is False else _wanted_bytes(sources), can_share)


def _wanted_bytes(sources: Sequence[PlannedSource]) -> int:
    """Of all items, without making them."""
    lists = [reads_of(source.plan) for source in sources]
    sizes = [reads.num_bytes if isinstance(reads, ListedReads) else None for reads in lists]
    known = [one for one in sizes if one is not None]
    return sum(known) if len(known) == len(lists) else _reads_of(sources).num_bytes


def _reads_of(sources: Sequence[PlannedSource]) -> _core.RankReads:
    """All items of all sources."""
    metadata = [source.ours.metadata.state_dict_metadata for source in sources]
    return _core.RankReads([source.plan.items for source in sources], metadata)


def is_worth_asking(offers: Sequence[ShareOffer]) -> bool:
    """Whether ranks go on to tell what they want: the same answer on every rank."""
    first = offers[0].share_reads
    if first is False or len(offers) == 1 or not all(one.can_share for one in offers):
        return False
    return first != "auto" or sum(one.wanted_bytes for one in offers) >= _MIN_WANTED_BYTES


def read_sharing(
    share_reads: ShareReads, sources: Sequence[PlannedSource], offers: Sequence[ShareOffer], phases: Phases
) -> ReadSharing:
    """Changes the targets and reads the tensors of all sources; says how. Collective, where ``is_worth_asking``."""
    reads, seconds_of_each = _reads_of(sources), None
    if share_reads == "auto":

        def read_some() -> float | None:
            for source in sources:
                source.ours.change_targets()
            return _read_some(sources, reads)

        speeds = phases.on_all("read", read_some)
        wanted_bytes = sum(one.wanted_bytes for one in offers)
        times = [one.wanted_bytes * speed for one, speed in zip(offers, speeds, strict=True) if speed is not None]
        if len(times) == len(offers):
            # Of all ranks the mean: one may have waited for its core.
            seconds_of_each = sum(times) / len(times) / wanted_bytes
            if seconds_of_each * wanted_bytes < _MIN_SECONDS:
                phases.on_all("read", lambda: _read(sources, reads, reads.num_bytes))
                return ReadSharing(False, f"that takes less than {_MIN_SECONDS} s", wanted_bytes)

    def ask() -> ShareRequest:
        if share_reads != "auto":
            for source in sources:
                source.ours.change_targets()
        return request_of(sources, reads, phases)

    decision = phases.through_coordinator("share", ask, lambda requests: decide(share_reads, requests))
    if decision.part is None:
        phases.on_all("read", lambda: _read(sources, reads, reads.num_bytes))
        return decision.sharing
    with ThreadPoolExecutor(1, "torchtitan_ext.share_reads") as reader:
        rounds = Rounds(sources, reads, decision, phases, reader)
        sharing = _read_rounds(rounds, reads.num_rounds, decision, seconds_of_each)
    seconds = max(rounds.done.exchange_seconds, 1e-9)
    return replace(
        sharing,
        bytes_exchanged=rounds.done.bytes_received,
        read_gb_per_second=rounds.done.bytes_read / max(rounds.done.read_seconds, 1e-9) / 1e9,
        exchange_gb_per_second=rounds.done.bytes_received / seconds / 1e9,
        between_hosts={
            pair: num_bytes / seconds / 1e9
            for pair, num_bytes in decision.between_hosts.items()
            if sharing.chosen and len(decision.between_hosts) > 1
        },
    )


def _read(sources: Sequence[PlannedSource], reads: _core.RankReads, num_bytes: int) -> int:
    """Takes out and reads the first items, of about so many bytes; returns how many these were."""
    taken = reads.take(num_bytes, [source.can_cut for source in sources])
    for source, items in zip(sources, taken.items, strict=True):
        source.read(in_file_order(items, source.ours.metadata))
    return taken.num_bytes


def _read_some(sources: Sequence[PlannedSource], reads: _core.RankReads) -> float | None:
    """Reads the first few of this rank's bytes: the seconds per byte, if any were read.

    All ranks read theirs: so few bytes at first that a slow store has them soon, and more as long as that says little.
    """
    speed = None
    num_bytes = FEWEST_SAMPLE_BYTES // 4  # files are opened, and memory is made
    while num_bytes <= MOST_SAMPLE_BYTES:
        begin = time.perf_counter()
        num_read = _read(sources, reads, num_bytes)
        if 2 * num_read < num_bytes:
            break
        seconds = time.perf_counter() - begin
        if num_bytes >= FEWEST_SAMPLE_BYTES:
            speed = seconds / num_read
        if seconds > _ENOUGH_SECONDS:
            break
        num_bytes *= 4
    return speed


def _read_rounds(
    rounds: Rounds, num_rounds: int, decision: ShareDecision, seconds_of_each: float | None
) -> ReadSharing:
    """Reads all rounds, and those of a sample first: then what is left in the faster way. Collective.

    Args:
        seconds_of_each: Per byte that a rank wants, if each reads its own; ``None`` if that is not known.
    """
    sharing, sample = decision.sharing, decision.sample_bytes
    rest = list(range(len(sample), num_rounds))
    if sample:
        rounds.step([0])
        first = rounds.step([1])  # while round 0 travels
        if seconds_of_each is None:  # as if storage read as fast as until now, for however many
            seconds_of_each = first.read_seconds / max(first.bytes_read, 1)
        each = decision.repeated_bytes * seconds_of_each
        of_first = first.exchange_seconds / max(sample[0], 1) * decision.shared_bytes
        if of_first > _FAR_TOO_SLOW * each:
            sharing = _chosen_by(sharing, once=of_first, each=each)
            rounds.forget()
            rest = [1, *rest]
        else:
            second = rounds.step([2])  # while round 1 travels: as long as any round from here on
            sharing = _chosen_by(sharing, once=second.seconds / max(sample[2], 1) * decision.shared_bytes, each=each)
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
