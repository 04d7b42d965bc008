"""The sentences of an agreement: what is wrong with a class of keys, from the codes that C++ gives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torchtitan_ext import _core
from torchtitan_ext.checkpoint.tables.key_table import BOXES, OBJECT, TENSOR, Box
from torchtitan_ext.errors import Problem
from torchtitan_ext.layout.layout import MeshLayout, ShardReport, describe_report, format_placements, unresolved

_TYPE_NAMES = {OBJECT: "non-tensor value", TENSOR: "tensor", BOXES: "tensor that describes itself"}


def class_problem(world: _core.World, of_class: int, fqn: str) -> Problem:
    """What is wrong with a key of a class that has a trouble."""
    trouble = world.trouble(of_class)
    assert trouble is not None
    code, first, second, rest = trouble
    if code in ("type", "dtype", "shape"):
        values = []
        for rank in (first, second):
            kind, dtype, shape = world.traits(of_class, rank)
            values.append({"type": _TYPE_NAMES[kind], "dtype": dtype, "shape": shape}[code])
        what = "a" if code == "type" else code
        return Problem(
            "ranks_disagree",
            fqn,
            f"rank {first} has {what} {values[0]}, rank {second} has {what} {values[1]}; "
            "give different values different keys",
        )
    report = _report(world, of_class, first)
    if code == "not_exact":
        what, element, holders = rest
        return cover_problem(fqn, report.global_shape, "incomplete_cover", what, element, holders)
    if code == "absent":
        return _absent_problem(fqn, report, rest)
    if code == "invalid":
        return Problem("layout_matches_nothing", fqn, f"{describe_report(report)}: {rest}")
    index, other, coordinate = rest
    held = _report(world, of_class, second).local_sizes
    outcome: Literal["in_doubt", "no_match"] = "in_doubt" if code == "in_doubt" else "no_match"
    return unresolved(fqn, report, outcome, index, other, coordinate, held)


def _report(world: _core.World, of_class: int, rank: int) -> ShardReport:
    shape, mesh, coordinate, placements, local_sizes, order = world.report(of_class, rank)
    layout = None if mesh is None else MeshLayout(*mesh)
    return ShardReport(shape, layout, coordinate, placements, local_sizes, order)


def _absent_problem(fqn: str, report: ShardReport, absent: Sequence[int]) -> Problem:
    return Problem(
        "incomplete_cover",
        fqn,
        f"rank(s) {', '.join(map(str, absent[:8]))}{', ...' if len(absent) > 8 else ''} of its mesh ({report.mesh}), "
        f"placements {format_placements(report.placements)}, take no part; "
        "pass a process group that holds the whole mesh",
    )


def cover_problem(
    fqn: str,
    global_shape: tuple[int, ...],
    kind: Literal["incomplete_cover", "broken_checkpoint"],
    what: str,
    element: tuple[int, ...],
    holders: Sequence[tuple[Box, int | None]],
) -> Problem:
    """That an element is held by no chunk, by several, or lies outside.

    Args:
        what: "gap", "overlap" or "out_of_bounds".
        element: The first such one.
        holders: The chunks that hold it, with their ranks where they are known.
    """
    if what == "gap":
        found = "is held by no rank" if kind == "incomplete_cover" else "is in no saved chunk"
    else:
        named = "; ".join(
            f"{offsets}+{sizes}" + ("" if owner is None else f" of rank {owner}")
            for (offsets, sizes), owner in holders[:4]
        )
        found = f"lies outside the tensor, in chunk {named}" if what == "out_of_bounds" else f"is in chunks {named}"
    return Problem(kind, fqn, f"{what.replace('_', ' ')} in shape {tuple(global_shape)}: element {element} {found}")
