"""Decides, before a plan is made, what a load does with each component, and asks components for their part.

Nothing here is collective, and nothing changes: a rank reads what components have saved and calls their ``reshard``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner import LoadPlanner as StockLoadPlanner
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.checkpoint.storage import StorageReader
from torch.distributed.tensor import DTensor

from torchtitan_ext import _core
from torchtitan_ext.checkpoint.planners.items import ReadDecision
from torchtitan_ext.checkpoint.planners.load_planner import LoadPlanner
from torchtitan_ext.checkpoint.rules.data_positions import position_class
from torchtitan_ext.checkpoint.rules.load_rules import UNTOUCHED, ComponentPlan
from torchtitan_ext.checkpoint.rules.param_groups import find_moved, merge_param_groups, option_keys
from torchtitan_ext.checkpoint.rules.policy import Action, ElasticPolicy, Source
from torchtitan_ext.checkpoint.rules.report import LoadReport
from torchtitan_ext.checkpoint.tables.component import (
    Resharded,
    World,
    can_reshard,
    disagreeing_states,
    is_stateful,
    reshard_state,
    saved_world,
)
from torchtitan_ext.dcp_private import unflatten_state_dict
from torchtitan_ext.errors import (
    CannotReshardError,
    CheckpointReadError,
    DamagedCheckpointError,
    DamagedValueError,
    Problem,
    Remedy,
)
from torchtitan_ext.layout.wrapper import parts_of
from torchtitan_ext.state.nested import Path, consists_of_tensors, nested_members
from torchtitan_ext.storage import FileReader
from torchtitan_ext.storage.futures import result_of
from torchtitan_ext.storage.metadata.saved_metadata import recorded_path
from torchtitan_ext.transforms.reader import MappedReader


@dataclass(frozen=True)
class OpenSource:
    """A source, its metadata, and how objects are read from it.

    Attributes:
        name: The source's path, or the class of its reader, for messages.
        is_of_one_rank: Whether the metadata is of this rank's part alone (``use_collectives=False``).
        planner: Has the options of the load.
    """

    name: str
    source: Source
    reader: StorageReader
    metadata: Metadata
    is_of_one_rank: bool = False
    planner: LoadPlanner = field(default_factory=LoadPlanner)

    @property
    def with_sums(self) -> FileReader | None:
        """The reader, if the checkpoint has fingerprints."""
        reader = self.reader.files_reader if isinstance(self.reader, FileReader) else None
        return reader if reader is not None and reader.has_sums else None

    @property
    def entries(self) -> Mapping[str, TensorStorageMetadata | BytesStorageMetadata]:
        """What the checkpoint has, by ``saved_name``."""
        metadata = self.reader.files_metadata if isinstance(self.reader, MappedReader) else self.metadata
        return metadata.state_dict_metadata

    def saved_name(self, fqn: str) -> str:
        """The checkpoint's name of a flat key of the state dict."""
        name, reader = self.source.saved_name(fqn), self.reader
        return (reader.mapped.kept_name(name) or name) if isinstance(reader, MappedReader) else name

    def saved_chunks(self, fqn: str) -> Iterator[tuple[MetadataIndex, tuple[int, ...]]]:
        """The saved chunks of a key and their sizes; without empty ones: stock may save another at the same offsets."""
        name = self.saved_name(fqn)
        for position, chunk in enumerate(getattr(self.entries.get(name), "chunks", ())):
            if 0 not in chunk.sizes:
                yield MetadataIndex(name, chunk.offsets, position), tuple(chunk.sizes)


@dataclass(frozen=True)
class PlannedSource:
    """An open source, with this rank's plan and planner for it."""

    opened: OpenSource
    planner: StockLoadPlanner
    plan: LoadPlan

    @property
    def ours(self) -> LoadPlanner:
        """The planner of a load that shares reads or is proved, which takes no other."""
        return cast(LoadPlanner, self.planner)

    @property
    def can_cut(self) -> bool:
        """Whether parts of items can be read alone: of others' readers nobody knows."""
        return isinstance(self.opened.reader, FileReader)

    def read(self, items: list[ReadItem]) -> None:
        """Reads items of the plan, or parts of items, into their targets."""
        if items:
            result_of(self.opened.reader.read_data(replace(self.plan, items=items), self.planner))

    @property
    def report(self) -> LoadReport | None:
        """That of all ranks, where there is a policy."""
        decision = self.plan.planner_data
        return decision.report if isinstance(decision, ReadDecision) else None


