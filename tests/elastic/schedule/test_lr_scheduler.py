"""The LR curve goes on as without the restart: every scheduler of torch, same batch and by samples, any container."""

import copy
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim import SGD, Adam, Optimizer
from torch.optim import lr_scheduler as lrs
from torch.optim.lr_scheduler import LRScheduler

import torchtitan_ext as tte
from torchtitan_ext.elastic import ElasticLRScheduler, World, reshard_state
from torchtitan_ext.errors import CannotReshardError

pytestmark = [
    pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
]

WORLD = World(1)


def warmup_then_decay(step: int, *, num_steps: float) -> float:
    return min(1.0, (step + 1) / 8) * (1 - step / num_steps)


def decay_of(step: float, *, per_step: float) -> float:
    return per_step**step


SCHEDULERS: dict[str, Callable[[Optimizer], LRScheduler]] = {
    "LambdaLR": lambda o: lrs.LambdaLR(o, lambda step: 0.97**step),
    "LambdaLR_of_partial": lambda o: lrs.LambdaLR(o, partial(decay_of, per_step=0.97)),
    "MultiplicativeLR": lambda o: lrs.MultiplicativeLR(o, lambda step: 0.95),
    "StepLR": lambda o: lrs.StepLR(o, 12, gamma=0.5),
    "MultiStepLR": lambda o: lrs.MultiStepLR(o, [8, 28], gamma=0.3),
    "ConstantLR": lambda o: lrs.ConstantLR(o, 0.25, total_iters=32),
    "LinearLR": lambda o: lrs.LinearLR(o, 0.1, 0.9, total_iters=40),
    "PolynomialLR": lambda o: lrs.PolynomialLR(o, total_iters=48, power=2.0),
    "ExponentialLR": lambda o: lrs.ExponentialLR(o, 0.93),
    "CosineAnnealingLR": lambda o: lrs.CosineAnnealingLR(o, 36, eta_min=0.001),
    "CosineAnnealingWarmRestarts": lambda o: lrs.CosineAnnealingWarmRestarts(o, 8, 2, 0.001),
    "CyclicLR": lambda o: lrs.CyclicLR(o, 0.01, 0.1, 8, 12, mode="triangular2"),
    "CyclicLR_exp_range": lambda o: lrs.CyclicLR(o, 0.01, 0.1, 10, mode="exp_range", gamma=0.99),
    "CyclicLR_of_function": lambda o: lrs.CyclicLR(o, 0.01, 0.1, 10, scale_fn=partial(decay_of, per_step=0.9)),
    "SequentialLR": lambda o: lrs.SequentialLR(
        o,
        [
            lrs.LinearLR(o, 0.1, total_iters=8),
            lrs.CosineAnnealingLR(o, 24),
            lrs.ExponentialLR(o, 0.9),
        ],
        [8, 28],
    ),
    "ChainedScheduler": lambda o: lrs.ChainedScheduler(
        [lrs.LinearLR(o, 0.1, total_iters=12), lrs.StepLR(o, 8, 0.7)], o
    ),
    "SequentialLR_of_chain": lambda o: lrs.SequentialLR(
        o,
        [
            lrs.ChainedScheduler([lrs.LinearLR(o, 0.2, total_iters=4), lrs.ConstantLR(o, 0.5, 100)], o),
            lrs.PolynomialLR(o, 40),
        ],
        [12],
    ),
}
ONE_CYCLE: dict[str, Callable[[Optimizer], LRScheduler]] = {
    "OneCycleLR": lambda o: lrs.OneCycleLR(o, 0.1, total_steps=80),
    "OneCycleLR_three_phases": lambda o: lrs.OneCycleLR(o, [0.1, 0.2], 80, three_phase=True),
}
PLATEAU: dict[str, Callable[[Optimizer], LRScheduler]] = {
    "ReduceLROnPlateau": lambda o: lrs.ReduceLROnPlateau(o, factor=0.5, patience=2, cooldown=1, min_lr=0.001)
}
ALL = {**SCHEDULERS, **ONE_CYCLE, **PLATEAU}
CLOSED_FORM = {**SCHEDULERS, **ONE_CYCLE}


