"""What a load proves in one process, what it says to be unproved and why, and objects that change what they get."""

import logging
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from random_states import are_equal, blank, holds, is_foreign, random_state
from tier import SOAK, num_cases
from torch import nn

import torchtitan_ext as tte
from torchtitan_ext.checkpoint.rules.report import NO_TENSOR, LoadProof
from torchtitan_ext.checkpoint.tables.tensor_sums import TensorSummer
from torchtitan_ext.elastic import ElasticPolicy, Source
from torchtitan_ext.errors import ProofFailedError, WrongValueError
from torchtitan_ext.storage import FileReader, FileWriter

NUM_STATES = 300 if SOAK > 1 else num_cases(60)


def prove(state: dict[str, Any], path: Path | None, **arguments: Any) -> LoadProof:
    report = tte.load(state, path, prove=True, **arguments)
    assert report is not None and report.proof is not None
    return report.proof


@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore")
def test_random_states(tmp_path: Path) -> None:
    num_proved = 0
    for seed in range(NUM_STATES):
        state, path = random_state(seed), tmp_path / str(seed)
        tte.save(state, path, fingerprints=True)
        target = blank(state)
        planner = tte.LoadPlanner(weights_only=not holds(state, is_foreign))
        proof = prove(target, path, planner=planner)
        assert are_equal(state, target)
        saved = FileReader(path).read_metadata().state_dict_metadata
        assert {*proof.proved, *proof.unproved} == set(saved)
        assert {proof.unproved[key] for key in proof.unproved} <= {NO_TENSOR, "the save stored no fingerprint of it"}
        num_proved += len(proof.proved)
    assert num_proved > NUM_STATES


