"""The unsharded state dict of a model, read from and written into any mix of DTensors and plain tensors.

Both go tensor by tensor: beside its shards a rank holds one full tensor at a time, unless it keeps the result.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import NoneType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from torchtitan_ext import ops
from torchtitan_ext.checkpoint.rules.casts import CastPolicy, cast_problem
from torchtitan_ext.errors import Problem, check_argument, refusal
from torchtitan_ext.full.tensors import broadcast_full, decide_layouts, gather_full
from torchtitan_ext.layout.dtensor import is_on_mesh, local_tensor, on_device
from torchtitan_ext.layout.layout import LayoutRules, ShardOrder, canonical_fqn, shard_of
from torchtitan_ext.ranks.exchange import Opening, broadcast_value, gather_values
from torchtitan_ext.state.nested import load_device


def get_full_state_dict(
    model: nn.Module,
    *,
    rank0_only: bool = False,
    cpu_offload: bool = False,
    layouts: Mapping[str, ShardOrder] | None = None,
) -> dict[str, torch.Tensor]:
    """The unsharded state dict of a model, streamed tensor by tensor. Collective over the meshes of its DTensors.

    Args:
        model: Any mix of DTensors and plain tensors. Wrapper prefixes (``_orig_mod.``, ``_checkpoint_wrapped_module.``,
            DDP's ``module.``) are stripped.
        rank0_only: Whether only global rank 0 keeps the tensors; the others then return an empty dict.
        cpu_offload: Whether the result is on the CPU.
        layouts: Sharding orders that placements cannot express, by canonical fqn or glob.

    Returns:
        Canonical fqn to full tensor; plain tensors are copied too.
    """
    check_argument("get_full_state_dict", "model", model, nn.Module, "a module")
    check_argument("get_full_state_dict", "layouts", layouts, (Mapping, NoneType), "a dict of ShardOrder by name")
    keeps = not rank0_only or not dist.is_initialized() or dist.get_rank() == 0
    values = {fqn: value for fqn, value in _canonical_state(model).items() if is_on_mesh(value)}
    decided, problems = decide_layouts(values, LayoutRules(layouts))
    if problems:
        raise refusal("get_full_state_dict", problems)
    full_state_dict: dict[str, torch.Tensor] = {}
    for fqn, value in values.items():
        full = gather_full(value, *decided[fqn])
        if keeps:
            full_state_dict[fqn] = full.cpu() if cpu_offload else full
    return full_state_dict


def set_full_state_dict(
    model: nn.Module,
    full_state_dict: Mapping[str, torch.Tensor],
    *,
    broadcast_from_rank0: bool = False,
    strict: bool = True,
    cast: CastPolicy = "exact",
    layouts: Mapping[str, ShardOrder] | None = None,
) -> None:
    """Writes an unsharded state dict into a model, in place on the local tensors. Collective over all ranks.

    Nothing is written before all ranks have agreed that everything fits.

    Args:
        model: Any mix of DTensors and plain tensors. A tensor on the meta device is replaced by a new one, as stock
            does, on the device of its mesh (a plain tensor: of the default group).
        full_state_dict: Canonical fqn to full tensor; with ``broadcast_from_rank0`` only global rank 0's is used.
        broadcast_from_rank0: Whether rank 0 sends its values, tensor by tensor; otherwise each rank uses its own.
        strict: Whether missing and unexpected keys are refused.
        cast: Allowed changes of dtype, as in ``LoadPlanner``.
        layouts: Sharding orders that placements cannot express, by canonical fqn or glob.

    Raises:
        StateRefusedError: (a subclass) the same on every rank, naming every key that does not fit; nothing was written.
    """
    check_argument("set_full_state_dict", "model", model, nn.Module, "a module")
    check_argument("set_full_state_dict", "full_state_dict", full_state_dict, Mapping, "a dict of full tensors")
    check_argument("set_full_state_dict", "layouts", layouts, (Mapping, NoneType), "a dict of ShardOrder by name")
    targets = _canonical_state(model)
    own = {fqn: _offer(value) for fqn, value in full_state_dict.items()}
    offered = broadcast_value(own) if broadcast_from_rank0 else own
    wanted = {fqn: value for fqn, value in targets.items() if fqn in offered and is_on_mesh(value)}
    decided, problems = decide_layouts(wanted, LayoutRules(layouts))
    problems += [*_key_problems(targets, offered, strict), *_fit_problems(wanted, offered, cast)]
    gathered = gather_values(
        (problems, list(wanted)), opening=Opening("set_full_state_dict", "keys of a full state dict")
    )
    every_problem = list(dict.fromkeys(problem for of_rank, _ in gathered for problem in of_rank))
    if every_problem:
        raise refusal("set_full_state_dict", every_problem)
    wanted_anywhere = {fqn for _, of_rank in gathered for fqn in of_rank}
    made = _memory_for_meta(model, wanted)
    for fqn, offer in offered.items():
        if fqn not in wanted_anywhere or isinstance(offer, str):
            continue
        full = full_state_dict.get(fqn)
        if broadcast_from_rank0:
            like = torch.empty(offer[0], dtype=offer[1], device="meta")
            full = broadcast_full(full if dist.get_rank() == 0 else None, like=like)
        if fqn in wanted and full is not None:
            target = made.get(fqn, wanted[fqn])
            local = local_tensor(target)
            if local.numel() > 0:
                local.copy_(ops.pack_shard(full.detach(), shard_of(*decided[fqn])))
                torch.autograd.graph.increment_version(target)
    if made:
        inner = _unwrapped(model)
        ours = {fqn: made[name] for fqn in inner.state_dict() if (name := canonical_fqn(fqn)) in made}
        inner.load_state_dict(ours, strict=False, assign=True)


Offer = tuple[tuple[int, ...], torch.dtype] | str
"""Shape and dtype of a full tensor, or a description of another value."""


def _offer(value: Any) -> Offer:
    if not isinstance(value, torch.Tensor) or isinstance(value, DTensor):
        return f"a {type(value).__name__}"
    return tuple(value.shape), value.dtype


def _memory_for_meta(model: nn.Module, wanted: Collection[str]) -> dict[str, torch.Tensor]:
    """New tensors or parameters in place of those on meta; tied ones share one."""
    made: dict[int, torch.Tensor] = {}
    by_fqn: dict[str, torch.Tensor] = {}
    for fqn, value in _unwrapped(model).state_dict(keep_vars=True).items():
        if canonical_fqn(fqn) not in wanted or not local_tensor(value).is_meta:
            continue
        if id(value) not in made:
            memory = on_device(value.detach(), load_device(value))
            is_param = isinstance(value, nn.Parameter)
            made[id(value)] = nn.Parameter(memory, requires_grad=value.requires_grad) if is_param else memory
        by_fqn[canonical_fqn(fqn)] = made[id(value)]
    return by_fqn


def _unwrapped(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, DistributedDataParallel) else model


def _canonical_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """The model's tensors by canonical fqn; extra state that is no tensor is left out."""
    state = _unwrapped(model).state_dict()
    return {canonical_fqn(fqn): value for fqn, value in state.items() if isinstance(value, torch.Tensor)}


def _key_problems(targets: Mapping[str, torch.Tensor], offered: Mapping[str, Offer], strict: bool) -> list[Problem]:
    if not strict:
        return []
    missing = "the model has it, the full state dict does not; pass strict=False to leave it"
    unexpected = "the full state dict has it, the model does not; pass strict=False to skip it"
    tensors = [fqn for fqn, offer in offered.items() if not isinstance(offer, str)]
    return [
        *(Problem("missing_key", fqn, missing) for fqn in targets if fqn not in offered),
        *(Problem("unclaimed_keys", fqn, unexpected) for fqn in tensors if fqn not in targets),
    ]


def _fit_problems(wanted: Mapping[str, torch.Tensor], offered: Mapping[str, Offer], cast: CastPolicy) -> list[Problem]:
    problems: list[Problem | None] = []
    for fqn, value in wanted.items():
        offer = offered[fqn]
        if isinstance(offer, str):
            problems.append(Problem("wrong_type", fqn, f"is {offer} in the full state dict, expected its full tensor"))
            continue
        shape, dtype = offer
        if tuple(value.shape) != shape:
            detail = f"got {shape} in the full state dict, the model has {tuple(value.shape)}"
            problems.append(Problem("wrong_shape", fqn, detail))
        problems.append(cast_problem(fqn, dtype, value.dtype, cast))
    return [problem for problem in problems if problem is not None]
