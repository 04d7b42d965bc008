"""A state dict as one flat buffer per device and a manifest, and back.

The buffer holds the bytes of this rank's own tensors (of a DTensor: the local tensor), one behind the other; the
manifest says in plain data, which round-trips through JSON, what lies where and how the containers around it look. So a
state dict can be staged, sent or hashed as one piece of memory, in this job or in one on other meshes. Nothing here is
collective.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from torchtitan_ext import _core, ops
from torchtitan_ext.errors import MAX_NAMED, Problem, WrongValueError, first_line, named
from torchtitan_ext.layout.dtensor import Describer, is_on_mesh, local_tensor, why_not_dense
from torchtitan_ext.layout.layout import LayoutRules, ShardOrder, decide, shard_of
from torchtitan_ext.layout.own_boxes import (
    box_values,
    has_own_boxes,
    own_box_values,
    own_boxes,
    set_own_boxes,
    why_not_own_boxes,
)
from torchtitan_ext.layout.wrapper import parts_of
from torchtitan_ext.state.nested import ROOT, KeyPath, Member, consists_of_tensors, fold_paths, set_member

MANIFEST_VERSION = 1

Manifest = dict[str, Any]
"""``version``, ``alignment`` (bytes), ``entries`` (one per distinct tensor) and ``tree`` (the containers).

