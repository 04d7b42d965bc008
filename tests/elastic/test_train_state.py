"""Counters go on in any world."""

from itertools import islice
from pathlib import Path
from typing import Any

import pytest

import torchtitan_ext as tte
from torchtitan_ext.elastic import ElasticDataLoader, TrainState, World, read_torchtitan_train_state, reshard_state
from torchtitan_ext.errors import CannotReshardError, StateRefusedError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def test_counts_and_crosses_worlds() -> None:
    train_state = TrainState()
    for _ in range(3):
        train_state.advance(samples=8, tokens=64)
    resumed = TrainState(99, 99, 99)
    resharded = reshard_state(resumed, train_state.state_dict(), World(8), World(3))
    assert (resharded.note, resharded.samples_counted) == ("step 3, 24 samples seen", 24)
    assert repr(resumed) == "TrainState(step=99, samples_seen=99, tokens_seen=99)"
    resumed.load_state_dict(resharded.state)
    assert repr(resumed) == "TrainState(step=3, samples_seen=24, tokens_seen=192)"
    resumed.reset()
    assert resumed.state_dict() == {"step": 0, "samples_seen": 0, "tokens_seen": 0}


def served(num_batches: int) -> ElasticDataLoader:
    loader = ElasticDataLoader(range(40), global_batch_size=8)
    list(islice(loader, num_batches))
    return loader


def test_samples_that_were_counted_otherwise_are_refused(tmp_path: Path) -> None:
    state = {"train_state": (train_state := TrainState()), "loader": served(3), "sampler": served(1)}
    tte.save(state, tmp_path / "wrong", no_dist=True)
    with pytest.raises(StateRefusedError, match="samples seen by the run: loader 24, sampler 8, train_state 0"):
        tte.load(state, tmp_path / "wrong", policy=tte.elastic.ElasticPolicy(), no_dist=True)
    train_state.samples_seen = 24
    tte.save(state, tmp_path / "right", no_dist=True)
    tte.load(state, tmp_path / "right", policy=tte.elastic.ElasticPolicy(), no_dist=True)


def test_a_failed_load_changes_nothing() -> None:
    train_state = TrainState(1, 2, 3)
    with pytest.raises(KeyError):
        train_state.load_state_dict({"step": 5})
    assert repr(train_state) == "TrainState(step=1, samples_seen=2, tokens_seen=3)"


@pytest.mark.parametrize(
    ("saved", "text"),
    [
        (
            {"step": 3, "ntokens_seen": 9},
            "the saved train state is torchtitan's, which counts the tokens of one rank and no samples; read it with "
            "tte.elastic.read_torchtitan_train_state(saved, num_token_ranks=..., seq_len=...)",
        ),
        (
            {"step": 3},
            "the saved state is not that of TrainState: got ['step'], expected step, samples_seen and tokens_seen; "
            'load this component with the policy "reset"',
        ),
        (
            3,
            "the saved state is not that of TrainState: got int, expected step, samples_seen and tokens_seen; "
            'load this component with the policy "reset"',
        ),
    ],
)
def test_refusals(saved: Any, text: str) -> None:
    with pytest.raises(CannotReshardError) as refusal:
        reshard_state(TrainState(), saved, World(0), World(1))
    assert str(refusal.value) == text


def test_reads_what_torchtitan_saved() -> None:
    state = read_torchtitan_train_state({"step": 10, "ntokens_seen": 10 * 2 * 16}, num_token_ranks=4, seq_len=16)
    assert state == {"step": 10, "samples_seen": 80, "tokens_seen": 1280}
    TrainState().load_state_dict(state)


@pytest.mark.parametrize(
    ("saved", "options", "error", "text"),
    [
        ({"step": 1, "ntokens_seen": 8}, {"num_token_ranks": 0, "seq_len": 4}, ValueError, "got num_token_ranks=0 and"),
        ({"step": 1, "ntokens_seen": 8}, {"num_token_ranks": 1, "seq_len": 0}, ValueError, "seq_len=0, expected at"),
        (
            {"step": 1, "ntokens_seen": 8},
            {"num_token_ranks": 2, "seq_len": 5},
            ValueError,
            "got 16 tokens on 2 rank(s), expected a multiple of seq_len=5; is num_token_ranks the degree at the save?",
        ),
        (
            {"step": 1},
            {"num_token_ranks": 1, "seq_len": 4},
            CannotReshardError,
            "the saved train state is not torchtitan's: got ['step'], expected step and ntokens_seen; load it as it is",
        ),
    ],
)
def test_refuses_other_states(saved: Any, options: dict[str, int], error: type[Exception], text: str) -> None:
    with pytest.raises(error) as refusal:
        read_torchtitan_train_state(saved, **options)
    assert text in str(refusal.value)


def save_counters(rank: int, world_size: int, path: Path) -> None:
    tte.save({"train_state": TrainState(3, 24, 192)}, path)


def load_counters(rank: int, world_size: int, path: Path) -> dict[str, int]:
    train_state = TrainState()
    tte.load({"train_state": train_state}, path)
    return train_state.state_dict()


def test_round_trip_on_gloo_ranks(run_world, tmp_path: Path) -> None:
    run_world(2, save_counters, tmp_path)
    for world_size in (1, 2):
        loaded = run_world(world_size, load_counters, tmp_path)
        assert loaded == [{"step": 3, "samples_seen": 24, "tokens_seen": 192}] * world_size


def test_counters_are_whole_numbers() -> None:
    with pytest.raises(TypeError, match="TrainState: got samples_seen='3', expected a whole number"):
        TrainState(samples_seen="3")
