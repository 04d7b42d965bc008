"""Matches saved parameter groups to those of an optimizer that differs from the saved one.

Groups were added or removed, a newer torch has options that the checkpoint lacks
(https://github.com/pytorch/torchtitan/issues/886: ``decoupled_weight_decay``), parameters were frozen or unfrozen.
Everything here is a pure function on plain values; nothing is collective, and equal arguments give equal results on
every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torchtitan_ext.errors import named

GroupNoteKind = Literal["filled", "kept", "dropped", "new", "removed", "frozen", "unfrozen", "problem"]

# These entries of a group name its parameters; all others are options.
_MEMBERS = ("params", "param_names")

# LR schedulers of torch keep these in the groups; an optimizer without a scheduler yet does not have them.
_SCHEDULER_OPTIONS = ("initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum")

_MAX_NAMES = 3


@dataclass(frozen=True)
class GroupNote:
    """A line of the report: the outcome for a parameter group or an option.

    Attributes:
        kind: ``problem`` refuses the load, the others inform.
        text: A clause, which names the groups by position.
    """

    kind: GroupNoteKind
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


def merge_param_groups(
    saved: Sequence[Mapping[str, Any]],
    current: Sequence[Mapping[str, Any]],
    *,
    keeps: Callable[[int, str], bool] = lambda index, option: False,
) -> tuple[list[dict[str, Any]], list[GroupNote]]:
    """The current groups with the saved options of the parameters that they hold.

    Groups are as in ``optimizer.state_dict()["param_groups"]`` (ids) or ``get_optimizer_state_dict`` (fqns). Names are
    taken from ``param_names`` where every group has them. Ids are positions and mean the same only where the number of
    parameters is the same.

    Args:
        saved: The groups of the checkpoint.
        current: The groups of this run's optimizer.
        keeps: Whether the group at a position of ``current`` keeps its own value of an option.

    Returns:
        As many groups as ``current``, in its order, each with its ``params`` and its options: an option has the value
        of the saved group that holds the parameters. An option that the saved group lacks, and a group without a saved
        parameter, keep the current values. Second, the notes for the report: a group with a ``problem`` is unchanged.

    Example:
        >>> saved = [{"params": ["w", "b"], "lr": 0.1}]
        >>> merge_param_groups(saved, [{"params": ["w"], "lr": 1.0, "fused": True}])
        ([{'params': ['w'], 'lr': 0.1, 'fused': True}],
         [GroupNote('filled', 'group 0 keeps fused=True, which the checkpoint lacks'), GroupNote('frozen', ...)])
    """
    by_name = all("param_names" in group for group in (*saved, *current))
    saved_names, current_names = (
        [list(group["param_names" if by_name else "params"]) for group in groups] for groups in (saved, current)
    )
    notes: list[GroupNote] = []
    in_doubt = "" if by_name else _positions_in_doubt(saved, current)
    if in_doubt:
        return [dict(group) for group in current], [GroupNote("problem", in_doubt)]
    owner = {name: index for index, names in enumerate(saved_names) for name in names}
    merged = []
    for index, (group, names) in enumerate(zip(current, current_names, strict=True)):
        sources = sorted({owner[name] for name in names if name in owner})
        added = [name for name in names if name not in owner]
        if not sources:
            notes.append(GroupNote("new", f"group {index} ({named(names, _MAX_NAMES)}) keeps this run's options"))
            merged.append(dict(group))
            continue
        own = {option for option in {*saved[sources[0]], *group} - {*_MEMBERS} if keeps(index, option)}
        conflicts = _conflicts([saved[source] for source in sources], group, own)
        if conflicts:
            notes.append(GroupNote("problem", _conflict_text(index, sources, conflicts)))
            merged.append(dict(group))
            continue
        if added:
            notes.append(
                GroupNote("unfrozen", f"group {index} has {named(added, _MAX_NAMES)}, which the checkpoint does not")
            )
        result, group_notes = _merged_group(index, saved[sources[0]], group, own)
        merged.append(result)
        notes += group_notes
    return merged, notes + _left_out(saved_names, current_names)


def option_keys(component: str, groups: Sequence[Mapping[str, Any]]) -> dict[tuple[int, str], str]:
    """The key of each option in a policy, by position of the group and name: ``optimizer.param_groups.0.lr``."""
    return {
        (index, option): f"{component}.param_groups.{index}.{option}"
        for index, group in enumerate(groups)
        for option in (*group, *_SCHEDULER_OPTIONS)
        if option not in _MEMBERS
    }


def find_moved(saved: Sequence[Mapping[str, Any]], current: Sequence[Mapping[str, Any]]) -> list[str]:
    """Named parameters with another id in the checkpoint, where the saved ``state`` of that id is another parameter's.

    Takes groups as ``merge_param_groups`` does.
    """
    ids = [
        {
            name: number
            for group in groups
            for name, number in zip(group.get("param_names", ()), group["params"], strict=False)
            if isinstance(number, int)
        }
        for groups in (saved, current)
    ]
    return [name for name, number in ids[1].items() if ids[0].get(name, number) != number]


def _positions_in_doubt(saved: Sequence[Mapping[str, Any]], current: Sequence[Mapping[str, Any]]) -> str:
    """Why positions cannot identify parameters, where there are no names; empty where they can."""
    num_saved, num_current = (sum(len(group["params"]) for group in groups) for groups in (saved, current))
    if num_saved == num_current or not any(map(_is_by_position, (*saved, *current))):
        return ""
    told = f"the checkpoint has {num_saved} parameter(s) by {{}}: which is which cannot be told; {{}}"
    if all("param_names" in group for group in saved):
        by = f"name, this optimizer has {num_current} without"
        return told.format(by, "load it into an optimizer built from named_parameters()")
    if not any(map(_is_by_position, saved)):
        by = f"name, this optimizer has {num_current} by position"
        return told.format(by, "load it into get_optimizer_state_dict(model, optimizer)")
    return told.format(
        f"position and no names, this optimizer has {num_current}",
        "save it again by the job that has these, and load it, with an optimizer built from named_parameters(), or by "
        "get_optimizer_state_dict",
    )


def _is_by_position(group: Mapping[str, Any]) -> bool:
    return any(isinstance(name, int) for name in group["params"])


def _merged_group(
    index: int, saved: Mapping[str, Any], current: Mapping[str, Any], own: Collection[str]
) -> tuple[dict[str, Any], list[GroupNote]]:
    merged = dict(current)
    notes = []
    for option in current:
        if option in _MEMBERS:
            continue
        if option in own:
            notes.append(GroupNote("kept", f"group {index} keeps this run's {option}={current[option]!r}"))
        elif option in saved:
            merged[option] = _like(current[option], saved[option])
        else:
            text = f"group {index} keeps {option}={current[option]!r}, which the checkpoint lacks"
            notes.append(GroupNote("filled", text))
    for option in saved:
        if option in current or option in _MEMBERS or option in own:
            continue
        if option in _SCHEDULER_OPTIONS:
            merged[option] = saved[option]
        else:
            text = f"group {index} has no option {option} any more (saved {saved[option]!r})"
            notes.append(GroupNote("dropped", text))
    return merged, notes


def _conflicts(
    sources: Sequence[Mapping[str, Any]], current: Mapping[str, Any], own: Collection[str]
) -> dict[str, list[Any]]:
    """Options whose values differ between the saved groups that a current group joins."""
    conflicts = {}
    for option in dict.fromkeys((*current, *_SCHEDULER_OPTIONS)):
        if option in _MEMBERS or option in own:
            continue
        values = [source.get(option) for source in sources]
        if any(_like(values[0], value) != values[0] for value in values[1:]):
            conflicts[option] = values
    return conflicts


def _conflict_text(index: int, sources: Sequence[int], conflicts: Mapping[str, list[Any]]) -> str:
    details = []
    for option, values in conflicts.items():
        places = [f"{value!r} in group {source}" for source, value in zip(sources, values, strict=True)]
        details.append(f"{option} is {', '.join(places)}")
    return (
        f"group {index} joins parameters of saved groups {', '.join(map(str, sources))}, whose options differ: "
        f"{'; '.join(details)}; keep them in groups of their own, or make the values equal before the save"
    )


def _left_out(saved_names: Sequence[Sequence[Any]], current_names: Sequence[Sequence[Any]]) -> list[GroupNote]:
    held = {name for names in current_names for name in names}
    notes = []
    for index, names in enumerate(saved_names):
        left = [name for name in names if name not in held]
        if left and len(left) == len(names):
            notes.append(GroupNote("removed", f"saved group {index} ({named(left, _MAX_NAMES)}) has no parameter here"))
        elif left:
            notes.append(GroupNote("frozen", f"saved group {index} has {named(left, _MAX_NAMES)}, not optimized here"))
    return notes


def _like(current: Any, saved: Any) -> Any:
    """The saved value, a list as a tuple where the current value is one: some checkpoints store both as lists."""
    return tuple(saved) if isinstance(current, tuple) and isinstance(saved, list) else saved