def build_optimizer(kind: type[Optimizer] = SGD) -> Optimizer:
    groups = [{"params": [torch.nn.Parameter(torch.ones(2))], "lr": lr} for lr in (0.1, 0.05)]
    return SGD(groups, momentum=0.9) if kind is SGD else Adam(groups)


def step_all(scheduler: Any, optimizer: Optimizer, num_steps: int, start: int = 0) -> list[list[Any]]:
    """Learning rates and momenta of the groups after each step."""
    curve = []
    inner = scheduler.schedulers[0] if isinstance(scheduler, ElasticLRScheduler) else scheduler
    for step in range(start, start + num_steps):
        optimizer.step()
        if isinstance(inner, lrs.ReduceLROnPlateau):
            scheduler.step(math.cos(step))
        else:
            scheduler.step()
        assert scheduler.get_last_lr() == [group["lr"] for group in optimizer.param_groups]
        curve.append(options_of(optimizer))
    return curve


def options_of(optimizer: Optimizer) -> list[Any]:
    return [(group["lr"], group.get("momentum"), group.get("betas")) for group in optimizer.param_groups]


def numbers(curve: Any) -> list[float]:
    if isinstance(curve, (list, tuple)):
        return [number for member in curve for number in numbers(member)]
    return [] if curve is None else [curve]


def wrapped(build: Callable[..., LRScheduler], optimizer: Optimizer, batch: int = 64, **options: Any) -> Any:
    return ElasticLRScheduler(build(optimizer), global_batch_size=batch, **options)


def frozen(value: Any) -> Any:
    return repr(value)


# The same batch.


@pytest.mark.parametrize("kind", [SGD, Adam])
@pytest.mark.parametrize("stop", [0, 1, 8, 27, 29])
@pytest.mark.parametrize("name", ALL)
def test_curve_goes_on_bitwise(name: str, stop: int, kind: type[Optimizer]) -> None:
    optimizer = build_optimizer(kind)
    scheduler = wrapped(ALL[name], optimizer)
    step_all(scheduler, optimizer, stop)
    saved, at_save = copy.deepcopy(scheduler.state_dict()), options_of(optimizer)
    truth = step_all(scheduler, optimizer, 70 - stop, stop)

    other = build_optimizer(kind)
    resumed = wrapped(ALL[name], other)
    before = frozen(resumed.state_dict())
    resharded = reshard_state(resumed, saved, World(4), World(7))
    assert frozen(resumed.state_dict()) == before, "reshard changed the scheduler"
    assert resharded.note == f"step {stop} kept"
    resumed.load_state_dict(resharded.state)
    assert resumed.last_epoch == stop
    assert options_of(other) == at_save
    assert resumed.get_last_lr() == [group["lr"] for group in other.param_groups]
    assert step_all(resumed, other, 70 - stop, stop) == truth


@pytest.mark.parametrize("name", ALL)
def test_plain_torch_scheduler_keeps_its_step(name: str) -> None:
    optimizer = build_optimizer()
    scheduler = ALL[name](optimizer)
    step_all(scheduler, optimizer, 10)
    saved = copy.deepcopy((scheduler.state_dict(), optimizer.state_dict()))
    truth = step_all(scheduler, optimizer, 30, 10)

    other = build_optimizer()
    resumed = ALL[name](other)
    before = frozen([resumed.state_dict(), other.state_dict()])
    resharded = reshard_state(resumed, as_read_back(saved[0]), WORLD, World(2))
    assert frozen([resumed.state_dict(), other.state_dict()]) == before
    other.load_state_dict(saved[1])
    resumed.load_state_dict(resharded.state)
    assert step_all(resumed, other, 30, 10) == truth


def as_read_back(state: Any) -> Any:
    """A state as flat keys leave it: keys are strings, and lists of dicts are dicts of positions."""
    if isinstance(state, dict):
        return {str(key): as_read_back(member) for key, member in state.items()}
    if isinstance(state, list) and any(isinstance(member, dict) for member in state):
        return {str(index): as_read_back(member) for index, member in enumerate(state)}
    return state


