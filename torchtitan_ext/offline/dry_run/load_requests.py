"""What the ranks of a job ask of a checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torchtitan_ext.checkpoint.operation.component_plans import OpenSource, cut_by_component, paths_below, read_saved
from torchtitan_ext.checkpoint.planners.load_planner import LoadPlanner
from torchtitan_ext.checkpoint.planners.saved_chunks import name_metadata
from torchtitan_ext.checkpoint.rules.load_rules import ComponentPlan, LoadRules, ReadRequest, component_of
from torchtitan_ext.checkpoint.rules.policy import ElasticPolicy
from torchtitan_ext.checkpoint.tables.component import saved_world
from torchtitan_ext.checkpoint.tables.key_table import KeyTable, ObjectEntry, TensorEntry, encode_table
from torchtitan_ext.elastic.data.virtual_shards import TooFewShardsError, num_shards_of
from torchtitan_ext.elastic.rng import RngState, rng_of_saved
from torchtitan_ext.errors import Problem
from torchtitan_ext.offline.dry_run.alike_ranks import AlikeRanks
from torchtitan_ext.offline.dry_run.job import Job, Stage
from torchtitan_ext.offline.dry_run.load_source import LoadSource
from torchtitan_ext.offline.dry_run.one_rank import OneRank, components_of, place_on_mesh


@dataclass(frozen=True)
class LoadingRanks:
    """The ranks of a stage, which ask for the same keys.

    Attributes:
        stage: The stage, with all that its ranks hold.
        ranks: The ranks, with the keys that they read as their table.
        request: What one of them sends to the coordinator.
        problems: What their objects would refuse, as far as the checkpoint tells.
        asked: The saved keys that components read before anything is planned, to work out their part.
    """

    stage: Stage
    ranks: AlikeRanks
    request: ReadRequest
    problems: tuple[Problem, ...]
    asked: tuple[str, ...]


class LoadRequests:
    """Makes the requests of a job's ranks for a checkpoint."""

    def __init__(self, job: Job, source: LoadSource) -> None:
        self._job = job
        self._source = source
        self._opened: OpenSource = source.opened
        self._policy = job.policy

    def of_stage(self, stage: Stage) -> LoadingRanks:
        """Asks for the keys that the stage holds, the policy loads and the checkpoint has."""
        group = stage.ranks
        one, request = self._of_all(stage) if stage.state is None else self._of_state(stage.state, stage)
        if stage.rules is not None:
            one = place_on_mesh(one, stage.rules, self._source.chunks)
        ranks = AlikeRanks(group.ranks, one.table, group.viewer, group.mesh, own=set(group.own_names(group.viewer)))
        problems = _shard_problems(one.table, ranks.num_data_parallel) if stage.state is None else ()
        prefixes = [plan.saved_prefix for plan in request.components.values() if plan.saved_prefix is not None]
        asked = tuple(fqn for prefix in prefixes for fqn in paths_below(prefix, self._opened.metadata))
        return LoadingRanks(stage, ranks, request, problems, asked)

    def planner(self, plans: Mapping[str, ComponentPlan]) -> LoadPlanner:
        """The planner of the load, with the plan of each component."""
        return LoadPlanner(layouts=self._job.layouts).with_rules(self._rules(plans))

    def _rules(self, plans: Mapping[str, ComponentPlan]) -> LoadRules:
        return LoadRules(self._opened.source, policy=self._policy, components=plans)

    def _of_all(self, stage: Stage) -> tuple[OneRank, ReadRequest]:
        """The request of a job for all of a checkpoint. Random generators work out their part, as in the job."""
        one = stage.one
        is_tensor = {fqn: isinstance(entry, TensorEntry) for fqn, entry in one.table.entries.items()}
        plans = components_of(is_tensor, one.table.stock_paths, self._policy or ElasticPolicy())
        rngs = self._generators(plans, stage.ranks.num_data_parallel)
        if rngs:
            cut = cut_by_component(rngs, [self._opened], self._policy, self._job.num_ranks, lambda name: None)
            plans |= cut.plans[0]
            is_kept = {fqn: component_of(fqn, plans, is_tensor=tensor) not in rngs for fqn, tensor in is_tensor.items()}
            one = one.restricted(is_kept.__getitem__)
        rules = self._rules(plans)
        loaded = one.restricted(lambda fqn: rules.is_loaded(fqn, is_tensor=is_tensor[fqn]))
        left = tuple(fqn for fqn in one.table.entries if fqn not in loaded.table.entries)
        message, names = encode_table(loaded.table).message, name_metadata(self._opened.metadata)
        return loaded, ReadRequest(message, names, left=left, components=plans)

    def _generators(self, components: Iterable[str], num_data_parallel: int) -> dict[str, RngState]:
        """The components that ``RngState`` has saved; with a policy they load by its rule."""
        metadata = self._opened.metadata
        rngs: dict[str, RngState] = {}
        if self._policy is None or self._source.problems:
            return rngs
        for name in components:
            key = self._opened.source.saved_prefix(name) + ".common"
            if key in metadata.state_dict_metadata and self._policy.object_action(name) in ("reshard", "reset", "omit"):
                common = read_saved(self._opened, key)
                rng = rng_of_saved(common, saved_world(metadata), self._job.num_ranks, num_data_parallel)
                rngs |= {} if rng is None else {name: rng}
        return rngs

    def _of_state(self, state: Mapping[str, Any], stage: Stage) -> tuple[OneRank, ReadRequest]:
        """The request of a state dict's rank. Values under a name of the rank's own are asked for even if not saved."""
        size = self._job.num_ranks
        state = {key: value.among(size) if isinstance(value, RngState) else value for key, value in state.items()}
        components = cut_by_component(state, [self._opened], self._policy, size, lambda name: None)
        planner = self.planner(components.plans[0] if self._policy is not None else {})
        planner.set_up_planner(components.values, self._opened.metadata)
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
    """Data loaders whose saved virtual shards are fewer than the data-parallel ranks."""
    found: dict[str, int] = {}
    for fqn in table.entries:
        num_shards = num_shards_of(fqn)
        if num_shards is not None and num_shards < num_data_parallel:
            found.setdefault(fqn.rpartition(".")[0], num_shards)
    return tuple(
        Problem("cannot_reshard", name, str(TooFewShardsError(num_shards, num_data_parallel)))
        for name, num_shards in found.items()
    )
