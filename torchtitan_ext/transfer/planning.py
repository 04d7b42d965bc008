"""What the coordinator works out for all ranks: which keys belong together, what does not fit, who sends what."""

from __future__ import annotations

import pickle
import secrets
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from torchtitan_ext import _core, ops
from torchtitan_ext.checkpoint.rules.casts import CastPolicy, cast_problem
from torchtitan_ext.checkpoint.rules.policy import Source
from torchtitan_ext.checkpoint.tables.agreement import Agreement, agree, unused_layouts
from torchtitan_ext.checkpoint.tables.key_table import RankTable, number_hosts, pack, unpack
from torchtitan_ext.errors import Problem, differing, refusal
from torchtitan_ext.layout.layout import Box
from torchtitan_ext.transfer.key_sources import dtype_of, fp8_problem, mapped_keys, same_keys
from torchtitan_ext.transforms import Transform

Replicas = Literal["equal", "first"]
"""What is asked of copies: that they are equal, or nothing: the first counts."""

# Ranks are told who sends how much to whom up to this many ranks; beyond it the table grows with their square.
_MAX_RANKS_TOLD = 64


@dataclass(frozen=True)
class Offer:
    """What one rank tells the coordinator: the tables of both sides, what is wrong with them, and its arguments.

    Attributes:
        arguments: What all ranks must give alike, by name.
    """

    source: RankTable
    target: RankTable
    host: bytes
    problems: tuple[Problem, ...]
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class RankPart:
    """What the coordinator tells one rank.

    Attributes:
        number: Of this plan, the same on all ranks.
        sends, receives: The rank's boxes, for ``_core.expand_transfers``.
        fills: What a transform pads of its target, for ``_core.expand_fills``.
        objects_sent: Source keys of values that are no tensors, which this rank sends to all.
        objects_filled: The source key of each such value of this rank's target.
        bytes_between: Bytes from rank to rank, of few ranks all.
        total_bytes: Of all ranks together, those that a rank has itself included.
        renamed: The source keys of target keys with other names.
        changed: Target keys with other elements than the source's: cast, or made by a transform.
        partial: Target keys of which the ranks together do not hold each element once.
        packed_filled: The target's keys of all ranks.
        unwanted: Source keys that no rank's target has.
    """

    number: int
    sends: bytes
    receives: bytes
    fills: bytes
    objects_sent: tuple[str, ...]
    objects_filled: Mapping[str, str]
    bytes_between: Mapping[tuple[int, int], int]
    total_bytes: int
    renamed: Mapping[str, str]
    changed: tuple[str, ...]
    partial: tuple[str, ...]
    packed_filled: bytes
    unwanted: tuple[str, ...]

    @property
    def filled(self) -> tuple[str, ...]:
        """The target's keys of all ranks, which a failed run may leave part-written."""
        return tuple(pickle.loads(unpack(self.packed_filled)))


def plan_for_all(offers: Sequence[Offer], transform: Transform | None) -> list[RankPart]:
    """The part of each rank. Runs on the coordinator.

    Raises:
        StateRefusedError: (a subclass) Something does not fit, on any rank: all of it.
    """
    wrong = [problem for offer in offers for problem in offer.problems if problem.kind == "wrong_argument"]
    if wrong:  # what else does not fit follows from it
        raise refusal("reshard", wrong)
    source = agree([offer.source for offer in offers], needs_all_ranks=True)
    target = agree([offer.target for offer in offers], needs_all_ranks=False)
    problems = [*source.problems, *target.problems, *(problem for offer in offers for problem in offer.problems)]
    problems += _differing_arguments(offers)
    problems += unused_layouts([offer.source for offer in offers], source, source.names)
    problems += unused_layouts([offer.target for offer in offers], target, target.names)
    arguments = offers[0].arguments
    names, cast = Source(rename=arguments["rename"]), arguments["cast"]
    renamed = {fqn: names.saved_name(fqn) for fqn in target.names}
    if transform is None:
        found = same_keys(source, target, renamed, problems)
    elif problems:  # what a transform makes of a source in doubt is in doubt
        raise refusal("reshard", problems)
    else:
        found = mapped_keys(transform, source, target, renamed, cast)
    left_out = _later_copies(source) if arguments["replicas"] == "first" else {}
    pairs = _core.pair_keys(source.joint, target.joint, found.source_of, found.mapped, left_out)
    misfits = [problem for pair in pairs if not pair.is_mapped for problem in _find_misfits(pair, source, target, cast)]
    if problems or found.problems or misfits:
        raise refusal("reshard", [*problems, *found.problems, *misfits])
    of_tensors = [pair for pair in pairs if not target.kinds[pair.target_class].is_object]
    for pair in of_tensors:
        wanted = target.kinds[pair.target_class]
        if not pair.is_mapped and wanted.dtype != source.kinds[pair.source_classes[0]].dtype:
            pair.cast_to = ops.dtype_number(dtype_of(wanted))
    hosts = number_hosts([offer.host for offer in offers])
    plan = _core.TransferPlan(source.joint, target.joint, of_tensors, hosts)
    return _make_rank_parts(plan, pairs, source, target, len(offers), found.renamed)


