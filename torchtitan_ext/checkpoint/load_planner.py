"""A drop-in planner for ``dcp.load`` that reshards any layout, or refuses before a target is changed."""

from __future__ import annotations

import copy
import dataclasses
import io
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint._sharded_tensor_utils import _flatten_sharded_tensors
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner import LoadPlanner as StockLoadPlanner
from torch.distributed.checkpoint.utils import find_state_dict_object
from torch.distributed.tensor import DTensor

from torchtitan_ext.checkpoint.agreement import Agreement, agree, unforeseen_steps, unused_layouts
from torchtitan_ext.checkpoint.cast import CastPolicy, number_for, number_from
from torchtitan_ext.checkpoint.cuts import unfillable_cuts
from torchtitan_ext.checkpoint.key_table import (
    BoxesEntry,
    KeyEntry,
    KeyTable,
    ObjectEntry,
    TensorEntry,
    describe_state,
)
from torchtitan_ext.checkpoint.load_rules import ComponentPlan, LoadRules, ReadRequest
from torchtitan_ext.checkpoint.misfits import find_misfit
from torchtitan_ext.checkpoint.missing_keys import missing_problems, nothing_matches
from torchtitan_ext.checkpoint.per_rank_keys import unclaimed_problems
from torchtitan_ext.checkpoint.policy import ElasticPolicy, Source, check_rules
from torchtitan_ext.checkpoint.rank_table import EncodedTable, RankTable, encode_table
from torchtitan_ext.checkpoint.read_items import (
    in_file_order,
    object_item,
    tensor_items,
    unread_problems,
    wanted_chunks,
)
from torchtitan_ext.checkpoint.report import LoadReport, build_report, disagreements, warn_of_leftovers
from torchtitan_ext.checkpoint.saved_chunks import ChunkList, Part, SavedChunks, cover_problems
from torchtitan_ext.checkpoint.storage_entries import name_files_of_overlap, name_metadata, storage_problems
from torchtitan_ext.errors import CheckpointReadError, DamagedValueError, Problem, check_argument, refusal
from torchtitan_ext.layout.dtensor import local_tensor
from torchtitan_ext.layout.layout import ShardReport, Steps
from torchtitan_ext.layout.rules import LayoutRules, ShardOrder
from torchtitan_ext.layout.wrapper import box_of, parts_of, why_not_whole
from torchtitan_ext.state.nested import (
    FlatStateDict,
    Path,
    flatten_state_dict,
    materialize_meta,
    on_devices_of,
    set_value,
)
from torchtitan_ext.state.plain_value import DamagedBytesError, read_value


@dataclass(frozen=True)
class ReadDecision:
    """What the coordinator tells one rank.

    Attributes:
        steps: Sharding orders that are not the first of the rank's ``candidate_steps``.
        is_cover_checked: Whether the coordinator's metadata is the rank's own, so that its check of the cover holds.
        report: What the load does, where a policy asked for it.
    """

    steps: Mapping[str, Steps]
    is_cover_checked: bool
    report: LoadReport | None


