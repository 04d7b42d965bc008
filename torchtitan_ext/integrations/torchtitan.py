"""torchtitan's own trainer on another number of ranks, switched on by two of its config overrides.

    --override.imports torchtitan_ext.integrations.torchtitan.elastic_checkpoint \
                       'torchtitan_ext.integrations.torchtitan.elastic_data={"num_shards": 48}'

The first saves and loads with this package; the second reads the text data by virtual shards, from where torchtitan's
own data loader stood if need be. Needs torchtitan 0.3.0, whose ``config/override.py`` says what an override is; nothing
here imports it.
"""

from __future__ import annotations

import fnmatch
import os
import sys
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse
from torch.utils.data import DataLoader

from torchtitan_ext import runs
from torchtitan_ext.checkpoint import CpuStager, LoadPlanner, SaveResult, load
from torchtitan_ext.checkpoint.operation.phases import TIMEOUT_SECONDS
from torchtitan_ext.checkpoint.operation.save_job import OnStorageError, SaveJob
from torchtitan_ext.checkpoint.operation.saves import Call, save_now
from torchtitan_ext.checkpoint.rules.casts import CastPolicy
from torchtitan_ext.checkpoint.rules.policy import Action, Strict
from torchtitan_ext.elastic import ElasticDataLoader, ElasticPolicy
from torchtitan_ext.errors import (
    AbsentRunError,
    MissingStateError,
    NoCheckpointError,
    OtherTorchtitanError,
    Problem,
    StateRefusedError,
    WrongValueError,
    refusal,
)
from torchtitan_ext.integrations.torchtitan_flags import Options, in_flags, with_excluded
from torchtitan_ext.integrations.torchtitan_train_state import RunTrainState
from torchtitan_ext.ranks.signal_inbox import keeping_worker
from torchtitan_ext.storage.commit.steps import STEP, has_finished, step_of
from torchtitan_ext.storage.location import is_plain_url
from torchtitan_ext.storage.weights.writer import SafetensorsWriter

try:
    from torchtitan.components.checkpointer import DATALOADER, MODEL, TRAIN_STATE, AsyncMode, CheckpointManager
    from torchtitan.config.override import derive, override
    from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
    from torchtitan.tools import filesystem
    from torchtitan.tools.logging import logger
    from torchtitan.tools.utils import GarbageCollection

    from torchtitan_ext.integrations.torchtitan_text_data import ElasticTextDataLoader
except ImportError as error:
    if not str(error.name).startswith("torchtitan."):
        raise
    raise OtherTorchtitanError(
        f"torchtitan_ext.integrations.torchtitan knows torchtitan 0.3.0, and this is another ({error}); use 0.3.0 with "
        "these overrides, or tte.install() with this one"
    ) from error

_TEXT_LOADERS = (ElasticTextDataLoader, HuggingFaceTextDataLoader)

# What elastic_data saves beside torchtitan's own entries, which torchtitan's loader reads.
_OF_ELASTIC_DATA = (f"{DATALOADER}.loader", f"{DATALOADER}.shard_*")