An entry has ``fqn`` (the first place the tensor stands at), ``device``, ``offset`` and ``num_bytes`` in that device's
buffer, ``dtype``, ``shape`` (local), for a DTensor ``global_shape``, ``mesh`` and ``placements``. ``own_boxes`` has
what a tensor describes itself (``layout/own_boxes.py``), ``boxes`` the same of a DTensor, where this rank can tell.
A node of the tree is a JSON scalar or a dict with one key that names its kind.
"""


def flatten_state_dict(
    state_dict: Mapping[Any, Any],
    *,
    alignment: int = ops.DEFAULT_ALIGNMENT,
    layouts: Mapping[str, ShardOrder] | None = None,
) -> tuple[dict[str, Tensor], Manifest]:
    """Copies all tensors of a nested state dict into one buffer per device, by one operator each. Not collective.

    Args:
        state_dict: Dicts, lists and tuples of tensors, DTensors and plain values (None, bool, int, float, str, bytes,
            dtypes, devices). A tensor that stands at several places (tied weights) is kept once. A tensor subclass that
            consists of others goes by its parts.
        alignment: Each tensor begins at a multiple of it, in bytes.
        layouts: Sharding orders that placements cannot express, by canonical fqn or glob: for ``boxes`` alone.

    Returns:
        The buffers (1-d, uint8) by device, and the manifest.

    Raises:
        WrongValueError: A value is neither a tensor nor plain data, or a tensor is on the meta device; names it.
    """
    writer = _ManifestWriter(LayoutRules(layouts))
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


def unflatten_state_dict(
    buffers: Mapping[str, Tensor],
    manifest: Manifest,
    *,
    into: dict[Any, Any] | None = None,
    meshes: Sequence[DeviceMesh] = (),
    boxes: bool = False,
) -> dict[Any, Any]:
    """The state dict of a manifest. Not collective.

    Args:
        buffers: As ``flatten_state_dict`` made them, by device.
        manifest: Its manifest, maybe read back from JSON. It may come from elsewhere: what cannot be is refused before
            memory is asked for, and nothing in it is run.
        into: A state dict of the same containers, tensors and layouts. Its tensors are filled in place, its plain
            values are replaced. Without ``into`` new containers are made, whose tensors are views into the buffers.
        meshes: The meshes of DTensors, needed without ``into``. Each is found by its shape, ranks and names.
        boxes: Without ``into``: a DTensor becomes a plain tensor that describes the boxes which it held
            (``global_shape``, ``global_offsets`` and so on), for which no mesh is needed: ``tte.reshard`` and
            ``tte.save`` take it in any job.

    Returns:
        ``into``, or the new state dict.

    Raises:
        WrongValueError: The manifest cannot be, or not of these buffers; ``into`` does not match it (nothing was
            written then); a mesh is missing; or with ``boxes`` the rank could not tell which ones a DTensor holds.
    """
    with _reading_manifest():
        if not torch.compiler.is_compiling():  # what a graph knows was made in it
            _check_manifest(manifest, buffers)
        if into is None:
            tensors = [_rebuilt(entry, buffers, meshes, boxes=boxes) for entry in manifest["entries"]]
            restored = _value(manifest["tree"], tensors)
            if not isinstance(restored, dict):
                raise _wrong(f"it describes a {type(restored).__name__}, expected a state dict")
            return restored
        writer = _ManifestWriter()
        tree = writer.tree_of(into)
        problems = _differences(manifest, writer.entries, tree)
        if problems:
            raise WrongValueError("unflatten_state_dict: into does not match: " + "; ".join(_first(problems)))
        _fill(writer.tensors, buffers, manifest)
        _replace_plain_values(into, manifest["tree"])
        return into


def _first(problems: Sequence[str]) -> list[str]:
    more = [f"and {len(problems) - MAX_NAMED} more"] if len(problems) > MAX_NAMED else []
    return [*problems[:MAX_NAMED], *more]


@torch.no_grad()
def _fill(tensors: Sequence[Tensor], buffers: Mapping[str, Tensor], manifest: Manifest) -> None:
    entries, alignment = manifest["entries"], manifest["alignment"]
    positions = _by_device(entries)
    for device, indices in positions.items():
        offsets = ops.flat_offsets([tensors[index] for index in indices], alignment=alignment)
        if offsets[:-1] != [entries[index]["offset"] for index in indices]:
            raise _wrong(f"its tensors on {device} do not lie where its alignment of {alignment} puts them")
    for device, indices in positions.items():
        ops.unflatten_tensors_([tensors[index] for index in indices], buffers[device], alignment=alignment)


def _wrong(text: str) -> WrongValueError:
    return WrongValueError(f"unflatten_state_dict: the manifest cannot be read: {text}")


@contextmanager
def _reading_manifest() -> Iterator[None]:
    """What Python and torch raise of data that no ``flatten_state_dict`` wrote is one error."""
    try:
        yield
    except WrongValueError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RecursionError, RuntimeError, TypeError, ValueError) as error:
        raise _wrong(f"{type(error).__name__}: {first_line(error)}") from None


def _check_manifest(manifest: Manifest, buffers: Mapping[str, Tensor]) -> None:
    """Raises WrongValueError for tensors that do not lie in the buffers."""
    if manifest.get("version") != MANIFEST_VERSION:
        found = manifest.get("version")
        raise WrongValueError(f"unflatten_state_dict: manifest version {found}, expected {MANIFEST_VERSION}")
    for entry in manifest["entries"]:
        buffer = buffers.get(entry["device"])
        if buffer is None:
            found = named(sorted(buffers)) or "none"
            raise WrongValueError(f"unflatten_state_dict: no buffer for {entry['device']}, got {found}")
        item_bytes = _dtype_of(entry["dtype"]).itemsize
        reason = _core.why_no_part(entry["offset"], entry["num_bytes"], item_bytes, entry["shape"], buffer.nbytes)
        if reason:
            raise _wrong(f"{entry['fqn']}: {reason}")


class _ManifestWriter:
    """Makes the tree of a state dict; ``tensors`` are its local tensors, in the order of ``entries``."""

    def __init__(self, rules: LayoutRules | None = None) -> None:
        self._describer = None if rules is None else Describer(rules)
        self.entries: list[dict[str, Any]] = []
        self.tensors: list[Tensor] = []
        self._seen: dict[Any, list[int]] = {}

    def tree_of(self, value: Any, at: KeyPath = ROOT) -> Any:
        return fold_paths(value, _members, self._node, at)

    def _node(self, at: KeyPath, value: Any, members: list[Any] | None) -> Any:
        if members is not None:
            if isinstance(value, Mapping):
                keys = (self.tree_of(key, at) for key in value)
                return {"dict": [list(pair) for pair in zip(keys, members, strict=True)]}
            if isinstance(value, Tensor):
                return {"wrapper": [type(value).__name__, at.fqn, members]}
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
        raise WrongValueError(
            f"flatten_state_dict: {at.fqn} is a {type(value).__name__}, expected a tensor, a container or plain "
            "data; store what it holds (its state_dict()) instead"
        )

    def _entry(self, fqn: str, tensor: Tensor) -> int:
        local, states_boxes = local_tensor(tensor), has_own_boxes(tensor)
        reason = why_not_dense(local) or ("is on the meta device: it has no bytes" if local.is_meta else None)
        reason = reason or (why_not_own_boxes(tensor) if states_boxes else None)
        if reason is not None:
            raise WrongValueError(f"flatten_state_dict: {fqn} {reason}")
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
            boxes = self._boxes_of(fqn, tensor)
            if boxes is not None:
                entry["boxes"] = boxes
        if states_boxes:
            entry["own_boxes"] = own_box_values(tensor)
        known = self._known(local, entry)
        if known is None:
            self.entries.append(entry)
            self.tensors.append(local)
        return len(self.entries) - 1 if known is None else known

    def _known(self, local: Tensor, entry: Mapping[str, Any]) -> int | None:
        """The number of an entry that is the same tensor; takes this one for the next."""
        if torch.compiler.is_compiling():  # a graph knows no addresses
            return next((number for number, other in enumerate(self.tensors) if other is local), None)
        memory = (local.untyped_storage()._cdata, local.storage_offset(), local.stride())
        seen = self._seen.setdefault(memory, [])
        for number in seen:
            if {**self.entries[number], "fqn": entry["fqn"]} == entry:
                return number
        seen.append(len(self.entries))
        return None

    def _boxes_of(self, fqn: str, tensor: DTensor) -> list[Any] | None:
        """What ``own_box_values`` would say of a DTensor; ``None`` where placements leave it open, as Partial does."""
        if self._describer is None or not is_on_mesh(tensor):
            return None
        report = self._describer.describe(fqn, tensor)
        if isinstance(report, Problem):
            return None
        steps = decide(fqn, [report])
        return None if isinstance(steps, Problem) else box_values(report.global_shape, shard_of(report, steps).chunks)


def _members(at: KeyPath, value: Any) -> list[Member] | None:
    if type(value) in (Tensor, DTensor):  # nearly all: asking whether one is a Mapping takes longer than all else
        return None
    if isinstance(value, Mapping):
        return [(key, str(key), member) for key, member in value.items()]
    if type(value) in (list, tuple, torch.Size):
        return [(index, index, member) for index, member in enumerate(value)]
    if consists_of_tensors(value):
        return [(name, name, part) for name, part in parts_of(value).items()]
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


def _rebuilt(
    entry: Mapping[str, Any], buffers: Mapping[str, Tensor], meshes: Sequence[DeviceMesh], *, boxes: bool
) -> Tensor:
    dtype = _dtype_of(entry["dtype"])
    part = buffers[entry["device"]][entry["offset"] : entry["offset"] + entry["num_bytes"]]
    # A view needs aligned memory, which a tight buffer has not; a graph does not know.
    if torch.compiler.is_compiling() or part.storage_offset() % dtype.itemsize:
        part = part.clone()
    local = part.view(dtype).view(entry["shape"])
    if boxes and "mesh" in entry and "boxes" not in entry:
        raise WrongValueError(
            f"unflatten_state_dict: {entry['fqn']}: the placements {entry['placements']} did not say which boxes this "
            "rank holds; pass layouts= to flatten_state_dict, or the mesh in meshes="
        )
    own = entry.get("boxes" if boxes and "mesh" in entry else "own_boxes")
    if own is not None:
        set_own_boxes(local, own)
        own_boxes(local)
    if "mesh" not in entry or boxes:
        return local
    mesh = next((mesh for mesh in meshes if _mesh_values(mesh) == entry["mesh"]), None)
    if mesh is None:
        raise WrongValueError(
            f"unflatten_state_dict: {entry['fqn']} is a DTensor on the mesh {entry['mesh']}; "
            "pass that mesh in meshes=, or boxes=True, or a state dict in into="
        )
    stride = torch.empty(entry["global_shape"], dtype=dtype, device="meta").stride()
    placements = [_placement(values) for values in entry["placements"]]
    shape = torch.Size(entry["global_shape"])
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


def _dtype_of(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise _wrong(f"torch {torch.__version__} has no dtype {name!r}")
    return found


_VALUE_OF_TEXT: dict[str, Callable[[str], Any]] = {
    "float": float.fromhex,
    "bytes": base64.b64decode,
    "dtype": _dtype_of,
    "device": torch.device,
}


def _value(node: Any, tensors: Sequence[Tensor]) -> Any:
    if not isinstance(node, dict):
        return node
    ((kind, content),) = node.items()
    if kind == "tensor":
        if type(content) is not int or not 0 <= content < len(tensors):
            raise _wrong(f"it has no tensor {content!r}")
        return tensors[content]
    if kind == "wrapper":
        class_name, fqn, _ = content
        raise WrongValueError(
            f"unflatten_state_dict: {fqn} is a {class_name}, which no manifest can make; pass a state dict in into="
        )
    if kind in _VALUE_OF_TEXT:
        return _VALUE_OF_TEXT[kind](content)
    if kind == "dict":
        return {_value(key, tensors): _value(item, tensors) for key, item in content}
    if kind not in ("list", "tuple"):
        raise _wrong(f"it has a value of the unknown kind {kind!r}")
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
    is_equal = tree == manifest["tree"]  # most often, and quickly found
    if not problems and not is_equal and _containers(tree) != _containers(manifest["tree"]):
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
    if kind == "wrapper":
        return [kind, content[0], [_containers(item) for item in content[2]]]
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
        elif kind_of_item not in ("tensor", "wrapper") and kind != "tuple":
            set_member(container, key, _value(item, ()))
