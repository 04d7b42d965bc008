"""Places the tensors of a checkpoint on a mesh that is described by the names and sizes of its axes.

What decides which dim an axis cuts, in this order:
  1. A rule of the user: ``{"*.wo.weight": {"tp": 1}}`` cuts dim 1 by ``tp``; ``None`` for a dim replicates.
  2. The name: axes with *replicate* in their names replicate; other ``dp*`` and ``*fsdp*`` axes cut dim 0, as FSDP2
     does. A tensor that FSDP left whole is a buffer or a counter, and stays whole.
  3. The save: an axis that the mesh of the save had by the same name cuts the dim that it cut then. That dim is found
     by trying: it is the one that gives the saved boxes.
  4. A guess: a ``tp`` axis that the save had not cuts a dim beyond 0 that was cut; else dim 0 of matrices and nothing
     of vectors. Results report this guess (``is_assumed``).

Axes further right cut first, and FSDP cuts what tensor parallelism has left, as in ``csrc/core/shard_layout.h``:

    dp 4 x tp 2, 9 rows, both on dim 0:   tp 0: 0-4, tp 1: 5-8;   dp then cuts each by 4
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torchtitan_ext import _core
from torchtitan_ext.errors import Problem, Remedy, WrongValueError, argument_error, check_argument, named, refusal
from torchtitan_ext.layout.layout import (
    Box,
    MeshLayout,
    Steps,
    local_shards,
    num_elements,
    patterns_for,
    rule_applies,
    unused_problem,
)
from torchtitan_ext.layout.mesh_axes import is_data_parallel, is_fsdp, replicates
from torchtitan_ext.layout.world import World
from torchtitan_ext.storage.metadata.saved_state import SavedState

Placements = tuple[tuple[int, int], ...]
"""For each mesh axis the tensor dim, or -1 for replicated, and the split factor: as in ``ShardReport``."""

DimOf = Mapping[str, int | None]
"""The dim that each named axis cuts; ``None`` for an axis that replicates."""

_REPLICATED = (-1, 1)

MAX_RANKS = 65_536
"""The largest mesh: all ranks are worked out, and a typing error should not take all memory."""

_MAX_SHOWN = 4

# At most so many combinations of dims are tried: two axes of four-dimensional tensors have 25.
_MAX_COMBINATIONS = 200


class Placed(NamedTuple):
    """How one tensor lies on the mesh.

    Attributes:
        placements: ``None`` for a plain tensor, whole on every rank.
        steps: The order in which the tensor is cut.
        is_assumed: Whether the dim that ``tp`` cuts is a guess.
    """

    placements: Placements | None
    steps: Steps
    is_assumed: bool = False


class PlacementRules:
    """Places tensors on a mesh.

    Args:
        mesh: Size of each axis by name, leftmost first: ``{"dp_shard": 4, "tp": 2}``.
        rules: The dims that axes cut, by canonical fqn or glob, like the ``layouts`` of planners. A rule without
            wildcards comes before a glob, an earlier rule before a later one.
        saved: The checkpoint that has the tensors.
        operation: The call that messages name.

    Raises:
        TypeError: An argument has another type.
        WrongValueError: A size is below 1; nothing says what an axis cuts; a rule names an axis that the mesh lacks.
    """

    def __init__(
        self,
        mesh: Mapping[str, int],
        rules: Mapping[str, DimOf] | None = None,
        *,
        saved: SavedState | None = None,
        operation: str = "dry_run",
    ) -> None:
        self._operation = operation
        _check_mesh(operation, mesh)
        self._rules = _checked_rules(operation, rules, mesh)
        sizes = tuple(mesh.values())
        self.mesh = MeshLayout(sizes, tuple(range(num_elements(sizes))), tuple(mesh))
        old = World(0) if saved is None else saved.world
        self._old = World(old.size, {axis: size for axis, size in old.mesh.items() if size > 1})
        self._was_cut = _was_cut(saved, self._old.mesh)
        self._known: dict[tuple[tuple[int, ...], _core.ChunkIndex | None], tuple[DimOf | None, bool]] = {}
        for axis in mesh:
            _check_axis(axis, self._old.mesh, self._rules)

    def place(self, fqn: str, shape: Sequence[int], chunks: _core.ChunkIndex | None = None) -> Placed:
        """How a tensor lies on the mesh. A rule is ignored for a tensor that lacks its dim.

        Args:
            chunks: The chunks in which the tensor was saved; equal lists must be one object (``_core.SavedChunks``).
        """
        patterns = patterns_for(fqn, self._rules)
        stated = self._rules[patterns[0]] if patterns else {}
        rule = {axis: dim for axis, dim in stated.items() if _has_dim(shape, dim)}
        alike = (tuple(shape), chunks)
        if alike not in self._known:
            self._known[alike] = self._dims_by_default(tuple(shape), chunks)
        default, is_assumed = self._known[alike]
        if not rule and default is None:
            return Placed(None, ())
        dims = {**(default or {}), **rule}
        named = self.mesh.dim_names or ()
        of_axes = [dims.get(axis) for axis in named]
        placements = _placements([None if dim is None else dim % len(shape) for dim in of_axes], self.mesh.shape)
        return Placed(placements, self.steps(placements), is_assumed and "tp" not in rule)

    def steps(self, placements: Placements) -> Steps:
        """The order in which such placements cut: axes further right first."""
        return tuple(_core.read_placements(placements, self.mesh.shape, "nested"))

    def check_used(self, shapes: Mapping[str, Sequence[int] | None]) -> None:
        """Refuses rules that match none of these keys, or that name a dim which none of their tensors has.

        Args:
            shapes: The shape of each key's tensor; ``None`` for values that are no tensors.

        Raises:
            LayoutError: Names the rules, and for each the key that was probably meant.
        """
        unused = [pattern for pattern in self._rules if not any(rule_applies(pattern, fqn) for fqn in shapes)]
        problems = [unused_problem(pattern, shapes) for pattern in unused]
        if problems:
            raise refusal(self._operation, problems)
        for pattern, dims in self._rules.items():
            mine = {fqn: shape for fqn, shape in shapes.items() if shape is not None and rule_applies(pattern, fqn)}
            cut = {axis: dim for axis, dim in dims.items() if dim is not None}
            useless = [axis for axis, dim in cut.items() if not any(_has_dim(shape, dim) for shape in mine.values())]
            if useless:
                shown = [f"{fqn} {list(shape)}" for fqn, shape in mine.items()]
                detail = (
                    f"cuts nothing by {useless[0]}: no tensor that it matches has dim {cut[useless[0]]}; "
                    f"it matches {named(shown, _MAX_SHOWN) or 'values that are no tensors'}"
                )
                problems.append(Problem("unused_layout", pattern, detail))
        if problems:
            raise refusal(self._operation, problems)

    def _dims_by_default(self, shape: tuple[int, ...], chunks: _core.ChunkIndex | None) -> tuple[DimOf | None, bool]:
        """The dims that axes cut without a rule, or ``None`` for plain tensors, and whether one of them is a guess."""
        boxes = [] if chunks is None else chunks.boxes()
        if not shape or (self._was_cut and len(boxes) == 1 and shape[0] > 1):
            return None, False
        beyond = _dims_cut_beyond(shape, boxes)
        found: DimOf = {}
        is_assumed = False
        named = self.mesh.dim_names or ()
        if any(axis in self._old.mesh and not is_data_parallel(axis) for axis in named):
            found, is_assumed = _saved_dims(shape, boxes, self._old)
        dims: dict[str, int | None] = {}
        for axis in named:
            if is_data_parallel(axis):
                dims[axis] = None if replicates(axis) else 0
            elif axis in found:
                dims[axis] = found[axis]
            else:
                dims[axis] = beyond[0] if beyond else 0 if axis == "tp" and len(shape) > 1 else None
                is_assumed = is_assumed or (axis == "tp" and not beyond and len(shape) > 1)
        return dims, is_assumed


def _has_dim(shape: Sequence[int], dim: int | None) -> bool:
    return dim is None or -len(shape) <= dim < len(shape)


def parse_mesh(text: str) -> dict[str, int]:
    """``"dp=8,tp=2"`` as the description of a mesh. Raises WrongValueError for anything else."""
    mesh: dict[str, int] = {}
    for part in text.split(","):
        name, is_there, size = part.strip().partition("=")
        if not name or not is_there or not size.isdigit() or name in mesh:
            raise WrongValueError(f"got {text!r}, expected axes and sizes such as dp=8,tp=2", "mesh")
        mesh[name] = int(size)
    return mesh


def parse_rules(texts: Sequence[str]) -> dict[str, dict[str, int | None]]:
    """``["*.wo.weight=tp:1"]`` as rules; ``tp:none`` replicates. Raises WrongValueError for anything else."""
    rules: dict[str, dict[str, int | None]] = {}
    for text in texts:
        pattern, _, cuts = text.rpartition("=")
        for cut in cuts.split(","):
            axis, _, dim = cut.strip().partition(":")
            if not pattern or not axis or not (dim == "none" or dim.lstrip("-").isdigit()):
                expected = "a glob, axes and dims such as '*.wo.weight=tp:1'"
                raise WrongValueError(f"got {text!r}, expected {expected}", "placements")
            rules.setdefault(pattern, {})[axis] = None if dim == "none" else int(dim)
    return rules


def _check_mesh(operation: str, mesh: Any) -> None:
    """Raises TypeError or WrongValueError unless ``mesh`` has sizes of named axes, with at most ``MAX_RANKS`` ranks."""
    expected = "sizes of named axes such as {'dp': 8, 'tp': 2}"
    check_argument(operation, "mesh", mesh, Mapping, expected)
    for axis, size in mesh.items():
        if not isinstance(axis, str) or isinstance(size, bool) or not isinstance(size, int):
            raise argument_error(operation, "mesh", {axis: size}, expected)
        if size < 1:
            raise WrongValueError(f"got {axis}={size}, expected at least 1", "mesh")
    if num_elements(tuple(mesh.values())) > MAX_RANKS:
        ranks = num_elements(tuple(mesh.values()))
        raise WrongValueError(f"got {ranks:,} ranks, expected at most {MAX_RANKS:,}", "mesh")
    if not mesh:
        raise WrongValueError("got no axes, expected sizes such as {'dp': 8, 'tp': 2}", "mesh")


def _checked_rules(operation: str, rules: Any, mesh: Mapping[str, int]) -> dict[str, DimOf]:
    """The rules as a dict. Raises TypeError or WrongValueError unless they give dims to axes of the mesh."""
    expected = "dims of axes by glob such as {'*.wo.weight': {'tp': 1}}"
    check_argument(operation, "placements", rules, (Mapping, type(None)), expected)
    for pattern, dims in (rules or {}).items():
        if not isinstance(pattern, str) or not isinstance(dims, Mapping):
            raise argument_error(operation, "placements", rules, expected)
        for axis, dim in dims.items():
            if axis not in mesh:
                raise WrongValueError(f"{pattern!r} names axis {axis!r}, the mesh has {', '.join(mesh)}", "placements")
            if isinstance(dim, bool) or not isinstance(dim, (int, type(None))):
                raise argument_error(operation, "placements", dim, expected)
    return dict(rules or {})


def _check_axis(axis: str, saved_axes: Mapping[str, int], rules: Mapping[str, DimOf]) -> None:
    if axis == "pp":
        raise WrongValueError(
            "got the axis pp, and stages of a pipeline hold different keys; leave it out: ranks of any mesh read what "
            "each asks for",
            "mesh",
        )
    is_known = is_data_parallel(axis) or axis == "tp" or axis in saved_axes
    if not is_known and not any(axis in dims for dims in rules.values()):
        raise WrongValueError(
            f"nothing says what the axis {axis!r} cuts; name it dp_shard, dp_replicate or tp where it is one",
            "mesh",
            f", or state it with placements={{'*': {{{axis!r}: 0}}}}",
            Remedy("placements", f"*={axis}:0"),
        )


def _was_cut(saved: SavedState | None, saved_axes: Mapping[str, int]) -> bool:
    """Whether FSDP cut the tensors of a save. If it did, whole tensors were no parameters."""
    if saved is None:
        return False
    if saved_axes:
        return any(is_fsdp(axis) and size > 1 for axis, size in saved_axes.items())
    return any(len(tensor.chunks) > 1 for tensor in saved.tensors.values())


def _saved_dims(shape: tuple[int, ...], boxes: Sequence[Box], old: World) -> tuple[DimOf, bool]:
    """The dims that axes of the save cut, and whether they are a guess because no dims give the saved boxes."""
    fixed = {axis: None if replicates(axis) else 0 for axis in old.mesh if is_data_parallel(axis)}
    open_axes = [axis for axis in old.mesh if axis not in fixed]
    choices: list[int | None] = [*range(len(shape)), None] if len(shape) > 1 else [None, 0]
    # Axes whose product exceeds the number of ranks belong to several meshes: there is no one mesh to try.
    if math.prod(old.mesh.values()) <= min(old.size, MAX_RANKS):
        saved = {(tuple(offsets), tuple(lengths)) for offsets, lengths in boxes}
        for chosen in itertools.islice(itertools.product(choices, repeat=len(open_axes)), _MAX_COMBINATIONS):
            dims = {**fixed, **dict(zip(open_axes, chosen, strict=True))}
            if _boxes_of(shape, dims, old.mesh) == saved:
                return dims, False
    beyond = _dims_cut_beyond(shape, boxes)
    return {**fixed, **dict.fromkeys(open_axes, beyond[0] if beyond else None)}, not beyond and len(shape) > 1


def _boxes_of(shape: tuple[int, ...], dims: DimOf, mesh: Mapping[str, int]) -> set[Box]:
    sizes = tuple(mesh.values())
    steps = _core.read_placements(_placements([dims[axis] for axis in mesh], sizes), sizes, "nested")
    return {(chunk.offsets, chunk.sizes) for shard in local_shards(shape, sizes, steps) for chunk in shard.chunks}


def _dims_cut_beyond(shape: tuple[int, ...], boxes: Sequence[Box]) -> list[int]:
    """Dims other than 0 that the saved boxes cut."""
    return [dim for dim in range(1, len(shape)) if len({offsets[dim] for offsets, _ in boxes}) > 1]


def _placements(dims: Sequence[int | None], sizes: Sequence[int]) -> Placements:
    """As DTensor writes them: the split factor counts the parts into which axes further right cut the dim before."""
    placements = []
    for axis, dim in enumerate(dims):
        after = zip(dims[axis + 1 :], sizes[axis + 1 :], strict=True)
        factor = num_elements([size for other, size in after if other == dim])
        placements.append(_REPLICATED if dim is None else (dim, factor))
    return tuple(placements)
