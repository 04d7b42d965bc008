"""Names that only the checkpoint or only the state dict has, and names in a policy or a filter that match nothing.

Each problem proposes the name that was perhaps meant. One policy, or one source, may serve several jobs, so a name that
matches nothing is only a warning. It is refused where its author cannot have meant that: where it is close to a known
key, where it reaches into a value that is loaded whole, and where the only source of a load includes nothing.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from torch.distributed.checkpoint.metadata import Metadata

from torchtitan_ext.checkpoint.rules.load_rules import MODEL, ComponentPlan, JointRequest, component_of
from torchtitan_ext.checkpoint.rules.policy import ElasticPolicy, Source
from torchtitan_ext.checkpoint.tables.agreement import Agreement, unused_layouts
from torchtitan_ext.checkpoint.tables.component import PER_RANK, family_of, how_to_divide
from torchtitan_ext.errors import MAX_NAMED, Problem, Remedy, named
from torchtitan_ext.errors.near_names import CLOSE, names_hint, nearest_glob, nearest_name
from torchtitan_ext.layout.layout import LayoutRules, canonical_fqn
from torchtitan_ext.storage.metadata.lazy_metadata import is_saved_tensor
from torchtitan_ext.storage.metadata.saved_metadata import recorded_path

# A message proposes no rename with more entries.
_MAX_RENAMES = 3

# Two letters that changed places are a quarter of a name of four.
_SHORT = 8
_CLOSE_OF_SHORT = 0.7

# A warning names at most so many keys: it is one line.
_MAX_SHOWN = 3


def missing_problems(
    missing: Sequence[str], metadata: Metadata, num_ranks: int, advice: Mapping[str, str] | None = None
) -> list[Problem]:
    """One problem per key that the checkpoint lacks, and one for all ranks' entries of one name (``dp_rank_*``)."""
    if not missing:
        return []
    advice = advice or {}
    saved = list(metadata.state_dict_metadata)
    twins = _prefix_twins(missing, saved)
    renames = _prefix_renames(twins, saved)
    families: dict[str, list[str]] = {}
    for fqn in missing:
        families.setdefault(family_of(fqn), []).append(fqn)
    problems = []
    for position, (family, members) in enumerate(families.items()):
        problem = Problem("missing_key", members[0], f"Missing key in checkpoint state_dict: {members[0]}.")
        # Nearest names cost a pass over all keys, and the report shows ten lines.
        if position < MAX_NAMED:
            if members[0] in advice:
                problem = replace(problem, detail=f"{problem.detail} {advice[members[0]]}.")
            elif per_rank := _of_other_ranks(problem, family, members, saved, num_ranks):
                problem = per_rank
            else:
                hint = _name_hint(members[0], twins.get(members[0]), renames, saved)
                problem = replace(problem, detail=problem.detail + hint)
        problems.append(problem)
    return problems


def misspelt_layouts(joint: JointRequest, agreement: Agreement, layouts: LayoutRules) -> list[Problem]:
    """Patterns of ``layouts=`` that match no target and no saved key; a key that is merely not loaded is no mistake."""
    tables = [request.table for request in joint.requests]
    if not any(table.rest.layouts for table in tables):
        return []
    saved = [name for fqn in joint.metadata.state_dict_metadata for name in (fqn, joint.rules.source.own_name(fqn))]
    problems = unused_layouts(tables, agreement, saved)
    matches = layouts.matches(saved) if problems else {}
    return [problem for problem in problems if not matches.get(problem.fqn)]


def nothing_matches(joint: JointRequest) -> list[Problem]:
    """A problem where a partial load finds no key on any rank; on some ranks it may: a pipeline stage can be new."""
    skipped = joint.not_read("skipped")
    if joint.wanted or not skipped or any(request.table.rest.problems for request in joint.requests):
        return []
    example = next(iter(joint.metadata.state_dict_metadata), "nothing")
    detail = (
        f"Missing key in checkpoint state_dict: {skipped[0]}. allow_partial_load found none of the {len(skipped)} "
        f"wanted keys; the checkpoint has {example} and others: check the prefixes"
    )
    return [Problem("missing_key", skipped[0], detail)]


