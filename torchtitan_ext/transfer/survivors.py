"""What the coordinator works out for a recovery: who survived with what, whose copies are taken, what nobody holds.

Survivors stand on meshes of ranks that are gone. Their tables are agreed on like those of a load, from what is reported
alone: two readings that fit all survivors, and give one of them other elements, are refused.
"""

from __future__ import annotations

import pickle
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchtitan_ext import _core
from torchtitan_ext.checkpoint.tables.agreement import Agreement, agree, unused_layouts
from torchtitan_ext.checkpoint.tables.component import World
from torchtitan_ext.checkpoint.tables.key_table import KeyTable, encode_table, number_hosts, pack, unpack
from torchtitan_ext.dcp_private import unflatten_state_dict
from torchtitan_ext.errors import Problem, named, refusal
from torchtitan_ext.state.nested import Path
from torchtitan_ext.state.value_digest import digest_value
from torchtitan_ext.transfer.copies import HeldCopies, Replicas, SavedSums, box_text, compare_copies, majority
from torchtitan_ext.transfer.planning import Offer, RankPart, differing_arguments, find_misfits, make_rank_parts
from torchtitan_ext.transfer.recover_report import RecoverReport


@dataclass(frozen=True)
class SurvivorOffer(Offer):
    """What one new rank tells the coordinator first; ``source`` is what it still holds, empty on a fresh rank.

    Attributes:
        step: The training step of what it holds; ``None`` on a fresh rank.
        alive: The old rank of each new rank, ``None`` of fresh ones.
        old_size: How many ranks the old world had at least, by the meshes that this rank knows.
        tied: Keys of the target that have the memory of another one, which is told.
    """

    step: int | None
    alive: tuple[int | None, ...]
    old_size: int
    tied: Mapping[str, str]


@dataclass(frozen=True)
class Survivors:
    """What the tables of all ranks say together.

    Attributes:
        step: The training step of the survivors whose memory is taken.
        source, target: The agreements; ranks are new ones.
        outvoted: New ranks that hold the state of another step, and which.
        old: The world that was, and ``new`` the one that is.
    """

    offers: Sequence[SurvivorOffer]
    step: int
    source: Agreement
    target: Agreement
    outvoted: Mapping[int, int]
    old: World
    new: World

    def name_of(self, rank: int) -> str:
        """A survivor as messages name it."""
        return f"rank {rank} (old rank {self.offers[rank].alive[rank]})"


@dataclass(frozen=True)
class Start:
    """What a rank is told of it: the step, whether its memory is taken, and the sharding orders of its tensors."""

    step: int
    is_taken: bool
    steps: Mapping[str, tuple[tuple[int, int, int], ...]]


@dataclass(frozen=True)
class RecoverPart:
    """What one rank is told of the plan.

    Attributes:
        part: Its part of the transfer.
        absent: What it wants of tensors of which survivors hold another part, for ``_core.expand_absent``.
        packed_absent: Keys that no survivor has, and by key what no survivor has of it, in words; of all ranks.
        packed_components: The state of components with a rule of their own, merged, by name.
        report: What is known so far of the report, the same on all ranks.
    """

    part: RankPart
    absent: bytes
    packed_absent: bytes
    packed_components: bytes
    report: RecoverReport
    old: World
    new: World

    def absent_keys(self) -> tuple[tuple[str, ...], dict[str, str]]:
        """Keys that no survivor has, and by key what no survivor has of others."""
        found: tuple[tuple[str, ...], dict[str, str]] = pickle.loads(unpack(self.packed_absent))
        return found

    def components(self) -> dict[str, Any]:
        """By name the merged state of all survivors."""
        merged: dict[str, Any] = pickle.loads(unpack(self.packed_components))
        return merged


