"""The tokens of a run, counted by trainers that each count those of their own rank."""

from typing import Any

import pytest

from torchtitan_ext.checkpoint.tables.component import World
from torchtitan_ext.errors import CannotReshardError
from torchtitan_ext.integrations.torchtitan_train_state import RunTrainState


class Trainer:
    def __init__(self, step: int = 0, ntokens_seen: int = 0) -> None:
        self.state = {"step": step, "ntokens_seen": ntokens_seen}

    def state_dict(self) -> dict[str, int]:
        return dict(self.state)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.state = dict(state_dict)


def test_the_sum_over_the_ranks_is_saved_beside_the_count_of_one() -> None:
    assert RunTrainState(Trainer(3, 100), 4).state_dict() == {"step": 3, "ntokens_seen": 100, "n_tokens_seen": 400}


def test_another_number_of_ranks_goes_on_from_the_sum_without_rounding() -> None:
    trainer = Trainer()
    run = RunTrainState(trainer, 3)
    run.load_state_dict({"step": 3, "ntokens_seen": 100, "n_tokens_seen": 400})
    assert trainer.state == {"step": 3, "ntokens_seen": 133} and run.run_tokens == 400
    trainer.state["ntokens_seen"] += 10
    assert run.state_dict()["n_tokens_seen"] == 430 and run.counted_by_rank is None


def test_a_checkpoint_of_one_rank_s_count_is_multiplied_when_its_ranks_are_known() -> None:
    trainer = Trainer()
    run = RunTrainState(trainer, 2)
    run.load_state_dict({"step": 3, "ntokens_seen": 100})
    assert run.counted_by_rank == 100
    run.set_run_tokens(400)
    assert trainer.state == {"step": 3, "ntokens_seen": 200} and run.run_tokens == 400


def test_what_was_saved_crosses_as_it_is_or_is_refused() -> None:
    run = RunTrainState(Trainer(), 2)
    saved = {"step": 3, "ntokens_seen": 100, "n_tokens_seen": 400}
    resharded = run.reshard(saved, World(4), World(2))
    assert (resharded.state, resharded.note) == (saved, "step 3, 400 tokens of the run")
    with pytest.raises(CannotReshardError, match="the checkpoint has no ntokens_seen"):
        run.reshard({"step": 3}, World(4), World(2))


def test_a_trainer_that_counts_no_tokens_is_taken_as_it_is() -> None:
    trainer = Trainer()
    trainer.state = {"step": 3}
    assert RunTrainState(trainer, 2).state_dict() == {"step": 3}
