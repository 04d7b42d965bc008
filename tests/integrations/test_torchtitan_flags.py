"""Refusals in the words of torchtitan's command line."""

import json
import shlex
import subprocess
import sys
from typing import Any

from torchtitan_ext.checkpoint.rules.report import ComponentLine, LoadReport
from torchtitan_ext.checkpoint.tables.component import World
from torchtitan_ext.errors import Problem, Remedy, ReshardError, StateRefusedError, refusal
from torchtitan_ext.integrations.torchtitan_flags import Options, in_flags

PREFIX = "torchtitan_ext.integrations.torchtitan"
CAST = Problem("wrong_dtype", "w", "values can change", "; pass cast='allow' to accept that", Remedy("cast", "allow"))
RANKS = Problem("unclaimed_keys", "dataloader.dp_rank_*", "dropped", ", or pass LoadPlanner(...)", Remedy("reshard", 4))


def refused(*problems: Problem) -> StateRefusedError:
    line = ComponentLine("model", "reshard", "57 entries")
    return refusal("load", problems, LoadReport(World(4), World(6), (line,), problems=problems))


def flags_of(error: StateRefusedError, *, has_elastic_data: bool = True, **options: Any) -> list[dict[str, Any]]:
    """The options of our overrides in the flags of each problem, as torchtitan parses them."""
    parsed = []
    for line in str(in_flags(error, Options(options, 6, has_elastic_data))).splitlines():
        _, is_there, targets = line.partition("; pass --override.imports ")
        if is_there:
            entries = [target.removeprefix(f"{PREFIX}.").partition("=") for target in shlex.split(targets)]
            parsed.append({name: json.loads(given or "{}") for name, _, given in entries})
    return parsed


def test_a_cast_is_a_flag_and_not_a_call() -> None:
    assert flags_of(refused(CAST)) == [{"elastic_checkpoint": {"cast": "allow"}}]
    error = in_flags(refused(CAST), Options({}, 6, True))
    assert isinstance(error, ReshardError) and "cast='allow'" not in str(error) and "w: values can change" in str(error)


def test_data_go_on_by_shards_that_both_worlds_divide_or_begin_anew() -> None:
    assert flags_of(refused(RANKS)) == [{"elastic_checkpoint": {}, "elastic_data": {"num_shards": 12}}]
    reset = {"elastic_checkpoint": {"policy": {"dataloader": "reset"}}}
    assert flags_of(refused(RANKS), has_elastic_data=False) == [reset]


def test_a_loader_that_says_how_many_shards_it_can_take_is_believed() -> None:
    choose = Problem("cannot_reshard", "dataloader", "no", "; choose num_shards=4", Remedy("num_shards", 4))
    (flags,) = flags_of(refused(choose))
    assert flags["elastic_data"] == {"num_shards": 4}
    assert "choose num_shards=4" in str(in_flags(refused(choose), Options({}, 6, False)))


def test_options_that_were_given_stay() -> None:
    known = {"policy": {"optimizer": "omit"}, "strict": "warn", "timeout_seconds": 9.0}
    assert flags_of(refused(RANKS, CAST), **known) == [
        {"elastic_checkpoint": known, "elastic_data": {"num_shards": 12}},
        {"elastic_checkpoint": {**known, "cast": "allow"}},
    ]
    (anew,) = flags_of(refused(RANKS), has_elastic_data=False, **known)
    assert anew == {"elastic_checkpoint": {**known, "policy": {"optimizer": "omit", "dataloader": "reset"}}}


def test_what_no_flag_answers_keeps_its_words() -> None:
    doubt = Problem("layout_in_doubt", "w", "it is in doubt", "; state the order")
    assert "w: it is in doubt; state the order" in str(in_flags(refused(doubt, CAST), Options({}, 6, True)))


def test_no_flag_takes_a_run_back_to_step_0() -> None:
    lost = Problem("unclaimed_keys", "train_state.rank_*", "dropped", "", Remedy("reshard", 4))
    assert flags_of(refused(lost), has_elastic_data=False) == []


def test_excluded_components_are_in_the_report() -> None:
    text = str(in_flags(refused(CAST), Options({}, 6, True), ["dataloader"]))
    assert "  dataloader  omit     not loaded (--checkpoint.exclude_from_loading)" in text


# As torchtitan's main of August 2026: it has what the overrides need, but other data loaders.
OTHER_TORCHTITAN = """
import sys
from types import ModuleType
from unittest.mock import MagicMock
parts = {
    "components.checkpointer": ("DATALOADER", "MODEL", "TRAIN_STATE", "AsyncMode", "CheckpointManager"),
    "config.override": ("derive", "override"),
    "tools": ("filesystem",),
    "tools.logging": ("logger",),
    "tools.utils": ("GarbageCollection",),
}
for name in ("torchtitan", "torchtitan.components", "torchtitan.config", *map("torchtitan.{}".format, parts)):
    sys.modules[name] = ModuleType(name)
    sys.modules[name].__path__ = []
for name, attributes in parts.items():
    vars(sys.modules["torchtitan." + name]).update(dict.fromkeys(attributes, MagicMock()))
import torchtitan_ext.integrations.torchtitan
"""


def test_another_torchtitan_is_refused_in_one_sentence() -> None:
    done = subprocess.run([sys.executable, "-c", OTHER_TORCHTITAN], capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1] == (
        "torchtitan_ext.errors.failures.OtherTorchtitanError: torchtitan_ext.integrations.torchtitan knows torchtitan "
        "0.3.0, and this is another (No module named 'torchtitan.hf_datasets'); use 0.3.0 with these overrides, or "
        "tte.install() with this one"
    )
