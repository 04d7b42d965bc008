"""The real accelerate and transformers at each commit: a job of two ranks saves, another one goes on.

The libraries are imported by the ranks alone. Other files of this folder have all that these libraries do.
"""

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest


def in_client(rank: int, world_size: int, module: str, function: str, *args: Any) -> Any:
    return getattr(import_module(module), function)(rank, world_size, *args)


def need(*libraries: str) -> None:
    for library in libraries:
        if find_spec(library) is None:
            pytest.skip(f"could not import {library!r}: `make clients` installs it")


def assert_goes_on(answers: list[tuple[Any, list[float]]], saved: tuple[Any, list[float]]) -> None:
    for fingerprint, losses in answers:
        assert fingerprint == saved[0]
        assert losses == pytest.approx(saved[1], abs=1e-5)


def test_accelerate(run_world: Callable[..., Any], tmp_path: Path) -> None:
    need("accelerate", "transformers")
    saved = run_world(2, in_client, "test_accelerate", "save", tmp_path, 1)[0]
    assert len(list((tmp_path / "ours").glob("*/.tte_index"))) == 2
    assert_goes_on(run_world(1, in_client, "test_accelerate", "resume", tmp_path / "ours", 1, "ours"), saved)


def test_transformers(run_world: Callable[..., Any], tmp_path: Path) -> None:
    need("accelerate", "transformers")
    path, client = tmp_path / "pretrained", "test_transformers"
    run_world(1, in_client, client, "make_pretrained", "llama", path, process_group=False)
    saved = run_world(2, in_client, client, "save_pretrained", tmp_path, {"fsdp_size": 2, "tp_size": 1})[0]
    for answers in run_world(2, in_client, client, "load_pretrained", tmp_path, {"fsdp_size": 1, "tp_size": 2}):
        assert_goes_on([answers["ours", "ours"], answers["stock", "ours"]], saved)
