"""``torchtitan-ext doctor``: what holds is said, and what does not is a failed check, not a traceback."""

import platform
from typing import Any

import pytest
import torch
from calls import call

import torchtitan_ext as tte
from torchtitan_ext.cli.commands import doctor
from torchtitan_ext.cli.output import DIFFERS, FINE


def test_all_is_well() -> None:
    done = call("doctor", "--json")
    assert done.code == FINE, done.out
    checks = {check["name"]: check for check in done.json["checks"]}
    assert done.json["is_ok"] and all(check["is_ok"] for check in checks.values())
    assert list(checks) == ["versions", "core", "ops", "collectives", "abi"]
    assert f"Python {platform.python_version()}" in checks["versions"]["detail"]
    assert f"torch {torch.__version__.split('+')[0]}" in checks["versions"]["detail"]
    assert f"torchtitan-ext {tte.__version__}" in checks["versions"]["detail"]


def test_what_fails_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    original = doctor.importlib.import_module

    def broken(name: str) -> Any:
        if name == "torchtitan_ext.op_library":
            raise OSError("no such library")
        return original(name)

    monkeypatch.setattr(doctor.importlib, "import_module", broken)
    done = call("doctor")
    assert done.code == DIFFERS and "Traceback" not in done.err
    lines = {line[8:19].strip(): line for line in done.out.splitlines()}
    assert [name for name, line in lines.items() if line.startswith("FAILED")] == ["ops", "collectives"]
    assert "OSError: no such library" in lines["ops"]
