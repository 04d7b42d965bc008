"""What each rank tells the coordinator that it wants, and what the coordinator decides: who reads which part."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torchtitan_ext import _core
from torchtitan_ext.checkpoint.operation.component_plans import PlannedSource
from torchtitan_ext.checkpoint.operation.phases import Phases
from torchtitan_ext.checkpoint.operation.sharing.targets import find_tags
from torchtitan_ext.checkpoint.planners.saved_chunks import name_metadata
from torchtitan_ext.checkpoint.rules.report import ReadSharing
from torchtitan_ext.checkpoint.tables.key_table import host_digest, number_hosts, pack, unpack

# Reading and exchange overlap in all rounds but the first and the last.
_MOST_ROUNDS = 16


@dataclass(frozen=True)
class ShareRequest:
    """What a rank tells the coordinator."""

    wanted: bytes
    own_bytes: int
    host: bytes
    mark: str
    is_rounded: bool


@dataclass(frozen=True)
class ShareDecision:
    """What the coordinator tells a rank.

    Attributes:
        part: For ``_core.RankReads.share``; ``None`` where each rank reads for itself.
        number: Of this plan, the same on all ranks.
    """

    part: bytes | None
    number: int
    devices: tuple[str, ...]
    sharing: ReadSharing


def request_of(source: PlannedSource, reads: _core.RankReads, phases: Phases) -> ShareRequest:
    """What this rank wants. Its targets have memory by now. Not collective."""
    message = pack(reads.wanted(find_tags(source, reads.items, phases)))
    # Equal on ranks that number keys and chunks alike.
    mark = getattr(source.opened.reader, "metadata_digest", "") or name_metadata(source.ours.metadata)
    return ShareRequest(message, reads.own_bytes, host_digest(), mark, source.can_cut)


def decide(requests: Sequence[ShareRequest]) -> list[ShareDecision]:
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
        return [ShareDecision(None, 0, (), sharing)] * len(requests)
    plan.assign(_MOST_ROUNDS if all(request.is_rounded for request in requests) else 1)
    common = ShareDecision(
        b"",
        secrets.randbits(62),
        tuple(plan.devices),
        replace(sharing, chosen=True),
    )
    return [replace(common, part=pack(plan.part_message(rank))) for rank in range(len(requests))]
