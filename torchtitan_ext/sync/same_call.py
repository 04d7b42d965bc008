"""Ranks agree on what is synced before anything moves: one small exchange, and a second one only where they do not.

Each rank sends one digest per batch and one of the call's arguments. All ranks read the same digests, so all come to
the same verdict: they agree where the digests of each batch are equal and every member of its group sent one. Where
they do not, ranks exchange their full tables, and every rank works out the same list of differences.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torchtitan_ext import ops
from torchtitan_ext.errors import (
    Problem,
    StateRefusedError,
    SyncMismatchError,
    WrongArgumentError,
    differing,
    named_ranks,
)
from torchtitan_ext.ranks.exchange import gather_values, scope_ranks
from torchtitan_ext.sync.batches import Batch, BatchKey, ListBatch, ReplicaBatches, ReplicaTensor
from torchtitan_ext.sync.calls import Call, digest_of
from torchtitan_ext.sync.slices import SliceDigest, are_slices_equal
from torchtitan_ext.sync.tensors import listed_fault

Row = dict[str, str]
"""What replicas of one tensor must agree on, by name."""


@dataclass(frozen=True)
class CallDigest:
    """A rank's call, as it is sent first. ``is_refused``: the rank has found a problem.

    ``batches`` has, by the digest of a batch's key, the size of its group and digests of its structure and content.
    Ranks need not agree on ``slices``.
    """

    is_refused: bool
    arguments: bytes
    batches: dict[bytes, tuple[int, bytes, bytes]]
    slices: tuple[SliceDigest, ...] = ()


@dataclass(frozen=True)
class CallTable:
    """A rank's call in full, as it is sent where digests differ."""

    arguments: dict[str, str]
    problems: tuple[Problem, ...]
    batches: dict[BatchKey, list[tuple[str, Row]]]
    tied: dict[str, str] = field(default_factory=dict)
    num_listed: int = 0


def confirm_same_call(
    call: Call,
    replicas: ReplicaBatches,
    contents: Mapping[BatchKey, bytes] | None = None,
    slices: tuple[SliceDigest, ...] = (),
) -> Sequence[CallDigest]:
    """Has all ranks agree on what they are about to do; returns their digests. Collective over the scope of the call.

    ``contents`` are digests of the values of each batch, for ranks to compare. Without them the call will write into
    the tensors, and those whose elements share memory are refused. Errors are the same on every rank.
    """
    batches, problems = replicas.batches, list(replicas.problems)
    structures: dict[BatchKey, bytes] = {}
    for key, batch in batches.items():
        if contents is None:
            structure, faults = _check_writable(batch.tensors)
            problems += faults
        else:
            structure = [f"{tensor.dtype}{tuple(tensor.shape)}" for tensor in batch.locals]
        structures[key] = digest_of([batch.group.group_name, str(batch.src), *structure, *batch.names])
    if contents is None and len(batches) > 1:
        problems += _shared_memory(replicas)
    arguments = call.agreed_texts()
    digest = CallDigest(
        is_refused=bool(problems),
        arguments=digest_of([*(f"{name}={text}" for name, text in arguments.items()), str(replicas.num_listed)]),
        batches={
            digest_of([repr(key)]): (len(key[1]), structure, (contents or {}).get(key, b""))
            for key, structure in structures.items()
        },
        slices=slices,
    )
    digests = gather_values(digest, call.scope, opening=call.opening())
    if _is_agreed(digests):
        return digests
    rows = {key: [_row(batch, tensor) for tensor in batch.tensors] for key, batch in batches.items()}
    table = CallTable(arguments, tuple(problems), rows, replicas.tied, replicas.num_listed)
    raise _mismatch(
        dict(zip(scope_ranks(call.scope), gather_values(table, call.scope, opening=call.opening()), strict=True))
    )


def _mismatch(tables: Mapping[int, CallTable]) -> StateRefusedError:
    operation = " and ".join(dict.fromkeys(table.arguments["operation"] for table in tables.values()))
    found = tuple(dict.fromkeys(compare_tables(tables)))
    wrong = tuple(problem for problem in found if problem.kind == "wrong_argument")
    if wrong:  # what else differs follows from it
        return WrongArgumentError(operation, wrong)
    unexplained = Problem("ranks_disagree", "arguments", "are not the same on all ranks; please report")
    return SyncMismatchError(operation, found or (unexplained,))


def _is_agreed(digests: Sequence[CallDigest]) -> bool:
    if any(digest.is_refused or digest.arguments != digests[0].arguments for digest in digests):
        return False
    members: dict[bytes, list[tuple[int, bytes]]] = {}
    for digest in digests:
        for key, (size, structure, _) in digest.batches.items():
            members.setdefault(key, []).append((size, structure))
    return all(len(set(of_batch)) == 1 and len(of_batch) == of_batch[0][0] for of_batch in members.values())