class LoadPlanner(StockLoadPlanner):
    """Drop-in for ``DefaultLoadPlanner``: pass it as ``planner=`` to ``dcp.load``.

    DCP calls, in this order:

    1. ``set_up_planner`` and 2. ``create_local_plan`` on every rank,
    3. ``create_global_plan`` on the coordinator,
    4. ``finish_plan`` on every rank,
    5. ``load_bytes``, or ``resolve_tensor`` and ``commit_tensor``, on every rank, once per item it reads.

    Everything that can be refused is refused in 3, in one report over all ranks; targets, meta tensors included, change
    from step 4 on.

    Args:
        flatten_state_dict: As in stock: nested containers become flat keys.
        flatten_sharded_tensors: As in stock.
        allow_partial_load: Targets that the checkpoint lacks are left as they are. At least one must be there.
        layouts: Sharding orders that the targets' placements cannot express, by canonical fqn or glob. One that matches
            no target on any rank, and nothing in the checkpoint, is refused where there are targets on meshes.
        cast: Dtype changes: ``"exact"`` allows those that keep every value, ``"allow"`` those that keep the kind of
            number (float32 -> bfloat16), ``"forbid"`` none.
        allow_unclaimed: Globs of per-rank entries (keys with a component like ``dp_rank_7``) of which some ranks'
            may stay unread.
        weights_only: Read non-tensor values without running code from the checkpoint. ``False`` trusts it, as stock
            does.
        policy: What to do with each component, and with keys that are missing or unexpected. Without one, keys that
            the checkpoint lacks are refused and those that nothing asks for ignored, as in stock. Objects that
            reshard by a rule of their own need ``tte.load``: it reads what they saved before the plan is made.
        source: Which keys come from this checkpoint, and under which names. All, under their own, by default.

    Attributes:
        rules: The policy and the source, as one.
        report: What the load does, from step 4 on and after ``tte.load``, on every rank; ``None`` without a policy.

    Raises:
        StateRefusedError: (a subclass; inside DCP's ``CheckpointException``) from step 3, the same on every rank.
        CheckpointReadError: A value could not be read back; tensors may have been written by then.
    """

    def __init__(
        self,
        flatten_state_dict: bool = True,
        flatten_sharded_tensors: bool = True,
        allow_partial_load: bool = False,
        *,
        layouts: Mapping[str, ShardOrder] | None = None,
        cast: CastPolicy = "exact",
        allow_unclaimed: Collection[str] = (),
        weights_only: bool = True,
        policy: ElasticPolicy | None = None,
        source: Source | None = None,
    ) -> None:
        check_rules("LoadPlanner", policy)
        check_argument("LoadPlanner", "source", source, (Source, type(None)), "a Source, such as Source(rename=...)")
        if cast not in ("exact", "allow", "forbid"):
            raise ValueError(f"LoadPlanner: got cast={cast!r}, expected 'exact', 'allow' or 'forbid'")
        if isinstance(allow_unclaimed, str):
            raise ValueError(f"LoadPlanner: got allow_unclaimed={allow_unclaimed!r}, expected a list of globs")
        self.flatten_state_dict = flatten_state_dict
        self.flatten_sharded_tensors = flatten_sharded_tensors
        self.allow_partial_load = allow_partial_load
        self._layouts = LayoutRules(layouts)
        self._cast = cast
        self._allow_unclaimed = tuple(allow_unclaimed)
        self.weights_only = weights_only
        self.rules = LoadRules(Source() if source is None else source, policy=policy)
        self.report: LoadReport | None = None
        self.original_state_dict: dict[str, Any] = {}
        self.state_dict: dict[str, Any] = {}
        self.mappings: dict[str, Any] = {}
        self.metadata = Metadata({})
        self.is_coordinator = False
        self._flat = FlatStateDict()
        self._table = KeyTable({})
        self._encoded: EncodedTable = encode_table(self._table)
        self._saved_chunks = SavedChunks()
        self._saved_names: dict[str, str] = {}
        self._numbers: dict[str, type] = {}
        self._values_read: dict[str, Any] = {}

    @property
    def wanted(self) -> KeyTable:
        """What this rank reads, from step 2 on: entries by keys of the state dict, as they were saved."""
        return self._table

    def with_rules(self, rules: LoadRules) -> LoadPlanner:
        """A planner with the same options that follows these rules; of the same class, subclasses included."""
        planner = copy.copy(self)
        planner.rules = rules
        planner._values_read = {}
        return planner

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        if metadata is None:
            raise ValueError(
                "LoadPlanner: got no metadata; the checkpoint has no .metadata file, or it is not finished"
            )
        self.original_state_dict = state_dict
        self.metadata = metadata
        self._saved_chunks = SavedChunks()
        self.is_coordinator = is_coordinator
        if self.flatten_state_dict:
            self._flat = flatten_state_dict(state_dict, is_opaque=self._is_saved_whole, is_whole=self._is_wrapper_whole)
        else:
            paths: dict[str, Path] = {fqn: (fqn,) for fqn in state_dict}
            self._flat = FlatStateDict(values=dict(state_dict), paths=paths, stock_paths=paths)
        if self.flatten_sharded_tensors and any(
            isinstance(value, ShardedTensor) for value in self._flat.values.values()
        ):
            self._flat.values = _flatten_sharded_tensors(self._flat.values)
        self.mappings = self._flat.stock_paths
        self.state_dict = self._flat.values

    def create_local_plan(self) -> LoadPlan:
        rules = self._rules_for_components()
        table = describe_state(self.state_dict, {}, self._layouts)
        problems: list[Problem] = []
        wanted: dict[str, KeyEntry] = {}
        self._saved_names, self._numbers = {}, {}
        missing, left, refused = [], [], []
        for fqn, entry in table.entries.items():
            if not rules.is_loaded(fqn, is_tensor=not isinstance(entry, ObjectEntry)):
                left.append(fqn)
                continue
            saved_name = rules.source.saved_name(fqn)
            saved = self.metadata.state_dict_metadata.get(saved_name)
            if saved is None:
                missing.append(fqn)
                continue
            problem = find_misfit(fqn, self.state_dict[fqn], entry, saved, self._cast)
            if problem is not None:
                problems.append(problem)
                if problem.kind != "wrong_dtype":  # where only the dtype does not fit, all else is compared
                    refused.append(fqn)
                    continue
            wanted[fqn] = self._entry_as_saved(fqn, entry, saved)
            if saved_name != fqn:
                self._saved_names[fqn] = saved_name
        problems += [problem for problem in table.problems if problem.fqn not in left]
        wanted_table = KeyTable(entries=wanted, layouts=table.layouts, wrappers=table.wrappers)
        problems += unfillable_cuts(self.state_dict, wanted_table, self._chunk_list)
        self._table = dataclasses.replace(wanted_table, problems=tuple(problems))
        self._encoded = encode_table(self._table)
        request = ReadRequest(
            self._encoded.message,
            name_metadata(self.metadata),
            rules=f"{rules.policy}, {rules.source}",
            saved_names=self._saved_names,
            missing=() if self.allow_partial_load else tuple(missing),
            skipped=tuple(missing) if self.allow_partial_load else (),
            left=tuple(left),
            refused=tuple(refused),
            components=rules.components,
        )
        return LoadPlan([], planner_data=request)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        requests: list[ReadRequest] = [plan.planner_data for plan in global_plan]
        tables = [request.table for request in requests]
        agreement = agree(tables, every_rank_reports=False)
        saved_names = {fqn: name for request in requests for fqn, name in request.saved_names.items()}
        held = (fqn for fqn, of_class in zip(agreement.names, agreement.class_of, strict=True) if of_class is not None)
        wanted = {fqn: saved_names.get(fqn, fqn) for fqn in held}
        problems = list(agreement.problems)
        is_cover_checked = len({request.metadata_name for request in requests}) == 1
        if is_cover_checked:
            found = cover_problems(agreement, wanted, self.metadata, self._saved_chunks)
            problems += [name_files_of_overlap(problem, self.metadata) for problem in found]
        if not wanted:
            problems += nothing_matches(requests, self.metadata)
        saved_wanted = set(wanted.values())
        problems += storage_problems(self.metadata, saved_wanted)
        problems += unclaimed_problems(saved_wanted, len(requests), self.metadata, self._allow_unclaimed)
        problems += disagreements([request.rules for request in requests])
        problems += self._unused_layouts(tables, agreement)
        report = None
        rules = self.rules
        if rules.policy is None:
            absent = dict.fromkeys(fqn for request in requests for fqn in request.missing)
            problems += missing_problems(list(absent), self.metadata, len(requests))
        else:
            report = build_report(
                requests,
                wanted,
                agreement.ranks_and_meshes(),
                self.metadata,
                rules.policy,
                rules.source,
                rules.selects,
                problems,
            )
            problems = list(report.problems)
        if problems:
            raise refusal("load", problems, report)
        unforeseen = unforeseen_steps(requests, agreement)
        plans = []
        for rank, plan in enumerate(global_plan):
            decision = ReadDecision(unforeseen[rank], is_cover_checked, report)
            plans.append(dataclasses.replace(plan, planner_data=decision))
        return plans

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        decision: ReadDecision = central_plan.planner_data
        items: list[ReadItem] = []
        problems: list[Problem] = []
        parts: list[tuple[str, str, Part]] = []
        found: dict[object, list[Part]] = {}
        for section, (fqns, kinds) in enumerate(zip(self._encoded.names, self._encoded.kind_of, strict=True)):
            for fqn, kind in zip(fqns, kinds, strict=True):
                entry = self._table.entries[fqn]
                if isinstance(entry, ObjectEntry):
                    items.append(object_item(fqn, self._saved_names.get(fqn, fqn)))
                    continue
                chunk_list, steps = self._chunk_list(fqn), decision.steps.get(fqn)
                # Keys of one kind and order that are saved alike are read alike; boxes may differ from key to key.
                alike = (section, kind, steps, chunk_list, fqn if isinstance(entry, BoxesEntry) else "")
                if alike not in found:
                    found[alike] = chunk_list.find_parts(wanted_chunks(entry, steps))
                saved_name = self._saved_names.get(fqn, fqn)
                of_key = [(fqn, saved_name, part) for part in found[alike]]
                if not decision.is_cover_checked:
                    problems += unread_problems(fqn, entry, tensor_items(of_key))
                parts += of_key
        items += tensor_items(parts)
        if problems:
            raise refusal("load", problems)
        self.report = decision.report
        if self.is_coordinator and self.report is not None and self.rules.policy is not None:
            warn_of_leftovers(self.report, self.rules.policy)
        if not self.rules.values_first:
            self.change_targets()
        return dataclasses.replace(central_plan, items=in_file_order(items, self.metadata))

    def _bump_versions(self, fqns: Iterable[str]) -> None:
        """Of DTensors: they count apart from the local tensors that are written, and graphs hold the DTensors."""
        values = [self.state_dict[fqn] for fqn in fqns]
        torch.autograd.graph.increment_version([value for value in values if isinstance(value, DTensor)])

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        fqn = read_item.dest_index.fqn
        try:
            loaded = self._as_target(fqn, read_value(value, weights_only=self.weights_only))
        except ValueError as error:
            kind = DamagedValueError if isinstance(error, DamagedBytesError) else CheckpointReadError
            raise kind(fqn, str(error)) from None
        if self.rules.values_first:
            self._values_read[fqn] = loaded
        else:
            self._place(fqn, loaded)

    def change_targets(self) -> None:
        """From here on targets change: meta tensors get memory, versions are bumped, values read so far are placed.

        ``finish_plan`` calls it; where values come first ``tte.load`` does, once all ranks have read theirs.
        """
        materialize_meta(self.original_state_dict, self._flat, self._table.entries)
        self._bump_versions(fqn for fqn, entry in self._table.entries.items() if not isinstance(entry, ObjectEntry))
        for fqn, value in self._values_read.items():
            self._place(fqn, value)
        self._values_read.clear()

    def _place(self, fqn: str, value: Any) -> None:
        target = self.state_dict[fqn]
        if isinstance(target, torch.Tensor):
            self._bump_versions([fqn])
            local_tensor(target).fill_(value)
            return
        self.state_dict[fqn] = value
        set_value(self.original_state_dict, self._flat.paths[fqn], value)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        return self.transform_tensor(read_item, self.lookup_tensor(read_item.dest_index))

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """``resolve_tensor`` gave a view of the target; only where that is a number there is something left to do."""
        fqn = read_item.dest_index.fqn
        if fqn in self._numbers:
            try:
                number = number_from(self.state_dict[fqn], self._numbers[fqn])
            except ValueError as error:
                raise CheckpointReadError(fqn, str(error)) from None
            set_value(self.original_state_dict, self._flat.paths[fqn], number)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """The local tensor that an index leads to. For subclasses, as in stock."""
        entry = self._table.entries.get(index.fqn)  # none where storage brings a plan of its own
        if entry is None or isinstance(entry, BoxesEntry):
            return find_state_dict_object(self.state_dict, index)
        return local_tensor(self.state_dict[index.fqn])

    def transform_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> torch.Tensor:
        """The box of the local tensor that an item fills. For subclasses, as in stock."""
        box = box_of(tensor, read_item.dest_offsets, read_item.lengths)
        if isinstance(box, str):  # of an order of sharding that only all ranks together could tell
            raise CheckpointReadError(read_item.dest_index.fqn, box)
        return box

    def _entry_as_saved(
        self, fqn: str, entry: KeyEntry, saved: TensorStorageMetadata | BytesStorageMetadata
    ) -> KeyEntry:
        """The entry of what is read: not that of the target where one of them is a number and the other a tensor."""
        if isinstance(saved, BytesStorageMetadata):
            return ObjectEntry()
        if not isinstance(entry, ObjectEntry):
            return entry
        self._numbers[fqn] = type(self.state_dict[fqn])
        self.state_dict[fqn] = torch.empty(saved.size, dtype=saved.properties.dtype, device="cpu")
        shape = tuple(saved.size)
        return TensorEntry(ShardReport(global_shape=shape, local_sizes=shape), saved.properties.dtype, False)

    def _as_target(self, fqn: str, loaded: Any) -> Any:
        target = self.state_dict[fqn]
        if isinstance(target, torch.Tensor):
            return number_for(loaded, target.dtype, self._cast)
        return on_devices_of(target, loaded)

    def _rules_for_components(self) -> LoadRules:
        """The rules with what becomes of each top-level key; ``tte.load`` has worked that out before."""
        policy = self.rules.policy
        if policy is None or self.rules.components:
            return self.rules
        names = [str(k) for k, value in self.original_state_dict.items() if not isinstance(value, torch.Tensor)]
        components = {name: ComponentPlan(policy.component_action(name)) for name in names}
        return dataclasses.replace(self.rules, components=components)

    def _unused_layouts(self, tables: Sequence[RankTable], agreement: Agreement) -> list[Problem]:
        """Rules for keys that are in the checkpoint, but not among the targets of this load, are not misspelt."""
        if not any(table.layouts for table in tables):
            return []
        saved = [name for fqn in self.metadata.state_dict_metadata for name in (fqn, self.rules.source.own_name(fqn))]
        problems = unused_layouts(tables, agreement, saved)
        matches = self._layouts.matches(saved) if problems else {}
        return [problem for problem in problems if not matches.get(problem.fqn)]

    def _is_saved_whole(self, fqn: str) -> bool:
        saved = self.metadata.state_dict_metadata.get(self.rules.source.saved_name(fqn))
        return isinstance(saved, BytesStorageMetadata)

    def _is_wrapper_whole(self, fqn: str, wrapper: torch.Tensor) -> bool:
        """Whether a tensor that consists of others is one value in the checkpoint; if not there, in what we save."""
        saved_name, saved = self.rules.source.saved_name, self.metadata.state_dict_metadata
        if saved_name(fqn) in saved:
            return True
        is_walked = any(saved_name(f"{fqn}.{name}") in saved for name in parts_of(wrapper))
        return not is_walked and why_not_whole(wrapper, {}) is None

    def _chunk_list(self, fqn: str) -> ChunkList:
        saved = self.metadata.state_dict_metadata[self._saved_names.get(fqn, fqn)]
        assert isinstance(saved, TensorStorageMetadata)
        return self._saved_chunks.of(saved)
