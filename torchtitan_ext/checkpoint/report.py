"""What a load will do with each component, and what stands in its way: one report, the same on every rank.

Pure functions of what the ranks ask for and of the checkpoint's metadata, called on the coordinator.
"""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata

from torchtitan_ext.checkpoint.component import World
from torchtitan_ext.checkpoint.key_table import KeyTable, TensorEntry
from torchtitan_ext.checkpoint.param_groups import find_option_gaps
from torchtitan_ext.checkpoint.policy import Action, ElasticPolicy, Source
from torchtitan_ext.errors import Problem
from torchtitan_ext.layout.rules import canonical_fqn

MODEL = "model"
"""The component of tensors that stand at the top of a state dict, as torchtitan flattens its model."""

WORLD_KEY = "torchtitan_ext.world"
"""Where a save's metadata says which world wrote it: in ``planner_data``, which readers look up by key only."""

# A component such as dp_rank_7 or rank_7: an entry that each rank keeps for itself. Not layers.7.
_PER_RANK = re.compile(r"(?:^|\.)(?:[^.]*_)?rank_?\d+(?=\.|$)")

UNTOUCHED = "left as is"

_MAX_NAMED_KEYS = 10

# A remedy of more lines is none: it becomes strict="ignore".
_MAX_GLOBS = 20


@dataclass(frozen=True)
class ComponentPlan:
    """What one rank does with one component.

    Attributes:
        action: By the policy.
        note: What becomes of it, where that is known before the plan is.
        problem: Why it cannot be done.
        saved_prefix: Its saved entries have been read already, all keys below this one; else ``None``.
    """

    action: Action
    note: str = ""
    problem: Problem | None = None
    saved_prefix: str | None = None


@dataclass(frozen=True)
class ReadRequest:
    """What a rank asks for.

    Attributes:
        table: The entries to be read, under the names of the state dict.
        saved_names: What they are called in the checkpoint, where that differs.
        missing: Keys that the checkpoint lacks.
        left: Keys that are not loaded, by the policy or because no source selects them.
        components: By top-level key.
        rules: By which policy, and from which source, as text.
        metadata_name: Which metadata it read: ranks have one each after ``use_collectives=False``.
    """

    table: KeyTable
    metadata_name: str
    rules: str = ""
    saved_names: Mapping[str, str] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    components: Mapping[str, ComponentPlan] = field(default_factory=dict)

    def saved_name(self, fqn: str) -> str:
        return self.saved_names.get(fqn, fqn)


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

    def __str__(self) -> str:
        widths = [max((len(line.name) for line in self.components), default=0), max(map(len, ("reshard", "action")))]
        lines = [f"saved by {self.old}, loaded by {self.new}"]
        lines += [f"  {line.name:<{widths[0]}}  {line.action:<{widths[1]}}  {line.outcome}" for line in self.components]
        titles = ("missing", "unexpected", "named by the policy, and not there")
        for title, keys in zip(titles, (self.missing, self.unexpected, self.unused), strict=True):
            if keys:
                more = f" and {len(keys) - _MAX_NAMED_KEYS} more" if len(keys) > _MAX_NAMED_KEYS else ""
                lines.append(f"  {title}: {', '.join(keys[:_MAX_NAMED_KEYS])}{more}")
        return "\n".join(lines)


def world_record(tables: Sequence[KeyTable]) -> dict[str, object]:
    """What a save writes of its world."""
    return {"size": len(tables), "mesh": dict(_mesh_axes(tables))}


def saved_world(metadata: Metadata) -> World:
    """The world that saved a checkpoint; of size 0 where stock DCP wrote it, which does not say."""
    record = (metadata.planner_data or {}).get(WORLD_KEY) if isinstance(metadata.planner_data, dict) else None
    return World(record["size"], record["mesh"]) if record else World(0)


def component_of(fqn: str, components: Collection[str], *, is_tensor: bool) -> str:
    """The top-level key that a flat key stands under."""
    name = fqn
    while name not in components and "." in name:
        name = name.rsplit(".", 1)[0]
    if name in components:
        return name
    return MODEL if is_tensor else fqn


