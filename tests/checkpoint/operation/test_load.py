"""`tte.load` by a policy: every component crosses a change of world size, or the one report says why not."""

import dataclasses
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import torchtitan_ext as tte
from torchtitan_ext.elastic import ElasticDataLoader, ElasticPolicy, Resharded, Source, Streams, TrainState, World
from torchtitan_ext.errors import CannotReshardError, CheckpointFailedError, ReshardError, StateRefusedError


class Counters:
    """Ten counters, dealt to the ranks; each rank saves its own."""

    def __init__(self, rank: int, size: int) -> None:
        self.values = {index: 0 for index in range(10) if index % size == rank}

    def state_dict(self) -> dict[str, Any]:
        return {f"counter_{index}": (value,) for index, value in self.values.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.values = {int(key.split("_")[1]): value for key, (value,) in state_dict.items()}

    def reset(self) -> None:
        self.values = dict.fromkeys(self.values, -1)


class ElasticCounters(Counters):
    def reshard(self, saved: Mapping[str, Any], old: World, new: World) -> Resharded:
        if len(saved) != 10:
            raise CannotReshardError(f"{len(saved)} counters were saved, expected 10", "save again")
        mine = {f"counter_{index}": saved[f"counter_{index}"] for index in self.values}
        return Resharded(mine, f"{len(saved)} counters dealt from {old.size} to {new.size} ranks")


class PerRank:
    """As torchtitan's data loader: one entry per rank, and no rule for another number of ranks."""

    def __init__(self, rank: int) -> None:
        self.rank, self.position = rank, 0

    def state_dict(self) -> dict[str, Any]:
        return {f"dp_rank_{self.rank}": self.position}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.position = state_dict[f"dp_rank_{self.rank}"]


def weights(world_size: int, value: float = 0.0) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp",))
    whole = torch.arange(33.0).view(11, 3) + value
    return {"w": distribute_tensor(whole, mesh, [Shard(0)]), "b": torch.arange(5.0) + value}


def job(rank: int, world_size: int, value: float = 0.0) -> dict[str, Any]:
    return {
        "model": weights(world_size, value),
        "optimizer": {"state": {name: {"exp_avg": tensor} for name, tensor in weights(world_size, value).items()}},
        "counters": ElasticCounters(rank, world_size),
        "train_state": {"step": int(value)},
    }


def save_job(rank: int, world_size: int, path: Path) -> None:
    state = job(rank, world_size, 7.0)
    state["counters"].values = {index: index * index for index in state["counters"].values}
    tte.save(state, path)


def load_job(rank: int, world_size: int, path: Path, by_planner: bool) -> str:
    state = job(rank, world_size)
    policy = ElasticPolicy()
    if by_planner:
        report = tte.load(state, path, planner=tte.LoadPlanner(policy=policy))
    else:
        report = tte.load(state, path, policy=policy)
    assert torch.equal(state["model"]["w"].full_tensor(), torch.arange(33.0).view(11, 3) + 7)
    assert torch.equal(state["optimizer"]["state"]["w"]["exp_avg"].full_tensor(), torch.arange(33.0).view(11, 3) + 7)
    assert torch.equal(state["model"]["b"], torch.arange(5.0) + 7)
    assert state["counters"].values == {index: index * index for index in range(10) if index % world_size == rank}
    assert state["train_state"] == {"step": 7}
    assert report is not None and not report.problems
    return str(report)


@pytest.mark.parametrize("by_planner", [False, True])
def test_every_component_grows_and_shrinks(run_world, tmp_path: Path, by_planner: bool) -> None:
    run_world(2, save_job, tmp_path)
    for world_size in (1, 2, 3, 4):
        (text, *others) = run_world(world_size, load_job, tmp_path, by_planner)
        assert all(other == text for other in others)
    assert text.splitlines() == [
        "saved by 2 ranks (dp 2), loaded by 4 ranks (dp 4)",
        "  model        reshard  2 entries",
        "  optimizer    reshard  2 entries",
        "  counters     reshard  10 counters dealt from 2 to 4 ranks",
        "  train_state  reshard  1 entry",
    ]


def refused(state: dict[str, Any], *args: Any, **kwargs: Any) -> StateRefusedError:
    def frozen(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: frozen(member) for key, member in value.items()}
        if isinstance(value, torch.Tensor):
            return (value.to_local() if hasattr(value, "to_local") else value).tolist()
        return vars(value).copy() if hasattr(value, "__dict__") else value

    before = frozen(state)
    with pytest.raises(StateRefusedError) as caught:
        tte.load(state, *args, **kwargs)
    assert frozen(state) == before, "a refused load changes nothing"
    return caught.value


def save_per_rank(rank: int, world_size: int, path: Path) -> None:
    kept = {f"counter_{index}": (index,) for index in range(4)}
    tte.save(
        {"model": weights(world_size), "dataloader": PerRank(rank), "gone": 1, "old": {"x": 1}, "kept": kept}, path
    )


def everything_changed(rank: int, world_size: int) -> dict[str, Any]:
    class Stubborn(ElasticCounters):
        def reshard(self, saved: Mapping[str, Any], old: World, new: World) -> Resharded:
            raise CannotReshardError(f"{len(saved)} counters cannot be dealt", "use another kind")

    return {
        "model": weights(world_size, 1.0) | {"new": torch.zeros(3), "more": torch.zeros(2)},
        "dataloader": PerRank(rank),
        "counters": ElasticCounters(rank, world_size),
        "kept": Stubborn(rank, world_size),
        "old": {"y": 2},
    }


def refuse_everything(rank: int, world_size: int, path: Path) -> str:
    error = refused(everything_changed(rank, world_size), path, policy=ElasticPolicy())
    state = everything_changed(rank, world_size)
    names = ("counters", "kept", "model.new", "model.more", "old.y", "dataloader")
    report = tte.load(state, path, policy=ElasticPolicy({**dict.fromkeys(names, "reset"), "old.x": "omit"}))
    assert report is not None and not report.problems
    assert torch.equal(state["model"]["w"].full_tensor(), torch.arange(33.0).view(11, 3))
    assert state["old"] == {"y": 2} and set(state["counters"].values.values()) == {-1}
    return str(error)


def test_one_report_lists_everything_that_stands_in_the_way(run_world, tmp_path: Path) -> None:
    run_world(2, save_per_rank, tmp_path)
    (text, *others) = run_world(4, refuse_everything, tmp_path)
    assert all(other == text for other in others)
    assert text.splitlines() == [
        "load refused, nothing was changed; 7 problem(s):",
        "saved by 2 ranks (dp 2), loaded by 4 ranks (dp 4)",
        "  model       reshard  REFUSED, 2 entries, 2 missing",
        "  dataloader  reshard  REFUSED, 2 entries, 2 missing",
        "  counters    reshard  REFUSED, missing, left as is",
        "  kept        reshard  REFUSED",
        "  old         reshard  REFUSED, 1 missing, 1 unexpected",
        "  missing: model.new, model.more, old.y, dataloader.dp_rank_2, dataloader.dp_rank_3",
        "  unexpected: old.x",
        "Missing key in checkpoint (5):",
        "  Missing key in checkpoint state_dict: counters. The checkpoint has nothing of this component",
        "  Missing key in checkpoint state_dict: model.new. Nearest: model.w.",
        "  Missing key in checkpoint state_dict: model.more.",
        "  Missing key in checkpoint state_dict: old.y. Nearest: old.x.",
        "  Missing key in checkpoint state_dict: dataloader.dp_rank_2. It, and others up to dataloader.dp_rank_3, are "
        "of ranks that the save did not have: the checkpoint has 2 of these, dataloader.dp_rank_0 and so on, "
        "this load has 4 rank(s), and nothing says how to divide them among other ranks: give the component a method "
        "reshard, or read torchtitan's text data with ElasticDataLoader and TorchtitanTextStreams.",
        "Components that cannot cross to this world (1):",
        "  kept: 4 counters cannot be dealt; use another kind",
        "Saved entries that nothing asks for (1):",
        "  old.x: it is in the checkpoint and nothing asks for it; nearest that is asked for: old.y",
    ]


def shrink(rank: int, world_size: int, path: Path) -> str:
    error = refused({"dataloader": PerRank(rank)}, path, policy=ElasticPolicy(strict="ignore"))
    state = {"dataloader": PerRank(rank)}
    tte.load(state, path, policy=ElasticPolicy({"dataloader": "reset"}, strict="ignore"))
    assert state["dataloader"].position == 0
    return str(error)


def test_positions_of_ranks_are_not_dropped_in_silence(run_world, tmp_path: Path) -> None:
    run_world(2, save_per_rank, tmp_path)
    (text,) = run_world(1, shrink, tmp_path)
    assert "dataloader.dp_rank_*: the checkpoint has 2 of these, the 1 rank(s) of this load ask for 1" in text


def actions(rank: int, world_size: int, path: Path) -> dict[str, str]:
    texts = {}
    state = job(rank, world_size)
    report = (
        tte.load(
            state,
            path,
            policy=ElasticPolicy({"optimizer": "omit", "counters": "reset", "model.b": "omit", "train_state": "error"}),
        )
        if world_size == 2
        else None
    )
    if report is not None:
        texts["same world"] = str(report)
        assert set(state["counters"].values.values()) == {-1}
        assert torch.equal(state["model"]["b"], torch.arange(5.0)) and state["train_state"] == {"step": 7}
        assert torch.equal(state["optimizer"]["state"]["b"]["exp_avg"], torch.arange(5.0))
    else:
        texts["error"] = str(refused(state, path, policy=ElasticPolicy({"train_state": "error"})))
        tte.load(state, path, policy=ElasticPolicy({"counters": "keep"}))
        assert state["counters"].values == {index: index * index for index in range(10)}
    return texts


def test_what_each_action_does(run_world, tmp_path: Path) -> None:
    run_world(2, save_job, tmp_path)
    same = run_world(2, actions, tmp_path)[0]["same world"]
    assert same.splitlines()[1:] == [
        "  model        reshard  1 entry, 1 left as is",
        "  optimizer    omit     left as is",
        "  counters     reset    starts anew",
        "  train_state  error    1 entry",
    ]
    other = run_world(1, actions, tmp_path)[0]
    assert "train_state: its action is 'error', and it was saved by 2 ranks (dp 2), not by 1 rank" in other["error"]


def save_renamed(rank: int, world_size: int, path: Path) -> None:
    tte.save({"module": weights(world_size, 100.0), "head": torch.ones(4), "optimizer": {"lr": 0.5}}, path)


def load_renamed(rank: int, world_size: int, path: Path) -> str:
    state = {"model": weights(world_size), "optimizer": {"lr": 0.1}, "adapters": {"w": torch.zeros(4)}}
    rename = {"model.*": "module.*", "adapters.w": "head"}
    source = Source(path / "step-1", include=["model", "adapters"], exclude=["*.b"], rename=rename)
    report = tte.load(state, source)
    assert torch.equal(state["model"]["w"].full_tensor(), torch.arange(33.0).view(11, 3) + 100)
    assert torch.equal(state["model"]["b"], weights(world_size)["b"])
    assert torch.equal(state["adapters"]["w"], torch.ones(4)) and state["optimizer"] == {"lr": 0.1}
    state["adapters"]["w"].zero_()
    assert str(tte.load(state, dataclasses.replace(source, path=path), step="latest")) == str(report)
    assert torch.equal(state["adapters"]["w"], torch.ones(4))
    state["model"]["new"] = torch.zeros(2)
    error = refused(state, source)
    assert {problem.fqn for problem in error.problems} == {"model.new"}
    return str(report)


def test_a_source_with_its_keys_and_renames(run_world, tmp_path: Path) -> None:
    run_world(2, save_renamed, tmp_path / "step-1")
    (text, *others) = run_world(2, load_renamed, tmp_path)
    assert all(other == text for other in others)
    assert text.splitlines() == [
        "saved by 2 ranks (dp 2), loaded by 2 ranks (dp 2)",
        "  model      reshard  1 entry, 1 left as is",
        "  optimizer  reshard  left as is",
        "  adapters   reshard  1 entry",
    ]


def flat_model(rank: int, world_size: int, path: Path) -> None:
    state = weights(world_size, 5.0) | {"layers.0.w": torch.ones(3), "train_state": {"step": 1}}
    tte.save(state | {"layers.1.w": torch.ones(3)}, path)
    error = refused({**state}, path, policy=ElasticPolicy())
    assert [problem.fqn for problem in error.problems] == ["layers.1.w"]
    assert tte.load({**state}, path, policy=ElasticPolicy({"layers.1.w": "omit"})) is not None
    assert tte.load({"train_state": {"step": 0}}, path, policy=ElasticPolicy()) is not None
    report = tte.load(state, path, policy=ElasticPolicy(strict="warn"))
    assert report is not None and report.unexpected == ("layers.1.w",)
    assert {line.name: line.outcome for line in report.components}["model"] == "3 entries, 1 unexpected"


def test_models_at_the_top_of_a_state_dict(run_world, tmp_path: Path) -> None:
    run_world(2, flat_model, tmp_path)


def flat_optimizer(rank: int, world_size: int, path: Path) -> None:
    """As torchtitan has it, and torch with `flatten_optimizer_state_dict`: options by parameter."""

    def optimizer(*options: str, params: str = "wb") -> dict[str, Any]:
        return {
            "optimizer": {
                "state": {name: {"exp_avg": torch.full((2,), float(len(options)))} for name in params},
                "param_groups": {name: dict.fromkeys(options, 0.5) for name in params},
            }
        }

    tte.save(optimizer("lr", "momentum"), path)
    state = optimizer("lr", "decoupled_weight_decay")
    report = tte.load(state, path, policy=ElasticPolicy())
    assert report is not None and [line.outcome for line in report.components] == [
        "4 entries, decoupled_weight_decay filled from this run, momentum dropped"
    ]
    unfrozen = optimizer("lr", "momentum", params="wbc")
    refused(unfrozen, path, policy=ElasticPolicy())
    policy = ElasticPolicy({"optimizer.state.c.exp_avg": "reset", "optimizer.param_groups.c.*": "reset"})
    tte.load(unfrozen, path, policy=policy)
    frozen = refused(optimizer("lr", "momentum", params="w"), path, policy=ElasticPolicy())
    assert {problem.kind for problem in frozen.problems} == {"unexpected_key"}
    omitted = ElasticPolicy({"optimizer.state.b.*": "omit", "optimizer.param_groups.b.*": "omit"})
    tte.load(optimizer("lr", "momentum", params="w"), path, policy=omitted)


def test_flat_optimizer_states_that_changed(run_world, tmp_path: Path) -> None:
    run_world(1, flat_optimizer, tmp_path)


def real_optimizer(
    model: nn.Module, *names: tuple[str, ...], lr: tuple[float, ...] = (0.1, 0.2, 0.3)
) -> torch.optim.AdamW:
    params = dict(model.named_parameters())
    groups = [
        {"params": [params[name] for name in members], "lr": rate} for members, rate in zip(names, lr, strict=False)
    ]
    return torch.optim.AdamW(groups)


def grouped_optimizer(rank: int, world_size: int, path: Path) -> list[str]:
    """Groups as a list: they are matched by the parameters that they hold."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (world_size,))
    model = fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), mesh=mesh)
    first, second = ("0.weight", "0.bias"), ("1.weight", "1.bias")
    saved = real_optimizer(model, first, second)
    model(torch.ones(2, 4)).sum().backward()
    saved.step()
    model.zero_grad()  # or DCP does not make state for the optimizers below
    tte.save({"optimizer": get_optimizer_state_dict(model, saved)}, path)
    outcomes = []

    def load(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        state = {"optimizer": get_optimizer_state_dict(model, optimizer)}
        report = tte.load(state, path, policy=ElasticPolicy())
        assert report is not None
        outcomes.append(report.components[0].outcome)
        set_optimizer_state_dict(model, optimizer, state["optimizer"])
        return state["optimizer"]

    # Groups in another order, split, and with another option.
    swapped = real_optimizer(model, second, first, lr=(0.5, 0.6))
    load(swapped)
    assert [group["lr"] for group in swapped.param_groups] == [0.2, 0.1]
    split = real_optimizer(model, ("0.weight",), ("0.bias",), second, lr=(0.5, 0.6, 0.7))
    load(split)
    assert [group["lr"] for group in split.param_groups] == [0.1, 0.1, 0.2]
    exp_avg = split.state[model[0].weight]["exp_avg"].full_tensor()
    assert torch.equal(exp_avg, saved.state[model[0].weight]["exp_avg"].full_tensor()) and exp_avg.any()

    joined = real_optimizer(model, (*first, *second))
    state = {"optimizer": get_optimizer_state_dict(model, joined)}
    error = refused(state, path, policy=ElasticPolicy())
    outcomes.append(str(error.problems[0]))
    return outcomes


def test_parameter_groups_that_changed(run_world, tmp_path: Path) -> None:
    (outcomes, *others) = run_world(2, grouped_optimizer, tmp_path)
    assert all(other == outcomes for other in others)
    assert outcomes[:2] == ["12 entries", "12 entries"]
    assert "optimizer: group 0 joins parameters of saved groups 0, 1, whose options differ: lr is 0.1" in outcomes[2]


def different_moments(rank: int, world_size: int, path: Path) -> str:
    def make(num_samples: int) -> ElasticDataLoader:
        return ElasticDataLoader(
            range(num_samples), global_batch_size=10, dp_rank=rank, dp_size=world_size, uneven=True
        )

    state = {"dataloader": make(100), "validation": make(50), "train_state": TrainState()}
    for _, _ in zip(range(3), state["dataloader"], strict=False):
        state["train_state"].advance(samples=10)
    next(iter(state["validation"]))
    tte.save(state, path / "right")
    again = {"dataloader": make(100), "validation": make(50), "train_state": TrainState()}
    tte.load(again, path / "right", policy=ElasticPolicy())
    assert (again["dataloader"].samples_seen, again["validation"].samples_seen) == (30, 10)
    state["train_state"].advance(samples=10)  # counted, and not trained
    tte.save(state, path / "wrong")
    error = refused(again, path / "wrong", policy=ElasticPolicy())
    reset = dict.fromkeys([problem.fqn for problem in error.problems], "reset")
    tte.load(again, path / "wrong", policy=ElasticPolicy(reset))
    tte.load(again, path / "wrong", policy=ElasticPolicy({"train_state": "keep"}))
    assert again["train_state"].samples_seen == 40
    return str(error)


def test_counts_that_disagree(run_world, tmp_path: Path) -> None:
    (text, _) = run_world(2, different_moments, tmp_path)
    assert (
        "samples seen by the run: dataloader 30, validation 10, train_state 40; load them from one checkpoint, or reset"
    ) in text


def fail_on_one_rank(rank: int, world_size: int, path: Path, phase: str) -> tuple[str, tuple[str, ...]]:
    class Broken(ElasticCounters):
        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            if phase == "apply" and rank == 1:
                raise OSError("no room left")
            super().load_state_dict(state_dict)

    class BrokenPlanner(tte.LoadPlanner):
        def resolve_tensor(self, read_item: Any) -> torch.Tensor:
            if phase == "read" and rank == 1:
                raise OSError("bad sector")
            return super().resolve_tensor(read_item)

    state = job(rank, world_size)
    state["counters"] = Broken(rank, world_size)
    with pytest.raises(CheckpointFailedError) as caught:
        tte.load(state, path, policy=ElasticPolicy(), planner=BrokenPlanner())
    if phase == "read":
        assert set(state["counters"].values.values()) == {0}, "components are untouched while tensors are read"
    dist.barrier()
    return str(caught.value), caught.value.undefined


@pytest.mark.parametrize("phase", ["read", "apply"])
def test_a_failed_load_says_what_is_undefined(run_world, tmp_path: Path, phase: str) -> None:
    run_world(2, save_job, tmp_path)
    (answer, *others) = run_world(2, fail_on_one_rank, tmp_path, phase)
    assert all(other == answer for other in others)
    text, undefined = answer
    assert "rank 1: OSError: " in text and "Part-written" in text
    assert set(undefined) >= {"model", "optimizer", "train_state"}
    assert ("counters" in undefined) == (phase == "apply")


def state_dict_fails(rank: int, world_size: int, path: Path) -> str:
    class Failing(PerRank):
        def state_dict(self) -> dict[str, Any]:
            if self.rank == 1:
                raise KeyError("not ready")
            return super().state_dict()

    with pytest.raises(CheckpointFailedError) as caught:
        tte.load(job(rank, world_size) | {"dataloader": Failing(rank)}, path, policy=ElasticPolicy())
    assert caught.value.undefined == ()
    return str(caught.value)


def test_a_component_that_fails_on_one_rank_is_an_error_on_all(run_world, tmp_path: Path) -> None:
    run_world(2, save_job, tmp_path)
    (text, other) = run_world(2, state_dict_fails, tmp_path)
    assert text == other == f"load failed on 1 rank(s): rank 1: KeyError: 'not ready' (in phase prepare of {tmp_path})"


def same_objects(rank: int, world_size: int, path: Path) -> None:
    options = [{"params": ["w"], "lr": 0.1}]
    state = {"optimizer": {"state": {}, "param_groups": options, "scale": 1}, "train_state": {"step": 4}}
    tte.save(state, path)
    target = {
        "optimizer": {"state": {}, "param_groups": [{"params": ["w"], "lr": 0.5}], "scale": 2},
        "train_state": {"step": 0},
    }
    containers = (target["optimizer"], target["train_state"])
    tte.load(target, path, policy=ElasticPolicy())
    assert containers == (state["optimizer"], state["train_state"])
    assert target["optimizer"] is containers[0] and target["train_state"] is containers[1]


def test_containers_are_filled_in_place(run_world, tmp_path: Path) -> None:
    run_world(1, same_objects, tmp_path)


class Sums(dict):
    """Adds what it is given to what it has."""

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, self.get(key, 0) + value)

    def update(self, *others: Any, **named: Any) -> None:
        for key, value in dict(*others, **named).items():
            self[key] = value


def counts_of(web: int, books: int) -> dict[str, Any]:
    """Subclasses of dict at several depths; the second has an order of its own."""
    ordered = OrderedDict(web=web, books=books)
    ordered.move_to_end("web")
    nested = [{"seen": Counter(web=web)}, [Sums(web=web), torch.tensor(web)]]
    by_name = defaultdict(int, web=web)
    return {"seen": Counter(web=web), "ordered": ordered, "by_name": by_name, "sums": Sums(web=web), "nested": nested}


@pytest.mark.parametrize("policy", [None, ElasticPolicy()])
def test_members_of_subclasses_of_dict_are_replaced(tmp_path: Path, policy: ElasticPolicy | None) -> None:
    saved = counts_of(3, 4)
    tte.save(saved, tmp_path)
    for load in (
        lambda state: tte.load(state, tmp_path, policy=policy),
        lambda state: dcp.load(state, checkpoint_id=tmp_path, planner=tte.LoadPlanner(), no_dist=True),
    ):
        state = counts_of(1, 2)
        containers = dict(state)
        load(state)
        assert state == saved
        assert all(state[key] is container for key, container in containers.items())
        assert list(state["ordered"]) == ["books", "web"]
        assert state["by_name"]["unheard of"] == 0


def test_a_state_dict_may_be_a_subclass_of_dict(tmp_path: Path) -> None:
    tte.save({"web": 3, "books": {"read": 4}}, tmp_path)
    state = Sums({"web": 1, "books": {"read": 2}})
    tte.load(state, tmp_path)
    assert state == {"web": 3, "books": {"read": 4}}
    optimizer = Sums({"state": {}, "param_groups": [{"params": ["w"], "lr": 0.1}]})
    tte.save({"optimizer": dict(optimizer)}, tmp_path / "optimizer")
    optimizer["param_groups"] = [{"params": ["v"], "lr": 0.5}]  # added
    tte.load({"optimizer": optimizer}, tmp_path / "optimizer", policy=ElasticPolicy())
    assert [group["lr"] for group in optimizer["param_groups"]] == [0.1, 0.5]


def test_no_checkpoint(tmp_path: Path) -> None:
    for policy in (None, ElasticPolicy()):
        with pytest.raises(ReshardError, match="nowhere: is not there; give the path of a checkpoint") as caught:
            tte.load({"step": 0}, tmp_path / "nowhere", policy=policy)
        assert "nothing was changed" in str(caught.value) and len(str(caught.value).splitlines()) <= 5


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: ElasticPolicy({"dataloader": "drop"}), "got 'drop' for dataloader, expected one of 'keep', 'reshard'"),
        (lambda: ElasticPolicy(default="all"), "got 'all' for default"),
        (lambda: ElasticPolicy(strict="yes"), "strict='yes', expected one of 'error', 'warn', 'ignore'"),
        (lambda: Source("A", rename={"a.*": "b"}), r"rename of 'a.\*' to 'b': both need the same number"),
        (lambda: tte.load({}, Source("A"), storage_reader=tte.FileReader("A")), "got a Source and a storage_reader"),
        (
            lambda: tte.load({}, "A", planner=tte.LoadPlanner(policy=ElasticPolicy()), policy=ElasticPolicy()),
            "a policy and a planner with a policy",
        ),
        (
            lambda: tte.load({}, "A", planner=dcp.DefaultLoadPlanner(), policy=ElasticPolicy()),
            "got a policy or a Source and a DefaultLoadPlanner, expected a LoadPlanner",
        ),
        (
            lambda: tte.load({}, "A", planner=tte.LoadPlanner(), cast="allow"),
            r"give it to the planner: LoadPlanner\(cast=",
        ),
        (lambda: tte.load({}, "A", cast="all"), "got cast='all', expected 'exact', 'allow' or 'forbid'"),
    ],
)
def test_bad_arguments(make: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make()


def dealt_loader(rank: int, world_size: int, path: Path, is_saving: bool) -> list[int]:
    """With the planners alone: virtual shards have keys of their own, and new owners ask for them."""
    streams = Streams(lambda shard, num_shards, epoch: range(shard, 96, num_shards), num_shards=12)
    loader = ElasticDataLoader(streams, global_batch_size=12, dp_rank=rank, dp_size=world_size, uneven=True)
    if not is_saving:
        dcp.load({"dataloader": loader}, checkpoint_id=path, planner=tte.LoadPlanner())
    samples: list[int] = []
    for number, batch in enumerate(loader):
        samples += batch.tolist()
        if is_saving and number == 2:
            break
    if is_saving:
        dcp.save({"dataloader": loader}, checkpoint_id=path, planner=tte.SavePlanner())
    return samples


def test_planners_alone_carry_virtual_shards(run_world, tmp_path: Path) -> None:
    first = sum(run_world(2, dealt_loader, tmp_path, True), [])
    for world_size in (1, 3, 4):
        rest = sum(run_world(world_size, dealt_loader, tmp_path, False), [])
        assert sorted(first + rest) == list(range(96))


def policy_in_planner(rank: int, world_size: int, path: Path) -> None:
    state = {"model": weights(world_size), "train_state": {"step": 0}, "dataloader": {"dp_rank_9": 1}}
    planner = tte.LoadPlanner(policy=ElasticPolicy({"dataloader": "omit", "model.b": "reset"}))
    dcp.load(state, checkpoint_id=path, planner=planner)
    assert state["dataloader"] == {"dp_rank_9": 1} and state["train_state"] == {"step": 7}
    assert torch.equal(state["model"]["b"], torch.arange(5.0))
    assert torch.equal(state["model"]["w"].full_tensor(), torch.arange(33.0).view(11, 3) + 7)
    assert planner.report is not None and "dataloader" in str(planner.report)


def name_in_vain(rank: int, world_size: int, path: Path) -> list[str]:
    policy = ElasticPolicy({"model.*": "reshard", "model.lora.*": "omit", "rng": "reset"})
    report = tte.load(job(rank, world_size), path, policy=policy)
    assert report is not None and report.unused == ("model.lora.*", "rng")
    return str(report).splitlines()


def test_what_a_policy_names_in_vain_is_in_the_report(run_world, tmp_path: Path) -> None:
    run_world(2, save_job, tmp_path)
    (lines,) = run_world(1, name_in_vain, tmp_path)
    assert lines[-1] == "  named by the policy, and not there: model.lora.*, rng"


def test_a_policy_in_the_planner(run_world, tmp_path: Path) -> None:
    run_world(2, save_job, tmp_path)
    run_world(3, policy_in_planner, tmp_path)


def many_keys(rank: int, world_size: int, path: Path) -> None:
    tte.save({"model": {f"layers.{index}.w": torch.ones(1) for index in range(2_000)}}, path)
    target = {"model": {f"blocks.{index}.w": torch.zeros(1) for index in range(2_000)}}
    error = refused(target, path, policy=ElasticPolicy())
    assert len(error.problems) == 4_000 and len(str(error).splitlines()) < 40
    source = Source(path, rename={"model.blocks.*.w": "model.layers.*.w"})
    tte.load(target, source)
    assert all(value == 1 for value in target["model"].values())


def test_a_report_on_thousands_of_keys_is_short_and_quick(run_world, tmp_path: Path) -> None:
    run_world(1, many_keys, tmp_path)


def test_casts_that_a_refusal_offers(tmp_path: Path) -> None:
    tte.save({"w": torch.full((3,), 1.5)}, tmp_path, no_dist=True)
    state = {"w": torch.zeros(3, dtype=torch.bfloat16)}
    assert "pass cast='allow' to accept that" in str(refused(state, tmp_path, no_dist=True))
    tte.load(state, tmp_path, cast="allow", no_dist=True)
    assert state["w"].tolist() == [1.5] * 3
    with pytest.raises(StateRefusedError):
        tte.load({"w": torch.zeros(3, dtype=torch.float64)}, tmp_path, cast="forbid", no_dist=True)
