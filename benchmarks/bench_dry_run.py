"""A dry run of Llama 405B with AdamW: seconds and memory of `tte.dry_run`, and of the command on a checkpoint.

    python benchmarks/bench_dry_run.py                            1,024 and 4,096 ranks, a checkpoint of 1,024
    python benchmarks/bench_dry_run.py --saved 64 --ranks 128     another pair

The state is on the meta device over a process group of the backend "fake"; the checkpoint has metadata and index as
FileWriter makes them, and no tensors. Each row is a process of its own, with everything from its start on but imports.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from plan_cases import TP, Training
from plan_measures import rank_file, written_by
from result_file import status_bytes, write_results
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

import torchtitan_ext as tte
from torchtitan_ext.layout.layout import local_shard
from torchtitan_ext.offline.placement_rules import PlacementRules


def write_checkpoint(path: Path, num_ranks: int) -> None:
    """Metadata and index of a checkpoint that so many ranks saved."""
    case = Training("405B", num_ranks)
    planner = tte.SavePlanner()
    planner.is_coordinator = True
    _, metadata = planner.create_global_plan([SavePlan([], planner_data=one) for one in case.messages()])
    with TemporaryDirectory() as folder:
        files = [rank_file(Path(folder), rank, written_by(case, rank)) for rank in range(num_ranks)]
    writer = tte.FileWriter(path, sync=False)
    writer.set_up_storage_writer(True, rank=0)
    writer.prepare_global_plan([])
    writer.finish(metadata=metadata, results=files)


def state_of(num_ranks: int) -> dict[str, Any]:
    """What rank 0 holds, on the meta device."""
    dist.init_process_group("fake", rank=0, world_size=num_ranks, store=FakeStore())
    mesh = init_device_mesh("cpu", (num_ranks // TP, TP), mesh_dim_names=("dp", "tp"))
    rules = PlacementRules({"dp": num_ranks // TP, "tp": TP})
    state: dict[str, Any] = {}
    for path, shape, placements, _ in Training("405B", num_ranks).tensors(0):
        value = torch.empty(shape, device="meta")
        if placements:
            steps = rules.steps(placements)
            sizes = local_shard(shape, tuple(mesh.shape), steps, (0, 0)).sizes
            kinds = [_placement(*one) for one in placements]
            local = torch.empty(sizes, device="meta")
            value = DTensor.from_local(local, mesh, kinds, run_check=False, shape=value.shape, stride=value.stride())
        inner = state
        for part in path[:-1]:
            inner = inner.setdefault(part, {})
        inner[path[-1]] = value
    return state


def _placement(dim: int, split_factor: int) -> Any:
    if dim < 0:
        return Replicate()
    return Shard(dim) if split_factor == 1 else _StridedShard(dim, split_factor=split_factor)


def measure(kind: str, num_ranks: int, path: Path) -> dict[str, Any]:
    """Seconds and the peak of memory of one dry run, in this process."""
    state = state_of(num_ranks) if kind != "command" else None
    before = status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    begin, cpu = time.perf_counter(), time.process_time()
    if state is None:
        found = tte.dry_run(path, mesh={"dp": num_ranks // TP, "tp": TP})
    else:
        found = tte.dry_run(state, checkpoint=path if kind == "load" else None)
    text = str(found)
    row = {
        "kind": kind,
        "num_ranks": num_ranks,
        "seconds": time.perf_counter() - begin,
        "cpu_seconds": time.process_time() - cpu,
        "peak_bytes": status_bytes("VmHWM") - before,
    }
    print(text, file=sys.stderr)
    assert not found.problems
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--saved", type=int, default=1024, help="ranks that saved the checkpoint")
    parser.add_argument("--ranks", type=int, default=4096, help="ranks of the dry run")
    parser.add_argument("--row", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.row is not None:
        kind, num_ranks, path = arguments.row
        print(json.dumps(measure(kind, int(num_ranks), Path(path))))
        return
    rows = []
    with TemporaryDirectory() as folder:
        path = Path(folder) / "step-1"
        write_checkpoint(path, arguments.saved)
        metadata_bytes = (path / ".metadata").stat().st_size
        cases = [("save", arguments.saved), ("save", arguments.ranks), ("load", arguments.ranks)]
        for kind, num_ranks in [*cases, ("command", arguments.saved), ("command", arguments.ranks)]:
            command = [sys.executable, __file__, "--row", kind, str(num_ranks), str(path)]
            answer = subprocess.run(command, check=True, capture_output=True, text=True)
            rows.append(json.loads(answer.stdout))
            print(
                f"{kind:<8} {num_ranks:6,} ranks  {rows[-1]['seconds']:7.1f} s, of them {rows[-1]['cpu_seconds']:6.1f} "
                f"of CPU  {rows[-1]['peak_bytes'] / 1e6:7.0f} MB"
            )
    sizes = {"model": "405B", "tp": TP, "saved": arguments.saved, "metadata_bytes": metadata_bytes}
    written = write_results("dry_run", sizes=sizes, results={"rows": rows})
    print(f"\nwritten: benchmarks/results/{written.name}")


if __name__ == "__main__":
    main()
