"""The ranks of a job, and what each holds: by state dicts of some of them, or by the description of a mesh.

The ranks of a stage hold parts of the same tensors; a job without a pipeline is one stage.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata

from torchtitan_ext.checkpoint.planners.saved_metadata import ChunkList
from torchtitan_ext.checkpoint.tables.component import PER_RANK, World, is_stateful, named_axes
from torchtitan_ext.checkpoint.tables.key_table import KeyTable, TensorEntry
from torchtitan_ext.errors import WrongValueError
from torchtitan_ext.layout.layout import ShardOrder
from torchtitan_ext.offline.dry_run.alike_ranks import AlikeRanks, moved, names_with_rank, rank_of
from torchtitan_ext.offline.dry_run.one_rank import OneRank, place_on_mesh, rank_of_state
from torchtitan_ext.offline.dry_run.pipeline_rules import PipelineRules
from torchtitan_ext.offline.placement_rules import DimOf, PlacementRules


@dataclass(frozen=True)
class Stage:
    """Ranks that hold the same keys.

    Attributes:
        state: The state dict of one of them, where there is one.
        one: What it holds.
        ranks: All of them.
        rules: How a description of their mesh places tensors; none where these say so themselves.
        pipeline: Which keys are theirs, with ``number``; none where the state dict has no others.
        number: Of the stage.
    """

    state: Mapping[str, Any] | None
    one: OneRank
    ranks: AlikeRanks
    rules: PlacementRules | None = None
    pipeline: PipelineRules | None = None
    number: int = 0

    def holds(self, fqn: str) -> bool:
        """Whether ranks of this stage hold a key."""
        return self.pipeline is None or self.pipeline.holds(self.number, fqn)


def stages_of_states(states: Sequence[Mapping[str, Any]], layouts: Mapping[str, ShardOrder] | None) -> list[Stage]:
    """The stages of which these are state dicts, on the meshes of their tensors.

    Raises:
        WrongValueError: The meshes do not make up a job.
    """
    ones = [rank_of_state(values_of(state), layouts) for state in states]
    return [Stage(*each) for each in zip(states, ones, _groups([one.table for one in ones]), strict=True)]


def stages_of_mesh(
    state: Mapping[str, Any] | None,
    one: OneRank,
    mesh: Mapping[str, int],
    placements: Mapping[str, DimOf] | None,
    metadata: Metadata | None,
    chunks: Mapping[str, ChunkList],
) -> list[Stage]:
    """The stages of a mesh that is described.

    Args:
        one: What the whole job has, in whole tensors.
        metadata: Of a checkpoint with these tensors.
        chunks: How these were saved.

    Raises:
        TypeError: The mesh or the placements are none.
        WrongValueError: They say too little, or what cannot be.
        LayoutError: Placements apply to none of the keys.
    """
    pipeline = PipelineRules(mesh, placements)
    entries = one.table.entries.items()
    shapes = {fqn: entry.report.global_shape if isinstance(entry, TensorEntry) else None for fqn, entry in entries}
    pipeline.check([fqn for fqn, shape in shapes.items() if shape is not None], list(shapes))
    stages = []
    for number in range(pipeline.num_stages):
        rules = PlacementRules(pipeline.mesh, pipeline.rules, metadata=metadata, ranks=pipeline.ranks(number))
        rules.check_used(shapes)
        own = place_on_mesh(one.restricted(partial(pipeline.holds, number)), rules, chunks)
        named = [fqn for fqn in names_with_rank(own.table.entries) if PER_RANK.sub(r"\g<1>0", fqn) == fqn]
        ranks = AlikeRanks(rules.mesh.ranks, own.table, rules.mesh.ranks[0], rules.mesh, own=named)
        stages.append(Stage(state, own, ranks, rules, pipeline, number))
    return stages


def values_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict with what its ``Stateful`` objects give."""
    return {key: value.state_dict() if is_stateful(value) else value for key, value in state.items()}


def world_of_stages(stages: Sequence[Stage], mesh: Mapping[str, int] | None) -> World:
    """The ranks of a job.

    Args:
        mesh: As it was described; else it is that of the tensors.
    """
    size = sum(len(stage.ranks.ranks) for stage in stages)
    if mesh is not None:
        return World(size, dict(mesh))
    meshes = (mesh for stage in stages for mesh in stage.ranks.meshes())
    return World(size, named_axes((mesh.dim_names, mesh.shape) for mesh in meshes))


def _groups(tables: Sequence[KeyTable]) -> list[AlikeRanks]:
    """The ranks of each table, on the meshes that its tensors lie on."""
    if len(tables) == 1:
        viewer, own = _ranks_of(tables[0])
        num_ranks = dist.get_world_size() if dist.is_initialized() else 1
        return [AlikeRanks(range(max(num_ranks, own[-1] + 1)), tables[0], viewer)]
    if all(_ranks_of(table)[1][0] == 0 for table in tables):
        # Each stage is described on a world of its own: they follow each other.
        ends = list(itertools.accumulate(len(_ranks_of(table)[1]) for table in tables))
        tables = [moved(table, first) for table, first in zip(tables, [0, *ends], strict=False)]
    groups = []
    for table in tables:
        viewer, own = _ranks_of(table)
        groups.append(AlikeRanks(own, table, viewer))
    together = sorted(rank for group in groups for rank in group.ranks)
    if together != list(range(len(together))):
        raise WrongValueError(
            f"dry_run: the meshes of the stages have ranks {', '.join(map(str, together[:8]))}, ...; expected each "
            "rank of the job in one of them, or ranks from 0 on for each"
        )
    return groups


def _ranks_of(table: KeyTable) -> tuple[int, list[int]]:
    """The rank that made a table, and those of the largest mesh that its tensors lie on."""
    reports = [entry.report for entry in table.entries.values() if isinstance(entry, TensorEntry)]
    largest = max(
        (report for report in reports if report.mesh is not None),
        key=lambda report: len(report.mesh.ranks) if report.mesh is not None else 0,
        default=None,
    )
    if largest is None or largest.mesh is None:
        viewer = dist.get_rank() if dist.is_initialized() else 0
        return viewer, [viewer]
    return rank_of(largest), sorted(largest.mesh.ranks)
