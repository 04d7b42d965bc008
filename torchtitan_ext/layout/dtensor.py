"""Tensors as plain values: the only module that reads private DTensor attributes.

``Describer`` turns a tensor into a ``ShardReport``; the rest gives the local memory of any tensor, and copies of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from operator import mul
from typing import Any

import torch
from torch._subclasses import FakeTensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from torchtitan_ext import _core
from torchtitan_ext.dcp_private import ShardedTensor
from torchtitan_ext.errors import Problem, first_line
from torchtitan_ext.layout.layout import LayoutRules, MeshLayout, ShardReport, Step, Steps
from torchtitan_ext.layout.own_boxes import has_own_boxes, keep_own_boxes


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The rank's own memory of a tensor: a DTensor's local tensor, any other tensor itself.

    Detached, a plain ``torch.Tensor`` even where a subclass has storage of its own, and never a copy. Waits for an
    asynchronous collective that still writes it.
    """
    held = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    if type(held) is torch.Tensor and not held.requires_grad:
        return held
    local = (held.wait() if isinstance(held, AsyncCollectiveTensor) else held).detach()
    if type(local) is torch.Tensor or is_traceable_wrapper_subclass(local):
        return local
    with torch._C.DisableTorchFunctionSubclass():
        return local.as_subclass(torch.Tensor)


def is_bare(value: object) -> bool:
    """Whether a value is a tensor of torch's own class without further attributes: nothing else says what it holds."""
    return type(value) in (torch.Tensor, torch.nn.Parameter) and not value.__dict__


def is_wrapper(local: torch.Tensor) -> bool:
    """Whether a local tensor consists of others, such as quantised values and their scales."""
    return type(local) not in (torch.Tensor, torch.nn.Parameter) and is_traceable_wrapper_subclass(local)


def holds_wrapper(tensor: torch.Tensor) -> bool:
    """Whether the local tensor of a tensor consists of others."""
    held = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return is_wrapper(held) and is_wrapper(local_tensor(held))


def why_not_dense(local: torch.Tensor) -> str | None:
    """Why the elements of a local tensor are not one block of strided memory, or ``None`` where they are."""
    is_torchs_own = type(local) is torch.Tensor  # most are, and then two questions need not be asked
    if not is_torchs_own and isinstance(local, FakeTensor):
        return "is a fake tensor, which has no values; give it memory outside of FakeTensorMode"
    if local.is_nested:
        return "is a nested tensor, which has no one shape; store list(tensor.unbind())"
    if not is_torchs_own and is_traceable_wrapper_subclass(local):
        return (
            f"its local tensor is a {type(local).__name__}, which is not one block of memory; "
            "dequantise it or give it __create_write_items__"
        )
    if local.layout is not torch.strided or local.is_quantized:
        what, how = ("quantised", "dequantize()") if local.is_quantized else (str(local.layout), "to_dense()")
        return f"is {what}; convert it with .{how} first"
    return None


def may_overlap_itself(tensor: torch.Tensor) -> bool:
    """Whether several elements of the rank's own memory of a tensor may lie in the same place."""
    held = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    if type(held) is torch.Tensor and held.is_contiguous():
        return False
    local = local_tensor(tensor)
    return _core.may_overlap_itself(local.shape, local.stride())


def is_plain_memory(tensor: torch.Tensor) -> bool:
    """Whether each element of a tensor lies in a place of its own, as it is: in no subclass, no lazy view, strided."""
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
        return False
    return not may_overlap_itself(tensor)


