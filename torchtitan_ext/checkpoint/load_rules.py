"""What a load is told, and what each rank asks for by it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from torchtitan_ext.checkpoint.policy import Action, ElasticPolicy, Source
from torchtitan_ext.checkpoint.rank_table import RankTable
from torchtitan_ext.errors import Problem

MODEL = "model"
"""The component of tensors that stand at the top of a state dict, as torchtitan flattens its model."""

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
    """

    action: Action
    note: str = ""
    problem: Problem | None = None
    saved_prefix: str | None = None
    options: tuple[str, ...] = ()


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
    """

    source: Source = field(default_factory=Source)
    earlier: tuple[Source, ...] = ()
    policy: ElasticPolicy | None = None
    components: Mapping[str, ComponentPlan] = field(default_factory=dict)
    values_first: bool = False

    def selects(self, fqn: str) -> bool:
        """Whether a flat key of the state dict comes from this checkpoint."""
        return self.source.selects(fqn) and not any(source.selects(fqn) for source in self.earlier)

    def is_loaded(self, fqn: str, *, is_tensor: bool) -> bool:
        """Whether a flat key of the state dict is to be filled from this checkpoint."""
        if self.policy is None or not self.selects(fqn):
            return self.selects(fqn)
        component = component_of(fqn, self.components, is_tensor=is_tensor)
        return self.policy.key_action(fqn, component) not in ("omit", "reset")


@dataclass(frozen=True)
class ReadRequest:
    """What a rank asks for.

    Attributes:
        table: The entries to be read, under the names of the state dict.
        saved_names: What they are called in the checkpoint, where that differs.
        missing: Keys that the checkpoint lacks.
        skipped: Those that it may lack (``allow_partial_load``).
        left: Keys that are not loaded, by the policy or because no source selects them.
        refused: Keys whose saved value is of another kind or shape than the target.
        components: By top-level key.
        rules: By which policy, and from which source, as text.
        metadata_name: Which metadata it read: ranks have one each after ``use_collectives=False``.
    """

    table: RankTable
    metadata_name: str
    rules: str = ""
    saved_names: Mapping[str, str] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    components: Mapping[str, ComponentPlan] = field(default_factory=dict)


def for_components(rules: LoadRules, state_dict: Mapping[Any, Any]) -> LoadRules:
    """The rules with what becomes of each top-level key; ``tte.load`` has worked that out before."""
    policy = rules.policy
    if policy is None or rules.components:
        return rules
    names = [str(key) for key, value in state_dict.items() if not isinstance(value, torch.Tensor)]
    return replace(rules, components={name: ComponentPlan(policy.component_action(name)) for name in names})


def component_of(fqn: str, components: Collection[str], *, is_tensor: bool) -> str:
    """The top-level key that a flat key stands under."""
    name = fqn
    while name not in components and "." in name:
        name = name.rsplit(".", 1)[0]
    if name in components:
        return name
    return MODEL if is_tensor else fqn
