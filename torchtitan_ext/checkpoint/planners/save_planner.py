"""A drop-in planner for ``dcp.save`` that writes every layout exactly, or refuses before the first byte."""

from __future__ import annotations

import dataclasses
import io
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.utils import find_state_dict_object

from torchtitan_ext import _core, clock
from torchtitan_ext.checkpoint.planners.items import (
    WriteDecision,
    check_storage_takes,
    metadata_entries,
    metadata_paths,
    uncuttable_wrappers,
    write_items,
)
from torchtitan_ext.checkpoint.planners.replica_digests import ReplicaComparison, compare_replicas
from torchtitan_ext.checkpoint.planners.subclasses import (
    check_global_plan,
    check_local_plans,
    check_write_items,
    not_set_up,
    overrides,
    sees_items,
    uncalled_methods,
)
from torchtitan_ext.checkpoint.tables.agreement import Agreement, agree, unused_layouts
from torchtitan_ext.checkpoint.tables.key_table import (
    EncodedTable,
    KeyTable,
    ObjectEntry,
    RankTable,
    check_objects,
    describe_state,
    digest_values,
    encode_table,
    host_digest,
    how_to_read,
    lies_in_local,
    number_hosts,
)
from torchtitan_ext.checkpoint.tables.tied_keys import tied_keys
from torchtitan_ext.dcp_private import ShardedTensor, flatten_sharded_tensors
from torchtitan_ext.errors import MAX_NAMED, Problem, check_choice, listed, named, refusal, warn
from torchtitan_ext.layout.dtensor import box_of, local_tensor
from torchtitan_ext.layout.layout import Box, LayoutRules, ShardOrder, num_elements
from torchtitan_ext.ranks.exchange import scope_ranks
from torchtitan_ext.state.host_copies import packed_on_device
from torchtitan_ext.state.nested import flat_keys
from torchtitan_ext.storage.formats.safetensors_files import OWN_NOTES
from torchtitan_ext.storage.metadata.saved_metadata import WORLD_KEY
from torchtitan_ext.storage.native.file_writer import FilePrefix
from torchtitan_ext.storage.native.planned_items import ListedWrites, PlannedWrites
from torchtitan_ext.storage.raw_tensor import dtype_name, raw_memory
from torchtitan_ext.storage.weights.layout import dtype_problems, name_problems, value_problem
from torchtitan_ext.storage.weights.writer import StagedWeights, WeightsMeta

logger = logging.getLogger(__name__)

Replicas = Literal["error", "strict", "warn", "first"]
"""What to do when replicas differ."""


