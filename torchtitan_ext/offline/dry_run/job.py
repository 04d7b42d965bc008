"""The ranks of a job that does not run, grouped by pipeline stage, and what they hold.

They are worked out from state dicts of some ranks, or from a checkpoint and the description of a mesh.
"""

from __future__ import annotations

import dataclasses
import io
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from torchtitan_ext import _core
from torchtitan_ext.checkpoint.planners.items import uncuttable_wrappers
from torchtitan_ext.checkpoint.rules.load_rules import ComponentPlan, component_of
from torchtitan_ext.checkpoint.rules.policy import ElasticPolicy, Source
from torchtitan_ext.checkpoint.tables.component import PER_RANK, World, family_of, is_stateful
from torchtitan_ext.checkpoint.tables.key_table import (
    KeyEntry,
    KeyTable,
    ObjectEntry,
    TensorEntry,
    check_objects,
    describe_state,
)
from torchtitan_ext.errors import WrongValueError, refusal
from torchtitan_ext.layout.layout import LayoutRules, ShardOrder, ShardReport, local_shard, row_major_position
from torchtitan_ext.offline.dry_run.alike_ranks import AlikeRanks, names_with_rank
from torchtitan_ext.offline.dry_run.load_source import LoadSource
from torchtitan_ext.offline.placement_rules import DimOf, PlacementRules
from torchtitan_ext.state.nested import flat_keys
from torchtitan_ext.storage.metadata.saved_metadata import recorded_paths


@dataclass(frozen=True)
class OneRank:
    """What one rank holds.

    Attributes:
        table: Its keys.
        value_bytes: The size of each value that is no tensor, as it is written.
        assumed: Tensors for which the dim that ``tp`` cuts is a guess.
    """

    table: KeyTable
    value_bytes: Mapping[str, int]
    assumed: tuple[str, ...] = ()

    def restricted(self, holds: Callable[[str], bool]) -> OneRank:
        """What the rank holds, without the keys that ``holds`` denies."""
        entries = {fqn: entry for fqn, entry in self.table.entries.items() if holds(fqn)}
        return dataclasses.replace(self, table=dataclasses.replace(self.table, entries=entries))


@dataclass(frozen=True)
class Stage:
    """Ranks that hold the same keys. A job without a pipeline has one stage.

    Attributes:
        state: The state dict of one of the ranks; ``None`` if the job asks for all that a checkpoint has.
        one: What this rank holds.
        ranks: All ranks of the stage.
        rules: Place tensors on a described mesh; ``None`` if the tensors are DTensors on meshes of their own.
    """

    state: Mapping[str, Any] | None
    one: OneRank
    ranks: AlikeRanks
    rules: PlacementRules | None = None


@dataclass(frozen=True)
class Job:
    """The job whose save and load are forecast.

    Attributes:
        stages: Together they have the ranks 0, 1, ...
        layouts, policy: As in ``tte.load``.
    """

    stages: Sequence[Stage]
    layouts: Mapping[str, ShardOrder] | None
    policy: ElasticPolicy

    @property
    def num_ranks(self) -> int:
        return sum(len(stage.ranks.ranks) for stage in self.stages)

    def world(self, mesh: Mapping[str, int] | None) -> World:
        """The ranks and the mesh of the job: the described ``mesh``, or without one that of its tensors."""
        if mesh is not None:
            return World(self.num_ranks, dict(mesh))
        meshes = [(own.shape, own.dim_names) for stage in self.stages for own in stage.ranks.meshes()]
        return World(self.num_ranks, _core.axes_of(meshes))


def stages_of(
    state: Mapping[str, Any] | Sequence[Mapping[str, Any]] | str | os.PathLike[str],
    source: LoadSource | None,
    mesh: Mapping[str, int] | None,
    placements: Mapping[str, DimOf] | None,
    layouts: Mapping[str, ShardOrder] | None,
) -> list[Stage]:
    """The ranks of a job, and what they hold: one stage per state dict, or those of a described mesh.

    The arguments are those of ``dry_run``.

    Args:
        source: The checkpoint that is loaded; the one at ``state`` if that is a path.

    Raises:
        TypeError: The mesh or the placements have another type.
        WrongValueError: The mesh or the placements say too little, or something impossible.
        LayoutError: A placement applies to no key.
        StateRefusedError: A job cannot read the checkpoint, and so not the objects of a state dict either.
    """
    states = [] if isinstance(state, (str, os.PathLike)) else [state] if isinstance(state, Mapping) else state
    if source is not None and source.problems and states:
        raise refusal("dry run", source.problems)
    ones = [_rank_of_state(one, layouts) for one in states]
    if mesh is None:
        return [Stage(*each) for each in zip(states, ones, _groups([one.table for one in ones]), strict=True)]
    if source is not None and not states:
        ones = [_rank_of_checkpoint(source.opened.metadata, source.opened.source)]
    (one,) = ones
    saved, chunks = (None, {}) if source is None else (source.state, source.chunks)
    entries = one.table.entries.items()
    shapes = {fqn: entry.report.global_shape if isinstance(entry, TensorEntry) else None for fqn, entry in entries}
    rules = PlacementRules(mesh, placements, saved=saved)
    rules.check_used(shapes)
    placed = place_on_mesh(one, rules, chunks)
    named = [fqn for fqn in names_with_rank(placed.table.entries) if PER_RANK.sub(r"\g<1>0", fqn) == fqn]
    ranks = AlikeRanks(rules.mesh.ranks, placed.table, mesh=rules.mesh, own=named)
    return [Stage(states[0] if states else None, placed, ranks, rules)]


