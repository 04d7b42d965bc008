"""Models and optimizers given as objects, as components of a state dict.

Their states have canonical names, whatever FSDP2, TP and pipelines make of the modules: those of
``torch.distributed.checkpoint.state_dict``. The state of an optimizer is flat, an entry for each parameter and value,
as torchtitan saves it: so the stages of a pipeline share one state. What was saved in groups, as ``get_state_dict`` has
it unless it is told otherwise, is loaded so too.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim import Optimizer

from torchtitan_ext.errors import WrongValueError, described

_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class ModelParts:
    """The modules of a model on this rank: one, or the stages of a pipeline. ``Stateful``."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        self.parts = parts

    def state_dict(self) -> dict[str, Any]:
        return dict(chain.from_iterable(get_model_state_dict(part).items() for part in self.parts))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for part in self.parts:
            set_model_state_dict(part, state, options=StateDictOptions(strict=False))  # others have the rest


class Optimizers:
    """The optimizers of the modules of a model, one for each. ``Stateful``.

    An optimizer that has taken no step has no state yet. To be filled it gets one, by a step that changes no parameter;
    ``undo`` takes that back, where it was not filled.
    """

    def __init__(self, name: str, optimizers: Sequence[Optimizer], parts: Sequence[nn.Module]) -> None:
        self._name = name
        self._optimizers = optimizers
        self._parts = parts
        self._begun: list[Optimizer] = []
        self._is_saved = False
        self._options = _FLAT

    def load_as(self, *, is_grouped: bool) -> None:
        """The form of the state that is to be filled: that in which it was saved."""
        self._is_saved = False
        self._options = StateDictOptions() if is_grouped and len(self._parts) == 1 else _FLAT

    def save(self) -> None:
        """The next state that is asked for is to be saved."""
        self._is_saved = True
        self._options = _FLAT

    def state_dict(self) -> dict[str, Any]:
        without = [optimizer for optimizer in self._optimizers if not optimizer.state]
        state: dict[str, Any] = {}
        with _without_gradients(without):
            for part, optimizer in zip(self._parts, self._optimizers, strict=True):
                state.update(get_optimizer_state_dict(part, optimizer, options=self._options))
        self._begun = [optimizer for optimizer in without if optimizer.state]  # others never have any
        if self._begun and self._is_saved:
            self.undo()
            raise WrongValueError(
                f"CheckpointManager: {self._name} has taken no step and has no state yet; save after the first step"
            )
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for part, optimizer in zip(self._parts, self._optimizers, strict=True):
            set_optimizer_state_dict(part, optimizer, state, options=self._options)
        self._begun = []

    def undo(self) -> None:
        for optimizer in self._begun:
            optimizer.state.clear()
        self._begun = []


def grouped_optimizers(keys: Container[str], names: Iterable[str]) -> list[str]:
    """The optimizers of which a checkpoint with these keys has the parameter groups, not options of each parameter."""
    return [name for name in names if f"{name}.param_groups.0.params" in keys]


@contextmanager
def _without_gradients(optimizers: Sequence[Optimizer]) -> Iterator[None]:
    """torch gives an optimizer its state only while no parameter has a gradient, and drops gradients then."""
    params = [param for optimizer in optimizers for group in optimizer.param_groups for param in group["params"]]
    grads = [param.grad for param in params]
    for param in params:
        param.grad = None
    try:
        yield
    finally:
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad


def as_components(objects: Mapping[str, Any]) -> dict[str, Any]:
    """What a state dict has in the place of each object: models and optimizers wrapped, all others as they are.

    So is an optimizer of a class that is ``Stateful`` by name, as torchtitan's of several is: its own state is flat.

    Raises:
        WrongValueError: It is unclear whose parameters an optimizer changes.
    """
    models = {name: parts for name, value in objects.items() if (parts := _parts_of(value, nn.Module))}
    components: dict[str, Any] = dict(objects)
    components.update({name: ModelParts(parts) for name, parts in models.items()})
    for name, value in objects.items():
        optimizers = [] if Stateful in type(value).__mro__ else _parts_of(value, Optimizer)
        if optimizers:
            modules = list(chain.from_iterable(models.values()))
            components[name] = Optimizers(
                name, optimizers, [_module_of(name, optimizer, modules) for optimizer in optimizers]
            )
    return components


def is_wrapped(component: Any) -> bool:
    """Whether ``as_components`` has put a component in the place of an object."""
    return isinstance(component, (ModelParts, Optimizers))


def _parts_of(value: Any, kind: type) -> list[Any]:
    """An object of a kind, or several in a list; an empty list of anything else."""
    parts = list(value) if isinstance(value, (list, tuple)) else [value]
    return parts if all(isinstance(part, kind) for part in parts) else []


def _module_of(name: str, optimizer: Optimizer, modules: Sequence[nn.Module]) -> nn.Module:
    """The module that has the parameters of an optimizer."""
    own = {id(param) for group in optimizer.param_groups for param in group["params"]}
    for module in modules:
        if own <= {id(param) for param in module.parameters()}:
            return module
    raise WrongValueError(
        f"CheckpointManager: got {name}={described(optimizer)}, whose parameters no one module of the model has; give "
        "the model too, and for several modules a list of optimizers, one for each; or give its state_dict()"
    )
