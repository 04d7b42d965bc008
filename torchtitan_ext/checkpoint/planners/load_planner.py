"""A drop-in planner for ``dcp.load`` that reshards any layout, or refuses before a target is changed."""

from __future__ import annotations

import copy
import dataclasses
import io
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.checkpoint.utils import find_state_dict_object
from torch.distributed.tensor import DTensor

from torchtitan_ext import _core
from torchtitan_ext.checkpoint.planners.items import (
    ReadDecision,
    in_file_order,
    read_items,
    uncuttable_wrappers,
    unread_problems,
)
from torchtitan_ext.checkpoint.planners.saved_chunks import cover_problems, name_metadata, storage_problems
from torchtitan_ext.checkpoint.planners.subclasses import (
    check_global_plan,
    check_local_plans,
    followed_items,
    no_place,
    not_set_up,
    overrides,
    sees_items,
    uncalled_methods,
)
from torchtitan_ext.checkpoint.planners.targets import (
    fit_targets,
    flatten_targets,
    number_for,
    number_from,
    places_of,
)
from torchtitan_ext.checkpoint.rules.casts import CastPolicy
from torchtitan_ext.checkpoint.rules.load_rules import JointRequest, LoadRules, ReadRequest, for_components
from torchtitan_ext.checkpoint.rules.policy import ElasticPolicy, Source, check_rules
from torchtitan_ext.checkpoint.rules.report import NO_TENSOR, LoadReport, review, warn_of_leftovers
from torchtitan_ext.checkpoint.tables.agreement import agree
from torchtitan_ext.checkpoint.tables.component import nested_stateful
from torchtitan_ext.checkpoint.tables.key_table import (
    EncodedTable,
    KeyTable,
    ObjectEntry,
    describe_state,
    encode_table,
    how_to_read,
    lies_in_local,
)
from torchtitan_ext.checkpoint.tables.tied_keys import tied_keys
from torchtitan_ext.errors import (
    CheckpointReadError,
    DamagedValueError,
    check_argument,
    check_choice,
    named,
    refusal,
    warn,
)
from torchtitan_ext.layout.dtensor import box_of, is_plain_memory, local_tensor
from torchtitan_ext.layout.layout import LayoutRules, ShardOrder, Steps
from torchtitan_ext.state.nested import FlatStateDict, Path, materialize_meta, on_devices_of, set_value
from torchtitan_ext.state.plain_value import DamagedBytesError, NotPlain, NotPlainError, check_classes, read_value
from torchtitan_ext.storage.metadata.dcp_objects import saved_chunks
from torchtitan_ext.storage.metadata.lazy_metadata import columns_behind, is_saved_tensor
from torchtitan_ext.storage.native.planned_items import ForeseenPlan, ListedReads, PlannedReads


