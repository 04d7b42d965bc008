"""Finds saved parameter groups by the names of their parameters.

Schedulers of torch keep a list with a value for each parameter group. A run that builds its groups in another order, or
cuts one in two, finds each group's value where the group's parameters were.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

from torchtitan_ext.layout.layout import canonical_fqn

_KEY = "param_names_"


def group_names(optimizer: Optimizer, known: Mapping[int, str]) -> list[list[str]] | None:
    """The names of each group's parameters, from its ``param_names`` or by ``id``; None where one has no name."""
    names = [
        group.get("param_names") or [known.get(id(parameter)) for parameter in group["params"]]
        for group in optimizer.param_groups
    ]
    if any(name is None for group in names for name in group):
        return None
    return [[canonical_fqn(name, strip_module=True) for name in group] for group in names]


def names_entry(names: Sequence[list[list[str]] | None]) -> dict[str, Any]:
    """The entry of a state for the groups of several optimizers; nothing where each has one group, or no names.

    The key has a digest of the names: pipeline stages hold other parameters and save beside each other.
    """
    if not any(groups is not None and len(groups) > 1 for groups in names):
        return {}
    digest = hashlib.sha256(json.dumps(names).encode()).hexdigest()[:12]
    return {f"{_KEY}{digest}": (list(names),)}


def saved_places(saved: Mapping[str, Any], index: int) -> dict[str, set[int]]:
    """The positions of the saved groups that had each name, over the entries of all ranks that saved."""
    places: dict[str, set[int]] = {}
    for key, entry in saved.items():
        groups = entry[0][index] if key.startswith(_KEY) and index < len(entry[0]) else None
        for position, names in enumerate(groups or ()):
            for name in names:
                places.setdefault(name, set()).add(position)
    return places


def sources_of(places: Mapping[str, set[int]], current: Sequence[Sequence[str]]) -> list[list[int]]:
    """For each current group the saved ones that its parameters were in.

    Example:
        >>> sources_of({"w": {0}, "b": {1}}, [["b"], ["w"], ["w", "b"], ["x"]])
        [[1], [0], [0, 1], []]
    """
    return [sorted({place for name in names for place in places.get(name, ())}) for names in current]
