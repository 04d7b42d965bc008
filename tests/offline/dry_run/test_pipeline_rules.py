"""Which keys each stage of a pipeline holds, by rules."""

from pathlib import Path
from typing import Any

import pytest
import torch

import torchtitan_ext as tte
from torchtitan_ext.errors import LayoutError
from torchtitan_ext.offline.placement_rules import PipelineRules


def test_a_mesh_without_pp_is_one_stage() -> None:
    rules = PipelineRules({"dp": 2, "tp": 2}, {"w": {"tp": 1}})
    assert (rules.num_stages, rules.mesh, rules.rules) == (1, {"dp": 2, "tp": 2}, {"w": {"tp": 1}})
    assert rules.ranks[0] == [0, 1, 2, 3]
    assert rules.holds(0, "w")
    rules.check(["w"], ["w"])


def test_ranks_and_keys_of_stages() -> None:
    given = {"layers.0.*": {"pp": 0}, "layers.[1-9].*": {"pp": 1, "dp": None}, "norm": {"pp": None}}
    rules = PipelineRules({"pp": 2, "dp": 2}, given)
    assert [rules.ranks[stage] for stage in (0, 1)] == [[0, 1], [2, 3]]
    assert PipelineRules({"dp": 2, "pp": 2}, given).ranks[1] == [1, 3]
    assert rules.rules == {"layers.[1-9].*": {"dp": None}}
    state_of_optimizer = "optimizer.state.layers.0.w.exp_avg"
    held = {fqn: [rules.holds(at, fqn) for at in (0, 1)] for fqn in (state_of_optimizer, "layers.3.w", "norm", "step")}
    assert held == {
        state_of_optimizer: [True, False],
        "layers.3.w": [False, True],
        "norm": [True, True],
        "step": [True, True],
    }
    assert PipelineRules({"pp": 2}, given | {"layers.[1-9].*": {"pp": 1}}).mesh == {"dp_shard": 1}


@pytest.mark.parametrize(
    ("placements", "error", "words"),
    [
        (None, ValueError, r"nothing says which stage of pp holds 2 tensors \(v, w\); state it with placements="),
        ({"w": {"pp": 2}, "v": {"pp": 0}}, ValueError, "'w' names stage 2 of pp, the mesh has 2"),
        ({"w": {"pp": 1}}, ValueError, r"1 tensors \(v\)"),
        ({"*": {"pp": 1}, "u.w": {"pp": 0}}, LayoutError, "u.w: matches no key"),
    ],
)
def test_descriptions_that_say_too_little(placements: Any, error: type[Exception], words: str) -> None:
    state = {"v": torch.zeros(2), "w": torch.zeros(2), "step": 1}
    with pytest.raises(error, match=words):
        tte.dry_run(state, mesh={"pp": 2, "dp": 2}, placements=placements)


def test_each_stage_asks_for_its_own_keys(tmp_path: Path) -> None:
    saved = {"v": torch.zeros(8), "w": torch.zeros(16), "rng": {"rank_0": [0]}}
    tte.save(saved, tmp_path, no_dist=True)
    placements = {"v": {"pp": 0}, "w": {"pp": 1}, "u": {"pp": 1}}
    state = {"v": torch.zeros(8), "w": torch.zeros(16), "u": torch.zeros(4), "rng": {"rank_0": [0]}}
    found = tte.dry_run(state, mesh={"pp": 2, "dp": 2}, checkpoint=tmp_path, placements=placements)
    assert [one.state_bytes for one in found.load.ranks] == [16, 16, 40, 40]
    assert [one.num_reads for one in found.load.ranks] == [2, 1, 1, 1]
    assert {one.fqn for one in found.problems} == {"u", "rng.rank_1"}