class ElasticCheckpointManager(CheckpointManager):
    """torchtitan's checkpoint manager, on a ``tte.CheckpointManager`` of the run and ``tte.load``.

    The run's manager saves the steps, keeps the pending save, removes old steps and finds the step to load. Names of
    folders and intervals stay torchtitan's; so do the last save, which is no step to go on from, and quantised weights
    of Hugging Face. A load that cannot succeed is refused with one report before anything is changed; a load that
    succeeds logs its report.
    """

    folder: str
    _run: runs.CheckpointManager

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        policy: dict[str, Action] = field(default_factory=dict)
        """What to do with a component, or with a glob of flat keys: see ``ElasticPolicy``."""

        strict: Strict = "error"
        """What to do about missing and unexpected keys."""

        cast: CastPolicy = "exact"
        """Dtype changes: see ``LoadPlanner``. ``allow`` takes float32 into ``training.dtype=bfloat16``."""

        timeout_seconds: float = TIMEOUT_SECONDS
        """How long a rank waits for the others in each phase of a save or load."""

        on_error: Literal["raise", "warn"] = "raise"
        """``warn``: a save that storage refuses is warned of, and training goes on; see ``tte.CheckpointManager``. The
        last save of a run is raised all the same: no later one makes up for it."""

        fallback: str | None = None
        """Another directory: in a folder of this run it takes what storage refuses, and loads look there too."""

        retries: int = 0
        """How often a save that storage refused is tried again before that."""

        max_failures: int = 3
        """Which failure in a row is raised all the same."""

        signals: list[str] = field(default_factory=list)
        """Signals at which all ranks save the same step and exit: see ``tte.CheckpointManager``."""

        grace_seconds: float | None = None
        """How long the job lives after such a signal."""

        exit_code: int = 0
        """With which it exits then."""

        def changed_options(self) -> dict[str, Any]:
            """The options of ``elastic_checkpoint`` that are not the defaults."""
            options = {"policy": {}, "strict": "error", "cast": "exact", "timeout_seconds": TIMEOUT_SECONDS}
            options |= asdict(OnStorageError()) | {"signals": [], "grace_seconds": None, "exit_code": 0}
            own = {name: getattr(self, name) for name in options}
            return {name: value for name, value in own.items() if value != options[name]}

    def __init__(self, config: Config, **components: Any) -> None:
        super().__init__(config, **components)
        if not self.enable:
            return
        self._config = config
        self.policy = ElasticPolicy(config.policy, strict=config.strict)
        self._train_state = RunTrainState(self.states[TRAIN_STATE], _num_token_ranks(self.states))
        self._on_storage_error = OnStorageError(config.on_error, config.fallback, config.retries, config.max_failures)
        self._on_storage_error.check("elastic_checkpoint")
        self._is_refused = self._is_last = False
        """Whether storage refused the last save that has ended; whether the last save of the run is made."""
        if self.async_mode == AsyncMode.ASYNC_WITH_PINNED_MEM:
            self.stager = CpuStager()  # torchtitan, too, keeps pinned memory
        self._run = runs.CheckpointManager(
            self.folder,
            keep=None if is_plain_url(self.folder) else self.keep_latest_k or None,
            asynchronous=self.async_mode != AsyncMode.DISABLED,
            stager=self.stager,
            step_pattern=STEP.text,
            process_group=self.pg,
            timeout_seconds=config.timeout_seconds,
            signals=config.signals,
            grace_seconds=config.grace_seconds,
            **asdict(self._on_storage_error),
        )
        loader = self.states[DATALOADER]
        if config.signals and isinstance(loader, DataLoader):  # torchtitan's own: it starts them at its first batch
            loader.worker_init_fn = keeping_worker(loader.worker_init_fn)
        _warn_of_data_not_replaced(self.states)

    @torch.no_grad()
    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: AsyncMode,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
    ) -> Future[Any] | AsyncSaveResponse | None:
        """Collective, as torchtitan calls it; returns what it expects in each mode. Asynchronous saves are staged."""
        if to_hf and async_mode != AsyncMode.DISABLED:  # torchtitan saves its last step alone in this format
            return super().dcp_save(state_dict, checkpoint_id, async_mode, enable_garbage_collection, to_hf)
        self._latest_id = checkpoint_id
        if self._is_last:
            self._log_refusal(self._saved_last(state_dict, checkpoint_id, to_hf))
        else:
            self._run.save(self._with_run_tokens(state_dict), step_of(checkpoint_id))
            saved: Future[Any] | None = self._run.pending
            if saved is not None:
                if async_mode == AsyncMode.ASYNC:
                    return saved
                staged: Future[None] = Future()
                staged.set_result(None)
                return AsyncSaveResponse(staging_completion=staged, upload_completion=saved)
            self._log_refusal(self._run.wait())
        if enable_garbage_collection:
            GarbageCollection.collect("GC collection invoked by checkpointer.")
        return None

    def _saved_last(self, state_dict: dict[str, Any], path: str, to_hf: bool) -> SaveResult:
        """Saves what torchtitan saves last: the seed of a run, all of a step, or a model to be used elsewhere.

        Removes no step, and raises what storage refuses, whatever ``on_error`` says: no later save makes up for it.
        """
        writer: SafetensorsWriter | None = None
        if to_hf:
            assert self.sd_adapter is not None, "sd_adapter is required for to_hf=True"
            state_dict = self.sd_adapter.to_hf(state_dict)
            writer = SafetensorsWriter(path, file_numbers=self.sd_adapter.fqn_to_index_mapping)
        job = SaveJob(path, writer, on_storage_error=replace(self._on_storage_error, on_error="raise"))
        call = Call("save", timeout_seconds=self._config.timeout_seconds)
        return save_now(self._with_run_tokens(state_dict), job, call)

    def _log_refusal(self, result: SaveResult | None) -> None:
        """Logs what storage refused: torchtitan's own log takes every save that raises nothing for finished."""
        assert result is not None, "a save without a result, please report"
        self._is_refused = bool(result.error)
        if self._is_refused:
            logger.warning(f"{self._latest_id}: {result.error}")
        elif result.path == self._on_storage_error.place_of(self._latest_id):
            logger.warning(f"{self._latest_id}: storage refused this save; it is in {result.path}")

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        """As in torchtitan; false, too, where storage refused the save. The trainer calls it at the end of each step.

        Raises:
            SystemExit: A signal asked for the end, and the step that all ranks agreed on is saved.
        """
        is_saved = super()._save(curr_step, last_step)
        if self._run.should_stop and not last_step:
            self.maybe_wait_for_saving()
            trainer = self.states[TRAIN_STATE]
            (trainer if hasattr(trainer, "close") else self).close()  # a trainer closes its manager too
            raise SystemExit(self._config.exit_code)
        return is_saved and (self.save_future is not None or not self._is_refused)

    def _should_save(self, curr_step: int, last_step: bool = False) -> bool:
        """As in torchtitan; and the step at which ranks stop, if it is to be saved."""
        is_asked, is_due = self._run.should_save(curr_step), super()._should_save(curr_step, last_step)
        if not self._run.should_stop or last_step:
            return is_due
        return is_asked and not self.load_only

    def _save_last_step(self, curr_step: int) -> None:
        """As in torchtitan; see ``_saved_last``."""
        self._is_last = True
        try:
            super()._save_last_step(curr_step)
        finally:
            self._is_last = False

    def _wait_for_saving(self) -> None:
        self.save_future = None  # an error is raised once
        self._log_refusal(self._run.wait())

    def _load(self, step: int = -1) -> bool:
        """As in torchtitan, of the step that the run's manager finds, also in the fallback. Collective.

        Raises:
            AbsentRunError: Only the fallback has steps, and ``load_step`` names none. The same on every rank.
        """
        own = self.folder
        try:
            path = self._run.find(None if step == -1 else step)
        except NoCheckpointError:
            path = None  # torchtitan says which folder lacks the step
        except AbsentRunError as error:
            raise replace(error, option="--checkpoint.load_step=") from None
        exported = self._find_load_step(own) if step == -1 else -1
        if path is not None:
            self.folder, step = os.path.dirname(path), step_of(path) or 0
            if exported > step and not has_finished(Path(self._create_checkpoint_id(exported, own))):
                self.folder, step = own, exported  # the last save of a run, for the hub: no run goes on from it
        try:
            return super()._load(step)
        finally:
            self.folder = own

    def dcp_load(self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool) -> None:
        """Collective, as torchtitan calls it; raises what ``tte.load`` raises."""
        if from_hf:
            self._load_hf(state_dict, checkpoint_id, from_quantized)
            return
        others = [name for name in self.states if name != MODEL]
        asked = [name for name in others if name in state_dict]
        excluded = self.exclude_from_loading if asked else []
        is_elastic = isinstance(self.states[DATALOADER], ElasticDataLoader)
        planner = _StepPlanner(
            asked, others, checkpoint_id, unused=() if is_elastic else _OF_ELASTIC_DATA, cast=self._config.cast
        )
        timeout_seconds = self._config.timeout_seconds
        values = self._with_run_tokens(state_dict)
        try:
            report = load(values, checkpoint_id, planner=planner, policy=self.policy, timeout_seconds=timeout_seconds)
        except StateRefusedError as error:
            raise in_flags(error, self._options(), excluded) from None
        logger.info(f"{checkpoint_id}: {with_excluded(report, excluded)}")
        if MODEL in self.states:
            self.states[MODEL].load_state_dict(values)
        if TRAIN_STATE in state_dict and self._train_state.counted_by_rank is not None:
            self._count_for_the_run(checkpoint_id, self._train_state.counted_by_rank)

    def _load_hf(self, state_dict: dict[str, Any], checkpoint_id: str, from_quantized: bool) -> None:
        if from_quantized or filesystem.is_remote(checkpoint_id):
            super().dcp_load(state_dict, checkpoint_id, True, from_quantized)
            return
        assert self.sd_adapter is not None, "sd_adapter is required for from_hf=True"
        weights = self.sd_adapter.to_hf(state_dict)
        planner, timeout_seconds = LoadPlanner(cast=self._config.cast), self._config.timeout_seconds
        try:
            load(weights, checkpoint_id, planner=planner, timeout_seconds=timeout_seconds)
        except StateRefusedError as error:
            raise in_flags(error, self._options(), []) from None
        self.states[MODEL].load_state_dict(self.sd_adapter.from_hf(weights))

    def _with_run_tokens(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        return {**state_dict, TRAIN_STATE: self._train_state} if TRAIN_STATE in state_dict else state_dict

    def _count_for_the_run(self, checkpoint_id: str, rank_tokens: int) -> None:
        """Multiplies one rank's count by the number of ranks that saved, from the saved data loader. Collective."""
        saved: dict[str, Any] = {"world_size": 0, "loader": ()}
        planner = LoadPlanner(allow_partial_load=True, allow_unclaimed=["*"])
        timeout_seconds = self._config.timeout_seconds
        try:
            load({DATALOADER: saved}, checkpoint_id, planner=planner, timeout_seconds=timeout_seconds)
        except MissingStateError:
            logger.warning(f"{checkpoint_id} does not say how many ranks saved it: tokens are counted as of these")
        dp_size = saved["loader"][0]["dp_size"] if saved["loader"] else saved["world_size"] or _dp_size(self.states)
        # The checkpoint does not have the number of ranks that share a sequence: take this run's.
        self._train_state.set_run_tokens(rank_tokens * dp_size * _num_token_ranks(self.states) // _dp_size(self.states))

    def _close(self) -> None:
        if "_run" in vars(self):  # else the options were wrong
            self._run.__exit__(*sys.exc_info())  # an error of the training is not hidden by one of the last save
        super()._close()

    def _options(self) -> Options:
        loader = self.states[DATALOADER]
        return Options(self._config.changed_options(), _dp_size(self.states), type(loader) in _TEXT_LOADERS)

    def _purge_stale_checkpoints(self) -> None:
        """Leaves steps at a URL to torchtitan; others are removed by the save itself, once it is committed."""
        if is_plain_url(self.folder) and not self._is_refused:  # else too few whole steps would be left
            super()._purge_stale_checkpoints()


class _StepPlanner(LoadPlanner):
    """Refuses to go on with a run from a model alone, whatever the policy: without its step the run would overwrite
    the steps that it has.

    ``asked`` are the components that are loaded beside the model, ``others`` all of a whole step but the model,
    ``unused`` globs of saved entries that this run does not use.
    """

    def __init__(
        self, asked: Sequence[str], others: Collection[str], path: str, *, unused: Sequence[str], cast: CastPolicy
    ) -> None:
        super().__init__(cast=cast)
        self._asked = asked
        self._others = others
        self._path = path
        self._unused = unused

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        saved = self.metadata.state_dict_metadata
        if self._asked and not any(key.split(".")[0] in self._others for key in saved):
            detail = (
                f"{self._path} has a model and nothing else (last_save_model_only): training cannot go on from it; "
                "pass --checkpoint.load_step of a step that was saved whole, or begin a new run in another "
                "--checkpoint.folder with --checkpoint.initial_load_path"
            )
            raise refusal("load", [Problem("missing_key", self._asked[0], detail)])
        policy, unused = self.rules.policy, [glob for glob in self._unused if fnmatch.filter(saved, glob)]
        if policy is not None and unused:
            actions: dict[str, Action] = {**policy.actions, **dict.fromkeys(unused, "omit")}
            policy = policy.with_actions(actions)
            self.rules = replace(self.rules, policy=policy)
        return super().create_global_plan(global_plan)


def _dp_size(states: dict[str, Any]) -> int:
    """The data-parallel size of this run: as its data loader says (ours, torchtitan's), or as the trainer does."""
    loader = states[DATALOADER]
    sizes = [getattr(loader, name, None) for name in ("dp_size", "dp_world_size")]
    told = [size for size in sizes if isinstance(size, int)]
    dims = getattr(states[TRAIN_STATE], "parallel_dims", None)
    if told:
        return told[0]
    if dims is None:
        raise WrongValueError(
            f"elastic_checkpoint: a data loader of class {type(loader).__name__} does not say how many data-parallel "
            "ranks there are; give it an attribute dp_world_size"
        )
    return int(dims.dp_replicate * dims.dp_shard)


def _num_token_ranks(states: dict[str, Any]) -> int:
    """The number of ranks that see different tokens: the size of torchtitan's loss mesh."""
    dims = getattr(states[TRAIN_STATE], "parallel_dims", None)
    return _dp_size(states) if dims is None else int(dims.dp_replicate * dims.dp_shard * dims.cp)


def _warn_of_data_not_replaced(states: dict[str, Any]) -> None:
    """torchtitan itself warns only where none of several overrides has replaced anything."""
    config, loader = getattr(states[TRAIN_STATE], "config", None), states[DATALOADER]
    imports = [] if config is None else config.override.imports
    names = [entry if isinstance(entry, str) else entry[0] for entry in imports]
    if f"{__name__}.elastic_data" in names and not isinstance(loader, ElasticDataLoader):
        logger.warning(
            f"elastic_data has replaced nothing: the data loader is a {type(loader).__name__}, expected a "
            "HuggingFaceTextDataLoader; it goes on with as many data-parallel ranks as saved, no other number"
        )


@override(target=CheckpointManager.Config, exact=True, description="checkpoints that load on any number of ranks")
def elastic_checkpoint(config: CheckpointManager.Config, **options: Any) -> ElasticCheckpointManager.Config:
    """Options: ``policy``, ``strict``, ``cast``, ``timeout_seconds``, ``on_error``, ``fallback``, ``retries``,
    ``max_failures``, ``signals``, ``grace_seconds``, ``exit_code``."""
    return derive(config, ElasticCheckpointManager.Config, **options)


@override(target=HuggingFaceTextDataLoader.Config, exact=True, fqns=["dataloader"], description="data by shards")
def elastic_data(config: HuggingFaceTextDataLoader.Config, **options: Any) -> ElasticTextDataLoader.Config:
    """Options: ``num_shards``."""
    return derive(config, ElasticTextDataLoader.Config, **options)
