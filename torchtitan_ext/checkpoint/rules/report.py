"""What a load will do with each component, and what stands in its way: one report, the same on every rank.

Pure functions of what the ranks ask for and of the checkpoint's metadata, called on the coordinator.
"""

from __future__ import annotations

import fnmatch
import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from torchtitan_ext.checkpoint.rules.load_rules import (
    MODEL,
    UNTOUCHED,
    ComponentPlan,
    ReadRequest,
    advice_of,
    component_of,
)
from torchtitan_ext.checkpoint.rules.missing_keys import (
    missing_problems,
    name_problems,
    read_prefixes,
    unexpected_keys,
    unexpected_problems,
    unused_names,
)
from torchtitan_ext.checkpoint.rules.param_groups import find_option_gaps
from torchtitan_ext.checkpoint.rules.policy import Action, ElasticPolicy, Source
from torchtitan_ext.checkpoint.rules.remedy import find_remedy, joined_remedy
from torchtitan_ext.checkpoint.tables.component import World, saved_world
from torchtitan_ext.errors import Problem, named

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ComponentLine:
    """One line of a report."""

    name: str
    action: Action
    outcome: str


@dataclass(frozen=True)
class LoadReport:
    """What a load does, or would do.

    Attributes:
        old: The world that saved, as far as the checkpoint says.
        new: The world that loads.
        components: One line each.
        missing: Keys that the state dict has and the checkpoint lacks; their targets stay as they are.
        unexpected: Keys that the checkpoint has in a component that is loaded, and that nothing asks for.
        unused: What the policy names and neither side has: perhaps misspelt.
        problems: Why it is refused; empty for a load that goes.
        remedy_policy: The policy that would make it go, where one would.
    """

    old: World
    new: World
    components: tuple[ComponentLine, ...]
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = ()
    remedy_policy: ElasticPolicy | None = None

    @property
    def remedy(self) -> str:
        """The policy that would make it go, as the call that makes it; empty where none would."""
        return "" if self.remedy_policy is None else repr(self.remedy_policy)

    @property
    def way_on(self) -> str:
        """The last line of a refusal: how the load would go. Frameworks say it in their users' terms."""
        return f"To go on without these: policy={self.remedy}" if self.remedy else ""

    def __str__(self) -> str:
        widths = [max((len(line.name) for line in self.components), default=0), max(map(len, ("reshard", "action")))]
        lines = [f"saved by {self.old}, loaded by {self.new}"]
        lines += [f"  {line.name:<{widths[0]}}  {line.action:<{widths[1]}}  {line.outcome}" for line in self.components]
        titles = ("missing", "unexpected", "named by the policy, and not there")
        for title, keys in zip(titles, (self.missing, self.unexpected, self.unused), strict=True):
            if keys:
                lines.append(f"  {title}: {named(keys)}")
        return "\n".join(lines)


def build_report(
    requests: Sequence[ReadRequest],
    wanted: Mapping[str, str],
    new: World,
    metadata: Metadata,
    policy: ElasticPolicy,
    source: Source,
    selects: Callable[[str, str], bool],
    problems: Sequence[Problem],
) -> LoadReport:
    """Puts together what all ranks ask for.

    Args:
        requests: One per rank, in rank order.
        wanted: What some rank asks for, each key with its name in the checkpoint.
        new: The world that loads.
        selects: Whether a key of the state dict, of a component, comes from this checkpoint.
        problems: Those known already; of components, and of missing and unexpected keys, they are found here.
    """
    components = {name: plan for request in reversed(requests) for name, plan in request.components.items()}
    old = saved_world(metadata)
    of_components = [plan.problem for request in requests for plan in request.components.values() if plan.problem]
    problems = [*problems, *of_components, *_world_problems(components, policy, wanted, old, new)]
    left = {fqn for request in requests for fqn in request.left}
    absent = list(dict.fromkeys(fqn for request in requests for fqn in request.missing))
    saved = metadata.state_dict_metadata
    is_read = read_prefixes(components)
    own = [fqn for fqn in left if source.saved_name(fqn) in saved]
    gaps = find_option_gaps((source.own_name(fqn) for fqn in saved if not is_read(fqn)), [*wanted, *absent, *own])
    settled = {*gaps.fillable, *gaps.dropped}
    missing = [fqn for fqn in absent if fqn not in settled]
    loaded = Counter(
        component_of(fqn, components, is_tensor=isinstance(saved.get(name), TensorStorageMetadata))
        for fqn, name in wanted.items()
    )
    for name in loaded:
        components.setdefault(name, ComponentPlan(policy.component_action(name), is_top=name == MODEL))
    refused = (fqn for request in requests for fqn in request.refused)
    known = {*wanted.values(), *map(source.saved_name, chain(left, refused))}
    unexpected = [
        fqn for fqn in unexpected_keys(metadata, known, components, policy, source, selects) if fqn not in settled
    ]
    options = {name: plan.options for name, plan in components.items() if plan.options}
    names = {*components, *wanted, *absent, *left, *map(source.own_name, saved), *chain(*options.values())}
    unused = unused_names(policy, components, names)
    if policy.strict == "error":
        problems += name_problems(unused, names, {*wanted, *left, *(f"{name}.param_groups" for name in options)})
        problems += missing_problems(missing, metadata, new.size, advice_of(requests))
        problems += unexpected_problems(unexpected, missing)

    troubled = {problem.fqn for problem in problems}
    counts = {"missing": missing, "unexpected": unexpected, UNTOUCHED: left}
    option_notes = {"filled from this run": gaps.fillable, "dropped": gaps.dropped}
    lines = [
        ComponentLine(name, plan.action, _outcome(name, plan, loaded[name], counts, option_notes, components, troubled))
        for name, plan in components.items()
    ]
    problems = list(dict.fromkeys(problems))
    remedy = find_remedy(problems, policy, components, missing, unexpected, wanted)
    return LoadReport(old, new, tuple(lines), tuple(missing), tuple(unexpected), tuple(unused), tuple(problems), remedy)


