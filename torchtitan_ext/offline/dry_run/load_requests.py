"""What the ranks of a job ask of a checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torchtitan_ext.checkpoint.operation.component_plans import OpenSource, cut_by_component, paths_below, read_saved
from torchtitan_ext.checkpoint.planners.load_planner import LoadPlanner
from torchtitan_ext.checkpoint.planners.saved_metadata import ChunkList, name_metadata
from torchtitan_ext.checkpoint.rules.load_rules import ComponentPlan, LoadRules, ReadRequest, component_of
from torchtitan_ext.checkpoint.rules.policy import ElasticPolicy
from torchtitan_ext.checkpoint.tables.component import saved_world
from torchtitan_ext.checkpoint.tables.key_table import KeyEntry, KeyTable, ObjectEntry, TensorEntry, encode_table
from torchtitan_ext.elastic.rng import RngState, rng_of_saved
from torchtitan_ext.elastic.virtual_shards import TooFewShardsError, num_shards_of
from torchtitan_ext.errors import Problem
from torchtitan_ext.layout.layout import ShardOrder
from torchtitan_ext.offline.dry_run.alike_ranks import AlikeRanks
from torchtitan_ext.offline.dry_run.job_stages import Stage
from torchtitan_ext.offline.dry_run.load_forecast import LoadingRanks
from torchtitan_ext.offline.dry_run.one_rank import OneRank, components_of, place_on_mesh


@dataclass(frozen=True)
class LoadRequests:
    """A load of a checkpoint.

    Attributes:
        chunks: How its tensors were saved.
        num_ranks: That load it.
        is_readable: Whether its values can be read as they are.
    """

    opened: OpenSource
    policy: ElasticPolicy | None
    layouts: Mapping[str, ShardOrder] | None
    chunks: Mapping[str, ChunkList]
    num_ranks: int
    is_readable: bool = True

    def of_stage(self, stage: Stage) -> LoadingRanks:
        """What the ranks of a stage ask for: of what they hold what the policy loads and the checkpoint has."""
        group = stage.ranks
        one, request = self._of_all(stage) if stage.state is None else self._of_state(stage.state, stage)
        if stage.rules is not None:
            one = place_on_mesh(one, stage.rules, self.chunks)
        ranks = AlikeRanks(group.ranks, one.table, group.viewer, group.mesh, own=set(group.own_names(group.viewer)))
        problems = _shard_problems(one.table, ranks.num_data_parallel) if stage.state is None else ()
        asked = self._read_before(request)
        return LoadingRanks(ranks, request, list(group.state_bytes()), stage.one.is_packed, problems, asked)

    def planner(self, plans: Mapping[str, ComponentPlan]) -> LoadPlanner:
        """What plans the load, with what becomes of each component."""
        load_rules = LoadRules(self.opened.source, policy=self.policy, components=plans)
        return LoadPlanner(layouts=self.layouts).with_rules(load_rules)

    def _read_before(self, request: ReadRequest) -> tuple[str, ...]:
        """The saved keys that components read to work out their part, before anything is planned."""
        prefixes = [plan.saved_prefix for plan in request.components.values() if plan.saved_prefix is not None]
        return tuple(fqn for prefix in prefixes for fqn in paths_below(prefix, self.opened.metadata))

    def _of_all(self, stage: Stage) -> tuple[OneRank, ReadRequest]:
        """A job that asks for all of a checkpoint. Random generators are asked for their part, as in the job."""
        one = stage.one
        is_tensor = {fqn: isinstance(entry, TensorEntry) for fqn, entry in one.table.entries.items()}
        plans = components_of(is_tensor, one.table.stock_paths, self.policy or ElasticPolicy())
        rngs = self._generators(plans, stage.ranks.num_data_parallel)
        if rngs:
            plans |= cut_by_component(rngs, [self.opened], self.policy, self.num_ranks, lambda name: None).plans[0]
            is_kept = {fqn: component_of(fqn, plans, is_tensor=tensor) not in rngs for fqn, tensor in is_tensor.items()}
            one = one.restricted(is_kept.__getitem__)
        load_rules = LoadRules(self.opened.source, policy=self.policy, components=plans)
        entries: dict[str, KeyEntry] = {}
        left = []
        for fqn, entry in one.table.entries.items():
            if load_rules.is_loaded(fqn, is_tensor=is_tensor[fqn]):
                entries[fqn] = entry
            else:
                left.append(fqn)
        table = dataclasses.replace(one.table, entries=entries)
        request = ReadRequest(
            encode_table(table).message, name_metadata(self.opened.metadata), left=tuple(left), components=plans
        )
        return OneRank(table, one.value_bytes), request

    def _generators(self, components: Iterable[str], num_data_parallel: int) -> dict[str, RngState]:
        """The components that ``RngState`` has saved, which load by its rule, where a policy is given."""
        metadata = self.opened.metadata
        rngs: dict[str, RngState] = {}
        if self.policy is None or not self.is_readable:
            return rngs
        for name in components:
            key = self.opened.source.saved_prefix(name) + ".common"
            if key in metadata.state_dict_metadata and self.policy.object_action(name) in ("reshard", "reset", "omit"):
                common = read_saved(self.opened.reader, metadata, key, weights_only=True)
                rng = rng_of_saved(common, saved_world(metadata), self.num_ranks, num_data_parallel)
                rngs |= {} if rng is None else {name: rng}
        return rngs

    def _of_state(self, state: Mapping[str, Any], stage: Stage) -> tuple[OneRank, ReadRequest]:
        """What the rank of a state dict asks for. What it keeps for itself is asked for whether it was saved or not."""
        state = {
            key: value.among(self.num_ranks) if isinstance(value, RngState) else value for key, value in state.items()
        }
        components = cut_by_component(state, [self.opened], self.policy, self.num_ranks, lambda name: None)
        planner = self.planner(components.plans[0] if self.policy is not None else {})
        planner.set_up_planner(components.values, self.opened.metadata)
        request: ReadRequest = planner.create_local_plan().planner_data
        own = stage.ranks.own_names(stage.ranks.viewer)
        absent = [fqn for fqn in request.missing if fqn in own]
        entries = {**planner.wanted.entries, **dict.fromkeys(absent, ObjectEntry())}
        one = OneRank(dataclasses.replace(planner.wanted, entries=entries), {}).restricted(stage.holds)
        return one, dataclasses.replace(
            request,
            missing=tuple(fqn for fqn in request.missing if fqn not in absent and stage.holds(fqn)),
            left=tuple(filter(stage.holds, request.left)),
            refused=tuple(filter(stage.holds, request.refused)),
        )


def _shard_problems(table: KeyTable, num_data_parallel: int) -> tuple[Problem, ...]:
    """Data loaders whose virtual shards, which the checkpoint names, are too few."""
    found: dict[str, int] = {}
    for fqn in table.entries:
        num_shards = num_shards_of(fqn)
        if num_shards is not None and num_shards < num_data_parallel:
            found.setdefault(fqn.rpartition(".")[0], num_shards)
    return tuple(
        Problem("cannot_reshard", name, str(TooFewShardsError(num_shards, num_data_parallel)))
        for name, num_shards in found.items()
    )