@dataclass
class Components:
    """The entries of a state dict, by what a load does with them. Keys are those of the state dict.

    Attributes:
        values: Entries that the planners load key by key; for ``Stateful`` objects the result of ``state_dict()``.
        resharded: The new state of objects with a rule of their own.
        to_reset: Objects that start anew.
        param_groups: New parameter groups of optimizers, matched by parameter; ``values`` lacks them.
        plans: The plan of each entry that is not a tensor, by the entry's name.
    """

    values: dict[Any, Any] = field(default_factory=dict)
    resharded: dict[Any, Resharded] = field(default_factory=dict)
    to_reset: list[Any] = field(default_factory=list)
    param_groups: dict[Any, list[dict[str, Any]]] = field(default_factory=dict)
    plans: dict[str, ComponentPlan] = field(default_factory=dict)

    def value_for(self, key: Any) -> Any:
        """The argument of a component's ``load_state_dict``, after its values were read in place."""
        if key in self.param_groups:
            return {**self.values[key], "param_groups": self.param_groups[key]}
        return self.values[key]

    def loaded(self, policy: ElasticPolicy | None) -> tuple[str, ...]:
        """Names of the entries whose values the planners fill."""
        names = map(str, self.values)
        return tuple(n for n in names if policy is None or policy.component_action(n) not in ("omit", "reset"))

    def changed(self, policy: ElasticPolicy | None) -> tuple[str, ...]:
        """Names of all entries that a load changes."""
        return (*self.loaded(policy), *map(str, self.resharded), *map(str, self.to_reset))


def sort_components(
    state_dict: Mapping[Any, Any],
    opened: OpenSource,
    policy: ElasticPolicy | None,
    size: int,
    at: Callable[[str], None],
    *,
    asks: bool = True,
) -> Components:
    """Sorts the entries of a state dict by what the load does with them, and asks those with a rule of their own.

    Without a policy the load fills all values, as stock does. ``at`` is called with the key of each component before it
    is asked. ``asks=False`` asks none: for planners of stock.
    """
    components = Components()
    asks = asks and not opened.is_of_one_rank
    rules = policy or ElasticPolicy()
    carried = {}
    for key, component in state_dict.items():
        if isinstance(component, torch.Tensor):
            components.values[key] = component
            continue
        at(str(key))
        action = rules.component_action(str(key))
        if action == "reshard" and is_stateful(component) and can_reshard(component):
            action = rules.object_action(str(key))
        of_position = "" if can_reshard(component) else position_class(component)
        components.plans[str(key)] = ComponentPlan(action, position_class=of_position)
        if not is_stateful(component):
            components.values[key] = component
        elif action in ("reset", "omit"):
            _leave(key, component, action, components)
        elif asks and action == "reshard" and can_reshard(component):
            carried[key] = component
        else:
            components.values[key] = component.state_dict()
    new = world_of(components.values, size)
    if policy is not None:
        for key in list(components.values):
            if policy.component_action(str(key)) == "reshard" and _has_group_list(components.values[key]):
                _cut_param_groups(key, components, opened, policy, new)
    for key, component in carried.items():
        at(str(key))
        plan = ComponentPlan("reshard", UNTOUCHED)
        if opened.source.selects(f"{key}.*"):
            plan = _ask(key, component, components, opened, rules, new)
        components.plans[str(key)] = plan
    if policy is not None:
        _check_samples(components)
    return components


def _leave(key: Any, component: Stateful, action: Action, components: Components) -> None:
    """Plans an object that is not loaded; with ``reset`` it starts anew where it has a method for that."""
    note = UNTOUCHED
    if action == "reset" and hasattr(component, "reset"):
        components.to_reset.append(key)
        note = "starts anew"
    elif action == "reset":
        note = "not loaded; it has no reset() and stays as it is"
    components.plans[str(key)] = ComponentPlan(action, note)


