"""Which part of the global tensors a rank holds, agreed on by all ranks."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

from torchtitan_ext._core import SumTable
from torchtitan_ext.checkpoint.operation.phases import Phases
from torchtitan_ext.checkpoint.tables.agreement import agree, unused_layouts
from torchtitan_ext.checkpoint.tables.key_table import BoxesEntry, RankTable, TensorEntry
from torchtitan_ext.checkpoint.tables.tensor_sums import TensorSummer
from torchtitan_ext.errors import Problem, refusal
from torchtitan_ext.layout.layout import Chunk, LocalShard, Steps, shard_of
from torchtitan_ext.transfer.changed.changes import HeldTensor
from torchtitan_ext.transfer.endpoint import Endpoint


def agree_on_steps(
    phases: Phases, describe: Callable[[], Endpoint], operation: str, *, needs_all_ranks: bool
) -> tuple[Endpoint, dict[str, Steps], list[str]]:
    """What this rank holds, agreed on by all. Collective.

    Returns:
        It, the sharding order of each tensor on a mesh, and, on the coordinator alone, the keys of all ranks.

    Raises:
        StateRefusedError: (a subclass) Of all problems of all ranks, the same on every rank.
    """
    described: list[Endpoint] = []
    names: list[str] = []

    def offer() -> tuple[Any, list[Problem]]:
        endpoint = describe()
        described.append(endpoint)
        is_object = {fqn for fqn, entry in endpoint.entries.items() if not isinstance(entry, TensorEntry | BoxesEntry)}
        what = "is no tensor, and deltas have tensors only; leave it out of the state"
        problems = [*endpoint.problems, *(Problem("unsupported_value", fqn, what) for fqn in sorted(is_object))]
        return endpoint.table.message, problems

    def agree_for_all(offers: Sequence[tuple[RankTable, list[Problem]]]) -> list[dict[str, Steps]]:
        tables = [table for table, _ in offers]
        agreement = agree(tables, needs_all_ranks=needs_all_ranks)
        found = [problem for _, own in offers for problem in own]
        found = [*agreement.problems, *found, *unused_layouts(tables, agreement, agreement.names)]
        if found:
            raise refusal(operation, found)
        names.extend(agreement.names)
        return [agreement.joint.steps_of(rank) for rank in range(len(tables))]

    steps = phases.through_coordinator("plan", offer, agree_for_all, doing="ranks agreed on layouts")
    return described[0], steps, names


def held_tensors(endpoint: Endpoint, steps: Mapping[str, Steps]) -> list[HeldTensor]:
    """What each tensor of an endpoint is, in their order."""
    held = []
    for fqn in dict.fromkeys(endpoint.names):
        entry = endpoint.entries[fqn]
        if isinstance(entry, TensorEntry):
            shard = shard_of(entry.report, steps.get(fqn))
            held.append(HeldTensor(fqn, shard, tuple(entry.global_shape), None))
            continue
        assert isinstance(entry, BoxesEntry)
        for box in entry.boxes:
            offsets, sizes = tuple(box[0]), tuple(box[1])
            chunks = () if 0 in sizes else (Chunk(offsets, sizes, (0,) * len(sizes)),)
            shard = LocalShard(sizes, chunks)
            held.append(HeldTensor(fqn, shard, tuple(entry.global_shape), (offsets, sizes)))
    return held


def sums_of_tensors(endpoint: Endpoint, steps: Mapping[str, Steps], fqns: Container[str] | None = None) -> SumTable:
    """The sums of the tensors of an endpoint, or of some of them."""
    summer = TensorSummer()
    for fqn, entry in endpoint.entries.items():
        if isinstance(entry, TensorEntry | BoxesEntry) and (fqns is None or fqn in fqns):
            summer.add(fqn, endpoint.values[fqn], entry, steps.get(fqn))
    return summer.table()


def sums_of_elements(endpoint: Endpoint, held: Sequence[HeldTensor], sums: Sequence[int]) -> SumTable:
    """Sums of some elements of each held tensor, by key and box. A rank may hold one box several times."""
    summer, table = TensorSummer(), SumTable()
    of_keys: dict[str, dict[Any, int]] = {one.fqn: {} for one in held}
    for one, total in zip(held, sums, strict=True):
        if one.box is None or 0 not in one.box[1]:
            of_keys[one.fqn][one.box] = total
    for fqn, of_key in of_keys.items():
        entry = endpoint.entries[fqn]
        assert isinstance(entry, TensorEntry | BoxesEntry)
        table.add_key(fqn, of_key, replica=summer.replica_of(entry))
    return table
