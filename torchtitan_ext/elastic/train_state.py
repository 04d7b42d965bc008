"""How far a run has come: steps, samples and tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchtitan_ext.checkpoint.tables.component import Resharded, World
from torchtitan_ext.errors import CannotReshardError, check_counts


class TrainState:
    """Counters of a run over all ranks. ``Stateful`` and ``Reshardable``; the same on every rank.

    None of them depends on the number of ranks, so they go on unchanged in any world.

    Args:
        step: Optimizer steps taken.
        samples_seen: Samples trained on, over all ranks.
        tokens_seen: Tokens trained on, over all ranks.

    Example:
        >>> train_state = TrainState()
        >>> train_state.advance(samples=global_batch_size, tokens=global_batch_size * seq_len)
        >>> tte.save({"train_state": train_state}, path)
    """

    def __init__(self, step: int = 0, samples_seen: int = 0, tokens_seen: int = 0) -> None:
        check_counts("TrainState", step=step, samples_seen=samples_seen, tokens_seen=tokens_seen)
        self.step = step
        self.samples_seen = samples_seen
        self.tokens_seen = tokens_seen

    def __repr__(self) -> str:
        return f"TrainState(step={self.step}, samples_seen={self.samples_seen}, tokens_seen={self.tokens_seen})"

    def advance(self, *, samples: int, tokens: int = 0) -> None:
        """Counts one step, with the samples and tokens of the global batch."""
        self.step += 1
        self.samples_seen += samples
        self.tokens_seen += tokens

    def state_dict(self) -> dict[str, int]:
        """Plain ints, equal on all ranks. Not collective."""
        return {"step": self.step, "samples_seen": self.samples_seen, "tokens_seen": self.tokens_seen}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes the counters. Not collective.

        Raises:
            KeyError: One is missing; nothing was changed.
        """
        self.step, self.samples_seen, self.tokens_seen = (
            int(state_dict[name]) for name in ("step", "samples_seen", "tokens_seen")
        )

    def reshard(self, saved: Mapping[str, Any], old: World, new: World) -> Resharded:
        """The saved counters as they are; the same for every world. On every rank, not collective, changes nothing.

        Raises:
            CannotReshardError: The state is not one of ``TrainState``; names the conversion where it is torchtitan's.
        """
        if isinstance(saved, Mapping) and {"step", "samples_seen", "tokens_seen"} <= set(saved):
            state = {name: int(saved[name]) for name in ("step", "samples_seen", "tokens_seen")}
            note = f"step {state['step']}, {state['samples_seen']} samples seen"
            return Resharded(state, note, samples_counted=state["samples_seen"])
        if isinstance(saved, Mapping) and "ntokens_seen" in saved:
            raise CannotReshardError(
                "the saved train state is torchtitan's, which counts the tokens of one rank and no samples",
                "read it with tte.elastic.read_torchtitan_train_state(saved, num_token_ranks=..., seq_len=...)",
            )
        keys = sorted(map(str, saved)) if isinstance(saved, Mapping) else type(saved).__name__
        raise CannotReshardError(
            f"the saved state is not that of TrainState: got {keys}, expected step, samples_seen and tokens_seen",
            'load this component with the policy "reset"',
        )

    def reset(self) -> None:
        """Starts counting at zero."""
        self.step = self.samples_seen = self.tokens_seen = 0


def read_torchtitan_train_state(saved: Mapping[str, Any], *, num_token_ranks: int, seq_len: int) -> dict[str, int]:
    """The state of a ``TrainState`` from torchtitan's ``{"step", "ntokens_seen"}``. Pure.

    torchtitan counts ``labels.numel()`` on each rank and saves one rank's count; ranks that share tokens (tensor and
    pipeline parallel) count the same ones (torchtitan 0.3.0: ``trainer.py``, ``post_dataloading_process``).

    Args:
        saved: What torchtitan saved as ``train_state``.
        num_token_ranks: Ranks that saw different tokens: data-parallel degree x context-parallel degree at the save.
        seq_len: Tokens per sample.

    Raises:
        ValueError: A number below 1, or tokens that are no whole samples.
        CannotReshardError: The state is not torchtitan's.
    """
    if num_token_ranks < 1 or seq_len < 1:
        raise ValueError(
            f"read_torchtitan_train_state: got num_token_ranks={num_token_ranks} and seq_len={seq_len}, "
            "expected at least 1"
        )
    if not {"step", "ntokens_seen"} <= set(saved):
        raise CannotReshardError(
            f"the saved train state is not torchtitan's: got {sorted(map(str, saved))}, expected step and ntokens_seen",
            "load it as it is",
        )
    tokens = int(saved["ntokens_seen"]) * num_token_ranks
    if tokens % seq_len:
        raise ValueError(
            f"read_torchtitan_train_state: got {tokens} tokens on {num_token_ranks} rank(s), "
            f"expected a multiple of seq_len={seq_len}; is num_token_ranks the degree at the save?"
        )
    return {"step": int(saved["step"]), "samples_seen": tokens // seq_len, "tokens_seen": tokens}
