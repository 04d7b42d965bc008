"""The tensors of modules and state dicts, by canonical name."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from torchtitan_ext.layout.layout import canonical_fqn
from torchtitan_ext.state.nested import flatten_state_dict
from torchtitan_ext.sync.options import Buffers

ModuleOrState = nn.Module | Sequence[nn.Module] | Mapping[str, Any]
"""A module, its pipeline parts on this rank, or a nested state dict."""


@dataclass(frozen=True)
class NamedTensor:
    """A tensor of a module or state dict. ``kind`` decides whether a plain one may be taken for a replica."""

    fqn: str
    value: Tensor
    kind: Literal["param", "buffer", "state"]


def list_tensors(
    source: ModuleOrState, *, params: bool, buffers: Buffers, ignore: Collection[str]
) -> list[NamedTensor]:
    """The tensors of a module, of pipeline parts or of a nested state dict, in order, by canonical name.

    FSDP2 modules are resharded first: what is written into unsharded parameters vanishes at the next reshard.

    Args:
        params: Whether parameters of modules are listed.
        buffers: Which buffers of modules are listed.
        ignore: Names or globs that are left out.
    """
    named: list[NamedTensor] = []
    if isinstance(source, Mapping):
        flat = flatten_state_dict(source, is_whole=lambda fqn, wrapper: True).values
        named = [
            NamedTensor(canonical_fqn(fqn), value, "state") for fqn, value in flat.items() if isinstance(value, Tensor)
        ]
    elif isinstance(source, nn.Module):
        named = list(_tensors_of_module(source, params, buffers))
    else:
        for index, part in enumerate(source):
            named += [
                NamedTensor(f"{index}.{tensor.fqn}", tensor.value, tensor.kind)
                for tensor in _tensors_of_module(part, params, buffers)
            ]
    return [tensor for tensor in named if not _is_ignored(tensor.fqn, ignore)]


def _is_ignored(fqn: str, ignore: Collection[str]) -> bool:
    return any(fnmatch.fnmatchcase(fqn, pattern) for pattern in ignore)


def _tensors_of_module(module: nn.Module, params: bool, buffers: Buffers) -> Iterator[NamedTensor]:
    for submodule in module.modules():
        if isinstance(submodule, FSDPModule):
            submodule.reshard()
    if isinstance(module, DistributedDataParallel):
        module = module.module
    if params:
        for fqn, param in module.named_parameters():
            yield NamedTensor(canonical_fqn(fqn), param, "param")
    if buffers == "none":
        return
    transient = {
        f"{prefix}.{name}" if prefix else name
        for prefix, submodule in module.named_modules()
        for name in submodule._non_persistent_buffers_set
    }
    for fqn, buffer in module.named_buffers():
        if buffers == "all" or fqn not in transient:
            yield NamedTensor(canonical_fqn(fqn), buffer, "buffer")
