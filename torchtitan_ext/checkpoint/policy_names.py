"""Names of a policy, and filters of a source, that nothing answers to: misspelt, or meant for another job.

They may serve several jobs, so a name without a key is only warned of, but where it is close to one that is there, or
reaches into a value that is loaded whole, it does not do what its author thinks: that is refused. So is the only source
of a load that includes nothing.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Collection, Iterable, Mapping, Sequence

from torch.distributed.checkpoint.metadata import Metadata

from torchtitan_ext.checkpoint.load_rules import LoadRules
from torchtitan_ext.checkpoint.policy import ElasticPolicy
from torchtitan_ext.errors import Problem
from torchtitan_ext.errors.near_names import CLOSE, names_hint, nearest_glob

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