def _later_copies(source: Agreement) -> dict[int, list[int]]:
    """By the number of a tensor the ranks whose boxes of it a rank before them holds too."""
    of_class: dict[int, list[int]] = {}
    for number in set(source.agreed_keys.values()):
        ranks: dict[tuple[Box, ...], set[int]] = defaultdict(set)
        for replica in () if source.kinds[number].is_object else source.joint.replicas(number):
            for shard in replica.shards:
                ranks[tuple(shard.boxes)].update(shard.ranks)
        of_class[number] = sorted(rank for of_boxes in ranks.values() for rank in sorted(of_boxes)[1:])
    return {key: of_class[number] for key, number in source.agreed_keys.items() if of_class[number]}


def _differing_arguments(offers: Sequence[Offer]) -> list[Problem]:
    """The arguments of which ranks give several values."""
    return [
        problem
        for name in offers[0].arguments
        for problem in differing(name, [offer.arguments.get(name) for offer in offers])
    ]


def _make_rank_parts(
    plan: _core.TransferPlan,
    pairs: Sequence[_core.TransferPair],
    source: Agreement,
    target: Agreement,
    num_ranks: int,
    renamed: Mapping[str, str],
) -> list[RankPart]:
    """What each rank is told of a plan; ``renamed`` has the source key of each target key."""
    sent: list[list[str]] = [[] for _ in range(num_ranks)]
    filled: list[dict[str, str]] = [{} for _ in range(num_ranks)]
    for pair in pairs:
        if target.kinds[pair.target_class].is_object:
            holder = source.joint.ranks(pair.source_classes[0])[0]
            sent[holder] += [source.names[key] for key in pair.source_keys]
            for rank in target.joint.ranks(pair.target_class):
                filled[rank].update({target.names[key]: renamed[target.names[key]] for key in pair.target_keys})
    between = plan.bytes_between
    wanted = {key for pair in pairs for key in pair.source_keys}
    common = RankPart(
        number=secrets.randbits(62),
        sends=b"",
        receives=b"",
        fills=b"",
        objects_sent=(),
        objects_filled={},
        bytes_between=between if num_ranks <= _MAX_RANKS_TOLD else {},
        total_bytes=sum(between.values()),
        renamed={fqn: name for fqn, name in renamed.items() if fqn != name},
        changed=tuple(
            target.names[key] for pair in pairs if pair.is_mapped or pair.cast_to >= 0 for key in pair.target_keys
        ),
        partial=tuple(target.names[key] for pair in pairs if _is_partial(pair, target) for key in pair.target_keys),
        packed_filled=pack(pickle.dumps(tuple(target.names))),
        unwanted=tuple(name for key, name in enumerate(source.names) if key not in wanted),
    )
    return [
        replace(
            common,
            sends=plan.sends(rank),
            receives=plan.receives(rank),
            fills=plan.fills(rank),
            objects_sent=tuple(dict.fromkeys(sent[rank])),
            objects_filled=filled[rank],
        )
        for rank in range(num_ranks)
    ]


def _is_partial(pair: _core.TransferPair, target: Agreement) -> bool:
    """Whether the ranks together do not hold each element of the targets, or hold some in boxes that differ."""
    kind = target.kinds[pair.target_class]
    if kind.type != _core.EntryType.BOXES:
        return False
    return _core.cover_defect(kind.global_shape, target.joint.written_boxes(pair.target_class)) is not None


def _find_misfits(pair: _core.TransferPair, source: Agreement, target: Agreement, cast: CastPolicy) -> list[Problem]:
    """What keeps the keys of a pair from being filled, the same for each of them."""
    held, wanted = source.kinds[pair.source_classes[0]], target.kinds[pair.target_class]
    fqns = [target.names[key] for key in pair.target_keys]
    if held.is_object != wanted.is_object:
        kinds = ("a tensor", "a value that is no tensor")
        what = f"is {kinds[held.is_object]} in the source, {kinds[wanted.is_object]} in the target"
        return [Problem("wrong_type", fqn, what) for fqn in fqns]
    if held.is_object:
        return []
    if held.global_shape != wanted.global_shape:
        what = f"has shape {held.global_shape} in the source, {wanted.global_shape} in the target"
        return [Problem("wrong_shape", fqn, what) for fqn in fqns]
    dtypes = dtype_of(held), dtype_of(wanted)
    found = [cast_problem(fqn, *dtypes, cast, has="the source is") or fp8_problem(fqn, *dtypes) for fqn in fqns]
    return [problem for problem in found if problem is not None]
