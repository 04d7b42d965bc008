"""Do ranks that should hold the same hold the same? What their digests say, in sentences.

``csrc/core/replica_digests.h`` compares. Replicas are what placements make so and what all ranks hold whole; tensors of
one key on several meshes are *presumed* to be replicas, and their values decide.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from torchtitan_ext import _core
from torchtitan_ext.checkpoint.tables.agreement import Agreement, dtype_named, reading_from
from torchtitan_ext.checkpoint.tables.key_table import RankTable, unpack
from torchtitan_ext.errors import Problem
from torchtitan_ext.state.value_digest import shown


@dataclass(frozen=True)
class ReplicaComparison:
    """What digests say of replicas.

    Attributes:
        differing: Values, plain tensors and replicas on one mesh that are not equal: one problem per key.
        presumed: Tensors of one key on several meshes that are not equal, which would be replicas by presumption only.
        uncompared: Tensors of one key on several meshes that cannot be compared.
        equal: Numbers of the keys of tensors that are equal on several meshes, in increasing order.
    """

    differing: list[Problem]
    presumed: list[Problem]
    uncompared: list[Problem]
    equal: list[int]


def compare_replicas(tables: Sequence[RankTable], agreement: Agreement) -> ReplicaComparison:
    """Compares what should be equal on several ranks, as far as the digests of their tables tell.

    Args:
        tables: Those that the ranks agreed on, or equal ones.
    """
    found = _read_digests(tables, agreement).compare()
    return ReplicaComparison(
        [_difference(agreement, one) for one in found.differing if not one.is_presumed],
        [_difference(agreement, one) for one in found.differing if one.is_presumed],
        [_uncompared(agreement, key) for key in found.uncompared],
        found.equal,
    )


def _read_digests(tables: Sequence[RankTable], agreement: Agreement) -> _core.ReplicaDigests:
    digests = _core.ReplicaDigests(agreement.joint)
    number_of = cache(lambda section, packed: digests.add_message(section, unpack(packed)))
    for rank, (table, sections) in enumerate(zip(tables, agreement.sections, strict=True)):
        with reading_from(rank):
            messages = [number_of(section, packed) for section, packed in zip(sections, table.digests, strict=True)]
            digests.add_rank(messages)
    return digests


def _difference(agreement: Agreement, found: _core.ReplicaDifference) -> Problem:
    fqn, kind = agreement.names[found.key], agreement.joint.kind_of(found.key)
    held, ranks = _values(found, kind), f"ranks {found.first.rank} and {found.second.rank}"
    if found.is_presumed:
        advice = (
            "; give different tensors different keys; make replicas equal first: tte.sync_module_states(model, mesh) "
            "with a mesh that holds all of these ranks"
        )
        detail = f"{agreement.joint.describe_replicas(found.key)}, and {ranks} hold {held or 'different bits'}"
        return Problem("replicas_differ", fqn, detail, advice)
    first = "SavePlanner(replicas='first')"
    what, remedy = (
        ("values", f"give each rank a key of its own (such as rank_0), or save one rank's value with {first}")
        if kind.is_object
        else ("bits", f"make the replicas equal first, or save the lowest rank's with {first}")
    )
    held = held or f"{what} with digests {_digest(found.first)} and {_digest(found.second)}"
    return Problem("replicas_differ", fqn, f"{ranks} should hold the same, got {held}", f"; {remedy}")


def _uncompared(agreement: Agreement, key: int) -> Problem:
    words = agreement.joint.describe_replicas(key)
    detail = f"{words}, in different layouts or on some ranks without a digest"
    advice = "; give different tensors different keys, and shard replicas alike"
    return Problem("replicas_differ", agreement.names[key], detail, advice)


def _values(found: _core.ReplicaDifference, kind: _core.KeyKind) -> str | None:
    """The values of both, where they are scalars and not the beginnings of digests."""
    sides, dtype = (found.first, found.second), dtype_named(kind.dtype)
    texts = [None if side.is_cut else shown(side.digest, dtype) for side in sides]
    if all(text is None for text in texts):
        return None
    return " and ".join(text or f"a value with digest {_digest(side)}" for text, side in zip(texts, sides, strict=True))


def _digest(side: _core.DigestOfRank) -> str:
    return side.digest.hex()[:12] or "none"