def build_report(
    requests: Sequence[ReadRequest],
    metadata: Metadata,
    policy: ElasticPolicy,
    source: Source,
    selects: Callable[[str], bool],
    problems: Sequence[Problem],
) -> LoadReport:
    """Puts together what all ranks ask for.

    Args:
        requests: One per rank, in rank order.
        selects: Whether a key of the state dict comes from this checkpoint.
        problems: Those known already; of components, and of missing and unexpected keys, they are found here.
    """
    components = {name: plan for request in reversed(requests) for name, plan in request.components.items()}
    problems = list(problems)
    problems += [plan.problem for request in requests for plan in request.components.values() if plan.problem]
    old, new = saved_world(metadata), World(len(requests), _mesh_axes([request.table for request in requests]))
    wanted = {fqn: request.saved_name(fqn) for request in requests for fqn in request.table.entries}
    problems += _world_problems(components, policy, wanted, old, new)
    left = {fqn for request in requests for fqn in request.left}
    absent = list(dict.fromkeys(fqn for request in requests for fqn in request.missing))
    saved = metadata.state_dict_metadata
    is_read = _read_prefixes(components)
    gaps = find_option_gaps((source.own_name(fqn) for fqn in saved if not is_read(fqn)), [*wanted, *absent])
    settled = {*gaps.fillable, *gaps.dropped}
    missing = [fqn for fqn in absent if fqn not in settled]
    loaded: dict[str, int] = {}
    for fqn in wanted:
        name = component_of(fqn, components, is_tensor=isinstance(saved.get(wanted[fqn]), TensorStorageMetadata))
        loaded[name] = loaded.get(name, 0) + 1
    if MODEL in loaded:
        components.setdefault(MODEL, ComponentPlan(policy.component_action(MODEL)))
    known = {*wanted.values(), *(source.saved_name(fqn) for fqn in left)}
    unexpected = [
        fqn for fqn in _unexpected_keys(metadata, known, components, policy, source, selects) if fqn not in settled
    ]
    if policy.strict == "error":
        problems += missing_problems(missing, metadata)
        problems += _unexpected_problems(unexpected, missing)

    troubled = {problem.fqn for problem in problems}
    counts = {"missing": missing, "unexpected": unexpected, UNTOUCHED: left}
    options = {"filled from this run": gaps.fillable, "dropped": gaps.dropped}
    lines = [
        ComponentLine(
            name, plan.action, _outcome(name, plan, loaded.get(name, 0), counts, options, components, troubled)
        )
        for name, plan in components.items()
    ]
    names = {*components, *wanted, *absent, *left, *(source.own_name(fqn) for fqn in saved)}
    unused = [name for name in policy.actions if name not in components and not fnmatch.filter(names, name)]
    problems = list(dict.fromkeys(problems))
    remedy = _remedy(problems, policy, components, missing, unexpected, wanted)
    return LoadReport(old, new, tuple(lines), tuple(missing), tuple(unexpected), tuple(unused), tuple(problems), remedy)


def _outcome(
    name: str,
    plan: ComponentPlan,
    num_loaded: int,
    counts: Mapping[str, Collection[str]],
    options: Mapping[str, Sequence[str]],
    components: Collection[str],
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
        _joined_remedy([report.remedy_policy for _, report in reports if report.problems], policy),
    )


def _joined_remedy(remedies: Sequence[ElasticPolicy | None], policy: ElasticPolicy) -> ElasticPolicy | None:
    """What all of these change in a policy, together."""
    known = [remedy for remedy in remedies if remedy is not None]
    if not known or len(known) < len(remedies):
        return None
    changes = {
        name: action
        for remedy in known
        for name, action in remedy.actions.items()
        if policy.actions.get(name) != action
    }
    kept = {name: policy.actions[name] for name in policy.actions if all(name in remedy.actions for remedy in known)}
    strict = next((remedy.strict for remedy in known if remedy.strict != policy.strict), policy.strict)
    return ElasticPolicy({**changes, **kept, **changes}, default=policy.default, strict=strict)


def disagreements(rules: Sequence[str]) -> list[Problem]:
    """A problem where ranks load by other rules than rank 0; one text per rank, in rank order."""
    for rank, own in enumerate(rules):
        if own != rules[0]:
            detail = f"rank 0 loads by {rules[0]}, rank {rank} by {own}; pass the same policy and sources on every rank"
            return [Problem("ranks_disagree", "policy", detail)]
    return []