class Changing:
    """A component that takes copies, and may change one bit of them, or not give them back."""

    def __init__(self, tensor: torch.Tensor, how: str = "") -> None:
        self.tensor, self.how, self.num_asked = tensor, how, 0

    def state_dict(self) -> dict[str, Any]:
        self.num_asked += 1
        if self.how == "keeps" and self.num_asked > 1:
            return {"note": "what it had is elsewhere"}
        return {"tensor": self.tensor.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tensor = state["tensor"].clone()
        if self.how == "reshapes":
            self.tensor = self.tensor.reshape(4, 3)
        if self.how == "flattens":
            self.tensor = self.tensor.flatten()
        if self.how == "flips":
            self.tensor.view(torch.uint8)[..., 5] ^= 16


def test_what_an_object_changes_is_found(tmp_path: Path) -> None:
    tensor = torch.arange(12.0).view(3, 4)
    tte.save({"object": Changing(tensor)}, tmp_path, fingerprints=True)
    assert prove({"object": Changing(torch.zeros(3, 4))}, tmp_path) == LoadProof(("object.tensor",), {})
    with pytest.raises(ProofFailedError, match="the file has what was saved: it changed after it was read"):
        prove({"object": Changing(torch.zeros(3, 4), "flips")}, tmp_path)
    for how, shape in (("reshapes", "[4, 3]"), ("flattens", "[12]")):  # the bits and their order are as saved
        text = f"object.tensor: its object gives it back with the shape {shape}, saved was [3, 4]"
        with pytest.raises(ProofFailedError, match=re.escape(text)):
            prove({"object": Changing(torch.zeros(3, 4), how)}, tmp_path)
    proof = prove({"object": Changing(torch.zeros(3, 4), "keeps")}, tmp_path)
    assert proof.unproved["object.tensor"] == "its object does not give it back"


def test_objects_without_tensors_are_asked_once(tmp_path: Path) -> None:
    """A data loader may start its workers when it is asked."""

    class Loader(Changing):
        def state_dict(self) -> dict[str, Any]:
            self.num_asked += 1
            return {"position": 3}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            pass

    loader = Loader(torch.zeros(1))
    tte.save({"w": torch.ones(2), "loader": loader}, tmp_path, fingerprints=True)
    loader.num_asked = 0
    assert prove({"w": torch.zeros(2), "loader": loader}, tmp_path).proved == ("w",)
    assert loader.num_asked == 1


def test_what_is_unproved_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved = {
        "plain": torch.rand(3, 4),
        "cast": torch.rand(5).bfloat16(),
        "number": torch.tensor(3),
        "other_number": 4,
        "value": "text",
        "not asked for": torch.rand(2),
    }
    planner = tte.SavePlanner()
    dcp.save(saved, storage_writer=FileWriter(tmp_path, fingerprints=True), planner=planner, no_dist=True)
    state = {
        "plain": torch.zeros(3, 4),
        "cast": torch.zeros(5),
        "number": 0,
        "other_number": torch.tensor(0),
        "value": "",
        "missing": torch.rand(3),
    }
    with caplog.at_level(logging.WARNING):
        proof = prove(state, tmp_path, planner=tte.LoadPlanner(allow_partial_load=True))
    assert proof.proved == ("plain",)
    assert proof.unproved == {
        "cast": "it was cast from torch.bfloat16 to torch.float32",
        "number": NO_TENSOR,
        "other_number": NO_TENSOR,
        "value": NO_TENSOR,
        "missing": "it was not loaded",
    }
    (text,) = [record.getMessage() for record in caplog.records if record.name.startswith("torchtitan_ext")]
    assert "proved: 1 tensor(s)" in text and "unproved, it was cast" in text and NO_TENSOR not in text


def test_a_policy_and_its_report(tmp_path: Path) -> None:
    state = {"w": torch.rand(3), "v": torch.rand(3), "optimizer": {"m": torch.rand(3)}, "step": 3}
    tte.save(state, tmp_path, fingerprints=True)
    target = {"w": torch.zeros(3), "v": torch.zeros(3), "optimizer": {"m": torch.zeros(3)}, "step": 0}
    policy = ElasticPolicy({"optimizer": "reset", "v": "omit"})
    report = tte.load(target, tmp_path, policy=policy, prove=True)
    assert report is not None and report.proof is not None
    assert report.proof.proved == ("w",)
    assert report.proof.unproved == {"step": NO_TENSOR, "v": "it was not loaded", "optimizer.m": "it was not loaded"}
    assert "proved: 1 tensor(s)" in str(report) and "unproved, it was not loaded: optimizer.m, v" in str(report)


def test_keys_under_other_names(tmp_path: Path) -> None:
    tte.save({"model": {"w": torch.rand(3)}, "head": torch.ones(2)}, tmp_path, fingerprints=True)
    state = {"net": {"w": torch.zeros(3)}, "head": torch.full((2,), 7.0)}
    proof = prove(state, Source(tmp_path, include=["net"], rename={"net.*": "model.*"}))
    assert proof.proved == ("net.w",) and state["head"].tolist() == [7, 7]


def test_tied_tensors_and_views(tmp_path: Path) -> None:
    whole = torch.rand(6, 8)
    state = {"embedding": whole, "output": whole, "columns": torch.rand(6, 8)[:, 2:5], "turned": torch.rand(3, 4).t()}
    tte.save(state, tmp_path, fingerprints=True)
    target = torch.zeros(6, 8)
    loaded = {
        "embedding": target,
        "output": target,
        "columns": torch.zeros(9, 6).t()[:, 1:4],
        "turned": torch.ones(4, 3),
    }
    assert sorted(prove(loaded, tmp_path).proved) == sorted(state)


def test_a_planner_that_fills_targets_itself(tmp_path: Path) -> None:
    class Transposing(tte.LoadPlanner):
        def transform_tensor(self, read_item: Any, tensor: torch.Tensor) -> torch.Tensor:
            return super().transform_tensor(read_item, tensor).t()

    class Renaming(tte.LoadPlanner):
        def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:
            super().set_up_planner(state_dict, metadata, is_coordinator)
            self.state_dict = {key.removeprefix("my_"): value for key, value in self.state_dict.items()}

    tte.save({"w": torch.rand(3, 3)}, tmp_path, fingerprints=True)
    proof = prove({"w": torch.zeros(3, 3)}, tmp_path, planner=Transposing())
    assert proof.unproved == {"w": "Transposing fills it by methods of its own"}
    assert prove({"my_w": torch.zeros(3, 3)}, tmp_path, planner=Renaming()).proved == ("w",)
    with pytest.raises(WrongValueError, match="got prove=True and a DefaultLoadPlanner, expected a LoadPlanner"):
        prove({"w": torch.zeros(3, 3)}, tmp_path, planner=dcp.DefaultLoadPlanner())


def test_modules_and_optimizers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.rand(6, 4)).sum().backward()
    optimizer.step()
    tte.save({"model": model, "optimizer": optimizer}, tmp_path, fingerprints=True)
    with torch.device("meta"):
        other = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5))
    proof = prove({"model": other}, tmp_path)
    assert sorted(proof.proved) == sorted(f"model.{name}" for name in model.state_dict())
    again = torch.optim.AdamW(model.parameters(), lr=0.5)
    again.load_state_dict(optimizer.state_dict())
    proof = prove({"model": model, "optimizer": again}, tmp_path)
    assert set(proof.unproved.values()) == {NO_TENSOR}
    assert len(proof.proved) == len(model.state_dict()) + 3 * 4


