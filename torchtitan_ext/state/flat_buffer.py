"""A state dict as one flat buffer per device and a manifest, and back.

The buffer holds the bytes of this rank's own tensors (of a DTensor: the local tensor), one behind the other; the
manifest says in plain data, which round-trips through JSON, what lies where and how the containers around it look. So a
state dict can be staged, sent or hashed as one piece of memory. Nothing here is collective.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from torchtitan_ext import ops
from torchtitan_ext.layout.dtensor import local_tensor, why_not_dense
from torchtitan_ext.layout.own_boxes import has_own_boxes, own_box_values, set_own_boxes, why_not_own_boxes
from torchtitan_ext.state.nested import ROOT, KeyPath, Member, fold_paths, set_member

MANIFEST_VERSION = 1

Manifest = dict[str, Any]
"""``version``, ``alignment`` (bytes), ``entries`` (one per distinct tensor) and ``tree`` (the containers).

An entry has ``fqn`` (the first place the tensor stands at), ``device``, ``offset`` and ``num_bytes`` in that device's
buffer, ``dtype``, ``shape`` (local), for a DTensor ``global_shape``, ``mesh`` and ``placements``, and for a tensor with
the attributes of ``layout/own_boxes.py`` ``own_boxes``. A node of the tree is a JSON scalar or a dict with one key that
names its kind.
"""


def pack_state_dict(
    state_dict: Mapping[Any, Any], *, alignment: int = ops.DEFAULT_ALIGNMENT
) -> tuple[dict[str, Tensor], Manifest]:
    """Copies all tensors of a nested state dict into one buffer per device.

    Args:
        state_dict: Dicts, lists and tuples of tensors, DTensors and plain values (None, bool, int, float, str, bytes,
            dtypes, devices). A tensor that stands at several places (tied weights) is kept once.
        alignment: Each tensor begins at a multiple of it, in bytes.

    Returns:
        The buffers (1-d, uint8) by device, and the manifest.

    Raises:
        ValueError: A value is neither a tensor nor plain data, or a tensor is on the meta device.
    """
    writer = _ManifestWriter()
    tree = writer.tree_of(state_dict)
    buffers = {}
    for device, indices in _by_device(writer.entries).items():
        tensors = [writer.tensors[index] for index in indices]
        offsets = ops.flat_offsets(tensors, alignment=alignment)
        for index, offset in zip(indices, offsets, strict=False):
            writer.entries[index]["offset"] = offset
        with torch.no_grad():
            buffers[device] = ops.flatten_tensors(tensors, alignment=alignment)
    manifest = {"version": MANIFEST_VERSION, "alignment": alignment, "entries": writer.entries, "tree": tree}
    return buffers, manifest


def unpack_state_dict(
    buffers: Mapping[str, Tensor],
    manifest: Manifest,
    *,
    into: dict[Any, Any] | None = None,
    meshes: Sequence[DeviceMesh] = (),
) -> dict[Any, Any]:
    """The state dict of a manifest.

    Args:
        buffers: As ``pack_state_dict`` made them, by device.
        manifest: Its manifest, maybe read back from JSON.
        into: A state dict of the same containers, tensors and layouts. Its tensors are filled in place, its plain
            values are replaced. Without ``into`` new containers are made, whose tensors are views into the buffers.
        meshes: The meshes of DTensors, needed without ``into``. Each is found by its shape, ranks and names.

    Returns:
        ``into``, or the new state dict.

    Raises:
        ValueError: ``into`` does not match the manifest (nothing was written then), a mesh is missing, or a buffer is
            too short.
    """
    if manifest.get("version") != MANIFEST_VERSION:
        raise ValueError(f"unpack_state_dict: manifest version {manifest.get('version')}, expected {MANIFEST_VERSION}")
    if into is None:
        tensors = [_rebuilt(entry, buffers, meshes) for entry in manifest["entries"]]
        return _value(manifest["tree"], tensors)
    writer = _ManifestWriter()
    tree = writer.tree_of(into)
    problems = _differences(manifest, writer.entries, tree)
    if problems:
        more = f" and {len(problems) - 10} more" if len(problems) > 10 else ""
        raise ValueError("unpack_state_dict: into does not match: " + "; ".join(problems[:10]) + more)
    with torch.no_grad():
        for device, indices in _by_device(manifest["entries"]).items():
            tensors = [writer.tensors[index] for index in indices]
            ops.unflatten_tensors_(tensors, _buffer(buffers, device), alignment=manifest["alignment"])
    _replace_plain_values(into, manifest["tree"])
    return into


# Their names before 0.1. The functions of this name in ``nested`` and in DCP make flat keys.
flatten_state_dict = pack_state_dict
unflatten_state_dict = unpack_state_dict


class _ManifestWriter:
    """Makes the tree of a state dict; ``tensors`` are its local tensors, in the order of ``entries``."""

    def __init__(self) -> None:
        self.entries: list[dict[str, Any]] = []
        self.tensors: list[Tensor] = []
        self._seen: dict[Any, int] = {}

    def tree_of(self, value: Any, at: KeyPath = ROOT) -> Any:
        return fold_paths(value, _members, self._node, at)

    def _node(self, at: KeyPath, value: Any, members: list[Any] | None) -> Any:
        if members is not None:
            if isinstance(value, Mapping):
                keys = (self.tree_of(key, at) for key in value)
                return {"dict": [list(pair) for pair in zip(keys, members, strict=True)]}
            return {"list" if type(value) is list else "tuple": members}
        if isinstance(value, Tensor):
            return {"tensor": self._entry(at.fqn, value)}
        if value is None or isinstance(value, (bool, str)) or type(value) is int:
            return value
        if isinstance(value, float):
            return {"float": value.hex()}
        if isinstance(value, (bytes, bytearray)):
            return {"bytes": base64.b64encode(value).decode()}
        if isinstance(value, torch.dtype):
            return {"dtype": _dtype_name(value)}
        if isinstance(value, torch.device):
            return {"device": str(value)}
        raise ValueError(
            f"pack_state_dict: {at.fqn} is a {type(value).__name__}, expected a tensor, a container or plain "
            "data; store what it holds (its state_dict()) instead"
        )

    def _entry(self, fqn: str, tensor: Tensor) -> int:
        local = local_tensor(tensor)
        reason = why_not_dense(local)
        reason = reason or ("is on the meta device: it has no bytes" if local.is_meta else why_not_own_boxes(tensor))
        if reason is not None:
            raise ValueError(f"pack_state_dict: {fqn} {reason}")
        entry: dict[str, Any] = {
            "fqn": fqn,
            "device": str(local.device),
            "offset": 0,
            "num_bytes": local.numel() * local.element_size(),
            "dtype": _dtype_name(local.dtype),
            "shape": list(local.shape),
        }
        if isinstance(tensor, DTensor):
            entry["global_shape"] = list(tensor.shape)
            entry["mesh"] = _mesh_values(tensor.device_mesh)
            entry["placements"] = [_placement_values(placement) for placement in tensor.placements]
        if has_own_boxes(tensor):
            entry["own_boxes"] = own_box_values(tensor)
        identity = (
            (local.untyped_storage()._cdata, local.storage_offset(), tuple(local.stride())),
            tuple(sorted((key, str(item)) for key, item in entry.items() if key != "fqn")),
        )
        if identity not in self._seen:
            self._seen[identity] = len(self.entries)
            self.entries.append(entry)
            self.tensors.append(local)
        return self._seen[identity]


def _members(at: KeyPath, value: Any) -> list[Member] | None:
    if isinstance(value, Mapping):
        return [(key, str(key), member) for key, member in value.items()]
    if type(value) in (list, tuple, torch.Size):
        return [(index, index, member) for index, member in enumerate(value)]
    return None


def _by_device(entries: Sequence[Mapping[str, Any]]) -> dict[str, list[int]]:
    """The positions of the entries of each device."""
    found: dict[str, list[int]] = {}
    for index, entry in enumerate(entries):
        found.setdefault(entry["device"], []).append(index)
    return found


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _mesh_values(mesh: DeviceMesh) -> dict[str, Any]:
    names = mesh.mesh_dim_names
    return {
        "device_type": mesh.device_type,
        "shape": list(mesh.shape),
        "ranks": mesh.mesh.flatten().tolist(),
        "names": None if names is None else list(names),
    }


def _placement_values(placement: Placement) -> dict[str, Any]:
    if isinstance(placement, _StridedShard):  # a subclass of Shard before torch 2.10
        return {"kind": "strided_shard", "dim": placement.dim, "split_factor": placement.split_factor}
    if isinstance(placement, Shard):
        return {"kind": "shard", "dim": placement.dim}
    if isinstance(placement, Partial):
        return {"kind": "partial", "reduce_op": placement.reduce_op}
    return {"kind": "replicate"}


def _placement(values: Mapping[str, Any]) -> Placement:
    if values["kind"] == "strided_shard":
        return _StridedShard(values["dim"], split_factor=values["split_factor"])
    if values["kind"] == "shard":
        return Shard(values["dim"])
    if values["kind"] == "partial":
        return Partial(values["reduce_op"])
    return Replicate()


def _buffer(buffers: Mapping[str, Tensor], device: str) -> Tensor:
    if device not in buffers:
        raise ValueError(f"unpack_state_dict: no buffer for {device}, got {sorted(buffers)}")
    return buffers[device]


def _rebuilt(entry: Mapping[str, Any], buffers: Mapping[str, Tensor], meshes: Sequence[DeviceMesh]) -> Tensor:
    buffer = _buffer(buffers, entry["device"])
    end = entry["offset"] + entry["num_bytes"]
    if end > buffer.numel():
        raise ValueError(f"unpack_state_dict: {entry['fqn']} ends at byte {end}, the buffer has {buffer.numel()}")
    dtype = getattr(torch, entry["dtype"])
    part = buffer[entry["offset"] : end]
    if part.storage_offset() % dtype.itemsize:  # a view needs aligned memory, a tight buffer has none
        part = part.clone()
    local = part.view(dtype).view(entry["shape"])
    if "own_boxes" in entry:
        set_own_boxes(local, entry["own_boxes"])
    if "mesh" not in entry:
        return local
    mesh = next((mesh for mesh in meshes if _mesh_values(mesh) == entry["mesh"]), None)
    if mesh is None:
        raise ValueError(
            f"unpack_state_dict: {entry['fqn']} is a DTensor on the mesh {entry['mesh']}; "
            "pass that mesh in meshes=, or a state dict in into="
        )
    stride = torch.empty(entry["global_shape"], dtype=dtype, device="meta").stride()
    placements = [_placement(values) for values in entry["placements"]]
    shape = torch.Size(entry["global_shape"])
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


_VALUE_OF_TEXT: dict[str, Callable[[str], Any]] = {
    "float": float.fromhex,
    "bytes": base64.b64decode,
    "dtype": partial(getattr, torch),
    "device": torch.device,
}


def _value(node: Any, tensors: Sequence[Tensor]) -> Any:
    if not isinstance(node, dict):
        return node
    ((kind, content),) = node.items()
    if kind == "tensor":
        return tensors[content]
    if kind in _VALUE_OF_TEXT:
        return _VALUE_OF_TEXT[kind](content)
    if kind == "dict":
        return {_value(key, tensors): _value(item, tensors) for key, item in content}
    items = [_value(item, tensors) for item in content]
    return items if kind == "list" else tuple(items)


def _differences(manifest: Manifest, entries: Sequence[Mapping[str, Any]], tree: Any) -> list[str]:
    problems = []
    if len(entries) != len(manifest["entries"]):
        problems.append(f"it has {len(entries)} distinct tensors, expected {len(manifest['entries'])}")
    for saved, wanted in zip(manifest["entries"], entries, strict=False):
        for what in ("fqn", "device", "dtype", "shape", "global_shape", "mesh", "placements", "own_boxes"):
            if saved.get(what) != wanted.get(what):
                problems.append(f"{saved['fqn']}: {what} is {wanted.get(what)}, expected {saved.get(what)}")
    if not problems and _containers(tree) != _containers(manifest["tree"]):
        problems.append("its containers or the places of its tensors differ")
    return problems


def _containers(node: Any) -> Any:
    """A tree without its plain values."""
    if not isinstance(node, dict):
        return None
    ((kind, content),) = node.items()
    if kind == "dict":
        return [kind, [[key, _containers(item)] for key, item in content]]
    if kind in ("list", "tuple"):
        return [kind, [_containers(item) for item in content]]
    return [kind, content] if kind == "tensor" else None


def _replace_plain_values(container: Any, node: dict[str, Any]) -> None:
    """Puts the plain values of a tree into a container like it; a tuple that holds nothing else is replaced whole."""
    ((kind, content),) = node.items()
    members = [(_value(key, ()), item) for key, item in content] if kind == "dict" else enumerate(content)
    for key, item in members:
        kind_of_item = next(iter(item)) if isinstance(item, dict) else "plain"
        held = item["tuple"] if kind_of_item == "tuple" else ()
        if kind_of_item in ("dict", "list") or any(_containers(member) is not None for member in held):
            _replace_plain_values(container[key], item)
        elif kind_of_item != "tensor" and kind != "tuple":
            set_member(container, key, _value(item, ()))
