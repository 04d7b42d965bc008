"""Refusals in the words of torchtitan's command line."""

import json
import shlex
import subprocess
import sys
from typing import Any

from torchtitan_ext.checkpoint.rules.policy import ElasticPolicy
from torchtitan_ext.checkpoint.rules.report import ComponentLine, LoadReport
from torchtitan_ext.checkpoint.tables.component import World
from torchtitan_ext.errors import Problem, Remedy, ReshardError, StateRefusedError, refusal
from torchtitan_ext.integrations.torchtitan_flags import Options, in_flags

PREFIX = "torchtitan_ext.integrations.torchtitan"
CAST = Problem("wrong_dtype", "w", "values can change", "; pass cast='allow' to accept that", Remedy("cast", "allow"))
RANKS = Problem("unclaimed_keys", "dataloader.dp_rank_*", "dropped", ", or pass LoadPlanner(...)", Remedy("reshard", 4))


def refused(*problems: Problem, remedy: ElasticPolicy | None = None) -> StateRefusedError:
    line = ComponentLine("model", "reshard", "57 entries")
    report = LoadReport(World(4), World(6), (line,), problems=problems, remedy_policy=remedy)
    return refusal("load", problems, report)


def ways(error: StateRefusedError, *, has_elastic_data: bool = True, **options: Any) -> list[dict[str, Any]]:
    """The options of our overrides in each way on, as torchtitan parses them."""
    parsed = []
    for line in str(in_flags(error, Options(options, 6, has_elastic_data))).splitlines():
        if "--override.imports" in line:
            flag, *targets = shlex.split(line)
            entries = [target.removeprefix(f"{PREFIX}.").partition("=") for target in targets]
            parsed.append({name: json.loads(given or "{}") for name, _, given in entries})
            assert flag == "--override.imports"
    return parsed


def test_a_cast_is_one_flag_and_not_a_call_on_each_line() -> None:
    assert ways(refused(CAST)) == [{"elastic_checkpoint": {"cast": "allow"}}]
    error = in_flags(refused(CAST), Options({}, 6, True))
    assert isinstance(error, ReshardError) and "cast='allow'" not in str(error) and "w: values can change" in str(error)


def test_data_go_on_by_shards_that_both_worlds_divide_or_begin_anew() -> None:
    reset = ElasticPolicy({"dataloader": "reset"})
    both = ways(refused(RANKS, remedy=reset))
    assert both == [
        {"elastic_checkpoint": {}, "elastic_data": {"num_shards": 12}},
        {"elastic_checkpoint": {"policy": {"dataloader": "reset"}}},
    ]
    assert ways(refused(RANKS, remedy=reset), has_elastic_data=False) == both[1:]


def test_a_loader_that_says_how_many_shards_it_can_take_is_believed() -> None:
    choose = Problem("cannot_reshard", "dataloader", "no", "; choose num_shards=4", Remedy("num_shards", 4))
    first, _ = ways(refused(choose, remedy=ElasticPolicy({"dataloader": "reset"})))
    assert first["elastic_data"] == {"num_shards": 4}
    assert "choose num_shards=4" in str(in_flags(refused(choose), Options({}, 6, True)))


def test_options_that_were_given_stay() -> None:
    reset = ElasticPolicy({"dataloader": "reset", "optimizer": "omit"}, strict="warn")
    options = {"policy": {"optimizer": "omit"}, "strict": "warn", "timeout_seconds": 9.0}
    first, second = ways(refused(RANKS, CAST, remedy=reset), **options)
    known = {"strict": "warn", "timeout_seconds": 9.0, "cast": "allow"}
    assert first["elastic_checkpoint"] == {**known, "policy": {"optimizer": "omit"}}
    assert second == {"elastic_checkpoint": {**known, "policy": {"dataloader": "reset", "optimizer": "omit"}}}


def test_what_no_flag_answers_keeps_its_words() -> None:
    doubt = Problem("layout_in_doubt", "w", "it is in doubt")
    text = str(in_flags(refused(doubt, CAST), Options({}, 6, True)))
    assert "--override" not in text and "pass cast='allow'" in text


def test_no_flag_takes_a_run_back_to_step_0() -> None:
    lost = Problem("cannot_reshard", "train_state", "the checkpoint has no step")
    assert ways(refused(lost, remedy=ElasticPolicy({"train_state": "reset"}))) == []


def test_excluded_components_are_in_the_report() -> None:
    text = str(in_flags(refused(CAST), Options({}, 6, True), ["dataloader"]))
    assert "  dataloader  omit     not loaded (--checkpoint.exclude_from_loading)" in text


OTHER_TORCHTITAN = """
import sys, types
for name in ("", ".components", ".components.checkpointer"):
    sys.modules["torchtitan" + name] = types.ModuleType("torchtitan" + name)
    sys.modules["torchtitan" + name].__path__ = []
for name in ("DATALOADER", "MODEL", "TRAIN_STATE", "AsyncMode", "CheckpointManager"):
    setattr(sys.modules["torchtitan.components.checkpointer"], name, None)
import torchtitan_ext.integrations.torchtitan
"""


def test_a_torchtitan_that_has_moved_its_parts_is_named() -> None:
    done = subprocess.run([sys.executable, "-c", OTHER_TORCHTITAN], capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1] == (
        "ImportError: torchtitan_ext.integrations.torchtitan knows torchtitan 0.3.0, and this is another "
        "(No module named 'torchtitan.config'); use 0.3.0 with these overrides, or "
        "torchtitan_ext.install() with this one"
    )
