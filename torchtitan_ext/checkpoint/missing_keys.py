"""Keys that only one of checkpoint and state dict has, each with the name that was perhaps meant."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Mapping, Sequence

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from torchtitan_ext.checkpoint.load_rules import MODEL, ComponentPlan, component_of
from torchtitan_ext.checkpoint.per_rank_keys import PER_RANK, family_of, how_to_divide
from torchtitan_ext.checkpoint.policy import ElasticPolicy, Source
from torchtitan_ext.errors import Problem
from torchtitan_ext.layout.rules import canonical_fqn

MAX_NAMED_KEYS = 10


def missing_problems(missing: Sequence[str], metadata: Metadata) -> list[Problem]:
    """One problem per key that the checkpoint lacks; those that each rank keeps for itself are one together."""
    saved = list(metadata.state_dict_metadata)
    by_canonical = {canonical_fqn(fqn, strip_module=True): fqn for fqn in saved}
    families: dict[str, list[str]] = {}
    for fqn in missing:
        families.setdefault(family_of(fqn), []).append(fqn)
    problems = []
    for position, (family, members) in enumerate(families.items()):
        fqn = members[0]
        hint = ""
        # Nearest names cost a pass over all keys, and the report shows ten lines.
        if position < MAX_NAMED_KEYS:
            relatives = [key for key in saved if family != fqn and family_of(key) == family]
            same = by_canonical.get(canonical_fqn(fqn, strip_module=True))
            near = difflib.get_close_matches(fqn, saved, n=1, cutoff=0.8)
            if relatives:
                which = f"It, and others up to {members[-1]}, are" if len(members) > 1 else "It is"
                hint = (
                    f" {which} of ranks that the save did not have: the checkpoint has {len(relatives)} of these, "
                    f"{relatives[0]} and so on, and nothing says how to divide them among "
                    f"other ranks: {how_to_divide(family)}."
                )
            elif same is not None:
                hint = f" It has {same}, which differs only by prefix: strip the wrapper's prefix on one side."
            elif near:
                hint = f" Nearest: {near[0]}."
        problems.append(Problem("missing_key", fqn, f"Missing key in checkpoint state_dict: {fqn}.{hint}"))
    return problems


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
    selects: Callable[[str], bool],
) -> list[str]:
    """Of the components that are loaded: saved keys that no rank asks for."""
    is_read = read_prefixes(components)
    # Of these some are asked for, and the others a problem of their own.
    per_rank = {family_of(fqn) for fqn in wanted if PER_RANK.search(fqn)}
    unexpected = []
    for fqn, saved in metadata.state_dict_metadata.items():
        own_name = source.own_name(fqn)
        if fqn in wanted or is_read(fqn) or not selects(own_name):
            continue
        if family_of(fqn) in per_rank:
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


def unexpected_problems(unexpected: Sequence[str], missing: Sequence[str]) -> list[Problem]:
    problems = []
    for position, fqn in enumerate(unexpected):
        near = difflib.get_close_matches(fqn, missing, n=1, cutoff=0.8) if position < MAX_NAMED_KEYS else []
        hint = f"; nearest that is asked for: {near[0]}" if near else ""
        problems.append(Problem("unexpected_key", fqn, f"it is in the checkpoint and nothing asks for it{hint}"))
    return problems
