"""``verify --prove`` and ``diff`` of checkpoints whose saves stored fingerprints."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from calls import call
from checkpoints import without_metadata

import torchtitan_ext as tte
from torchtitan_ext.cli.output import DIFFERS, FINE, UNREADABLE
from torchtitan_ext.offline.boxes import BoxReader


def state() -> dict[str, Any]:
    torch.manual_seed(0)
    return {
        "model": {"w": torch.rand(60, 50), "b": torch.rand(7).bfloat16(), "c": torch.rand(9, 2, dtype=torch.complex64)},
        "flags": torch.tensor([True, False]),
        "empty": torch.empty(0, 3),
        "number": torch.tensor(3),
        "step": 4,
    }


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    tte.save(state(), tmp_path / "step-1", fingerprints=True)
    return tmp_path / "step-1"


def change_file(path: Path, find: bytes, change: bytes) -> None:
    (file,) = path.glob("*.distcp")
    content = file.read_bytes()
    assert content.count(find) == 1
    file.write_bytes(content.replace(find, change))


def test_a_good_one_is_proved(saved: Path) -> None:
    done = call("verify", saved, "--prove")
    assert (done.code, done.err) == (FINE, "")
    assert done.out.endswith("; sizes and ids; 6 tensors proved)\n")
    done = call("verify", saved, "--prove", "--deep", "--json")
    assert (done.json["num_proved"], done.json["without_fingerprints"], done.json["damages"]) == (6, [], [])
    assert call("verify", saved, "--json").json["num_proved"] is None


def test_one_bit_in_a_file_is_named(saved: Path) -> None:
    bits = state()["model"]["b"].view(torch.int16).numpy().tobytes()
    change_file(saved, bits, bytes([bits[0] ^ 64]) + bits[1:])
    done = call("verify", saved, "--prove", "--json")
    assert done.code == DIFFERS
    (damage,) = done.json["damages"]
    assert damage["kind"] == "fingerprint" and damage["what"].endswith("model.b[0:7] is not what was saved")
    assert done.json["num_proved"] == 5
    assert call("verify", saved).code == FINE
    assert "1 damage" in call("verify", saved, "--prove").out


def test_one_without_fingerprints_proves_nothing(tmp_path: Path, saved: Path) -> None:
    tte.save(state(), tmp_path / "step-2")
    done = call("verify", tmp_path / "step-2", "--prove")
    assert done.code == UNREADABLE
    assert "nothing is proved: it has no fingerprints, which tte.save(..., fingerprints=True) stores" in done.out
    done = call("verify", tmp_path, "--prove", "--json")
    assert (done.code, [step["num_proved"] for step in done.json["steps"]]) == (UNREADABLE, [6, None])


def test_index_alone_is_proved(tmp_path: Path) -> None:
    tte.save(state(), tmp_path / "step-1", fingerprints=True)
    without_metadata(tmp_path / "step-1")
    assert call("verify", tmp_path / "step-1", "--prove").out.endswith("6 tensors proved)\n")


def test_diff_reads_no_tensor(tmp_path: Path, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = state()
    other["model"]["w"][3, 4] += 1
    other["step"] = 5
    tte.save(other, tmp_path / "step-2", fingerprints=True)
    read: list[Any] = []
    reading = BoxReader.read
    monkeypatch.setattr(BoxReader, "read", lambda self, *args: (read.append(args), reading(self, *args))[1])
    done = call("diff", saved, tmp_path / "step-2")
    assert done.code == DIFFERS and read == []
    assert "model.w  values" in done.out and "step     values" in done.out
    assert done.out.endswith("6 tensors compared by the fingerprints of the saves, unread; --read reads them\n")
    done = call("diff", saved, tmp_path / "step-2", "--read", "--json")
    assert done.json["num_unread"] == 0 and read != []
    assert [found["key"] for found in done.json["differences"]] == ["model.w", "step"]
    done = call("diff", saved, tmp_path / "step-2", "--values")
    assert "1 of 3000, first at [3, 4]" in done.out


def test_diff_with_one_that_has_none(tmp_path: Path, saved: Path) -> None:
    tte.save(state(), tmp_path / "step-2")
    done = call("diff", saved, tmp_path / "step-2", "--json")
    assert (done.code, done.json["num_unread"], done.json["is_equal"]) == (FINE, 0, True)
    shutil.copytree(saved, tmp_path / "copy")
    assert call("diff", saved, tmp_path / "copy", "--json").json["num_unread"] == 6
