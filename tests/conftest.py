"""Fixtures that all tests share."""

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from gloo_worlds import WorldPool


@pytest.fixture(scope="session")
def world_pool() -> Iterator[WorldPool]:
    """The worker processes of this session."""
    pool = WorldPool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def run_world(world_pool: WorldPool) -> Callable[..., list[Any]]:
    """`run_world(world_size, function, *args)`: see `gloo_worlds.WorldPool.run`."""
    return world_pool.run


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips GPU tests where there is no GPU, but never on a machine that promises one (TTE_REQUIRE_CUDA=1)."""
    if item.get_closest_marker("needs_cuda") and not torch.cuda.is_available():
        if os.environ.get("TTE_REQUIRE_CUDA"):
            pytest.fail("TTE_REQUIRE_CUDA is set, but torch sees no GPU")
        pytest.skip("no GPU here")
