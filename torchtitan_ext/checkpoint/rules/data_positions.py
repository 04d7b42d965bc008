"""Positions in data that other libraries keep: they count the batches of one rank, so they hold for as many ranks.

Ranks of equal shares save equal positions, which one of them writes for all. Nothing in the values then says that they
belong to a rank: a sampler that has served 2 batches to each of 2 ranks goes on after 2 batches of each of 4. So a
position is known by the class of the object that has it, or by the keys that such a class writes.
"""

from __future__ import annotations

import re
from typing import Any

from torch.utils.data import DataLoader, Dataset, Sampler

from torchtitan_ext.checkpoint.rules.load_rules import JointRequest, component_of
from torchtitan_ext.checkpoint.tables.component import PER_RANK, World
from torchtitan_ext.errors import Problem
from torchtitan_ext.layout.mesh_axes import num_data_parallel

_KEYS_OF_TORCHDATA = (
    "_index_sampler_state",
    "_iterator_finished",
    "_num_yielded",
    "_sampler_iter_state",
    "_sampler_iter_yielded",
    "_snapshot",
    "_steps_since_snapshot",
)
_POSITION = re.compile(rf"(?:^|\.)(?:{'|'.join(_KEYS_OF_TORCHDATA)})(?=\.|$)")
# Libraries whose loaders have classes of their own: MosaicML's, LitData's, those of Hugging Face and torchdata.
_LIBRARIES = frozenset({"datasets", "litdata", "streaming", "torchdata"})


def position_class(component: Any) -> str:
    """The class of an object of another library that keeps a position in data; empty for other objects."""
    kinds = type(component).__mro__
    is_position = isinstance(component, (DataLoader, Dataset, Sampler))
    if is_position or any(kind.__module__.partition(".")[0] in _LIBRARIES for kind in kinds):
        return type(component).__name__
    return ""


def position_problems(joint: JointRequest, old: World, new: World) -> tuple[list[Problem], list[str]]:
    """A problem for each position that this load would read into a world with other data-parallel ranks.

    Returns:
        The problems; and warnings, where the checkpoint does not say which world saved it.
    """
    if old.size and not _differ(old, new):
        return [], []
    problems, warned = [], []
    for name, kind in _positions(joint).items():
        if not old.size:
            warned.append(
                f"{name} is the position of {kind}, which goes on from it on as many ranks as saved; the checkpoint "
                "does not say how many these were"
            )
            continue
        detail = (
            f"it is the position of {kind}, which counts the batches of one rank: saved by {old}, loaded by {new}, it "
            "would skip samples or give them twice; load it on as many data-parallel ranks as saved"
        )
        glob = name if name in joint.components else f"{name}.*"
        advice = (
            ", read the data with tte.elastic.ElasticDataLoader, give the object a method reshard, or pass "
            f"policy=ElasticPolicy({{{glob!r}: 'reset'}}), which begins anew; 'keep' loads "
            "it as it is"
        )
        problems.append(Problem("cannot_reshard", name, detail, advice))
    return problems, warned


def _differ(old: World, new: World) -> bool:
    """Whether other numbers of ranks get different data; by the number of all ranks, where the meshes do not tell."""
    counts = [num_data_parallel(world.mesh, world.size) for world in (old, new)]
    return old.size != new.size if None in counts else counts[0] != counts[1]


def _positions(joint: JointRequest) -> dict[str, str]:
    """The class of each position that ranks read, by the key above it; not those that each rank has under its name."""
    components, policy = joint.components, joint.rules.policy
    of_class = {name: plan.position_class for name, plan in components.items() if plan.position_class}
    positions: dict[str, str] = {}
    per_rank: set[str] = set()
    for fqn in joint.wanted:
        found = _POSITION.search(fqn)
        component = component_of(fqn, components, is_tensor=False) if found or of_class else ""
        if not found and component not in of_class:
            continue
        if PER_RANK.search(fqn):
            per_rank.add(component)
        elif policy is None or policy.key_action(fqn, component) == "reshard":
            name = component if component in of_class else fqn[: found.start()] if found else component
            positions.setdefault(name or fqn, of_class.get(component, "torchdata's loader"))
    return {name: kind for name, kind in positions.items() if name not in per_rank}
