"""Planning of a transfer from memory to memory at scale: CPU seconds and bytes of the coordinator and of one rank.

    python benchmarks/bench_reshard_plan.py     a line per case, and results/reshard_plan_<machine>.json

Ranks are simulated in one process: what each would send is made first. Timed, in CPU seconds and at the best of a few
rounds, is what the coordinator does with it, and what one rank does: it describes its two states of DTensors, and
writes its boxes out.
"""

import argparse
import pickle
import time
from collections.abc import Callable
from typing import Any

from plan_cases import Training
from result_file import write_results

from torchtitan_ext import _core, ops
from torchtitan_ext.checkpoint.tables.key_table import KeyTable, RankTable, encode_table
from torchtitan_ext.transfer.endpoint import describe_endpoint
from torchtitan_ext.transfer.planning import Offer, plan_for_all

ROUNDS = 5
CASES = [("8B", 64, 32), ("70B", 1024, 512), ("405B", 1024, 512), ("405B", 512, 1024)]
NOBODY = encode_table(KeyTable({})).message


def cpu_seconds(function: Callable[[], Any]) -> tuple[float, Any]:
    best, result = float("inf"), None
    for _ in range(ROUNDS):
        begin = time.process_time()
        result = function()
        best = min(best, time.process_time() - begin)
    return best, result


def offers_of(num_sources: int, num_targets: int, model: str) -> list[Offer]:
    """Ranks 0, 1, ... of both sides; those beyond have one side only."""
    sources = Training("source", num_sources, model=model).messages(with_digests=False)
    targets = Training("target", num_targets, model=model).messages(with_digests=False)
    count = max(num_sources, num_targets)

    def padded(tables: list[RankTable]) -> list[RankTable]:
        return tables + [NOBODY] * (count - len(tables))

    arguments = {"cast": "exact", "bucket_bytes": ops.DEFAULT_BUCKET_BYTES, "replicas": "equal", "rename": {}}
    return [
        Offer(source, target, str(rank // 8).encode(), (), arguments)
        for rank, (source, target) in enumerate(zip(padded(sources), padded(targets), strict=True))
    ]


def measure(num_sources: int, num_targets: int, model: str) -> dict[str, float]:
    offers = offers_of(num_sources, num_targets, model)
    coordinator, parts = cpu_seconds(lambda: plan_for_all(offers, None))
    pickled = [len(pickle.dumps(part)) for part in parts]
    num_keys = sum(map(len, encode_table(Training("target", num_targets, model=model).table(0)).names))
    rank, expanded = cpu_seconds(
        lambda: [
            _core.expand_transfers(side, range(num_keys), num_keys) for side in (parts[0].sends, parts[0].receives)
        ]
    )
    states = [Training("rank", num_ranks, model=model).state(0) for num_ranks in (num_sources, num_targets)]
    described, _ = cpu_seconds(lambda: [describe_endpoint("source", state, None, is_filled=False) for state in states])
    return {
        "coordinator seconds": coordinator,
        "rank seconds": described + rank,
        "boxes of rank 0": sum(len(table.entries) // 64 for table in expanded),
        "longest part in bytes": max(pickled),
        "all parts in bytes": sum(pickled),
        "moved bytes": parts[0].total_bytes,
    }


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    results = {}
    for model, num_sources, num_targets in CASES:
        name = f"{model} from {num_sources} to {num_targets} ranks"
        results[name] = measure(num_sources, num_targets, model)
        print(name, *(f"{what} {value:.4g}" for what, value in results[name].items()), sep="  ")
    write_results("reshard_plan", sizes={"rounds": ROUNDS}, results=results)


if __name__ == "__main__":
    main()
