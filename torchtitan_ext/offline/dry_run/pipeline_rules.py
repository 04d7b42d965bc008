"""Decides which keys each stage of a pipeline holds, if the mesh of a job is described with an axis ``pp``.

Rules name the stage as they name the dim that other axes cut: ``{"layers.0.*": {"pp": 0}, "norm": {"pp": 1}, "step":
{"pp": None}}``; ``None`` means all stages. Tensors need a rule. Without a rule all stages hold
the other values. A checkpoint cannot tell: a key of one stage and a key of all stages both lie in one rank's file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from torchtitan_ext.errors import Remedy, WrongValueError, named
from torchtitan_ext.layout.layout import num_elements, patterns_for
from torchtitan_ext.offline.placement_rules import DimOf, check_mesh, check_patterns_used, checked_rules

AXIS = "pp"


class PipelineRules:
    """Cuts a mesh and its rules into stages; one stage if there is no axis ``pp``.

    Args:
        mesh: Size of each axis by name.
        rules: The dim that each axis cuts, and the stage, by canonical fqn or glob.

    Attributes:
        mesh, rules: The mesh of one stage, and the rules for its axes.
        ranks: The ranks of each stage, row-major on its mesh.

    Raises:
        TypeError: An argument has another type.
        WrongValueError: A rule names a stage that does not exist, or ``PlacementRules`` refuses the mesh or a rule.
    """

    def __init__(self, mesh: Mapping[str, int], rules: Mapping[str, DimOf] | None = None) -> None:
        check_mesh(mesh)
        given = checked_rules(rules, mesh)
        self.num_stages = mesh.get(AXIS, 1)
        self.mesh = {axis: size for axis, size in mesh.items() if axis != AXIS} or {"dp_shard": 1}
        self.rules: dict[str, DimOf] = {}
        self._stage_of: dict[str, int | None] = {}
        for pattern, dims in given.items():
            if AXIS in dims:
                stage = self._stage_of[pattern] = dims[AXIS]
                if stage is not None and not 0 <= stage < self.num_stages:
                    what = f"{pattern!r} names stage {stage} of {AXIS}, the mesh has {self.num_stages}"
                    raise WrongValueError(what, "placements")
            if dims.keys() - {AXIS}:
                self.rules[pattern] = {axis: dim for axis, dim in dims.items() if axis != AXIS}
        self._is_pipeline = AXIS in mesh
        ranks = np.arange(num_elements(tuple(mesh.values()))).reshape(tuple(mesh.values()))
        position = list(mesh).index(AXIS) if self._is_pipeline else 0
        self.ranks: list[list[int]] = np.moveaxis(ranks, position, 0).reshape(self.num_stages, -1).tolist()

    def holds(self, stage: int, fqn: str) -> bool:
        patterns = patterns_for(fqn, self._stage_of)
        of_key = self._stage_of[patterns[0]] if patterns else None
        return of_key is None or of_key == stage

    def check(self, tensors: Sequence[str], fqns: Sequence[str]) -> None:
        """Refuses rules that match no key, and tensors whose stage no rule names.

        Args:
            tensors: The keys among ``fqns`` that are tensors.

        Raises:
            LayoutError: A rule matches none of the keys.
            WrongValueError: Names some of the tensors.
        """
        check_patterns_used(self._stage_of, fqns)
        unknown = [fqn for fqn in tensors if self._is_pipeline and not patterns_for(fqn, self._stage_of)]
        if unknown:
            raise WrongValueError(
                f"nothing says which stage of {AXIS} holds {len(unknown)} tensors ({named(unknown)})",
                "mesh",
                f"; state it with placements={{'layers.0.*': {{'{AXIS}': 0}}}}, None for all stages, or give a list "
                "with the state dict of each stage",
                Remedy("placements", f"layers.0.*={AXIS}:0"),
            )