def agree_on_survivors(offers: Sequence[SurvivorOffer]) -> Survivors:
    """Puts the tables of all ranks together. Runs on the coordinator.

    Raises:
        StateRefusedError: (a subclass) Ranks disagree, or a layout is in doubt: all problems of all ranks.
    """
    problems = [problem for offer in offers for problem in offer.problems]
    problems += differing_arguments(offers)
    if problems:
        raise refusal("recover", problems)
    steps = {rank: offer.step for rank, offer in enumerate(offers) if offer.step is not None}
    if not steps:
        detail = "no rank of the old world is left; load the last checkpoint"
        raise refusal("recover", [Problem("missing_key", "alive", detail)])
    step = majority(steps)
    if step is None:
        listed = ", ".join(f"rank {rank} (old rank {offers[rank].alive[rank]}): {at}" for rank, at in steps.items())
        detail = f"survivors are at different training steps ({listed}), and no more than half at one"
        raise refusal("recover", [Problem("ranks_disagree", "step", detail, "; load the last checkpoint")])
    outvoted = {rank: at for rank, at in steps.items() if at != step}
    nothing = encode_table(KeyTable({})).message
    source_tables = [nothing if rank in outvoted else offer.source for rank, offer in enumerate(offers)]
    source = agree(source_tables, needs_all_ranks=False)
    target = agree([offer.target for offer in offers], needs_all_ranks=False)
    problems = [*source.problems, *target.problems]
    problems += unused_layouts([offer.target for offer in offers], target, target.names)
    if problems:
        raise refusal("recover", problems)
    known = [old + 1 for old in offers[0].alive if old is not None]
    old = World(max([*known, *(offer.old_size for offer in offers)]), source.joint.axes())
    return Survivors(offers, step, source, target, outvoted, old, target.ranks_and_meshes())


def starts_of(found: Survivors) -> list[Start]:
    """What each rank is told of it."""
    return [
        Start(found.step, offer.step is not None and rank not in found.outvoted, found.source.joint.steps_of(rank))
        for rank, offer in enumerate(found.offers)
    ]


def plan_recovery(
    found: Survivors, held: Sequence[HeldCopies], saved: SavedSums | None, replicas: Replicas
) -> list[RecoverPart]:
    """The part of each rank. Runs on the coordinator.

    Raises:
        StateRefusedError: (a subclass) Copies differ, or a tensor of the state is another one than the survivors'.
    """
    source, target = found.source, found.target
    verdict = compare_copies(source, set(target.names), held, saved, replicas, found.name_of)
    verdict.problems += _untied(found, held, verdict.distrusted)
    components, distrusted_values = _merge_components(found, held, replicas, verdict.problems)
    source_of = [_core.NO_KEY] * len(target.names)
    lacking: list[str] = []
    for number, fqn in enumerate(target.names):
        if number not in target.agreed_keys:
            continue
        held_as = source.number_of.get(fqn)
        if held_as is not None and held_as in source.agreed_keys:
            source_of[number] = held_as
        else:
            lacking.append(fqn)
    pairs = _core.pair_keys(source.joint, target.joint, source_of, distrusted=verdict.distrusted)
    problems = [
        *verdict.problems,
        *(problem for pair in pairs for problem in find_misfits(pair, source, target, "forbid")),
    ]
    if problems:
        raise refusal("recover", problems)
    of_tensors = [pair for pair in pairs if not target.kinds[pair.target_class].is_object]
    hosts = number_hosts([offer.host for offer in found.offers])
    plan = _core.TransferPlan(source.joint, target.joint, of_tensors, hosts, has_lost_ranks=True)
    absent: dict[str, str] = {}
    for position, box in plan.first_absent.items():
        text = f"no survivor has {box_text(box)}"
        absent |= {target.names[key]: text for key in of_tensors[position].target_keys}
    renamed = {fqn: fqn for fqn in target.names}
    parts = make_rank_parts(plan, pairs, source, target, len(found.offers), renamed)
    alive = found.offers[0].alive
    distrusted: dict[int, list[str]] = {int(alive[rank] or 0): [f"step {at}"] for rank, at in found.outvoted.items()}
    named_ranks = [(rank, source.names[key]) for key, ranks in verdict.distrusted.items() for rank in ranks]
    for rank, fqn in [*named_ranks, *distrusted_values]:
        distrusted.setdefault(int(alive[rank] or 0), []).append(fqn)
    between = plan.bytes_between
    kept = sum(num_bytes for (sending, wanting), num_bytes in between.items() if sending == wanting)
    taken = [rank for rank, start in enumerate(starts_of(found)) if start.is_taken]
    report = RecoverReport(
        step=found.step,
        survivors=tuple(int(alive[one] or 0) for one in taken),
        bytes_kept=kept,
        bytes_moved=sum(between.values()) - kept,
        distrusted={old: tuple(fqns) for old, fqns in distrusted.items()},
        num_proved=verdict.num_proved,
    )
    packed_absent, packed_components = pack(pickle.dumps((tuple(lacking), absent))), pack(pickle.dumps(components))
    return [
        RecoverPart(
            part=parts[rank],
            absent=plan.absent(rank),
            packed_absent=packed_absent,
            packed_components=packed_components,
            report=report,
            old=found.old,
            new=found.new,
        )
        for rank in range(len(found.offers))
    ]


