"""``torchtitan-ext doctor``: what holds is said, and what does not is a failed check, not a traceback."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from calls import call

import torchtitan_ext as tte
from torchtitan_ext.cli.commands import doctor
from torchtitan_ext.cli.output import DIFFERS, FINE


def test_all_is_well(tmp_path: Path) -> None:
    done = call("doctor", tmp_path, "--json")
    assert done.code == FINE, done.out
    checks = {check["name"]: check for check in done.json["checks"]}
    assert done.json["is_ok"] and all(check["is_ok"] for check in checks.values())
    assert list(checks) == [
        "machine", "versions", "core", "ops", "collectives", "abi", "cuda", "nccl", "gloo", "disk", "round trip",
    ]  # fmt: skip
    assert f"torch {torch.__version__.split('+')[0]}" in checks["versions"]["detail"]
    assert f"torchtitan-ext {tte.__version__}" in checks["versions"]["detail"]
    assert checks["gloo"]["detail"] == "two processes agree on a sum"
    assert str(tmp_path) in checks["disk"]["detail"]
    assert os.listdir(tmp_path) == []


def test_what_fails_is_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(rank: int, store_file: str) -> Any:
        raise OSError("no network")

    monkeypatch.setattr(doctor.subprocess, "Popen", broken)
    done = call("doctor", tmp_path / "nothing")
    assert done.code == DIFFERS and "Traceback" not in done.err
    lines = {line[8:19].strip(): line for line in done.out.splitlines()}
    assert [name for name, line in lines.items() if line.startswith("FAILED")] == ["gloo", "disk", "round trip"]
    assert "FileNotFoundError" in lines["disk"]


def test_speeds_are_of_the_bytes_that_were_moved(tmp_path: Path) -> None:
    written, read = doctor.disk_speed(tmp_path, 8 << 20)
    assert 1e5 < written < 1e12 and 1e5 < read < 1e12
    assert os.listdir(tmp_path) == []
