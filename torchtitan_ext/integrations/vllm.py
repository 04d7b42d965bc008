"""Weights from a trainer into vLLM: engines of its weight transfer, under the name ``torchtitan_ext``.

    trainer rank                                     vLLM worker
    TrainerEngine -- client: init, start, update --> GeneratorEngine
         \\______ transfer.meet, plan, plan.run ______/

Each worker gets its own part of each tensor, straight into its parameters where the layer is known (``vllm_targets``),
and after the first time only what changed. ``weight_patches`` gives the changes of a file to engines of vLLM that load
patches themselves. Needs vLLM; nothing here imports this module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from vllm.distributed.weight_transfer import (
    ParamMeta,
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightSource,
    WeightTransferEngine,
    WeightTransferEngineFactory,
    WeightTransferTrainerFactory,
)
from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
    materialize_full_tensor,
)
from vllm.distributed.weight_transfer.sparse_nccl_engine import SparseWeightPatch
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from torchtitan_ext.checkpoint.operation.phases import TIMEOUT_SECONDS
from torchtitan_ext.checkpoint.rules.casts import CastPolicy
from torchtitan_ext.delta import SavedChanges
from torchtitan_ext.delta.part_reads import read_tensor
from torchtitan_ext.errors import WrongValueError, check_argument
from torchtitan_ext.integrations.vllm_targets import Wanted, live_targets
from torchtitan_ext.storage.raw_tensor import DTYPES, dtype_name
from torchtitan_ext.transfer import TransferPlan, TransferResult, meet, plan_reshard
from torchtitan_ext.transforms import Transform

BACKEND = "torchtitan_ext"
"""Under this name vLLM's factories know the engines, once this module is imported."""

_MOST_POSITIONS = 2**31  # int32 in a patch


class StateSource(WeightSource):
    """The weights of a trainer as they lie on its ranks.

    Args:
        state: Tensors of any layout. An optimizer changes them in place; the tensors stay the same.
        transform: How they become the tensors that vLLM's model loads, such as ``ready("torchtitan_llama3",
            ...).inverse()``; without one they have the names of these.
        dtype: Of vLLM's floating-point tensors, such as ``torch.bfloat16`` below an fp32 trainer; by default that of
            each tensor.
    """

    def __init__(
        self, state: Mapping[str, Tensor], *, transform: Transform | None = None, dtype: torch.dtype | None = None
    ) -> None:
        self.state, self.transform, self.dtype = state, transform, dtype

    def metadata(self) -> list[ParamMeta]:
        loaded = {name: (dtype_name(tensor.dtype), tuple(tensor.shape)) for name, tensor in self.state.items()}
        if self.transform is not None:
            loaded = self.transform.targets(loaded)
        return [ParamMeta(name, self._dtype_of(DTYPES[dtype]), shape) for name, (dtype, shape) in loaded.items()]

    def _dtype_of(self, dtype: torch.dtype) -> torch.dtype:
        return self.dtype if self.dtype is not None and dtype.is_floating_point else dtype

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        if self.transform is not None or self.dtype is not None:
            raise WrongValueError(f"StateSource: transform= and dtype= are for the backend {BACKEND!r} alone")
        for name, tensor in self.state.items():
            yield name, materialize_full_tensor(tensor)


@dataclass
class GeneratorInitInfo(WeightTransferInitInfo):
    """What the trainer tells each worker once: where they meet, how they plan, and what will come."""

    address: str
    num_trainer_ranks: int
    num_workers: int
    group_backend: str
    timeout_seconds: float
    plan: dict[str, Any]
    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]


@dataclass
class GeneratorUpdateInfo(WeightTransferUpdateInfo):
    """Which version comes."""

    version: int


@dataclass(kw_only=True)
class TrainerEngineInfo(TrainerInitInfo):
    """What ``WeightTransferTrainerFactory.trainer_init`` needs for a ``TrainerEngine``; ``rank`` is the trainer's.

    Attributes:
        address: ``"host:port"``, on the host of trainer rank 0, which starts a store there.
        num_trainer_ranks, num_workers: Of the trainer; of vLLM, over all its replicas (data times tensor parallel).
        deltas: Whether only what changed is sent after the first time. Takes a copy of what is sent in host memory.
        group: The trainer's ranks; the default group if left out.
        group_backend: As in ``transfer.meet``.
        timeout_seconds: How long ranks wait for each other.
    """

    backend: ClassVar[str] = BACKEND

    address: str
    num_trainer_ranks: int
    num_workers: int
    deltas: bool = True
    group: dist.ProcessGroup | None = None
    group_backend: str = "gloo"
    timeout_seconds: float = TIMEOUT_SECONDS


