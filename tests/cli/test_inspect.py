"""``torchtitan-ext inspect``: every format, good, empty, torn, foreign, hostile and huge."""

import os
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from calls import STATE, call, call_importing, make
from checkpoints import of_single_rank
from torch.distributed.checkpoint import HuggingFaceStorageWriter

from torchtitan_ext.cli.output import FINE, UNREADABLE, WRONG_USAGE
from torchtitan_ext.state.nested import flat_keys

KINDS = ["stock", "ours", "ours without .metadata", "safetensors directory", "safetensors", "torch"]
SHAPES = {fqn: list(value.shape) for fqn, value in STATE.items() if isinstance(value, torch.Tensor)}
TENSOR_BYTES = {fqn: value.nbytes for fqn, value in STATE.items() if isinstance(value, torch.Tensor)}


class Runs:
    """Unpickles as a call that leaves a file."""

    def __reduce__(self) -> Any:
        return os.system, ("touch was-run",)


@pytest.mark.parametrize("kind", KINDS)
def test_every_format_is_described(tmp_path: Path, kind: str) -> None:
    path = make(tmp_path / "step-7", kind)
    done = call("inspect", path, "--json", "--shards")
    assert done.code == FINE and done.err == ""
    tensors = {key["name"]: key for key in done.json["keys"] if key["dtype"] is not None}
    others = {key["name"] for key in done.json["keys"]} - set(tensors)
    assert {name: key["shape"] for name, key in tensors.items()} == SHAPES
    assert {name: key["num_bytes"] for name, key in tensors.items()} == TENSOR_BYTES
    assert tensors["layers.0.norm"]["dtype"] == "bfloat16" and tensors["step"]["dtype"] == "int64"
    assert others == (set() if "safetensors" in kind else {"note"})
    assert done.json["has_checksums"] == ("ours" in kind)
    assert done.json["tensor_bytes"] == sum(TENSOR_BYTES.values()) and done.json["num_tensors"] == len(SHAPES)
    for key in done.json["keys"]:
        (chunk,) = key["chunks"]
        assert chunk["sizes"] == key["shape"] and chunk["file"] in {file["name"] for file in done.json["files"]}


NUMBERS = {
    "model": {"w": torch.zeros(4, 3), "scale": torch.tensor(0.1, dtype=torch.bfloat16)},
    "optimizer": {"step": torch.tensor(3.7), "exp_avg": torch.zeros(4, 3), "lr": 1e-4, "betas": (0.9, 0.99)},
    "counts": {"big": torch.tensor(-(2**62)), "is": torch.tensor(True), "z": torch.tensor(0.1 + 2j), "name": "é" * 99},
    "step": 7,
    "loss": float("nan"),
    "nothing": None,
}
VALUES = {
    "model.scale": 0.1, "optimizer.step": 3.7, "optimizer.lr": 1e-4, "counts.big": -(2**62), "counts.is": True,
    "counts.z": "(0.1+2j)", "counts.name": "é" * 99, "step": 7, "loss": "nan",
}  # fmt: skip


@pytest.mark.parametrize("kind", ["stock", "ours", "torch", "safetensors"])
def test_values_of_scalars_and_totals_of_components(tmp_path: Path, kind: str) -> None:
    flat = flat_keys(NUMBERS, tuples="as_stock").values
    path = make(tmp_path / "c", kind, flat if kind == "safetensors" else NUMBERS)
    shown = call("inspect", path, "--json").json
    found = {key["name"]: key["value"] for key in shown["keys"] if key["value"] is not None}
    assert found == {name: value for name, value in VALUES.items() if name in {key["name"] for key in shown["keys"]}}
    assert len(found) == len(VALUES) - (4 if kind == "safetensors" else 0)
    totals = {total.pop("name"): tuple(total.values()) for total in shown["components"]}
    if kind == "safetensors":  # no format for anything but tensors at the top
        assert totals == {"model": (7, 29, 2 * 48 + 2 + 4 + 8 + 1 + 8, 0)}
    else:
        assert totals["model"] == (2, 13, 50, 0) and totals["optimizer"][:3] == (2, 13, 52)
        assert totals["counts"] == (3, 3, 17, 1) and totals["step"] == (0, 0, 0, 1)
        lines = call("inspect", path).out.splitlines()
        assert "model has 13 parameters" in lines[1]
        assert [line.split() for line in lines if line.startswith("optimizer ")] == [
            ["optimizer", "2", "13", "52", "B", str(totals["optimizer"][3])]
        ]
        assert next(line for line in lines if line.startswith("optimizer.lr")).endswith(" 0.0001")


def test_values_that_are_hostile_or_gone_are_left_out(tmp_path: Path) -> None:
    path = make(tmp_path / "c", "stock", {"v": ([1], 2), "run": Runs(), "w": torch.tensor(1.0), "step": 3})
    found = {key["name"]: key["value"] for key in call("inspect", path, "--json").json["keys"]}
    assert found == {"v": None, "run": None, "w": 1.0, "step": 3} and not Path("was-run").exists()
    os.truncate(path / "__0_0.distcp", 5)
    assert {key["value"] for key in call("inspect", path, "--json").json["keys"]} == {None}
    (path / "__0_0.distcp").unlink()
    assert call("inspect", path).code == FINE


def test_ours_says_who_wrote_it(tmp_path: Path) -> None:
    shown = call("inspect", make(tmp_path / "step-7", "ours"), "--json").json
    assert (shown["step"], shown["world_size"], len(shown["save_id"])) == (7, 1, 32)
    assert shown["versions"]["torch"] == torch.__version__
    assert shown["files"] == [
        {
            "name": "__0_0.distcp",
            "num_bytes": (tmp_path / "step-7" / "__0_0.distcp").stat().st_size,
            "num_records": 5,
            "save_id": None,
        }
    ]