@pytest.mark.parametrize("name", CLOSED_FORM)
def test_step_alone_gives_the_curve_of_this_runs_schedule(name: str) -> None:
    """torchtitan saves {"last_epoch": n} and nothing else."""
    optimizer = build_optimizer()
    scheduler = wrapped(CLOSED_FORM[name], optimizer)
    step_all(scheduler, optimizer, 30)
    at_save, truth = options_of(optimizer), step_all(scheduler, optimizer, 30, 30)

    other = build_optimizer()
    resumed = wrapped(CLOSED_FORM[name], other)
    resharded = resumed.reshard({"last_epoch": 30}, WORLD, WORLD)
    assert resharded.note == "step 30 kept; scheduler 0 took the step alone: no more was saved"
    resumed.load_state_dict(resharded.state)
    assert options_of(other) == at_save
    assert step_all(resumed, other, 30, 30) == truth


def test_learning_rates_stand_when_the_optimizer_is_loaded_afterwards() -> None:
    optimizer = build_optimizer()
    scheduler = wrapped(SCHEDULERS["StepLR"], optimizer, 64)
    step_all(scheduler, optimizer, 12)
    saved, saved_optimizer = copy.deepcopy(scheduler.state_dict()), copy.deepcopy(optimizer.state_dict())

    other = build_optimizer()
    resumed = wrapped(SCHEDULERS["StepLR"], other, 128, by_samples=True)
    resumed.load_state_dict(saved)
    other.load_state_dict(saved_optimizer)
    assert [group["lr"] for group in other.param_groups] == [0.1, 0.05], "step 6"
    resumed.step()
    other.load_state_dict(saved_optimizer)
    assert [group["lr"] for group in other.param_groups] == [0.05, 0.025], "a later load is the user's business"


def test_learning_rates_that_are_tensors_stay_the_same_tensors() -> None:
    lr = torch.tensor(0.1)
    optimizer = Adam([torch.nn.Parameter(torch.ones(2))], lr=lr)
    scheduler = wrapped(lambda o: lrs.ExponentialLR(o, 0.5), optimizer)
    scheduler.step()
    saved = scheduler.state_dict()
    assert all(type(group["lr"]) is float for group in saved["schedulers"][0]["groups"])
    scheduler.step()
    scheduler.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] is lr
    torch.testing.assert_close(lr, torch.tensor(0.05))
    scheduler.step()
    torch.testing.assert_close(lr, torch.tensor(0.025))


# Another batch.


@pytest.mark.parametrize(("batch", "step"), [(32, 32), (128, 8), (96, 11), (50, 20)])
@pytest.mark.parametrize("name", CLOSED_FORM)
def test_by_samples_this_runs_schedule_goes_on_at_the_same_samples(name: str, batch: int, step: int) -> None:
    """Whatever class, lengths and learning rates were saved."""
    optimizer = build_optimizer()
    scheduler = wrapped(lambda o: lrs.StepLR(o, 5, gamma=0.1), optimizer)
    step_all(scheduler, optimizer, 16)
    saved = copy.deepcopy(scheduler.state_dict())

    fresh_optimizer = build_optimizer()
    fresh = wrapped(CLOSED_FORM[name], fresh_optimizer, batch)
    step_all(fresh, fresh_optimizer, step)
    at_step, truth = options_of(fresh_optimizer), step_all(fresh, fresh_optimizer, 20, step)

    other = build_optimizer()
    resumed = wrapped(CLOSED_FORM[name], other, batch, by_samples=True)
    before = frozen(resumed.state_dict())
    resharded = resumed.reshard(saved, WORLD, WORLD)
    assert frozen(resumed.state_dict()) == before
    inexact = "" if step * batch == 1024 else f", nearest to {1024 / batch:.2f}"
    assert resharded.note == (
        f"step 16 -> {step}{inexact}, at 1024 samples (global batch 64 -> {batch}), of this run's own schedule"
    )
    resumed.load_state_dict(resharded.state)
    assert resumed.last_epoch == step
    assert options_of(other) == at_step
    assert step_all(resumed, other, 20, step) == truth


def test_by_samples_the_learning_rates_are_this_runs_though_the_optimizer_was_loaded_before() -> None:
    optimizer = build_optimizer()
    scheduler = wrapped(SCHEDULERS["StepLR"], optimizer)
    step_all(scheduler, optimizer, 16)
    groups = [{"params": [torch.nn.Parameter(torch.ones(2))], "lr": lr} for lr in (0.8, 0.4)]
    resumed = wrapped(SCHEDULERS["StepLR"], other := SGD(groups), 128, by_samples=True)
    other.load_state_dict(optimizer.state_dict())
    resumed.load_state_dict(scheduler.state_dict())
    assert [group["lr"] for group in other.param_groups] == [0.8, 0.4]
    assert [group["initial_lr"] for group in other.param_groups] == [0.8, 0.4]