class SavePlanner(DefaultSavePlanner):
    """Drop-in for ``DefaultSavePlanner``: pass it as ``planner=`` to ``dcp.save`` or ``dcp.async_save``.

    DCP calls, in this order:

    1. ``set_up_planner`` and 2. ``create_local_plan`` on every rank,
    3. ``create_global_plan`` on the coordinator,
    4. ``finish_plan`` on every rank,
    5. ``resolve_data`` on every rank, once per item it writes.

    Layouts are decided in 3, over the reports of all ranks that travel in ``planner_data``; no other communication
    takes place. With ``use_collectives=False`` step 3 sees its own rank only and checks what that rank holds.

    It is an instance of the default planner, so that code which asks for one goes on; subclasses may do with it what
    ``docs/reference/planners.md`` lists.

    Args:
        flatten_state_dict: As in stock: nested containers become flat keys.
        flatten_sharded_tensors: As in stock.
        dedup_replicated_tensors: Deprecated and without effect, as in stock.
        dedup_save_to_lowest_rank: Replicated tensors are written by their lowest rank, not balanced by bytes.
        enable_plan_caching: Accepted as in stock, and without effect: every save is planned anew.
        layouts: Sharding orders that placements cannot express, by canonical fqn or glob; applied to the parameter's
            optimizer state too. One that matches no key on any rank is refused where there are tensors on meshes.
        replicas: What to do when replicas differ. ``"error"`` refuses objects and replicated DTensors, and warns of
            plain tensors (statistics of batch norms differ legitimately); ``"strict"`` refuses these too; ``"warn"``
            only warns; ``"first"`` is silent. The save always writes the lowest rank's value.
        hash_replicas: Compare replicated tensors above 64 KiB too; those on a mesh smaller than the default process
            group always are. Costs a fingerprint of their local bytes, logged (``docs/reference/planners.md``).

    Raises:
        StateRefusedError: (a subclass; inside DCP's ``CheckpointException``) from step 3, the same on every rank,
            before anything is written.
    """

    def __init__(
        self,
        flatten_state_dict: bool = True,
        flatten_sharded_tensors: bool = True,
        dedup_replicated_tensors: bool | None = None,
        dedup_save_to_lowest_rank: bool = False,
        enable_plan_caching: bool = False,
        *,
        layouts: Mapping[str, ShardOrder] | None = None,
        replicas: Replicas = "error",
        hash_replicas: bool = False,
    ) -> None:
        if dedup_replicated_tensors is not None:
            logger.warning("SavePlanner: dedup_replicated_tensors is deprecated and has no effect; remove the argument")
        check_choice("SavePlanner", "replicas", replicas, Replicas)
        super().__init__(
            flatten_state_dict,
            flatten_sharded_tensors,
            dedup_save_to_lowest_rank=dedup_save_to_lowest_rank,
            enable_plan_caching=enable_plan_caching,
        )
        self._layouts = LayoutRules(layouts)
        self._replicas = replicas
        self._hash_replicas = hash_replicas
        self.state_dict: dict[str, Any] = {}
        self.is_coordinator = False
        self.plan = SavePlan([])
        self.global_plan: list[SavePlan] = []
        self.metadata = Metadata({})
        self.tied: dict[str, str] = {}
        self._table = KeyTable({})
        self._encoded: EncodedTable = encode_table(self._table)
        self._writes: _core.Writes
        # Of what is written; ``None`` before one is asked for.
        self._boxes: dict[tuple[str, tuple[int, ...]], Box] | None = {}
        self.num_ranks: int | None = None
        """Of a save by ``tte.save`` the ranks that take part; else those of the default process group do."""
        self._is_set_up = False
        self._num_unwritten = 0
        self._shows_items = False
        self._weights: WeightsMeta | None = None

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | bool | None = None, is_coordinator: bool = False
    ) -> None:
        if isinstance(storage_meta, bool):  # subclasses written for torch before 2.3 pass is_coordinator here
            is_coordinator = storage_meta
        if self.flatten_state_dict:
            flat = flat_keys(state_dict, tuples="as_stock")
            state_dict, self.mappings = flat.values, flat.stock_paths
        if self.flatten_sharded_tensors and any(isinstance(value, ShardedTensor) for value in state_dict.values()):
            state_dict = flatten_sharded_tensors(state_dict)
        self.state_dict = state_dict
        self.is_coordinator = is_coordinator
        self._weights = storage_meta if isinstance(storage_meta, WeightsMeta) else None
        self.num_ranks = None
        self._is_set_up = True

    def create_local_plan(self) -> SavePlan:
        self._shows_items = False
        self._table = self._describe_state()
        self._encoded = encode_table(self._table)
        planner = type(self).__qualname__ if sees_items(self, SavePlanner) else ""
        is_asked = overrides(self, SavePlanner, "resolve_data", "lookup_object", "transform_object")
        keeps_shards = bool(planner or self._table.wrappers or is_asked)
        message = dataclasses.replace(
            self._encoded.message, host=host_digest(), planner=planner, keeps_shards=keeps_shards
        )
        self._shows_items = sees_items(self, SavePlanner)
        self.plan = SavePlan(self._shown_items(), planner_data=message)
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        check_local_plans("save", self, SavePlanner, all_plans, RankTable)
        tables: list[RankTable] = [plan.planner_data for plan in all_plans]
        needs_all_ranks = not self._plans_one_rank_only(all_plans)
        agreement = agree(tables, needs_all_ranks=needs_all_ranks)
        compared = compare_replicas(tables, agreement)
        fatal = [problem for problem in compared.differing if self._is_fatal(agreement, problem.fqn)]
        if self._replicas == "strict":
            fatal += compared.presumed
        agreed = [agreement.names[key] for key in agreement.agreed_keys]
        unused = unused_layouts(tables, agreement, agreed) if needs_all_ranks else []
        self.tied, untied = _tied_of(tables, agreement)
        if agreement.problems or fatal or unused or untied:
            raise refusal("save", (*untied, *agreement.problems, *fatal, *unused))
        if self._replicas != "first":
            _warn_of_replicas(compared)

        _warn_of_unread_values(tables)
        plan = self._plan_writes(agreement, tables, compared)
        self.metadata = Metadata(metadata_entries(agreement, plan))
        if self.flatten_state_dict:
            self.metadata.planner_data = metadata_paths(agreement, tables)
            if needs_all_ranks:
                # A key of the state dict with this name has priority.
                self.metadata.planner_data.setdefault(WORLD_KEY, agreement.ranks_and_meshes().record())
        several_boxes = [agreement.names[key] for key in plan.keys_of_several_boxes()[:MAX_NAMED]]
        self.global_plan = [
            dataclasses.replace(one, planner_data=WriteDecision(plan.decision(rank), several_boxes))
            for rank, one in enumerate(all_plans)
        ]
        return self.global_plan, self.metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        check_global_plan("save", self, new_plan, WriteDecision)
        check_write_items(self, self._shown_items(), new_plan.items)
        check_storage_takes(new_plan.planner_data, new_plan.storage_data)
        encoded, entries = self._encoded, dict(self._table.entries)
        writes = _core.read_writes(new_plan.planner_data.writes, encoded.names, encoded.kind_of, entries)
        # Nobody needs the items as objects where our writer writes them.
        listed = ListedWrites(writes, write_items)
        self.plan = PlannedWrites(None, new_plan.storage_data, new_plan.planner_data, listed=listed)
        self._writes, self._boxes = writes, None
        self._num_unwritten = 0
        self.expect_requests(writes.num_items)
        # A subclass may change the list: it gets a copy.
        is_shared = sees_items(self, SavePlanner)
        return dataclasses.replace(self.plan, items=list(self.plan.items)) if is_shared else self.plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        value = self.transform_object(write_item, self.lookup_object(write_item.index))
        self.expect_requests(-1)
        # Our writers pack many of them at once.
        is_packed_later = isinstance(self.plan.storage_data, (FilePrefix, StagedWeights))
        return value if isinstance(value, io.BytesIO) or is_packed_later else packed_on_device(value)

    def local_sources(self, fqns: Iterable[str]) -> dict[str, torch.Tensor]:
        """The local tensors that storage writes without ``resolve_data``; see ``HasLocalSources``."""
        tensors = {}
        if not overrides(self, SavePlanner, "resolve_data", "lookup_object", "transform_object"):
            for fqn in fqns:
                entry = self._table.entries.get(fqn)
                if lies_in_local(entry) and num_elements(entry.global_shape) > 0:
                    local = local_tensor(self.state_dict[fqn])
                    if local.is_cpu and raw_memory(local) is local:
                        tensors[fqn] = local
        return tensors

    def expect_requests(self, num_more: int) -> None:
        """Storage will call ``resolve_data`` so many times more than it said before; at first once for each item."""
        self._num_unwritten += num_more
        if self._num_unwritten == 0:
            self.state_dict = {}  # a planner that is kept for the next save must not keep staged tensors alive

    def lookup_object(self, index: MetadataIndex) -> Any:
        """The value at an index, for a chunk a view of the local tensor. Subclasses may replace it, as in stock."""
        entry = self._table.entries.get(index.fqn)  # ``None`` where storage makes a plan of its own
        if not lies_in_local(entry):
            return find_state_dict_object(self.state_dict, index)
        local = local_tensor(self.state_dict[index.fqn])
        shape = entry.global_shape
        if num_elements(shape) == 0:
            return local if tuple(local.shape) == shape else local.new_empty(shape)
        if self._boxes is None:
            self._boxes = self._writes.local_boxes()
        box = box_of(local, *self._boxes[index.fqn, tuple(index.offset or ())])
        if isinstance(box, str):  # local plans could not check this order of sharding
            raise refusal("save", [Problem("unsupported_tensor", index.fqn, box)])
        return box

    def transform_object(self, write_item: WriteItem, value: Any) -> Any:
        """The written form of a value: objects are serialised. Subclasses may replace it, as in stock."""
        if write_item.type == WriteItemType.BYTE_IO:
            stream = io.BytesIO()
            try:
                torch.save(value, stream)
            except Exception as error:
                raise TypeError(f"cannot pickle {write_item.index.fqn}: {error}; keep to plain values") from error
            return stream
        return value

    def _timed_digests(self, table: KeyTable) -> dict[str, bytes]:
        begin = clock.now()
        world_size = len(scope_ranks()) if self.num_ranks is None else self.num_ranks
        digests = digest_values(self.state_dict, table, hash_replicas=self._hash_replicas, world_size=world_size)
        if self._hash_replicas:
            logger.info("hash_replicas: %d values in %.3f seconds", len(digests), clock.now() - begin)
        return digests

    def _describe_state(self) -> KeyTable:
        if not self._is_set_up:
            call = "state_dict, storage_meta=storage_meta, is_coordinator=is_coordinator"
            return KeyTable({}, problems=(not_set_up(self, call),))
        table = describe_state(self.state_dict, self.mappings, self._layouts)
        writes_others = overrides(self, SavePlanner, "resolve_data", "lookup_object", "transform_object")
        are_objects_written = self._weights is None and not writes_others
        unread, unwritable = check_objects(self.state_dict, table) if are_objects_written else ({}, [])
        if self._weights is not None and not self._weights.has_transform:  # a transform may drop them
            unwritable = _not_weights(self.state_dict, table)
            table = table if writes_others else _without_tied(self.state_dict, table)
        problems = (
            *uncalled_methods(self, SavePlanner, DefaultSavePlanner),
            *table.problems,
            *_meta_problems(self.state_dict, table),
            *uncuttable_wrappers(self.state_dict, table),
            *unwritable,
        )
        return dataclasses.replace(table, digests=self._timed_digests(table), problems=problems, unread=unread)

    def _shown_items(self) -> list[WriteItem]:
        """The items in a local plan, for subclasses only: all that this rank holds, replicas included."""
        if not self._shows_items:
            return []
        return write_items(_core.held_writes(self._encoded.names, dict(self._table.entries)))

    def _plans_one_rank_only(self, plans: Sequence[SavePlan]) -> bool:
        # dcp.save(use_collectives=False) calls create_global_plan on every rank, with the rank's own plan, and does not
        # say so. Two signs: the call on a rank other than 0, and the per-rank file prefix that storage writers set.
        return len(plans) == 1 and (not self.is_coordinator or plans[0].storage_data is not None)

    def _is_fatal(self, agreement: Agreement, fqn: str) -> bool:
        if self._replicas == "error":
            kind = agreement.joint.kind_of(agreement.number_of[fqn])
            return kind.is_object or not kind.is_plain
        return self._replicas == "strict"

    def _plan_writes(
        self, agreement: Agreement, tables: Sequence[RankTable], compared: ReplicaComparison
    ) -> _core.WritePlan:
        lowest = sorted(agreement.number_of[problem.fqn] for problem in compared.differing)
        hosts = number_hosts([table.host for table in tables])
        may_divide = not any(table.keeps_shards for table in tables)
        is_lowest = self.dedup_save_to_lowest_rank
        return _core.WritePlan(agreement.joint, is_lowest, lowest, hosts, compared.equal, may_divide)