def _cut_param_groups(key: Any, components: Components, opened: OpenSource, policy: ElasticPolicy, new: World) -> None:
    """Takes the parameter groups of an optimizer out of the values: they are matched by parameter, not by position."""
    name, value = str(key), components.values[key]
    if not opened.source.selects(f"{name}.param_groups.*"):
        return
    plans, groups = components.plans, value["param_groups"]
    if policy.key_action(f"{name}.param_groups.x", name) in ("omit", "reset"):
        plans[name] = replace(plans[name], options=tuple(option_keys(name, groups).values()))
    else:
        plans[name], groups = _merge_groups(name, groups, opened, policy, new)
    if groups is not None:
        components.param_groups[key] = groups
        components.values[key] = {part: member for part, member in value.items() if part != "param_groups"}


def _has_group_list(value: Any) -> bool:
    """Whether it is an optimizer's state with its groups as a list of plain options."""
    groups = value.get("param_groups") if isinstance(value, Mapping) else None
    return isinstance(groups, list) and not any(
        isinstance(option, torch.Tensor) for group in groups for option in group.values()
    )


def _merge_groups(
    name: str, current: list[dict[str, Any]], opened: OpenSource, policy: ElasticPolicy, new: World
) -> tuple[ComponentPlan, list[dict[str, Any]] | None]:
    """The current groups with saved options; ``None`` where the checkpoint has no list of groups."""
    prefix = opened.source.saved_name(f"{name}.param_groups.x").removesuffix(".x")
    try:
        saved = _read(prefix, opened)
    except CannotReshardError as error:
        return _refused(name, error.reason, prefix), None
    if not isinstance(saved, list) or not all("params" in group for group in saved):
        return ComponentPlan("reshard"), None
    options = option_keys(name, current)
    chosen = {place: policy.key_action(fqn, name) for place, fqn in options.items()}
    groups, notes = merge_param_groups(
        saved, current, keeps=lambda index, option: chosen.get((index, option)) in ("reset", "omit")
    )
    reason = "; ".join(note.text for note in notes if note.kind == "problem")
    old = saved_world(opened.metadata)
    bound = [fqn for place, fqn in options.items() if chosen[place] == "error"]
    if bound and old.size != new.size:
        reason = reason or f"the action of {bound[0]} is 'error', and it was saved by {old}, not by {new}"
    moved = find_moved(saved, current)
    if moved and not reason:
        reason = (
            f"its state is saved by position, and {', '.join(moved[:8])} have another one here: they would get the "
            "state of others; save and load by get_optimizer_state_dict, which goes by name"
        )
    problem = Problem("cannot_reshard", name, reason) if reason else None
    plan = ComponentPlan("reshard", "; ".join(map(str, notes)), problem, prefix, tuple(options.values()))
    return plan, groups


def _refused(name: str, reason: str, prefix: str, advice: str = "", remedy: Remedy | None = None) -> ComponentPlan:
    return ComponentPlan("reshard", "", Problem("cannot_reshard", name, reason, advice, remedy), prefix)


def _read(prefix: str, opened: OpenSource) -> Any:
    """The saved state below a key. Damaged or lost files raise their own errors: they are no reason to start anew.

    Raises:
        CannotReshardError: The options of the load do not allow to read a value.
    """
    try:
        return read_saved(opened, prefix)
    except DamagedValueError:
        raise
    except CheckpointReadError as error:
        raise CannotReshardError(str(error), "") from None


