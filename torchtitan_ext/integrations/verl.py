"""Weights from verl's actor to its rollout: a checkpoint engine under the name ``torchtitan_ext``.

    actor_rollout_ref.rollout.checkpoint_engine.backend=torchtitan_ext
    actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=torchtitan_ext.integrations.verl

verl gives each actor rank all weights whole, one after the other, and wants them so on each rollout worker. So each
actor rank keeps a share of them in host memory, of which only what changed is sent after the first time; each rollout
worker keeps all of them in host memory. Needs verl; nothing here imports this module.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator
from typing import Any, NamedTuple

import ray
import torch
from torch import Tensor
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry
from verl.utils.net_utils import get_free_port
from verl.workers.rollout.utils import ensure_async_iterator

from torchtitan_ext.checkpoint.operation.phases import TIMEOUT_SECONDS
from torchtitan_ext.errors import WrongValueError
from torchtitan_ext.transfer import TransferPlan, meet, plan_reshard
from torchtitan_ext.transfer.phases import transfer_phases

BACKEND = "torchtitan_ext"


class _Weight(NamedTuple):
    """What a rollout worker must know of a weight."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


@CheckpointEngineRegistry.register(BACKEND)
class TransferCheckpointEngine(CheckpointEngine):
    """verl's ``CheckpointEngine`` over transfers and deltas.

    Args:
        bucket_size: Of verl's own buckets; not used.
        is_master: Whether this is rank 0 of the actor, which starts the store where all meet.
        deltas: Whether only what changed is sent after the first time; the same everywhere. Takes another copy of an
            actor rank's share in host memory.
        timeout_seconds: How long ranks wait for each other.
    """

    wire_format = "named_tensors"

    _token = ""
    _members: list[str]
    _plan: TransferPlan | None
    _described: list[_Weight]
    _has_sent: bool
    _version: int

    def __init__(
        self,
        bucket_size: int = 0,
        is_master: bool = False,
        deltas: bool = True,
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> None:
        self.is_master = is_master
        self.deltas = deltas
        self.timeout_seconds = timeout_seconds
        self._address = ""
        self._group: Any = None
        self._state: dict[str, Tensor] = {}
        self._forget()

    def prepare(self) -> dict[str, Any]:
        """Who this worker is, by a new name where the last time was none or failed, so that all meet again."""
        if not self._members:
            self._token = uuid.uuid4().hex
        if self.is_master and not self._address:
            host = ray.util.get_node_ip_address().strip("[]")
            self._address = f"{host}:{get_free_port(host)[0]}"
        return {"token": self._token, "address": self._address}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        common = {
            "address": metadata[0]["address"],
            "members": [of_worker["token"] for of_worker in metadata],
            "jobs": {"actor": actor_wg_world_size, "rollout": rollout_world_size},
        }
        sides = []
        for job, size in common["jobs"].items():
            of_side = {name: [value] * size for name, value in common.items()}
            sides.append({**of_side, "job": [job] * size, "rank": list(range(size))})
        return sides[0], sides[1]

    def init_process_group(
        self, *, address: str, members: list[str], jobs: dict[str, int], job: str, rank: int
    ) -> None:
        """Meets the other workers, unless these are those of the last time, and all went well then."""
        if members == self._members:
            return
        self._forget()
        self._group = meet(address, job=job, rank=rank, jobs=jobs, timeout_seconds=self.timeout_seconds)
        self._members, self._rank, self._num_actors = members, rank, jobs["actor"]

    def finalize(self) -> None:
        """Nothing: the group and the plan stay for the next time."""

    @torch.no_grad()
    async def send_weights(self, weights: Any, global_steps: int | None = None) -> dict[str, float]:
        """Takes this rank's share of the weights, and sends it. Returns the bytes that this rank has sent."""
        described, held = [], [0] * self._num_actors
        own: dict[str, Tensor] = {}
        async for name, weight in ensure_async_iterator(weights):
            described.append(_Weight(name, weight.dtype, tuple(weight.shape)))
            holder = held.index(min(held))
            held[holder] += weight.nbytes
            if holder == self._rank:
                kept = self._state.get(name)
                if kept is None or (kept.dtype, kept.shape) != (weight.dtype, weight.shape):
                    kept = torch.empty(weight.shape, dtype=weight.dtype, device="cpu")
                own[name] = kept.copy_(weight)
        self._state = own
        num_bytes = await asyncio.to_thread(self._send, described)
        return {"checkpoint_engine/bytes_sent": float(num_bytes)}

    @torch.no_grad()
    async def receive_weights(self, global_steps: int | None = None) -> AsyncGenerator[tuple[str, Tensor], None]:
        """Yields all weights, on the accelerator where there is one."""
        await asyncio.to_thread(self._receive)
        device = torch.accelerator.current_accelerator() or torch.device("cpu")
        for name, weight in self._state.items():
            yield name, weight.to(device)

    def _send(self, described: list[_Weight]) -> int:
        members, self._members = self._members, []
        plan = self._plan_for(self._agreed(described), is_source=True)
        changed_only, self._has_sent = self._has_sent and self.deltas, False
        self._version += 1
        result = plan.run(version=self._version, changed_only=changed_only)
        self._has_sent, self._members = True, members
        return result.bytes_sent

    def _receive(self) -> None:
        members, self._members = self._members, []
        self._plan_for(self._agreed(None), is_source=False).run()
        self._members = members

    def _agreed(self, described: list[_Weight] | None) -> list[_Weight]:
        """What the actor's ranks will send, on all ranks. Collective."""
        with transfer_phases(self._group, self.timeout_seconds) as phases:
            found = phases.on_all("weights", lambda: described, doing="ranks named the weights; nothing was changed")
        of_actors = [of_rank for of_rank in found if of_rank is not None]
        if any(of_rank != of_actors[0] for of_rank in of_actors):
            raise WrongValueError(
                "send_weights: got other names, dtypes or shapes on some actor ranks, expected the same"
            )
        return of_actors[0]

    def _plan_for(self, described: list[_Weight], *, is_source: bool) -> TransferPlan:
        """The plan of the last time, where these are the same weights. Collective."""
        if self._plan is None or described != self._described:
            self._has_sent = False
            if not is_source:
                self._state = {of.name: torch.empty(of.shape, dtype=of.dtype, device="cpu") for of in described}
            source, target = (self._state, None) if is_source else (None, self._state)
            self._plan = plan_reshard(
                source, target, self._group, keep_sent=self.deltas, timeout_seconds=self.timeout_seconds
            )
            self._described = described
        return self._plan

    def _forget(self) -> None:
        """Makes this worker one that has met nobody."""
        self._members, self._described = [], []
        self._plan, self._has_sent = None, False
        self._version = -1