def _without_tied(values: Mapping[str, Any], table: KeyTable) -> KeyTable:
    """Without further names of one memory, which safetensors files note beside the tensor."""
    found = tied_keys(values, table.entries, table.entries)
    tied = {fqn: first for fqn, first in found.items() if fqn not in OWN_NOTES}
    entries = {fqn: entry for fqn, entry in table.entries.items() if fqn not in tied}
    paths = {fqn: path for fqn, path in table.stock_paths.items() if fqn not in tied}
    return dataclasses.replace(table, entries=entries, stock_paths=paths, tied=tied)


def _tied_of(tables: Sequence[RankTable], agreement: Agreement) -> tuple[dict[str, str], list[Problem]]:
    """What ``_without_tied`` has left out on all ranks. A problem each where a rank has memory of its own for it."""
    tied: dict[str, str] = {}
    problems = []
    for rank, table in enumerate(tables):
        for fqn, first in table.rest.tied.items():
            if tied.setdefault(fqn, first) == first and fqn not in agreement.number_of:
                continue
            other = f"of {tied[fqn]}" if tied[fqn] != first else "of its own"
            detail = f"has the memory of {first} on rank {rank}, memory {other} on another rank; tie it on all or none"
            problems.append(Problem("ranks_disagree", fqn, detail))
    return tied, problems


