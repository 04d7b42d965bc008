"""Names that only one side has: keys of the checkpoint or of the state dict, and names in a policy or in filters.

Each comes with the name that was perhaps meant. A policy and the filters of a source may serve several jobs, so a name
in them without a key is only warned of. It is refused where it is close to a key that is there, or reaches into a value
that is loaded whole, because it then does not do what its author thinks; so is the only source of a load that includes
nothing.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from torchtitan_ext.checkpoint.rules.load_rules import MODEL, ComponentPlan, LoadRules, ReadRequest, component_of
from torchtitan_ext.checkpoint.rules.param_groups import find_option_gaps
from torchtitan_ext.checkpoint.rules.policy import ElasticPolicy, Source
from torchtitan_ext.checkpoint.rules.remedy import common_glob
from torchtitan_ext.checkpoint.tables.agreement import Agreement, unused_layouts
from torchtitan_ext.checkpoint.tables.component import PER_RANK, family_of, how_to_divide
from torchtitan_ext.checkpoint.tables.key_table import RankTable
from torchtitan_ext.errors import MAX_NAMED, Problem, Remedy, named
from torchtitan_ext.errors.near_names import CLOSE, names_hint, nearest_glob, nearest_name
from torchtitan_ext.layout.layout import LayoutRules, canonical_fqn
from torchtitan_ext.storage.metadata.saved_metadata import recorded_path

# A rename of more lines is no remedy to copy from a message.
_MAX_RENAMES = 3

# Of keys that are named in a warning, which is one line.
_MAX_SHOWN = 3


def missing_problems(
    missing: Sequence[str], metadata: Metadata, num_ranks: int, advice: Mapping[str, str] | None = None
) -> list[Problem]:
    """One problem per key that the checkpoint lacks; those that each rank keeps for itself are one together.

    Args:
        missing: Keys of the state dict.
        num_ranks: How many ranks load.
        advice: What to do about some of these.
    """
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
            per_rank = _of_other_ranks(problem, family, members, saved, num_ranks)
            if members[0] in advice:
                problem = replace(problem, detail=f"{problem.detail} {advice[members[0]]}.")
            elif per_rank is not None:
                problem = per_rank
            else:
                hint = _name_hint(members[0], twins.get(members[0]), renames, saved)
                problem = replace(problem, detail=problem.detail + hint)
        problems.append(problem)
    return problems


def misspelt_layouts(
    tables: Sequence[RankTable], agreement: Agreement, layouts: LayoutRules, metadata: Metadata, source: Source
) -> list[Problem]:
    """Patterns of ``layouts=`` for no target and no saved key: what is merely not loaded this time is not misspelt."""
    if not any(table.layouts for table in tables):
        return []
    saved = [name for fqn in metadata.state_dict_metadata for name in (fqn, source.own_name(fqn))]
    problems = unused_layouts(tables, agreement, saved)
    matches = layouts.matches(saved) if problems else {}
    return [problem for problem in problems if not matches.get(problem.fqn)]


def nothing_matches(requests: Sequence[ReadRequest], metadata: Metadata) -> list[Problem]:
    """A partial load of which no rank finds anything. Some ranks may: a pipeline stage can be all new."""
    skipped = list(dict.fromkeys(fqn for request in requests for fqn in request.skipped))
    if not skipped or any(request.table.problems for request in requests):
        return []
    example = next(iter(metadata.state_dict_metadata), "nothing")
    detail = (
        f"Missing key in checkpoint state_dict: {skipped[0]}. allow_partial_load found none of the {len(skipped)} "
        f"wanted keys; the checkpoint has {example} and others: check the prefixes"
    )
    return [Problem("missing_key", skipped[0], detail)]


def _of_other_ranks(
    problem: Problem, family: str, members: Sequence[str], saved: Sequence[str], num_ranks: int
) -> Problem | None:
    """The problem with its reason, where each rank keeps such an entry and the checkpoint has those of other ranks."""
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
        near = nearest_name(fqn, saved, likeness=CLOSE)
        return "" if near is None else f" Nearest: {near}."
    strip = "strip the wrapper's prefix on one side"
    remedy = f"pass LoadPlanner(source=Source(rename={renames!r})), or {strip}" if renames else strip
    return f" It has {twin}, which differs only by prefix: {remedy}."


def _prefix_twins(missing: Sequence[str], saved: Sequence[str]) -> dict[str, str]:
    """Missing keys that the checkpoint has under another prefix: a wrapper's anywhere, one component in front."""
    if not missing:  # the checkpoint may have very many
        return {}
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
    """The ``Source.rename`` that finds every twin and leaves names alone that the checkpoint has; or none of use.

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
    """From a key to its twin, with as much of their common end left to a ``*`` as other saved keys allow."""
    own, other = fqn.split("."), twin.split(".")
    num_common = 0
    while num_common < min(len(own), len(other)) and own[-1 - num_common] == other[-1 - num_common]:
        num_common += 1
    for num_open in range(num_common, 0, -1):
        own_start, other_start = ("".join(f"{part}." for part in parts[:-num_open]) for parts in (own, other))
        if all(key.startswith(other_start) for key in saved if key.startswith(own_start)):
            return {f"{own_start}*": f"{other_start}*"}
    return {fqn: twin}


def read_prefixes(components: Mapping[str, ComponentPlan]) -> Callable[[str], object]:
    """Tells the saved keys that are read before the plan is made."""
    prefixes = [plan.saved_prefix for plan in components.values() if plan.saved_prefix is not None]
    return re.compile("|".join(rf"{re.escape(prefix)}(\..*)?" for prefix in prefixes) or "(?!)").fullmatch


def unexpected_keys(
    metadata: Metadata,
    wanted: Collection[str],
    components: Mapping[str, ComponentPlan],
    policy: ElasticPolicy,
    source: Source,
    selects: Callable[[str, str], bool],
) -> list[str]:
    """Of the components that are loaded: saved keys that no rank asks for."""
    is_read = read_prefixes(components)
    # Of these some are asked for, and the others a problem of their own.
    per_rank = {family_of(fqn) for fqn in wanted if PER_RANK.search(fqn)}
    unexpected = []
    for fqn in metadata.state_dict_metadata:  # its entries are made when they are asked for
        own_name = source.own_name(fqn)
        if fqn in wanted or is_read(fqn) or family_of(fqn) in per_rank:
            continue
        name = component_of(own_name, components, is_tensor=True)
        if name not in components or not selects(own_name, name):
            continue
        if components[name].is_top and not own_name.startswith(f"{MODEL}.") and not _is_tensor_at_top(fqn, metadata):
            continue
        if policy.key_action(own_name, name) not in ("omit", "reset"):
            unexpected.append(own_name)
    return unexpected


def unclaimed_entries(
    requests: Sequence[ReadRequest],
    wanted: Mapping[str, str],
    metadata: Metadata,
    rules: LoadRules,
    allowed: Collection[str],
) -> list[str]:
    """For warnings of a load without a policy: of each entry of the state dict the saved keys that nothing asks for.

    What the state dict has nothing of is left out: to load a part of a checkpoint is fine.

    Args:
        wanted: What some rank asks for, each key with its name in the checkpoint.
        allowed: Globs of what may stay unread.
    """
    components = {name: plan for request in requests for name, plan in request.components.items()}
    aside = {fqn for request in requests for fqn in (*request.left, *request.refused)}
    known = {*wanted.values(), *map(rules.source.saved_name, aside)}
    policy = ElasticPolicy(dict.fromkeys(allowed, "omit"))
    unclaimed = unexpected_keys(metadata, known, components, policy, rules.source, rules.selects)
    if not unclaimed:
        return []
    dropped = find_option_gaps([*wanted, *unclaimed], wanted).dropped
    by_component: dict[str, list[str]] = {}
    for fqn in unclaimed:
        if fqn not in dropped:
            by_component.setdefault(component_of(fqn, components, is_tensor=True), []).append(fqn)
    return [_unclaimed_text(name, fqns, wanted) for name, fqns in by_component.items()]


def _unclaimed_text(component: str, fqns: Sequence[str], wanted: Collection[str]) -> str:
    globs = list(dict.fromkeys(common_glob(fqn, fqns, wanted) for fqn in fqns[:MAX_NAMED]))
    cure = "put targets for them into the state dict"
    if any(fqn.startswith(f"{component}.param_groups") for fqn in wanted):
        cure = (
            "an optimizer that has not stepped has no such state: call "
            "torch.distributed.checkpoint.state_dict.get_optimizer_state_dict(model, optimizer) first, which makes it "
            "without a step"
        )
    return (
        f"saved entries of {component} that nothing asks for are not loaded: {named(fqns, _MAX_SHOWN)}; {cure}; to "
        f"leave them out without this warning, pass LoadPlanner(source=Source(exclude={globs!r}))"
    )


def _is_tensor_at_top(fqn: str, metadata: Metadata) -> bool:
    is_at_top = len(recorded_path(metadata.planner_data, fqn) or ()) == 1
    return is_at_top and isinstance(metadata.state_dict_metadata[fqn], TensorStorageMetadata)


def unexpected_problems(unexpected: Sequence[str], missing: Sequence[str]) -> list[Problem]:
    problems = []
    for position, fqn in enumerate(unexpected):
        near = nearest_name(fqn, missing, likeness=CLOSE) if position < MAX_NAMED else None
        hint = "" if near is None else f"; nearest that is asked for: {near}"
        problems.append(Problem("unexpected_key", fqn, f"it is in the checkpoint and nothing asks for it{hint}"))
    return problems


_WILDCARDS = re.compile(r"[*?\[]")


def unused_names(policy: ElasticPolicy, components: Collection[str], keys: Collection[str]) -> list[str]:
    """The names of a policy that are no component's and match no key.

    Args:
        components: Top-level keys.
        keys: Flat keys of state dict and checkpoint, of all ranks.
    """
    return [name for name in policy.actions if name not in components and not fnmatch.filter(keys, name)]


def name_problems(unused: Sequence[str], keys: Collection[str], whole: Iterable[str]) -> list[Problem]:
    """Those of the unused names that cannot be meant for another job.

    Args:
        unused: As ``unused_names`` finds them.
        keys: As above, and the components.
        whole: Keys that are loaded as one value: there is no key below.

    Example:
        >>> [problem.detail for problem in name_problems(["dataloder"], ["dataloader.step"], [])]
        ["nothing has this name, perhaps 'dataloader' is meant; ..."]
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


