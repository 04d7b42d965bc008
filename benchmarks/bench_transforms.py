"""Loads of safetensors through a transform, beside safetensors and torch: read each tensor whole, convert, copy.

    python benchmarks/bench_transforms.py --directory <on a disk> [--gigabytes 0.25] [--rounds 9]

Square matrices in one file, --gigabytes as saved, are turned, cast (float32 to bfloat16), scaled (fp8 in blocks of 128)
or stacked, in one process; the files are in the page cache. Contenders take turns, round by round; seconds are minima
over the rounds, ratios those of ours. What is loaded is compared. Writes results/transforms_<machine>.json.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from result_file import write_results
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

import torchtitan_ext as tte
from torchtitan_ext import transforms
from torchtitan_ext.transforms import Rule, Transform

State = dict[str, Tensor]
Convert = Callable[[Callable[[str], Tensor]], State]
SIDE = 2048
BLOCK = 128


def cases(num_bytes: int) -> dict[str, tuple[State, Transform, Convert]]:
    """What is saved, the transform, and the same conversion by torch, from a function that reads a tensor."""

    def names(item_bytes: int) -> list[str]:
        return [f"w{number}" for number in range(max(1, num_bytes // (SIDE * SIDE * item_bytes)))]

    full = {name: torch.randn(SIDE, SIDE) for name in names(4)}
    quantised = {name: torch.randn(SIDE, SIDE).to(torch.float8_e4m3fn) for name in names(1)}
    scales = {f"s{name[1:]}": torch.rand(SIDE // BLOCK, SIDE // BLOCK) for name in quantised}

    def scaled(read: Callable[[str], Tensor]) -> State:
        converted = {}
        for name in quantised:
            scale = read(f"s{name[1:]}").repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
            converted[name] = (read(name).float() * scale).bfloat16()
        return converted

    dequantise = transforms.dequantize([BLOCK, BLOCK], dtype="bfloat16")
    return {
        "turned": (
            full,
            Transform([Rule("w*", "w*", [transforms.transpose(0, 1)])]),
            lambda read: {name: read(name).t() for name in full},
        ),
        "cast": (
            full,
            Transform([Rule("w*", "w*", [transforms.cast("bfloat16")])]),
            lambda read: {name: read(name).bfloat16() for name in full},
        ),
        "scaled": (quantised | scales, Transform([Rule(["w*", "s*"], "w*", [dequantise])]), scaled),
        "stacked": (
            full,
            Transform([Rule("w#", "w", [transforms.stack(0)])]),
            lambda read: {"w": torch.stack([read(name) for name in full])},
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", default=tempfile.gettempdir(), help="where files are written")
    parser.add_argument("--gigabytes", type=float, default=0.25)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    results = {}
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        for case, (saved, transform, convert) in cases(int(options.gigabytes * 1e9)).items():
            directory = Path(folder) / case
            directory.mkdir()
            save_file(saved, directory / "model.safetensors")
            with safe_open(directory / "model.safetensors", "pt") as file:
                wanted = convert(file.get_tensor)
            targets = {name: torch.zeros(value.shape, dtype=value.dtype) for name, value in wanted.items()}

            def ours(directory: Path = directory, targets: State = targets, transform: Transform = transform) -> None:
                tte.load(targets, directory, transform=transform, no_dist=True)

            def torchs(directory: Path = directory, targets: State = targets, convert: Convert = convert) -> None:
                with safe_open(directory / "model.safetensors", "pt") as file:
                    for name, value in convert(file.get_tensor).items():
                        targets[name].copy_(value)

            seconds = {"ours": float("inf"), "safetensors and torch": float("inf")}
            for _ in range(options.rounds):
                for name, load in zip(seconds, (ours, torchs), strict=True):
                    for target in targets.values():
                        target.zero_()
                    start = time.perf_counter()
                    load()
                    seconds[name] = min(seconds[name], time.perf_counter() - start)
                    assert all(torch.equal(target, wanted[key]) for key, target in targets.items()), (case, name)
            ratio = seconds["ours"] / seconds["safetensors and torch"]
            results[case] = {name: round(value, 4) for name, value in seconds.items()} | {"ratio": round(ratio, 2)}
            print(f"{case}: {results[case]}")
    sizes = {"gigabytes": options.gigabytes, "rounds": options.rounds, "side": SIDE, "block": BLOCK}
    print(write_results("transforms", sizes=sizes, results=results))


if __name__ == "__main__":
    main()
