"""A state dict as one buffer, against the operator alone and a memcpy of the same bytes into warm memory.

    python benchmarks/bench_flat_buffer.py [--rounds 15] [--dry]

128 MiB of float32 in 300 and in 5,000 tensors, and 5,000 of 1 KiB, on the CPU, one thread. Contenders take turns, round
by round, and each keeps its best time. Flattening makes new memory for the buffer.
Writes results/flat_buffer_<machine>.json.
"""

import argparse
import json
from typing import Any

import torch
from bench_ops import MEMCPY, best_seconds, memcpy
from result_file import write_results

import torchtitan_ext as tte
from torchtitan_ext import ops

CASES = {
    "128 MiB in 300 tensors": (300, (128 << 20) // 300),
    "128 MiB in 5,000 tensors": (5000, (128 << 20) // 5000),
    "5,000 tensors of 1 KiB": (5000, 1 << 10),
}


def measure(count: int, num_bytes: int, rounds: int) -> dict[str, Any]:
    state = {f"layers.{number}.weight": torch.randn(num_bytes // 4) for number in range(count)}
    tensors = list(state.values())
    buffers, manifest = tte.flatten_state_dict(state)
    flat = buffers["cpu"]
    other = torch.empty_like(flat)
    seconds = best_seconds(
        {
            MEMCPY: memcpy(other, flat),
            "flatten_tensors": lambda: ops.flatten_tensors(tensors),
            "tte.flatten_state_dict": lambda: tte.flatten_state_dict(state),
            "unflatten_tensors_": lambda: ops.unflatten_tensors_(tensors, flat),
            "tte.unflatten_state_dict, in place": lambda: tte.unflatten_state_dict(buffers, manifest, into=state),
            "tte.unflatten_state_dict, views": lambda: tte.unflatten_state_dict(buffers, manifest),
            "the manifest as JSON and back": lambda: json.loads(json.dumps(manifest)),
        },
        "cpu",
        rounds,
    )
    return {
        name: {"milliseconds": 1e3 * one, "of_memcpy": one / seconds[MEMCPY]}
        for name, one in sorted(seconds.items(), key=lambda row: row[1])
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--dry", action="store_true", help="write no result file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = {name: measure(*case, options.rounds) for name, case in CASES.items()}
    for name, rows in results.items():
        print(name)
        for contender, row in rows.items():
            print(f"  {contender:<36} {row['milliseconds']:9.2f} ms {row['of_memcpy']:8.2f} of memcpy")
    if not options.dry:
        print(write_results("flat_buffer", sizes={"rounds": options.rounds, "threads": 1}, results=results))


if __name__ == "__main__":
    main()
