"""The memory that operations take."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoints import random_bits, save_as
from process_memory import anonymous_bytes, highest_bytes

pytestmark = pytest.mark.nightly("memory")

# Warmed up, so that what the allocators and libraries keep is not taken for the checkpoint's.
PROGRAM = """
import sys
from torchtitan_ext.offline.sources import open_source
from torchtitan_ext.offline.rewrite.reshard import reshard
from torchtitan_ext.offline.rewrite.convert import convert
from torchtitan_ext.offline.compare.diff import diff
_, small, large, target, name, num_processes, max_bytes = sys.argv
options = {"num_processes": int(num_processes), "max_bytes": int(max_bytes), "progress": lambda _: None}

def run(source, target):
    if name == "reshard":
        reshard(open_source(source), target, mesh={"dp": 3, "tp": 2}, **options)
    elif name == "diff":
        diff(open_source(source), open_source(source + "-other"), values=True, max_bytes=options["max_bytes"])
    else:
        convert(open_source(source), target, to=name, **options)

run(small, target + "-small")
print("ready", flush=True)
sys.stdin.readline()
run(large, target)
"""


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A small and a large checkpoint; beside each another in which one tensor differs, and one in most elements."""
    folder = tmp_path_factory.mktemp("sources")
    for kind, num_rows in (("small", 1 << 10), ("large", 12 << 20)):
        state = {f"w{number}": random_bits((num_rows,), torch.float32, number) for number in range(4)}
        save_as("ours", folder / kind, state)
        state["w3"] += 1
        state["w2"].view(torch.int32)[torch.arange(num_rows) % 5 < 3] ^= 1
        save_as("torch", folder / f"{kind}-other", state)
    return folder / "small", folder / "large"


@pytest.mark.parametrize(
    ("name", "num_processes"),
    [
        ("reshard", 1),
        ("reshard", 2),
        ("safetensors", 2),
        ("dcp", 1),
        ("diff", 1),
    ],
)
def test_memory_stays_below_the_bound_on_a_state_four_times_as_large(
    tmp_path: Path, sources: tuple[Path, Path], name: str, num_processes: int
) -> None:
    max_bytes = 48 << 20
    peak = peak_bytes(*sources, tmp_path / "target", name, num_processes, max_bytes)
    assert 1 << 20 < peak < max_bytes


@pytest.mark.parametrize("name", ["reshard", "safetensors", "diff"])
def test_memory_stays_below_the_bound_whatever_the_strides_of_a_file_of_torch(tmp_path: Path, name: str) -> None:
    max_bytes = 48 << 20
    for kind, size in (("small", 64), ("large", 3584)):  # 49 MiB of floats
        transposed = random_bits((size, size), torch.float32).t()
        repeated = transposed[:, None].expand(-1, 2, -1)
        overlapping = transposed.t().reshape(-1).unfold(0, 2 * size, size).t()
        state = {"two": torch.stack((transposed, transposed)).permute(2, 0, 1), "repeated": repeated, "o": overlapping}
        torch.save(state, tmp_path / kind)
        torch.save(state, tmp_path / f"{kind}-other")
    del state, transposed, repeated, overlapping
    assert peak_bytes(tmp_path / "small", tmp_path / "large", tmp_path / "target", name, 1, max_bytes) < max_bytes


def peak_bytes(small: Path, large: Path, target: Path, name: str, num_processes: int, max_bytes: int) -> int:
    """What an operation takes on a large checkpoint, beyond what it took on a small one."""
    paths = (small, large, target)
    command = [sys.executable, "-c", PROGRAM, *map(str, paths), name, str(num_processes), str(max_bytes)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    before = anonymous_bytes(process.pid)
    process.stdin.write("go\n")
    process.stdin.close()
    peak = max(before, highest_bytes(process))
    process.stdout.close()
    assert process.returncode == 0
    print(f"{name}, {num_processes}: {(peak - before) / 2**20:.1f} of {max_bytes / 2**20:.0f} MiB")
    return peak - before