def _of_other_ranks(
    problem: Problem, family: str, members: Sequence[str], saved: Sequence[str], num_ranks: int
) -> Problem | None:
    """The problem with its reason, where the checkpoint has the same entry of other ranks."""
    relatives = [key for key in saved if family != members[0] and family_of(key) == family]
    if not relatives:
        return None
    which = f"It, and others up to {members[-1]}, are" if len(members) > 1 else "It is"
    detail = (
        f"{problem.detail} {which} of ranks that the save did not have: the checkpoint has {len(relatives)} of these, "
        f"{relatives[0]} and so on, this load has {num_ranks} rank(s), and nothing says how to divide them among "
        "other ranks"
    )
    remedy = Remedy("reshard", len(relatives))
    return replace(problem, detail=detail, advice=f": {how_to_divide(family)}.", remedy=remedy)


def _name_hint(fqn: str, twin: str | None, renames: Mapping[str, str], saved: Sequence[str]) -> str:
    if twin is None:
        near = nearest_name(fqn, saved, likeness=CLOSE if len(fqn) > _SHORT else _CLOSE_OF_SHORT)
        return "" if near is None else f" Nearest: {near}."
    strip = "strip the wrapper's prefix on one side"
    remedy = f"pass LoadPlanner(source=Source(rename={renames!r})), or {strip}" if renames else strip
    return f" It has {twin}, which differs only by prefix: {remedy}."


def _prefix_twins(missing: Sequence[str], saved: Sequence[str]) -> dict[str, str]:
    """Missing keys that the checkpoint has under another prefix: a wrapper's anywhere, one component in front."""
    by_canonical = {canonical_fqn(fqn, strip_module=True): fqn for fqn in saved}
    known = set(saved)
    by_tail: dict[str, list[str]] = {}
    for fqn in saved:
        by_tail.setdefault(fqn.partition(".")[2], []).append(fqn)
    twins: dict[str, str] = {}
    for fqn in missing:
        wrapped = by_canonical.get(canonical_fqn(fqn, strip_module=True))
        _, _, tail = fqn.partition(".")
        if wrapped is not None:
            twins[fqn] = wrapped
        elif len(by_tail.get(fqn, ())) == 1:  # of several one would be a guess
            twins[fqn] = by_tail[fqn][0]
        elif tail in known:
            twins[fqn] = tail
    return twins


def _prefix_renames(twins: Mapping[str, str], saved: Sequence[str]) -> dict[str, str]:
    """The ``Source.rename`` that finds every twin and keeps all names that the checkpoint has; empty if there is none.

    Example:
        >>> _prefix_renames({"model.w": "model.module.w", "model.b": "model.module.b"}, ["model.module.w", ...])
        {'model.*': 'model.module.*'}
    """
    source = Source()
    for fqn, twin in twins.items():
        if source.saved_name(fqn) != twin:
            source = Source(rename={**source.rename, **_widest_rename(fqn, twin, saved)})
        if len(source.rename) > _MAX_RENAMES:
            return {}
    finds_all = all(source.saved_name(fqn) == twin for fqn, twin in twins.items())
    return dict(source.rename) if finds_all else {}


def _widest_rename(fqn: str, twin: str, saved: Sequence[str]) -> dict[str, str]:
    """A rename from a key to its twin; the ``*`` covers as much of their common end as other saved keys allow."""
    own, other = fqn.split("."), twin.split(".")
    num_common = 0
    while num_common < min(len(own), len(other)) and own[-1 - num_common] == other[-1 - num_common]:
        num_common += 1
    for num_open in range(num_common, 0, -1):
        own_start, other_start = ("".join(f"{part}." for part in parts[:-num_open]) for parts in (own, other))
        if all(key.startswith(other_start) for key in saved if key.startswith(own_start)):
            return {f"{own_start}*": f"{other_start}*"}
    return {fqn: twin}


