"""Random number generators of every rank: exact on the same ranks, seeded in a defined way on others."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from numbers import Integral
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from torchtitan_ext.checkpoint.tables.component import Resharded, World
from torchtitan_ext.errors import CannotReshardError, argument_error, check_argument, check_counts
from torchtitan_ext.ranks.groups import check_job_is_joined

# torch has 64-bit seeds, Python any, NumPy lists of 32-bit words; four words of 64 bits fill the pool of each.
_SEED_WORDS = 4


class RngState:
    """The global generators of this process: torch on the CPU and on one GPU, Python's ``random`` and NumPy's.

    ``Stateful`` and ``Reshardable``. State: ``rank_N`` with the states of rank N, and ``common``, equal on all ranks.
    Both are tuples of plain values, which DCP keeps as one value each.

    When as many ranks load as saved, each goes on with its own numbers, exactly. Otherwise each rank is seeded from
    (seed, step, rank) by ``numpy.random.SeedSequence``
    (https://numpy.org/doc/stable/reference/random/parallel.html): different ranks and different steps get independent
    numbers, and the same restart gets the same ones each time.

    Args:
        seed: The job's seed, the same on all ranks.
        rank: Which numbers this process draws; by default its rank in the process group. Ranks that must share numbers
            (those of one tensor-parallel group) pass the same, for example their data-parallel rank: their state is
            saved once, and a save is refused where their states differ.
        world_size: The number of different ``rank`` values; required with ``rank``.
        device: The GPU whose generator is saved; by default the current one where there is a GPU. ``"cpu"`` for none.
        step: Called at each save, for example ``lambda: train_state.step``: a restart is seeded with its result. The
            same on all ranks. The default gives 0, which makes every restart alike.

    Raises:
        TypeError: An argument is of another type.
        ValueError: The seed is negative, the rank is outside the world, ``rank`` or ``world_size`` is missing; or both
            are, and a job of several ranks has no process group yet.

    Example:
        >>> rng = RngState(seed=0, rank=dp_rank, world_size=dp_size, step=lambda: train_state.step)
        >>> tte.save({"rng": rng}, path)
    """

    def __init__(
        self,
        seed: int,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        device: torch.device | str | None = None,
        step: Callable[[], int] = int,
    ) -> None:
        check_argument("RngState", "seed", seed, Integral, "a whole number")
        check_counts("RngState", rank=rank, world_size=world_size)
        if not callable(step):
            raise argument_error("RngState", "step", step, "a function, such as lambda: train_state.step")
        if (rank is None) != (world_size is None):
            raise ValueError(f"RngState: got rank={rank} and world_size={world_size}, expected both or none")
        if rank is None:
            check_job_is_joined("RngState", "or pass rank= and world_size=")
        is_alone = not (dist.is_available() and dist.is_initialized())
        self.rank = (0 if is_alone else dist.get_rank()) if rank is None else rank
        self.world_size = (1 if is_alone else dist.get_world_size()) if world_size is None else world_size
        if seed < 0 or not 0 <= self.rank < self.world_size:
            raise ValueError(
                f"RngState: got seed={seed}, rank={self.rank} of world_size={self.world_size}, "
                "expected a seed of at least 0 and a rank below world_size"
            )
        self.seed = seed
        self._has_given_rank = rank is not None
        self._cuda = _cuda_device(device)
        self._step = step

    def among(self, num_ranks: int) -> RngState:
        """The ``RngState`` of a job of so many ranks, for dry runs; this one where ``world_size`` was given."""
        if self._has_given_rank:
            return self
        return RngState(
            self.seed, rank=min(self.rank, num_ranks - 1), world_size=num_ranks, device=self._cuda, step=self._step
        )

    def state_dict(self) -> dict[str, Any]:
        """The generators as they stand. Not collective."""
        current = {
            "cpu": _bytes(torch.get_rng_state()),
            "cuda": None if self._cuda is None else _bytes(torch.cuda.get_rng_state(self._cuda)),
            "python": random.getstate(),
            "numpy": np.random.get_state(legacy=False),
        }
        return self._state(current, self._step())

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Sets this process's generators from the entry of its rank, and ignores other entries. Not collective.

        Raises:
            ValueError: The state has no entry of this rank, or one that is no generator's; nothing was changed.
        """
        key = f"rank_{self.rank}"
        if key not in state_dict:
            raise ValueError(f"RngState: got {sorted(state_dict)}, expected {key}; load it by a policy that reshards")
        (states,) = state_dict[key]
        # Try the states on spare generators first, so that all generators are set or none.
        try:
            torch.Generator().set_state(_tensor(states["cpu"]))
            random.Random().setstate(_as_tuple(states["python"]))
            np.random.RandomState().set_state(states["numpy"])
        except Exception as error:
            raise ValueError(f"RngState: {key} is no state of generators ({type(error).__name__}: {error})") from None
        if self._cuda is not None:
            # Saved without a GPU: seeded, as in reshard.
            (common,) = state_dict["common"]
            cuda = self._fresh(common["step"])["cuda"] if states["cuda"] is None else states["cuda"]
            torch.cuda.set_rng_state(_tensor(cuda), self._cuda)
        torch.set_rng_state(_tensor(states["cpu"]))
        random.setstate(_as_tuple(states["python"]))
        np.random.set_state(states["numpy"])

    def reshard(self, saved: Mapping[str, Any], old: World, new: World) -> Resharded:
        """This rank's saved generators where as many ranks saved, seeded ones elsewhere. Changes nothing.

        On every rank, not collective. The worlds are not needed: with ranks that share numbers, the count that matters
        is the ``world_size`` of the constructor.

        Raises:
            CannotReshardError: The state is not one of ``RngState``, or it lacks a rank's entry.
        """
        if "common" not in saved:
            keys = sorted(map(str, saved)) if isinstance(saved, Mapping) else type(saved).__name__
            raise CannotReshardError(
                f"the saved state is not that of RngState: got {keys}, expected common and rank_0, rank_1, ...",
                'load this component with the policy "reset"',
            )
        (common,) = saved["common"]
        old_size, step = common["world_size"], common["step"]
        if old_size != self.world_size:
            note = f"seeded from seed {self.seed}, step {step} and rank: {old_size} -> {self.world_size} ranks"
            return Resharded(self._seeded(step), note)
        missing = [rank for rank in range(old_size) if f"rank_{rank}" not in saved]
        if missing:
            raise CannotReshardError(
                f"the checkpoint lacks the generators of rank(s) {', '.join(map(str, missing))} of {old_size}",
                'load this component with the policy "reset"',
            )
        (states,) = saved[f"rank_{self.rank}"]
        note = f"exact on the same {old_size} rank(s)"
        if self._cuda is not None and states["cuda"] is None:
            note += f", the GPU seeded from seed {self.seed} and step {step}: it was saved without one"
        return Resharded(self._state(states, step), note)

    def reset(self, step: int | None = None) -> None:
        """Seeds this process's generators from (seed, step, rank). On every rank, not collective.

        Args:
            step: By default the result of the constructor's ``step``.
        """
        self.load_state_dict(self._seeded(self._step() if step is None else step))

    def _fresh(self, step: int) -> dict[str, Any]:
        """The states of newly seeded generators. Does not touch the global ones."""
        children = np.random.SeedSequence(self.seed, spawn_key=(step, self.rank)).spawn(4)
        words = [child.generate_state(_SEED_WORDS, np.uint64).tolist() for child in children]
        cuda = None
        if self._cuda is not None:
            cuda = _bytes(torch.Generator(self._cuda).manual_seed(_int64(words[1][0])).get_state())
        return {
            "cpu": _bytes(torch.Generator().manual_seed(_int64(words[0][0])).get_state()),
            "cuda": cuda,
            "python": random.Random(sum(word << 64 * place for place, word in enumerate(words[2]))).getstate(),
            "numpy": np.random.RandomState(np.random.MT19937(children[3])).get_state(legacy=False),
        }

    def _seeded(self, step: int) -> dict[str, Any]:
        return self._state(self._fresh(step), step)

    def _state(self, states: dict[str, Any], step: int) -> dict[str, Any]:
        common = {"seed": self.seed, "world_size": self.world_size, "step": step}
        return {f"rank_{self.rank}": (states,), "common": (common,)}


def rng_of_saved(common: Any, old: World, num_ranks: int, num_data_parallel: int) -> RngState | None:
    """The ``RngState`` of a job of other ranks, by the entry ``common`` that one saved; ``None`` for another entry.

    It has the saved seed. Each rank has its own numbers, or each data-parallel rank, as in the world that saved.
    """
    saved = common[0] if isinstance(common, (list, tuple)) and len(common) == 1 else None
    if not isinstance(saved, Mapping) or saved.keys() != {"seed", "world_size", "step"}:
        return None
    is_own = old.size in (0, saved["world_size"])
    return RngState(saved["seed"], rank=0, world_size=num_ranks if is_own else num_data_parallel, device="cpu")


def _cuda_device(device: torch.device | str | None) -> torch.device | None:
    chosen = torch.device(device if device is not None else "cuda" if torch.cuda.is_available() else "cpu")
    if chosen.type != "cuda":
        return None
    return torch.device("cuda", torch.cuda.current_device() if chosen.index is None else chosen.index)


def _bytes(state: torch.Tensor) -> bytes:
    """As bytes, because DCP would take a tensor out of its tuple, and compare and broadcast it as a replica."""
    return state.numpy().tobytes()


def _tensor(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


def _int64(word: int) -> int:
    """torch takes seeds as signed numbers."""
    return word - 2**64 if word >= 2**63 else word


def _as_tuple(state: Any) -> Any:
    return tuple(map(_as_tuple, state)) if isinstance(state, (list, tuple)) else state
