"""``torchtitan-ext doctor``. Checks import torch themselves: a torch that does not load is a line of the report."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from torchtitan_ext.cli.options import Json
from torchtitan_ext.cli.output import DIFFERS, print_json, text_of_bytes

_PACKAGES = ("torchtitan-ext", "torch", "numpy", "typer", "tqdm", "safetensors", "matplotlib")
_DISK_BYTES = 64 << 20
_BLOCK_BYTES = 4 << 20
_GLOO_SECONDS = 180


class Finding(NamedTuple):
    """The result of one check; ``detail`` is a line for people, the error if the check failed."""

    name: str
    is_ok: bool
    detail: str
    seconds: float


def run(
    directory: Annotated[Path, typer.Argument(metavar="DIRECTORY", help="On the disk to test.")] = Path("."),
    json: Json = False,
) -> None:
    """What to put into a bug report: versions, libraries, CUDA, gloo, disk, a tiny save and load.

    Writes 64 MiB to DIRECTORY and removes them again. Exits with 1 if a check fails.

    Example: torchtitan-ext doctor /scratch
    """
    checks: dict[str, Callable[[], str]] = {
        "machine": _machine,
        "versions": _versions,
        "core": lambda: f"{importlib.import_module('torchtitan_ext._core').__file__} loads",
        "ops": _ops,
        "collectives": _collectives,
        "abi": _abi,
        "cuda": _cuda,
        "nccl": _nccl,
        "gloo": _gloo,
        "disk": lambda: _disk(directory),
        "round trip": lambda: _round_trip(directory),
    }
    findings = []
    for name, check in checks.items():
        findings.append(_try(name, check))
        if not json:
            _print(findings[-1])
    if json:
        rows = [dict(zip(Finding._fields, finding, strict=True)) for finding in findings]
        print_json({"is_ok": all(finding.is_ok for finding in findings), "checks": rows})
    if not all(finding.is_ok for finding in findings):
        raise typer.Exit(DIFFERS)


def _try(name: str, check: Callable[[], str]) -> Finding:
    begin = time.perf_counter()
    try:
        is_ok, detail = True, check()
    except Exception as error:  # the report is for whatever is broken
        is_ok, detail = False, f"{type(error).__name__}: {error}"
    return Finding(name, is_ok, detail, round(time.perf_counter() - begin, 3))


def _print(finding: Finding) -> None:
    print(f"{'ok' if finding.is_ok else 'FAILED':6}  {finding.name:11}  {finding.detail}", flush=True)


def _machine() -> str:
    cores = len(os.sched_getaffinity(0))
    return f"{platform.platform()}, {cores} cores, Python {platform.python_version()}"


def _versions() -> str:
    found = []
    for name in _PACKAGES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"no {name}")
    return ", ".join(found)


def _ops() -> str:
    importlib.import_module("torchtitan_ext.op_library")
    return "_ops.so loads, by LibTorch's stable ABI"


def _collectives() -> str:
    library = importlib.import_module("torchtitan_ext.op_library")
    if library.full_abi_is_missing:
        raise ImportError(library.full_abi_is_missing)
    return f"{library.full_abi_path(importlib.import_module('torch').__version__).name} loads"


def _abi() -> str:
    torch = importlib.import_module("torch")
    is_cxx11 = torch.compiled_with_cxx11_abi()
    return f"torch {torch.__version__} from git {str(torch.version.git_version)[:10]}, C++11 ABI {is_cxx11}"


def _cuda() -> str:
    torch = importlib.import_module("torch")
    if torch.version.cuda is None:
        return "torch is built without CUDA"
    if not torch.cuda.is_available():
        return f"torch is built for CUDA {torch.version.cuda}; no device is there"
    names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    return f"CUDA {torch.version.cuda}, {len(names)} devices: {', '.join(sorted(set(names)))}"


def _nccl() -> str:
    torch = importlib.import_module("torch")
    if not torch.distributed.is_nccl_available():
        return "torch is built without NCCL"
    return "NCCL " + ".".join(map(str, torch.cuda.nccl.version()))


def _gloo() -> str:
    with tempfile.TemporaryDirectory() as place:
        calls = [f"add_over_gloo({rank}, {f'{place}/store'!r})" for rank in range(2)]
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", f"from {__name__} import add_over_gloo; {call}"],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for call in calls
        ]
        try:
            said = [rank.communicate(timeout=_GLOO_SECONDS) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
    errors = [err.strip().splitlines()[-1:] for _, err in said]
    if [out.strip() for out, _ in said] != ["3", "3"]:  # 1 of rank 0 and 2 of rank 1
        raise RuntimeError(f"two processes did not agree on a sum over gloo: {errors}")
    return "two processes agree on a sum"


def add_over_gloo(rank: int, store_file: str) -> None:
    """Prints the sum of the numbers of two processes, of which this is one."""
    torch, dist = importlib.import_module("torch"), importlib.import_module("torch.distributed")
    store = f"file://{store_file}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    number = torch.tensor([rank + 1], dtype=torch.int64, device="cpu")
    dist.all_reduce(number)
    dist.destroy_process_group()
    print(int(number))


def _disk(directory: Path) -> str:
    written, read = map(text_of_bytes, disk_speed(directory, _DISK_BYTES))
    size = text_of_bytes(_DISK_BYTES)
    return f"{directory.resolve()}: {size} written and synced at {written}/s, read at {read}/s"


def disk_speed(directory: Path, num_bytes: int) -> tuple[float, float]:
    """Bytes per second of a write with its sync, and of a read with an empty page cache if the system allows that.

    Raises:
        OSError: The directory cannot be written to, or is full.
    """
    block = os.urandom(_BLOCK_BYTES)
    num_blocks = max(1, num_bytes // _BLOCK_BYTES)
    with tempfile.TemporaryFile(dir=directory, buffering=0) as stream:
        begin = time.perf_counter()
        for _ in range(num_blocks):
            stream.write(block)
        os.fsync(stream.fileno())
        written = time.perf_counter()
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        stream.seek(0)
        reading = time.perf_counter()
        while stream.read(_BLOCK_BYTES):
            pass
        read = time.perf_counter()
    num_bytes = num_blocks * _BLOCK_BYTES
    return num_bytes / (written - begin), num_bytes / (read - reading)


def _round_trip(directory: Path) -> str:
    torch = importlib.import_module("torch")
    tte: Any = importlib.import_module("torchtitan_ext")
    weights = torch.arange(1000, dtype=torch.float32, device="cpu")
    state = {"w": weights, "b": weights[:3].bfloat16(), "step": 7}
    loaded = {"w": torch.zeros_like(weights), "b": torch.zeros_like(state["b"]), "step": 0}
    with tempfile.TemporaryDirectory(dir=directory) as place, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tte.save(state, f"{place}/step-7", no_dist=True)
        tte.load(loaded, f"{place}/step-7", no_dist=True)
    if not all(torch.equal(loaded[key], state[key]) for key in ("w", "b")) or loaded["step"] != 7:
        raise RuntimeError("what was loaded is not what was saved, please report")
    return "a state of three keys is saved and loaded, bit for bit"
