"""Fixtures that all tests share."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
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
