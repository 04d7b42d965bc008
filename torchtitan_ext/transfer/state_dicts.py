"""Fills one state dict from another one, of any other layout, through the memory of the ranks."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import NoneType
from typing import get_args

import torch.distributed as dist

from torchtitan_ext import ops
from torchtitan_ext.checkpoint.operation.arguments import check_seconds
from torchtitan_ext.checkpoint.operation.phases import TIMEOUT_SECONDS, checking_arguments
from torchtitan_ext.checkpoint.rules.casts import CastPolicy
from torchtitan_ext.checkpoint.rules.policy import Source
from torchtitan_ext.checkpoint.tables.key_table import host_digest
from torchtitan_ext.errors import check_argument, check_counts
from torchtitan_ext.layout.layout import ShardOrder
from torchtitan_ext.ranks.exchange import check_usable
from torchtitan_ext.transfer.endpoint import Endpoint, State, choose_device, describe_endpoint, shared_memory_problems
from torchtitan_ext.transfer.plan import TransferPlan, TransferResult, transfer_phases
from torchtitan_ext.transfer.planning import Offer, Replicas, plan_for_all
from torchtitan_ext.transforms import Transform


def reshard(
    source: State,
    target: State,
    group: dist.ProcessGroup | None = None,
    *,
    cast: CastPolicy = "exact",
    rename: Mapping[str, str] | None = None,
    transform: Transform | None = None,
    source_layouts: Mapping[str, ShardOrder] | None = None,
    target_layouts: Mapping[str, ShardOrder] | None = None,
    version: int | None = None,
    verify: bool = False,
    replicas: Replicas = "equal",
    bucket_bytes: int = ops.DEFAULT_BUCKET_BYTES,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> TransferResult:
    """Fills the target with what the source holds, in place, whatever their layouts: as a save and a load, bit for bit.

    ``plan_reshard`` and one ``run``, whose arguments and errors these are.
    """
    plan = plan_reshard(
        source,
        target,
        group,
        cast=cast,
        rename=rename,
        transform=transform,
        source_layouts=source_layouts,
        target_layouts=target_layouts,
        replicas=replicas,
        bucket_bytes=bucket_bytes,
        timeout_seconds=timeout_seconds,
    )
    return plan.run(version=version, verify=verify)


def plan_reshard(
    source: State,
    target: State,
    group: dist.ProcessGroup | None = None,
    *,
    cast: CastPolicy = "exact",
    rename: Mapping[str, str] | None = None,
    transform: Transform | None = None,
    source_layouts: Mapping[str, ShardOrder] | None = None,
    target_layouts: Mapping[str, ShardOrder] | None = None,
    replicas: Replicas = "equal",
    bucket_bytes: int = ops.DEFAULT_BUCKET_BYTES,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> TransferPlan:
    """Plans the way of each part of the source into the target, to be run as often as wanted. Collective.

    Each rank gets each element that it wants once: from itself where it holds it, else from the nearest rank that does,
    of these from the one that sends least.

    Args:
        source: What this rank holds: a nested state dict of DTensors, plain tensors (all of the tensor on each rank
            that has the key), tensors that describe their own boxes, wrapper subclasses, and other values; or a module.
            ``None`` on a rank that has no part of it.
        target: What this rank wants filled, in the same forms, of the same global shapes. Its keys must be in the
            source, whose other keys are left alone. Its memory may not be the source's. Of keys with one memory (tied
            weights) the first is filled.
        group: Ranks of both sides; the default group if left out. Its backends must send tensors of their device. Where
            some of a rank's tensors lie on an accelerator, the others (AdamW keeps its steps in host memory) travel by
            copies there, which are kept with the plan.
        cast: Which changes of dtype are allowed, as in ``LoadPlanner``. The sender converts. To fp8, which needs
            scales, only a step ``transforms.cast`` converts.
        rename: Keys of the target to keys of the source, as in ``Source``: ``{"model.*": "module.*"}``.
        transform: How the source's tensors become the target's (``tte.transforms``), the same on all ranks. Each
            element goes straight to its place, once, whatever both layouts are. The transform must take or drop every
            key of the source. What it rounds on the way to another dtype is refused, and so is ``dequantize``.
            ``rename`` then leads from keys of the target to those that the transform makes.
        source_layouts, target_layouts: Sharding orders that placements cannot express, by canonical fqn or glob of each
            side.
        replicas: ``"first"`` takes the first replica of each part, which others of the source need not equal then.
        bucket_bytes: Size of the buffers; a rank holds at most three beside its tensors.
        timeout_seconds: How long a rank waits for the others in each phase.

    Raises:
        StateRefusedError: (a subclass) Source and target do not fit, or a layout is in doubt; all problems of all
            ranks, the same on every rank. Nothing was changed.
        LostRankError: A rank is gone or does not take part.
    """
    check_argument("plan_reshard", "group", group, (dist.ProcessGroup, NoneType), "a process group or None")
    check_usable("plan_reshard", group)
    with checking_arguments("plan_reshard", group):
        if cast not in get_args(CastPolicy):
            raise ValueError(f"plan_reshard: got cast={cast!r}, expected 'exact', 'allow' or 'forbid'")
        if replicas not in get_args(Replicas):
            raise ValueError(f"plan_reshard: got replicas={replicas!r}, expected 'equal' or 'first'")
        check_argument("plan_reshard", "transform", transform, (Transform, NoneType), "a Transform of tte.transforms")
        check_seconds("plan_reshard", timeout_seconds)
        check_counts("plan_reshard", bucket_bytes=bucket_bytes)
    ends: dict[str, Endpoint] = {}

    def offer() -> Offer:
        ends["source"] = describe_endpoint("source", source, source_layouts, is_filled=False)
        ends["target"] = describe_endpoint("target", target, target_layouts, is_filled=True)
        problems = [problem for end in ends.values() for problem in end.problems]
        problems += choose_device(ends["source"], ends["target"], group)
        if not problems:
            problems += shared_memory_problems(ends["source"], ends["target"])
        return Offer(
            source=ends["source"].table.message,
            target=ends["target"].table.message,
            host=host_digest(),
            problems=tuple(problems),
            arguments={
                "cast": cast,
                "bucket_bytes": bucket_bytes,
                "replicas": replicas,
                "rename": Source(rename=dict(rename or {})).rename,
                "transform": repr(transform),
            },
        )

    with transfer_phases(group, timeout_seconds) as phases:
        part = phases.through_coordinator(
            "plan", offer, partial(plan_for_all, transform=transform), doing="ranks planned a transfer"
        )
    return TransferPlan(
        ends["source"],
        ends["target"],
        part,
        phases.group,
        bucket_bytes=bucket_bytes,
        timeout_seconds=timeout_seconds,
        replicas=replicas,
    )
