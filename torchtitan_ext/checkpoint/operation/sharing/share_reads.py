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
from dataclasses import dataclass

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

    def ask() -> ShareRequest:
        source.ours.change_targets()
        return request_of(source, reads, phases)

    def read_all() -> None:
        source.read(in_file_order(source.plan.items, source.ours.metadata))

    decision = phases.through_coordinator("share", ask, decide)
    if decision.part is None:
        phases.on_all("read", read_all)
        return decision.sharing
    with ThreadPoolExecutor(1, "torchtitan_ext.share_reads") as reader:
        rounds = Rounds(source, reads, decision, phases, reader)
        for number in [*range(reads.num_rounds), None]:
            rounds.step(number)
    return decision.sharing