@settings(deadline=None, max_examples=60)
@given(
    name=st.sampled_from(sorted(SCHEDULERS)),
    batches=st.lists(st.integers(1, 96), min_size=2, max_size=4),
    stop=st.integers(0, 40),
)
def test_by_samples_through_any_batches(name: str, batches: list[int], stop: int) -> None:
    """Steps stay within half a step of the samples at each restart."""
    optimizer = build_optimizer()
    scheduler = wrapped(SCHEDULERS[name], optimizer, batches[0])
    step_all(scheduler, optimizer, stop)
    for old_batch, batch in zip(batches, batches[1:], strict=False):
        saved, old_step = copy.deepcopy(scheduler.state_dict()), scheduler.last_epoch
        scheduler = wrapped(SCHEDULERS[name], optimizer := build_optimizer(), batch, by_samples=True)
        scheduler.load_state_dict(saved)
        assert abs(scheduler.last_epoch * batch - old_step * old_batch) <= batch / 2
        # What it holds now is what its own schedule gives at this step when it is played from the beginning.
        state = scheduler.state_dict()
        replayed = wrapped(SCHEDULERS[name], build_optimizer(), batch, by_samples=True)
        again = replayed.reshard(saved, WORLD, WORLD).state
        assert frozen(again) == frozen(state)
        assert frozen(replayed.reshard(state, WORLD, WORLD).state) == frozen(state), "resharding twice is once"


@pytest.mark.parametrize("name", ALL)
def test_by_steps_the_report_says_that_the_batch_changed(name: str) -> None:
    optimizer = build_optimizer()
    scheduler = wrapped(ALL[name], optimizer, 32)
    step_all(scheduler, optimizer, 7)
    resumed = wrapped(ALL[name], other := build_optimizer(), 64)
    resharded = resumed.reshard(scheduler.state_dict(), WORLD, WORLD)
    assert resharded.note == "step 7 kept; global batch 32 -> 64; the schedule counts steps"
    resumed.load_state_dict(resharded.state)
    assert step_all(resumed, other, 20, 7) == step_all(scheduler, optimizer, 20, 7)


# Containers.


def containers_of(num_schedulers: int, batch: int = 64, **options: Any) -> tuple[Any, list[Optimizer]]:
    optimizers = [build_optimizer() for _ in range(num_schedulers)]
    return ElasticLRScheduler(
        [lrs.StepLR(optimizer, 3) for optimizer in optimizers], global_batch_size=batch, **options
    ), optimizers


@pytest.mark.parametrize("num_saved", [1, 2, 3])
@pytest.mark.parametrize("num_current", [1, 2, 3])
@pytest.mark.parametrize("form", ["own", "list", "dict", "named", "one_of_torch"])
def test_another_number_of_schedulers(num_saved: int, num_current: int, form: str) -> None:
    container, optimizers = containers_of(num_saved)
    for optimizer in optimizers:
        optimizer.step()
    for _ in range(7):
        container.step()
    states = [copy.deepcopy(scheduler.state_dict()) for scheduler in container.schedulers]
    saved: Any = {
        "own": copy.deepcopy(container.state_dict()),
        "list": {"schedulers": states},
        "dict": {str(index): state for index, state in enumerate(states)},
        "named": {f"optimizer_{index}": state for index, state in enumerate(states)},
        "one_of_torch": states[0],  # what torchtitan saved before 0.3.0
    }[form]
    resumed, others = containers_of(num_current)
    resharded = resumed.reshard(saved, WORLD, WORLD)
    resumed.load_state_dict(resharded.state)
    for scheduler, other in zip(resumed.schedulers, others, strict=True):
        assert scheduler.last_epoch == 7
        assert [group["lr"] for group in other.param_groups] == pytest.approx([0.001, 0.0005])
    assert len(resumed.get_last_lr()) == 2 * num_current
    num_found = 1 if form == "one_of_torch" else num_saved
    assert ("took the step alone: it has no saved entry" in resharded.note) == (num_current > num_found)
    assert ("without a counterpart left out" in resharded.note) == (num_current < num_found)


