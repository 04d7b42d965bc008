"""One rank's side of a transfer: the state dict that is read, or the one that is filled."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchtitan_ext import _core
from torchtitan_ext.checkpoint.tables.key_table import (
    BoxesEntry,
    EncodedTable,
    ObjectEntry,
    box_tensors,
    describe_state,
    encode_table,
)
from torchtitan_ext.checkpoint.tables.tied_keys import is_own_memory, tied_keys
from torchtitan_ext.errors import Problem, described, named
from torchtitan_ext.layout.dtensor import is_wrapper, local_tensor, may_overlap_itself
from torchtitan_ext.layout.layout import LayoutRules, ShardOrder
from torchtitan_ext.layout.wrapper import dense_values
from torchtitan_ext.op_library import call
from torchtitan_ext.ranks.exchange import has_backend
from torchtitan_ext.state.nested import Path, flat_keys, set_value

_HOST = torch.device("cpu")

State = Mapping[str, Any] | nn.Module | None
"""What a rank gives as source or target; ``None`` on a rank that has no part of it."""


@dataclass
class Endpoint:
    """What one rank holds of the source, or of the target.

    Attributes:
        state: The nested state dict; tensors are filled in place, other values are put there.
        table: Keys, kinds and boxes, as the coordinator gets them.
        values: The flat state dict.
        tensors: The rank's memory: one tensor per key, or per box where a tensor states its boxes.
        owners: Of each tensor what the caller holds, whose memory may be replaced; the tensor itself where it is a box.
        names: Of each tensor its key.
        first_tensor: Per key, in the order of the table, its first tensor; -1 for a value that is no tensor.
        layouts: Sharding orders that the caller has stated.
        problems: Why the state cannot take part, as far as this rank sees.
        module: What gave the state dict, if the caller passed a module.
        device: From where and to where the tensors travel: the accelerator, if any of them is there. Others, such as
            the steps of AdamW in host memory, are copied there and back, through memory that is kept from run to run.
    """

    state: Mapping[str, Any]
    table: EncodedTable
    values: Mapping[str, Any]
    tensors: list[Tensor]
    owners: list[Tensor]
    names: list[str]
    first_tensor: list[int]
    paths: Mapping[str, Path]
    layouts: Mapping[str, ShardOrder] | None
    problems: list[Problem] = field(default_factory=list)
    module: nn.Module | None = None
    device: torch.device = field(init=False)
    _computed: list[int] = field(init=False)  # tensors that have no memory of their own: wrappers and lazy views
    _owned: list[int] = field(init=False)  # tensors whose memory the caller may replace
    _planned: Tensor = field(init=False)
    _forms: list[_Form] = field(init=False)

    def __post_init__(self) -> None:
        self._computed = [at for at, tensor in enumerate(self.tensors) if not is_own_memory(tensor)]
        held = zip(self.owners, self.tensors, strict=True)
        self._owned = [at for at, (owner, tensor) in enumerate(held) if owner is not tensor]
        self._planned = self._memory_of(self.tensors)
        self._forms = list(map(_form_of, self.tensors))
        self.device = next(iter(sorted(self.devices - {_HOST}, key=str)), _HOST)

    @property
    def devices(self) -> set[torch.device]:
        """Where the tensors lie."""
        return {tensor.device for tensor in self.tensors if not tensor.is_meta}

    @property
    def is_memory(self) -> bool:
        """Whether what is read or filled is the same memory in each run: the caller's own, or stand-ins for it."""
        return not self._computed

    def _memory_of(self, tensors: Sequence[Tensor]) -> Tensor:
        """Where the rank's tensors lie and how they are read; of wrappers and lazy views their dtypes and shapes."""
        listed = self._with_computed(tensors, _meta_like)
        nothing = torch.empty(0, 2, dtype=torch.int64, device="cpu")
        table: Tensor = call("memory_table", (listed,)) if listed else nothing
        return table

    def why_changed(self) -> str | None:
        """Why the tensors are not those that were planned for, or ``None`` where they are."""
        tensors = list(self.tensors)
        for at in self._owned:
            tensors[at] = local_tensor(self.owners[at])
        now = self._memory_of(tensors)
        if torch.equal(now, self._planned):
            return None
        changed: dict[str, str] = {}
        for row in (now != self._planned).any(1).nonzero().flatten().tolist():
            fqn, form = self.names[row], _form_of(local_tensor(self.owners[row]))
            changed[fqn] = f"{fqn} {_difference(self._forms[row], form)}"
        what = "its tensors have other memory, dtypes, shapes or strides than when the transfer was planned"
        return f"{what}: {named(list(changed.values()))}; plan it again"

    def memory_to_read(self) -> list[Tensor]:
        """Plain tensors with the values, by position, on ``device``; wrappers and lazy views are copies."""
        values = self._with_computed(self.tensors, _values_of)
        with torch.no_grad():
            for at, stand_in in self._stand_ins.items():
                values[at] = stand_in.copy_(values[at])
        return values

    def memory_to_fill(self) -> tuple[list[Tensor], Callable[[], None]]:
        """Plain tensors to be filled, by position, and what is to be called when they are."""
        filled = self._with_computed(self.tensors, _new_like)
        for at, stand_in in self._stand_ins.items():
            filled[at] = stand_in

        def finish() -> None:
            with torch.no_grad():
                for at in {*self._computed, *self._stand_ins}:
                    self.tensors[at].copy_(filled[at])

        return filled, finish

    def _with_computed(self, tensors: Sequence[Tensor], make: Callable[[Tensor], Tensor]) -> list[Tensor]:
        """The tensors, and what is made of those that have no memory of their own."""
        result = list(tensors)
        for at in self._computed:
            result[at] = make(result[at])
        return result

    @cached_property
    def _stand_ins(self) -> Mapping[int, Tensor]:
        """By the positions of tensors that lie elsewhere, memory of their shapes on ``device``, made once."""
        return {
            at: torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)
            for at, tensor in enumerate(self.tensors)
            if tensor.device != self.device
        }

    def objects_now(self, fqns: Collection[str]) -> dict[str, Any]:
        """The values of keys that are no tensors, as they are now: others may stand there than when it was planned.

        Raises:
            ValueError: The state has no such value any more.
        """
        if not fqns:
            return {}
        values = flat_keys(self.state if self.module is None else self.module.state_dict()).values
        for fqn in fqns:
            if fqn not in values or isinstance(values[fqn], Tensor):
                raise ValueError(f"{fqn} is not in the source any more; plan the transfer again")
        return {fqn: values[fqn] for fqn in fqns}

    def set_objects(self, values: Mapping[str, Any]) -> None:
        """Puts values that are no tensors at their places in the state dict."""
        for fqn, value in values.items():
            set_value(self.state, self.paths[fqn], value)  # type: ignore[arg-type]

    def memories(self) -> list[tuple[str, tuple[int, Sequence[int], Sequence[int], int]]]:
        """The key and the memory of each tensor that is not made of others or computed when it is read."""
        computed = set(self._computed)
        return [
            (fqn, (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.itemsize))
            for at, (fqn, tensor) in enumerate(zip(self.names, self.tensors, strict=True))
            if at not in computed and not tensor.is_meta
        ]


