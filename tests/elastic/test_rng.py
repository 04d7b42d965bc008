"""Random numbers go on exactly on as many ranks, and are seeded in a defined way on others."""

import copy
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import torchtitan_ext as tte
from torchtitan_ext.elastic import RngState, World, reshard_state
from torchtitan_ext.errors import CannotReshardError, ReplicaMismatchError

ANY = World(0)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


@pytest.fixture(autouse=True)
def kept_generators() -> Iterator[None]:
    """Other tests draw from the same generators."""
    states = (torch.get_rng_state(), random.getstate(), np.random.get_state())
    yield
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])


def draw() -> tuple[float, ...]:
    # One normal number of each: generators keep its twin.
    return (
        *torch.rand(3).tolist(),
        torch.randn(1).item(),
        random.random(),
        random.gauss(0, 1),
        float(np.random.rand()),
        float(np.random.randn()),
    )


def saved_by(world_size: int, step: int = 5) -> dict[str, Any]:
    """What all ranks of a world save, merged by key."""
    merged: dict[str, Any] = {}
    for rank in range(world_size):
        rng = RngState(0, rank=rank, world_size=world_size, device="cpu", step=lambda: step)
        rng.reset()
        draw()
        merged |= rng.state_dict()
    return merged


def test_exact_on_the_same_ranks() -> None:
    rng = RngState(0, device="cpu")
    draw()
    saved = copy.deepcopy(rng.state_dict())
    truth = [draw(), draw()]
    resharded = reshard_state(rng, saved, ANY, World(1))
    assert resharded.note == "exact on the same 1 rank(s)"
    rng.load_state_dict(resharded.state)
    assert [draw(), draw()] == truth


@pytest.mark.parametrize("rank", range(3))
def test_each_rank_gets_its_own_state(rank: int) -> None:
    saved = saved_by(3)
    rng = RngState(1, rank=rank, world_size=3, device="cpu")
    resharded = rng.reshard(saved, ANY, World(12, {"dp": 3, "tp": 4}))
    assert resharded.note == "exact on the same 3 rank(s)"
    assert resharded.state[f"rank_{rank}"] == saved[f"rank_{rank}"]
    assert set(resharded.state) == {f"rank_{rank}", "common"}


@pytest.mark.parametrize(("old_size", "new_size"), [(2, 4), (4, 2), (8, 3), (1, 8)])
def test_other_ranks_are_seeded(old_size: int, new_size: int) -> None:
    saved = saved_by(old_size, step=70)
    before = draw_without_effect()
    drawn = []
    for rank in range(new_size):
        rng = RngState(3, rank=rank, world_size=new_size, device="cpu")
        resharded = rng.reshard(saved, ANY, World(new_size))
        assert draw_without_effect() == before, "reshard changed the generators"
        assert resharded.note == f"seeded from seed 3, step 70 and rank: {old_size} -> {new_size} ranks"
        rng.load_state_dict(resharded.state)
        drawn.append(draw())
        rng.load_state_dict(rng.reshard(saved, ANY, World(new_size)).state)
        assert draw() == drawn[-1], "the same restart gives the same numbers"
        rng.reset(70)
        assert draw() == drawn[-1]
        before = draw_without_effect()
    flat = [number for numbers in drawn for number in numbers]
    assert len(set(flat)) == len(flat)


def draw_without_effect() -> tuple[float, ...]:
    states = (torch.get_rng_state(), random.getstate(), np.random.get_state())
    drawn = draw()
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])
    return drawn


# First uniform numbers of torch, Python and NumPy for seed 0, step 100, rank 1.
PROMISED = (0.3935548663139343, 0.8162676918802326, 0.8607419033844182)