def test_each_scheduler_gets_its_own_index() -> None:
    container, _ = containers_of(2)
    container.schedulers[1].step()
    resumed, _ = containers_of(2)
    resumed.load_state_dict(container.state_dict())
    assert [scheduler.last_epoch for scheduler in resumed] == [0, 1]
    assert len(resumed) == 2


def test_another_number_of_parameter_groups_takes_the_step() -> None:
    optimizer = build_optimizer()
    scheduler = wrapped(SCHEDULERS["StepLR"], optimizer)
    step_all(scheduler, optimizer, 13)
    other = build_optimizer()
    other.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))], "lr": 1.0})
    resumed = wrapped(SCHEDULERS["StepLR"], other)
    resharded = resumed.reshard(scheduler.state_dict(), WORLD, WORLD)
    resumed.load_state_dict(resharded.state)
    assert resumed.get_last_lr() == [0.05, 0.025, 0.5]
    assert resharded.note == (
        "step 13 kept; scheduler 0 took the step alone: saved was a StepLR over 2 parameter group(s), now StepLR over 3"
    )


def test_another_class_takes_the_step() -> None:
    scheduler = wrapped(SCHEDULERS["LambdaLR"], build_optimizer())
    resumed = wrapped(SCHEDULERS["MultiplicativeLR"], build_optimizer())
    note = resumed.reshard(scheduler.state_dict(), WORLD, WORLD).note
    assert "took the step alone: saved was a LambdaLR over 2 parameter group(s), now MultiplicativeLR over 2" in note


def test_a_long_run_is_played_in_time() -> None:
    resumed = wrapped(lambda o: lrs.LambdaLR(o, lambda step: 1 / (1 + step)), build_optimizer())
    resumed.load_state_dict({"last_epoch": 10**9 - 1})
    assert resumed.get_last_lr() == pytest.approx([1e-10, 5e-11])


# Refusals.


class Spiral(LRScheduler):
    def get_lr(self) -> list[float]:
        return [lr * 0.9 for lr in self.base_lrs]


