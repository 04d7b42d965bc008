"""The build beyond what this machine builds: another compiler, other GPUs."""

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from torchtitan_ext import ops
from torchtitan_ext.layout import Chunk, LocalShard
from torchtitan_ext.op_library import full_abi_path

ROOT = Path(__file__).parents[1]
CORE = [
    *sorted(ROOT.glob("csrc/core/*.cpp")),
    *(ROOT / "csrc/ops" / name for name in ("copy_runs_cpu.cpp", "hash_runs_cpu.cpp", "run_tables.cpp")),
]
HASH = """
#include "ops/hash_runs.h"

extern "C" uint64_t hash_contiguous(uint64_t address, int64_t num_bytes, int64_t word_bytes) {
  torchtitan_ext::core::RunList runs;
  runs.append_bytes(static_cast<int64_t>(address), 0, num_bytes);
  return torchtitan_ext::ops::hash_runs_cpu(runs, word_bytes, nullptr);
}
"""


@pytest.mark.skipif(shutil.which("g++-11") is None, reason="no g++-11 here")
def test_the_oldest_compiler_builds_the_core_and_hashes_alike(tmp_path: Path) -> None:
    """GCC 11, of Ubuntu 22.04 and most CUDA 12 images."""
    source, library = tmp_path / "hash.cpp", tmp_path / "hash.so"
    source.write_text(HASH)
    flags = ["-std=c++20", "-O2", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror", f"-I{ROOT / 'csrc'}"]
    done = subprocess.run(
        ["g++-11", *flags, str(source), *map(str, CORE), "-o", str(library)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    hash_contiguous = ctypes.CDLL(str(library)).hash_contiguous
    hash_contiguous.argtypes = [ctypes.c_uint64, ctypes.c_int64, ctypes.c_int64]
    hash_contiguous.restype = ctypes.c_uint64
    for dtype in (torch.uint8, torch.int16, torch.int32, torch.int64):
        tensor = torch.arange(1001).to(dtype)
        shard = LocalShard(sizes=(1001,), chunks=(Chunk(offsets=(0,), sizes=(1001,), local_offsets=(0,)),))
        expected = int(ops.fingerprint_shard(tensor, shard, (1001,))) % 2**64
        assert hash_contiguous(tensor.data_ptr(), tensor.nbytes, tensor.itemsize) == expected


def result_of(function: str, argument: str, tmp_path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """What ``tte_<function>`` of ``cmake/<function>.cmake`` makes of its argument, on stderr."""
    script = tmp_path / "print.cmake"
    script.write_text(
        f'include("{ROOT / "cmake" / function}.cmake")\ntte_{function}("{argument}" found)\nmessage("${{found}}")\n'
    )
    variables = {name: value for name, value in os.environ.items() if name not in ("CUDAARCHS", "TORCH_CUDA_ARCH_LIST")}
    cmake = shutil.which("cmake") or str(ROOT / ".venv/bin/cmake")
    return subprocess.run([cmake, "-P", str(script)], capture_output=True, text=True, env={**variables, **environment})


needs_cmake = pytest.mark.skipif(
    shutil.which("cmake") is None and not (ROOT / ".venv/bin/cmake").exists(), reason="no cmake here"
)


@needs_cmake
@pytest.mark.parametrize(
    "nvcc_version, environment, expected",
    [
        ("12.4", {}, "80-real;90"),
        ("12.8", {}, "80-real;90;100-real;120"),
        ("13.0", {"CUDAARCHS": "90a;100"}, "90a;100"),
        ("13.0", {"TORCH_CUDA_ARCH_LIST": "8.0 9.0a;12.0+PTX"}, "80-real;90a-real;120"),
        ("13.0", {"TORCH_CUDA_ARCH_LIST": "Ampere+PTX;Hopper"}, "80-real;86;90-real"),
        ("13.0", {"TORCH_CUDA_ARCH_LIST": "9.0", "CUDAARCHS": "native"}, "native"),
    ],
)
def test_cuda_architectures(nvcc_version: str, environment: dict[str, str], expected: str, tmp_path: Path) -> None:
    done = result_of("cuda_architectures", nvcc_version, tmp_path, **environment)
    assert (done.returncode, done.stderr.strip()) == (0, expected)


@needs_cmake
def test_an_unknown_architecture_is_refused(tmp_path: Path) -> None:
    done = result_of("cuda_architectures", "13.0", tmp_path, TORCH_CUDA_ARCH_LIST="9.0;Hoper")
    assert done.returncode != 0
    assert "TORCH_CUDA_ARCH_LIST has 'Hoper', expected compute capabilities" in " ".join(done.stderr.split())


@needs_cmake
@pytest.mark.parametrize(
    "version, expected",
    [
        ("2.13.0", "_full_abi_2_13"),
        ("2.13.1+cu130", "_full_abi_2_13"),
        ("2.9.1.post3+gitabc", "_full_abi_2_9"),
        ("2.15.0.dev20261101+cpu", "_full_abi_2_15_0_dev20261101_cpu"),
        ("2.15.0rc2", "_full_abi_2_15_0rc2"),
        ("2.10.0a0+b4e4ee81d3.nv25.12", "_full_abi_2_10_0a0_b4e4ee81d3_nv25_12"),
    ],
)
def test_only_releases_share_a_binary_of_the_full_abi(version: str, expected: str, tmp_path: Path) -> None:
    """The build gives the library the name that the package looks for."""
    assert result_of("full_abi_name", version, tmp_path).stderr.strip() == expected
    assert full_abi_path(version).name == f"{expected}.so"


def test_a_first_build_says_what_it_does_and_how_long(tmp_path: Path) -> None:
    command = ["make", "--dry-run", "demo", f"VENV={tmp_path}", "JOBS=3"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    (line,) = [line for line in done.stdout.splitlines() if "Building the package in 3 jobs" in line]
    assert "the first time about 5 minutes of one core" in line
    (build,) = [line for line in done.stdout.splitlines() if "pip install --verbose" in line]
    assert "--quiet" not in build, "the compiler's progress is shown"
