"""Fixtures of the tests of storage."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from file_faults import FaultServer, fast_folder
from missing_tools import skip_or_fail


@pytest.fixture(scope="session")
def fault_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultServer]:
    if shutil.which(os.environ.get("CC", "cc")) is None:
        skip_or_fail("no C compiler, which the library that injects faults needs")
    made = FaultServer(tmp_path_factory.mktemp("library"))
    yield made
    made.close()


@pytest.fixture
def fast_path() -> Iterator[Path]:
    path = Path(fast_folder())
    yield path
    shutil.rmtree(path)