def is_read_before(components: Mapping[str, ComponentPlan]) -> Callable[[str], object]:
    """A function that says whether a component has read a saved key before the plan."""
    prefixes = [plan.saved_prefix for plan in components.values() if plan.saved_prefix is not None]
    return re.compile("|".join(rf"{re.escape(prefix)}(\..*)?" for prefix in prefixes) or "(?!)").fullmatch


def unexpected_keys(joint: JointRequest, components: Mapping[str, ComponentPlan], policy: ElasticPolicy) -> list[str]:
    """Saved keys of loaded components that no rank asks for, by their names in the state dict."""
    known, source = joint.known_names, joint.rules.source
    is_read = is_read_before(components)
    # Some ranks' entries of these families are read; the others are a problem of their own.
    per_rank = {family_of(fqn) for fqn in known if PER_RANK.search(fqn)}
    unexpected = []
    for fqn in joint.metadata.state_dict_metadata:  # a lazy mapping: only the entries that are asked for are made
        if fqn in known or is_read(fqn) or (per_rank and family_of(fqn) in per_rank):
            continue
        own_name = source.own_name(fqn)
        name = component_of(own_name, components, is_tensor=True)
        if name not in components or not joint.rules.source.selects(own_name, name):
            continue
        is_model = own_name.startswith(f"{MODEL}.")
        if components[name].is_top and not is_model and not _is_tensor_at_top(fqn, joint.metadata):
            continue
        if policy.key_action(own_name, name) not in ("omit", "reset"):
            unexpected.append(own_name)
    return unexpected


def unexpected_warnings(
    unexpected: Sequence[str], wanted: Collection[str], components: Mapping[str, ComponentPlan]
) -> list[str]:
    """A warning for each component of which the checkpoint has keys that nothing asks for."""
    by_component: dict[str, list[str]] = {}
    for fqn in unexpected:
        by_component.setdefault(component_of(fqn, components, is_tensor=True), []).append(fqn)
    return [_unclaimed_text(name, fqns, wanted) for name, fqns in by_component.items()]


def _unclaimed_text(component: str, fqns: Sequence[str], wanted: Collection[str]) -> str:
    globs = list(dict.fromkeys(_common_glob(fqn, fqns, wanted) for fqn in fqns[:MAX_NAMED]))
    return (
        f"saved entries of {component} that nothing asks for are not loaded: {named(fqns, _MAX_SHOWN)}; put targets "
        "for them into the state dict; to leave them out without this warning, pass "
        f"LoadPlanner(source=Source(exclude={globs!r}))"
    )


def fresh_optimizers(
    unexpected: Sequence[str], asked: Collection[str], how_to_omit: str
) -> tuple[list[Problem], list[str]]:
    """A problem for each optimizer of which the state dict has parameter groups and no state, and the other keys.

    Args:
        unexpected: Saved keys that nothing asks for.
        asked: Keys that are asked for; options of parameter groups among them.
        how_to_omit: What to pass to leave the state out, with a place for ``{glob}``.
    """
    prefixes = dict.fromkeys(fqn.partition(".state.")[0] for fqn in unexpected if ".state." in fqn)
    fresh = [
        prefix
        for prefix in prefixes
        if any(fqn.startswith(f"{prefix}.param_groups") for fqn in asked)
        and not any(fqn.startswith(f"{prefix}.state.") for fqn in asked)
    ]
    problems, lost = [], set[str]()
    for prefix in fresh:
        keys = [fqn for fqn in unexpected if fqn.startswith(f"{prefix}.state.")]
        lost.update(keys)
        detail = (
            f"the checkpoint has the optimizer's state ({named(keys, _MAX_SHOWN)}), and nothing asks for it: an "
            "optimizer that has not stepped has none"
        )
        advice = (
            "; call optimizer.zero_grad() and torch.distributed.checkpoint.state_dict.get_optimizer_state_dict(model, "
            "optimizer) first, which make it without a step; to go on without it, pass "
            f"{how_to_omit.format(glob=f'{prefix}.state.*')}"
        )
        problems.append(Problem("unexpected_key", f"{prefix}.state", detail, advice))
    return problems, [fqn for fqn in unexpected if fqn not in lost]


