"""The checkpoints of a run: go on from the newest good one, save now and then without waiting, keep a few."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from inspect import signature
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import torch.distributed as dist

from torchtitan_ext import clock
from torchtitan_ext.checkpoint import CpuStager, LoadReport, SavePlanner, SaveResult, load
from torchtitan_ext.checkpoint.operation.arguments import check_seconds
from torchtitan_ext.checkpoint.operation.choose_step import StepChoice, choose_step
from torchtitan_ext.checkpoint.operation.phases import TIMEOUT_SECONDS, Phases, checking_arguments
from torchtitan_ext.checkpoint.operation.save_job import OnStorageError, SaveJob
from torchtitan_ext.checkpoint.operation.saves import Call, save_later, save_now
from torchtitan_ext.checkpoint.operation.unasked import raise_unasked
from torchtitan_ext.checkpoint.rules.policy import ElasticPolicy, check_rules
from torchtitan_ext.errors import (
    CheckpointFailedError,
    DifferentCallsError,
    LostRankError,
    NoCheckpointError,
    ProofFailedError,
    StateRefusedError,
    TorchtitanExtError,
    WrongValueError,
    argument_error,
    check_argument,
    check_counts,
)
from torchtitan_ext.errors.near_names import nearest_name
from torchtitan_ext.ranks.groups import check_job_is_joined
from torchtitan_ext.runs.objects import Optimizers, as_components, grouped_optimizers, is_wrapped
from torchtitan_ext.runs.preemption import Preemption
from torchtitan_ext.storage import FileReader
from torchtitan_ext.storage.commit.branch import living_steps
from torchtitan_ext.storage.commit.steps import STEP, StepPattern, folders_in_fallback, step_of
from torchtitan_ext.storage.location import is_local, is_plain_url
from torchtitan_ext.storage.runs.remote_steps import remote_steps
from torchtitan_ext.storage.runs.retention import Keep

logger = logging.getLogger(__name__)

# From here on a wait for the save before is told: it is one that a trainer notices.
_TOLD_SECONDS = 1.0

_LOOKING = "the step's metadata was read; nothing was changed"


class CheckpointManager:
    """The checkpoints of one run: ``<run>/step-<number>``. Methods are collective, but ``should_save`` and ``steps``.

    Args:
        run: Directory of the run.
        every: Which steps ``should_save`` names: multiples of it.
        keep: How many of the newest whole steps stay; all by default. Older ones are removed after each commit.
        keep_every: Steps that are multiples of it stay for good; goes with ``keep``.
        asynchronous: Whether ``save`` returns when the state is copied to host memory, which is kept from save to save.
        stager: That copies it; by default a ``CpuStager`` of the manager's own.
        on_error: ``"warn"``: where storage refuses a save on any rank (a full disk, a directory that is gone or
            read-only), the coordinator warns, and the result of ``wait`` has an ``error`` that says so on all ranks.
        fallback: Another directory, which runs may share: what storage refuses in the run is saved there, under the
            same name in a folder of the run, and is found there by ``resume`` and ``steps``.
        retries: How often a save that storage refused is tried again before that.
        max_failures: With ``on_error="warn"``, which failure in a row is raised all the same.
        fingerprints: Whether saves store fingerprints of their chunks.
        prove: Whether ``resume`` compares what it has loaded with these fingerprints.
        policy: What ``resume`` does with each component, and about missing and unexpected keys.
        step_pattern: How the run names its steps, as in ``tte.load``.
        signals: Names of signals, such as ``("SIGTERM", "SIGUSR1")``, which a job gets before it is killed. One at any
            rank makes all ranks save at the end of the same step, and then ``should_stop``. The manager is made in the
            main thread; handlers that were there are called too.
        grace_seconds: How long the job lives after such a signal, or a ``request_save``, if it is known: it decides
            whether the pending save and a new one both fit, by what saves of this run have taken.
        process_group: The ranks of the run; all by default.
        timeout_seconds: How long a rank waits for the others in each phase.
        objects: What is saved and filled, by the names of its components: models (a list of the stages of a pipeline),
            optimizers (one for each module), and all that a state dict takes and can be filled, such as schedulers and
            data loaders.

    Attributes:
        report: What the last ``resume`` did; ``None`` where it found an empty run.
        pending: The future of the save that is under way, to look at; ``wait`` waits for it, and raises its error.

    Raises:
        TypeError, ValueError: An argument makes no sense.

    Example:
        >>> manager = tte.CheckpointManager("/ckpt/llama", every=500, keep=3, model=model, optimizer=optimizer)
        >>> step = manager.resume()
        >>> while step < last and not manager.should_stop:
        ...     step += 1
        ...     train(step)
        ...     if manager.should_save(step):
        ...         manager.save(step=step)
        >>> manager.close()
    """

    def __init__(
        self,
        run: str | os.PathLike[str],
        *,
        every: int | None = None,
        keep: int | None = None,
        keep_every: int | None = None,
        asynchronous: bool = True,
        stager: CpuStager | None = None,
        on_error: Literal["raise", "warn"] = "raise",
        fallback: str | os.PathLike[str] | None = None,
        retries: int = 0,
        max_failures: int = 3,
        fingerprints: bool = False,
        prove: bool = False,
        policy: ElasticPolicy | None = None,
        step_pattern: str | None = None,
        signals: Sequence[str] = (),
        grace_seconds: float | None = None,
        process_group: dist.ProcessGroup | None = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
        **objects: Any,
    ) -> None:
        with checking_arguments("CheckpointManager", process_group):
            check_argument("CheckpointManager", "run", run, (str, os.PathLike), "a directory")
            if not os.fspath(run):
                raise WrongValueError("CheckpointManager: got run='', expected a directory")
            _check_number("CheckpointManager", every=every, keep=keep, keep_every=keep_every)
            check_argument("CheckpointManager", "asynchronous", asynchronous, bool, "True or False")
            check_rules("CheckpointManager", policy)
            _check_objects(objects)
            if keep_every is not None and keep is None:
                raise WrongValueError(f"CheckpointManager: got keep_every={keep_every} and no keep: all steps stay")
            if stager is not None and not asynchronous:
                raise WrongValueError("CheckpointManager: got a stager and asynchronous=False, expected one of them")
            self._name_of = STEP.text if step_pattern is None else StepPattern(step_pattern).text
            if "*" in self._name_of:
                raise WrongValueError(
                    f"CheckpointManager: got step_pattern={step_pattern!r}, expected one without stars"
                )
            if os.path.isfile(run):
                raise WrongValueError(f"CheckpointManager: got run={str(run)!r}, a file; expected a directory")
            self._job = SaveJob(
                keep=None if keep is None else Keep(keep, keep_every),
                step_pattern=None if keep is None else step_pattern,
                on_storage_error=OnStorageError(on_error, fallback, retries, max_failures),
                fingerprints=fingerprints,
            )
            replace(self._job, path=self._path_of(run, 1)).checked("CheckpointManager", {})
            self._components = as_components(objects)
            self.run = os.path.abspath(run) if is_local(run) else os.fspath(run)
            if grace_seconds is not None:
                check_seconds("CheckpointManager", grace_seconds, "grace_seconds")
            self._preemption: Preemption | None = None
            if signals or grace_seconds is not None:
                check_job_is_joined("CheckpointManager", "or leave signals and grace_seconds out")
                self._preemption = Preemption(self.run, process_group, signals, grace_seconds, timeout_seconds)
        self.every = every
        self.report: LoadReport | None = None
        self._group = process_group
        self._timeout_seconds = timeout_seconds
        self._pattern = step_pattern
        self._fallback = self._job.on_storage_error.fallback
        self._policy = ElasticPolicy() if policy is None else policy
        self._prove = prove
        self._stager = CpuStager() if asynchronous and stager is None else stager
        self.pending: Future[SaveResult] | None = None
        self._pending_step = 0
        self._last: SaveResult | None = None
        self._is_closed = False

    def __repr__(self) -> str:
        return f"CheckpointManager({self.run!r})"

    def resume(self, state: dict[str, Any] | None = None, *, step: int | None = None) -> int:
        """Fills the objects, and a state dict, from the newest step of the run whose files are all whole.

        A load verifies what it reads. Where that of the newest step fails, the ranks verify its files, and those of the
        steps before it: damaged ones are passed over, with a warning that names them. Of a run at a URL, where files
        have no checksums, it is the newest step. ``report`` says what became of each component.

        Args:
            step: Another step than that: the run is set back, and its next save sets newer steps aside.

        Returns:
            The number of the step; 0 where the run has no step yet, and nothing was touched.

        Raises:
            NoCheckpointError: The run has no such step, or it has steps, and none is good: tensors may be part-written.
            And what ``tte.load`` raises: all the same on every rank.
        """
        with checking_arguments("CheckpointManager.resume", self._group):
            _check_number("CheckpointManager.resume", step=step)
        components = self._components_with(state, "resume")
        self.report = None
        path = self.find(step)
        if path is None:
            return 0
        try:
            self._load(components, path)
        except TorchtitanExtError as error:  # the same on every rank
            if step is not None or is_plain_url(self.run) or not _may_be_damage(error):
                raise
            good = self._chosen("last-good")
            if good is None or good == path:
                raise
            self._load(components, path := good)
        if state is not None:
            state.update({name: components[name] for name in state if not is_wrapped(components[name])})
        loaded = step_of(os.fspath(path), self._pattern)
        assert loaded is not None, "a step has a number, please report"
        if self._preemption is not None:
            self._preemption.resumed(loaded)
        return loaded

    def find(self, step: int | None = None) -> Path | str | None:
        """The path of a step, by default of the newest, in the run or its fallback: for loads by other means.

        Returns:
            The same on every rank, after the pending save; ``None`` where the run has no step yet.

        Raises:
            NoCheckpointError: The run has no such step.
            AbsentRunError: Only the fallback has steps, and no number is given.
        """
        self.wait()
        return self._chosen("latest" if step is None else step)

    def _chosen(self, step: StepChoice) -> Path | str | None:
        """The path of a step, the same on every rank; ``None`` where the run has none yet. Collective."""
        with Phases("load", self._group, path=self.run, timeout_seconds=self._timeout_seconds) as phases:
            raise_unasked(phases)
            try:
                return choose_step(self.run, step, phases, self._pattern, self._fallback)
            except NoCheckpointError as error:
                if error.has_steps or isinstance(step, int):
                    raise
                return None

    def _load(self, components: dict[str, Any], path: Path | str) -> None:
        """Loads one step into the objects. Collective."""
        optimizers = {name: one for name, one in components.items() if isinstance(one, Optimizers)}
        with Phases("load", self._group, path=path, timeout_seconds=self._timeout_seconds) as phases:
            grouped = phases.to_coordinator(
                "choose", lambda: None, lambda _: _grouped_in(path, list(optimizers)), doing=_LOOKING
            )
        for name, one in optimizers.items():
            one.load_as(is_grouped=name in grouped)
        try:
            self.report = load(
                components,
                path,
                policy=self._policy,
                prove=self._prove,
                process_group=self._group,
                timeout_seconds=self._timeout_seconds,
            )
        except BaseException:
            for one in optimizers.values():
                one.undo()
            raise

    def should_save(self, step: int) -> bool:
        """Whether a step is to be saved: one of ``every``, or that of a signal or request. The same on every rank.

        Not collective. With ``signals`` or ``grace_seconds`` every rank calls it at the end of each step: after a
        request it waits there, about a second, until the ranks have agreed through the store on the step to save.

        Raises:
            LostRankError: After a request some rank did not answer within ``grace_seconds``, or ``timeout_seconds``.
                The same on every rank.
        """
        check_counts("CheckpointManager.should_save", step=step)
        is_due = self.every is not None and step > 0 and step % self.every == 0
        return is_due if self._preemption is None else self._preemption.passes(step, is_due)

    @property
    def should_stop(self) -> bool:
        """Whether a signal or request asked for the end, and ``should_save`` has come to the step that all ranks save.

        It is true from then on, on every rank at the same step: leave the loop, and close the manager.
        """
        return self._preemption is not None and self._preemption.should_stop

    def request_save(self) -> None:
        """Does what a signal does, from any thread of any rank, as for the API of a scheduler. Not collective.

        Raises:
            WrongValueError: The manager has neither ``signals`` nor ``grace_seconds``: ranks do not listen.
        """
        if self._preemption is None:
            raise WrongValueError(
                "CheckpointManager.request_save: this manager does not listen; make it with signals= or grace_seconds= "
                "on every rank"
            )
        self._preemption.request("request_save")

    def save(self, state: dict[str, Any] | None = None, step: int | None = None) -> None:
        """Saves the objects, and a state dict, as a step of the run.

        Returns when the state may be changed. Waits for the save before, and raises its error if it has failed: then
        this step is not saved.

        Raises:
            CheckpointFailedError: Storage refused the save, its retries and its fallback, on some rank.
            And what ``tte.save`` and ``tte.async_save`` raise: all the same on every rank.
        """
        with checking_arguments("CheckpointManager.save", self._group):
            if step is None or isinstance(step, bool) or not isinstance(step, int) or step < 1:
                raise WrongValueError(
                    f"CheckpointManager.save: got step={step!r}, expected the number of a step of at least 1: "
                    "save(state, step), or save(step=step) of objects"
                )
        components = self._components_with(state, "save")
        self._wait_before(step)
        for component in components.values():
            if isinstance(component, Optimizers):
                component.save()
        job = replace(self._job, path=self._path_of(self.run, step), planner=SavePlanner())
        call = Call("CheckpointManager.save", self._group, timeout_seconds=self._timeout_seconds)
        begun = clock.now()
        if self._stager is None:
            self._last = save_now(components, job, call)
        else:
            self.pending, self._pending_step = save_later(components, job, call, self._stager), step
        if self._preemption is not None:
            self._preemption.saved(begun, self.pending)

    def wait(self) -> SaveResult | None:
        """Waits until the pending save is committed, and raises its error if it has failed.

        Returns:
            The result of the last save; ``None`` before the first one. With ``on_error="warn"`` its ``error`` says what
            storage refused.
        """
        if self.pending is not None:
            future, self.pending = self.pending, None  # an error is raised once
            self._last = future.result()
        return self._last

    def steps(self) -> list[int]:
        """The finished steps of the run, ascending, without those that it has left behind. Not collective."""
        if not is_local(self.run):
            return sorted(remote_steps(self.run, self._pattern).finished)
        others = [] if self._fallback is None else map(Path, folders_in_fallback(self.run, self._fallback))
        return sorted({number for number, _ in living_steps([Path(self.run), *others], self._pattern)})

    @property
    def latest(self) -> int | None:
        """The newest of ``steps``."""
        return max(self.steps(), default=None)

    def close(self) -> None:
        """Waits for the pending save, raises its error if it has failed, and gives host memory and signals back."""
        try:
            self.wait()
        finally:
            self._is_closed = True
            if self._stager is not None:
                self._stager.close()
            if self._preemption is not None:
                self._preemption.close()

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.close()
        except Exception as failure:
            if error is None:
                raise
            logger.error("%s: the last save failed too: %s", self.run, failure)

    def _path_of(self, run: str | os.PathLike[str], step: int) -> str:
        return os.path.join(run, self._name_of.format(step=step))

    def _wait_before(self, step: int) -> None:
        if self.pending is None:
            return
        before, start = self._pending_step, clock.now()
        self.wait()
        seconds = clock.now() - start
        if seconds > _TOLD_SECONDS:
            logger.warning("%s: the save of step %d waited %.1f s for that of step %d", self.run, step, seconds, before)

    def _components_with(self, state: dict[str, Any] | None, method: str) -> dict[str, Any]:
        """The manager's objects, and the entries of a state dict."""
        name = f"CheckpointManager.{method}"
        with checking_arguments(name, self._group):
            if self._is_closed:
                raise WrongValueError(f"{name}: the manager is closed; make a new one")
            if state is not None and not isinstance(state, dict):
                raise argument_error(name, "state", state, "a state dict")
            twice = sorted(self._components.keys() & (state or {}).keys())
            if twice:
                raise WrongValueError(f"{name}: got {twice[0]!r} in the state and as an object; give it once")
            if not self._components and state is None:
                raise WrongValueError(f"{name}: got neither a state nor objects; pass what is to be saved and filled")
            return self._components | as_components(state or {})