def _not_weights(values: Mapping[str, Any], table: KeyTable) -> list[Problem]:
    """What safetensors files cannot hold."""
    problems = name_problems(table.entries)
    for fqn, entry in table.entries.items():
        if isinstance(entry, ObjectEntry):
            problems.append(value_problem(fqn))
        elif fqn in table.wrappers:
            detail = (
                f"is a {type(local_tensor(values[fqn])).__name__}, which is no plain memory as safetensors files need"
            )
            problems.append(Problem("unsupported_tensor", fqn, f"{detail}; save what it holds instead"))
        else:
            problems += dtype_problems(fqn, dtype_name(entry.dtype))
    return problems


def _meta_problems(values: Mapping[str, Any], table: KeyTable) -> list[Problem]:
    return [
        Problem("unsupported_tensor", fqn, "is on the meta device and holds no data; materialise it before saving")
        for fqn, entry in table.entries.items()
        if lies_in_local(entry) and values[fqn].is_meta
    ]


def _warn_of_replicas(compared: ReplicaComparison) -> None:
    for problems, heading in (
        (compared.differing, "the lowest rank's values are saved:"),
        (compared.presumed, "tensors of one key are not equal; those of the first mesh are saved{advice}:"),
        (compared.uncompared, "replicas that were not compared; those of the first mesh are saved{advice}:"),
    ):
        if problems:
            # Problems of one heading share their advice, except under the first heading.
            advice = "" if problems is compared.differing else problems[0].advice
            lines = [dataclasses.replace(problem, advice="") for problem in problems] if advice else problems
            warn("\n".join([heading.format(advice=advice), *listed(lines)]))


def _warn_of_unread_values(tables: Sequence[RankTable]) -> None:
    unread = {fqn: found for table in tables for fqn, found in table.rest.unread.items()}
    if not unread:
        return
    values = named([f"{fqn} ({found})" for fqn, found in unread.items()])
    warn(
        f"a load will refuse these values by default, because they are not plain data: {values}; in the job that loads "
        f"{how_to_read(unread.values())}. Or save what they hold instead"
    )
