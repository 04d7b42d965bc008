"""One report of what a load will do with each component, and why it is refused: the same on every rank.

The coordinator makes it, by pure functions, from the ranks' requests and the metadata of the checkpoint.
"""

from __future__ import annotations

import fnmatch
import logging
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from torchtitan_ext._core import OptionGaps, find_option_gaps
from torchtitan_ext.checkpoint.rules.data_positions import position_problems
from torchtitan_ext.checkpoint.rules.load_rules import MODEL, UNTOUCHED, ComponentPlan, JointRequest, component_of
from torchtitan_ext.checkpoint.rules.missing_keys import (
    fresh_optimizers,
    is_read_before,
    missing_problems,
    misspelt_layouts,
    name_problems,
    nothing_matches,
    unexpected_keys,
    unexpected_problems,
    unexpected_warnings,
    unused_filters,
    unused_names,
)
from torchtitan_ext.checkpoint.rules.policy import BY_DEFAULT, Action, ElasticPolicy
from torchtitan_ext.checkpoint.tables.agreement import Agreement
from torchtitan_ext.checkpoint.tables.component import World, saved_world, unclaimed_problems
from torchtitan_ext.errors import Problem, differing, named
from torchtitan_ext.layout.layout import LayoutRules
from torchtitan_ext.storage.metadata.lazy_metadata import is_saved_tensor

logger = logging.getLogger(__name__)

NO_TENSOR = "it is no tensor, here or in the checkpoint"
"""Why a value is not proved."""


@dataclass(frozen=True)
class ComponentLine:
    """One line of a report."""

    name: str
    action: Action
    outcome: str


@dataclass(frozen=True)
class LoadProof:
    """What a load with ``prove=True`` has compared with the fingerprints of the save.

    Attributes:
        proved: Keys of the tensors that are what was saved, on all ranks.
        unproved: All other keys of the state dict, each with the reason.
    """

    proved: tuple[str, ...]
    unproved: Mapping[str, str]

    def __str__(self) -> str:
        of_reason: dict[str, list[str]] = {}
        for fqn, reason in self.unproved.items():
            of_reason.setdefault(reason, []).append(fqn)
        reasons = [f"unproved, {reason}: {named(keys)}" for reason, keys in of_reason.items()]
        return "\n".join([f"proved: {len(self.proved)} tensor(s)", *reasons])


@dataclass(frozen=True)
class ReadSharing:
    """How ranks that want the same bytes got them, in a load with ``share_reads``.

    Attributes:
        chosen: Whether one rank read what several want, and sent it to the others.
        reason: Why not.
        bytes_wanted: What the ranks want of tensors, all together.
        bytes_once: The same, with what several ranks want counted once.
    """

    chosen: bool
    reason: str
    bytes_wanted: int
    bytes_once: int

    def __str__(self) -> str:
        wanted = f"ranks wanted {self.bytes_wanted:,} bytes, which are {self.bytes_once:,}"
        if not self.chosen:
            return f"{wanted}, each rank read its own ({self.reason})"
        return f"{wanted}, one rank read what several want"


@dataclass(frozen=True)
class LoadReport:
    """What a load does, or would do.

    Attributes:
        old: The world that saved, as far as the checkpoint says.
        new: The world that loads.
        components: One line each.
        missing: Keys of the state dict that the checkpoint lacks; their targets stay as they are.
        unexpected: Keys of the checkpoint, in loaded components, that nothing asks for.
        tied: Keys of the state dict that the checkpoint lacks and that are one memory with a loaded key, by that key.
        unused: Names in the policy that match nothing in state dict or checkpoint: perhaps misspelt.
        problems: Why the load is refused; empty where it is not.
        proof: What was compared with the fingerprints of the save, if the load was told to prove.
        sharing: How ranks got what several of them want, where they were to share it (``share_reads``).
        padded: What transforms make with elements that no checkpoint has (``transforms.pad``).
    """

    old: World
    new: World
    components: tuple[ComponentLine, ...]
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = ()
    proof: LoadProof | None = None
    sharing: ReadSharing | None = None
    tied: Mapping[str, str] = field(default_factory=dict)
    padded: tuple[str, ...] = ()

    def __str__(self) -> str:
        widths = [max((len(line.name) for line in self.components), default=0), max(map(len, ("reshard", "action")))]
        lines = [f"saved by {self.old}, loaded by {self.new}"]
        lines += [f"  {line.name:<{widths[0]}}  {line.action:<{widths[1]}}  {line.outcome}" for line in self.components]
        titles = ("missing", "unexpected", "named by the policy, and not there")
        for title, keys in zip(titles, (self.missing, self.unexpected, self.unused), strict=True):
            if keys:
                lines.append(f"  {title}: {named(keys)}")
        if self.tied:
            lines.append(f"  tied: {named([f'{fqn} is {first}' for fqn, first in self.tied.items()])}")
        lines += [f"  padded: {named(self.padded)}"] if self.padded else []
        lines += [] if self.proof is None else [f"  {line}" for line in str(self.proof).splitlines()]
        lines += [] if self.sharing is None else [f"  {self.sharing}"]
        return "\n".join(lines)