class LoadPlanner(DefaultLoadPlanner):
    """Drop-in for ``DefaultLoadPlanner``: pass it as ``planner=`` to ``dcp.load``.

    DCP calls, in this order:

    1. ``set_up_planner`` and 2. ``create_local_plan`` on every rank,
    3. ``create_global_plan`` on the coordinator,
    4. ``finish_plan`` on every rank,
    5. ``load_bytes``, or ``resolve_tensor`` and ``commit_tensor``, on every rank, once per item it reads,
    6. ``finish_load`` on every rank, by ``tte.load`` and by a DCP that has this hook.

    Everything that can be refused is refused in 3, in one report over all ranks; targets, meta tensors included, change
    from step 4 on.

    It is an instance of the default planner, so that code which asks for one goes on; subclasses may do with it what
    ``docs/reference/planners.md`` lists.

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
        allow_classes: Classes, and functions that build values, which non-tensor values may name beside plain data: an
            enum, a dataclass. Nothing else of the checkpoint is run. What ``torch.serialization.add_safe_globals``
            has allowed is so already.
        policy: What to do with each component, and with keys that are missing or unexpected. Without one, keys that
            the checkpoint lacks are refused and those that nothing asks for ignored, as in stock. Objects that
            reshard by a rule of their own need ``tte.load``: it reads what they saved before the plan is made.
        source: Which keys come from this checkpoint, and under which names. All, under their own, by default.

    Attributes:
        rules: The policy and the source, as one.
        layouts: The sharding orders that the user states.
        wanted: The entries that this rank reads, from step 2 on, as they were saved, by keys of the state dict.
        report: What the load does, from step 4 on and after ``tte.load``, on every rank; ``None`` where DCP's own load
            is called without a policy.

    Raises:
        StateRefusedError: (a subclass; inside DCP's ``CheckpointException``) from step 3, the same on every rank.
        CheckpointReadError: A value could not be read back; tensors may have been written by then.
    """

    metadata: Metadata

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
        allow_classes: Collection[Callable[..., Any]] = (),
        policy: ElasticPolicy | None = None,
        source: Source | None = None,
    ) -> None:
        check_rules("LoadPlanner", policy)
        check_argument("LoadPlanner", "source", source, (Source, type(None)), "a Source, such as Source(rename=...)")
        check_choice("LoadPlanner", "cast", cast, CastPolicy)
        if isinstance(allow_unclaimed, str):
            raise ValueError(f"LoadPlanner: got allow_unclaimed={allow_unclaimed!r}, expected a list of globs")
        super().__init__(flatten_state_dict, flatten_sharded_tensors, allow_partial_load)
        self.layouts = LayoutRules(layouts)
        self._cast = cast
        self._allow_unclaimed = tuple(allow_unclaimed)
        check_classes("LoadPlanner", allow_classes)
        self.weights_only = weights_only
        self.allow_classes = tuple(allow_classes)
        self.rules = LoadRules(Source() if source is None else source, policy=policy)
        self.report: LoadReport | None = None
        self.original_state_dict: dict[str, Any] = {}
        self.state_dict: dict[str, Any] = {}
        self.mappings: dict[str, Any] = {}
        self.metadata = Metadata({})
        self.is_coordinator = False
        self._flat = FlatStateDict()
        self._places: dict[str, Path] = {}
        self._is_set_up = False
        self._shows_items = False
        self.wanted = KeyTable({})
        self._encoded: EncodedTable = encode_table(self.wanted)
        self._saved_chunks: tuple[object, _core.SavedChunks] | None = None  # those of the first one
        self._saved_names: dict[str, str] = {}
        self._numbers: dict[str, type] = {}
        self._tied: dict[str, str] = {}
        self._values_read: dict[str, Any] = {}
        self._values_due: set[str] = set()
        self._refused: dict[str, NotPlain] = {}

    def loaded_values(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """The values of a state dict, as components give it after the load, by the flat keys of this planner.

        Where a subclass has put targets of its own in their places, these.
        """
        if self.state_dict.keys() != self._flat.values.keys():
            return self.state_dict
        return self._flatten(state_dict).values

    def why_unproved(self, fqn: str) -> str | None:
        """Why the fingerprint of a loaded key cannot be that of the saved one; ``None`` where it must be."""
        if overrides(self, LoadPlanner, "lookup_tensor", "transform_tensor", "resolve_tensor", "commit_tensor"):
            return f"{type(self).__name__} fills it by methods of its own"
        saved = self.metadata.state_dict_metadata
        if not is_saved_tensor(saved, self.rules.source.saved_name(fqn)) or fqn in self._numbers:
            return NO_TENSOR
        return None

    def with_rules(self, rules: LoadRules) -> LoadPlanner:
        """A planner of the same class, with the same options, that follows these rules."""
        planner = copy.copy(self)
        planner.rules = rules
        planner._values_read = {}
        planner._is_set_up = False
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
        self._saved_chunks = None
        self.is_coordinator = is_coordinator
        self._flat = self._flatten(state_dict)
        self._places = self._flat.paths
        # Copies, because subclasses change them.
        self.mappings = dict(self._flat.stock_paths)
        self.state_dict = dict(self._flat.values)
        self._is_set_up = True

    def create_local_plan(self) -> LoadPlan:
        self._shows_items = sees_items(self, LoadPlanner)
        request = self._request()
        if self._shows_items or self.rules.values_first:  # tte.load has blocks verified after the read
            return LoadPlan(self._shown_items(), planner_data=request)
        plan = ForeseenPlan([], planner_data=request)
        plan.foresee = lambda: self._items_of(self._reads({}))
        return plan

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        check_local_plans("load", self, LoadPlanner, global_plan, ReadRequest)
        requests: list[ReadRequest] = [plan.planner_data for plan in global_plan]
        agreement = agree([request.table for request in requests], needs_all_ranks=False)
        joint = JointRequest(requests, self.rules, self.metadata, agreement.joint.held_names())
        is_cover_checked = len({request.metadata_name for request in requests}) == 1
        found = list(agreement.problems)
        if is_cover_checked:
            found += cover_problems(agreement, joint.wanted, self.metadata, self._chunks)
        found += storage_problems(self.metadata, set(joint.wanted.values()))
        problems, warned, report = review(joint, agreement, self.layouts, self._allow_unclaimed, found)
        if problems:
            raise refusal("load", problems, report)
        for text in warned:
            warn(f"load: {text}")
        unforeseen = agreement.joint.unforeseen_steps()
        decisions = [ReadDecision(steps, is_cover_checked, report) for steps in unforeseen]
        pairs = zip(global_plan, decisions, strict=True)
        return [dataclasses.replace(plan, planner_data=decision) for plan, decision in pairs]

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        check_global_plan("load", self, central_plan, ReadDecision)
        decision: ReadDecision = central_plan.planner_data
        reads, shown = self._reads(decision.steps), self._shown_items()
        items = self._items_of(reads)
        if central_plan.items != shown:
            items = followed_items(self, shown, central_plan.items, items)
        elif not decision.is_cover_checked:
            problems = unread_problems(self.wanted, reads)
            if problems:
                raise refusal("load", problems)
        self.report = decision.report
        if self.is_coordinator and self.report is not None and self.rules.policy is not None:
            warn_of_leftovers(self.report, self.rules.policy)
        if not self.rules.values_first:
            self.change_targets()
        self._refused = {}
        if isinstance(items, ListedReads):
            self._values_due = set(reads.values)
            return PlannedReads(None, central_plan.storage_data, central_plan.planner_data, listed=items)
        self._values_due = {item.dest_index.fqn for item in items if item.type == LoadItemType.BYTE_IO}
        return dataclasses.replace(central_plan, items=in_file_order(items, self.metadata))

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        fqn = read_item.dest_index.fqn
        self._values_due.discard(fqn)
        try:
            read = read_value(value, weights_only=self.weights_only, allow_classes=self.allow_classes)
            target = self.state_dict[fqn]
            is_tensor = isinstance(target, torch.Tensor)
            loaded = number_for(read, target.dtype, self._cast) if is_tensor else on_devices_of(target, read)
        except NotPlainError as error:
            self._refused[fqn] = error.found
        except ValueError as error:
            kind = DamagedValueError if isinstance(error, DamagedBytesError) else CheckpointReadError
            raise kind(fqn, str(error)) from None
        else:
            if self.rules.values_first:
                self._values_read[fqn] = loaded
            else:
                self._place(fqn, loaded)
        # One error names all values that are not plain; with a load_bytes of its own the last value is not known.
        if self._refused and (not self._values_due or overrides(self, LoadPlanner, "load_bytes")):
            raise self._not_plain()

    def change_targets(self) -> None:
        """Begins to change targets: meta tensors get memory, versions are bumped, values read so far are placed.

        ``finish_plan`` calls it; with ``values_first`` ``tte.load`` does, after all ranks have read their values.
        """
        materialize_meta(self.original_state_dict, self.state_dict, self._places, self.wanted.entries)
        for fqn, first in self._tied.items():
            if self.state_dict[fqn].is_meta:
                self.state_dict[fqn] = self.state_dict[first]
                set_value(self.original_state_dict, self._places[fqn], self.state_dict[first])
        self._bump_versions(fqn for fqn, entry in self.wanted.entries.items() if not isinstance(entry, ObjectEntry))
        self._bump_versions(self._tied)
        for fqn, value in self._values_read.items():
            self._place(fqn, value)
        self._values_read.clear()

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        return self.transform_tensor(read_item, self.lookup_tensor(read_item.dest_index))

    def local_targets(self, fqns: Iterable[str]) -> dict[str, torch.Tensor]:
        """The local tensors that storage fills without ``resolve_tensor``; see ``HasLocalTargets``."""
        if overrides(self, LoadPlanner, "lookup_tensor", "transform_tensor", "resolve_tensor", "commit_tensor"):
            return {}
        entries = self.wanted.entries
        known = (fqn for fqn in fqns if lies_in_local(entries.get(fqn)) and fqn not in self._numbers)
        targets = {fqn: local_tensor(self.state_dict[fqn]) for fqn in known}
        return {fqn: one for fqn, one in targets.items() if one.is_cpu and is_plain_memory(one)}

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Places numbers that were saved as tensors; other targets are filled, since ``resolve_tensor`` gave views."""
        fqn = read_item.dest_index.fqn
        if fqn in self._numbers:
            try:
                number = number_from(self.state_dict[fqn], self._numbers[fqn])
            except ValueError as error:
                raise CheckpointReadError(fqn, str(error)) from None
            set_value(self.original_state_dict, self._places[fqn], number)

    def finish_load(self, *args: Any, **kwargs: Any) -> None:
        """A hook after the last item, for subclasses. DCP may get one (pytorch#193909), with unknown arguments."""

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """The local tensor at an index. Subclasses may replace it, as in stock."""
        entry = self.wanted.entries.get(index.fqn)  # ``None`` where storage makes a plan of its own
        if not lies_in_local(entry):
            return find_state_dict_object(self.state_dict, index)
        return local_tensor(self.state_dict[index.fqn])

    def transform_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> torch.Tensor:
        """The box of the local tensor that an item fills. Subclasses may replace it, as in stock."""
        box = box_of(tensor, read_item.dest_offsets, read_item.lengths)
        if isinstance(box, str):  # local plans could not check this order of sharding
            raise CheckpointReadError(read_item.dest_index.fqn, box)
        return box

    def _flatten(self, state_dict: dict[str, Any]) -> FlatStateDict:
        saved, source = self.metadata.state_dict_metadata, self.rules.source
        is_nested, has_shards = self.flatten_state_dict, self.flatten_sharded_tensors
        return flatten_targets(state_dict, saved, source, nested=is_nested, sharded_tensors=has_shards)

    def _request(self) -> ReadRequest:
        if not self._is_set_up:
            not_ours = KeyTable({}, problems=(not_set_up(self, "state_dict, metadata, is_coordinator"),))
            return ReadRequest(encode_table(not_ours).message, "")
        rules = for_components(self.rules, self.original_state_dict)
        table = describe_state(self.state_dict, {}, self.layouts)
        fitted = fit_targets(self.state_dict, table, self.metadata, rules, self._cast)
        self._saved_names = fitted.saved_names
        self._numbers = {fqn: type(self.state_dict[fqn]) for fqn in fitted.numbers}
        self.state_dict.update(fitted.numbers)
        self._places = places_of(self._flat, self.state_dict, self.mappings)
        problems = [*uncalled_methods(self, LoadPlanner, DefaultLoadPlanner), *fitted.problems]
        if not overrides(self, LoadPlanner, "load_bytes", "commit_tensor"):
            put = [fqn for fqn, e in fitted.wanted.items() if isinstance(e, ObjectEntry) or fqn in self._numbers]
            problems += no_place(self, [fqn for fqn in put if fqn not in self._places])
        wanted_table = KeyTable(entries=fitted.wanted, layouts=table.layouts, wrappers=table.wrappers)
        problems += uncuttable_wrappers(self.state_dict, wanted_table, self._chunk_list)
        self.wanted = dataclasses.replace(wanted_table, problems=tuple(problems))
        self._encoded = encode_table(self.wanted)
        missing = [fqn for fqn, why in fitted.not_read.items() if why == "missing"]
        absent = {fqn: table.entries[fqn] for fqn in missing if fqn in self._places}
        self._tied = tied_keys(self.state_dict, {**fitted.wanted, **absent}, fitted.wanted) if absent else {}
        self._tied = {fqn: first for fqn, first in self._tied.items() if fqn in absent}
        not_read = {fqn: why for fqn, why in fitted.not_read.items() if fqn not in self._tied}
        if self.allow_partial_load:
            not_read |= {fqn: "skipped" for fqn, why in not_read.items() if why == "missing"}
        return ReadRequest(
            self._encoded.message,
            name_metadata(self.metadata),
            rules=f"{rules.policy}, {dataclasses.replace(rules.source, path=None)}",
            saved_names=self._saved_names,
            not_read=not_read,
            advice={fqn: text for fqn in missing if (text := nested_stateful(self.state_dict[fqn])) is not None},
            tied=self._tied,
            components=rules.components,
        )

    def _not_plain(self) -> CheckpointReadError:
        found, self._refused = self._refused, {}
        names = sorted({name for one in found.values() for name in one.names})
        verb = "it is" if len(found) == 1 else "they are"
        reason = f"{verb} not plain data (found {', '.join(names)}); {how_to_read(found.values())}"
        return CheckpointReadError(named(list(found)), reason)

    def _place(self, fqn: str, value: Any) -> None:
        target = self.state_dict[fqn]
        if isinstance(target, torch.Tensor):
            self._bump_versions([fqn])
            local_tensor(target).fill_(value)
            return
        self.state_dict[fqn] = value
        set_value(self.original_state_dict, self._places[fqn], value)

    def _bump_versions(self, fqns: Iterable[str]) -> None:
        """Bumps the versions of DTensors: these count apart from the local tensors that the load writes."""
        values = [self.state_dict[fqn] for fqn in fqns]
        torch.autograd.graph.increment_version([value for value in values if isinstance(value, DTensor)])

    def _reads(self, decided: Mapping[str, Steps]) -> _core.Reads:
        entries = dict(self.wanted.entries)
        return _core.find_reads(self._encoded.names, entries, self._saved_names, self._chunks, dict(decided))

    def _items_of(self, reads: _core.Reads) -> Sequence[ReadItem]:
        """The items, which nobody needs as objects where our reader reads them."""
        columns = columns_behind(self.metadata.storage_data)
        return read_items(reads) if columns is None else ListedReads(reads, columns, read_items)

    def _shown_items(self) -> list[ReadItem]:
        """The items in a local plan, for subclasses only, which may change them: by this rank's own reading."""
        return read_items(self._reads({})) if self._shows_items else []

    def _chunk_list(self, fqn: str) -> _core.ChunkIndex:
        chunks = self._chunks.find(self._saved_names.get(fqn, fqn))
        assert chunks is not None, f"{fqn} is planned as a tensor and not saved as one, please report"
        return chunks

    @property
    def _chunks(self) -> _core.SavedChunks:
        """The chunk lists of the metadata, which a subclass may have changed since it was set up."""
        entries = self.metadata.state_dict_metadata
        source = columns_behind(entries) or entries
        if self._saved_chunks is None or self._saved_chunks[0] is not source:
            self._saved_chunks = source, saved_chunks(self.metadata)
        return self._saved_chunks[1]
