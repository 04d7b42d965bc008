"""What the tables of all ranks say together: agreement, cover, replicas. Pure, on plain values."""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from agreement_oracle import TensorAgreement, agreed_keys

from torchtitan_ext import _core
from torchtitan_ext.checkpoint.planners.replica_digests import compare_replicas
from torchtitan_ext.checkpoint.tables.agreement import Agreement, agree
from torchtitan_ext.checkpoint.tables.key_table import (
    BoxesEntry,
    KeyEntry,
    KeyTable,
    ObjectEntry,
    RankTable,
    TensorEntry,
    encode_table,
)
from torchtitan_ext.errors import Problem
from torchtitan_ext.layout.layout import MeshLayout, ShardReport


def plain(shape: tuple[int, ...] = (4,), dtype: torch.dtype = torch.float32) -> TensorEntry:
    return TensorEntry(ShardReport(global_shape=shape, local_sizes=shape), dtype, False)


def shard(
    rank: int,
    *,
    rows: int = 4,
    local: int | None = None,
    mesh: tuple[int, ...] = (2,),
    placements: tuple[tuple[int, int], ...] = ((0, 1),),
) -> TensorEntry:
    """Rank's part of a tensor of `rows` rows; `local` rows are here, half of them by default."""
    coordinate = (rank,) if len(mesh) == 1 else divmod(rank, mesh[1])
    layout = MeshLayout(mesh, tuple(range(torch.Size(mesh).numel())), None)
    sizes = (rows // 2 if local is None else local,)
    return TensorEntry(ShardReport((rows,), layout, coordinate, placements, sizes), torch.float32, False)


def tables(*per_rank: dict[str, KeyEntry]) -> list[RankTable]:
    return [encode_table(KeyTable(entries)).message for entries in per_rank]


def problem_of(agreement: Agreement) -> Problem:
    (problem,) = agreement.problems
    assert problem.fqn not in agreed_keys(agreement)
    return problem


def tensor_of(agreement: Agreement, fqn: str = "w") -> TensorAgreement:
    assert agreement.problems == ()
    agreed = agreed_keys(agreement)[fqn]
    assert isinstance(agreed, TensorAgreement)
    return agreed


def test_shards_of_a_mesh_are_one_replica() -> None:
    agreed = tensor_of(agree(tables({"w": shard(0)}, {"w": shard(1)}), needs_all_ranks=True))
    assert agreed.replicas == ((_core.HeldShard((0,), (((0,), (2,)),)), _core.HeldShard((1,), (((2,), (2,)),))),)
    assert (agreed.global_shape, agreed.dtype, agreed.is_plain) == ((4,), torch.float32, False)


def test_ranks_that_hold_the_same_shard_are_named_together() -> None:
    hsdp: dict[str, Any] = {"mesh": (2, 2), "placements": ((-1, 1), (0, 1))}
    agreed = tensor_of(agree(tables(*({"w": shard(rank, **hsdp)} for rank in range(4))), needs_all_ranks=True))
    assert [held.ranks for held in agreed.replicas[0]] == [(0, 2), (1, 3)]


def test_every_plain_tensor_is_a_replica_of_its_own() -> None:
    agreed = tensor_of(agree(tables({"w": plain()}, {}, {"w": plain()}), needs_all_ranks=True))
    assert [held.ranks for (held,) in agreed.replicas] == [(0,), (2,)]
    assert agreed.is_plain


def test_uneven_shards_decide_the_reading_for_every_rank() -> None:
    # 9 rows, FSDP2 over TP on 4 x 2: nested chunks give rank (3, 0) no row, DTensor's arithmetic gives it one.
    strided: dict[str, Any] = {"rows": 9, "mesh": (4, 2), "placements": ((0, 2), (0, 1))}
    nested = [2, 1, 2, 1, 1, 1, 0, 1]
    agreed = tensor_of(
        agree(
            tables(*({"w": shard(rank, local=local, **strided)} for rank, local in enumerate(nested))),
            needs_all_ranks=True,
        )
    )
    assert set(agreed.steps.values()) == {((1, 0, 1), (0, 0, 1))}  # tp first, then dp
    assert sum(sizes[0] for held in agreed.replicas[0] for _, sizes in held.boxes) == 9


def test_keys_that_are_alike_but_for_their_sizes_have_readings_of_their_own() -> None:
    strided: dict[str, Any] = {"rows": 9, "mesh": (4, 2), "placements": ((0, 2), (0, 1))}
    sizes = zip([2, 1, 2, 1, 1, 1, 0, 1], [2, 1, 2, 1, 1, 1, 1, 0], strict=True)  # nested, and as DTensor cuts them
    states = ({"v": nested, "w": as_cut} for nested, as_cut in sizes)
    agreement = agree(
        tables(
            *(
                {key: shard(rank, local=local, **strided) for key, local in state.items()}
                for rank, state in enumerate(states)
            )
        ),
        needs_all_ranks=True,
    )
    assert set(tensor_of(agreement, "v").steps.values()) == {((1, 0, 1), (0, 0, 1))}
    assert set(tensor_of(agreement, "w").steps.values()) == {((0, 0, 2), (1, 0, 1))}


CONFLICTS: dict[str, tuple[KeyEntry, KeyEntry, str]] = {
    "shape": (plain((4,)), plain((5,)), r"rank 0 has shape \(4,\), rank 1 has shape \(5,\)"),
    "dtype": (plain(), plain(dtype=torch.int8), "rank 0 has dtype torch.float32, rank 1 has dtype torch.int8"),
    "kind": (plain(), ObjectEntry(), "rank 0 has a tensor, rank 1 has a non-tensor value"),
    "hooks": (plain(), BoxesEntry((4,), torch.float32, ()), "rank 1 has a tensor that describes itself"),
}


@pytest.mark.parametrize("name", CONFLICTS)
def test_ranks_that_disagree(name: str) -> None:
    left, right, words = CONFLICTS[name]
    problem = problem_of(agree(tables({"w": left, "x": plain()}, {"w": right}), needs_all_ranks=True))
    assert problem.kind == "ranks_disagree" and "; give different values different keys" in problem.detail
    assert re.search(words, problem.detail)


def test_a_rank_of_the_mesh_that_does_not_report() -> None:
    lone = tables({"w": shard(0)}, {})
    problem = problem_of(agree(lone, needs_all_ranks=True))
    assert problem.kind == "incomplete_cover" and "rank(s) 1 of its mesh" in problem.detail
    assert len(tensor_of(agree(lone, needs_all_ranks=False)).replicas[0]) == 1


def test_local_tensors_that_fit_no_reading() -> None:
    problem = problem_of(agree(tables({"w": shard(0, local=3)}, {"w": shard(1, local=1)}), needs_all_ranks=True))
    assert problem.kind == "layout_matches_nothing" and "rank 0 holds a local tensor of shape (3,)" in problem.detail


def test_boxes_that_tensors_state_themselves_are_checked() -> None:
    def boxes(*spans: tuple[int, int]) -> BoxesEntry:
        return BoxesEntry((4,), torch.float32, tuple(((begin,), (end - begin,)) for begin, end in spans))

    whole = tables({"w": boxes((0, 1), (3, 4))}, {"w": boxes((1, 3))})
    assert len(tensor_of(agree(whole, needs_all_ranks=True)).replicas[0]) == 3
    gap = problem_of(agree(tables({"w": boxes((0, 1))}, {"w": boxes((2, 4))}), needs_all_ranks=True))
    assert "gap in shape (4,): element (1,) is held by no rank" in gap.detail
    overlap = problem_of(agree(tables({"w": boxes((0, 3))}, {"w": boxes((2, 4))}), needs_all_ranks=True))
    assert "overlap" in overlap.detail and "of rank 0" in overlap.detail and "of rank 1" in overlap.detail


@pytest.mark.parametrize("shape", [(0,), (0, 5), (5, 0, 2)], ids=str)
def test_a_tensor_without_elements_is_held_by_all(shape: tuple[int, ...]) -> None:
    agreed = tensor_of(agree(tables({"w": plain(shape)}, {"w": plain(shape)}), needs_all_ranks=True))
    assert [held.boxes for (held,) in agreed.replicas] == [(((0,) * len(shape), shape),)] * 2


def test_problems_of_ranks_come_first_and_all_are_kept() -> None:
    own = Problem("partial_placement", "p", "holds Partial")
    both = [replace(table, rest=KeyTable({}, problems=(own,))) for table in tables({"w": plain()}, {"w": plain((5,))})]
    assert [problem.fqn for problem in agree(both, needs_all_ranks=True).problems] == ["p", "p", "w"]


def differing(entry: KeyEntry, *digests: bytes | None) -> list[Problem]:
    held = [KeyTable({"w": entry}, {} if digest is None else {"w": digest}) for digest in digests]
    made = [encode_table(table).message for table in held]
    return compare_replicas(made, agree(made, needs_all_ranks=True)).differing


@pytest.mark.parametrize("entry", [ObjectEntry(), plain()], ids=["object", "plain"])
def test_replicas_with_other_digests(entry: KeyEntry) -> None:
    assert differing(entry, b"a", b"a", b"a") == []
    assert differing(entry, None, None) == []
    (problem,) = differing(entry, b"a", b"a", b"b", b"c")
    assert problem.kind == "replicas_differ" and "ranks 0 and 2 should hold the same" in problem.detail


def test_replicas_are_compared_within_a_shard_only() -> None:
    made = [
        encode_table(KeyTable({"w": shard(rank, mesh=(2, 2), placements=((-1, 1), (0, 1)))}, {"w": digest})).message
        for rank, digest in enumerate([b"left", b"right", b"left", b"other"])
    ]
    (problem,) = compare_replicas(made, agree(made, needs_all_ranks=True)).differing
    assert "ranks 1 and 3" in problem.detail


def test_cover() -> None:
    def cover(*boxes: tuple[tuple[int, ...], tuple[int, ...]]) -> str | None:
        return _core.describe_cover_defect((2, 3), boxes, None)

    assert cover(((0, 0), (2, 1)), ((0, 1), (2, 2))) is None
    assert "gap in shape (2, 3): element (0, 1) is in no saved chunk" in str(cover(((0, 0), (2, 1)), ((1, 1), (1, 2))))
    assert "overlap" in str(cover(((0, 0), (2, 2)), ((0, 1), (2, 2))))
    assert "lies outside the tensor" in str(cover(((0, 0), (2, 4))))
