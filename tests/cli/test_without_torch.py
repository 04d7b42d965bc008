"""Commands whose process cannot import torch."""

import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from states import random_tensor

import torchtitan_ext as tte

COMMANDS = """
import sys
sys.modules["torch"] = None
from torchtitan_ext.cli.app import main
for line in sys.stdin.read().splitlines():
    sys.argv = ["torchtitan-ext", *line.split()]
    try:
        main()
    except SystemExit as end:
        print("ended with", end.code, flush=True)
"""


def test_what_looks_at_tensors_and_moves_them(tmp_path: Path) -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.float8_e4m3fn)
    state = {f"m.{dtype}".replace("torch.", ""): random_tensor((9, 5), dtype, seed=3) for dtype in dtypes}
    tte.save(
        {**state, "empty": torch.zeros(0, 3), "step": 7, "note": ["a"]}, tmp_path / "run/step-1", fingerprints=True
    )
    lines = [
        "ls run",
        "latest run",
        "inspect run/step-1",
        "verify --deep run/step-1",
        "verify --prove run/step-1",
        "reshard run/step-1 new/step-1 --mesh dp=3,tp=2",
        "diff run/step-1 new/step-1",
        "diff run/step-1 new/step-1 --read",
        "convert new/step-1 weights --to safetensors --prefix m",
        "convert weights again --to dcp",
        "diff again new/step-1 --prefix m",
        "gc run --keep 1",
    ]
    code = [sys.executable, "-W", "ignore", "-c", COMMANDS]
    done = subprocess.run(code, input="\n".join(lines), capture_output=True, text=True, cwd=tmp_path)
    ends = [line for line in done.stdout.splitlines() if line.startswith("ended with")]
    assert ends == ["ended with 0"] * len(lines), done.stdout + done.stderr
    assert tte.fingerprint({"m": load_file(tmp_path / "weights/model.safetensors")}) == tte.fingerprint(
        {"m": {key.removeprefix("m."): tensor for key, tensor in state.items()}}
    )
    loaded = {key: torch.zeros_like(tensor) for key, tensor in state.items()}
    tte.load({**loaded, "empty": torch.zeros(0, 3), "step": 0, "note": []}, tmp_path / "new/step-1")
    assert tte.fingerprint(loaded) == tte.fingerprint(state)
