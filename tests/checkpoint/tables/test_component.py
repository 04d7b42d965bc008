"""Which objects reshard, and what one is told that cannot."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from torchtitan_ext.checkpoint.tables.component import (
    Resharded,
    can_reshard,
    is_stateful,
    nested_stateful,
    reshard_state,
)
from torchtitan_ext.elastic import World
from torchtitan_ext.errors import CannotReshardError

WORLD = World(2)


class Plain:
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None: ...


class WithMethod(Plain):
    def reshard(self, saved: Mapping[str, Any], old: World, new: World) -> Resharded:
        return Resharded(dict(saved), f"{old.size} -> {new.size}")


class Taught(Plain):
    """A class of others, which cannot get the method."""


@reshard_state.register(Taught)
def _reshard_taught(component: Taught, saved: Mapping[str, Any], old: World, new: World) -> Resharded:
    return Resharded({}, "taught")


class ShardedLinear(torch.nn.Linear):
    """As ``fully_shard`` makes of a module: torch's ``reshard`` has another meaning."""

    reshard = FSDPModule.reshard


def test_modules_of_fsdp2_have_no_rule_of_their_own() -> None:
    assert not can_reshard(ShardedLinear(2, 2))


def test_by_a_method() -> None:
    assert can_reshard(WithMethod())
    assert reshard_state(WithMethod(), {"a": 1}, WORLD, World(3)) == Resharded({"a": 1}, "2 -> 3")


def test_by_a_function() -> None:
    assert can_reshard(Taught()) and reshard_state(Taught(), {}, WORLD, WORLD).note == "taught"


def test_others_are_told_how() -> None:
    assert not can_reshard(Plain())
    with pytest.raises(CannotReshardError, match="Plain does not say how it reshards; give it a method reshard"):
        reshard_state(Plain(), {}, WORLD, WORLD)


class StatefulTensor(torch.Tensor):
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None: ...


def test_stateful_is_what_has_both_methods_even_a_tensor() -> None:
    assert is_stateful(Plain()) and is_stateful(StatefulTensor(1))
    for value in (torch.zeros(1), torch.nn.Parameter(torch.zeros(1)), {"state_dict": 1}, 1):
        assert not is_stateful(value)


@pytest.mark.parametrize("value", [torch.nn.Linear(1, 1), [{"a": torch.nn.Linear(1, 1)}], (1, torch.nn.Linear(1, 1))])
def test_an_object_below_the_top_is_named(value: Any) -> None:
    text = "Linear below the top of a state dict is not asked for its state: pass its state_dict()"
    assert nested_stateful(value) == text


@pytest.mark.parametrize("value", [1, "x", [1, 2], {"a": [torch.ones(1)]}, None, torch.nn.Linear])
def test_other_values_are_not(value: Any) -> None:
    assert nested_stateful(value) is None