_Form = tuple[torch.dtype, torch.Size, tuple[int, ...]]
"""The dtype, shape and strides of a tensor."""


def _form_of(local: Tensor) -> _Form:
    return local.dtype, local.shape, local.stride() if is_own_memory(local) else ()


def _difference(then: _Form, now: _Form) -> str:
    if then == now:
        return "lies elsewhere"
    before, after = (f"{dtype} of shape {tuple(sizes)} and strides {strides}" for dtype, sizes, strides in (then, now))
    return f"was {before}, is {after}"


def describe_endpoint(
    side: str,
    state: State,
    layouts: Mapping[str, ShardOrder] | None,
    *,
    is_filled: bool,
) -> Endpoint:
    """The side of this rank; what is wrong with it becomes a problem, so that all ranks get it. Not collective."""
    problems: list[Problem] = []
    module = state if isinstance(state, nn.Module) else None
    if isinstance(state, nn.Module):
        state = state.state_dict(keep_vars=True)  # of a detached tensor one does not see that its memory is replaced
    if not isinstance(state, Mapping | None):
        what = f"got {described(state)}, expected a state dict, a module, or None on a rank without a part of it"
        problems.append(Problem("wrong_argument", side, what))
        state = None
    values: dict[str, Any] = {}
    paths: Mapping[str, Path] = {}
    try:
        flat = flat_keys(state or {})
        values, paths = flat.values, flat.paths
    except ValueError as error:
        problems.append(Problem("unsupported_value", side, str(error)))
    described_values = describe_state(values, {}, LayoutRules(layouts))
    if is_filled:
        entries = described_values.entries
        tied = tied_keys(values, entries, entries)
        values = {fqn: value for fqn, value in values.items() if fqn not in tied}
        described_values = replace(described_values, entries={fqn: entries[fqn] for fqn in entries if fqn not in tied})
    problems += described_values.problems
    encoded = encode_table(described_values)
    tensors: list[Tensor] = []
    owners: list[Tensor] = []
    tensor_names: list[str] = []
    first_tensor: list[int] = []
    for fqn in (name for names in encoded.names for name in names):
        entry, value = described_values.entries[fqn], values[fqn]
        if isinstance(entry, ObjectEntry):
            first_tensor.append(-1)
            if hasattr(value, "state_dict"):
                what = f"is {described(value)}; pass what its state_dict() gives"
                problems.append(Problem("unsupported_value", fqn, what))
            elif is_filled and (module is not None or not isinstance(state, dict)):
                kind = type(state).__name__ if module is None else "module"
                what = f"is no tensor, and cannot be put into a {kind}; fill a dict of its own"
                problems.append(Problem("unsupported_value", fqn, what))
            continue
        first_tensor.append(len(tensors))
        held = list(box_tensors(value, entry)) if isinstance(entry, BoxesEntry) else [local_tensor(value)]
        tensors += held
        owners += held if isinstance(entry, BoxesEntry) else [value]
        tensor_names += [fqn] * len(held)
        reason = _why_not_usable(held, is_filled=is_filled)
        if reason is not None:
            problems.append(Problem("unsupported_tensor", fqn, reason))
    return Endpoint(
        state=state or {},
        table=encoded,
        values=values,
        tensors=tensors,
        owners=owners,
        names=tensor_names,
        first_tensor=first_tensor,
        paths=paths,
        layouts=layouts,
        problems=problems,
        module=module,
    )


