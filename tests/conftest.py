"""Fixtures that all tests share."""

import os
import re
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any, TypeVar

import late
import pytest
import tier
import torch
from gloo_worlds import WorldPool, on_a_gpu, show_no_progress
from hypothesis import settings
from kept_state import kept_state

# Libraries of Hugging Face ask their hub otherwise, and wait for it where there is no network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Ray tells its makers what is used otherwise.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

# At commit hypothesis draws the same examples each time, on every machine; the other tiers draw others each time.
settings.register_profile("commit", derandomize=True, deadline=None, database=None)
settings.register_profile("others", deadline=None, database=None)
settings.load_profile("commit" if tier.TIER == "commit" else "others")

# How many tests each part of the nightly tier has; under "" the cases of long lists that are not drawn.
LEFT = pytest.StashKey[dict[str, int]]()

Report = TypeVar("Report", pytest.TestReport, pytest.CollectReport)


@pytest.fixture(autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """A later test of this process finds it as this one has found it."""
    with kept_state(request.node.nodeid):
        yield


@pytest.fixture(autouse=True)
def no_progress(nothing_left_behind: None, monkeypatch: pytest.MonkeyPatch) -> None:
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
    late.library()
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
    return f"tier: {os.environ.get('TTE_TIER', 'commit')}, factor {tier.SOAK}, TTE_SEED={tier.SEED}"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """At commit a file of the night is not imported, unless it is named: libraries of others take seconds each."""
    part = tier.part_of_file(collection_path) if tier.TIER == "commit" else ""
    if not part:
        return None
    left = config.stash.setdefault(LEFT, Counter())
    left[part] = left.get(part, 0) + len(re.findall("^def test_", collection_path.read_text(), re.M))
    return True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # A test that is named by the caller runs.
    if not any("::" in argument for argument in config.args):
        left = tier.keep_tier(items)
        config.stash[LEFT] = Counter(config.stash.get(LEFT, {})) + Counter(map(tier.part_of, left))
        config.hook.pytest_deselected(items=left)
        items[:] = tier.longest_first(items)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    node.config.stash[LEFT] = getattr(node, "workeroutput", {}).get("left", {})  # a worker that died sends none


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left"] = dict(session.config.stash.get(LEFT, {}))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    left = config.stash.get(LEFT, {})
    if tier.TIER == "commit" and left:
        parts = ", ".join(f"{part} {count}" for part, count in sorted(left.items()) if part)
        terminalreporter.write_line(f"left to `make nightly`: {parts}; of long lists {left.get('', 0)} cases")


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


@pytest.hookimpl(wrapper=True, optionalhook=True)
def pytest_report_to_serializable() -> Generator[None, Any, Any]:
    """A worker sends a report as UTF-8, and dies of a failed test whose error names a path that is no text."""
    return encodable((yield))


def encodable(value: Any) -> Any:
    """The same value with texts that UTF-8 can encode."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {encodable(key): encodable(member) for key, member in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(encodable, value))
    return value


def without_missing_clients(report: Report) -> Report:
    """A skip for want of a library is a failure where all are promised (TTE_REQUIRE_CLIENTS=1)."""
    if report.skipped and os.environ.get("TTE_REQUIRE_CLIENTS") and "could not import" in str(report.longrepr):
        report.outcome = "failed"
        report.longrepr = f"TTE_REQUIRE_CLIENTS is set: {report.longrepr}"
    return report
