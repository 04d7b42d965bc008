"""The real torchtitan at each commit: what its manager saved on two ranks goes on with ours on one.

torchtitan is imported by the ranks alone. ``test_torchtitan.py`` has all that it does.
"""

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest


def in_torchtitan(rank: int, world_size: int, function: str, *args: Any) -> Any:
    return getattr(import_module("test_torchtitan"), function)(rank, world_size, *args)


def test_a_run_of_torchtitan_goes_on_with_ours(run_world: Callable[..., Any], tmp_path: Path) -> None:
    for library in ("torchtitan", "datasets"):
        if find_spec(library) is None:
            pytest.skip(f"could not import {library!r}: `make clients` installs it")
    run_world(2, in_torchtitan, "begin", tmp_path)
    (text,) = run_world(1, in_torchtitan, "refuse", tmp_path, 2)
    assert "would be dropped" in text and "elastic_data=" in text