def missing_problems(missing: Sequence[str], metadata: Metadata) -> list[Problem]:
    """One problem per key that the checkpoint lacks; those that each rank keeps for itself are one together."""
    saved = list(metadata.state_dict_metadata)
    by_canonical = {canonical_fqn(fqn, strip_module=True): fqn for fqn in saved}
    families: dict[str, list[str]] = {}
    for fqn in missing:
        families.setdefault(_family(fqn), []).append(fqn)
    problems = []
    for position, (family, members) in enumerate(families.items()):
        fqn = members[0]
        hint = ""
        # Nearest names cost a pass over all keys, and the report shows ten lines.
        if position < _MAX_NAMED_KEYS:
            relatives = [key for key in saved if family != fqn and _family(key) == family]
            same = by_canonical.get(canonical_fqn(fqn, strip_module=True))
            near = difflib.get_close_matches(fqn, saved, n=1, cutoff=0.8)
            if relatives:
                which = f"It, and others up to {members[-1]}, are" if len(members) > 1 else "It is"
                hint = (
                    f" {which} of ranks that the save did not have: the checkpoint has {len(relatives)} of these, "
                    f"{relatives[0]} and so on, and nothing says how to divide them among "
                    f"other ranks: {_how_to_divide(family)}."
                )
            elif same is not None:
                hint = f" It has {same}, which differs only by prefix: strip the wrapper's prefix on one side."
            elif near:
                hint = f" Nearest: {near[0]}."
        problems.append(Problem("missing_key", fqn, f"Missing key in checkpoint state_dict: {fqn}.{hint}"))
    return problems


def unclaimed_problems(requests: Sequence[ReadRequest], metadata: Metadata, allowed: Sequence[str]) -> list[Problem]:
    """Entries that each rank keeps for itself, of which this load would silently drop some."""
    wanted = {request.saved_name(fqn) for request in requests for fqn in request.table.entries}
    families: dict[str, list[str]] = {}
    for fqn, saved in metadata.state_dict_metadata.items():
        if isinstance(saved, BytesStorageMetadata) and _PER_RANK.search(fqn):
            families.setdefault(_family(fqn), []).append(fqn)
    problems = []
    for family, members in families.items():
        unclaimed = [
            fqn for fqn in members if fqn not in wanted and not any(fnmatch.fnmatchcase(fqn, glob) for glob in allowed)
        ]
        if unclaimed and len(unclaimed) < len(members) and any(fqn in wanted for fqn in members):
            problems.append(
                Problem(
                    "unclaimed_keys",
                    family,
                    f"the checkpoint has {len(members)} of these, the {len(requests)} rank(s) of this load ask for "
                    f"{sum(fqn in wanted for fqn in members)}; {unclaimed[0]} would be dropped; load on as many "
                    f"ranks as saved, {_how_to_divide(family)}, or pass LoadPlanner(allow_unclaimed=[{family!r}])",
                )
            )
    return problems


def _how_to_divide(family: str) -> str:
    """What carries entries of old ranks to other ranks; torchtitan's data loader has them as ``dp_rank_*``."""
    known = ", or read torchtitan's text data with ElasticDataLoader and TorchtitanTextStreams"
    return "give the component a method reshard" + (known if "dp_rank_*" in family else "")


def _family(fqn: str) -> str:
    return _PER_RANK.sub(lambda match: re.sub(r"\d+$", "*", match.group()), fqn)


def _mesh_axes(tables: Sequence[KeyTable]) -> dict[str, int]:
    axes: dict[str, int] = {}
    meshes = {
        entry.report.mesh: None
        for table in tables
        for entry in table.entries.values()
        if isinstance(entry, TensorEntry) and entry.report.mesh is not None
    }
    for mesh in sorted(meshes, key=lambda mesh: -len(mesh.shape)):
        for name, size in zip(mesh.dim_names or (), mesh.shape, strict=False):
            axes.setdefault(name, size)
    return axes


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


def _read_prefixes(components: Mapping[str, ComponentPlan]) -> Callable[[str], object]:
    """Tells the saved keys that are read before the plan is made."""
    prefixes = [plan.saved_prefix for plan in components.values() if plan.saved_prefix is not None]
    return re.compile("|".join(rf"{re.escape(prefix)}(\..*)?" for prefix in prefixes) or "(?!)").fullmatch


