"""A copy of the tree under ``build/mutants`` in which wrong changes are made, built and judged.

    tree/    the files that git knows or would add; its package has the libraries of the environment, or of cpp/
    cpp/     the C++ test programs and the libraries, without link-time optimization and CUDA
    venv/    the packages of the environment, and tree/ before all of them

A test that fails without a change judges nothing: each is tried so once, and its time says when it hangs.
"""

from __future__ import annotations

import filecmp
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from mutants.judges import ROOT

from torchtitan_ext import _core

FOLDER = ROOT / "build" / "mutants"
TREE, CPP, VENV = FOLDER / "tree", FOLDER / "cpp", FOLDER / "venv"
_BIN = Path(sys.executable).parent
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)|^\[  FAILED  \] (\w\S*)", re.MULTILINE)
# A test may take so many times as long as without a change, and so many seconds more.
_MOST_TIMES, _MORE_SECONDS = 4, 60


class Verdict(NamedTuple):
    """How a test ended: ``failed`` is empty where it passed."""

    failed: str
    seconds: float


class Scratch:
    """The scratch copy, made or brought up to date. One process at a time may have it."""

    def __init__(self) -> None:
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True
        )
        names = [name for name in sorted(listed.stdout.decode().split("\0")) if name and (ROOT / name).is_file()]
        for name in names:
            if not (TREE / name).exists() or not filecmp.cmp(ROOT / name, TREE / name, shallow=False):
                (TREE / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, TREE / name)
        for path in [path for path in TREE.rglob("*.py") if str(path.relative_to(TREE)) not in names]:
            path.unlink()
        for library in Path(_core.__file__).parent.glob("*.so"):
            shutil.copy(library, TREE / "torchtitan_ext")
        if not VENV.exists():
            subprocess.run([sys.executable, "-m", "venv", "--without-pip", VENV], check=True)
        site = Path(sysconfig.get_path("platlib", vars={"base": str(VENV), "platbase": str(VENV)}))
        (site / "packages.pth").write_text(
            "\n".join([str(TREE), *(one for one in sys.path if one.endswith("-packages"))])
        )
        # Of the code, without the tests themselves: each stands there with a digest of its own.
        code = "".join(
            _digest(ROOT / name) for name in names if name.startswith(("torchtitan_ext/", "csrc/", "tests/su"))
        )
        self._known_file = FOLDER / f"passed_{hashlib.sha256(code.encode()).hexdigest()[:16]}.json"
        self._seconds: dict[str, float] = {}
        if self._known_file.exists():
            self._seconds = json.loads(self._known_file.read_text())

    @contextmanager
    def changed(self, file: str, text: str) -> Iterator[None]:
        """Within the block a file of the copy has another text."""
        (TREE / file).write_text(text)
        try:
            yield
        finally:
            shutil.copyfile(ROOT / file, TREE / file)

    def build(self, judges: Sequence[str]) -> bool:
        """Builds what judges need: C++ programs, or the libraries for tests of Python. False if it does not compile."""
        if not (CPP / "build.ninja").exists():
            pybind = subprocess.run([sys.executable, "-m", "pybind11", "--cmakedir"], capture_output=True, text=True)
            options = [
                "-DCMAKE_BUILD_TYPE=Debug",
                "-DCMAKE_CXX_FLAGS_DEBUG=-O1 -g0",
                "-DTTE_CUDA=OFF",
                "-DTTE_BUILD_TESTS=ON",
            ]
            options += [f"-DPython_EXECUTABLE={sys.executable}", f"-Dpybind11_DIR={pybind.stdout.strip()}"]
            subprocess.run([_BIN / "cmake", "-S", TREE, "-B", CPP, "-G", "Ninja", *options], check=True)
        targets = {"extension" if "/" in judge else judge for judge in judges}
        done = subprocess.run([_BIN / "cmake", "--build", CPP, "--target", *targets], capture_output=True)
        if done.returncode == 0 and "extension" in targets:
            install = [_BIN / "cmake", "--install", CPP, "--component", "python", "--prefix", TREE]
            subprocess.run(install, check=True, capture_output=True)
        return done.returncode == 0

    def check(self, judge: str) -> None:
        """Raises RuntimeError if a test fails without a change."""
        if _known(judge) not in self._seconds:
            failed, seconds = self._run(judge, 1200)
            if failed:
                raise RuntimeError(f"{judge} fails without a wrong change: {failed}")
            self._seconds[_known(judge)] = seconds
            self._known_file.write_text(json.dumps(self._seconds, indent=1))

    def judge(self, judge: str) -> Verdict:
        return self._run(judge, _MOST_TIMES * self._seconds[_known(judge)] + _MORE_SECONDS)

    def _run(self, judge: str, most_seconds: float) -> Verdict:
        """One test, in a process group of its own, which is ended with it."""
        command: list[str | Path] = [CPP / judge, "--gtest_fail_fast", "--gtest_brief=1"]
        if "/" in judge:
            command = [VENV / "bin" / "python", "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", judge]
        begin = time.monotonic()
        process = subprocess.Popen(
            command, cwd=TREE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        try:
            output, _ = process.communicate(timeout=most_seconds)
        except subprocess.TimeoutExpired:
            return Verdict(f"{judge}: no end within {most_seconds:.0f} seconds", most_seconds)
        finally:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()
        seconds = round(time.monotonic() - begin, 1)
        found = _FAILED.search(output)
        name = f"{judge}: exit code {process.returncode}" if found is None else found[1] or f"{judge}: {found[2]}"
        return Verdict("" if process.returncode == 0 else name, seconds)


def _known(judge: str) -> str:
    return f"{judge} {_digest(ROOT / (judge.partition('::')[0] if '/' in judge else f'tests/csrc/{judge}.cpp'))[:8]}"


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
