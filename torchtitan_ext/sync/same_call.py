"""Ranks agree on what is synced before anything moves: one small exchange, and a second one only where they do not.

Each rank sends a digest per batch (``replicas.Batch``) and one of its options. All ranks read the same records, so all
come to the same verdict: the digests of a batch are equal and every member of its group sent one. If not, the full
tables are exchanged, and every rank works out the same list of differences.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from torchtitan_ext import ops
from torchtitan_ext.errors import Problem, StateRefusedError, SyncMismatchError, WrongArgumentError, named
from torchtitan_ext.ranks.exchange import Scope, gather_values, scope_ranks
from torchtitan_ext.sync.faults import listed_fault
from torchtitan_ext.sync.options import Options
from torchtitan_ext.sync.presumed import PartSummary, are_parts_equal
from torchtitan_ext.sync.replicas import Batch, BatchKey, ListBatch, Replicas, ReplicaTensor

Row = dict[str, str]
"""What replicas of one tensor must agree on, by name."""


@dataclass(frozen=True)
class Record:
    """What a rank sends first. ``batches``: per digest of a key the size of the group, structure and content."""

    is_refused: bool
    options: bytes
    batches: dict[bytes, tuple[int, bytes, bytes]]
    parts: tuple[PartSummary, ...] = ()


@dataclass(frozen=True)
class Table:
    """What a rank sends when records do not agree."""

    options: dict[str, str]
    problems: tuple[Problem, ...]
    batches: dict[BatchKey, list[tuple[str, Row]]]
    tied: dict[str, str] = field(default_factory=dict)
    num_listed: int = 0


def confirm_same_call(
    operation: str,
    scope: Scope,
    options: Options,
    replicas: Replicas,
    contents: Mapping[BatchKey, bytes] | None = None,
    parts: tuple[PartSummary, ...] = (),
) -> Sequence[Record]:
    """Has all ranks of a scope agree on what they are about to do. Collective over the scope.

    Args:
        operation: For messages, and itself agreed on.
        options: Arguments that must be the same everywhere.
        replicas: Of this rank. Its problems are raised on every rank.
        contents: Digest of the values of each batch: given where these are compared. Else the tensors are to be
            received into, and those that cannot be, because their elements share memory, are refused.
        parts: What this rank holds on meshes that not all ranks are on; ranks need not agree on it.

    Returns:
        What all ranks sent.

    Raises:
        SyncMismatchError: The same on every rank; ``WrongArgumentError`` where an argument is of a wrong type.
    """
    batches, problems = replicas.batches, list(replicas.problems)
    is_read = contents is not None
    structures: dict[BatchKey, bytes] = {}
    for key, batch in batches.items():
        structure, faults = (_read_structure(batch), []) if is_read else _check(batch.tensors)
        problems += faults
        structures[key] = _digest([batch.group.group_name, str(batch.src), *structure, *batch.names])
    problems += [] if is_read else _shared_memory(replicas)
    own_options = {
        "operation": operation,
        "mesh": _place(scope),
        **{name: _written(value) for name, value in vars(options).items()},
    }
    record = Record(
        is_refused=bool(problems),
        options=_digest([*(f"{name}={value}" for name, value in own_options.items()), str(replicas.num_listed)]),
        batches={
            _digest([repr(key)]): (len(key[1]), structure, (contents or {}).get(key, b""))
            for key, structure in structures.items()
        },
        parts=parts,
    )
    records = gather_values(record, scope)
    if _is_agreed(records):
        return records
    table = Table(
        options=own_options,
        problems=tuple(problems),
        batches={key: [_row(batch, tensor) for tensor in batch.tensors] for key, batch in batches.items()},
        tied=replicas.tied,
        num_listed=replicas.num_listed,
    )
    tables = dict(zip(scope_ranks(scope), gather_values(table, scope), strict=True))
    raise _mismatch(tables)


def _mismatch(tables: Mapping[int, Table]) -> StateRefusedError:
    operation = " and ".join(dict.fromkeys(table.options["operation"] for table in tables.values()))
    found = tuple(dict.fromkeys(compare_tables(tables)))
    wrong = tuple(problem for problem in found if problem.kind == "wrong_argument")
    if wrong:  # what else differs follows from it
        return WrongArgumentError(operation, wrong)
    unexplained = Problem("ranks_disagree", "arguments", "are not the same on all ranks; please report")
    return SyncMismatchError(operation, found or (unexplained,))


def _is_agreed(records: Sequence[Record]) -> bool:
    if any(record.is_refused or record.options != records[0].options for record in records):
        return False
    counts: dict[bytes, int] = {}
    first: dict[bytes, tuple[int, bytes]] = {}
    for record in records:
        for key, (size, structure, _) in record.batches.items():
            counts[key] = counts.get(key, 0) + 1
            if first.setdefault(key, (size, structure)) != (size, structure):
                return False
    return all(counts[key] == size for key, (size, _) in first.items())


def are_equal(records: Sequence[Record]) -> bool:
    """Whether the contents of every batch, on whatever ranks, are equal on all its members, and those of all parts."""
    contents: dict[bytes, bytes] = {}
    return all(
        contents.setdefault(key, content) == content
        for record in records
        for key, (_, _, content) in record.batches.items()
    ) and are_parts_equal([record.parts for record in records])


def _shared_memory(replicas: Replicas) -> list[Problem]:
    """Tensors of different batches that overlap; those of one batch are found with its structure."""
    if len(replicas.batches) < 2:
        return []
    problems = []
    for device in dict.fromkeys(tensor.local.device for tensor in replicas.tensors):
        there = [tensor for tensor in replicas.tensors if tensor.local.device == device]
        problems += _check(there)[1]
    return problems


def _check(tensors: Sequence[ReplicaTensor]) -> tuple[list[str], list[Problem]]:
    """What ranks must agree on of these tensors, and why this rank cannot take part.

    The op stops at the first tensor that it refuses. Of a batch, tensors with such faults are named before they get
    here; of a plain list they are all named now.
    """
    try:
        check = ops.check_broadcast([tensor.local for tensor in tensors])
    except Exception as error:  # of this rank alone, perhaps: all must hear of it
        return [], _named_faults(tensors) or [Problem("cannot_sync", "arguments", str(error).split(": ", 1)[-1])]
    if not check.positions:
        return [str(word) for word in check.digest], []
    names = [tensors[position].fqn for position in check.positions]
    reason = check.reason if len(names) == 1 else f"{' and '.join(names)} {check.reason}"
    return [], _named_faults(tensors) or [Problem("cannot_sync", names[0], reason)]


def _named_faults(tensors: Sequence[ReplicaTensor]) -> list[Problem]:
    faults = [listed_fault(tensor.fqn, tensor.local) for tensor in tensors]
    return [fault for fault in faults if fault is not None]


def _written(option: Any) -> str:
    """An option as text. Collections of names are sorted: a set has another order on every rank."""
    is_names = isinstance(option, (list, tuple, set, frozenset))
    return str(sorted(map(repr, option))) if is_names else repr(option)


def _place(scope: Scope) -> str:
    if not isinstance(scope, DeviceMesh):
        return "left out"
    ranks = scope_ranks(scope)
    return f"{tuple(scope.mesh.shape)} over {len(ranks)} ranks from {ranks[0]} to {ranks[-1]}"


def _read_structure(batch: Batch | ListBatch) -> list[str]:
    return [f"{tensor.dtype}{tuple(tensor.shape)}" for tensor in batch.locals]


def _row(batch: Batch | ListBatch, tensor: ReplicaTensor) -> tuple[str, Row]:
    return tensor.fqn, {
        "shape": str(tuple(tensor.local.shape)),
        "dtype": str(tensor.local.dtype),
        "layout": tensor.layout or "a plain tensor",
        "process group": batch.group.group_name,
        "source": str(batch.src),
    }


def _digest(texts: Iterable[str]) -> bytes:
    joined = "".join(f"{len(text)}:{text}" for text in texts)
    return hashlib.blake2b(joined.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def compare_tables(tables: Mapping[int, Table]) -> list[Problem]:
    """Everything in which ranks disagree: a pure function, the same on every rank.

    Args:
        tables: By global rank.
    """
    problems = [problem for table in tables.values() for problem in table.problems]
    names = dict.fromkeys(name for table in tables.values() for name in table.options)
    for name in names:
        values = {rank: table.options.get(name, "nothing") for rank, table in tables.items()}
        if len(set(values.values())) > 1:
            problems.append(Problem("ranks_disagree", name, f"is {_by_ranks(values)}"))
    for key in sorted({key for table in tables.values() for key in table.batches}):
        problems += _compare_batch(key, {rank: tables[rank] for rank in key[1] if rank in tables})
    lengths = {rank: f"of {table.num_listed} tensors" for rank, table in tables.items()}
    if not problems and len(set(lengths.values())) > 1:  # what is only on some ranks is tied to what is on all
        problems.append(Problem("ranks_disagree", "tensors", f"is a list {_by_ranks(lengths)}"))
    return problems


def _compare_batch(key: BatchKey, tables: Mapping[int, Table]) -> list[Problem]:
    problems = []
    outside = [rank for rank in key[1] if rank not in tables]
    if outside:
        what = f"{_ranks(outside)} of the group {_ranks(key[1])} take no part in this call"
        problems.append(Problem("ranks_disagree", "group", what))
    lists = {rank: table.batches.get(key, []) for rank, table in tables.items()}
    rows = {rank: dict(entries) for rank, entries in lists.items()}
    common = True
    for fqn in dict.fromkeys(fqn for entries in lists.values() for fqn, _ in entries):
        absent = [rank for rank in lists if fqn not in rows[rank]]
        if absent:
            common = False
            problems.append(Problem("ranks_disagree", fqn, _absence(fqn, key[2], tables, absent)))
            continue
        for name in rows[next(iter(rows))][fqn]:
            values = {rank: rows[rank][fqn][name] for rank in lists}
            if len(set(values.values())) > 1:
                problems.append(Problem("ranks_disagree", fqn, f"{name} is {_by_ranks(values)}"))
    orders = {rank: tuple(fqn for fqn, _ in entries) for rank, entries in lists.items()}
    if common and len(set(orders.values())) > 1:
        problems.append(_other_order(orders))
    return problems


def _absence(fqn: str, device_type: str, tables: Mapping[int, Table], absent: Sequence[int]) -> str:
    """A tensor that some ranks of a group have and others have not, or have only as another name of one."""
    present = [rank for rank in tables if rank not in absent]
    tied = [rank for rank in absent if fqn in tables[rank].tied]
    if not tied:
        return f"is a replica on {device_type} on {_ranks(present)}, not on {_ranks(absent)} of the same group"
    other = tables[tied[0]].tied[fqn]
    return f"has the memory of {other} on {_ranks(tied)}, memory of its own on {_ranks(present)}; tie it on all or none"


def _other_order(orders: Mapping[int, tuple[str, ...]]) -> Problem:
    first = next(iter(orders.values()))
    other = next(rank for rank in orders if orders[rank] != first)
    at, name = next((at, fqn) for at, fqn in enumerate(first) if orders[other][at : at + 1] != (fqn,))
    what = f"is at position {at} on rank {next(iter(orders))}, in other order on rank {other}"
    return Problem("ranks_disagree", name, what)


def _by_ranks(values: Mapping[int, str]) -> str:
    """For example "(2, 3) on rank 0, (3, 2) on ranks 1, 2"."""
    by_value: dict[str, list[int]] = {}
    for rank, value in values.items():
        by_value.setdefault(value, []).append(rank)
    return ", ".join(f"{value} on {_ranks(ranks)}" for value, ranks in by_value.items())


def _ranks(ranks: Sequence[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {named(ranks, 8)}"