def find_filters(rules: LoadRules, held: Mapping[str, str], metadata: Metadata) -> tuple[list[Problem], list[str]]:
    """Filters of a source that cannot be meant, and sentences about those that may be meant for another job.

    Args:
        held: The component of each flat key of the state dict, of all ranks.
    """
    source = rules.source
    if not held or (tuple(source.include) == ("*",) and not source.exclude):
        return [], []
    names, components = {*held, *map(source.own_name, metadata.state_dict_metadata)}, list(dict.fromkeys(held.values()))
    unused = source.unused_filters(names, components)
    problems, concerns = [], []
    for glob in unused:
        text = f"matches no key; {names_hint(glob, names, components)}"
        is_close = nearest_glob(glob, {*names, *components}, likeness=CLOSE) is not None
        if is_close and (rules.policy is None or rules.policy.strict == "error"):
            problems.append(Problem("unused_filter", glob, text))
        elif rules.policy is None or rules.policy.strict != "ignore":
            concerns.append(f"{glob!r} of a source {text}")
    if rules.is_alone and not problems and not any(map(source.includes, held, held.values())):
        for glob in source.include:
            text = f"selects nothing of the state dict; {names_hint(glob, held, components)}"
            problems.append(Problem("unused_filter", glob, text))
    return problems, concerns
