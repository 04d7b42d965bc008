"""Seconds and CPU seconds of each test file: a plugin that writes a line per file, for ``benchmarks/bench_suite.py``.

    pytest -p file_seconds --file-seconds FILE

The CPU seconds are those of all processes below the one that runs the tests: workers of worlds live on from file to
file, launchers and children come and go.
"""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


class FileSeconds:
    """Adds up what passes between the starts of the tests of different files."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._test_file = ""
        self._num_tests = 0
        self._start = (0.0, 0.0)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        test_file = nodeid.partition("::")[0]
        if test_file != self._test_file:
            self.end_file()
            self._test_file, self._start = test_file, (time.monotonic(), cpu_seconds())
        self._num_tests += 1

    def pytest_sessionfinish(self) -> None:
        self.end_file()

    def end_file(self) -> None:
        if self._test_file:
            seconds, cpu = time.monotonic() - self._start[0], cpu_seconds() - self._start[1]
            line = {"file": self._test_file, "tests": self._num_tests, "seconds": seconds, "cpu_seconds": cpu}
            with self._path.open("a") as file:
                file.write(json.dumps(line) + "\n")
        self._test_file, self._num_tests = "", 0


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--file-seconds", type=Path, help="append a line of JSON for each test file to this file")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--file-seconds")
    # With pytest-xdist the workers run the tests.
    if path is not None and (hasattr(config, "workerinput") or not config.getoption("numprocesses", None)):
        config.pluginmanager.register(FileSeconds(path))


def cpu_seconds() -> float:
    """Of this process, its descendants, and those of them that have ended."""
    return sum(seconds_of(pid) for pid in descendants(os.getpid()))


def descendants(pid: int) -> Iterator[int]:
    yield pid
    for task in Path(f"/proc/{pid}/task").glob("*"):
        try:
            children = (task / "children").read_text().split()
        except OSError:
            continue
        for child in children:
            yield from descendants(int(child))


def seconds_of(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    # utime, stime, cutime and cstime, the 14th to 17th field of proc(5)
    return sum(map(int, fields[11:15])) / TICKS_PER_SECOND
