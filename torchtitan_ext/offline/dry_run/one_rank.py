"""Describes what one rank of a job holds, from its state dict or from a checkpoint and a mesh."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from torchtitan_ext import _core
from torchtitan_ext.checkpoint.planners.items import cut_problems
from torchtitan_ext.checkpoint.rules.load_rules import ComponentPlan, component_of
from torchtitan_ext.checkpoint.rules.policy import ElasticPolicy, Source
from torchtitan_ext.checkpoint.tables.component import PER_RANK, family_of
from torchtitan_ext.checkpoint.tables.key_table import (
    KeyEntry,
    KeyTable,
    ObjectEntry,
    TensorEntry,
    check_objects,
    describe_state,
)
from torchtitan_ext.layout.dtensor import local_tensor
from torchtitan_ext.layout.layout import LayoutRules, ShardOrder, ShardReport, local_shard
from torchtitan_ext.offline.dry_run.host_memory import Device
from torchtitan_ext.offline.placement_rules import PlacementRules
from torchtitan_ext.state.nested import flatten_state_dict
from torchtitan_ext.storage.metadata.saved_metadata import recorded_paths


@dataclass(frozen=True)
class OneRank:
    """What one rank holds.

    Attributes:
        table: Its keys.
        value_bytes: The size of each value that is no tensor, as it is written.
        assumed: Tensors for which the dim that ``tp`` cuts is a guess.
        is_packed: Whether the elements of some tensor do not lie row by row in memory.
        device: Where its tensors lie; ``None`` if nothing says it.
    """

    table: KeyTable
    value_bytes: Mapping[str, int]
    assumed: tuple[str, ...] = ()
    is_packed: bool = False
    device: Device | None = None

    def restricted(self, holds: Callable[[str], bool]) -> OneRank:
        """What the rank holds, without the keys that ``holds`` denies."""
        entries = {fqn: entry for fqn, entry in self.table.entries.items() if holds(fqn)}
        return dataclasses.replace(self, table=dataclasses.replace(self.table, entries=entries))


def rank_of_state(values: Mapping[str, Any], layouts: Mapping[str, ShardOrder] | None) -> OneRank:
    """What a rank with this state dict holds. Tensors may be on the meta device."""
    flat = flatten_state_dict(values, tuples="as_stock")
    table = describe_state(flat.values, flat.stock_paths, LayoutRules(layouts))
    unread, unwritable = check_objects(flat.values, table)
    problems = (*table.problems, *cut_problems(flat.values, table), *unwritable)
    troubled = {problem.fqn for problem in unwritable}
    sizes = {
        fqn: _pickled_bytes(flat.values[fqn])
        for fqn, entry in table.entries.items()
        if isinstance(entry, ObjectEntry) and fqn not in troubled
    }
    tensors = [value for value in flat.values.values() if isinstance(value, torch.Tensor)]
    is_packed = any(type(local) is torch.Tensor and not local.is_contiguous() for local in map(local_tensor, tensors))
    table = dataclasses.replace(table, problems=problems, unread=unread)
    return OneRank(table, sizes, is_packed=is_packed, device=_device_of(tensors))


def rank_of_checkpoint(metadata: Metadata, source: Source) -> OneRank:
    """What rank 0 of a job that asks for all selected keys of a checkpoint holds, in whole tensors.

    Of the values that each rank keeps under a name of its own, rank 0 has only its own.
    """
    paths = recorded_paths(metadata.planner_data, metadata.state_dict_metadata)
    saved_tensors = {fqn: isinstance(one, TensorStorageMetadata) for fqn, one in metadata.state_dict_metadata.items()}
    components = components_of(saved_tensors, paths, ElasticPolicy())
    entries: dict[str, KeyEntry] = {}
    sizes: dict[str, int] = {}
    families: set[str] = set()
    for fqn, saved in metadata.state_dict_metadata.items():
        if not source.selects(fqn, component_of(fqn, components, is_tensor=saved_tensors[fqn])):
            continue
        if isinstance(saved, TensorStorageMetadata):
            shape = tuple(saved.size)
            report = ShardReport(shape, local_sizes=shape)
            entries[fqn] = TensorEntry(report, saved.properties.dtype, saved.properties.requires_grad)
            continue
        family = family_of(fqn)
        if family != fqn and family in families:
            continue
        families.add(family)
        place = (metadata.storage_data or {}).get(MetadataIndex(fqn))
        own = PER_RANK.sub(r"\g<1>0", fqn)
        entries[own] = ObjectEntry()
        sizes[own] = getattr(place, "length", 0)
    known = {fqn: paths[fqn] for fqn in entries if fqn in paths}
    return OneRank(KeyTable(entries, stock_paths=known), sizes)


def components_of(
    is_tensor: Mapping[str, bool], paths: Mapping[str, Any], policy: ElasticPolicy
) -> dict[str, ComponentPlan]:
    """The entries at the top of the state dict with these flat keys, without tensors, and what a load does with each.

    Args:
        is_tensor: Whether each key is a tensor.
        paths: The recorded path of each key in the nested state dict. Entries that are no paths are ignored.
    """
    known = {fqn: path for fqn in is_tensor if isinstance(path := paths.get(fqn), tuple) and path}
    tops = {fqn: str(known[fqn][0]) if fqn in known else fqn.split(".")[0] for fqn in is_tensor}
    names = dict.fromkeys(top for fqn, top in tops.items() if top != fqn or not is_tensor[fqn])
    return {name: ComponentPlan(policy.component_action(name)) for name in names}


def place_on_mesh(one: OneRank, rules: PlacementRules, chunks: Mapping[str, _core.ChunkIndex]) -> OneRank:
    """Cuts the plain tensors of a rank as the rules say. Tensors under a rank's own name stay whole.

    Args:
        chunks: The chunks in which tensors were saved, by key.
    """
    entries: dict[str, KeyEntry] = {}
    assumed = []
    origin = (0,) * len(rules.mesh.shape)
    for fqn, entry in one.table.entries.items():
        entries[fqn] = entry
        if not isinstance(entry, TensorEntry) or entry.report.mesh is not None or family_of(fqn) != fqn:
            continue
        shape = entry.report.global_shape
        placed = rules.place(fqn, shape, chunks.get(fqn))
        if placed.placements is None:
            continue
        sizes = local_shard(shape, rules.mesh.shape, placed.steps, origin).sizes
        report = ShardReport(shape, rules.mesh, origin, placed.placements, sizes)
        entries[fqn] = dataclasses.replace(entry, report=report)
        assumed += [fqn] if placed.is_assumed else []
    return dataclasses.replace(one, table=dataclasses.replace(one.table, entries=entries), assumed=tuple(assumed))


def _device_of(tensors: Iterable[torch.Tensor]) -> Device | None:
    """Where tensors lie; DTensors lie where their meshes say, other tensors on meta say nothing."""
    found = {value.device_mesh.device_type if isinstance(value, DTensor) else value.device.type for value in tensors}
    found.discard("meta")
    return None if not found else "cpu" if found == {"cpu"} else "cuda"


def _pickled_bytes(value: Any) -> int:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.tell()