def test_seeds_depend_on_seed_step_and_rank_only() -> None:
    """The numbers are promised: a new version must draw the same."""
    rng = RngState(0, rank=1, world_size=2, device="cpu")
    rng.reset(100)
    assert draw()[0] == pytest.approx(PROMISED[0])
    rng.reset(100)
    assert (random.random(), float(np.random.rand())) == pytest.approx(PROMISED[1:])
    numbers = set()
    for seed, step, rank in [(0, 100, 1), (1, 100, 1), (0, 101, 1), (0, 100, 0), (100, 0, 1)]:
        RngState(seed, rank=rank, world_size=2, device="cpu").reset(step)
        numbers.add(draw())
    assert len(numbers) == 5


def test_reset_takes_the_step_of_the_run() -> None:
    rng = RngState(0, device="cpu", step=lambda: 12)
    rng.reset()
    drawn = draw()
    rng.reset(12)
    assert draw() == drawn
    assert rng.state_dict()["common"] == ({"seed": 0, "world_size": 1, "step": 12},)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"seed": -1},
            "got seed=-1, rank=0 of world_size=1, expected a seed of at least 0 and a rank below world_size",
        ),
        ({"seed": 0, "rank": 2, "world_size": 2}, "got seed=0, rank=2 of world_size=2"),
        ({"seed": 0, "rank": 2}, "got rank=2 and world_size=None, expected both or none"),
        ({"seed": 0, "world_size": 2}, "got rank=None and world_size=2, expected both or none"),
    ],
)
def test_bad_arguments(options: dict[str, int], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        RngState(**options)


def test_refuses_the_state_of_something_else() -> None:
    with pytest.raises(CannotReshardError) as refusal:
        reshard_state(RngState(0, device="cpu"), {"generator": 1}, ANY, World(1))
    assert str(refusal.value) == (
        "the saved state is not that of RngState: got ['generator'], expected common and rank_0, rank_1, ...; "
        'load this component with the policy "reset"'
    )


def test_refuses_a_state_that_lacks_ranks() -> None:
    saved = {key: value for key, value in saved_by(4).items() if key not in ("rank_1", "rank_3")}
    # On every rank, also where its own entry is there.
    for rank in range(4):
        with pytest.raises(CannotReshardError) as refusal:
            reshard_state(RngState(0, rank=rank, world_size=4, device="cpu"), saved, ANY, World(4))
        assert str(refusal.value) == (
            'the checkpoint lacks the generators of rank(s) 1, 3 of 4; load this component with the policy "reset"'
        )


def test_the_state_of_another_rank_is_not_taken() -> None:
    before = draw_without_effect()
    with pytest.raises(ValueError, match=r"got \['common', 'rank_1'\], expected rank_0; load it by a policy"):
        RngState(0, device="cpu").load_state_dict(RngState(0, rank=1, world_size=2, device="cpu").state_dict())
    assert draw_without_effect() == before


# The GPU.


@pytest.mark.needs_cuda
def test_gpu_goes_on_exactly() -> None:
    rng = RngState(0)
    rng.reset()
    torch.rand(5, device="cuda")
    saved = copy.deepcopy(rng.state_dict())
    truth = torch.rand(8, device="cuda").tolist()
    rng.load_state_dict(rng.reshard(saved, ANY, ANY).state)
    assert torch.rand(8, device="cuda").tolist() == truth


@pytest.mark.needs_cuda
def test_gpu_is_seeded_on_other_ranks() -> None:
    drawn = []
    for rank in range(2):
        rng = RngState(0, rank=rank, world_size=2, device="cuda:0")
        before = torch.cuda.get_rng_state()
        resharded = rng.reshard(saved_by(1), ANY, ANY)
        assert torch.equal(torch.cuda.get_rng_state(), before), "reshard changed the generator"
        rng.load_state_dict(resharded.state)
        drawn.append(torch.rand(8, device="cuda").tolist())
        rng.reset(5)
        assert torch.rand(8, device="cuda").tolist() == drawn[-1]
    assert drawn[0] != drawn[1]


@pytest.mark.needs_cuda
def test_gpu_is_seeded_where_none_was_at_the_save() -> None:
    saved = saved_by(1)
    rng = RngState(0)
    resharded = rng.reshard(saved, ANY, ANY)
    assert resharded.note == (
        "exact on the same 1 rank(s), the GPU seeded from seed 0 and step 5: it was saved without one"
    )
    rng.load_state_dict(resharded.state)
    drawn = torch.rand(8, device="cuda").tolist()
    rng.reset(5)
    assert torch.rand(8, device="cuda").tolist() == drawn


@pytest.mark.needs_cuda
def test_state_of_a_gpu_loads_without_one() -> None:
    rng = RngState(0)
    saved = copy.deepcopy(rng.state_dict())
    truth = draw()
    other = RngState(0, device="cpu")
    other.load_state_dict(other.reshard(saved, ANY, ANY).state)
    assert draw() == truth


# Through a checkpoint.


def save_rank(rank: int, world_size: int, path: Path, num_sharing: int, skewed: bool) -> tuple[float, ...]:
    """Groups of `num_sharing` ranks draw the same numbers, as tensor-parallel ranks do."""
    rng = RngState(0, rank=rank // num_sharing, world_size=world_size // num_sharing, step=lambda: 9)
    rng.reset()
    if skewed and rank == 1:
        draw()
    tte.save({"rng": rng}, path)
    return draw()


def load_rank(rank: int, world_size: int, path: Path, num_sharing: int, policy: Any) -> tuple[float, ...]:
    rng = RngState(0, rank=rank // num_sharing, world_size=world_size // num_sharing)
    tte.load({"rng": rng}, path, policy=policy)
    return draw()


def test_round_trip_on_gloo_ranks(run_world, tmp_path: Path) -> None:
    truth = run_world(2, save_rank, tmp_path, 1, False)
    assert truth[0] != truth[1]
    assert run_world(2, load_rank, tmp_path, 1, None) == truth
    assert run_world(2, load_rank, tmp_path, 1, tte.elastic.ElasticPolicy()) == truth
    alone = run_world(1, load_rank, tmp_path, 1, None)
    assert alone == run_world(1, load_rank, tmp_path, 1, tte.elastic.ElasticPolicy()), "by its rule"
    seeded = run_world(3, load_rank, tmp_path, 1, None)
    assert len(set(seeded)) == 3
    assert run_world(3, load_rank, tmp_path, 1, tte.elastic.ElasticPolicy()) == seeded


def test_ranks_that_share_numbers_save_them_once(run_world, tmp_path: Path) -> None:
    truth = run_world(4, save_rank, tmp_path, 2, False)
    assert truth[0] == truth[1] != truth[2] == truth[3]
    assert run_world(4, load_rank, tmp_path, 2, None) == truth
    # dp 2 x tp 2 -> dp 2 x tp 1: as many that draw, so exact.
    assert run_world(2, load_rank, tmp_path, 1, tte.elastic.ElasticPolicy()) == [truth[0], truth[2]]


def test_ranks_that_should_share_numbers_and_do_not_are_refused(run_world, tmp_path: Path) -> None:
    with pytest.raises(ReplicaMismatchError, match="rng.rank_0"):
        run_world(2, save_rank, tmp_path, 2, True)


def test_a_bad_entry_sets_no_generator() -> None:
    rng = RngState(0, device="cpu")
    saved = copy.deepcopy(rng.state_dict())
    draw()
    before = (torch.get_rng_state(), random.getstate())
    (states,) = saved["rank_0"]
    with pytest.raises(ValueError, match="RngState: rank_0 is no state of generators"):
        rng.load_state_dict({**saved, "rank_0": ({**states, "numpy": ("MT19937", [1, 2], 0, 0, 0.0)},)})
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"seed": "0"}, "RngState: got seed='0', expected a whole number"),
        ({"seed": 0, "step": 5}, "got step=5, expected a function, such as lambda: train_state.step"),
        ({"seed": 0, "rank": "0", "world_size": 1}, "got rank='0', expected a whole number"),
    ],
)
def test_arguments_of_another_type(options: dict[str, Any], text: str) -> None:
    with pytest.raises(TypeError, match=text):
        RngState(**options)
