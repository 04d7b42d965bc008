"""Ranks that want the same bytes of a checkpoint read them once: one of them reads, and the others get them from it.

1. Each rank tells the coordinator which boxes of saved chunks it wants (``RankReads``).
2. The coordinator cuts them into parts, and gives each part to one rank (``csrc/core/shared_reads.h``).
3. In rounds, each rank reads its parts straight into its targets, while the parts of the round before travel from
   these targets to those of the other ranks. No rank sends before all have read, and verified, the round.

What a planner fills by methods of its own, wrappers, lazy views, numbers, and tensors that share memory in part, each
rank reads itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from torchtitan_ext import _core
from torchtitan_ext.checkpoint.operation.component_plans import PlannedSource
from torchtitan_ext.checkpoint.operation.phases import Phases
from torchtitan_ext.checkpoint.operation.sharing.requests import ShareRequest, decide, request_of
from torchtitan_ext.checkpoint.operation.sharing.rounds import Rounds
from torchtitan_ext.checkpoint.planners.items import ReadDecision, in_file_order
from torchtitan_ext.checkpoint.rules.report import ReadSharing


@dataclass(frozen=True)
class ShareOffer:
    """What each rank tells the others before they agree to share.

    Attributes:
        share_reads: The argument.
        can_share: Whether all planners are ours and all ranks read the same metadata, as far as this rank sees.
    """

    share_reads: bool
    can_share: bool


def offer(share_reads: bool, sources: Sequence[PlannedSource]) -> ShareOffer:
    """This rank's offer, before its targets change. Not collective."""
    decisions = [source.plan.planner_data for source in sources]
    can_share = bool(sources) and all(isinstance(one, ReadDecision) and one.is_cover_checked for one in decisions)
    return ShareOffer(share_reads, can_share)


def is_worth_asking(offers: Sequence[ShareOffer]) -> bool:
    """Whether ranks go on to tell what they want: the same answer on every rank."""
    return len(offers) > 1 and all(one.share_reads and one.can_share for one in offers)


def read_sharing(sources: Sequence[PlannedSource], phases: Phases) -> ReadSharing:
    """Changes the targets and reads the tensors of all sources; says how. Collective, where ``is_worth_asking``."""
    metadata = [source.ours.metadata.state_dict_metadata for source in sources]
    reads = _core.RankReads([source.plan.items for source in sources], metadata)

    def ask() -> ShareRequest:
        for source in sources:
            source.ours.change_targets()
        return request_of(sources, reads, phases)

    def read_all() -> None:
        for source in sources:
            source.read(in_file_order(source.plan.items, source.ours.metadata))

    decision = phases.through_coordinator("share", ask, decide)
    if decision.part is None:
        phases.on_all("read", read_all)
        return decision.sharing
    with ThreadPoolExecutor(1, "torchtitan_ext.share_reads") as reader:
        rounds = Rounds(sources, reads, decision, phases, reader)
        for number in [*range(reads.num_rounds), None]:
            rounds.step(number)
    seconds = max(rounds.done.exchange_seconds, 1e-9)
    return replace(
        decision.sharing,
        bytes_exchanged=rounds.done.bytes_received,
        read_gb_per_second=rounds.done.bytes_read / max(rounds.done.read_seconds, 1e-9) / 1e9,
        exchange_gb_per_second=rounds.done.bytes_received / seconds / 1e9,
        between_hosts={
            pair: num_bytes / seconds / 1e9
            for pair, num_bytes in decision.between_hosts.items()
            if len(decision.between_hosts) > 1
        },
    )