class GeneratorEngine(WeightTransferEngine[GeneratorInitInfo, GeneratorUpdateInfo]):
    """The side of a vLLM worker. Tensors of layers that are not known are held whole, and go through ``load_weights``.

    Attributes:
        plan: The transfer, once ``init_transfer_engine`` has run; ``plan.version`` is the version of the weights.
        whole: Tensors that ``load_weights`` takes; they stay on the worker's device, in their full size.
    """

    init_info_cls = GeneratorInitInfo
    update_info_cls = GeneratorUpdateInfo
    supports_draft_weight_update = False

    plan: TransferPlan | None = None
    whole: dict[str, Tensor]

    def targets(self, wanted: Mapping[str, Wanted]) -> dict[str, Any]:
        """Views of the worker's parameters that are filled in place, by names of the checkpoint; to be overridden for
        other layers. Each states the box that it is, as torch's ``CheckpointableTensor`` does."""
        return live_targets(self.model, wanted)

    def init_transfer_engine(self, init_info: GeneratorInitInfo) -> None:
        parallel = self.parallel_config
        if parallel.pipeline_parallel_size != 1:
            raise WrongValueError("GeneratorEngine: got pipeline_parallel_size > 1, expected 1")
        described = zip(init_info.names, init_info.dtype_names, init_info.shapes, strict=True)
        wanted = {name: Wanted(DTYPES[dtype], tuple(shape)) for name, dtype, shape in described}
        filled = self.targets(wanted)
        self.whole = {
            name: torch.empty(of.shape, dtype=of.dtype, device=self.device)
            for name, of in wanted.items()
            if name not in filled
        }
        group = meet(
            init_info.address,
            job="generator",
            rank=parallel.data_parallel_index * parallel.world_size + parallel.rank,
            jobs={"trainer": init_info.num_trainer_ranks, "generator": init_info.num_workers},
            backend=init_info.group_backend,
            timeout_seconds=init_info.timeout_seconds,
        )
        target = {**filled, **self.whole}
        self.plan = _planned(None, target, group, init_info.plan, init_info.timeout_seconds)

    def start_weight_update(self) -> None:
        """Nothing: weights are changed in place."""

    def finish_weight_update(self) -> None:
        """Nothing: ``receive_weights`` leaves nothing behind."""

    def receive_weights(self, update_info: GeneratorUpdateInfo) -> None:
        if self.plan is None:
            raise WrongValueError("GeneratorEngine: call init_transfer_engine() first")
        self.plan.run()
        if self.whole:
            self._load_whole()

    def shutdown(self) -> None:
        self.plan, self.whole = None, {}

    def _load_whole(self) -> None:
        model: Any = self.model
        with disable_mtp_completeness_check():
            initialize_layerwise_reload(model)
            model.load_weights((name, tensor) for name, tensor in self.whole.items())
            finalize_layerwise_reload(model, self.model_config)