def _grouped_in(path: Path | str, names: list[str]) -> list[str]:
    """The optimizers whose state a checkpoint has in groups; at a URL that fsspec reads it is taken for flat."""
    if not names or is_plain_url(path):
        return []
    return grouped_optimizers(FileReader(path).read_metadata().state_dict_metadata, names)


def _may_be_damage(error: TorchtitanExtError) -> bool:
    """Whether a load may have failed for the files of its step, which are verified then."""
    if isinstance(error, StateRefusedError):
        return any(problem.kind == "broken_checkpoint" for problem in error.problems)
    if isinstance(error, CheckpointFailedError):
        return not error.was_interrupted
    return not isinstance(error, (LostRankError, DifferentCallsError, ProofFailedError, WrongValueError))


def _check_objects(objects: Mapping[str, Any]) -> None:
    """Raises TypeError of a plain value, which nothing can fill: mostly a misspelt option."""
    options = [name for name, one in signature(CheckpointManager).parameters.items() if one.kind is one.KEYWORD_ONLY]
    for name, value in objects.items():
        if value is None or isinstance(value, (bool, int, float, str, bytes)):
            near = nearest_name(name, options)
            meant = f"pass it in the state of save and resume: {{{name!r}: ...}}" if near is None else f"perhaps {near}"
            raise TypeError(f"CheckpointManager: got {name}={value!r}, no option, and no object to fill; {meant}")


def _check_number(where: str, **numbers: Any) -> None:
    """Raises TypeError or ValueError unless each is a whole number of at least 1, or ``None``."""
    check_counts(where, **numbers)
    for name, number in numbers.items():
        if number is not None and number < 1:
            raise WrongValueError(f"{where}: got {name}={number}, expected at least 1")
