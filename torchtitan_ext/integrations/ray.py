"""Ray Train: the checkpoints of a run inside ``train_loop_per_worker``, on any number of workers.

    def train_loop_per_worker(config):
        ...
        with RayCheckpointManager(every=100, model=model, optimizer=optimizer, data=loader) as manager:
            step = manager.resume()
            while step < config["steps"]:
                step += 1
                loss = train(step)
                manager.report_step({"loss": loss}, step=step)

Ray Train starts the loop anew, on as many workers as it has then, when a worker is lost and when
``ScalingConfig(num_workers=(min, max))`` lets it resize the job. Steps lie in Ray's directory of the run, beside the
list in which Ray keeps what was reported: Ray learns of a step once it is committed, and removes old ones by its
``CheckpointConfig``. Needs Ray 2.60 with Ray Train's second version, which is its default; nothing here imports this.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from types import TracebackType
from typing import Any, Literal

import ray.train
import torch.distributed as dist
from ray.train import Checkpoint, CheckpointConsistencyMode, CheckpointUploadMode
from ray.train.collective import broadcast_from_rank_zero

from torchtitan_ext.checkpoint import SaveResult
from torchtitan_ext.errors import NoCheckpointError, WrongValueError, check_counts
from torchtitan_ext.runs import CheckpointManager
from torchtitan_ext.storage.commit.steps import step_of

# By the name that pyarrow has for a file system: what stands before its paths in a URL.
_URL_OF = {"local": "", "s3": "s3://", "gcs": "gs://"}


class RayCheckpointManager(CheckpointManager):
    """A ``tte.CheckpointManager`` of the run that Ray Train trains: ``<storage_path>/<name>/step-<number>``.

    It is made by every worker inside ``train_loop_per_worker`` of a ``TorchTrainer``, in the same order. ``resume``,
    ``report_step`` and ``close`` are collective: every worker calls them equally often. Close it, or use ``with``.

    Args:
        every: Which steps ``report_step`` saves: multiples of it.
        on_error, fallback: As in ``tte.CheckpointManager``. With ``"warn"`` or a fallback, Ray learns of a step from
            the report of the next one that is saved, or from ``close``: only then it is known whether there is one.
        options: All others of ``tte.CheckpointManager``, and the objects that are saved and filled. ``keep`` is Ray's:
            ``RunConfig(checkpoint_config=CheckpointConfig(num_to_keep=...))``. ``signals`` need the main thread, in
            which Ray runs no loop: see ``report_step``.

    Raises:
        WrongValueError: The loop has no process group of all workers, the storage is none of a local path, S3 and GCS,
            or ``keep`` was given.
        And what ``tte.CheckpointManager`` raises.
    """

    def __init__(
        self,
        *,
        every: int | None = None,
        on_error: Literal["raise", "warn"] = "raise",
        fallback: str | None = None,
        **options: Any,
    ) -> None:
        context = ray.train.get_context()
        num_workers, num_ranks = context.get_world_size(), dist.get_world_size() if dist.is_initialized() else 1
        if num_workers != num_ranks:
            raise WrongValueError(
                f"RayCheckpointManager: {num_workers} workers run this loop, and the process group has {num_ranks} "
                "rank(s): each would take itself for the whole job; use ray.train.torch.TorchTrainer"
            )
        given = sorted({"keep", "keep_every"} & options.keys())
        if given:
            raise WrongValueError(
                f"RayCheckpointManager: got {given[0]}={options[given[0]]!r}, but a run whose steps go without Ray "
                "cannot be started again; pass RunConfig(checkpoint_config=CheckpointConfig(num_to_keep=...)) to the "
                "trainer"
            )
        try:
            storage = context.get_storage()
        except NotImplementedError:
            raise WrongValueError(
                "RayCheckpointManager: Ray's local mode (num_workers=0) has no storage; use one worker, or "
                "tte.CheckpointManager with a directory"
            ) from None
        self._files, self._folder = storage.storage_filesystem, storage.experiment_fs_path
        if self._files.type_name not in _URL_OF:
            raise WrongValueError(
                f"RayCheckpointManager: the run's storage is a {self._files.type_name!r}, expected one of "
                f"{sorted(_URL_OF)}; choose another RunConfig(storage_path=...)"
            )
        run = _URL_OF[self._files.type_name] + self._folder
        super().__init__(run, every=every, on_error=on_error, fallback=fallback, **options)
        # A damaged step stays where Ray has it in its list: Ray ends a job of which it cannot remove an old step.
        self._job = replace(self._job, sets_aside=False)
        self._is_told_late = on_error == "warn" or fallback is not None
        self._untold: tuple[dict[str, Any], int] | None = None
        """Metrics and number of a saved step of which Ray does not know yet."""
        self._known: set[str] = set()
        """The paths of the checkpoints that Ray has listed before this loop was started."""

    def resume(self, state: dict[str, Any] | None = None, *, step: int | None = None) -> int:
        """As in ``tte.CheckpointManager``: from the newest step that is whole, whether Ray knows of it or not.

        Steps that were committed when the job was lost, and not reported any more, are reported now. Collective.

        Raises:
            NoCheckpointError: Ray has checkpoints of this run, and none is a step: another program has saved them.
            WrongValueError: A ``step`` was given.
            And what ``tte.CheckpointManager.resume`` raises.
        """
        if step is not None:
            raise WrongValueError(
                f"RayCheckpointManager.resume: got step={step}, but Ray starts the loop anew after a lost worker, and "
                "the run would be set back each time; give it another RunConfig(name=...), and load the step where "
                "resume returns 0, with tte.load"
            )
        loaded = super().resume(state)
        listed = ray.train.get_all_reported_checkpoints(consistency_mode=CheckpointConsistencyMode.COMMITTED)
        self._known = {one.checkpoint.path for one in listed}
        if not loaded and self._known:
            raise NoCheckpointError(
                self.run,
                f"has no step, but Ray has {len(self._known)} checkpoint(s) of it, the last one in "
                f"{listed[-1].checkpoint.path}: load it with tte.load, or give the run another RunConfig(name=...)",
            )
        newest = max((step_of(path) or 0 for path in self._known), default=0)
        unlisted = [number for number in self.steps() if newest < number <= loaded]
        for number in broadcast_from_rank_zero(unlisted):  # in order: Ray removes what it has heard of first
            if str(self.find(number)) == self._path_of(self.run, number):
                self._tell({"step": number}, number)
                self._known.add(self._checkpoint_of(number).path)
        return loaded

    def report_step(self, metrics: dict[str, Any], *, step: int, save: bool = False) -> None:
        """Reports to Ray, and saves the step if it is due. Returns when the state may be changed.

        Ray has the metrics of a saved step together with its checkpoint, once all workers have committed it. A save
        that fails ends the loop on all workers, and Ray starts it anew as its ``FailureConfig`` says. Collective.

        Args:
            metrics: Plain values; Ray keeps those of rank 0.
            step: The number of steps that are done.
            save: Saves the step even if it is not due: the last one, or one for which
                ``ray.train.get_preemption_info()`` is not ``None``. The same on every worker.

        Raises:
            What ``tte.CheckpointManager.save`` raises.
        """
        check_counts("RayCheckpointManager.report_step", step=step)
        is_due = self.should_save(step)
        if not (is_due or save):
            # In Ray a report waits for the one before it, if it is not made in the background too.
            is_saving = self.pending is not None and not self.pending.done()
            mode = CheckpointUploadMode.ASYNC if is_saving else CheckpointUploadMode.SYNC
            ray.train.report(metrics, checkpoint_upload_mode=mode)
            return
        self._tell_late()
        self.save(step=step)
        if self.pending is None or self._is_told_late:
            self._untold = metrics, step
            if self.pending is None:
                self._tell_late()
        else:
            self._tell(metrics, step, self.pending)

    def close(self) -> None:
        """As in ``tte.CheckpointManager``; Ray knows of every step afterwards. Collective."""
        try:
            self._tell_late()
        finally:
            super().close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:  # other workers may not come to a report; ``resume`` reports the step
            self._untold = None
        super().__exit__(kind, error, traceback)

    def _tell_late(self) -> None:
        """Waits for the save that Ray is to learn of, if there is one, and reports it: without a checkpoint where
        storage refused the step, or the fallback has it."""
        if self._untold is None:
            return
        (metrics, step), self._untold = self._untold, None
        result = self.wait()
        assert result is not None, "a save without a result, please report"
        self._tell(metrics, step if result.path == self._path_of(self.run, step) else None)

    def _tell(self, metrics: dict[str, Any], step: int | None, saved: Future[SaveResult] | None = None) -> None:
        """Reports metrics and a step, if there is one that Ray has not listed, once its save is committed."""
        checkpoint = None if step is None else self._checkpoint_of(step)
        if checkpoint is not None and checkpoint.path in self._known:  # saved again: Ray would remove it as an old one
            checkpoint = None

        def committed(checkpoint: Checkpoint, name: str) -> Checkpoint:
            assert saved is not None
            saved.result()
            return checkpoint

        ray.train.report(
            metrics,
            checkpoint=checkpoint,
            checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD if saved is None else CheckpointUploadMode.ASYNC,
            checkpoint_upload_fn=None if saved is None else committed,
            delete_local_checkpoint_after_upload=False,
        )

    def _checkpoint_of(self, step: int) -> Checkpoint:
        return Checkpoint(self._path_of(self._folder, step), self._files)