def _outcome(
    name: str,
    plan: ComponentPlan,
    num_loaded: int,
    counts: Mapping[str, Collection[str]],
    options: Mapping[str, Sequence[str]],
    components: Mapping[str, ComponentPlan],
    troubled: Collection[str],
) -> str:
    """What becomes of a component, in a line.

    Args:
        counts: Keys of all components, by what is said of them; those of this one are counted.
        options: Flat keys of optimizer options, by what is said of them; those of this component are named.
        troubled: Keys with problems.
    """
    facts = ["REFUSED"] if any(fqn == name or fqn.startswith(f"{name}.") for fqn in troubled) else []
    facts += [plan.note] if plan.note else []
    facts += [f"{num_loaded} {'entry' if num_loaded == 1 else 'entries'}"] if num_loaded else []
    for what, keys in counts.items():
        count = sum(component_of(fqn, components, is_tensor=True) == name for fqn in keys)
        facts += [f"{count} {what}"] if count and (facts or what != UNTOUCHED) else []
    for what, option_keys in options.items():
        named = sorted({fqn.rsplit(".", 1)[1] for fqn in option_keys if fqn.startswith(f"{name}.")})
        facts += [f"{', '.join(named)} {what}"] if named and num_loaded else []
    return ", ".join(facts) or UNTOUCHED


def join_reports(reports: Sequence[tuple[str, LoadReport]], policy: ElasticPolicy) -> LoadReport:
    """One report of a load by a policy from several checkpoints, each with its name."""
    (_, first), *others = reports
    if not others:
        return first
    lines = {line.name: replace(line, outcome=UNTOUCHED) for _, report in reports for line in report.components}
    for name, report in reports:
        for line in report.components:
            if line.outcome != UNTOUCHED:
                known = lines[line.name].outcome
                before = "" if known == UNTOUCHED else f"{known}; "
                lines[line.name] = replace(line, outcome=f"{before}{line.outcome} from {name}")
    return LoadReport(
        first.old,
        first.new,
        tuple(lines.values()),
        tuple(fqn for _, report in reports for fqn in report.missing),
        tuple(fqn for _, report in reports for fqn in report.unexpected),
        tuple(name for name in first.unused if all(name in report.unused for _, report in others)),
        tuple(problem for _, report in reports for problem in report.problems),
        joined_remedy([report.remedy_policy for _, report in reports if report.problems], policy),
    )


def warn_of_leftovers(report: LoadReport, policy: ElasticPolicy) -> None:
    """Logs what a load leaves aside, as far as the policy asks for that."""
    if policy.strict == "warn" and (report.missing or report.unexpected):
        logger.warning("load: %s", report)
    elif policy.strict != "ignore" and report.unused:
        logger.warning("load: the policy names what is not there: %s", ", ".join(report.unused))


def disagreements(rules: Sequence[str]) -> list[Problem]:
    """A problem where ranks load by other rules than rank 0; one text per rank, in rank order."""
    for rank, own in enumerate(rules):
        if own != rules[0]:
            detail = f"rank 0 loads by {rules[0]}, rank {rank} by {own}; pass the same policy and sources on every rank"
            return [Problem("ranks_disagree", "policy", detail)]
    return []


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
