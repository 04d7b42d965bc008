"""Refusals of a load in the words of torchtitan's command line: which flags would make it go."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torchtitan_ext.checkpoint.rules.report import ComponentLine, LoadReport
from torchtitan_ext.errors import Problem, StateRefusedError, refusal

_OVERRIDES = "torchtitan_ext.integrations.torchtitan"
_TRAIN_STATE = "train_state"


@dataclass(frozen=True)
class Options:
    """The options of a run: those of ``elastic_checkpoint`` that are not the defaults, its data-parallel size, and
    whether ``elastic_data`` replaces, or could replace, its data loader.
    """

    checkpoint: Mapping[str, Any]
    dp_size: int
    has_elastic_data: bool


def in_flags(error: StateRefusedError, options: Options, excluded: Sequence[str] = ()) -> StateRefusedError:
    """The same refusal, with torchtitan's flags in place of calls of this package, and the ``excluded`` components."""
    problems = [
        one if (flags := _flags_for(one, options)) is None else replace(one, advice=f"; pass {flags}")
        for one in error.problems
    ]
    return refusal(error.operation, problems, error.report and with_excluded(error.report, excluded))


def with_excluded(report: LoadReport, excluded: Iterable[str]) -> LoadReport:
    """The report with a line for each component that torchtitan does not ask for."""
    lines = (ComponentLine(name, "omit", "not loaded (--checkpoint.exclude_from_loading)") for name in excluded)
    return replace(report, components=(*report.components, *lines))


def _flags_for(problem: Problem, options: Options) -> str | None:
    """The flags that answer one problem, beside the options that the run has; ``None`` where none do."""
    checkpoint, remedy = options.checkpoint, problem.remedy
    option = None if remedy is None else remedy.option
    if remedy is None or option not in ("cast", "num_shards", "reshard"):
        return None
    if option == "cast":
        return _flags({**checkpoint, "cast": remedy.value})
    saved = int(remedy.value)
    num_shards = saved if option == "num_shards" else math.lcm(saved, options.dp_size)
    if options.has_elastic_data:
        return _flags(checkpoint, {"num_shards": num_shards})
    component = problem.fqn.split(".")[0]
    if option == "num_shards" or component == _TRAIN_STATE:  # a run at step 0 would overwrite the steps that it has
        return None
    return _flags({**checkpoint, "policy": {**checkpoint.get("policy", {}), component: "reset"}})


def _flags(checkpoint: Mapping[str, Any], data: Mapping[str, Any] | None = None) -> str:
    imports = [_import("elastic_checkpoint", {name: value for name, value in checkpoint.items() if value})]
    imports += [] if data is None else [_import("elastic_data", data)]
    return f"--override.imports {' '.join(imports)}"


def _import(override: str, options: Mapping[str, Any]) -> str:
    target = f"{_OVERRIDES}.{override}"
    return shlex.quote(f"{target}={json.dumps(options)}") if options else target
