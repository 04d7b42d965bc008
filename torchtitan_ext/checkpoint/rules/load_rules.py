"""The rules of one load, and what the ranks ask of a checkpoint by them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, get_args

import torch
from torch.distributed.checkpoint.metadata import Metadata

from torchtitan_ext.checkpoint.rules.policy import Action, ElasticPolicy, Source
from torchtitan_ext.checkpoint.tables.key_table import RankTable
from torchtitan_ext.errors import Problem

MODEL = "model"
"""The component of tensors that stand at the top of a state dict, as torchtitan flattens its model; not where an entry
of the state dict has this name."""

UNTOUCHED = "left as is"

WhyNotRead = Literal["missing", "skipped", "left", "refused"]
"""Why a load does not read a key of the state dict: the checkpoint lacks it; lacks it and may (``allow_partial_load``);
the policy, or the source, leaves it out; its saved value has another kind or shape than the target."""


@dataclass(frozen=True)
class ComponentPlan:
    """What one rank does with one component.

    Attributes:
        action: The policy's choice.
        note: The outcome for the report, where it is known before the plan.
        problem: Why the component cannot be loaded.
        saved_prefix: The component has already read all saved keys below this one; ``None`` where it reads none.
        options: Keys of optimizer options (``optimizer.param_groups.0.lr``) that are matched by parameter, not by key.
        is_top: The component is ``MODEL``: the tensors at the top of the state dict, not an entry of it.
        position_class: The class of an object that keeps a position in data and is not ours; see ``data_positions``.
    """

    action: Action
    note: str = ""
    problem: Problem | None = None
    saved_prefix: str | None = None
    options: tuple[str, ...] = ()
    is_top: bool = False
    position_class: str = ""


@dataclass(frozen=True)
class LoadRules:
    """What a load planner follows besides its own options.

    Attributes:
        source: Which keys come from this checkpoint, and under which names.
        policy: What to do with each component, and about missing or unexpected keys; ``None`` is stock's behaviour.
        components: The plan of each component that has been decided already; some components are not in the state
            dict that the planner gets.
        values_first: Nothing changes before the caller calls ``LoadPlanner.change_targets``, after every rank has read
            its non-tensor values: these are what a load most often cannot read.
    """

    source: Source = field(default_factory=Source)
    policy: ElasticPolicy | None = None
    components: Mapping[str, ComponentPlan] = field(default_factory=dict)
    values_first: bool = False

    @property
    def loads_all(self) -> bool:
        """Whether ``is_loaded`` holds for every key: nothing is chosen or left out."""
        policy = self.policy
        takes_all = "*" in self.source.include and not self.source.exclude
        return takes_all and (policy is None or (not policy.actions and policy.default not in ("omit", "reset")))

    def is_loaded(self, fqn: str, *, is_tensor: bool) -> bool:
        """Whether this load fills a flat key of the state dict."""
        component = component_of(fqn, self.components, is_tensor=is_tensor)
        if not self.source.selects(fqn, component):
            return False
        return self.policy is None or self.policy.key_action(fqn, component) not in ("omit", "reset")


@dataclass(frozen=True)
class ReadRequest:
    """What one rank asks of a checkpoint. Keys are those of its state dict.

    Attributes:
        table: The entries to read.
        metadata_name: Names the metadata that the rank has read: after ``use_collectives=False`` each rank has its own.
        rules: Policy and source as text, to compare between ranks.
        saved_names: The checkpoint's names of keys, where they differ.
        not_read: All other keys, but those that are tied.
        advice: What to do about some of the missing keys.
        tied: Keys that the checkpoint lacks and whose target is that of a key that is read: they are filled with it.
        components: The plan of each top-level key that is no tensor.
    """

    table: RankTable
    metadata_name: str
    rules: str = ""
    saved_names: Mapping[str, str] = field(default_factory=dict)
    not_read: Mapping[str, WhyNotRead] = field(default_factory=dict)
    advice: Mapping[str, str] = field(default_factory=dict)
    tied: Mapping[str, str] = field(default_factory=dict)
    components: Mapping[str, ComponentPlan] = field(default_factory=dict)


@dataclass(frozen=True)
class JointRequest:
    """What all ranks together ask of a checkpoint.

    Attributes:
        requests: One per rank, in rank order.
        rules: The coordinator's; ``report.disagreements`` compares the ranks'.
        metadata: The checkpoint's, as the coordinator has read it.
        held: The keys that some rank reads.
    """

    requests: Sequence[ReadRequest]
    rules: LoadRules
    metadata: Metadata
    held: Sequence[str]

    @cached_property
    def wanted(self) -> dict[str, str]:
        """Each key that some rank reads, with its name in the checkpoint."""
        saved_names = {fqn: name for request in self.requests for fqn, name in request.saved_names.items()}
        return {fqn: saved_names.get(fqn, fqn) for fqn in self.held}

    def not_read(self, *reasons: WhyNotRead) -> list[str]:
        """The keys that some rank does not read for one of these reasons."""
        found = (item for request in self.requests for item in request.not_read.items())
        return list(dict.fromkeys(fqn for fqn, why in found if why in reasons))

    @cached_property
    def absent(self) -> list[str]:
        """The keys that the checkpoint lacks for some rank."""
        return self.not_read("missing")

    @cached_property
    def left(self) -> list[str]:
        """The keys that some rank leaves out."""
        return self.not_read("left")

    @cached_property
    def tied(self) -> dict[str, str]:
        """Without keys that some rank lacks: there they have memory of their own."""
        lacking = set(self.not_read("missing", "skipped"))
        found = {fqn: first for request in self.requests for fqn, first in request.tied.items()}
        return {fqn: first for fqn, first in found.items() if fqn not in lacking}

    @cached_property
    def advice(self) -> dict[str, str]:
        return {fqn: text for request in self.requests for fqn, text in request.advice.items()}

    @cached_property
    def components(self) -> dict[str, ComponentPlan]:
        return {name: plan for request in reversed(self.requests) for name, plan in request.components.items()}

    @cached_property
    def known_names(self) -> set[str]:
        """The checkpoint's names of all keys that ranks read, leave out or refuse: none of these is unexpected."""
        return {*self.wanted.values(), *map(self.rules.source.saved_name, self.not_read("left", "refused"))}

    def component_of_keys(self) -> dict[str, str]:
        """The component of each flat key that some rank has in its state dict.

        Components with a rule of their own, whose keys no rank reads, have the key ``<component>.*``.
        """
        keys = list(self.held)
        for request in self.requests:
            why = {**request.not_read, **dict.fromkeys(request.tied, "skipped")}
            keys += sorted(why, key=lambda fqn: get_args(WhyNotRead).index(why[fqn]))
        found = {fqn: component_of(fqn, self.components, is_tensor=True) for fqn in keys}
        for name, plan in self.components.items():
            found.update(dict.fromkeys((f"{name}.*", *plan.options), name))
        return found


def for_components(rules: LoadRules, state_dict: Mapping[Any, Any]) -> LoadRules:
    """The rules with a plan for each top-level key; ``tte.load`` has made these plans before."""
    if rules.components:
        return rules
    policy = rules.policy or ElasticPolicy()
    names = [str(key) for key, value in state_dict.items() if not isinstance(value, torch.Tensor)]
    return replace(rules, components={name: ComponentPlan(policy.component_action(name)) for name in names})


def component_of(fqn: str, components: Mapping[str, ComponentPlan], *, is_tensor: bool) -> str:
    """The top-level key that a flat key stands under, or ``MODEL`` of a tensor at the top."""
    name = fqn
    while name not in components and "." in name:
        name = name.rsplit(".", 1)[0]
    if name in components:
        return name
    has_own_entry = MODEL in components and not components[MODEL].is_top
    return MODEL if is_tensor and not has_own_entry else fqn
