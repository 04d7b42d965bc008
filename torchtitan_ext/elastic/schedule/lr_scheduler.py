"""An LR scheduler that goes on where it was, or at the same number of samples when the global batch has changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from torchtitan_ext.checkpoint.tables.component import Resharded, World, reshard_state
from torchtitan_ext.elastic.schedule import schedule_math
from torchtitan_ext.elastic.schedule.group_names import group_names, names_entry, saved_places, sources_of
from torchtitan_ext.errors import CannotReshardError, check_argument, check_counts


class ElasticLRScheduler:
    """One or several torch LR schedulers, saved with the global batch size they count in.

    ``Stateful`` and ``Reshardable``. State: ``step`` (of the first scheduler), ``global_batch_size`` and
    ``schedulers``, a tuple with one entry for each scheduler, which DCP keeps as one value: so the state of any number
    of schedulers of any class loads back. An entry has the class name, torch's ``state_dict()`` and the learning rates
    of the parameter groups. Ranks that save the same key must hold equal schedulers. Where several parameter groups
    have names, a further entry lists each group's parameters: a run with its groups in another order, or cut otherwise,
    gets each group's values by its parameters. Groups without names are matched by position.

    It also reads states that it did not write: ``{"last_epoch": n}`` (torchtitan's ``LRSchedulersContainer``), torch's
    ``state_dict()`` of one scheduler, and lists or dicts of these. A scheduler that has no saved entry of its own kind
    and number of parameter groups takes the step alone, and plays its own schedule up to it.

    The loaded learning rates stay until the first ``step``, even if the optimizer's state is loaded afterwards, as
    ``dcp.load`` does (in alphabetical order).

    Args:
        schedulers: One torch scheduler or several; each steps once per optimizer step.
        global_batch_size: Samples per step, over all ranks.
        by_samples: Whether a load with another global batch size goes on at the same number of samples instead of at
            the same step: step n becomes n * old / new, rounded, and this run's schedulers, with its learning rates
            and lengths, are played to that step.
        saved_global_batch_size: The global batch size of the save, for states that do not have it.
        model: One module or several that name the parameters of an optimizer not built from ``named_parameters()``.

    Raises:
        TypeError: ``schedulers`` or a batch size has another type.
        ValueError: A batch size is below 1, or there is no scheduler.

    Example:
        >>> scheduler = ElasticLRScheduler(CosineAnnealingLR(optimizer, 1000), global_batch_size=64, by_samples=True)
        >>> tte.save({"lr_scheduler": scheduler}, path)
    """

    def __init__(
        self,
        schedulers: LRScheduler | Sequence[LRScheduler],
        *,
        global_batch_size: int,
        by_samples: bool = False,
        saved_global_batch_size: int | None = None,
        model: nn.Module | Sequence[nn.Module] = (),
    ) -> None:
        where = "ElasticLRScheduler"
        check_argument(where, "schedulers", schedulers, (LRScheduler, Sequence), "an LR scheduler or a list of them")
        self.schedulers = [schedulers] if isinstance(schedulers, LRScheduler) else list(schedulers)
        for scheduler in self.schedulers:
            check_argument(where, "schedulers", scheduler, LRScheduler, "an LR scheduler or a list of them")
        check_counts(where, global_batch_size=global_batch_size, saved_global_batch_size=saved_global_batch_size)
        if not self.schedulers:
            raise ValueError("ElasticLRScheduler: got no scheduler, expected at least one")
        if global_batch_size < 1 or (saved_global_batch_size is not None and saved_global_batch_size < 1):
            raise ValueError(
                f"ElasticLRScheduler: got global_batch_size={global_batch_size}, "
                f"saved_global_batch_size={saved_global_batch_size}, expected at least 1"
            )
        self.global_batch_size = global_batch_size
        self._rules = _Rules(global_batch_size, by_samples, saved_global_batch_size)
        models = [model] if isinstance(model, nn.Module) else model
        check_argument(where, "model", models, Sequence, "a module or a list of them")
        self._names = {id(parameter): name for module in models for name, parameter in module.named_parameters()}
        self._loaded: list[dict[str, Any]] | None = None
        for optimizer in {id(scheduler.optimizer): scheduler.optimizer for scheduler in self.schedulers}.values():
            optimizer.register_load_state_dict_post_hook(self._keep_loaded_groups)

    def __iter__(self) -> Iterator[LRScheduler]:
        return iter(self.schedulers)

    def __len__(self) -> int:
        return len(self.schedulers)

    @property
    def last_epoch(self) -> int:
        """The step of the first scheduler, by torch's name."""
        return schedule_math.step_of(self.schedulers[0].state_dict()) or 0

    def step(self, metrics: float | None = None) -> None:
        """Steps every scheduler, after the optimizer's step. On every rank, not collective.

        Args:
            metrics: The value for ``ReduceLROnPlateau``; required where there is one.
        """
        self._loaded = None
        for scheduler in self.schedulers:
            if isinstance(scheduler, ReduceLROnPlateau):
                if metrics is None:
                    raise ValueError("ElasticLRScheduler.step: got no metrics, ReduceLROnPlateau needs them")
                scheduler.step(metrics)
            else:
                scheduler.step()

    def get_last_lr(self) -> list[Any]:
        """The learning rate of each parameter group, scheduler by scheduler."""
        return [lr for scheduler in self.schedulers for lr in scheduler.get_last_lr()]

    def state_dict(self) -> dict[str, Any]:
        """Plain values, equal on ranks with equal schedulers. Not collective."""
        return {
            "step": self.last_epoch,
            "global_batch_size": self.global_batch_size,
            "schedulers": tuple(map(schedule_math.described, self.schedulers)),
            **names_entry([group_names(scheduler.optimizer, self._names) for scheduler in self.schedulers]),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads any state that ``reshard`` takes, into the schedulers and the groups of their optimizers.

        On every rank, not collective.

        Raises:
            CannotReshardError: As ``reshard``; nothing was changed.
        """
        entries, _ = _reshard(self.schedulers, state_dict, self._rules, self._names)
        for scheduler, entry in zip(self.schedulers, entries, strict=True):
            schedule_math.restore(scheduler, entry["state"], entry["groups"])
        self._loaded = entries

    def reshard(self, saved: Mapping[str, Any], old: World, new: World) -> Resharded:
        """The saved state for these schedulers and this global batch size; the same for every world. Changes nothing.

        On every rank, not collective.

        Raises:
            CannotReshardError: The state is not one of an LR scheduler, or lacks the global batch size that
                ``by_samples`` needs; or a scheduler that has to be played to a step depends on more than the step
                (``ReduceLROnPlateau``, classes that are not torch's).
        """
        entries, note = _reshard(self.schedulers, saved, self._rules, self._names)
        state = {
            "step": schedule_math.step_of(entries[0]["state"]) or 0,
            "global_batch_size": self.global_batch_size,
            "schedulers": tuple(entries),
        }
        return Resharded(state, note)

    def _keep_loaded_groups(self, optimizer: Optimizer) -> None:
        """Runs after an optimizer has loaded its state, which has the learning rates of the save."""
        if self._loaded is None:
            return
        for scheduler, entry in zip(self.schedulers, self._loaded, strict=True):
            if scheduler.optimizer is optimizer:
                schedule_math.restore_groups(optimizer, entry["groups"])


@reshard_state.register(LRScheduler)
def _reshard_torch_scheduler(component: LRScheduler, saved: Mapping[str, Any], old: World, new: World) -> Resharded:
    """A plain torch scheduler keeps its step; its optimizer's groups come with the optimizer, as always with torch."""
    entries, note = _reshard([component], saved, _Rules())
    return Resharded(entries[0]["state"], note)


@dataclass(frozen=True)
class _Rules:
    """What to do with a state that has another global batch size."""

    global_batch_size: int | None = None
    by_samples: bool = False
    saved_global_batch_size: int | None = None


@dataclass(frozen=True)
class _SavedScheduler:
    """What a checkpoint has of one scheduler; ``None`` where something was not saved.

    ``misfit`` says why the parameter groups are not those of this run; it is empty where they are.
    """

    step: int
    state: dict[str, Any] | None = None
    type: str | None = None
    groups: list[dict[str, Any]] | None = None
    misfit: str = ""


def _reshard(
    schedulers: Sequence[LRScheduler], saved: Any, rules: _Rules, names: Mapping[int, str] | None = None
) -> tuple[list[dict[str, Any]], str]:
    """Entries of ``state_dict()["schedulers"]`` for these schedulers, and the note of the report."""
    found, saved_batch = _read(saved)
    old_batch, new_batch = _batch_sizes(saved_batch, rules)
    by_samples = rules.by_samples and old_batch != new_batch
    entries: list[dict[str, Any]] = []
    remarks: dict[str, None] = {}
    for index, scheduler in enumerate(schedulers):
        clone = schedule_math.copied(scheduler)
        own = found[index] if index < len(found) else None
        if own is not None and own.groups is not None:
            own = _with_groups_of(own, saved_places(saved, index), group_names(scheduler.optimizer, names or {}))
        step = _shared_step(index, found) if own is None else own.step
        try:
            if by_samples:
                step = (2 * step * old_batch + new_batch) // (2 * new_batch)
                schedule_math.move_to(clone, step, remedy="pass by_samples=False to keep its step")
            elif own is not None and own.state is not None and _fits(own, clone):
                schedule_math.restore(clone, own.state, own.groups)
                remarks |= dict.fromkeys(schedule_math.overridden(scheduler, clone))
            else:
                remarks[f"scheduler {index} took the step alone: {_why_step_alone(own, clone)}"] = None
                schedule_math.move_to(clone, step, remedy="load a state that holds its own state_dict()")
        except CannotReshardError as refusal:
            raise CannotReshardError(f"LR scheduler {index}: {refusal.reason}", refusal.remedy) from None
        entries.append(schedule_math.described(clone))
    if len(found) > len(schedulers):
        remarks[f"{len(found) - len(schedulers)} saved scheduler(s) without a counterpart left out"] = None
    step = schedule_math.step_of(entries[0]["state"]) or 0
    return entries, "; ".join([_headline(found[0].step, step, old_batch, new_batch, rules), *remarks])


def _with_groups_of(
    own: _SavedScheduler, places: Mapping[str, set[int]], current: list[list[str]] | None
) -> _SavedScheduler:
    """The saved state with its groups in the order of this run; unchanged where either side has no names."""
    if not places or current is None or own.state is None or own.groups is None:
        return own
    positions = []
    for index, sources in enumerate(sources_of(places, current)):
        if not sources:
            return replace(own, misfit=f"group {index} has no parameter of the saved groups")
        values = [(schedule_math.select_groups(own.state, [source]), own.groups[source]) for source in sources]
        if any(value != values[0] for value in values):
            joined = ", ".join(map(str, sources))
            return replace(own, misfit=f"group {index} joins parameters of saved groups {joined}, which differ")
        positions.append(sources[0])
    state = schedule_math.select_groups(own.state, positions)
    return replace(own, state=state, groups=[own.groups[position] for position in positions])


def _read(saved: Any) -> tuple[list[_SavedScheduler], int | None]:
    """The schedulers of a saved state, ours or torch's, and its global batch size where it has one."""
    if isinstance(saved, Mapping) and {"step", "global_batch_size", "schedulers"} <= set(saved):
        found = [
            _SavedScheduler(
                schedule_math.step_of(entry["state"]) or 0, entry["state"], entry["type"], list(entry["groups"])
            )
            for entry in saved["schedulers"]
        ]
        return found, int(saved["global_batch_size"])
    found = _read_torch(saved)
    if not found:
        keys = sorted(map(str, saved)) if isinstance(saved, Mapping) else type(saved).__name__
        raise CannotReshardError(
            f"the saved state is not that of an LR scheduler: got {keys}, expected last_epoch or torch's state_dict()",
            'load this component with the policy "reset", or exclude it',
        )
    return found, None


def _read_torch(saved: Any) -> list[_SavedScheduler]:
    """``{"last_epoch": n}``, a ``state_dict()`` of torch, or containers of these."""
    if isinstance(saved, Mapping):
        state = schedule_math.normalized(saved)
        step = schedule_math.step_of(state)
        if step is not None:
            return [_SavedScheduler(step, None if set(state) == {"last_epoch"} else state)]
        by_number = all(str(key).isdigit() for key in saved)
        members = [saved[key] for key in (sorted(saved, key=int) if by_number else saved)]
    else:
        members = list(saved) if isinstance(saved, (list, tuple)) else []
    return [scheduler for member in members for scheduler in _read_torch(member)]


def _batch_sizes(saved_batch: int | None, rules: _Rules) -> tuple[int, int]:
    """The old and the new global batch size; equal where the old one is not known."""
    if rules.global_batch_size is None:
        return 1, 1
    old = rules.saved_global_batch_size if saved_batch is None else saved_batch
    if old is None and rules.by_samples:
        raise CannotReshardError(
            "the saved LR scheduler does not say its global batch size, which by_samples needs",
            "pass ElasticLRScheduler(saved_global_batch_size=...)",
        )
    return old or rules.global_batch_size, rules.global_batch_size


def _shared_step(index: int, found: Sequence[_SavedScheduler]) -> int:
    if len({scheduler.step for scheduler in found}) > 1:
        steps = ", ".join(f"scheduler {number}: {scheduler.step}" for number, scheduler in enumerate(found))
        raise CannotReshardError(
            f"LR scheduler {index} has no saved state, and the {len(found)} saved ones do not share a step ({steps})",
            'build as many schedulers as were saved, or load this component with the policy "reset"',
        )
    return found[0].step


def _fits(own: _SavedScheduler, clone: LRScheduler) -> bool:
    if own.misfit or own.state is None or own.type not in (None, type(clone).__name__):
        return False
    if own.groups is not None and len(own.groups) != len(clone.optimizer.param_groups):
        return False
    return schedule_math.fits(own.state, clone.state_dict())


def _why_step_alone(own: _SavedScheduler | None, clone: LRScheduler) -> str:
    if own is None:
        return "it has no saved entry"
    if own.state is None:
        return "no more was saved"
    if own.misfit:
        return own.misfit
    saved = f"a {own.type}" if own.type else "a scheduler with other attributes"
    groups = "" if own.groups is None else f" over {len(own.groups)} parameter group(s)"
    return f"saved was {saved}{groups}, now {type(clone).__name__} over {len(clone.optimizer.param_groups)}"


def _headline(saved_step: int, step: int, old_batch: int, new_batch: int, rules: _Rules) -> str:
    if old_batch == new_batch:
        return f"step {step} kept"
    batches = f"global batch {old_batch} -> {new_batch}"
    if not rules.by_samples:
        return f"step {step} kept; {batches}; the schedule counts steps"
    samples = saved_step * old_batch
    inexact = "" if step * new_batch == samples else f", nearest to {samples / new_batch:.2f}"
    return f"step {saved_step} -> {step}{inexact}, at {samples} samples ({batches}), of this run's own schedule"
