"""What crosses a change of world size by a rule of its own: stateful objects, the record of ranks, per-rank entries.

A ``World`` is the ranks that save or load; a checkpoint records the one that saved it. Entries that each rank keeps for
itself, such as ``dataloader.dp_rank_7``, have no place in another world.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import singledispatch
from typing import Any, Protocol, TypeGuard, runtime_checkable

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor

from torchtitan_ext.errors import CannotReshardError, Problem, Remedy
from torchtitan_ext.layout.world import World as World
from torchtitan_ext.state.nested import nested_members
from torchtitan_ext.storage.metadata.lazy_metadata import is_saved_tensor
from torchtitan_ext.storage.metadata.saved_metadata import WORLD_KEY as WORLD_KEY
from torchtitan_ext.storage.metadata.saved_metadata import recorded_world

# Of these it is known that they are none: to ask the protocol costs more than to describe a tensor.
_NOT_STATEFUL = frozenset({torch.Tensor, torch.nn.Parameter, DTensor})


@dataclass(frozen=True)
class Resharded:
    """A component's state for this rank in the new world.

    Attributes:
        state: What the component's ``load_state_dict`` takes.
        note: One short line for the report: what became of the saved state. The same on every rank.
        samples_seen: Samples that it has served to the run, over all ranks; ``None`` where it serves none.
        samples_padded: How many more it has served twice, to fill batches.
        samples_counted: Samples that the run has seen by its account; ``None`` where it does not count them. Where no
            component has served as many they were saved at different moments, and the load is refused.
    """

    state: dict[str, Any]
    note: str
    samples_seen: int | None = None
    samples_padded: int = 0
    samples_counted: int | None = None


def disagreeing_states(states: Mapping[Any, Resharded]) -> tuple[list[str], str]:
    """The components of new states, where one counts samples that no other has served, and all counts as a text.

    A run may count the padding of last batches, or not.
    """
    served = {str(key): one.samples_seen for key, one in states.items() if one.samples_seen is not None}
    padded = [one.samples_padded + one.samples_seen for one in states.values() if one.samples_seen is not None]
    right = {*served.values(), *padded}
    wrong = {
        str(key): one.samples_counted
        for key, one in states.items()
        if one.samples_counted is not None and one.samples_counted not in right
    }
    counts = {**served, **wrong} if served and wrong else {}
    return list(counts), ", ".join(f"{name} {count}" for name, count in counts.items())


@runtime_checkable
class Reshardable(Protocol):
    """A ``Stateful`` object that loads what another number of ranks saved.

    A class that cannot get the method is taught with ``reshard_state.register``.
    """

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...

    def reshard(self, saved: Mapping[str, Any], old: World, new: World) -> Resharded:
        """This rank's part of a saved state. Not collective; changes nothing.

        Args:
            saved: The ``state_dict()`` of all ranks that saved, merged by key.
            old: The world that saved it, as far as the checkpoint says.
            new: The world that loads it.

        Raises:
            CannotReshardError: With the reason and what to do instead.
        """
        ...


@singledispatch
def reshard_state(component: Any, saved: Mapping[str, Any], old: World, new: World) -> Resharded:
    """Asks a component for its part of a saved state; see ``Reshardable.reshard``.

    ``reshard_state.register(cls)(function)`` teaches it a class that has no such method; ``function`` takes the same
    four arguments.
    """
    if _is_reshardable(component):
        return component.reshard(saved, old, new)
    raise CannotReshardError(
        f"{type(component).__name__} does not say how it reshards",
        "give it a method reshard(saved, old, new), or register one with tte.elastic.reshard_state.register",
    )


def is_stateful(component: Any) -> TypeGuard[Stateful]:
    """Whether an entry of a state dict has a state of its own to give and take."""
    return type(component) not in _NOT_STATEFUL and isinstance(component, Stateful)


def nested_stateful(value: Any) -> str | None:
    """What to do about a ``Stateful`` object in a value below the top of a state dict; ``None`` where there is none."""
    objects = (member for member in nested_members(value) if not isinstance(member, type))
    found = next(filter(is_stateful, objects), None)
    if found is None:
        return None
    return f"{type(found).__name__} below the top of a state dict is not asked for its state: pass its state_dict()"


def can_reshard(component: Any) -> bool:
    """Whether ``reshard_state`` knows what to do with a component."""
    return _is_reshardable(component) or reshard_state.dispatch(type(component)) is not reshard_state.dispatch(object)


def _is_reshardable(component: Any) -> TypeGuard[Reshardable]:
    """Modules of FSDP2 have another method ``reshard``, which frees what was gathered."""
    return isinstance(component, Reshardable) and not str(component.reshard.__module__).startswith("torch.")


def saved_world(metadata: Metadata) -> World:
    """The world that saved a checkpoint; of size 0 where stock DCP wrote it, which does not say, or it is no world."""
    return recorded_world(metadata.planner_data) or World(0)


# A component such as dp_rank_7 or rank_7: an entry that each rank keeps for itself. Not layers.7.
PER_RANK = re.compile(r"((?:^|\.)(?:[^.]*_)?rank_?)\d+(?=\.|$)")


def unclaimed_problems(
    wanted: Collection[str], num_ranks: int, metadata: Metadata, allowed: Sequence[str]
) -> list[Problem]:
    """Entries that each rank keeps for itself, of which this load wants some and would silently drop the others."""
    families: dict[str, list[str]] = {}
    for fqn in metadata.state_dict_metadata:  # a lazy mapping: no entries are made
        if (family := family_of(fqn)) != fqn and not is_saved_tensor(metadata.state_dict_metadata, fqn):
            families.setdefault(family, []).append(fqn)
    problems = []
    for family, members in families.items():
        unclaimed = [fqn for fqn in members if fqn not in wanted]
        unclaimed = [fqn for fqn in unclaimed if not any(fnmatch.fnmatchcase(fqn, glob) for glob in allowed)]
        if unclaimed and len(unclaimed) < len(members) and any(fqn in wanted for fqn in members):
            problems.append(
                Problem(
                    "unclaimed_keys",
                    family,
                    f"the checkpoint has {len(members)} of these, the {num_ranks} rank(s) of this load ask for "
                    f"{sum(fqn in wanted for fqn in members)}; {unclaimed[0]} would be dropped; load on as many "
                    "ranks as saved",
                    f", {how_to_divide(family)}, or pass LoadPlanner(allow_unclaimed=[{family!r}])",
                    Remedy("reshard", len(members)),
                )
            )
    return problems


def how_to_divide(family: str) -> str:
    """What carries entries of old ranks to other ranks; torchtitan's data loader has them as ``dp_rank_*``."""
    known = ", or read torchtitan's text data with ElasticDataLoader and TorchtitanTextStreams"
    return "give the component a method reshard" + (known if "dp_rank_*" in family else "")


def family_of(fqn: str) -> str:
    """The key with ``*`` for each rank: equal for what all ranks keep under one name, itself for other keys."""
    return PER_RANK.sub(r"\1*", fqn) if "rank" in fqn else fqn
