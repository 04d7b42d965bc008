"""``torchtitan-ext doctor``. Checks import torch themselves: a torch that does not load is a line of the report."""

from __future__ import annotations

import importlib
import importlib.metadata
import platform
from collections.abc import Callable
from typing import NamedTuple

import typer

from torchtitan_ext import clock
from torchtitan_ext.cli.options import Json
from torchtitan_ext.cli.output import DIFFERS, print_json

_PACKAGES = ("torchtitan-ext", "torch", "numpy", "typer", "tqdm", "safetensors", "matplotlib")


class Finding(NamedTuple):
    """The result of one check; ``detail`` is a line for people, the error if the check failed."""

    name: str
    is_ok: bool
    detail: str
    seconds: float


def run(json: Json = False) -> None:
    """What to put into a bug report: versions, and whether libraries load. Exits with 1 if a check fails.

    Example: torchtitan-ext doctor
    """
    checks: dict[str, Callable[[], str]] = {
        "versions": _versions,
        "core": lambda: f"{importlib.import_module('torchtitan_ext._core').__file__} loads",
        "ops": _ops,
        "collectives": _collectives,
        "abi": _abi,
    }
    findings = []
    for name, check in checks.items():
        findings.append(_try(name, check))
        if not json:
            _print(findings[-1])
    if json:
        rows = [dict(zip(Finding._fields, finding, strict=True)) for finding in findings]
        print_json({"is_ok": all(finding.is_ok for finding in findings), "checks": rows})
    if not all(finding.is_ok for finding in findings):
        raise typer.Exit(DIFFERS)


def _try(name: str, check: Callable[[], str]) -> Finding:
    begin = clock.now()
    try:
        is_ok, detail = True, check()
    except Exception as error:  # the report is for whatever is broken
        is_ok, detail = False, f"{type(error).__name__}: {error}"
    return Finding(name, is_ok, detail, round(clock.now() - begin, 3))


def _print(finding: Finding) -> None:
    print(f"{'ok' if finding.is_ok else 'FAILED':6}  {finding.name:11}  {finding.detail}", flush=True)


def _versions() -> str:
    found = [f"Python {platform.python_version()}"]
    for name in _PACKAGES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"no {name}")
    return ", ".join(found)


def _ops() -> str:
    importlib.import_module("torchtitan_ext.op_library")
    return "_ops.so loads, by LibTorch's stable ABI"


def _collectives() -> str:
    library = importlib.import_module("torchtitan_ext.op_library")
    if library.full_abi_is_missing:
        raise ImportError(library.full_abi_is_missing)
    return f"{library.full_abi_path(importlib.import_module('torch').__version__).name} loads"


def _abi() -> str:
    torch = importlib.import_module("torch")
    is_cxx11 = torch.compiled_with_cxx11_abi()
    return f"torch {torch.__version__} from git {str(torch.version.git_version)[:10]}, C++11 ABI {is_cxx11}"
