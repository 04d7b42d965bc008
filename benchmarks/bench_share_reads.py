"""Seconds of a load of replicas, with and without ``share_reads``: from a store that all ranks share, of 100 MB/s, and
from this machine's disk.

    python benchmarks/bench_share_reads.py [--megabytes 384] [--ranks 4] [--rounds 2] [--folder PATH]

gloo processes on one machine. ``replicas``: every rank wants all of the state; ``hsdp``: half of the ranks have the
other half's shards; ``windows``: each rank wants three quarters of the rows, which overlap in part. The store is a
FileReader that waits as one queue of all ranks would make it wait. The ways to load take turns; each keeps its best
time. Extra memory is the peak of a rank's resident memory during a load beyond that before it, the state's targets
being filled already. Prints a table, writes results/share_reads_<machine>.json.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import struct
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from measured_worlds import run_worlds
from result_file import status_bytes, write_results
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import torchtitan_ext as tte
from torchtitan_ext.storage import FileReader

STORE_BYTES_PER_SECOND = 100e6
COLUMNS = 1024
NUM_TENSORS = 24
KINDS = ("replicas", "hsdp", "windows")


class Throttled(FileReader):
    """A reader of a store whose bandwidth all ranks share: reads stand in one queue, which a file keeps."""

    queue: Path

    def read_data(self, *args: Any) -> Any:
        begin, before = time.monotonic(), self.num_bytes_read
        done = super().read_data(*args)
        seconds = (self.num_bytes_read - before) / STORE_BYTES_PER_SECOND
        descriptor = os.open(self.queue, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            free_at = struct.unpack("d", os.pread(descriptor, 8, 0) or bytes(8))[0]
            end = max(begin, free_at) + seconds
            os.pwrite(descriptor, struct.pack("d", end), 0)
        finally:
            os.close(descriptor)
        time.sleep(max(0.0, end - time.monotonic()))
        return done


def rows_of(num_rows: int, rank: int, ranks: int) -> tuple[int, int]:
    step = num_rows // (4 * ranks)
    begin = rank * step
    return begin, begin + num_rows - (ranks - 1) * step


def window(whole: torch.Tensor, begin: int, end: int) -> torch.Tensor:
    """Rows of a tensor as torch 2.14's ``CheckpointableTensor`` describes them."""
    local: Any = whole[begin:end].clone()
    local.global_shape = tuple(whole.shape)
    local.global_offsets, local.local_offsets = ((begin, 0),), ((0, 0),)
    local.local_sizes = (tuple(local.shape),)
    return local


def state_of(kind: str, megabytes: int, rank: int, ranks: int, *, value: float | None = None) -> dict[str, Any]:
    """Random on each rank alike, or filled with a value."""
    num_rows = megabytes * 2**20 // NUM_TENSORS // COLUMNS // 2 // (4 * ranks) * 4 * ranks
    mesh = init_device_mesh("cpu", (2, ranks // 2)) if kind == "hsdp" else init_device_mesh("cpu", (ranks,))
    state: dict[str, Any] = {}
    for number in range(NUM_TENSORS):
        if value is None:
            generator = torch.Generator().manual_seed(number)
            whole = torch.rand(num_rows, COLUMNS, generator=generator).to(torch.bfloat16)
        else:
            whole = torch.full((num_rows, COLUMNS), value, dtype=torch.bfloat16)
        if kind == "windows":
            begin, end = rows_of(num_rows, rank, ranks)
            state[f"layer.{number}"] = window(whole, begin, end)
        elif kind == "hsdp":
            shard = whole.chunk(ranks // 2)[mesh.get_local_rank(1)].clone()
            placements = (Replicate(), Shard(0))
            state[f"layer.{number}"] = DTensor.from_local(shard, mesh, placements, run_check=False)
        else:
            state[f"layer.{number}"] = whole
    return state


def load(state: dict[str, Any], reader: FileReader, share_reads: bool) -> dict[str, Any]:
    """One load, and what of it the table shows."""
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before, begin = status_bytes("VmRSS"), time.perf_counter()
    report = tte.load(state, storage_reader=reader, share_reads=share_reads, policy=tte.elastic.ElasticPolicy())
    mine = {
        "seconds": time.perf_counter() - begin,
        "bytes_read": reader.num_bytes_read,
        "extra_bytes": status_bytes("VmHWM") - before,
    }
    measured: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(measured, mine)
    assert report is not None
    return {
        "seconds": max(one["seconds"] for one in measured),
        "bytes_read": sum(one["bytes_read"] for one in measured),
        "extra_bytes": max(one["extra_bytes"] for one in measured),
        "sharing": str(report.sharing),
    }


def work(rank: int, world_size: int, folder: Path, options: argparse.Namespace, results: Any) -> None:
    for kind in KINDS:
        path = folder / kind
        tte.save(state_of("hsdp" if kind == "hsdp" else "replicas", options.megabytes, rank, options.ranks), path)
        truth = state_of(kind, options.megabytes, rank, options.ranks)
        state = state_of(kind, options.megabytes, rank, options.ranks, value=1.0)
        for place in ("store", "disk"):
            best: dict[str, Any] = {}
            for _ in range(options.rounds + (place == "disk")):
                for share_reads in (False, True):
                    reader = Throttled(path) if place == "store" else FileReader(path)
                    if place == "store":
                        reader.queue = folder / "queue"
                    measured = load(state, reader, share_reads)
                    name = str(share_reads)
                    if name not in best or measured["seconds"] < best[name]["seconds"]:
                        best[name] = measured
            for key, value in state.items():
                mine, expected = (one.to_local() if isinstance(one, DTensor) else one for one in (value, truth[key]))
                assert torch.equal(mine, expected), f"{key} was not loaded as it was saved"
            if rank == 0:
                results[f"{kind}, {place}"] = best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=384)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    measured = run_worlds(work, [options.ranks], options.folder, options)
    print(f"{'':18} share_reads  seconds  of the best  bytes read  of the store's time  extra memory")
    for case, ways in measured.items():
        best = min(ways["False"]["seconds"], ways["True"]["seconds"])
        once = ways["True"]["bytes_read"] / STORE_BYTES_PER_SECOND
        for name, one in ways.items():
            one["of_best"] = one["seconds"] / best
            of_store = ""
            if "store" in case:
                one["of_store_time"] = one["seconds"] / once
                of_store = f"{one['of_store_time']:.3f}"
            print(
                f"{case:18} {name:11} {one['seconds']:8.2f} {one['of_best']:12.2f} "
                f"{one['bytes_read'] / 1e6:8.1f} MB {of_store:>20} {one['extra_bytes'] / 1e6:10.1f} MB"
            )
    sizes = {"megabytes": options.megabytes, "ranks": options.ranks, "rounds": options.rounds}
    print(write_results("share_reads", sizes=sizes, results=measured))


if __name__ == "__main__":
    main()
