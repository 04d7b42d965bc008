"""The policy under which a refused load would succeed."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from torchtitan_ext.checkpoint.rules.load_rules import ComponentPlan, component_of
from torchtitan_ext.checkpoint.rules.policy import Action, ElasticPolicy
from torchtitan_ext.checkpoint.tables.component import PER_RANK
from torchtitan_ext.errors import Problem

# A remedy with more globs becomes strict="ignore".
_MAX_GLOBS = 20


def joined_remedy(remedies: Sequence[ElasticPolicy | None], policy: ElasticPolicy) -> ElasticPolicy | None:
    """One policy with the changes of all remedies; ``None`` where one of them is missing."""
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


def find_remedy(
    problems: Sequence[Problem],
    policy: ElasticPolicy,
    components: Mapping[str, ComponentPlan],
    wanted: Collection[str],
) -> ElasticPolicy | None:
    """The policy under which the load would succeed without what is refused; ``None`` where no policy helps.

    None of its globs matches a key that is ``wanted``.
    """
    missing = [problem.fqn for problem in problems if problem.kind == "missing_key"]
    unexpected = [problem.fqn for problem in problems if problem.kind == "unexpected_key"]
    # Each glob costs a pass over all keys.
    is_long = len(missing) + len(unexpected) > _MAX_GLOBS
    actions: dict[str, Action] = {}
    for problem in problems:
        name = component_of(problem.fqn, components, is_tensor=True)
        if problem.kind == "policy_name":
            continue
        if problem.kind == "cannot_reshard" and problem.fqn in policy.actions:
            actions[problem.fqn] = "reset"
        elif problem.kind in ("cannot_reshard", "unclaimed_keys") or PER_RANK.search(problem.fqn):
            actions[name] = "reset"
        elif problem.kind in ("wrong_shape", "wrong_type"):
            actions[problem.fqn] = "reset"
        elif problem.kind == "missing_key" and not is_long:
            actions[common_glob(problem.fqn, missing, wanted)] = "reset"
        elif problem.kind == "unexpected_key" and not is_long:
            actions[common_glob(problem.fqn, unexpected, wanted)] = "omit"
        elif problem.kind not in ("missing_key", "unexpected_key") and problem.remedy is None:
            return None
    whole = {name for name, action in actions.items() if name in components}
    actions = {
        glob: action
        for glob, action in actions.items()
        if glob in whole or component_of(glob, components, is_tensor=True) not in whole
    }
    unfit = {problem.fqn for problem in problems if problem.kind == "policy_name"}
    if not actions and not is_long and not unfit:
        return None
    strict = "ignore" if is_long else policy.strict
    # A glob would win over a component.
    kept = {
        name: action
        for name, action in policy.actions.items()
        if name not in unfit and not any(name.startswith(f"{component}.") for component in whole)
    }
    return ElasticPolicy({**actions, **kept, **actions}, default=policy.default, strict=strict)


def common_glob(fqn: str, affected: Sequence[str], others: Collection[str]) -> str:
    """The widest ``prefix.*`` around a key, within its component, that matches affected keys only."""
    glob, prefix = fqn, fqn
    while "." in prefix:
        prefix = prefix.rsplit(".", 1)[0]
        below = f"{prefix}."
        if any(other.startswith(below) for other in others) or sum(key.startswith(below) for key in affected) < 2:
            break
        glob = f"{below}*"
    return glob
