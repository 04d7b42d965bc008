"""A copy of the tree under ``build/mutants`` in which wrong changes are made, built and judged.

tree/    the files that git knows or would add; its package has the libraries of the environment, or of cpp/
cpp/     the C++ test programs and the libraries, without link-time optimization and CUDA
venv/    the packages of the environment, and tree/ before all of them
"""

from __future__ import annotations

import contextlib
import filecmp
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from mutants.judges import ROOT

from torchtitan_ext import _core

FOLDER = ROOT / "build" / "mutants"
TREE, CPP, VENV = FOLDER / "tree", FOLDER / "cpp", FOLDER / "venv"
_BIN = Path(sys.executable).parent
_FAILED = re.compile(r"^(?:FAILED|ERROR) (tests/.+?)(?: - .*)?$|^\[  FAILED  \] (\w[^\s,]*)", re.MULTILINE)
# Of one test, and of all of a file: what takes longer hangs.
_TEST_SECONDS, _FILE_SECONDS = 300, 1500


class Scratch:
    """The scratch copy, made or brought up to date. One process at a time may have it."""

    def __init__(self) -> None:
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
        names = [name for name in listed if name and (ROOT / name).is_file()]
        for name in names:
            if not (TREE / name).exists() or not filecmp.cmp(ROOT / name, TREE / name, shallow=False):
                (TREE / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(ROOT / name, TREE / name)
        for path in [path for path in TREE.rglob("*.py") if str(path.relative_to(TREE)) not in names]:
            path.unlink()
        for library in Path(_core.__file__).parent.glob("*.so"):
            shutil.copy(library, TREE / "torchtitan_ext")
        if not VENV.exists():
            subprocess.run([sys.executable, "-m", "venv", "--without-pip", VENV], check=True)
        site = Path(sysconfig.get_path("platlib", vars={"base": str(VENV), "platbase": str(VENV)}))
        packages = [str(TREE), *(path for path in sys.path if path.endswith("-packages"))]
        (site / "packages.pth").write_text("\n".join(packages))

    @contextmanager
    def changed(self, file: str, text: str) -> Iterator[None]:
        """Within the block a file of the copy has another text."""
        (TREE / file).write_text(text)
        try:
            yield
        finally:
            shutil.copyfile(ROOT / file, TREE / file)

    def build(self, judge: str) -> bool:
        """Builds what a judge needs: its C++ program, or the libraries for Python. False if that does not compile."""
        if not (CPP / "build.ninja").exists():
            command = [sys.executable, "-m", "pybind11", "--cmakedir"]
            pybind = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
            options = ["CMAKE_BUILD_TYPE=Debug", "CMAKE_CXX_FLAGS_DEBUG=-O1 -g0", "TTE_CUDA=OFF", "TTE_BUILD_TESTS=ON"]
            options += [f"Python_EXECUTABLE={sys.executable}", f"pybind11_DIR={pybind}"]
            defined = [f"-D{option}" for option in options]
            subprocess.run([_BIN / "cmake", "-S", TREE, "-B", CPP, "-G", "Ninja", *defined], check=True)
        program = judge.partition("::")[0]
        target = "extension" if "/" in program else program
        done = subprocess.run([_BIN / "cmake", "--build", CPP, "--target", target], capture_output=True)
        if done.returncode == 0 and target == "extension":
            command = [str(_BIN / "cmake"), "--install", str(CPP), "--component", "python", "--prefix", str(TREE)]
            subprocess.run(command, check=True, capture_output=True)
        return done.returncode == 0

    def judge(self, *judges: str) -> list[str]:
        """Runs tests, or those of a file, and returns which fail: of one judge the first."""
        program, _, case = judges[0].partition("::")
        command = [str(CPP / program), "--gtest_fail_fast", "--gtest_brief=1", f"--gtest_filter={case or '*'}"]
        if "/" in program:
            command = [str(VENV / "bin/python"), "-m", "pytest", "-q", "-p", "no:cacheprovider", *judges]
            command += ["--timeout", str(_TEST_SECONDS), *(["-x"] if len(judges) == 1 else [])]
        # Programs of the environment, such as an object server: what is skipped without one would judge nothing.
        environment = {**os.environ, "PATH": f"{_BIN}:{os.environ['PATH']}", "TTE_REQUIRE_SERVER": "1"}
        process = subprocess.Popen(
            command,
            cwd=TREE,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=_FILE_SECONDS * len(judges))
        except subprocess.TimeoutExpired:
            return [f"{judges[0]} hangs"]
        finally:
            with contextlib.suppress(ProcessLookupError):  # with all that it has started
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        found = [test or f"{program}::{in_program}" for test, in_program in _FAILED.findall(output)]
        return [] if process.returncode == 0 else found or list(judges)

    def unfair(self, judges: Collection[str]) -> set[str]:
        """Those of these tests that fail without a change, too."""
        programs = [judge for judge in judges if "/" not in judge]
        failed = [test for program in programs if not self.build(program) or self.judge(program) for test in [program]]
        tests = [judge for judge in judges if "/" in judge]
        return {*failed, *(self.judge(*tests) if tests else [])}
