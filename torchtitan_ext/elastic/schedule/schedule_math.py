"""Schedules of torch's LR schedulers away from their optimizer: copied, restored, played to a step.

A copy stands on ``StandInOptimizer``, which has no parameters, only the group options that schedulers read and write.
So a schedule is worked out without touching the running job.
"""

from __future__ import annotations

import copy
import types
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ConstantLR,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    CyclicLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    MultiplicativeLR,
    MultiStepLR,
    OneCycleLR,
    PolynomialLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

from torchtitan_ext.errors import CannotReshardError

# Their learning rate is a formula in the step: they need not be played step by step.
_WITHOUT_MEMORY = (LambdaLR, CyclicLR, OneCycleLR)

_KNOWN = (
    *_WITHOUT_MEMORY,
    ChainedScheduler,
    ConstantLR,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    ExponentialLR,
    LinearLR,
    MultiplicativeLR,
    MultiStepLR,
    PolynomialLR,
    SequentialLR,
    StepLR,
)

# What a schedule counts, beside attributes that begin with "_"; all else of its state are its options.
_MOVING = frozenset({"last_epoch", "best", "num_bad_epochs", "cooldown_counter", "T_cur", "T_i"})
_LR_OPTIONS = ("lr", "initial_lr", "max_lr", "min_lr")
_MOMENTUM_OPTIONS = ("max_momentum", "base_momentum", "momentum", "betas")

_PER_GROUP_ATTRIBUTES = ("base_lrs", "max_lrs", "min_lrs", "base_momentums", "max_momentums", "lr_lambdas", "_last_lr")


class StandInOptimizer:
    """An optimizer for a scheduler: the options of parameter groups, without parameters."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.param_groups = [
            {name: plain(group[name]) for name in (*_LR_OPTIONS, *_MOMENTUM_OPTIONS) if name in group}
            for group in optimizer.param_groups
        ]
        self.defaults = optimizer.defaults
        self._opt_called = True

    def step(self) -> None:
        """Nothing to do; schedulers look for the mark below and warn where they miss it."""

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]


def copied(scheduler: LRScheduler, optimizer: StandInOptimizer | None = None) -> LRScheduler:
    """A scheduler of the same class and state on a stand-in optimizer. Changes to it do not reach the original."""
    stand_in = StandInOptimizer(scheduler.optimizer) if optimizer is None else optimizer
    clone = copy.copy(scheduler)
    for name, value in vars(scheduler).items():
        setattr(clone, name, plain(value))
    clone.optimizer = stand_in  # type: ignore[assignment]
    if isinstance(clone, (ChainedScheduler, SequentialLR)):
        clone._schedulers = [copied(child, stand_in) for child in _children(scheduler)]
    if isinstance(clone, (LambdaLR, MultiplicativeLR)):
        clone.lr_lambdas = list(map(_copied_function, clone.lr_lambdas))
    if isinstance(clone, CyclicLR):
        clone._scale_fn_custom = _copied_function(clone._scale_fn_custom)
        clone._init_scale_fn()
    return clone


def described(scheduler: LRScheduler) -> dict[str, Any]:
    """A scheduler as plain data: its class, its ``state_dict()``, and the group options that it changes."""
    options = (*_LR_OPTIONS, *_MOMENTUM_OPTIONS) if _cycles_momentum(scheduler) else _LR_OPTIONS
    return {
        "type": type(scheduler).__name__,
        "state": plain(scheduler.state_dict()),
        "groups": [
            {name: plain(group[name]) for name in options if name in group}
            for group in scheduler.optimizer.param_groups
        ],
    }


def restore(scheduler: LRScheduler, state: Mapping[str, Any], groups: Sequence[Mapping[str, Any]] | None) -> None:
    """Puts a state that fits, of ``described`` or of torch, into a scheduler and its optimizer's groups, in place.

    Without ``groups`` the groups take the learning rates of the state itself.
    """
    # The saved state may lack attributes of a newer torch. It is copied, because torch pops entries from it.
    scheduler.load_state_dict({**scheduler.state_dict(), **plain(state)})
    if groups is None:
        last = getattr(scheduler, "_last_lr", None)
        base = _base_lrs(scheduler)
        for index, group in enumerate(scheduler.optimizer.param_groups):
            if base is not None:
                set_option(group, "initial_lr", base[index])
            if last is not None:
                set_option(group, "lr", last[index])
    else:
        restore_groups(scheduler.optimizer, groups)


def restore_groups(optimizer: Optimizer, groups: Sequence[Mapping[str, Any]]) -> None:
    """Puts saved options into the parameter groups of an optimizer, in place."""
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        for name, value in saved.items():
            set_option(group, name, value)


def set_option(group: dict[str, Any], name: str, value: Any) -> None:
    """Sets an option of a parameter group; a learning rate that is a tensor stays the same tensor, as graphs need."""
    if isinstance(group.get(name), torch.Tensor):
        group[name].fill_(value)
    else:
        group[name] = value


def fits(saved: Mapping[str, Any], current: Mapping[str, Any]) -> bool:
    """Whether a saved ``state_dict()`` is of the same kind of scheduler, over as many parameter groups."""
    if _attributes(saved) != _attributes(current):
        return False
    for name in _PER_GROUP_ATTRIBUTES:
        if isinstance(saved.get(name), list) and len(saved[name]) != len(current.get(name) or ()):
            return False
    saved_children, children = saved.get("_schedulers", []), current.get("_schedulers", [])
    return len(saved_children) == len(children) and all(map(fits, saved_children, children))


def overridden(scheduler: LRScheduler, restored: LRScheduler) -> list[str]:
    """The options of a schedule that a restored state has replaced by other values, for the report."""
    now, before = scheduler.state_dict(), restored.state_dict()
    found = [
        f"{name} {before[name]} as saved, not {now[name]}"
        for name in now
        if not name.startswith("_")
        and name not in _MOVING
        and name in before
        and plain(before[name]) != plain(now[name])
    ]
    children = zip(_children(scheduler), _children(restored), strict=True)
    return found + [text for child, other in children for text in overridden(child, other)]


def select_groups(state: Mapping[str, Any], positions: Sequence[int]) -> dict[str, Any]:
    """A ``state_dict()`` with the values of the parameter groups at these positions, in this order."""
    selected = dict(state)
    for name in _PER_GROUP_ATTRIBUTES:
        if isinstance(state.get(name), list):
            selected[name] = [state[name][position] for position in positions]
    if "_schedulers" in state:
        selected["_schedulers"] = [select_groups(child, positions) for child in state["_schedulers"]]
    return selected


def step_of(state: Mapping[str, Any]) -> int | None:
    """The step of a ``state_dict()``; a chain's is that of its members."""
    if "last_epoch" in state:
        return int(state["last_epoch"])
    steps = [step_of(child) for child in state.get("_schedulers", ())]
    return steps[0] if steps else None


