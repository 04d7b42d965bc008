"""The calls of this room: what each public function takes. All ranks must pass the same."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torch.distributed.device_mesh import DeviceMesh

from torchtitan_ext import ops
from torchtitan_ext.errors import Problem
from torchtitan_ext.ranks.exchange import Opening, Scope, scope_ranks

Buffers = Literal["all", "persistent", "none"]


@dataclass(frozen=True)
class Call:
    """A call of a public function of this room by the ranks of a scope. The subclasses have the arguments of each."""

    operation: str
    scope: Scope

    def agreed_texts(self) -> dict[str, str]:
        """What all ranks must pass alike, as text, by the name of the argument."""
        arguments = {name: value for name, value in vars(self).items() if name not in ("operation", "scope")}
        texts = {name: _as_text(value) for name, value in arguments.items()}
        return {"operation": self.operation, "mesh": _mesh_text(self.scope), **texts}

    def opening(self, step: str = "agreement of a sync") -> Opening:
        """What an exchange of the call says first. In the first one calls of this room tell how they differ."""
        return Opening(self.operation, step)

    def problems(self) -> list[Problem]:
        """Arguments with a value that the function cannot take."""
        return []


@dataclass(frozen=True)
class BroadcastCall(Call):
    """``broadcast_tensors``. ``collect_list`` checks ``src``, since it knows the size of the group."""

    src: int = 0
    bucket_bytes: int = ops.DEFAULT_BUCKET_BYTES

    def problems(self) -> list[Problem]:
        if isinstance(self.bucket_bytes, int) and 0 < self.bucket_bytes < 2**63:
            return super().problems()
        detail = f"got {self.bucket_bytes!r}, expected a positive int64"
        return [*super().problems(), Problem("cannot_sync", "bucket_bytes", detail)]


@dataclass(frozen=True)
class ModuleCall(Call):
    """A call for the tensors of a module or state dict."""

    scope: DeviceMesh | None
    params: bool = True
    buffers: Buffers = "all"
    ignore: Collection[str] = ()

    def problems(self) -> list[Problem]:
        problems = super().problems()
        if self.buffers not in ("all", "persistent", "none"):
            problems.append(_wrong("buffers", self.buffers, '"all", "persistent" or "none"'))
        is_list = isinstance(self.ignore, Collection) and not isinstance(self.ignore, str)
        if not is_list or not all(isinstance(pattern, str) for pattern in self.ignore):
            problems.append(_wrong("ignore", self.ignore, "a list of names or globs"))
        return problems


@dataclass(frozen=True)
class CheckCall(ModuleCall):
    """``check_replicas``."""


@dataclass(frozen=True)
class SyncCall(ModuleCall, BroadcastCall):
    """``sync_module_states`` and ``sync_state_dict``."""

    verify: bool = False

    def problems(self) -> list[Problem]:
        problems = super().problems()
        return problems if isinstance(self.src, int) else [*problems, _wrong("src", self.src, "a coordinate")]


def _wrong(name: str, value: object, expected: str) -> Problem:
    return Problem("cannot_sync", "arguments", f"{name} is {value!r}, expected {expected}")


def _as_text(argument: Any) -> str:
    """Collections of names are sorted: a set has another order on every rank."""
    is_names = isinstance(argument, (list, tuple, set, frozenset))
    return str(sorted(map(repr, argument))) if is_names else repr(argument)


def _mesh_text(scope: Scope) -> str:
    if not isinstance(scope, DeviceMesh):
        return "left out"
    ranks = scope_ranks(scope)
    return f"{tuple(scope.mesh.shape)} over {len(ranks)} ranks from {ranks[0]} to {ranks[-1]}"


def digest_of(texts: Iterable[str]) -> bytes:
    """What ranks compare in place of texts."""
    joined = "".join(f"{len(text)}:{text}" for text in texts)
    return hashlib.blake2b(joined.encode("utf-8", "surrogatepass"), digest_size=16).digest()


F = TypeVar("F", bound=Callable[..., Any])


def outside_graphs(function: F) -> F:
    """``torch.compiler.disable`` as a decorator that keeps the function's types."""
    disabled: F = torch.compiler.disable(function)
    return disabled
