"""Loads a state dict whose components cross to this world, each by its own rule, all or none.

The order is what makes it so: what components have saved is read and asked first, which changes nothing; then the plan
of all tensors is made, in which the refusals of all ranks come together; then tensors are read in place; and only then
do components take their new state.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint._storage_utils import _storage_setup
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.checkpoint.storage import StorageReader
from torch.distributed.checkpoint.utils import _DistWrapper

from torchtitan_ext.checkpoint.component_plans import Components, Opened, cut_by_component
from torchtitan_ext.checkpoint.dcp_failure import own_errors
from torchtitan_ext.checkpoint.load_planner import LoadPlanner
from torchtitan_ext.checkpoint.policy import ElasticPolicy, Source
from torchtitan_ext.checkpoint.report import LoadReport, disagreements, join_reports
from torchtitan_ext.errors import Problem, StateRefusedError, refusal


class Rehearsal(LoadPlanner):
    """Plans a load, refuses what it would refuse, and reads nothing."""

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        self.report = central_plan.planner_data.report
        return LoadPlan([])


def load_components(
    state_dict: dict[str, Any],
    sources: Sequence[Source],
    planner: LoadPlanner,
    policy: ElasticPolicy,
    *,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
) -> LoadReport:
    """Loads a state dict by a policy, from one or several checkpoints. Collective over ``process_group``.

    Args:
        state_dict: By component; tensors are filled, ``Stateful`` objects take their new state, other values are
            replaced.
        sources: Where keys come from; the first that selects a key counts.
        planner: With the options of the load; copied for each source.
        policy: What to do with each component.

    Returns:
        What was done, the same on every rank.

    Raises:
        StateRefusedError: With the report; nothing was changed. The same on every rank.
        CheckpointFailedError: A rank failed while reading, or while its components took their state; names the
            components that are undefined now.
    """
    no_dist = no_dist or not (dist.is_available() and dist.is_initialized())
    group = _DistWrapper(process_group, not no_dist, 0)
    opened: list[Opened] = []
    components = Components()
    failures = partial(own_errors, "load", process_group, no_dist=no_dist)

    def prepare() -> str:
        nonlocal components
        for source in sources:
            opened.append(_open(source, [other.source for other in opened], planner, policy, group.rank))
        components = cut_by_component(state_dict, opened, policy, group.get_world_size() if group.use_dist else 1)
        for one, plans in zip(opened, components.plans, strict=True):
            one.planner.components = plans
        return f"{policy!r}, {list(sources)}"

    with failures(phase="components were asked for their part; nothing was changed"):
        problems = disagreements(group.all_gather("components", prepare))
    if problems:
        raise refusal("load", problems)
    names = map(str, components.values)
    loaded = tuple(name for name in names if policy.component_action(name) not in ("omit", "reset"))
    changed = (*loaded, *map(str, components.resharded), *map(str, components.to_reset))

    def read(one: Opened, planner: LoadPlanner) -> None:
        def undefined() -> tuple[str, ...]:
            return loaded if any(other.planner.is_reading for other in opened) else ()

        def phase() -> str:
            if not undefined():
                return "the load was planned; nothing was changed"
            return f"tensors were read; these may be part-written: {', '.join(loaded)}"

        with failures(phase=phase, undefined=undefined):
            state_dict_loader.load(
                components.values,
                storage_reader=one.reader,
                planner=planner,
                process_group=process_group,
                no_dist=no_dist,
            )

    if len(opened) > 1:
        _rehearse(opened, read, policy)
    for one in opened:
        read(one, one.planner)
    reports = [(one.name, one.planner.report) for one in opened if one.planner.report is not None]
    report = join_reports(reports, policy)

    def take() -> None:
        for name, component in state_dict.items():
            if name in components.resharded:
                component.load_state_dict(components.resharded[name].state)
            elif name in components.values:
                value = components.values[name]
                if name in components.param_groups:
                    value = {**value, "param_groups": components.param_groups[name]}
                if isinstance(component, nn.Module) and any(held.is_meta for held in component.state_dict().values()):
                    component.load_state_dict(value, assign=True)
                elif isinstance(component, Stateful):
                    component.load_state_dict(value)
                elif isinstance(component, dict):
                    component.update(value)
                else:
                    state_dict[name] = value
        # Last: what starts anew may ask the others, as RngState asks for the step.
        for name in components.to_reset:
            state_dict[name].reset()

    with failures(phase=f"components took their state; undefined are {', '.join(changed)}", undefined=lambda: changed):
        group.all_gather("apply", take)
    return report


def _open(source: Source, earlier: Sequence[Source], planner: LoadPlanner, policy: ElasticPolicy, rank: int) -> Opened:
    reader = cast(StorageReader, _storage_setup(source.storage_reader, source.path, reader=True))
    name = str(source.path or type(reader).__name__)
    try:
        metadata = reader.read_metadata()
    except Exception:
        if _has_metadata_of(reader, rank):
            detail = (
                "each rank has metadata of its own part alone (use_collectives=False); load it without a policy, on "
                "the ranks of the save"
            )
            raise refusal("load", [Problem("broken_checkpoint", name, detail)]) from None
        raise
    own = copy.copy(planner)
    own.source, own.earlier_sources, own.policy = source, tuple(earlier), policy
    return Opened(name, source, reader, metadata, own)


def _has_metadata_of(reader: StorageReader, rank: int) -> bool:
    try:
        reader.read_metadata(rank=rank)
    except Exception:
        return False
    return True


def _rehearse(opened: Sequence[Opened], read: Callable[[Opened, LoadPlanner], None], policy: ElasticPolicy) -> None:
    """Refuses what any of several sources refuses, all of it together, before the first is read."""
    reports: list[tuple[str, LoadReport]] = []
    problems: list[Problem] = []
    for one in opened:
        rehearsal = copy.copy(one.planner)
        rehearsal.__class__ = Rehearsal
        try:
            read(one, rehearsal)
        except StateRefusedError as error:
            problems += error.problems
            rehearsal.report = error.report
        if rehearsal.report is not None:
            reports.append((one.name, rehearsal.report))
    if problems:
        raise refusal("load", problems, join_reports(reports, policy))
