"""torchtitan's main: its data on any number of ranks, and the states of its own loaders. Over the real Grain, and
stand-ins of the revision that ``tests/support/torchtitan_main.py`` names: main is in no release."""

import itertools
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import warm_processes
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

import torchtitan_ext as tte
from torchtitan_ext.storage.commit.branch import remember_step
from torchtitan_ext.storage.native import file_writer

pytest.importorskip("grain", reason="`make test-clients` installs Grain")

SCRIPT = Path(__file__).parents[1] / "support" / "torchtitan_main.py"
OWN = 0  # main's own data loader, without virtual shards
numbers = itertools.count()


def run_ranks(
    folder: Path, world_size: int, num_steps: int, num_shards: int, *, dies: bool = False
) -> tuple[dict[int, list[Any]], str]:
    """What all ranks together have read in each step, sorted, and what rank 0 has printed."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    environment = {**os.environ, "TTE_RUN": str(next(numbers))}
    sizes = [world_size, num_steps, num_shards, *(["die"] if dies else [])]
    ranks = [
        warm_processes.Popen([SCRIPT, folder, rank, *sizes], env=environment, **pipes) for rank in range(world_size)
    ]
    told = [rank.communicate(timeout=120) for rank in ranks]
    assert dies or [rank.returncode for rank in ranks] == [0] * world_size, told
    lines = [json.loads(line) for output, _ in told for line in output.splitlines() if line.startswith("{")]
    read = {line["step"]: [] for line in lines}
    for line in lines:
        read[line["step"]] += line["read"]
    return {step: sorted(rows) for step, rows in read.items()}, told[0][0] + told[0][1]


def test_the_data_cross_to_any_number_of_ranks(tmp_path: Path) -> None:
    """Mixtures and packing inside a shard; one rank is killed in the middle of a save."""
    whole, _ = run_ranks(tmp_path / "whole", 2, 6, 8)
    assert list(whole) == [1, 2, 3, 4, 5, 6] and all(len(rows) == 8 for rows in whole.values())
    tokens = [token for rows in whole.values() for row in rows for token in row]
    assert {token > 1000 for token in tokens} == {True, False} and 0 not in tokens
    parts: dict[int, Any] = {}
    for world_size, num_steps, dies in [(2, 3, True), (4, 2, False), (1, 2, False)]:
        read, told = run_ranks(tmp_path / "parts", world_size, num_steps, 8, dies=dies)
        parts |= read
        assert ("Error" in told) == dies
    assert parts == whole
    assert f"tokens: {6 * 8 * 16}" in told


def test_the_state_of_mains_own_loader_is_taken_over_and_given_back(tmp_path: Path) -> None:
    """With as many shards as ranks that saved, on fewer ranks too."""
    whole, _ = run_ranks(tmp_path / "whole", 2, 5, OWN)
    parts: dict[int, Any] = {}
    for world_size, num_steps, num_shards in [(2, 2, OWN), (2, 1, 2), (2, 1, OWN)]:
        parts |= run_ranks(tmp_path / "parts", world_size, num_steps, num_shards)[0]
    parts |= run_ranks(tmp_path / "parts", 1, 1, 2)[0]
    assert parts == whole


def test_a_loader_that_cannot_go_on_is_refused_with_the_flags_that_would(tmp_path: Path) -> None:
    run_ranks(tmp_path, 2, 1, OWN)
    flag = "'torchtitan_ext.integrations.torchtitan.elastic_data={\"num_shards\": 2}'"
    for world_size, num_shards in [(1, OWN), (2, 8)]:
        read, told = run_ranks(tmp_path, world_size, 1, num_shards)
        assert not read and "refused:" in told and flag in told
    read, told = run_ranks(tmp_path, 4, 1, OWN)
    assert not read and "refused:" in told and "elastic_data=" not in told, (
        "two shards are too few, and cannot be split"
    )


def test_a_step_that_was_left_behind_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a kill between the commit of a run that was set back and the moves of its later steps."""
    whole, _ = run_ranks(tmp_path / "whole", 1, 4, OWN)
    for num_steps in (1, 1, 2):
        run_ranks(tmp_path, 1, num_steps, OWN)
    run = tmp_path / "run"
    remember_step(run / "step-3")
    monkeypatch.setattr(file_writer, "set_aside", lambda *_, **__: None)
    saved = _load_state_dict_from_keys(checkpoint_id=run / "step-3")
    tte.save(saved, run / "step-2")
    assert sorted(path.name for path in run.glob("step-*")) == ["step-2", "step-3", "step-4"]
    read, _ = run_ranks(tmp_path, 1, 1, OWN)
    assert list(read) == [4] and read[4] == whole[4], "from what step-2 holds now, the state of step 3, not from step-4"


REFUSALS = f"""
import sys
sys.path.insert(0, {str(SCRIPT.parent)!r})
import torchtitan_main
torchtitan_main.install()
from torchtitan_ext.integrations.torchtitan import elastic_data
from torchtitan_ext.integrations.torchtitan_grain_data import GrainShards
state = {{"next_index": 3}}
shards = GrainShards(None, 2)
assert shards.adopt({{"world_size": 1, "dp_rank_0": b""}}) is None, "of 0.3.0"
for saved in (
    {{"version": 1, "dp_world_size": 3, "dp_rank_0": state, "dp_rank_2": state}},
    {{"version": 2, "dp_world_size": 1, "dp_rank_0": state}},
):
    try:
        print(shards.adopt(saved))
    except Exception as error:
        print(type(error).__name__, error)
config = elastic_data(torchtitan_main.GrainDataLoader.Config(repeat=False), num_shards=3)
sizes = dict(tokenizer=None, max_context_length=16, num_tokens_per_batch=16)
try:
    config.build(dp_rank=0, dp_world_size=2, **sizes)
except Exception as error:
    print(type(error).__name__, error)
loader = config.build(dp_rank=0, dp_world_size=1, **sizes)
print("rows:", len(list(loader)) > 30, next(iter(loader), None) is not None)
loader.close()
elastic_data(torchtitan_main.GrainDataLoader.Config(), num_shards=3).build(dp_rank=0, dp_world_size=2, **sizes).close()
"""


def test_what_the_shards_refuse() -> None:
    done = warm_processes.run(["-c", REFUSALS], capture_output=True)
    assert done.returncode == 0, done.stderr
    lacks, version, repeat, rows = done.stdout.splitlines()
    assert (
        lacks.startswith("CannotReshardError")
        and "on 3 data-parallel ranks, and the checkpoint lacks those of ranks [1]" in lacks
    )
    assert (
        version.startswith("CannotReshardError") and "in version 2" in version and "or reset the data loader" in version
    )
    assert repeat.startswith("WrongValueError elastic_data: got repeat=False on 2 data-parallel ranks")
    assert rows == "rows: True True", "all rows of one epoch, and then the next one"
    assert "num_shards=3 is no multiple of 2 data-parallel ranks" in done.stderr
