"""Do ranks that should hold the same hold the same? What their digests say, in sentences.

``csrc/core/replica_digests.h`` compares. Replicas are what placements make so and what all ranks hold whole; tensors of
one key on several meshes are *presumed* to be replicas, and their values decide.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from torchtitan_ext import _core
from torchtitan_ext.checkpoint.tables.agreement import Agreement, ReadingFrom, TensorAgreement, as_rank_table
from torchtitan_ext.checkpoint.tables.key_table import KeyTable, RankTable, unpack
from torchtitan_ext.errors import Problem, named
from torchtitan_ext.state.value_digest import shown

# A sentence stays readable for meshes of a thousand ranks.
_MAX_NAMED_MESHES = 4
_MAX_NAMED_RANKS = 8

_Side = tuple[int, bytes, bool]
"""A rank, what stands for its value, and whether that is the beginning of a digest only."""


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


def compare_replicas(tables: Sequence[KeyTable | RankTable], agreement: Agreement) -> ReplicaComparison:
    """Compares what should be equal on several ranks, as far as the digests of their tables tell.

    Args:
        tables: Those that the ranks agreed on, or equal ones.
    """
    differing, equal, uncompared = _read_digests(tables, agreement).compare()
    return ReplicaComparison(
        [_differing(agreement, key, *sides) for key, *sides, is_presumed in differing if not is_presumed],
        [_presumed(agreement, key, *sides) for key, *sides, is_presumed in differing if is_presumed],
        [_uncompared(agreement, key) for key in uncompared],
        equal,
    )


def _read_digests(tables: Sequence[KeyTable | RankTable], agreement: Agreement) -> _core.ReplicaDigests:
    digests = _core.ReplicaDigests(agreement.world)
    number_of: dict[tuple[int, bytes], int] = {}
    for rank, (table, sections) in enumerate(zip(map(as_rank_table, tables), agreement.sections, strict=True)):
        with ReadingFrom(rank):
            numbers = []
            for section, packed in zip(sections, table.digests, strict=True):
                if (section, packed) not in number_of:
                    number_of[section, packed] = digests.add_message(section, unpack(packed))
                numbers.append(number_of[section, packed])
            digests.add_rank(numbers)
    return digests


def _differing(agreement: Agreement, key: int, first: _Side, second: _Side) -> Problem:
    fqn = agreement.names[key]
    kind = agreement.kind_of(fqn)
    what, remedy = (
        ("values", "give each rank a key of its own (such as rank_0), or save one rank's value with replicas='first'")
        if kind.is_object
        else ("bits", "make the replicas equal first, or save the lowest rank's with replicas='first'")
    )
    held = _both(first, second, kind.dtype) or f"{what} with digests {_digest(first)} and {_digest(second)}"
    detail = f"ranks {first[0]} and {second[0]} should hold the same, got {held}"
    return Problem("replicas_differ", fqn, detail, f"; {remedy}")


def _presumed(agreement: Agreement, key: int, first: _Side, second: _Side) -> Problem:
    fqn = agreement.names[key]
    held = _both(first, second, agreement.kind_of(fqn).dtype) or "different bits"
    detail = f"{_on_meshes(agreement, fqn)}, and ranks {first[0]} and {second[0]} hold {held}"
    advice = (
        "; give different tensors different keys; make replicas equal first: tte.sync_module_states(model, mesh) with "
        "a mesh that holds all of these ranks"
    )
    return Problem("replicas_differ", fqn, detail, advice)


def _uncompared(agreement: Agreement, key: int) -> Problem:
    fqn = agreement.names[key]
    detail = f"{_on_meshes(agreement, fqn)}, in different layouts or on some ranks without a digest"
    advice = "; give different tensors different keys, and shard replicas alike"
    return Problem("replicas_differ", fqn, detail, advice)


def _on_meshes(agreement: Agreement, fqn: str) -> str:
    agreed = agreement.keys[fqn]
    assert isinstance(agreed, TensorAgreement)
    meshes = [sorted({rank for shard in replica for rank in shard.ranks}) for replica in agreed.replicas]
    words = [f"[{named(ranks, _MAX_NAMED_RANKS)}]" for ranks in meshes[:_MAX_NAMED_MESHES]]
    more = [] if len(meshes) <= _MAX_NAMED_MESHES else [f"{len(meshes) - _MAX_NAMED_MESHES} more"]
    return f"is a tensor on each of several meshes ({' | '.join(words + more)})"


def _both(first: _Side, second: _Side, dtype: torch.dtype | None) -> str | None:
    """The values of both, where they are scalars and not the beginnings of digests."""
    texts = [None if is_cut else shown(brief, dtype) for _, brief, is_cut in (first, second)]
    if all(text is None for text in texts):
        return None
    words = [text or f"a value with digest {_digest(side)}" for text, side in zip(texts, (first, second), strict=True)]
    return " and ".join(words)


def _digest(side: _Side) -> str:
    return side[1].hex()[:12] or "none"