def _untied(found: Survivors, copies: Sequence[HeldCopies], distrusted: Mapping[int, Collection[int]]) -> list[Problem]:
    """Keys with one memory in the state of which survivors hold two values, or hold them in other layouts."""
    source, problems = found.source, []
    for tied, first in sorted({pair for offer in found.offers for pair in offer.tied.items()}):
        of_tied, of_first = source.number_of.get(tied), source.number_of.get(first)
        if of_tied not in source.agreed_keys or of_first not in source.agreed_keys:
            continue
        advice = "; give them memory of their own in the state, or leave one of them out of what survived"
        if source.agreed_keys[of_tied] != source.agreed_keys[of_first]:
            what = f"has the memory of {first} in the state, and survivors hold the two in other layouts"
            problems.append(Problem("replicas_differ", tied, what, advice))
            continue
        ranks = source.joint.ranks(source.agreed_keys[of_first])
        trusted = [rank for rank in ranks if rank not in distrusted.get(of_first, ())]
        odd = [rank for rank in trusted if copies[rank].sums[tied].sums != copies[rank].sums[first].sums]
        if odd:
            where = named([found.name_of(rank) for rank in odd], 4)
            what = f"has the memory of {first} in the state, and survivors hold two values of them, on {where}"
            problems.append(Problem("replicas_differ", tied, what, advice))
    return problems


def _merge_components(
    found: Survivors, held: Sequence[HeldCopies], replicas: Replicas, problems: list[Problem]
) -> tuple[dict[str, Any], list[tuple[int, str]]]:
    """The states of all survivors, merged by key and nested; and the ranks whose value of a key is not taken."""
    digests: dict[str, dict[int, bytes]] = {}
    for rank, one in enumerate(held):
        for fqn, (_, value) in one.components.items():
            digests.setdefault(fqn, {})[rank] = digest_value(value)
    values: dict[str, Any] = {}
    paths: dict[str, Path] = {}
    not_taken: list[tuple[int, str]] = []
    for fqn, of_ranks in digests.items():
        right = majority(of_ranks)
        if right is None and replicas == "first":
            right = of_ranks[min(of_ranks)]
        if right is None:
            ranks = ", ".join(map(found.name_of, of_ranks))
            detail = f"its values differ on {ranks}, and nothing tells which is right"
            problems.append(Problem("replicas_differ", fqn, detail, '; pass replicas="first", or reset the component'))
            continue
        first = next(rank for rank, digest in of_ranks.items() if digest == right)
        not_taken += [(rank, fqn) for rank, digest in of_ranks.items() if digest != right]
        paths[fqn], values[fqn] = held[first].components[fqn]
    return dict(unflatten_state_dict(values, paths)), not_taken