def _common_glob(fqn: str, affected: Sequence[str], others: Collection[str]) -> str:
    """The widest ``prefix.*`` around a key, within its component, that matches affected keys only."""
    glob, prefix = fqn, fqn
    while "." in prefix:
        prefix = prefix.rsplit(".", 1)[0]
        below = f"{prefix}."
        if any(other.startswith(below) for other in others) or sum(key.startswith(below) for key in affected) < 2:
            break
        glob = f"{below}*"
    return glob


def _is_tensor_at_top(fqn: str, metadata: Metadata) -> bool:
    is_at_top = len(recorded_path(metadata.planner_data, fqn) or ()) == 1
    return is_at_top and bool(is_saved_tensor(metadata.state_dict_metadata, fqn))


def unexpected_problems(unexpected: Sequence[str], missing: Sequence[str]) -> list[Problem]:
    """One problem per saved key that nothing asks for, with the nearest missing key."""
    problems = []
    for position, fqn in enumerate(unexpected):
        near = nearest_name(fqn, missing, likeness=CLOSE) if position < MAX_NAMED else None
        hint = "" if near is None else f"; nearest that is asked for: {near}"
        problems.append(Problem("unexpected_key", fqn, f"it is in the checkpoint and nothing asks for it{hint}"))
    return problems


_WILDCARDS = re.compile(r"[*?\[]")


def unused_names(policy: ElasticPolicy, components: Collection[str], keys: Collection[str]) -> list[str]:
    """The names in a policy that are no component and match no flat key of state dict or checkpoint."""
    return [name for name in policy.actions if name not in components and not fnmatch.filter(keys, name)]


def name_problems(unused: Sequence[str], keys: Collection[str], whole: Iterable[str]) -> list[Problem]:
    """A problem for each unused name of a policy that its author cannot have meant for another job.

    It is close to one of ``keys``, or reaches into one that is loaded ``whole``: no key lies below that.
    """
    if not unused:
        return []
    problems = []
    values = set(whole)
    for name in unused:
        fixed = _WILDCARDS.split(name)[0].split(".")
        holders = {".".join(fixed[:depth]) for depth in range(1, len(fixed))} & values
        meant = nearest_glob(name, keys, likeness=CLOSE)
        if holders:
            detail = f"{min(holders)} is loaded as one value, this name reaches into it; name all of it"
        elif meant is not None:
            detail = f"nothing has this name, perhaps {meant!r} is meant; correct it, or leave it out"
        else:
            continue
        problems.append(Problem("policy_name", name, detail))
    return problems


def unused_filters(joint: JointRequest) -> tuple[list[Problem], list[str]]:
    """Filters of the source that match nothing: problems, and warnings where they may be meant for another job."""
    rules, source = joint.rules, joint.rules.source
    if tuple(source.include) == ("*",) and not source.exclude:
        return [], []
    held = joint.component_of_keys()
    if not held:
        return [], []
    names = {*held, *map(source.own_name, joint.metadata.state_dict_metadata)}
    components = list(dict.fromkeys(held.values()))
    problems, warned = [], []
    for glob in source.unused_filters(names, components):
        text = f"matches no key; {names_hint(glob, names, components)}"
        is_close = nearest_glob(glob, {*names, *components}, likeness=CLOSE) is not None
        if is_close and (rules.policy is None or rules.policy.strict == "error"):
            problems.append(Problem("unused_filter", glob, text))
        elif rules.policy is None or rules.policy.strict != "ignore":
            warned.append(f"{glob!r} of the source {text}")
    if not problems and not any(map(source.includes, held, held.values())):
        for glob in source.include:
            text = f"selects nothing of the state dict; {names_hint(glob, held, components)}"
            problems.append(Problem("unused_filter", glob, text))
    return problems, warned