def review(
    joint: JointRequest,
    agreement: Agreement,
    layouts: LayoutRules,
    allow_unclaimed: Sequence[str],
    problems: Sequence[Problem],
) -> tuple[list[Problem], list[str], LoadReport | None]:
    """All problems of a load, those known already first; its warnings; and with a policy its report."""
    metadata, num_ranks = joint.metadata, len(joint.requests)
    filter_problems, warned = unused_filters(joint)
    new = agreement.ranks_and_meshes()
    of_positions, doubts = position_problems(joint, saved_world(metadata), new)
    warned += doubts
    problems = [
        *problems,
        *(plan.problem for request in joint.requests for plan in request.components.values() if plan.problem),
        *of_positions,
        *nothing_matches(joint),
        *unclaimed_problems(set(joint.wanted.values()), num_ranks, metadata, allow_unclaimed),
        *disagreements([request.rules for request in joint.requests]),
        *misspelt_layouts(joint, agreement, layouts),
        *filter_problems,
    ]
    report, of_unexpected = build_report(joint, new, problems, allow_unclaimed)
    return list(report.problems), warned + of_unexpected, None if joint.rules.policy is None else report


def build_report(
    joint: JointRequest, new: World, problems: Sequence[Problem], allow_unclaimed: Collection[str]
) -> tuple[LoadReport, list[str]]:
    """The report of a load, by the default policy where it has none, with the problems of components, of missing and of
    unexpected keys; and what is to be warned of."""
    policy, old, components = joint.rules.policy or BY_DEFAULT, saved_world(joint.metadata), dict(joint.components)
    wanted, left, absent = joint.wanted, joint.left, joint.absent
    problems = [*problems, *_world_problems(components, policy, wanted, old, new)]
    gaps = _option_gaps(joint, components)
    # Without a policy stock's rule holds: nothing that is missing keeps its value.
    settled = {*gaps.dropped, *(gaps.fillable if joint.rules.policy is not None else ())}
    missing = [fqn for fqn in absent if fqn not in settled]
    loaded = _count_loaded(joint, components)
    for name in loaded:
        components.setdefault(name, ComponentPlan(policy.component_action(name), is_top=name == MODEL))
    unexpected = [fqn for fqn in _unexpected_keys(joint, components, allow_unclaimed) if fqn not in settled]
    options = {name: plan.options for name, plan in components.items() if plan.options}
    known = map(joint.rules.source.own_name, joint.metadata.state_dict_metadata)
    names = {*components, *wanted, *absent, *joint.tied, *left, *known, *chain(*options.values())}
    unused = unused_names(policy, components, names)
    if policy.strict == "error":
        problems += name_problems(unused, names, {*wanted, *left, *(f"{name}.param_groups" for name in options)})
        problems += missing_problems(missing, joint.metadata, new.size, joint.advice)
    of_unexpected, warned = _judge_unexpected(joint, components, unexpected, missing)
    problems = list(dict.fromkeys([*problems, *of_unexpected]))
    counts = {"missing": missing, "unexpected": unexpected, UNTOUCHED: left}
    report = LoadReport(
        old,
        new,
        _component_lines(components, problems, loaded, counts, gaps),
        tuple(missing),
        tuple(unexpected),
        tuple(unused),
        tuple(problems),
        tied=joint.tied,
    )
    return report, warned


def _option_gaps(joint: JointRequest, components: Mapping[str, ComponentPlan]) -> OptionGaps:
    """Which options of flat optimizer state dicts only one side has."""
    source, saved, is_read = joint.rules.source, joint.metadata.state_dict_metadata, is_read_before(components)
    asked = [*joint.wanted, *joint.absent, *(fqn for fqn in joint.left if source.saved_name(fqn) in saved)]
    return find_option_gaps((source.own_name(fqn) for fqn in saved if not is_read(fqn)), asked)


def _count_loaded(joint: JointRequest, components: Mapping[str, ComponentPlan]) -> Counter[str]:
    """How many keys of each component are read."""
    saved = joint.metadata.state_dict_metadata
    return Counter(
        component_of(fqn, components, is_tensor=bool(is_saved_tensor(saved, name)))
        for fqn, name in joint.wanted.items()
    )