REFUSALS: dict[str, tuple[Callable[[], Any], Any, str]] = {
    "plateau_by_samples": (
        lambda: wrapped(PLATEAU["ReduceLROnPlateau"], build_optimizer(), 32, by_samples=True),
        lambda: wrapped(PLATEAU["ReduceLROnPlateau"], build_optimizer(), 64).state_dict(),
        "LR scheduler 0: ReduceLROnPlateau follows the metrics it was given, not the step or samples; "
        "pass by_samples=False to keep its step",
    ),
    "plateau_from_step": (
        lambda: wrapped(PLATEAU["ReduceLROnPlateau"], build_optimizer()),
        lambda: {"last_epoch": 3},
        "LR scheduler 0: ReduceLROnPlateau follows the metrics it was given, not the step or samples; "
        "load a state that holds its own state_dict()",
    ),
    "custom_by_samples": (
        lambda: wrapped(Spiral, build_optimizer(), 32, by_samples=True),
        lambda: wrapped(Spiral, build_optimizer(), 64).state_dict(),
        "LR scheduler 0: Spiral is not one of torch's LR schedulers: its state depends on more than the step; "
        "pass by_samples=False to keep its step",
    ),
    "custom_in_a_chain_by_samples": (
        lambda: wrapped(chained_spiral, build_optimizer(), 32, by_samples=True),
        lambda: wrapped(chained_spiral, build_optimizer(), 64).state_dict(),
        "LR scheduler 0: Spiral is not one of torch's LR schedulers: its state depends on more than the step; "
        "pass by_samples=False to keep its step",
    ),
    "beyond_the_schedule_by_samples": (
        lambda: wrapped(ONE_CYCLE["OneCycleLR"], build_optimizer(), 8, by_samples=True),
        lambda: state_at(ONE_CYCLE["OneCycleLR"], 20),
        "LR scheduler 0: OneCycleLR cannot stand at step 160 (Tried to step 160 times. The specified number of total "
        "steps is 80); build it for more steps",
    ),
    "custom_from_step": (
        lambda: wrapped(Spiral, build_optimizer()),
        lambda: {"last_epoch": 3},
        "LR scheduler 0: Spiral is not one of torch's LR schedulers: its state depends on more than the step; "
        "load a state that holds its own state_dict()",
    ),
    "beyond_the_schedule": (
        lambda: wrapped(ONE_CYCLE["OneCycleLR"], build_optimizer()),
        lambda: {"last_epoch": 100},
        "LR scheduler 0: OneCycleLR cannot stand at step 100 (Tried to step 100 times. The specified number of total "
        "steps is 80); build it for more steps",
    ),
    "batch_not_said": (
        lambda: wrapped(SCHEDULERS["StepLR"], build_optimizer(), 32, by_samples=True),
        lambda: {"last_epoch": 3},
        "the saved LR scheduler does not say its global batch size, which by_samples needs; "
        "pass ElasticLRScheduler(saved_global_batch_size=...)",
    ),
    "steps_disagree": (
        lambda: containers_of(3)[0],
        lambda: [{"last_epoch": 10}, {"last_epoch": 12}],
        "LR scheduler 2 has no saved state, and the 2 saved ones do not share a step (scheduler 0: 10, scheduler 1: "
        '12); build as many schedulers as were saved, or load this component with the policy "reset"',
    ),
    "another_component": (
        lambda: wrapped(SCHEDULERS["StepLR"], build_optimizer()),
        lambda: {"epoch": 3},
        "the saved state is not that of an LR scheduler: got ['epoch'], expected last_epoch or torch's state_dict(); "
        'load this component with the policy "reset", or exclude it',
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals_say_why_and_change_nothing(name: str) -> None:
    build, saved, text = REFUSALS[name]
    scheduler = build()
    before = frozen(scheduler.state_dict())
    with pytest.raises(CannotReshardError) as refusal:
        reshard_state(scheduler, saved(), WORLD, WORLD)
    assert str(refusal.value) == text
    with pytest.raises(CannotReshardError):
        scheduler.load_state_dict(saved())
    assert frozen(scheduler.state_dict()) == before


def state_at(build: Callable[..., LRScheduler], step: int) -> dict[str, Any]:
    scheduler = wrapped(build, build_optimizer())
    for _ in range(step):
        scheduler.step(1.0)
    return scheduler.state_dict()


def chained_spiral(optimizer: Optimizer) -> LRScheduler:
    return lrs.ChainedScheduler([lrs.StepLR(optimizer, 3), Spiral(optimizer)], optimizer)


# What the refusals of the same names tell to do; other tests load what the others tell.
FOLLOWED: dict[str, tuple[Callable[[], Any], Any, int]] = {
    "custom_by_samples": (
        lambda: wrapped(Spiral, build_optimizer(), 32, by_samples=False),
        lambda: state_at(Spiral, 3),
        3,
    ),
    "custom_in_a_chain_by_samples": (
        lambda: wrapped(chained_spiral, build_optimizer(), 32, by_samples=False),
        lambda: state_at(chained_spiral, 3),
        3,
    ),
    "beyond_the_schedule_by_samples": (
        lambda: wrapped(lambda o: lrs.OneCycleLR(o, 0.1, total_steps=161), build_optimizer(), 8, by_samples=True),
        lambda: state_at(ONE_CYCLE["OneCycleLR"], 20),
        160,
    ),
    "custom_from_step": (
        lambda: wrapped(Spiral, build_optimizer()),
        lambda: state_at(Spiral, 3)["schedulers"][0]["state"],
        3,
    ),
    "beyond_the_schedule": (
        lambda: wrapped(lambda o: lrs.OneCycleLR(o, 0.1, total_steps=101), build_optimizer()),
        lambda: {"last_epoch": 100},
        100,
    ),
}


@pytest.mark.parametrize("name", FOLLOWED)
def test_remedies_of_refusals(name: str) -> None:
    build, saved, step = FOLLOWED[name]
    scheduler = build()
    scheduler.load_state_dict(saved())
    assert scheduler.last_epoch == step
    if name.startswith("custom"):
        stepped = saved()
        truth = stepped["schedulers"][0]["state"] if "schedulers" in stepped else stepped
        assert frozen(scheduler.state_dict()["schedulers"][0]["state"]) == frozen(truth)


def test_saved_batch_size_can_be_given() -> None:
    resumed = wrapped(SCHEDULERS["LambdaLR"], build_optimizer(), 32, by_samples=True, saved_global_batch_size=64)
    resumed.load_state_dict({"last_epoch": 10})
    assert resumed.last_epoch == 20
    assert resumed.get_last_lr() == pytest.approx([0.1 * 0.97**20, 0.05 * 0.97**20])


@pytest.mark.parametrize(
    ("schedulers", "options", "text"),
    [
        ([], {"global_batch_size": 1}, "got no scheduler"),
        (None, {"global_batch_size": 0}, "got global_batch_size=0, saved_global_batch_size=None, expected at least 1"),
        (None, {"global_batch_size": 1, "saved_global_batch_size": 0}, "saved_global_batch_size=0"),
    ],
)
def test_bad_arguments(schedulers: Any, options: dict[str, Any], text: str) -> None:
    given_schedulers = lrs.StepLR(build_optimizer(), 1) if schedulers is None else schedulers
    with pytest.raises(ValueError, match=text):
        ElasticLRScheduler(given_schedulers, **options)


def test_plateau_needs_metrics() -> None:
    with pytest.raises(ValueError, match="got no metrics, ReduceLROnPlateau needs them"):
        wrapped(PLATEAU["ReduceLROnPlateau"], build_optimizer()).step()


# Through a checkpoint.


@pytest.mark.parametrize("name", ALL)
def test_round_trip(name: str, tmp_path: Path) -> None:
    optimizer = build_optimizer()
    scheduler = wrapped(ALL[name], optimizer)
    step_all(scheduler, optimizer, 10)
    tte.save({"lr_scheduler": scheduler}, tmp_path, no_dist=True)
    truth = step_all(scheduler, optimizer, 30, 10)
    resumed = wrapped(ALL[name], other := build_optimizer())
    tte.load({"lr_scheduler": resumed}, tmp_path, no_dist=True)
    assert step_all(resumed, other, 30, 10) == truth


@pytest.mark.parametrize("is_elastic", [True, False])
@pytest.mark.parametrize("name", ALL)
def test_checkpoint_of_a_torch_scheduler_loads_by_policy(name: str, is_elastic: bool, tmp_path: Path) -> None:
    """Its state went through a checkpoint's flat keys."""
    optimizer = build_optimizer()
    scheduler = ALL[name](optimizer)
    step_all(scheduler, optimizer, 10)
    dcp.save({"lr_scheduler": scheduler}, checkpoint_id=tmp_path, no_dist=True)
    at_save = copy.deepcopy(optimizer.state_dict())
    truth = step_all(scheduler, optimizer, 30, 10)

    other = build_optimizer()
    resumed = wrapped(ALL[name], other) if is_elastic else ALL[name](other)
    other.load_state_dict(at_save)
    tte.load({"lr_scheduler": resumed}, tmp_path, no_dist=True, policy=tte.elastic.ElasticPolicy())
    assert step_all(resumed, other, 30, 10) == truth


def test_checkpoint_of_torchtitan_loads_by_policy(tmp_path: Path) -> None:
    tte.save({"lr_scheduler": {"last_epoch": 12}}, tmp_path, no_dist=True)
    container, _ = containers_of(2)
    tte.load({"lr_scheduler": container}, tmp_path, no_dist=True, policy=tte.elastic.ElasticPolicy())
    assert [scheduler.last_epoch for scheduler in container] == [12, 12]
    assert container.get_last_lr() == pytest.approx([1e-5, 5e-6] * 2)


def save_container(rank: int, world_size: int, path: Path) -> list[float]:
    container, _ = containers_of(2)
    for _ in range(4):
        container.step()
    tte.save({"lr_scheduler": container}, path)
    return container.get_last_lr()


def load_container(rank: int, world_size: int, path: Path) -> list[float]:
    container, _ = containers_of(3)
    tte.load({"lr_scheduler": container}, path)
    return container.get_last_lr()


def test_round_trip_on_gloo_ranks(run_world, tmp_path: Path) -> None:
    rates = run_world(2, save_container, tmp_path)
    assert rates == [pytest.approx([0.01, 0.005] * 2)] * 2
    for world_size in (1, 2):
        loaded = run_world(world_size, load_container, tmp_path)
        assert loaded == [pytest.approx([0.01, 0.005] * 3)] * world_size
