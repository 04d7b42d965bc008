"""The ranks of a job that does not run, grouped by pipeline stage.

They are worked out from state dicts of some ranks, or from the description of a mesh.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.distributed as dist

from torchtitan_ext.checkpoint.rules.policy import ElasticPolicy
from torchtitan_ext.checkpoint.tables.component import PER_RANK, World, is_stateful, named_axes
from torchtitan_ext.checkpoint.tables.key_table import KeyTable, TensorEntry
from torchtitan_ext.errors import WrongValueError
from torchtitan_ext.layout.layout import ShardOrder, row_major_position
from torchtitan_ext.offline.amounts import Bandwidth
from torchtitan_ext.offline.dry_run.alike_ranks import AlikeRanks, names_with_rank
from torchtitan_ext.offline.dry_run.host_memory import Device
from torchtitan_ext.offline.dry_run.load_source import LoadSource
from torchtitan_ext.offline.dry_run.one_rank import OneRank, place_on_mesh, rank_of_state
from torchtitan_ext.offline.dry_run.pipeline_rules import PipelineRules
from torchtitan_ext.offline.placement_rules import DimOf, PlacementRules


@dataclass(frozen=True)
class Stage:
    """Ranks that hold the same keys. A job without a pipeline has one stage.

    Attributes:
        state: The state dict of one of the ranks; ``None`` if the job asks for all that a checkpoint has.
        one: What this rank holds.
        ranks: All ranks of the stage.
        rules: Place tensors on a described mesh; ``None`` if the tensors are DTensors on meshes of their own.
        holds: Whether the stage holds a key of the state dict.
    """

    state: Mapping[str, Any] | None
    one: OneRank
    ranks: AlikeRanks
    rules: PlacementRules | None = None
    holds: Callable[[str], bool] = lambda fqn: True


@dataclass(frozen=True)
class Job:
    """The job whose save and load are forecast.

    Attributes:
        stages: Together they have the ranks 0, 1, ...
        layouts, policy: As in ``tte.load``.
        device: Where the tensors lie.
        bandwidth: How fast the storage is.
    """

    stages: Sequence[Stage]
    layouts: Mapping[str, ShardOrder] | None
    policy: ElasticPolicy | None
    device: Device
    bandwidth: Bandwidth

    @property
    def num_ranks(self) -> int:
        return sum(len(stage.ranks.ranks) for stage in self.stages)

    def world(self, mesh: Mapping[str, int] | None) -> World:
        """The ranks and the mesh of the job: the described ``mesh``, or without one that of its tensors."""
        if mesh is not None:
            return World(self.num_ranks, dict(mesh))
        meshes = (own for stage in self.stages for own in stage.ranks.meshes())
        return World(self.num_ranks, named_axes((own.dim_names, own.shape) for own in meshes))


def stages_of_states(states: Sequence[Mapping[str, Any]], layouts: Mapping[str, ShardOrder] | None) -> list[Stage]:
    """One stage per state dict, on the meshes of its tensors.

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
    source: LoadSource | None,
) -> list[Stage]:
    """The stages of a described mesh.

    Args:
        one: All that the job has, in whole tensors.
        source: A checkpoint with these tensors.

    Raises:
        TypeError: The mesh or the placements have another type.
        WrongValueError: The mesh or the placements say too little, or something impossible.
        LayoutError: A placement applies to no key.
    """
    pipeline = PipelineRules(mesh, placements)
    metadata, chunks = (None, {}) if source is None else (source.opened.metadata, source.chunks)
    entries = one.table.entries.items()
    shapes = {fqn: entry.report.global_shape if isinstance(entry, TensorEntry) else None for fqn, entry in entries}
    pipeline.check([fqn for fqn, shape in shapes.items() if shape is not None], list(shapes))
    stages = []
    for number in range(pipeline.num_stages):
        rules = PlacementRules(pipeline.mesh, pipeline.rules, metadata=metadata, ranks=pipeline.ranks(number))
        rules.check_used(shapes)
        holds = partial(pipeline.holds, number)
        own = place_on_mesh(one.restricted(holds), rules, chunks)
        named = [fqn for fqn in names_with_rank(own.table.entries) if PER_RANK.sub(r"\g<1>0", fqn) == fqn]
        ranks = AlikeRanks(rules.mesh.ranks, own.table, rules.mesh.ranks[0], rules.mesh, own=named)
        stages.append(Stage(state, own, ranks, rules, holds))
    return stages


def values_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict with the state dicts of its ``Stateful`` objects in their places."""
    return {key: value.state_dict() if is_stateful(value) else value for key, value in state.items()}


def _groups(tables: Sequence[KeyTable]) -> list[AlikeRanks]:
    """The ranks of each table: those of the largest mesh of its tensors."""
    described = [_ranks_of(table) for table in tables]
    if len(tables) == 1:
        viewer, own = described[0]
        num_ranks = dist.get_world_size() if dist.is_initialized() else 1
        return [AlikeRanks(range(max(num_ranks, own[-1] + 1)), tables[0], viewer)]
    firsts = [0] * len(tables)
    if all(own[0] == 0 for _, own in described):
        # Each stage is described with ranks from 0 on: in the job the stages follow each other.
        firsts = [0, *itertools.accumulate(len(own) for _, own in described)][:-1]
    groups = [
        AlikeRanks([first + rank for rank in own], table, first + viewer)
        for table, first, (viewer, own) in zip(tables, firsts, described, strict=True)
    ]
    together = sorted(rank for group in groups for rank in group.ranks)
    if together != list(range(len(together))):
        raise WrongValueError(
            f"dry_run: the meshes of the stages have ranks {', '.join(map(str, together[:8]))}, ...; expected each "
            "rank of the job in one of them, or ranks from 0 on for each"
        )
    return groups


def _ranks_of(table: KeyTable) -> tuple[int, list[int]]:
    """The rank that made a table, and the ranks of the largest mesh of its tensors."""
    entries = (entry for entry in table.entries.values() if isinstance(entry, TensorEntry))
    meshes = [(len(entry.report.mesh.ranks), entry.report) for entry in entries if entry.report.mesh is not None]
    if not meshes:
        viewer = dist.get_rank() if dist.is_initialized() else 0
        return viewer, [viewer]
    _, largest = max(meshes, key=lambda one: one[0])
    assert largest.mesh is not None
    viewer = largest.mesh.ranks[row_major_position(largest.coordinate, largest.mesh.shape)]
    return viewer, sorted(largest.mesh.ranks)
