"""Ranks of a world that find the store of a test."""

import os
from collections.abc import Callable
from typing import Any

from torchtitan_ext.storage.objects import commit, folder

HURRIED_SECONDS = 2.0


def in_store(rank: int, world_size: int, environment: dict[str, str], function: Callable[..., Any], *args: Any) -> Any:
    """Calls a function of a rank that finds the store."""
    os.environ.update(environment)
    return function(rank, world_size, *args)


def hurried_in_store(
    rank: int, world_size: int, environment: dict[str, str], function: Callable[..., Any], *args: Any
) -> Any:
    """The same for a rank that gives up sooner."""
    folder.RETRY_SECONDS = 3
    commit.COMMIT_SECONDS = HURRIED_SECONDS
    return in_store(rank, world_size, environment, function, *args)