def test_a_pattern_chooses_keys(tmp_path: Path) -> None:
    path = make(tmp_path / "c", "ours")
    assert [key["name"] for key in call("inspect", path, "*.norm", "--json").json["keys"]] == [
        "layers.0.norm",
        "layers.1.norm",
    ]
    shown = call("inspect", path, "*wq", "--shards").out.splitlines()
    assert re.fullmatch(r"layers.0.wq +\[0, 0\] +\[2000, 1000\] +8 MB +__0_0.distcp +\d+", shown[-1])
    none = call("inspect", path, "layer.*.norm")
    assert none.code == WRONG_USAGE and "matches no key" in none.err and "perhaps 'layers.*.norm' is meant" in none.err
    assert "perhaps 'layers*' is meant" in call("inspect", path, "laeyrs*").err


@pytest.mark.parametrize("kind", KINDS[:4])
def test_neither_torch_nor_numpy_nor_what_draws_is_imported(tmp_path: Path, kind: str) -> None:
    path = make(tmp_path / "c", kind)
    done, imported = call_importing({"torch", "numpy", "matplotlib"}, "inspect", path)
    assert "layers.0.wq" in done.out and imported == set()


def test_what_is_no_checkpoint_is_unreadable(tmp_path: Path) -> None:
    assert call("inspect", tmp_path).code == UNREADABLE
    assert call("inspect", tmp_path / "nothing").code == UNREADABLE
    (tmp_path / "notes.txt").write_text("hello")
    done = call("inspect", tmp_path / "notes.txt")
    assert done.code == UNREADABLE and done.out == "" and len(done.err.splitlines()) == 1
    assert "notes.txt is no checkpoint" in done.err
    assert call("inspect").code == WRONG_USAGE


TORN = {
    "stock": ".metadata",
    "ours": ".metadata",
    "ours without .metadata": ".tte_index",
    "safetensors directory": "model-00002-of-00002.safetensors",
    "safetensors": "",
    "torch": "",
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
def test_torn_metadata_is_unreadable_in_a_sentence(tmp_path: Path, kind: str, share: float) -> None:
    path = make(tmp_path / "c.safetensors", kind)
    file = path / TORN[kind]
    os.truncate(file, int(file.stat().st_size * share))
    done = call("inspect", path)
    assert done.code == UNREADABLE and "Traceback" not in done.err
    assert done.err.startswith("torchtitan-ext: ") and str(path) in done.err


def test_missing_files_are_counted(tmp_path: Path) -> None:
    path = make(tmp_path / "c", "ours")
    (path / "__0_0.distcp").unlink()
    done = call("inspect", path)
    assert done.code == FINE and "1 not there" in done.out
    assert call("inspect", path, "--json").json["files"][0]["num_bytes"] is None


def test_a_damaged_index_beside_metadata_is_a_warning(tmp_path: Path) -> None:
    path = make(tmp_path / "c", "ours")
    os.truncate(path / ".tte_index", 100)
    done = call("inspect", path)
    assert done.code == FINE and done.err.startswith("torchtitan-ext: warning: the index is ignored")


def test_nothing_is_run_unless_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "c", "stock")
    (tmp_path / "c" / ".metadata").write_bytes(pickle.dumps(Runs()))
    assert call("inspect", "c").code == UNREADABLE
    torch.save({"w": torch.ones(2), "x": Runs()}, "x.pt")
    refused = call("inspect", "x.pt")
    assert refused.code == UNREADABLE and "x.pt is not unpickled" in refused.err
    assert not Path("was-run").exists()
    told = call("inspect", "x.pt", "--unsafe-unpickle", "--json")
    assert told.code == FINE and Path("was-run").exists()
    assert [key["name"] for key in told.json["keys"]] == ["w", "x"]


@pytest.mark.parametrize(
    "header",
    [
        b"[]",
        b'{"w": 3}',
        b'{"w": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}',
        b'{"w": {"dtype": "F32", "shape": [9], "data_offsets": [0, 4]}}',
        b'{"w": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}',
        b'{"w": {"dtype": "F32", "shape": [1e99], "data_offsets": [0, 4]}}',
        b'{"w": {"dtype": "F32", "shape": [99999999999999999999999, 0], "data_offsets": [0, 0]}}',
        b'{"\\ud800": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}',
        b'{"__metadata__": 3}',
        b"[" * 50_000,
        b"\xff\xfe",
    ],
)
def test_hostile_headers_of_safetensors(tmp_path: Path, header: bytes) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    done = call("inspect", path)
    assert done.code == UNREADABLE and "Traceback" not in done.err, done
    path.write_bytes((2**63).to_bytes(8, "little") + header)
    assert "a header of" in call("inspect", path).err


def test_chunks_of_dcps_writer_for_hugging_face(tmp_path: Path) -> None:
    writer = HuggingFaceStorageWriter(str(tmp_path / "hf"), save_distributed=True)
    dcp.save({"w": torch.arange(12.0).view(3, 4)}, storage_writer=writer, no_dist=True)
    (key,) = call("inspect", tmp_path / "hf", "--json").json["keys"]
    assert (key["name"], key["shape"], key["num_chunks"]) == ("w", [3, 4], 1)


def test_each_rank_with_metadata_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "own"
    of_single_rank(path, {"w": torch.ones(3)})
    done = call("inspect", path)
    assert done.code == UNREADABLE and "each rank has metadata of its own (rank 0)" in done.err
    assert call("inspect", path, "--rank", 0, "--json").json["keys"][0]["shape"] == [3]
    assert call("inspect", path, "--rank", 1).code == UNREADABLE