def _unexpected_keys(
    metadata: Metadata,
    wanted: Collection[str],
    components: Mapping[str, ComponentPlan],
    policy: ElasticPolicy,
    source: Source,
    selects: Callable[[str], bool],
) -> list[str]:
    """Of the components that are loaded: saved keys that no rank asks for."""
    is_read = _read_prefixes(components)
    # Of these some are asked for, and the others a problem of their own.
    per_rank = {_family(fqn) for fqn in wanted if _PER_RANK.search(fqn)}
    unexpected = []
    for fqn, saved in metadata.state_dict_metadata.items():
        own_name = source.own_name(fqn)
        if fqn in wanted or is_read(fqn) or not selects(own_name):
            continue
        if _family(fqn) in per_rank:
            continue
        name = component_of(own_name, components, is_tensor=isinstance(saved, TensorStorageMetadata))
        is_models = name == MODEL and not any(own_name.startswith(f"{other}.") for other in components)
        if name in components and policy.key_action(own_name, name) not in ("omit", "reset"):
            if not is_models or own_name.startswith(f"{MODEL}.") or _is_at_top(fqn, metadata):
                unexpected.append(own_name)
    return unexpected


def _is_at_top(fqn: str, metadata: Metadata) -> bool:
    paths = metadata.planner_data
    return isinstance(paths, dict) and len(paths.get(fqn, ())) == 1


def _unexpected_problems(unexpected: Sequence[str], missing: Sequence[str]) -> list[Problem]:
    problems = []
    for position, fqn in enumerate(unexpected):
        near = difflib.get_close_matches(fqn, missing, n=1, cutoff=0.8) if position < _MAX_NAMED_KEYS else []
        hint = f"; nearest that is asked for: {near[0]}" if near else ""
        problems.append(Problem("unexpected_key", fqn, f"it is in the checkpoint and nothing asks for it{hint}"))
    return problems


def _remedy(
    problems: Sequence[Problem],
    policy: ElasticPolicy,
    components: Mapping[str, ComponentPlan],
    missing: Sequence[str],
    unexpected: Sequence[str],
    wanted: Collection[str],
) -> ElasticPolicy | None:
    """The policy under which the load would go without what is refused; None where none would."""
    # A glob is looked for among all keys, once per problem.
    is_long = sum(problem.kind in ("missing_key", "unexpected_key") for problem in problems) > _MAX_GLOBS
    actions: dict[str, Action] = {}
    for problem in problems:
        name = component_of(problem.fqn, components, is_tensor=True)
        if problem.kind == "cannot_reshard" and problem.fqn in policy.actions:
            actions[problem.fqn] = "reset"
        elif problem.kind in ("cannot_reshard", "unclaimed_keys") or _PER_RANK.search(problem.fqn):
            actions[name] = "reset"
        elif problem.kind in ("wrong_shape", "wrong_type"):
            actions[problem.fqn] = "reset"
        elif problem.kind == "missing_key" and not is_long:
            actions[_common_glob(problem.fqn, missing, wanted)] = "reset"
        elif problem.kind == "unexpected_key" and not is_long:
            actions[_common_glob(problem.fqn, unexpected, wanted)] = "omit"
        elif problem.kind not in ("missing_key", "unexpected_key"):
            return None
    whole = {name for name, action in actions.items() if name in components}
    actions = {
        glob: action
        for glob, action in actions.items()
        if glob in whole or component_of(glob, components, is_tensor=True) not in whole
    }
    if not actions and not is_long:
        return None
    strict = "ignore" if is_long else policy.strict
    # A glob would win over a component.
    kept = {
        name: action
        for name, action in policy.actions.items()
        if not any(name.startswith(f"{component}.") for component in whole)
    }
    return ElasticPolicy({**actions, **kept, **actions}, default=policy.default, strict=strict)


def _common_glob(fqn: str, affected: Sequence[str], others: Collection[str]) -> str:
    """The widest ``prefix.*`` around a key, within its component, that holds affected keys only."""
    glob, prefix = fqn, fqn
    while "." in prefix:
        prefix = prefix.rsplit(".", 1)[0]
        below = f"{prefix}."
        if any(other.startswith(below) for other in others) or sum(key.startswith(below) for key in affected) < 2:
            break
        glob = f"{below}*"
    return glob
