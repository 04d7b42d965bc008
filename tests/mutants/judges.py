"""Which tests judge a file: by names, by what they import or include, and by a table of folders."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# Tests that run at night, or that do not look at what a module does.
NOT_JUDGES = re.compile(
    r"/(clients|remote|upstream|integrations)/|killed|lost|kills|power|remedies|_page|docs|readme|examples|"
    r"on_gpu|late_device|accelerator|architecture|test_import|huge|preempted|memory|dry_run_worlds|on_accelerators"
)
MAX_OWN_JUDGES = 3

# The tests of a folder, which judge what the tests of a file let pass.
JUDGES_OF_FOLDER = {
    "csrc/core": "checkpoint/planners/test_plan_oracle checkpoint/operation/test_load transfer/test_reshard_states",
    "csrc/storage": "storage/native/test_round_trip storage/native/test_file_reader storage/inspect/test_damage",
    "csrc/ops": "test_ops test_fingerprints",
    "csrc/dist": "test_exchange_runs sync/test_broadcast",
    "csrc/autograd": "test_ops test_exchange_runs",
    "csrc/bindings": "checkpoint/planners/test_save_planner storage/metadata/test_metadata_file "
    "checkpoint/operation/test_load",
    "torchtitan_ext": "checkpoint/operation/test_load distributed/test_safetensors_saves test_fingerprints",
    "torchtitan_ext/checkpoint": "checkpoint/operation/test_load checkpoint/planners/test_load_planner",
    "torchtitan_ext/checkpoint/operation": "checkpoint/operation/test_load checkpoint/operation/test_shared_reads "
    "checkpoint/operation/test_prove checkpoint/operation/test_load_faults",
    "torchtitan_ext/checkpoint/staging": "checkpoint/staging/test_stager",
    "torchtitan_ext/cli": "cli/test_every_command cli/test_checkpoint_commands",
    "torchtitan_ext/elastic/data": "elastic/data/test_dataloader elastic/data/test_stream_batches",
    "torchtitan_ext/elastic/schedule": "elastic/schedule/test_lr_scheduler",
    "torchtitan_ext/full": "full/test_full_tensors full/test_full_state_dicts",
    "torchtitan_ext/integrations": "integrations/test_install integrations/test_torchtitan",
    "torchtitan_ext/layout": "layout/test_layout checkpoint/planners/test_load_planner",
    "torchtitan_ext/offline": "offline/rewrite/test_convert offline/rewrite/test_reshard offline/compare/test_diff",
    "torchtitan_ext/offline/dry_run": "offline/dry_run/test_dry_run",
    "torchtitan_ext/ops": "test_ops",
    "torchtitan_ext/ranks": "ranks/test_exchange ranks/test_timed_exchange checkpoint/operation/test_load_faults",
    "torchtitan_ext/runs": "runs/test_checkpoint_manager runs/test_preemption",
    "torchtitan_ext/storage": "storage/inspect/test_damage storage/native/test_round_trip",
    "torchtitan_ext/storage/commit": "storage/commit/test_commit storage/commit/test_save_lock",
    "torchtitan_ext/storage/formats": "storage/formats/test_formats storage/weights/test_safetensors_reader "
    "offline/rewrite/test_convert",
    "torchtitan_ext/storage/inspect": "storage/inspect/test_damage cli/test_inspect cli/test_verify",
    "torchtitan_ext/storage/runs": "storage/runs/test_runs storage/runs/test_branches",
    "torchtitan_ext/storage/weights": "storage/weights/test_safetensors_reader distributed/test_safetensors_saves",
    "torchtitan_ext/sync": "sync/test_sync sync/test_broadcast sync/test_same_call",
    "torchtitan_ext/transfer": "transfer/test_reshard_states transfer/test_odd_states "
    "transfer/test_transformed_reshards",
    "torchtitan_ext/transforms": "transforms/test_transformed_loads transforms/test_transformed_saves",
}


@cache
def judges_of(file: str) -> tuple[str, ...]:
    """The tests of a file, by their names and by what they import or include, and those of its folder.

    A name of a C++ test program has no slash.
    """
    path = Path(file)
    folder = next(tests for parent in path.parents if (tests := JUDGES_OF_FOLDER.get(str(parent))) is not None)
    room, stem = path.with_suffix("").parts[1], path.parent.name if path.stem == "__init__" else path.stem
    if path.suffix == ".cpp":
        header = f'#include "{room}/{stem}.h"'
        own = [Path(test).stem for test in _tests("csrc/test_*.cpp") if header in (ROOT / test).read_text()]
    else:
        module = ".".join(path.with_suffix("").parts).removesuffix(".__init__")
        tests = [test for test in _tests("**/test_*.py") if not NOT_JUDGES.search(test)]
        named = [test for test in tests if _words(stem) <= _words(Path(test).stem)]
        own = [test for test in named if {room, "distributed"} & {*Path(test).parts}]
        own += [test for test in tests if module in _imports(test) and "/distributed/" not in test]
    own.sort(key=lambda test: not _words(stem) <= _words(Path(test).stem))
    return tuple(dict.fromkeys([*own[:MAX_OWN_JUDGES], *(f"tests/{test}.py" for test in folder.split())]))


def _words(name: str) -> set[str]:
    return {word.removesuffix("s") for word in name.split("_")} - {"test"}


@cache
def _tests(pattern: str) -> list[str]:
    return [str(path.resolve().relative_to(ROOT)) for path in sorted((ROOT / "tests").glob(pattern))]


@cache
def _imports(file: str) -> frozenset[str]:
    """The modules that a file imports, with those whose members it imports."""
    names: set[str] = set()
    for node in ast.walk(ast.parse((ROOT / file).read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return frozenset(names)