def move_to(scheduler: LRScheduler, step: int, *, remedy: str) -> None:
    """Plays a copied scheduler from its beginning to a step. Refuses one whose state depends on more than the step."""
    _check_known(scheduler, remedy)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # An optimizer that was loaded before has the saved rates in its groups.
        for group, lr in zip(scheduler.optimizer.param_groups, _played_from(scheduler), strict=True):
            group["lr"] = group["initial_lr"] = lr
        _restart(scheduler)
        try:
            if isinstance(scheduler, _WITHOUT_MEMORY) and step > 0:
                scheduler.last_epoch, scheduler._step_count = step - 1, step
                scheduler.step()
            else:
                for _ in range(step):
                    scheduler.step()
        except ValueError as error:
            raise CannotReshardError(
                f"{type(scheduler).__name__} cannot stand at step {step} ({error})", "build it for more steps"
            ) from None


def normalized(state: Mapping[str, Any]) -> dict[str, Any]:
    """A torch ``state_dict()`` as it was before a checkpoint's flat keys took its lists and ints apart."""
    restored = {name: _with_lists(value) for name, value in state.items()}
    if isinstance(state.get("milestones"), Mapping):
        restored["milestones"] = Counter({int(step): int(count) for step, count in state["milestones"].items()})
    if "_schedulers" in restored:
        restored["_schedulers"] = [normalized(child) for child in restored["_schedulers"]]
    return restored


def plain(value: Any) -> Any:
    """A value with new containers, and numbers in place of tensors, which DCP would take out of their tuple."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, Counter):
        return Counter(value)
    if isinstance(value, dict):
        return {key: plain(member) for key, member in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(plain, value))
    return value


def _children(scheduler: LRScheduler) -> list[LRScheduler]:
    """The members of a chain or sequence."""
    return list(getattr(scheduler, "_schedulers", ()))


def _copied_function(function: Any) -> Any:
    return function if isinstance(function, types.FunctionType) else copy.copy(function)


def _attributes(state: Mapping[str, Any]) -> set[str]:
    """The attributes that tell kinds of schedulers apart. torch had ``verbose`` until 2.6."""
    public = {name for name in state if not name.startswith("_")} - {"verbose"}
    return public | ({"_schedulers", "_milestones"} & set(state))


def _base_lrs(scheduler: LRScheduler) -> list[Any] | None:
    children = _children(scheduler)
    return _base_lrs(children[0]) if children else getattr(scheduler, "base_lrs", None)


def _played_from(scheduler: LRScheduler) -> list[Any]:
    """The learning rates of step 0; in a chain those of the last member, which was built last."""
    children = _children(scheduler)
    return _played_from(children[-1]) if children else scheduler.base_lrs


def _cycles_momentum(scheduler: LRScheduler) -> bool:
    return getattr(scheduler, "cycle_momentum", False) or any(map(_cycles_momentum, _children(scheduler)))


def _check_known(scheduler: LRScheduler, remedy: str) -> None:
    if isinstance(scheduler, ReduceLROnPlateau):
        raise CannotReshardError("ReduceLROnPlateau follows the metrics it was given, not the step or samples", remedy)
    if type(scheduler) not in _KNOWN:
        name = type(scheduler).__name__
        reason = f"{name} is not one of torch's LR schedulers: its state depends on more than the step"
        raise CannotReshardError(reason, remedy)
    for child in _children(scheduler):
        _check_known(child, remedy)


def _restart(scheduler: LRScheduler) -> None:
    """Step 0, as the constructor leaves it."""
    if isinstance(scheduler, CosineAnnealingWarmRestarts):
        scheduler.T_cur, scheduler.T_i = -1, scheduler.T_0
    children = _children(scheduler)
    if not children:
        scheduler.last_epoch = -1
        scheduler._initial_step()
        return
    for child in children:
        _restart(child)
    if isinstance(scheduler, SequentialLR):
        SequentialLR.__init__(scheduler, scheduler.optimizer, children, scheduler._milestones)
    else:
        ChainedScheduler.__init__(scheduler, children, scheduler.optimizer)  # type: ignore[arg-type]


def _with_lists(value: Any) -> Any:
    """Dicts whose keys are 0, 1, ... become lists again, at every depth."""
    if isinstance(value, Mapping):
        members = {key: _with_lists(member) for key, member in value.items()}
        if members and {str(key) for key in members} == {str(index) for index in range(len(members))}:
            return [members[key] for key in sorted(members, key=int)]
        return members
    return [_with_lists(member) for member in value] if isinstance(value, list) else value