def shared_memory_problems(source: Endpoint, target: Endpoint) -> list[Problem]:
    """Two tensors of this rank, one of which is to be filled, in one memory: the result would depend on the order."""
    filled, read = target.memories(), source.memories()
    found = _core.find_shared_memory([memory for _, memory in filled], [memory for _, memory in read])
    if found is None:
        return []
    (fqn, _), (other, _) = (*filled, *read)[found[0]], (*filled, *read)[found[1]]
    side = "target" if found[1] < len(filled) else "source"
    what = f"cannot be filled: it shares memory with {other} of the {side}; pass a clone() of one of them"
    return [Problem("unsupported_tensor", fqn, what)]


def choose_device(source: Endpoint, target: Endpoint, group: dist.ProcessGroup | None) -> list[Problem]:
    """Has both sides of this rank send from one device, by the group; tells why that cannot be."""
    found = source.devices | target.devices
    if len(found - {_HOST}) > 1:
        what = f"tensors lie on {', '.join(sorted(map(str, found)))}; transfer those of one accelerator at a time"
        return [Problem("unsupported_tensor", "source and target", what)]
    device = next(iter(found - {_HOST}), _HOST)
    source.device = target.device = device
    group = group or (dist.group.WORLD if dist.is_available() and dist.is_initialized() else None)
    if found and group is not None and not has_backend(group, device.type):
        what = f"tensors lie on {device}, from which the group cannot send; pass a group with a backend for it"
        return [Problem("unsupported_tensor", "source and target", what)]
    return []


def _why_not_usable(held: list[Tensor], *, is_filled: bool) -> str | None:
    for tensor in held:
        if tensor.is_meta:
            return "is on the meta device; give it memory with to_empty() first"
        if is_filled and not is_wrapper(tensor) and may_overlap_itself(tensor):
            return "cannot be filled: several of its elements share memory; fill a clone() of it"
    return None


def _meta_like(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _new_like(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def _values_of(tensor: Tensor) -> Tensor:
    return dense_values(tensor).resolve_conj().resolve_neg()