def _only_warns(policy: ElasticPolicy) -> bool:
    """Whether unexpected keys are only warned of, though missing ones are refused."""
    return policy.unexpected == "warn" != policy.strict


def _unexpected_keys(
    joint: JointRequest, components: Mapping[str, ComponentPlan], allow_unclaimed: Collection[str]
) -> list[str]:
    policy = joint.rules.policy or BY_DEFAULT
    if not _only_warns(policy):
        return unexpected_keys(joint, components, policy)
    # What stands beside a loaded tensor, at the top of a state dict, is no part of what was asked for.
    policy = policy.with_actions({**policy.actions, **dict.fromkeys(allow_unclaimed, "omit")})
    return unexpected_keys(joint, joint.components, policy)


def _judge_unexpected(
    joint: JointRequest,
    components: Mapping[str, ComponentPlan],
    unexpected: Sequence[str],
    missing: Sequence[str],
) -> tuple[list[Problem], list[str]]:
    """The problems of keys that only the checkpoint has, and what is to be warned of."""
    policy = joint.rules.policy or BY_DEFAULT
    if policy.unexpected != "error" and not _only_warns(policy):
        return [], []
    options = chain(*(plan.options for plan in components.values()))
    asked = [*joint.wanted, *joint.absent, *options]
    by_policy, by_source = (
        "policy=ElasticPolicy({{{glob!r}: 'omit'}})",
        "LoadPlanner(source=Source(exclude=[{glob!r}]))",
    )
    how_to_omit = by_source if joint.rules.policy is None else by_policy
    problems, others = fresh_optimizers(unexpected, asked, how_to_omit)
    if _only_warns(policy):
        return problems, unexpected_warnings(others, joint.wanted, components)
    return [*problems, *unexpected_problems(others, missing)], []


def _component_lines(
    components: Mapping[str, ComponentPlan],
    problems: Sequence[Problem],
    loaded: Counter[str],
    keys: Mapping[str, Sequence[str]],
    gaps: OptionGaps,
) -> tuple[ComponentLine, ...]:
    """A line for each component. ``keys`` are those that are not read, by what is said of them."""
    troubled = {problem.fqn for problem in problems}
    counts = {what: Counter(component_of(fqn, components, is_tensor=True) for fqn in of) for what, of in keys.items()}
    lines = []
    for name, plan in components.items():
        facts = ["REFUSED"] if any(fqn == name or fqn.startswith(f"{name}.") for fqn in troubled) else []
        facts += [plan.note] if plan.note else []
        facts += [f"{loaded[name]} {'entry' if loaded[name] == 1 else 'entries'}"] if loaded[name] else []
        for what, count in counts.items():
            facts += [f"{count[name]} {what}"] if count[name] and (facts or what != UNTOUCHED) else []
        for what, options in (("filled from this run", gaps.fillable), ("dropped", gaps.dropped)):
            short = sorted({fqn.rsplit(".", 1)[1] for fqn in options if fqn.startswith(f"{name}.")})
            facts += [f"{', '.join(short)} {what}"] if short and loaded[name] else []
        lines.append(ComponentLine(name, plan.action, ", ".join(facts) or UNTOUCHED))
    return tuple(lines)


def warn_of_leftovers(report: LoadReport, policy: ElasticPolicy) -> None:
    """Logs missing, unexpected and unused names, as ``strict`` says."""
    if policy.strict == "warn" and (report.missing or (report.unexpected and policy.unexpected == "warn")):
        logger.warning("load: %s", report)
    elif policy.strict != "ignore" and report.unused:
        logger.warning("load: the policy names what is not there: %s", ", ".join(report.unused))


def warn_of_unproved(proof: LoadProof) -> None:
    """Logs the tensors that a load has not proved; values that are no tensors are in the report."""
    tensors = {fqn: reason for fqn, reason in proof.unproved.items() if reason != NO_TENSOR}
    if tensors:
        logger.warning("load: %s", LoadProof(proof.proved, tensors))


def disagreements(rules: Sequence[str]) -> list[Problem]:
    """The problem that ranks load by different rules, which each of them gives as text."""
    return differing("policy", rules, show=str, advice="pass the same policy and Source on every rank")


def _world_problems(
    components: Mapping[str, ComponentPlan], policy: ElasticPolicy, wanted: Collection[str], old: World, new: World
) -> list[Problem]:
    if old.size == new.size:
        return []
    names = [name for name, plan in components.items() if plan.action == "error"]
    for glob, action in policy.actions.items():
        if action == "error" and glob not in names and fnmatch.filter(wanted, glob):
            names.append(glob)
    detail = f"its action is 'error', and it was saved by {old}, not by {new}; load in that world, or choose another"
    return [Problem("cannot_reshard", name, detail) for name in names]
