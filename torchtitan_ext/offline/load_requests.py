"""What the ranks of a job ask of a checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torchtitan_ext.checkpoint.component_plans import OpenSource, cut_by_component
from torchtitan_ext.checkpoint.key_table import KeyEntry, KeyTable, ObjectEntry, TensorEntry
from torchtitan_ext.checkpoint.load_planner import LoadPlanner
from torchtitan_ext.checkpoint.load_rules import ComponentPlan, LoadRules, ReadRequest
from torchtitan_ext.checkpoint.policy import ElasticPolicy
from torchtitan_ext.checkpoint.rank_table import encode_table
from torchtitan_ext.checkpoint.saved_chunks import ChunkList
from torchtitan_ext.checkpoint.storage_entries import name_metadata
from torchtitan_ext.elastic.virtual_shards import TooFewShardsError, num_shards_of
from torchtitan_ext.errors import Problem
from torchtitan_ext.layout.rules import ShardOrder
from torchtitan_ext.offline.alike_ranks import AlikeRanks
from torchtitan_ext.offline.job_stages import Stage
from torchtitan_ext.offline.load_forecast import LoadingRanks
from torchtitan_ext.offline.one_rank import OneRank, place_on_mesh


@dataclass(frozen=True)
class LoadRequests:
    """A load of a checkpoint.

    Attributes:
        chunks: How its tensors were saved.
        num_ranks: That load it.
    """

    opened: OpenSource
    policy: ElasticPolicy | None
    layouts: Mapping[str, ShardOrder] | None
    chunks: Mapping[str, ChunkList]
    num_ranks: int

    def of_stage(self, stage: Stage) -> LoadingRanks:
        """What the ranks of a stage ask for: of what they hold what the policy loads and the checkpoint has."""
        group = stage.ranks
        one, request = self._of_all(stage.one) if stage.state is None else self._of_state(stage.state, stage)
        if stage.rules is not None:
            one = place_on_mesh(one, stage.rules, self.chunks)
        ranks = AlikeRanks(group.ranks, one.table, group.viewer, group.mesh, own=set(group.own_names(group.viewer)))
        problems = _shard_problems(one.table, ranks.num_data_parallel) if stage.state is None else ()
        return LoadingRanks(ranks, request, list(group.state_bytes()), stage.one.is_packed, problems)

    def planner(self, plans: Mapping[str, ComponentPlan]) -> LoadPlanner:
        """What plans the load, with what becomes of each component."""
        load_rules = LoadRules(self.opened.source, policy=self.policy, components=plans)
        return LoadPlanner(layouts=self.layouts).with_rules(load_rules)

    def _of_all(self, one: OneRank) -> tuple[OneRank, ReadRequest]:
        """A job that asks for all of a checkpoint."""
        paths = one.table.stock_paths
        tops = {fqn: str(paths[fqn][0]) if paths.get(fqn) else fqn.split(".")[0] for fqn in one.table.entries}
        plans: dict[str, ComponentPlan] = {}
        if self.policy is not None:
            named = {top for fqn, top in tops.items() if top != fqn or isinstance(one.table.entries[fqn], ObjectEntry)}
            names = dict.fromkeys(top for top in tops.values() if top in named)
            plans = {name: ComponentPlan(self.policy.component_action(name)) for name in names}
        load_rules = LoadRules(self.opened.source, policy=self.policy, components=plans)
        entries: dict[str, KeyEntry] = {}
        left = []
        for fqn, entry in one.table.entries.items():
            if load_rules.is_loaded(fqn, is_tensor=isinstance(entry, TensorEntry)):
                entries[fqn] = entry
            else:
                left.append(fqn)
        table = dataclasses.replace(one.table, entries=entries)
        request = ReadRequest(
            encode_table(table).message, name_metadata(self.opened.metadata), left=tuple(left), components=plans
        )
        return OneRank(table, one.value_bytes), request

    def _of_state(self, state: Mapping[str, Any], stage: Stage) -> tuple[OneRank, ReadRequest]:
        """What the rank of a state dict asks for. What it keeps for itself is asked for whether it was saved or not."""
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