def local_view(local: torch.Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    """A box of a local tensor, as a view; most often the box is the whole tensor."""
    for dim, (offset, size, whole) in enumerate(zip(offsets, sizes, local.shape, strict=True)):
        if offset or size != whole:
            local = local.narrow(dim, offset, size)
    return local


View = tuple[tuple[int, ...], tuple[int, ...], Sequence[tuple[int, int]]]
"""Elements of a tensor from these offsets on, of these sizes, and per dim the dim of the tensor and its step there."""


def view_of(local: torch.Tensor, view: View) -> torch.Tensor:
    """A view that steps through a tensor, without gradients."""
    offsets, sizes, steps = view
    strides = local.stride()
    begin = local.storage_offset() + sum(map(mul, offsets, strides))
    with torch.no_grad():
        return local.as_strided(sizes, [strides[dim] * step for dim, step in steps], begin)


def box_of(local: torch.Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor | str:
    """A box of a local tensor, or why a wrapper subclass has none: most often the box cuts a quantisation block."""
    if not is_wrapper(local):
        return local_view(local, offsets, sizes)
    where = f"its {type(local).__name__} of {tuple(local.shape)} cannot be cut at {tuple(offsets)}, {tuple(sizes)}"
    remedy = "use meshes whose shards end between its blocks, or a tensor without the subclass"
    try:
        box = local_view(local, offsets, sizes)
    except Exception as error:  # whatever the subclass raises
        return f"{where} ({type(error).__name__}: {first_line(error)}); {remedy}"
    if type(box) is not type(local) or tuple(box.shape) != tuple(sizes):
        return f"{where} (its slice is a {type(box).__name__} of {tuple(box.shape)}); {remedy}"
    return box


def as_bytes(local: torch.Tensor) -> torch.Tensor:
    """The elements of a plain dense tensor, one after another in row-major order, as 1-D uint8.

    A view where its memory holds them so, else a copy; lazy conjugation and negation are carried out.
    """
    # As bytes first: a copy of bools makes any bits but zero a one.
    bits = local.view(torch.uint8) if local.dtype == torch.bool else local
    dense = bits.resolve_conj().resolve_neg().contiguous()
    # One element counts as contiguous with any stride, which a view of other items does not take.
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)


def on_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """An uninitialised tensor of the same layout on ``device`` (of a DTensor: its local tensor). Not collective."""
    if isinstance(tensor, DTensor):
        return with_local(tensor, torch.empty_like(tensor._local_tensor, device=device))
    return keep_own_boxes(tensor, torch.empty_like(tensor, device=device))


def held_tensor(tensor: DTensor) -> torch.Tensor:
    """A DTensor's local tensor as it is: of any class, and maybe still written by an asynchronous collective."""
    held: torch.Tensor = tensor._local_tensor
    return held


def with_local(tensor: DTensor, local: torch.Tensor) -> DTensor:
    """A DTensor like this one with another local tensor. Not collective."""
    # Its __init__ adds nothing but the frames of a compiler, which take longer than all else.
    made: DTensor = DTensor.__new__(DTensor, local, tensor._spec, requires_grad=tensor.requires_grad)
    return made


def map_parts(wrapper: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """A tensor of the same subclass, of what ``change`` makes of each tensor that the wrapper consists of."""
    return with_parts(wrapper, {name: change(getattr(wrapper, name)) for name in wrapper.__tensor_flatten__()[0]})


def with_parts(wrapper: Any, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """A tensor of the same subclass that consists of these tensors."""
    context = wrapper.__tensor_flatten__()[1]
    made: torch.Tensor = type(wrapper).__tensor_unflatten__(parts, context, wrapper.shape, wrapper.stride())
    return made


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh that a mesh was sliced from; itself where there is none."""
    root: DeviceMesh = mesh._get_root_mesh() if hasattr(mesh, "_get_root_mesh") else mesh
    return root


def is_on_mesh(tensor: torch.Tensor) -> bool:
    """Whether this rank holds a part: false only for a DTensor whose mesh this rank is not on."""
    return not isinstance(tensor, DTensor) or tensor.device_mesh.get_coordinate() is not None


def describes_itself(value: Any) -> bool:
    """Whether a value says itself which boxes a rank holds: by its attributes, or by DCP's hooks."""
    return has_own_boxes(value) or has_hooks(value)


def has_hooks(value: Any) -> bool:
    """Whether DCP's hooks, on the value or on a DTensor's local tensor, say which boxes a rank holds."""
    if isinstance(value, ShardedTensor):
        return True
    holder = value._local_tensor if isinstance(value, DTensor) else value
    return hasattr(holder, "__create_chunk_list__")


class Describer:
    """Turns tensors into reports. Meshes, and tensors that differ in nothing that a report says, are described once.

    Args:
        rules: Sharding orders that placements cannot express.
    """

    def __init__(self, rules: LayoutRules) -> None:
        self._rules = rules
        self._meshes: dict[int, tuple[DeviceMesh, MeshLayout]] = {}
        # Without rules a report does not depend on the key. The meshes that keys name by identity are held above.
        self._known: dict[Any, ShardReport] = {}

    def describe(self, fqn: str, tensor: torch.Tensor) -> ShardReport | Problem:
        """The report on a tensor of which this rank holds a part (``is_on_mesh``), or why there can be none."""
        if not isinstance(tensor, DTensor):
            shape = tuple(tensor.shape)
            if shape not in self._known:
                self._known[shape] = ShardReport(global_shape=shape, local_sizes=shape)
            return self._known[shape]
        spec = tensor._spec
        local_sizes, shard_order = tensor._local_tensor.shape, getattr(spec, "shard_order", None)
        # Not the placements themselves: not all have a hash, and a _StridedShard may equal a Shard.
        placements = tuple((type(p), getattr(p, "dim", 0), getattr(p, "split_factor", 0)) for p in spec.placements)
        alike = (id(tensor.device_mesh), placements, spec.shape, local_sizes, shard_order, _is_literal(spec))
        known = None if self._rules else self._known.get(alike)
        if known is not None:
            return known
        report = self.describe_placements(fqn, tensor.shape, tensor.device_mesh, tensor.placements)
        if isinstance(report, Problem):
            return report
        order = _order_in_spec(tensor, report.placements) if report.order is None else report.order
        report = replace(report, local_sizes=tuple(local_sizes), order=order)
        self._known[alike] = report
        return report

    def describe_placements(
        self, fqn: str, global_shape: Sequence[int], device_mesh: DeviceMesh, placements: Sequence[Placement]
    ) -> ShardReport | Problem:
        """The report on a tensor that is still to be made: everything but the local sizes."""
        mesh = self._mesh_layout(device_mesh)
        described: list[tuple[int, int]] = []
        for axis, placement in enumerate(placements):
            entry = _describe_placement(fqn, placement, axis, mesh, len(global_shape))
            if isinstance(entry, Problem):
                return entry
            described.append(entry)
        order = self._stated_order(fqn, mesh, described, len(global_shape))
        if isinstance(order, Problem):
            return order
        return ShardReport(
            global_shape=tuple(global_shape),
            mesh=mesh,
            coordinate=tuple(device_mesh.get_coordinate() or ()),
            placements=tuple(described),
            order=order,
        )

    def _mesh_layout(self, mesh: DeviceMesh) -> MeshLayout:
        if id(mesh) not in self._meshes:
            names = mesh.mesh_dim_names
            layout = MeshLayout(
                shape=tuple(mesh.shape),
                ranks=tuple(mesh.mesh.flatten().tolist()),
                dim_names=None if names is None else tuple(names),
            )
            known = next((other for _, other in self._meshes.values() if other == layout), layout)
            self._meshes[id(mesh)] = (mesh, known)
        return self._meshes[id(mesh)][1]

    def _stated_order(
        self, fqn: str, mesh: MeshLayout, placements: Sequence[tuple[int, int]], num_dims: int
    ) -> Steps | None | Problem:
        sharding = {axis: dim for axis, (dim, _) in enumerate(placements) if dim >= 0}
        stated = self._rules.find(fqn)
        if stated is None or not sharding:
            return None
        steps: list[Step] = []
        for axis, dim, split_factor in stated.steps:
            if isinstance(axis, str):
                if mesh.dim_names is None or axis not in mesh.dim_names:
                    return Problem(
                        "layout_matches_nothing",
                        fqn,
                        f"the stated order names mesh axis {axis!r}, the mesh has {mesh}; name one of its axes",
                    )
                axis = mesh.dim_names.index(axis)
            steps.append((axis, dim + num_dims if dim < 0 else dim, split_factor))
        if {axis: dim for axis, dim, _ in steps} != sharding or len(steps) != len(sharding):
            return Problem(
                "layout_matches_nothing",
                fqn,
                f"the stated order {tuple(steps)} does not shard the axes and dims that its placements "
                f"{_core.format_placements(placements)} shard; give one step per sharding axis",
            )
        return tuple(steps)


def _describe_placement(
    fqn: str, placement: Placement, axis: int, mesh: MeshLayout, num_dims: int
) -> tuple[int, int] | Problem:
    if isinstance(placement, Replicate):
        return (-1, 1)
    # _StridedShard was a subclass of Shard before torch 2.10.
    if isinstance(placement, _StridedShard):
        dim, split_factor = placement.dim, int(placement.split_factor)
    elif isinstance(placement, Shard):
        dim, split_factor = placement.dim, 1
    else:
        where = f"mesh axis {axis if mesh.dim_names is None else mesh.dim_names[axis]!r}"
        if isinstance(placement, Partial):
            return Problem(
                "partial_placement",
                fqn,
                f"{where} holds Partial({placement.reduce_op!r}), values still to be reduced; "
                "redistribute it to Replicate() or Shard() first",
            )
        return Problem("unknown_placement", fqn, f"{where} has {placement!r}; redistribute it to Shard or Replicate")
    return (dim + num_dims if dim < 0 else dim, split_factor)


def _is_literal(spec: Any) -> bool:
    """Whether the spec says that its strided placements mean DTensor's own arithmetic, as those that views make do.

    A spec with True does not say the contrary: FSDP2's nested shards have it, and so does every DTensor with strided
    placements that ``from_local`` made (pytorch#174831).
    """
    return getattr(spec, "use_strided_shard_as_shard_order", None) is False


def _order_in_spec(tensor: DTensor, placements: Sequence[tuple[int, int]]) -> Steps | None:
    """The order that DTensor records, if it is not left to right, or if placements alone would leave it open."""
    if any(split_factor != 1 for _, split_factor in placements):
        if not _is_literal(tensor._spec):
            return None
        return _core.read_placements(placements, tuple(tensor.device_mesh.shape), "left_to_right")
    shard_order = getattr(tensor._spec, "shard_order", None)
    if not shard_order:
        return None
    steps = tuple((axis, entry.tensor_dim, 1) for entry in shard_order for axis in entry.mesh_dims)
    left_to_right = all(list(entry.mesh_dims) == sorted(entry.mesh_dims) for entry in shard_order)
    return None if left_to_right else steps
