"""Tools that a test needs and that a machine may lack."""

import os

import pytest


def skip_or_fail(reason: str) -> None:
    """A tool that is missing: a reason to skip, but not where continuous integration promises all of them."""
    if os.environ.get("CI"):
        pytest.fail(f"{reason}, and CI is set")
    pytest.skip(reason)
