"""Of which keys of a source each key of a target is made: of one with its name, or of those that a transform says."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from torchtitan_ext import _core, ops
from torchtitan_ext.checkpoint.rules.casts import CastPolicy, cast_problem, is_exact
from torchtitan_ext.checkpoint.tables.agreement import Agreement, dtype_named
from torchtitan_ext.errors import Problem
from torchtitan_ext.errors.near_names import nearest_name
from torchtitan_ext.storage.raw_tensor import DTYPES, dtype_name
from torchtitan_ext.transforms import Transform

_FP8 = "float8_"


@dataclass
class KeySources:
    """What keys of a target are made of. Keys have numbers, in two worlds.

    Attributes:
        source_of: Per key of the target the key of the source that it is; ``NO_KEY`` for others.
        mapped: Keys that a map makes of keys of the source, and the number of the dtype to which the sender converts.
        renamed: Of each key of the target, by name, the key of the source that it is, or is asked for by.
        problems: Keys that have no source, or another one than the target can take.
    """

    source_of: list[int]
    renamed: Mapping[str, str]
    mapped: list[tuple[int, _core.TensorMap, int]] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


def same_keys(
    source: Agreement, target: Agreement, renamed: Mapping[str, str], problems: Iterable[Problem]
) -> KeySources:
    """By name. A key that its ranks could not describe, as ``problems`` say, is not missing."""
    found = KeySources([_core.NO_KEY] * len(target.names), renamed)
    undescribed = {problem.fqn for problem in problems}
    for number, fqn in enumerate(target.names):
        if number not in target.agreed_keys:
            continue
        held = source.number_of.get(renamed[fqn])
        if held is None:
            if renamed[fqn] not in undescribed:
                found.problems.append(_missing(fqn, renamed[fqn], source.names, "the source does not have it"))
        elif held in source.agreed_keys:
            found.source_of[number] = held
    return found


def mapped_keys(
    transform: Transform, source: Agreement, target: Agreement, renamed: Mapping[str, str], cast: CastPolicy
) -> KeySources:
    """By a transform, over two sides that are agreed on.

    Raises:
        TransformError: The transform does not fit the source; all problems.
    """
    kinds = [source.kinds[source.agreed_keys[number]] for number in range(len(source.names))]
    sources = [
        (fqn, "" if kind.is_object else _name_of(kind), tuple(kind.global_shape))
        for fqn, kind in zip(source.names, kinds, strict=True)
    ]
    made = {one.name: one for one in transform.resolve(sources, "reshard")}
    found = KeySources([_core.NO_KEY] * len(target.names), dict(renamed))
    for number, fqn in enumerate(target.names):
        one, wanted = made.get(renamed[fqn]), target.kinds[target.agreed_keys[number]]
        if one is None:
            what = "the transform does not make it of the source"
            found.problems.append(_missing(fqn, renamed[fqn], list(made), what))
            continue
        same = one.value if not one.dtypes else _same_tensor(one, kinds)
        if same is not None:
            found.source_of[number] = same
            found.renamed = {**found.renamed, fqn: source.names[same]}
            continue
        problem, cast_to = _fit(fqn, one, wanted, cast)
        if problem is None:
            found.mapped.append((number, one.values, cast_to))
        else:
            found.problems.append(problem)
    return found


def _same_tensor(one: _core.MappedTensor, kinds: Sequence[_core.KeyKind]) -> int | None:
    """The key of the source which this is, element by element, maybe under another name."""
    held = one.values.source_in_place()
    if held is None or len(one.dtypes) > 1 or one.scales is not None:
        return None
    return held if tuple(one.values.shape) == tuple(kinds[held].global_shape) else None


def _fit(fqn: str, one: _core.MappedTensor, wanted: _core.KeyKind, cast: CastPolicy) -> tuple[Problem | None, int]:
    """Why a target cannot be what a transform makes; and the number of the dtype to which it is converted, or -1."""
    if wanted.is_object:
        what = "is a tensor by the transform, a value that is no tensor in the target"
        return Problem("wrong_type", fqn, what), -1
    shape = tuple(one.values.shape)
    if shape != tuple(wanted.global_shape):
        what = f"has shape {shape} by the transform, {tuple(wanted.global_shape)} in the target"
        return Problem("wrong_shape", fqn, what), -1
    if one.scales is not None:
        what = "is made by dequantize, which a reshard does not; send the values and their scales as they are"
        return Problem("wrong_transform", fqn, what), -1
    if any(name not in DTYPES for name in one.dtypes):
        what = f"is made of {one.dtypes[0]}, which is no plain memory; name its sources in drop"
        return Problem("wrong_transform", fqn, what), -1
    dtype = dtype_of(wanted)
    passed = [DTYPES[name] for name in one.dtypes]
    problem = cast_problem(fqn, passed[-1], dtype, cast, has="the transform gives") or fp8_problem(
        fqn, passed[-1], dtype
    )
    passed = [*passed, dtype]
    for before, after in zip(passed, passed[1:-1], strict=False):
        if problem is None and not is_exact(before, after) and after != dtype:
            what = f"is rounded to {after} on its way to {dtype}, and a reshard converts once; leave that cast out"
            problem = Problem("wrong_transform", fqn, what)
    return problem, -1 if dtype == passed[0] else ops.dtype_number(dtype)


def fp8_problem(fqn: str, source: torch.dtype, target: torch.dtype) -> Problem | None:
    """Values of other dtypes do not fit fp8 without scales: who wants that says so by a step of a transform."""
    if not dtype_name(target).startswith(_FP8) or dtype_name(source).startswith(_FP8):
        return None
    name = dtype_name(target)
    what = (
        f"is {source} in the source, {target} in the target, whose few values need scales; "
        f"convert without them: transforms.cast({name!r}), in a rule of a transform"
    )
    return Problem("wrong_dtype", fqn, what)


def dtype_of(kind: _core.KeyKind) -> torch.dtype:
    """The dtype of a tensor."""
    dtype = dtype_named(kind.dtype)
    assert dtype is not None, "a tensor has a dtype, please report"
    return dtype


def _name_of(kind: _core.KeyKind) -> str:
    return dtype_name(dtype_of(kind))


def _missing(fqn: str, source_name: str, names: Sequence[str], what: str) -> Problem:
    near = nearest_name(source_name, names)
    asked = "" if source_name == fqn else f" as {source_name}"
    hint = "" if near is None else f"; perhaps {near} is meant: pass rename={{{fqn!r}: {near!r}}}"
    return Problem("missing_key", fqn, f"{what}{asked}{hint}")