def _ask(
    key: Any, component: Any, components: Components, opened: OpenSource, policy: ElasticPolicy, new: World
) -> ComponentPlan:
    """Asks a component for its new state by its own rule."""
    name = str(key)
    prefix = opened.source.saved_prefix(name)
    part = next((glob for glob in policy.actions if glob.startswith(f"{name}.") and glob != f"{name}.*"), None)
    if part is not None:
        detail = f"its own rule is for all its keys, and {part!r} chooses some; load it by 'keep', or name all of it"
        return _refused(name, detail, prefix)
    if not paths_below(prefix, opened.metadata):
        if not component.state_dict():
            return ComponentPlan("reshard", UNTOUCHED)
        is_refused = policy.strict == "error" and not opened.planner.allow_partial_load
        detail = f"Missing key in checkpoint state_dict: {prefix}. The checkpoint has nothing of this component"
        problem = Problem("missing_key", name, detail) if is_refused else None
        return ComponentPlan("reshard", "missing, left as is", problem)
    try:
        saved = _read(prefix, opened)
    except CannotReshardError as error:
        return _refused(name, error.reason, prefix)
    try:
        resharded = reshard_state(component, saved, saved_world(opened.metadata), new)
        plan = ComponentPlan("reshard", resharded.note, saved_prefix=prefix)
    except CannotReshardError as error:
        return _refused(name, error.reason, prefix, f"; {error.remedy}", error.option)
    except DamagedCheckpointError:
        raise
    except Exception as error:
        detail = f"{type(component).__name__} cannot take what was saved ({type(error).__name__}: {error})"
        return _refused(name, detail, prefix)
    components.resharded[key] = resharded
    return plan


def _check_samples(components: Components) -> None:
    """Adds a problem where the run counts samples that no loader served: the states are of different moments."""
    names, counts = disagreeing_states(components.resharded)
    detail = (
        f"samples seen by the run: {counts}; load them from one checkpoint, or reset one of them, or 'keep' the one "
        "that counts"
    )
    plans = components.plans
    for name in names:
        if name in plans and plans[name].saved_prefix is not None:
            plans[name] = replace(plans[name], problem=Problem("cannot_reshard", name, detail))


def world_of(values: Mapping[str, Any], size: int) -> World:
    """The ranks, and the axes of the meshes in a state dict."""
    meshes = set()
    for value in nested_members(values):
        parts = parts_of(value).values() if consists_of_tensors(value) else (value,)
        meshes |= {part.device_mesh for part in parts if isinstance(part, DTensor)}
    return World(size, _core.axes_of([(mesh.shape, mesh.mesh_dim_names) for mesh in meshes]))


def read_saved(opened: OpenSource, prefix: str) -> Any:
    """The value below a key of a checkpoint, nested as it was saved, with whole tensors on the CPU. Not collective."""
    reader, metadata, options = opened.reader, opened.metadata, opened.planner
    paths = paths_below(prefix, metadata)
    saved = {fqn: metadata.state_dict_metadata[fqn] for fqn in paths}
    values: dict[str, Any] = {
        fqn: torch.empty(entry.size, dtype=entry.properties.dtype, device="cpu")
        if isinstance(entry, TensorStorageMetadata)
        else None
        for fqn, entry in saved.items()
    }
    planner = LoadPlanner(False, weights_only=options.weights_only, allow_classes=options.allow_classes)
    planner.set_up_planner(values, metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, True)
    (plan,) = planner.create_global_plan([reader.prepare_local_plan(planner.create_local_plan())])
    (plan,) = reader.prepare_global_plan([plan])
    reader.read_data(planner.finish_plan(plan), planner).wait()
    if prefix in saved:
        return values[prefix]
    return unflatten_state_dict(values, {fqn: ("", *path) for fqn, path in paths.items()}).get("", {})


def paths_below(prefix: str, metadata: Metadata) -> dict[str, Path]:
    """The saved keys below a key, with their paths from there: a part of a path may have dots."""
    below: dict[str, Path] = {}
    for fqn in metadata.state_dict_metadata:
        if fqn == prefix or fqn.startswith(f"{prefix}."):
            path = recorded_path(metadata.planner_data, fqn) or tuple(fqn.split("."))
            ends = itertools.accumulate((len(str(part)) for part in path), lambda end, length: end + 1 + length)
            depth = next((depth for depth, end in enumerate(ends, 1) if end == len(prefix)), None)
            if depth is not None:
                below[fqn] = path[depth:]
    return below