class TrainerEngine(TrainerWeightTransferEngine[TrainerEngineInfo]):
    """The side of the trainer, on each of its ranks; rank 0 talks to vLLM's client."""

    init_info_cls = TrainerEngineInfo

    plan: TransferPlan
    _info: TrainerEngineInfo
    _version = -1
    _has_sent = False

    @classmethod
    def trainer_init(
        cls, init_info: TrainerEngineInfo, *, client: VLLMWeightSyncClient, source: WeightSource | None = None
    ) -> TrainerEngine:
        check_argument("trainer_init", "source", source, StateSource, "a StateSource")
        assert isinstance(source, StateSource)
        engine = cls(client=client, source=source, is_sender=init_info.is_sender)
        engine._info = init_info
        timeout_seconds = init_info.timeout_seconds
        with engine._while_workers(client.init_weight_transfer_engine, engine._info_of_workers(source)):
            group = meet(
                init_info.address,
                job="trainer",
                rank=init_info.rank,
                jobs={"trainer": init_info.num_trainer_ranks, "generator": init_info.num_workers},
                backend=init_info.group_backend,
                timeout_seconds=timeout_seconds,
            )
            engine.plan = _planned(source.state, None, group, engine._options_of(source), timeout_seconds)
        return engine

    def send_weights(self, version: int | None = None) -> TransferResult:
        """Brings the weights as they are now to all workers. Collective over the trainer's ranks.

        The first time, and after an error, all of them; else what changed, where ``deltas`` says so.

        Args:
            version: Its number, such as the training step; one more than the last one by default.

        Raises:
            StateRefusedError, TransferFailedError, LostRankError: As ``TransferPlan.run``.
        """
        version = self._version + 1 if version is None else version
        changed_only, self._has_sent = self._has_sent and self._info.deltas, False
        if self.is_sender:
            self.client.start_weight_update()
        with self._while_workers(self.client.update_weights, asdict(GeneratorUpdateInfo(version))):
            result = self.plan.run(version=version, changed_only=changed_only)
        if self.is_sender:
            self.client.finish_weight_update()
        self._has_sent, self._version = True, version
        return result

    def shutdown(self) -> None:
        self._has_sent = False

    def _options_of(self, source: StateSource) -> dict[str, Any]:
        transform = None if source.transform is None else source.transform.to_json()
        return {"transform": transform, "casts": source.dtype is not None, "keep_sent": self._info.deltas}

    def _info_of_workers(self, source: StateSource) -> dict[str, Any]:
        metadata = source.metadata()
        return asdict(
            GeneratorInitInfo(
                address=self._info.address,
                num_trainer_ranks=self._info.num_trainer_ranks,
                num_workers=self._info.num_workers,
                group_backend=self._info.group_backend,
                timeout_seconds=self._info.timeout_seconds,
                plan=self._options_of(source),
                names=[of.name for of in metadata],
                dtype_names=[dtype_name(of.dtype) for of in metadata],
                shapes=[list(of.shape) for of in metadata],
            )
        )

    @contextmanager
    def _while_workers(self, call: Callable[[dict[str, Any]], None], info: dict[str, Any]) -> Iterator[None]:
        """Has the workers take part in what is done here; the call returns when they have."""
        if not self.is_sender:
            yield
            return
        executor = ThreadPoolExecutor(max_workers=1)
        try:
            called = executor.submit(call, info)
            try:
                yield
            except Exception as error:
                if called.done() and (of_workers := called.exception()) is not None:
                    raise error from of_workers
                raise
            called.result()
        finally:
            executor.shutdown(wait=False)


def _planned(
    source: Mapping[str, Tensor] | None,
    target: Mapping[str, Any] | None,
    group: dist.ProcessGroup,
    options: Mapping[str, Any],
    timeout_seconds: float,
) -> TransferPlan:
    """``options`` are the same on both sides, and plain enough for JSON."""
    transform = None if options["transform"] is None else Transform.from_json(options["transform"])
    cast: CastPolicy = "allow" if options["casts"] else "exact"
    keep_sent = options["keep_sent"]
    return plan_reshard(
        source, target, group, transform=transform, cast=cast, keep_sent=keep_sent, timeout_seconds=timeout_seconds
    )


def weight_patches(changes: SavedChanges, device: torch.device | str = "cpu") -> list[SparseWeightPatch]:
    """The changes of a file as patches for vLLM's ``sparse_nccl`` engine, which loads them itself. Not collective.

    Positions are int32, of the flat tensor of the checkpoint; values are 1-d, of its dtype. Tensors of which a box
    changed as a whole are given by positions too. vLLM takes patches of floating-point tensors only, without NaNs.

    Raises:
        WrongValueError: A tensor has more elements than int32 can count.
        DamagedCheckpointError: The file was written over or cut since ``delta.load``.
    """
    patches = []
    for fqn in changes.changed_keys:
        total = changes.totals[fqn]
        if int(np.prod(total.shape, dtype=np.int64)) > _MOST_POSITIONS:
            raise WrongValueError(f"weight_patches: {fqn} has more than 2**31 elements, which patches cannot count")
        positions, new = read_tensor(changes, fqn)
        indices = torch.from_numpy(positions.astype(np.int32))
        values = torch.from_numpy(new).view(DTYPES[total.dtype])
        patches.append(SparseWeightPatch(fqn, indices.to(device), values.to(device), total.shape))
    return patches


class WorkerExtension:
    """Has vLLM import this module in its workers: ``worker_extension_cls="torchtitan_ext.integrations.vllm.``
    ``WorkerExtension"``."""


WeightTransferEngineFactory.register_engine(BACKEND, GeneratorEngine)
WeightTransferTrainerFactory.register_engine(BACKEND, TrainerEngine)