@pytest.mark.parametrize("fingerprints", [1, None])
def test_arguments_are_checked(tmp_path: Path, fingerprints: Any) -> None:
    with pytest.raises(TypeError, match="fingerprints"):
        tte.save({"w": torch.ones(2)}, tmp_path, fingerprints=fingerprints)
    with pytest.raises(TypeError, match="prove"):
        tte.load({"w": torch.ones(2)}, tmp_path, prove=fingerprints)
    with pytest.raises(WrongValueError, match="give it to the writer"):
        tte.save({"w": torch.ones(2)}, storage_writer=FileWriter(tmp_path), fingerprints=True)
    with pytest.raises(WrongValueError, match="expected a directory"):
        tte.save({"w": torch.ones(2)}, "memory://bucket/step-1", fingerprints=True)


def test_a_lost_index_is_said(tmp_path: Path) -> None:
    tte.save({"w": torch.ones(2)}, tmp_path / "step-1", fingerprints=True)
    (tmp_path / "step-1" / ".tte_index").unlink()
    with pytest.warns(UserWarning, match="has no index"), pytest.raises(WrongValueError, match="has no fingerprints"):
        prove({"w": torch.ones(2)}, tmp_path / "step-1")


def test_a_bit_in_the_file_is_named_without_checksums(tmp_path: Path) -> None:
    state = {"w": torch.arange(40.0).view(8, 5), "v": torch.arange(3)}
    tte.save(state, tmp_path / "step-1", fingerprints=True)
    (file,) = (tmp_path / "step-1").glob("*.distcp")
    content = bytearray(file.read_bytes())
    at = content.index(torch.tensor([7.0, 8.0]).numpy().tobytes())
    content[at] ^= 1 << random.Random(0).randrange(8)
    file.write_bytes(content)
    reader = FileReader(tmp_path / "step-1", verify="none")
    with pytest.raises(ProofFailedError, match=r"w\[0:8, 0:5\] of .* the file has other elements there") as raised:
        prove(state, None, storage_reader=reader)
    assert raised.value.fqns == ("w",)


def test_saves_of_all_kinds_prove(tmp_path: Path) -> None:
    """Asynchronous ones too."""
    state = {"base": torch.rand(200, 30), "half": torch.rand(50, 60).bfloat16(), "small": torch.rand(4, 4)}
    tte.save(state, tmp_path / "first", fingerprints=True)
    tte.async_save(state, tmp_path / "thread", fingerprints=True).result()
    for name in ("first", "thread"):
        target = {key: torch.zeros_like(value) for key, value in state.items()}
        assert sorted(prove(target, tmp_path / name).proved) == sorted(state), name
        assert are_equal(target, state)


def test_what_cannot_be_summed_is_not_proved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tte.save({"a": torch.ones(3), "b": torch.ones(4)}, tmp_path / "a", fingerprints=True)
    add = TensorSummer.add

    def refuse_b(self: TensorSummer, fqn: str, *arguments: Any) -> None:
        if fqn == "b":
            raise RuntimeError("no kernel for it\nand a stack")
        add(self, fqn, *arguments)

    monkeypatch.setattr(TensorSummer, "add", refuse_b)
    proof = prove({"a": torch.zeros(3), "b": torch.zeros(4)}, tmp_path / "a")
    assert proof == LoadProof(("a",), {"b": "it cannot be summed (no kernel for it)"})
