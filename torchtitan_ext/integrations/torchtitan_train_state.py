"""torchtitan's train state, with the tokens of the run beside those of one rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.distributed.checkpoint.stateful import Stateful

from torchtitan_ext.checkpoint.tables.component import Resharded, World
from torchtitan_ext.errors import CannotReshardError

RANK_TOKENS = "ntokens_seen"
RUN_TOKENS = "n_tokens_seen"
"""As torchtitan's log calls the sum over the ranks."""


class RunTrainState:
    """The train state of a trainer that counts the tokens of its own rank. ``Stateful`` and ``Reshardable``.

    torchtitan saves the count of one rank, and logs the sum over ranks that see different tokens. This class saves the
    sum too, under a key that torchtitan alone does not load; a trainer on another number of ranks gets its share. The
    remainder of the division is not lost: the sum goes on from the saved one.

    Args:
        trainer: Its state has ``ntokens_seen``; a state without it stays as it is.
        num_ranks: Number of ranks that see different tokens: data-parallel times context-parallel degree.
    """

    def __init__(self, trainer: Stateful, num_ranks: int) -> None:
        self._trainer = trainer
        self._num_ranks = num_ranks
        self._share_of_saved = self._saved_tokens = 0
        self.counted_by_rank: int | None = None
        """After a load: the tokens of one rank that saved, if the checkpoint does not have those of the run."""

    @property
    def run_tokens(self) -> int:
        """Tokens that the run has seen, over all ranks."""
        tokens: int = self._trainer.state_dict()[RANK_TOKENS]
        return self._saved_tokens + (tokens - self._share_of_saved) * self._num_ranks

    def state_dict(self) -> dict[str, Any]:
        """The trainer's state and the tokens of the run. Not collective."""
        state = self._trainer.state_dict()
        return {**state, RUN_TOKENS: self.run_tokens} if RANK_TOKENS in state else state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes the step, and this rank's share of the tokens."""
        own = {name: value for name, value in state_dict.items() if name != RUN_TOKENS}
        if RUN_TOKENS in state_dict:
            self.set_run_tokens(state_dict[RUN_TOKENS], own)
        else:
            self._trainer.load_state_dict(own)
            self.counted_by_rank = own.get(RANK_TOKENS)

    def set_run_tokens(self, tokens: int, state: Mapping[str, Any] | None = None) -> None:
        """Sets the tokens that the run has seen, and the rest of the trainer's state if it is given."""
        self._saved_tokens, self._share_of_saved = tokens, tokens // self._num_ranks
        known = self._trainer.state_dict() if state is None else state
        self._trainer.load_state_dict({**known, RANK_TOKENS: self._share_of_saved})
        self.counted_by_rank = None

    def reshard(self, saved: Mapping[str, Any], old: World, new: World) -> Resharded:
        """The saved state, unchanged; see ``Reshardable``."""
        missing = sorted(self._trainer.state_dict().keys() - saved.keys())
        if missing:
            raise CannotReshardError(f"the checkpoint has no {', '.join(missing)}", "load a step that has all of it")
        note = f"step {saved.get('step', 'unknown')}"
        note += f", {saved[RUN_TOKENS]} tokens of the run" if RUN_TOKENS in saved else ""
        return Resharded(dict(saved), note)
