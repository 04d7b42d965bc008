"""Forecasts what a save and a load of a job would do, in one process and for all ranks, by the planners of a job.

The steps: describe what one rank holds (``job``), work out the others (``alike_ranks``), hand all tables to the
planners' coordinator, and add up its answers to each rank (``forecast``).
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any

from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from torchtitan_ext.checkpoint.rules.load_rules import component_of
from torchtitan_ext.checkpoint.rules.policy import BY_DEFAULT, ElasticPolicy, Source, check_rules
from torchtitan_ext.checkpoint.tables.component import World
from torchtitan_ext.checkpoint.tables.key_table import ObjectEntry
from torchtitan_ext.errors import Problem, WrongValueError, check_argument, named, refusal
from torchtitan_ext.errors.near_names import names_hint
from torchtitan_ext.layout.layout import ShardOrder
from torchtitan_ext.offline.amounts import text_of_bytes
from torchtitan_ext.offline.dry_run.forecast import Forecast, forecast_load, forecast_save
from torchtitan_ext.offline.dry_run.job import Job, Stage, components_of, stages_of
from torchtitan_ext.offline.dry_run.load_source import LoadSource, open_load_source
from torchtitan_ext.offline.placement_rules import DimOf
from torchtitan_ext.storage.metadata.saved_metadata import recorded_paths


@dataclass(frozen=True)
class DryRun:
    """What a save and a load of a job would do. ``str`` gives a short table.

    Attributes:
        world: The ranks and the mesh of the job.
        save: What a save would do.
        load: What a load of the checkpoint would do; ``None`` without a checkpoint.
        notes: What was assumed, or cannot be known without the job.
    """

    world: World
    save: Forecast
    load: Forecast | None
    notes: tuple[str, ...]

    @property
    def problems(self) -> tuple[Problem, ...]:
        """Why the load, or without a checkpoint the save, would be refused."""
        return self.save.problems if self.load is None else self.load.problems

    def to_dict(self) -> dict[str, Any]:
        """The result as plain values; the report of a load becomes its text."""
        save = dataclasses.asdict(self.save)
        del save["report"]
        load = None
        if self.load is not None:
            report = self.load.report
            load = dataclasses.asdict(dataclasses.replace(self.load, report=None))
            load["report"] = None if report is None else {"text": str(report)}
        world = {"size": self.world.size, "mesh": dict(self.world.mesh)}
        return {"world": world, "save": save, "load": load, "notes": list(self.notes)}

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [("", "least", "median", "most", "all ranks")]
        rows.append(_row("state", [one.state_bytes for one in self.save.ranks]))
        if not self.save.problems:
            rows.append(_row("save: bytes", [one.num_bytes for one in self.save.ranks]))
        if self.load is not None:
            rows.append(_row("load: bytes", [one.num_bytes for one in self.load.ranks]))
        lines = [str(self.world), *_aligned(rows)]
        if self.save.problems:
            lines.append(f"A save would end with:\n{refusal('save', self.save.problems)}")
        if self.load is not None and self.load.problems:
            lines.append(f"A load would end with:\n{refusal('load', self.load.problems, self.load.report)}")
        elif self.load is not None and self.load.report is not None:
            lines.append(str(self.load.report))
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def dry_run(
    state: Mapping[str, Any] | Sequence[Mapping[str, Any]] | str | os.PathLike[str],
    *,
    mesh: Mapping[str, int] | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    components: Sequence[str] = (),
    placements: Mapping[str, DimOf] | None = None,
    layouts: Mapping[str, ShardOrder] | None = None,
    policy: ElasticPolicy | None = None,
) -> DryRun:
    """Says what a save and a load would do on every rank of a job, without its processes, and changes nothing.

    Args:
        state: What the job saves and loads, in one of three forms:
            - the state dict of any one rank, with DTensors on its meshes: on the meta device, over a process group of
              the backend ``"fake"``, or as it is in a job. For a pipeline a list with the state dict of any one rank
              of each stage, on meshes of the stage's own ranks, or of ranks from 0 on for each stage;
            - a state dict of whole tensors, on any device, and ``mesh``;
            - the path of a checkpoint, and ``mesh``: the job asks for all keys of the checkpoint.
        mesh: Size of each axis of the job's mesh by name, ``{"dp_shard": 4, "tp": 2}``.
            ``torchtitan_ext/offline/placement_rules.py`` says how axes cut tensors.
        checkpoint: The checkpoint that is loaded; without one only a save is forecast.
        components: The components, and globs of flat keys, that are loaded. All by default.
        placements: With ``mesh``, dims of axes, by canonical fqn or glob: ``{"wo.weight": {"tp": 1}}``.
        layouts: Sharding orders, as in the planners.
        policy: As in ``tte.load``. Objects of the state dict that reshard by a rule of their own are asked.

    Returns:
        The bytes of each rank, and what would be refused and why.

    Raises:
        TypeError: An argument has another type.
        WrongValueError: Arguments do not go together, the mesh says too little, or a component does not exist.
        StateRefusedError: The checkpoint has no metadata that can be read.
        UnknownFormatError: The path holds no checkpoint.
        OSError: The path does not exist or cannot be read.
    """
    _check_arguments(state, mesh, checkpoint, components, placements, policy)
    path = state if isinstance(state, (str, os.PathLike)) else checkpoint
    source = None if path is None else open_load_source(Source(path, include=tuple(components) or ("*",)))
    stages = stages_of(state, source, mesh, placements, layouts)
    if source is not None:
        _check_components(source, stages)
    job = Job(stages, layouts, policy or BY_DEFAULT)
    notes = [*_notes(stages), *(() if source is None else source.notes)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        save = forecast_save(job)
        load = None if source is None else forecast_load(job, source)
    notes += [str(warning.message) for warning in caught]
    return DryRun(job.world(mesh), save, load, tuple(dict.fromkeys(notes)))


def _check_arguments(state: Any, mesh: Any, checkpoint: Any, components: Any, placements: Any, policy: Any) -> None:
    check_argument("dry_run", "checkpoint", checkpoint, (str, os.PathLike, NoneType), "a directory")
    check_argument("dry_run", "components", components, (list, tuple), "a list of components and globs")
    check_rules("dry_run", policy)
    is_path = isinstance(state, (str, os.PathLike))
    if is_path and checkpoint is not None:
        raise WrongValueError("dry_run: got the path of a checkpoint twice; give one of them, or a state dict")
    if is_path and mesh is None:
        raise WrongValueError("dry_run: got a checkpoint and no mesh, expected mesh={'dp': 8, 'tp': 2} or a state dict")
    if placements is not None and mesh is None:
        raise WrongValueError(
            "dry_run: got placements and no mesh; state dicts with DTensors have placements of their own"
        )
    if components and not is_path and checkpoint is None:
        raise WrongValueError("dry_run: got components and no checkpoint, expected checkpoint= with these in it")
    if is_path:
        return
    expected = "a state dict, a list with that of each pipeline stage, or the path of a checkpoint"
    check_argument("dry_run", "state", state, (Mapping, list, tuple), expected)
    stages = [state] if isinstance(state, Mapping) else state
    for one in stages:
        check_argument("dry_run", "state", one, Mapping, expected)
    if not stages:
        raise WrongValueError("dry_run: got no state dict, expected one per pipeline stage")
    if len(stages) > 1 and mesh is not None:
        raise WrongValueError("dry_run: got several stages and a mesh; give stages DTensors on meshes of their ranks")


def _check_components(source: LoadSource, stages: Sequence[Stage]) -> None:
    """Raises WrongValueError if a component that is to be loaded is neither saved nor in the job."""
    chosen, metadata = source.opened.source, source.opened.metadata
    if tuple(chosen.include) == ("*",):
        return
    is_tensor = {fqn: isinstance(one, TensorStorageMetadata) for fqn, one in metadata.state_dict_metadata.items()}
    paths: dict[str, tuple[Any, ...]] = dict(recorded_paths(metadata.planner_data, metadata.state_dict_metadata))
    for table in (stage.one.table for stage in stages):
        is_tensor |= {fqn: not isinstance(entry, ObjectEntry) for fqn, entry in table.entries.items()}
        paths |= table.stock_paths
    entries = components_of(is_tensor, paths, ElasticPolicy())
    components = dict.fromkeys(component_of(fqn, entries, is_tensor=tensor) for fqn, tensor in is_tensor.items())
    for glob in chosen.unused_filters(is_tensor, components):
        hint = names_hint(glob, is_tensor, components)
        raise WrongValueError(f"no component and no key matches {glob!r}; {hint}", "components")


def _notes(stages: Sequence[Stage]) -> list[str]:
    notes = []
    groups = [stage.ranks for stage in stages]
    assumed = [fqn for stage in stages for fqn in stage.one.assumed]
    if assumed:
        notes.append(
            f"nothing says which dims tp cuts of {len(assumed)} tensors ({named(assumed)}): dim 0 of matrices is "
            "assumed, and none of vectors; a rule (placements, --shard) overrides this"
        )
    uneven = [fqn for group in groups for fqn in group.uneven]
    if uneven:
        notes.append(
            f"{named(uneven)}: this rank's shape does not tell in which order axes cut; FSDP2's order is assumed"
        )
    for group in groups:
        for own in group.own:
            notes.append(f"each rank is assumed to ask for a value of its own, such as {own}")
    entries = (entry for stage in stages if stage.state is None for entry in stage.one.table.entries.values())
    if any(isinstance(entry, ObjectEntry) for entry in entries):
        notes.append("only the job's own objects, such as a data loader, know how they load what was saved")
    return notes


def _row(title: str, values: Sequence[int]) -> tuple[str, ...]:
    least, most, middle = min(values), max(values), statistics.median_low(values)
    return (title, *map(text_of_bytes, (least, middle, most, sum(values))))


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns as wide as their longest cell, the first to the left."""
    first, *others = (max(map(len, column)) for column in zip(*rows, strict=True))
    return [
        f"  {row[0]:<{first}}" + "".join(f"  {cell:>{width}}" for cell, width in zip(row[1:], others, strict=True))
        for row in rows
    ]
