"""What a load is told, and what each rank asks for by it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from torchtitan_ext.checkpoint.rules.policy import Action, ElasticPolicy, Source
from torchtitan_ext.checkpoint.tables.key_table import RankTable
from torchtitan_ext.errors import Problem

MODEL = "model"
"""The component of tensors that stand at the top of a state dict, as torchtitan flattens its model; not where an entry
of the state dict has this name."""

UNTOUCHED = "left as is"


@dataclass(frozen=True)
class ComponentPlan:
    """What one rank does with one component.

    Attributes:
        action: By the policy.
        note: What becomes of it, where that is known before the plan is.
        problem: Why it cannot be done.
        saved_prefix: Its saved entries have been read already, all keys below this one; else ``None``.
        options: Keys of the options of an optimizer's parameter groups, ``optimizer.param_groups.0.lr``, where they are
            matched by parameter instead of being read by key.
        is_top: It is no entry of the state dict but the tensors at its top: see ``MODEL``.
    """

    action: Action
    note: str = ""
    problem: Problem | None = None
    saved_prefix: str | None = None
    options: tuple[str, ...] = ()
    is_top: bool = False


@dataclass(frozen=True)
class LoadRules:
    """What a load planner is told of the load that it is a part of.

    Attributes:
        source: Which keys come from this checkpoint, and under which names.
        earlier: Sources that come first: keys that they select do not come from this one.
        policy: What to do with each component, and about keys that are missing or unexpected; ``None``: as stock.
        components: What becomes of each component by its own rule; some are not in the state dict given to DCP.
        values_first: Nothing is changed before ``LoadPlanner.change_targets``, which the caller calls once every rank
            has read its non-tensor values: what cannot be read back is most often one of them.
        is_alone: Whether the load has no other source.
    """

    source: Source = field(default_factory=Source)
    earlier: tuple[Source, ...] = ()
    policy: ElasticPolicy | None = None
    components: Mapping[str, ComponentPlan] = field(default_factory=dict)
    values_first: bool = False
    is_alone: bool = True

    def selects(self, fqn: str, component: str) -> bool:
        """Whether a flat key of the state dict comes from this checkpoint."""
        chosen = self.source.selects(fqn, component)
        return chosen and not any(source.selects(fqn, component) for source in self.earlier)

    def is_loaded(self, fqn: str, *, is_tensor: bool) -> bool:
        """Whether a flat key of the state dict is to be filled from this checkpoint."""
        component = component_of(fqn, self.components, is_tensor=is_tensor)
        if not self.selects(fqn, component):
            return False
        return self.policy is None or self.policy.key_action(fqn, component) not in ("omit", "reset")


@dataclass(frozen=True)
class ReadRequest:
    """What a rank asks for.

    Attributes:
        table: The entries to be read, under the names of the state dict.
        saved_names: What they are called in the checkpoint, where that differs.
        missing: Keys that the checkpoint lacks.
        advice: What to do about some of these, known from their targets.
        skipped: Those that it may lack (``allow_partial_load``).
        left: Keys that are not loaded, by the policy or because no source selects them.
        refused: Keys whose saved value is of another kind or shape than the target.
        components: By top-level key; those of the state dict that are no tensors.
        rules: By which policy, and from which source, as text.
        metadata_name: Which metadata it read: ranks have one each after ``use_collectives=False``.
    """

    table: RankTable
    metadata_name: str
    rules: str = ""
    saved_names: Mapping[str, str] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    advice: Mapping[str, str] = field(default_factory=dict)
    skipped: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    components: Mapping[str, ComponentPlan] = field(default_factory=dict)


def for_components(rules: LoadRules, state_dict: Mapping[Any, Any]) -> LoadRules:
    """The rules with what becomes of each top-level key; ``tte.load`` has worked that out before."""
    if rules.components:
        return rules
    policy = rules.policy or ElasticPolicy()
    names = [str(key) for key, value in state_dict.items() if not isinstance(value, torch.Tensor)]
    return replace(rules, components={name: ComponentPlan(policy.component_action(name)) for name in names})


def held_keys(requests: Sequence[ReadRequest], read: Iterable[str]) -> dict[str, str]:
    """The component of each flat key that some rank has in its state dict.

    Args:
        read: Those that are to be read. Components with a rule of their own, whose keys are not among them, have ``*``.
    """
    components = {name: plan for request in requests for name, plan in request.components.items()}
    keys = list(read)
    for request in requests:
        keys += (*request.missing, *request.skipped, *request.left, *request.refused)
    held = {fqn: component_of(fqn, components, is_tensor=True) for fqn in keys}
    for name, plan in components.items():
        held.update(dict.fromkeys((f"{name}.*", *plan.options), name))
    return held


def advice_of(requests: Sequence[ReadRequest]) -> dict[str, str]:
    """What to do about missing keys, as some rank knows it."""
    return {fqn: text for request in requests for fqn, text in request.advice.items()}


def component_of(fqn: str, components: Mapping[str, ComponentPlan], *, is_tensor: bool) -> str:
    """The top-level key that a flat key stands under, or ``MODEL`` of a tensor at the top."""
    name = fqn
    while name not in components and "." in name:
        name = name.rsplit(".", 1)[0]
    if name in components:
        return name
    has_own_entry = MODEL in components and not components[MODEL].is_top
    return MODEL if is_tensor and not has_own_entry else fqn
