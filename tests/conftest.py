"""Fixtures that all tests share."""

import os
from collections.abc import Callable, Generator, Iterator
from typing import Any, TypeVar

import extent
import late
import pytest
import torch
from gloo_worlds import WorldPool, on_a_gpu, show_no_progress
from hypothesis import settings

# Libraries of Hugging Face ask their hub otherwise, and wait for it where there is no network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Ray tells its makers what is used otherwise.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

# The suite draws the same examples each time, on every machine; the soak draws others each time.
settings.register_profile("suite", derandomize=True, deadline=None, database=None)
settings.register_profile("soak", deadline=None, database=None)
settings.load_profile("soak" if extent.SOAK > 1 else "suite")

Report = TypeVar("Report", pytest.TestReport, pytest.CollectReport)


@pytest.fixture(autouse=True)
def no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow operations print no lines among those that a test reads; a test of the lines sets its own delays."""
    show_no_progress(monkeypatch.setattr)


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


@pytest.fixture(scope="session")
def run_late_world() -> Iterator[Callable[..., list[Any]]]:
    """As `run_world`, in processes whose accelerator is the device "late" (``late_device.cpp``)."""
    late.skip_without_compiler()
    late.build()
    pool = WorldPool(backend=late.BACKENDS, set_up=late.load)
    yield pool.run
    pool.close()


@pytest.fixture(params=["late", pytest.param("cuda", marks=pytest.mark.needs_cuda)])
def run_on_accelerator(request: pytest.FixtureRequest) -> Callable[..., list[Any]]:
    """`run_on_accelerator(world_size, function, *args)` calls `function(rank, world_size, device, *args)` per rank."""
    if request.param == "late":
        run = request.getfixturevalue("run_late_world")
        return lambda world_size, function, *args: run(world_size, function, "late", *args)
    run = request.getfixturevalue("run_world")
    return lambda world_size, function, *args: run(world_size, on_a_gpu, function, "cuda", *args)


def pytest_report_header() -> str:
    how_much = f"TTE_SOAK={extent.SOAK}" if extent.SOAK > 1 else "full" if extent.IS_FULL else "a sample"
    return f"tests: {how_much}, TTE_SEED={extent.SEED}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # A test that is named by the caller runs.
    if not any("::" in argument for argument in config.args):
        config.hook.pytest_deselected(items=extent.keep_sampled(items))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips GPU tests where there is no GPU, but never on a machine that promises one (TTE_REQUIRE_CUDA=1)."""
    if item.get_closest_marker("needs_cuda") and not torch.cuda.is_available():
        if os.environ.get("TTE_REQUIRE_CUDA"):
            pytest.fail("TTE_REQUIRE_CUDA is set, but torch sees no GPU")
        pytest.skip("no GPU here")


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    return without_missing_clients((yield))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    return without_missing_clients((yield))


def without_missing_clients(report: Report) -> Report:
    """A skip for want of a library is a failure where `make test-clients` promises all (TTE_REQUIRE_CLIENTS=1)."""
    if report.skipped and os.environ.get("TTE_REQUIRE_CLIENTS") and "could not import" in str(report.longrepr):
        report.outcome = "failed"
        report.longrepr = f"TTE_REQUIRE_CLIENTS is set: {report.longrepr}"
    return report
