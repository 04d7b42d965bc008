"""Fingerprints of state dicts: equal for equal bits, whatever the mesh and the layout.

The digest of a tensor is its sum (``checkpoint/tables/tensor_sums.py``); dtype and global shape are mixed in.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch.distributed as dist
from torch import Tensor

from torchtitan_ext._core import SumTable
from torchtitan_ext.checkpoint.tables.agreement import agree
from torchtitan_ext.checkpoint.tables.key_table import BoxesEntry, KeyTable, RankTable, TensorEntry, encode_table
from torchtitan_ext.checkpoint.tables.tensor_sums import TensorSummer, describe_tensors, hex_of_digest
from torchtitan_ext.errors import Problem, described, refusal
from torchtitan_ext.layout.layout import LayoutRules, ShardOrder
from torchtitan_ext.ranks.exchange import Opening, check_usable, gather_values
from torchtitan_ext.ranks.groups import position_in
from torchtitan_ext.state.nested import flat_keys
from torchtitan_ext.state.value_digest import digest_value

T = TypeVar("T")


@dataclass(frozen=True)
class Fingerprint:
    """The same on every rank.

    Attributes:
        total: Digest of the whole state, 32 hex digits.
        values: Digest of each flat key, 16 hex digits.
        differing: Keys whose replicas are not all equal; their digest is that of the first replica.
    """

    total: str
    values: dict[str, str]
    differing: tuple[str, ...]


def fingerprint(
    state_dict: Mapping[str, Any],
    *,
    process_group: dist.ProcessGroup | None = None,
    layouts: Mapping[str, ShardOrder] | None = None,
) -> Fingerprint:
    """Digests a state dict over all ranks, counting one replica of each tensor.

    Equal states have equal fingerprints on every mesh and in one process. Unequal ones differ with a probability of
    about 1 - 2^-64 per tensor: this finds accidents (a lost shard, a flipped bit, exchanged rows, a replica that
    drifted), not an adversary, who can construct collisions.

    Collective over ``process_group``, which must hold every mesh of the state dict; without a process group the state
    is that of one process. Costs one pass over the tensors and two small exchanges; tensors stay on their device.

    Args:
        state_dict: Nested; DTensors, tensors that describe their own boxes, plain tensors (the lowest rank's counts)
            and other values (by ``value_digest.digest_value``).
        process_group: The ranks; the default group if left out.
        layouts: Sharding orders that placements cannot express, by canonical fqn or glob.

    Raises:
        LayoutError: The layout of a tensor is in doubt, or not all ranks of its mesh take part.
        WrongArgumentError: ``state_dict`` is something else, on some rank. A ``TypeError``.
    """
    check_usable("fingerprint", process_group)
    is_alone = process_group is None and not (dist.is_available() and dist.is_initialized())
    rank = 0 if is_alone else position_in(process_group)
    opening = Opening("fingerprint", "sums of a fingerprint")
    return fingerprint_over(
        lambda work: gather_values(work(), process_group, opening=opening), state_dict, layouts, rank=rank
    )


class Gather(Protocol):
    """Gives the results of all ranks, in the order of the ranks. Collective."""

    def __call__(self, work: Callable[[], T], /) -> list[T]: ...


def fingerprint_over(
    gather: Gather, state_dict: Mapping[str, Any], layouts: Mapping[str, ShardOrder] | None, *, rank: int
) -> Fingerprint:
    """``fingerprint`` over two exchanges of the caller; ``rank`` is the place of this rank in them."""
    values: dict[str, Any] = {}
    entries: dict[str, TensorEntry | BoxesEntry] = {}
    problems: list[Problem] = []
    # A failure on this rank alone becomes a problem, so that each exchange takes place and every rank gets it.
    if not isinstance(state_dict, Mapping):
        what = f"got {described(state_dict)}, expected a state dict: what state_dict() of a module or optimizer gives"
        problems.append(Problem("wrong_argument", "state_dict", what))
        state_dict = {}

    def describe() -> RankTable:
        with _failures_become(problems):
            values.update(flat_keys(state_dict).values)
            described_entries, found = describe_tensors(values, LayoutRules(layouts))
            entries.update(described_entries)
            problems.extend(found)
        return _table_of_sharded(entries, problems)

    agreement = agree(gather(describe), needs_all_ranks=True)
    if agreement.problems:
        raise refusal("fingerprint", agreement.problems)
    steps = agreement.joint.steps_of(rank)

    def add_up() -> tuple[SumTable, list[Problem]]:
        sums = SumTable()
        with _failures_become(problems):
            summer = TensorSummer()
            for fqn, entry in entries.items():
                summer.add(fqn, values[fqn], entry, steps.get(fqn))
            sums = summer.table()
            for fqn, value in values.items():
                if not isinstance(value, Tensor):
                    sums.add_key(fqn, {None: int.from_bytes(digest_value(value)[:8], "big")})
        return sums, problems

    gathered = gather(add_up)
    failures = [problem for _, own in gathered for problem in own]
    if failures:
        raise refusal("fingerprint", failures)
    digests: dict[str, str] = {}
    differing = []
    total = hashlib.blake2b(digest_size=16)
    merged = SumTable.merge([sums for sums, _ in gathered])
    for fqn in sorted(merged):
        # Values that are no tensors have no dtype.
        replicas = [(one.dtype, one.shape, one.sums[None]) for one in merged.replicas(fqn)]
        first = dtype, shape, found = min(replicas, key=lambda one: one[0] != "")
        digests[fqn] = hex_of_digest(found, dtype, shape) if dtype else f"{found:016x}"
        if any(one != first for one in replicas):
            differing.append(fqn)
        total.update(f"{len(fqn)}:{fqn}={digests[fqn]};".encode())
    return Fingerprint(total.hexdigest(), digests, tuple(differing))


@contextmanager
def _failures_become(problems: list[Problem]) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        problems.append(Problem("unsupported_tensor", "state_dict", f"{type(error).__name__}: {error}"))


def _table_of_sharded(entries: Mapping[str, TensorEntry | BoxesEntry], problems: list[Problem]) -> RankTable:
    """This rank's part of the agreement on the sharding order of each DTensor."""
    sharded = {
        fqn: entry for fqn, entry in entries.items() if isinstance(entry, BoxesEntry) or entry.report.mesh is not None
    }
    return encode_table(KeyTable(sharded, problems=tuple(problems))).message