def _rank_of_state(state: Mapping[str, Any], layouts: Mapping[str, ShardOrder] | None) -> OneRank:
    """What a rank with this state dict holds. Tensors may be on the meta device."""
    values = {key: value.state_dict() if is_stateful(value) else value for key, value in state.items()}
    flat = flat_keys(values, tuples="as_stock")
    table = describe_state(flat.values, flat.stock_paths, LayoutRules(layouts))
    unread, unwritable = check_objects(flat.values, table)
    problems = (*table.problems, *uncuttable_wrappers(flat.values, table), *unwritable)
    troubled = {problem.fqn for problem in unwritable}
    sizes = {
        fqn: _pickled_bytes(flat.values[fqn])
        for fqn, entry in table.entries.items()
        if isinstance(entry, ObjectEntry) and fqn not in troubled
    }
    return OneRank(dataclasses.replace(table, problems=problems, unread=unread), sizes)


def _rank_of_checkpoint(metadata: Metadata, source: Source) -> OneRank:
    """What rank 0 of a job that asks for all selected keys of a checkpoint holds, in whole tensors.

    Of the values that each rank keeps under a name of its own, rank 0 has only its own.
    """
    paths = recorded_paths(metadata.planner_data, metadata.state_dict_metadata)
    saved_tensors = {fqn: isinstance(one, TensorStorageMetadata) for fqn, one in metadata.state_dict_metadata.items()}
    components = components_of(saved_tensors, paths, ElasticPolicy())
    entries: dict[str, KeyEntry] = {}
    sizes: dict[str, int] = {}
    families: set[str] = set()
    for fqn, saved in metadata.state_dict_metadata.items():
        if not source.selects(fqn, component_of(fqn, components, is_tensor=saved_tensors[fqn])):
            continue
        if isinstance(saved, TensorStorageMetadata):
            shape = tuple(saved.size)
            report = ShardReport(shape, local_sizes=shape)
            entries[fqn] = TensorEntry(report, saved.properties.dtype, saved.properties.requires_grad)
            continue
        family = family_of(fqn)
        if family != fqn and family in families:
            continue
        families.add(family)
        place = (metadata.storage_data or {}).get(MetadataIndex(fqn))
        own = PER_RANK.sub(r"\g<1>0", fqn)
        entries[own] = ObjectEntry()
        sizes[own] = getattr(place, "length", 0)
    known = {fqn: paths[fqn] for fqn in entries if fqn in paths}
    return OneRank(KeyTable(entries, stock_paths=known), sizes)


def components_of(
    is_tensor: Mapping[str, bool], paths: Mapping[str, Any], policy: ElasticPolicy
) -> dict[str, ComponentPlan]:
    """The entries at the top of the state dict with these flat keys, without tensors, and what a load does with each.

    Args:
        is_tensor: Whether each key is a tensor.
        paths: The recorded path of each key in the nested state dict. Entries that are no paths are ignored.
    """
    known = {fqn: path for fqn in is_tensor if isinstance(path := paths.get(fqn), tuple) and path}
    tops = {fqn: str(known[fqn][0]) if fqn in known else fqn.split(".")[0] for fqn in is_tensor}
    names = dict.fromkeys(top for fqn, top in tops.items() if top != fqn or not is_tensor[fqn])
    return {name: ComponentPlan(policy.component_action(name)) for name in names}


def place_on_mesh(one: OneRank, rules: PlacementRules, chunks: Mapping[str, _core.ChunkIndex]) -> OneRank:
    """Cuts the plain tensors of a rank as the rules say. Tensors under a rank's own name stay whole.

    Args:
        chunks: The chunks in which tensors were saved, by key.
    """
    entries: dict[str, KeyEntry] = {}
    assumed = []
    origin = (0,) * len(rules.mesh.shape)
    for fqn, entry in one.table.entries.items():
        entries[fqn] = entry
        if not isinstance(entry, TensorEntry) or entry.report.mesh is not None or family_of(fqn) != fqn:
            continue
        shape = entry.report.global_shape
        placed = rules.place(fqn, shape, chunks.get(fqn))
        if placed.placements is None:
            continue
        sizes = local_shard(shape, rules.mesh.shape, placed.steps, origin).sizes
        report = ShardReport(shape, rules.mesh, origin, placed.placements, sizes)
        entries[fqn] = dataclasses.replace(entry, report=report)
        assumed += [fqn] if placed.is_assumed else []
    return dataclasses.replace(one, table=dataclasses.replace(one.table, entries=entries), assumed=tuple(assumed))


def _pickled_bytes(value: Any) -> int:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.tell()


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
