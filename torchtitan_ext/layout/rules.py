"""Sharding orders that placements cannot express, stated by the user for keys or globs of keys."""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from torchtitan_ext.errors import Problem, argument_error, check_argument


@dataclass(frozen=True)
class ShardOrder:
    """States the order in which mesh axes were sharded, where placements cannot say it.

    Interleaved fused QKV under tensor parallelism, then FSDP2, is ``ShardOrder((("tp", 0, 3), ("dp", 0, 1)))``: first
    axis ``tp`` takes its part of each of 3 blocks of dim 0, then ``dp`` chunks what is left.

    Attributes:
        steps: (mesh axis by name or index, tensor dim, split factor), in the order of sharding. Split factor 1 is
            ``torch.chunk``.

    Raises:
        TypeError: The steps are none.
        ValueError: A split factor below 1.
    """

    steps: tuple[tuple[int | str, int, int], ...]

    def __post_init__(self) -> None:
        if not isinstance(self.steps, (tuple, list)) or not all(map(_is_step, self.steps)):
            expected = "steps (mesh axis, tensor dim, split factor), such as (('tp', 0, 3), ('dp', 0, 1))"
            raise argument_error("ShardOrder", "steps", self.steps, expected)
        for axis, _, split_factor in self.steps:
            if split_factor < 1:
                raise ValueError(f"ShardOrder: got split factor {split_factor} for axis {axis!r}, expected at least 1")
        # Orders are compared by hash.
        object.__setattr__(self, "steps", tuple(map(tuple, self.steps)))


class LayoutRules:
    """The ``layouts`` argument of planners: sharding orders by canonical fqn or glob.

    A rule for ``wqkv.weight`` applies to the parameter under any prefix (``model.layers.0.wqkv.weight``) and to its
    flattened optimizer state (``optimizer.state.layers.0.wqkv.weight.exp_avg``). A rule without wildcards comes before
    a glob.
    """

    def __init__(self, layouts: Mapping[str, ShardOrder] | None = None) -> None:
        expected = "a mapping such as {'*.wqkv.weight': ShardOrder(...)}"
        check_argument("planner", "layouts", layouts, (Mapping, type(None)), expected)
        self._layouts = dict(layouts or {})
        for pattern, order in self._layouts.items():
            if not isinstance(order, ShardOrder):
                raise TypeError(f"layouts: got {type(order).__name__} for {pattern!r}, expected a ShardOrder")

    def matches(self, fqns: Collection[str]) -> dict[str, bool]:
        """Whether each pattern applies to one of these keys."""
        return {pattern: any(rule_applies(pattern, fqn) for fqn in fqns) for pattern in self._layouts}

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._layouts)

    def find(self, fqn: str) -> ShardOrder | None:
        """The order stated for a key, or ``None``. Raises ValueError where two rules of one rank differ."""
        if not self._layouts:
            return None
        chosen = patterns_for(fqn, self._layouts)
        if len({self._layouts[pattern] for pattern in chosen}) > 1:
            raise ValueError(f"layouts: the rules {chosen} say different things of {fqn}; make one of them narrower")
        return self._layouts[chosen[0]] if chosen else None


def patterns_for(fqn: str, patterns: Iterable[str]) -> list[str]:
    """Those of the patterns that apply to a key: names, or only where there are none globs; see ``LayoutRules``."""
    matching = [pattern for pattern in patterns if rule_applies(pattern, fqn)]
    exact = [pattern for pattern in matching if not any(char in pattern for char in "*?[")]
    return exact or matching


def unused_problem(pattern: str, fqns: Collection[str]) -> Problem:
    """What is wrong with a pattern that applies to no key on any rank; ``fqns`` are the keys there are."""
    ends = {".".join(fqn.split(".")[-1 - pattern.count(".") :]): fqn for fqn in fqns}
    close = difflib.get_close_matches(pattern, ends, n=1)
    hint = (
        f"did you mean {close[0]!r} (as in {ends[close[0]]})?" if close else "keys are such as " + next(iter(fqns), "")
    )
    return Problem("unused_layout", pattern, f"matches no key on any rank; {hint}")


def canonical_fqn(fqn: str, *, strip_module: bool = False) -> str:
    """The key without the components that torch.compile, activation checkpointing and FSDP1 add.

    Args:
        fqn: A key of a state dict.
        strip_module: Also without ``module`` (DDP), which may be a module's own name too.
    """
    dropped = _WRAPPER_COMPONENTS | {"module"} if strip_module else _WRAPPER_COMPONENTS
    parts = fqn.split(".")
    return fqn if dropped.isdisjoint(parts) else ".".join(part for part in parts if part not in dropped)


_WRAPPER_COMPONENTS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})


def _is_step(step: object) -> bool:
    if not isinstance(step, (tuple, list)) or len(step) != 3:
        return False
    axis, dim, split_factor = step
    return isinstance(axis, (int, str)) and isinstance(dim, int) and isinstance(split_factor, int)


def rule_applies(pattern: str, fqn: str) -> bool:
    """Whether a rule for a parameter, by name or glob, is one for this key; see ``LayoutRules``."""
    names = [fqn, canonical_fqn(fqn, strip_module=True)]
    names += [match.group(1) for name in tuple(names) if (match := _OPTIMIZER_STATE.search(name))]
    return any(fnmatch.fnmatchcase(name, form) for name in names for form in (pattern, f"*.{pattern}"))


# state.<parameter fqn>.<exp_avg>, as get_optimizer_state_dict flattens it.
_OPTIMIZER_STATE = re.compile(r"(?:^|\.)state\.(.+)\.[^.]+$")
