"""Refusals of a load in the words of torchtitan's command line: which flags would make it go."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from torchtitan_ext.checkpoint.rules.report import ComponentLine, LoadReport
from torchtitan_ext.errors import Remedy, StateRefusedError, refusal

_OVERRIDES = "torchtitan_ext.integrations.torchtitan"
_DATALOADER = "dataloader"
_TRAIN_STATE = "train_state"


@dataclass(frozen=True)
class FlagReport(LoadReport):
    """A report that offers flags. ``ways`` are (flags to pass, their effect), the best way first."""

    ways: tuple[tuple[str, str], ...] = ()

    @property
    def way_on(self) -> str:
        """See ``LoadReport``."""
        if not self.ways:
            return ""
        return "\n".join(["To go on, pass:", *(f"  {flags}\n    {effect}" for flags, effect in self.ways)])


@dataclass(frozen=True)
class Options:
    """The options of a run: those of ``elastic_checkpoint`` that are not the defaults, its data-parallel size, whether
    ``elastic_data`` replaces, or could replace, its data loader, and whether that can split a saved shard.
    """

    checkpoint: Mapping[str, Any]
    dp_size: int
    has_elastic_data: bool
    splits_shards: bool = True


def in_flags(error: StateRefusedError, options: Options, excluded: Sequence[str] = ()) -> StateRefusedError:
    """The same refusal, with torchtitan's flags in place of calls of this package, and the ``excluded`` components."""
    ways = _ways_on(error, options)
    problems = [
        replace(one, advice="") if ways and one.remedy and one.remedy.option in ("cast", "reshard") else one
        for one in error.problems
    ]
    if error.report is None:
        return refusal(error.operation, problems)
    report = with_excluded(error.report, excluded)
    known = {field.name: getattr(report, field.name) for field in fields(LoadReport)}
    return refusal(error.operation, problems, FlagReport(**known, ways=tuple(ways)))


def with_excluded(report: LoadReport, excluded: Iterable[str]) -> LoadReport:
    """The report with a line for each component that torchtitan does not ask for."""
    lines = (ComponentLine(name, "omit", "not loaded (--checkpoint.exclude_from_loading)") for name in excluded)
    return replace(report, components=(*report.components, *lines))


def _ways_on(error: StateRefusedError, options: Options) -> list[tuple[str, str]]:
    policy = None if error.report is None else error.report.remedy_policy
    remedies = [problem.remedy for problem in error.problems if problem.remedy is not None]
    if policy is None and len(remedies) < len(error.problems):
        return []
    casts = {"cast": "allow"} if any(remedy.option == "cast" for remedy in remedies) else {}
    num_shards = _num_shards(remedies, options) if options.has_elastic_data else None
    actions = dict(options.checkpoint.get("policy", {})) if policy is None else policy.actions
    if actions.get(_TRAIN_STATE) == "reset":  # a run at step 0 would overwrite the steps that it has
        return []
    strict = {"strict": policy.strict} if policy is not None and policy.strict != "error" else {}
    base = {**options.checkpoint, **casts, **strict}
    ways = []
    if num_shards is not None:
        others = {name: action for name, action in actions.items() if name != _DATALOADER}
        flags = _flags({**base, "policy": others}, {"num_shards": num_shards})
        ways.append((flags, "goes on with the data from where it stood"))
    if casts and policy is None:
        ways.append((_flags({**base, "policy": actions}), "rounds the saved values to the dtypes of this run"))
    elif policy is not None:
        effect = "goes on without these" + (", and rounds the saved values to the dtypes of this run" if casts else "")
        ways.append((_flags({**base, "policy": actions}), effect))
    return ways


def _num_shards(remedies: Iterable[Remedy], options: Options) -> int | None:
    """A number of shards with which the run's data loader can go on from the checkpoint."""
    for remedy in remedies:
        if remedy.option == "num_shards":
            return int(remedy.value)
        if remedy.option == "reshard":
            saved, size = int(remedy.value), options.dp_size
            return math.lcm(saved, size) if options.splits_shards else saved if size <= saved else None
    return None


def _flags(checkpoint: Mapping[str, Any], data: Mapping[str, Any] | None = None) -> str:
    imports = [_import("elastic_checkpoint", {name: value for name, value in checkpoint.items() if value})]
    imports += [] if data is None else [_import("elastic_data", data)]
    return f"--override.imports {' '.join(imports)}"


def _import(override: str, options: Mapping[str, Any]) -> str:
    target = f"{_OVERRIDES}.{override}"
    return shlex.quote(f"{target}={json.dumps(options)}") if options else target