def are_equal(digests: Sequence[CallDigest]) -> bool:
    """Whether all members of each batch have equal contents, and all slices too."""
    contents: dict[bytes, bytes] = {}
    return all(
        contents.setdefault(key, content) == content
        for digest in digests
        for key, (_, _, content) in digest.batches.items()
    ) and are_slices_equal([digest.slices for digest in digests])


def _shared_memory(replicas: ReplicaBatches) -> list[Problem]:
    """Tensors of different batches that overlap; ``_check_writable`` of each batch finds those of one batch."""
    devices = dict.fromkeys(tensor.local.device for tensor in replicas.tensors)
    checks = (
        _check_writable([tensor for tensor in replicas.tensors if tensor.local.device == device]) for device in devices
    )
    return [problem for _, problems in checks for problem in problems]


def _check_writable(tensors: Sequence[ReplicaTensor]) -> tuple[list[str], list[Problem]]:
    """The structure that ranks must agree on, and why this rank cannot receive into the tensors.

    The op stops at the first tensor that it refuses. Tensors of modules with such faults were named before; those of a
    plain list are all named here.
    """
    try:
        check = ops.check_broadcast([tensor.local for tensor in tensors])
    except Exception as error:  # perhaps on this rank alone: every rank must get it
        return [], _named_faults(tensors) or [Problem("cannot_sync", "arguments", str(error).split(": ", 1)[-1])]
    if not check.positions:
        return [str(word) for word in check.digest], []
    names = [tensors[position].fqn for position in check.positions]
    reason = check.reason if len(names) == 1 else f"{' and '.join(names)} {check.reason}"
    return [], _named_faults(tensors) or [Problem("cannot_sync", names[0], reason)]


def _named_faults(tensors: Sequence[ReplicaTensor]) -> list[Problem]:
    faults = [listed_fault(tensor.fqn, tensor.local) for tensor in tensors]
    return [fault for fault in faults if fault is not None]


def _row(batch: Batch | ListBatch, tensor: ReplicaTensor) -> tuple[str, Row]:
    return tensor.fqn, {
        "shape": str(tuple(tensor.local.shape)),
        "dtype": str(tensor.local.dtype),
        "layout": tensor.layout or "a plain tensor",
        "process group": batch.group.group_name,
        "source": str(batch.src),
    }


def compare_tables(tables: Mapping[int, CallTable]) -> list[Problem]:
    """All that ranks disagree on, by their tables. Pure, so every rank finds the same."""
    problems = [problem for table in tables.values() for problem in table.problems]
    names = [list(table.arguments) for table in tables.values()]
    for name in names[0]:
        if all(name in others for others in names):  # another operation has other arguments
            problems += differing(
                name, [table.arguments[name] for table in tables.values()], ranks=list(tables), show=str
            )
    for key in sorted({key for table in tables.values() for key in table.batches}):
        problems += _compare_batch(key, {rank: tables[rank] for rank in key[1] if rank in tables})
    if problems:
        return problems
    # Lists that differ in nothing else differ in tied tensors.
    lengths = [f"of {table.num_listed} tensors" for table in tables.values()]
    return differing("tensors", lengths, ranks=list(tables), verb="is a list", show=str)


def _compare_batch(key: BatchKey, tables: Mapping[int, CallTable]) -> list[Problem]:
    problems = []
    outside = [rank for rank in key[1] if rank not in tables]
    if outside:
        what = f"{named_ranks(outside)} of the group {named_ranks(key[1])} take no part in this call"
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
            values = [rows[rank][fqn][name] for rank in lists]
            problems += differing(fqn, values, ranks=list(lists), verb=f"{name} is", show=str)
    orders = {rank: tuple(fqn for fqn, _ in entries) for rank, entries in lists.items()}
    if common and len(set(orders.values())) > 1:
        problems.append(_other_order(orders))
    return problems


def _absence(fqn: str, device_type: str, tables: Mapping[int, CallTable], absent: Sequence[int]) -> str:
    """Some ranks of a group have a tensor; on the others it is missing, or is tied to another one."""
    present = [rank for rank in tables if rank not in absent]
    tied = [rank for rank in absent if fqn in tables[rank].tied]
    if not tied:
        return (
            f"is a replica on {device_type} on {named_ranks(present)}, not on {named_ranks(absent)} of the same group"
        )
    other = tables[tied[0]].tied[fqn]
    own = f"memory of its own on {named_ranks(present)}"
    return f"has the memory of {other} on {named_ranks(tied)}, {own}; tie it on all or none"


def _other_order(orders: Mapping[int, tuple[str, ...]]) -> Problem:
    first = next(iter(orders.values()))
    other = next(rank for rank in orders if orders[rank] != first)
    at, name = next((at, fqn) for at, fqn in enumerate(first) if orders[other][at : at + 1] != (fqn,))
    what = f"is at position {at} on rank {next(iter(orders))}, in other order on rank {other}"
    return Problem("ranks_disagree", name, what)
