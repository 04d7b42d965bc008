"""What components may be, and how each is read: odd names and states, torch's own objects, parts of a world."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import torchtitan_ext as tte
from torchtitan_ext.elastic import ElasticPolicy, Resharded, Source, World, reshard_state
from torchtitan_ext.errors import (
    CannotReshardError,
    CheckpointReadError,
    MissingStateError,
    StateRefusedError,
    WrongValueError,
)


class Box:
    """Takes any state as it was saved; counts how often it starts anew."""

    def __init__(self, state: Any = None) -> None:
        self.state, self.num_resets = state, 0

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state_dict: Any) -> None:
        self.state = state_dict

    def reset(self) -> None:
        self.num_resets += 1


class ElasticBox(Box):
    def reshard(self, saved: Mapping[str, Any], old: World, new: World) -> Resharded:
        return Resharded(saved, f"{old.size} -> {new.size}")  # type: ignore[arg-type]


class Colour(enum.Enum):
    RED = 1


@dataclass
class Settings:
    colour: Colour


class FullBox(ElasticBox):
    def reshard(self, saved: Mapping[str, Any], old: World, new: World) -> Resharded:
        raise CannotReshardError("it is full", "empty it")


def refused(state: dict[Any, Any], *args: Any, **kwargs: Any) -> StateRefusedError:
    with pytest.raises(StateRefusedError) as caught:
        tte.load(state, *args, **kwargs)
    return caught.value


def odd_names(rank: int, world_size: int, path: Path) -> None:
    saved = {
        "a": ElasticBox({"q": (3,)}),
        "a.b": ElasticBox({"x": (1,), "y": {"z": (2,)}}),
        "a.b.c": torch.ones(2),
    }
    tte.save(saved, path / "dots")
    state = {"a": ElasticBox(), "a.b": ElasticBox(), "a.b.c": torch.zeros(2)}
    tte.load(state, path / "dots", policy=ElasticPolicy())
    assert state["a"].state == {"q": (3,)} and state["a.b"].state == {"x": (1,), "y": {"z": (2,)}}
    assert torch.equal(state["a.b.c"], torch.ones(2))
    error = refused({"a": ElasticBox(), "a.b": FullBox()}, path / "dots", policy=ElasticPolicy())
    assert [problem.fqn for problem in error.problems] == ["a.b"]

    tte.save({0: ElasticBox({1: (1,)}), 5: {"lr": 0.1, 7: 3}, 6: Box({2: 4})}, path / "ints")
    numbered: dict[Any, Any] = {0: ElasticBox(), 5: {"lr": 0.0, 7: 0}, 6: Box({2: 0})}
    tte.load(numbered, path / "ints", policy=ElasticPolicy())
    assert numbered[0].state == {"1": (1,)}, "as DCP records it"
    assert numbered[5] == {"lr": 0.1, 7: 3} and numbered[6].state == {2: 4}
    error = refused({0: FullBox(), 6: Box({8: 1})}, path / "ints", policy=ElasticPolicy())
    assert {problem.fqn for problem in error.problems} == {"0", "6.8", "6.2"}
    tte.load(
        {0: FullBox(), 6: Box({8: 1})},
        path / "ints",
        policy=ElasticPolicy({"0": "reset", "6.8": "reset", "6.2": "omit"}),
    )


def test_names_with_dots_and_numbers(run_world, tmp_path: Path) -> None:
    run_world(2, odd_names, tmp_path)


def odd_states(rank: int, world_size: int, path: Path) -> None:
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp",))
    states: dict[str, Any] = {
        "list": [1, 2],
        "tuple": (3, 4),
        "number": 5,
        "nested": {"a": (1, 2), "b": {"x": [1, {"y": 2}]}, "nothing": {}},
        "tensors": {
            "rng": torch.get_rng_state(),
            "bf16": torch.full((3,), 0.5, dtype=torch.bfloat16),
            "scalar": torch.tensor(3),
            "sharded": distribute_tensor(torch.arange(5.0), mesh, [Shard(0)]),
        },
    }
    saved = {name: Box(value) for name, value in states.items()}
    tte.save(saved, path / "ours")
    dcp.save(saved, checkpoint_id=path / "stock")
    for checkpoint in (path / "ours", path / "stock"):
        for kind in (ElasticBox, Box):
            state = {name: kind(value if kind is Box else None) for name, value in states.items()}
            report = tte.load(state, checkpoint, policy=ElasticPolicy())
            assert report is not None and not report.missing and not report.unexpected
            assert state["list"].state == [1, 2] and state["tuple"].state == (3, 4) and state["number"].state == 5
            nested = state["nested"].state
            assert nested["a"] == (1, 2) and nested["b"] == {"x": [1, {"y": 2}]}
            tensors = state["tensors"].state
            assert torch.equal(tensors["rng"], states["tensors"]["rng"]) and tensors["scalar"] == 3
            assert tensors["bf16"].dtype == torch.bfloat16 and torch.equal(tensors["bf16"], states["tensors"]["bf16"])
            sharded = tensors["sharded"]
            assert torch.equal(sharded if kind is ElasticBox else sharded.full_tensor(), torch.arange(5.0))

    tte.save({"empty": ElasticBox({}), "w": torch.ones(1)}, path / "empty")
    tte.load({"empty": ElasticBox({}), "w": torch.zeros(1)}, path / "empty", policy=ElasticPolicy())
    error = refused({"empty": ElasticBox({"x": 1}), "w": torch.zeros(1)}, path / "empty", policy=ElasticPolicy())
    assert "Missing key in checkpoint state_dict: empty. The checkpoint has nothing of this component" in str(error)
    partial = tte.LoadPlanner(allow_partial_load=True)
    for policy, planner in ((ElasticPolicy(strict="ignore"), None), (ElasticPolicy(), partial)):
        state = {"empty": ElasticBox({"x": 1}), "w": torch.zeros(1)}
        tte.load(state, path / "empty", policy=policy, planner=planner)
        assert state["empty"].state == {"x": 1} and state["w"] == 1


def test_states_of_any_shape_from_both_savers(run_world, tmp_path: Path) -> None:
    run_world(2, odd_states, tmp_path)


def torch_objects(rank: int, world_size: int, path: Path) -> None:
    def make() -> dict[str, Any]:
        model = nn.Linear(3, 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        return {
            "model": model,
            "optimizer": optimizer,
            "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5),
        }

    def step(state: dict[str, Any]) -> None:
        state["model"](torch.ones(3)).sum().backward()
        state["optimizer"].step()
        state["lr_scheduler"].step()

    torch.manual_seed(0)
    saved, target = make(), make()
    for _ in range(3):
        step(saved)
    tte.save(saved, path)
    for policy in (None, ElasticPolicy()):
        error = refused(make(), path, policy=policy)
        (problem,) = error.problems
        assert (problem.kind, problem.fqn) == ("unexpected_key", "optimizer.state"), "an optimizer that has not stepped"
        assert "get_optimizer_state_dict(model, optimizer) first" in str(error)
    assert "pass policy=ElasticPolicy({'optimizer.state.*': 'omit'})" in str(error)
    left = make()
    tte.load(left, path, policy=ElasticPolicy({"optimizer.state.*": "omit"}))
    assert left["lr_scheduler"].last_epoch == 3 and not left["optimizer"].state
    tte.load(make(), path, planner=tte.LoadPlanner(source=Source(exclude=["optimizer.state.*"])))
    ready = make()
    get_optimizer_state_dict(ready["model"], ready["optimizer"])  # as the message says
    tte.load(ready, path)
    moments = [ready["optimizer"].state[p]["exp_avg"] for p in ready["model"].parameters()]
    for old, moment in zip(saved["model"].parameters(), moments, strict=True):
        assert torch.equal(saved["optimizer"].state[old]["exp_avg"], moment)
    step(target)
    tte.load(target, path, policy=ElasticPolicy())
    for old, new in zip(saved["model"].parameters(), target["model"].parameters(), strict=True):
        assert torch.equal(old, new)
        assert torch.equal(saved["optimizer"].state[old]["exp_avg"], target["optimizer"].state[new]["exp_avg"])
    assert target["lr_scheduler"].last_epoch == 3 and target["optimizer"].param_groups[0]["lr"] == 0.05

    with torch.device("meta"):
        empty = nn.ModuleDict({"model": nn.Linear(3, 2), "head": nn.Linear(2, 1)})
    tte.load({"model": empty["model"]}, path, policy=ElasticPolicy({"model.bias": "omit", "optimizer": "omit"}))
    assert torch.equal(empty["model"].weight, saved["model"].weight) and empty["model"].weight.requires_grad
    assert empty["model"].bias.is_meta, "what is not loaded gets no memory that would pass for values"


def test_modules_optimizers_and_schedulers_as_they_are(run_world, tmp_path: Path) -> None:
    run_world(1, torch_objects, tmp_path)


def globs(rank: int, world_size: int, path: Path) -> list[str]:
    """Of components that are loaded as a whole, and of keys with the action "error"."""
    for glob in ("*", "box*", "box.*"):
        state: dict[str, Any] = {"box": ElasticBox({"x": 1}), "values": {"a": 0, "b": 0}}
        tte.load(state, path, policy=ElasticPolicy({glob: "reset"}))
        assert state["box"].state == {"x": 1} and state["box"].num_resets == 1
    tte.load({"box": (kept := ElasticBox({"x": 0, "y": 0}))}, path, policy=ElasticPolicy({"box.*": "keep"}))
    assert kept.state == {"x": 5, "y": 6}
    errors = [
        refused({"box": ElasticBox()}, path, policy=ElasticPolicy({"box.x": "omit"})),
        refused({"values": {"a": 0, "b": 0}}, path, policy=ElasticPolicy({"values.a*": "error"})),
        refused({"box": FullBox()}, path, policy=ElasticPolicy({"box.*": "reshard"})),
    ]
    states: list[dict[str, Any]] = [{"box": ElasticBox()}, {"values": {"a": 0, "b": 0}}, {"box": FullBox()}]
    policies = [{"box": "reset"}, {"values.a*": "reset"}, {"box": "reset"}]
    for state, actions in zip(states, policies, strict=True):
        tte.load(state, path, policy=ElasticPolicy(actions))
    return [str(problem) for error in errors for problem in error.problems]


def save_globs(rank: int, world_size: int, path: Path) -> None:
    tte.save({"box": ElasticBox({"x": 5, "y": 6}), "values": {"a": 1, "b": 2}}, path)


def test_globs_over_objects_and_errors(run_world, tmp_path: Path) -> None:
    run_world(2, save_globs, tmp_path)
    (problems,) = run_world(1, globs, tmp_path)
    assert problems == [
        "box: its own rule is for all its keys, and 'box.x' chooses some; load it by 'keep', or name all of it",
        "values.a*: its action is 'error', and it was saved by 2 ranks, not by 1 rank; load in that world, or choose "
        "another",
        "box: it is full; empty it",
    ]


def bad_rules(rank: int, world_size: int, path: Path) -> None:
    class WrongAnswer(ElasticBox):
        def reshard(self, saved: Mapping[str, Any], old: World, new: World) -> Any:
            return saved

    class Broken(ElasticBox):
        def reshard(self, saved: Mapping[str, Any], old: World, new: World) -> Resharded:
            return Resharded(saved["gone"], "") if rank else super().reshard(saved, old, new)

    tte.save({"box": ElasticBox({"x": 1})}, path)
    for box, text in (
        (WrongAnswer(), "box: WrongAnswer cannot take what was saved (AttributeError: 'dict' object has no attribute"),
        (Broken(), "box: Broken cannot take what was saved (KeyError: 'gone')"),
    ):
        error = refused({"box": box}, path, policy=ElasticPolicy())
        assert text in str(error)
        tte.load({"box": box}, path, policy=ElasticPolicy({"box": "reset"}))


def test_rules_that_fail_are_refusals_on_every_rank(run_world, tmp_path: Path) -> None:
    run_world(2, bad_rules, tmp_path)


def test_objects_without_a_rule_are_told_what_to_do() -> None:
    with pytest.raises(CannotReshardError, match="Box does not say how it reshards; give it a method reshard"):
        reshard_state(Box(), {}, World(1), World(2))


def parts(rank: int, world_size: int, path: Path) -> str:
    """As pipeline stages have them: components that only one rank has, objects among them."""
    own = {f"stage{rank}": {"w": torch.full((2,), rank + 1.0)}, f"box{rank}": ElasticBox({"x": (rank,)})}
    tte.save(own, path / "parts")
    state: dict[str, Any] = {f"stage{rank}": {"w": torch.zeros(2)}, f"box{rank}": ElasticBox()}
    report = tte.load(state, path / "parts", policy=ElasticPolicy())
    assert torch.equal(state[f"stage{rank}"]["w"], own[f"stage{rank}"]["w"])
    assert state[f"box{rank}"].state == {"x": (rank,)}
    assert report is not None and len(report.components) == 2 * world_size
    others = {"box0": FullBox()} if rank else {}
    return str(refused(others, path / "parts", policy=ElasticPolicy()))


def test_ranks_with_different_components(run_world, tmp_path: Path) -> None:
    (text, *others) = run_world(3, parts, tmp_path)
    assert all(other == text for other in others)
    assert "box0: it is full; empty it" in text


def some_ranks(rank: int, world_size: int, path: Path) -> None:
    group = dist.new_group([1, 2])
    if rank in (1, 2):
        tte.save({"box": ElasticBox({"x": 1})}, path / "group", process_group=group)
        state = {"box": ElasticBox()}
        report = tte.load(state, path / "group", policy=ElasticPolicy(), process_group=group)
        assert report is not None and report.new.size == 2 and state["box"].state == {"x": 1}
        full = FullBox() if rank == 2 else ElasticBox()
        assert "it is full" in str(refused({"box": full}, path / "group", policy=ElasticPolicy(), process_group=group))
    dist.barrier()
    alone = {"box": ElasticBox()}
    report = tte.load(alone, path / "group", policy=ElasticPolicy(), no_dist=True)
    assert report is not None and report.new.size == 1 and alone["box"].state == {"x": 1}


def test_some_of_the_ranks_and_one_alone(run_world, tmp_path: Path) -> None:
    run_world(3, some_ranks, tmp_path)


def eight(rank: int, world_size: int, path: Path) -> None:
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
    whole = torch.arange(60.0).view(12, 5)
    state = {"w": distribute_tensor(whole, mesh, [Shard(0), Shard(1)]), "box": ElasticBox({f"rank_{rank}": (rank,)})}
    tte.save(state, path)
    other = distribute_tensor(torch.zeros(12, 5), mesh, [Shard(1), Shard(0)])
    again: dict[str, Any] = {"w": other, "box": ElasticBox()}
    report = tte.load(again, path, policy=ElasticPolicy())
    assert str(report).startswith("saved by 8 ranks (dp 4 x tp 2), loaded by 8 ranks (dp 4 x tp 2)")
    assert torch.equal(again["w"].full_tensor(), whole)
    assert again["box"].state == {f"rank_{old}": (old,) for old in range(8)}


def test_eight_ranks(run_world, tmp_path: Path) -> None:
    run_world(8, eight, tmp_path)


@pytest.mark.filterwarnings("ignore:a load will refuse")
@pytest.mark.parametrize("policy", [None, ElasticPolicy()], ids=["by default", "by policy"])
def test_classes_are_allowed_for_values_of_every_kind(tmp_path: Path, policy: ElasticPolicy | None) -> None:
    """Of the groups of an optimizer, as Shampoo's are, of an object with a rule of its own, and of plain values."""
    options = Settings(Colour.RED)

    def state(given: Settings | None) -> dict[str, Any]:
        groups = [{"params": ["w"], "settings": given}]
        return {"optimizer": {"state": {}, "param_groups": groups}, "box": ElasticBox({"a": given}), "plain": given}

    tte.save(state(options), tmp_path, no_dist=True)
    names = f"{__name__}.Colour, {__name__}.Settings"
    with pytest.raises((CheckpointReadError, StateRefusedError)) as caught:
        tte.load(state(None), tmp_path, policy=policy, no_dist=True)
    assert f"pass allow_classes=[{names}] to LoadPlanner or tte.install" in str(caught.value)
    loaded = state(None)
    planner = tte.LoadPlanner(allow_classes=[Settings, Colour])
    tte.load(loaded, tmp_path, policy=policy, planner=planner, no_dist=True)
    assert loaded["optimizer"]["param_groups"][0]["settings"] == options == loaded["plain"]
    assert loaded["box"].state == {"a": options}


def test_a_part_of_a_checkpoint_is_loaded_by_default(tmp_path: Path) -> None:
    tte.save({"model": {"a": torch.ones(2), "b": torch.ones(2)}, "step": 1}, tmp_path)
    with pytest.warns(UserWarning, match="saved entries of model that nothing asks for are not loaded: model.b"):
        report = tte.load({"model": {"a": torch.zeros(2)}}, tmp_path)
    assert report.unexpected == ("model.b",) and "model  reshard  1 entry, 1 unexpected" in str(report)
    with pytest.raises(MissingStateError, match="model.c"):
        tte.load({"model": {"a": torch.zeros(2), "c": torch.zeros(2)}}, tmp_path)
    tte.load({"model": {"a": torch.zeros(2)}}, tmp_path, policy=ElasticPolicy(unexpected="ignore"))
    with pytest.raises(WrongValueError, match="got unexpected='keep'"):
        ElasticPolicy(unexpected="keep")  # type: ignore[arg-type]
    policy = ElasticPolicy({"a": "omit"}, strict="ignore", unexpected="warn")
    assert eval(repr(policy)).unexpected == "warn" and policy.with_actions({}).unexpected == "warn"
