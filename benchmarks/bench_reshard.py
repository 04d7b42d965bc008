"""Resharding in memory, on gloo processes of one machine: ours against one flat all-to-all and what PyTorch has.

    python benchmarks/bench_reshard.py

Prints a table per workload and writes results/reshard_<machine>.json. Every ratio is to the limit: one
`all_to_all_single` of as many bytes between every two ranks, from one flat warm buffer into another, packed before and
never unpacked. The last table is the first one again, over a link of 1 Gbit/s for all ranks together
(`limited_link.py`). Where both layouts are DTensors', whole reshards take part: ours with a kept plan and without, and
what PyTorch has, of which some make new tensors.

A time is the slowest rank's. The contenders take turns, round by round, and a ratio is the median over rounds of time
over the limit's time in the same round: what else the machine does hits all alike. Memory is the growth of the largest
resident set over all ranks, while the freed memory of earlier calls has been given back.
"""

import argparse
import itertools
import math
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from bench_sync import Contenders, compare
from limited_link import enter_namespace, limit_all
from result_file import write_results
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Shard, distribute_tensor

import torchtitan_ext as tte
from torchtitan_ext import ops, transforms
from torchtitan_ext.transfer import TransferPlan
from torchtitan_ext.transforms import Rule, Transform

WORLD_SIZE = 4
LIMIT = "limit: one flat all_to_all_single"
OURS = "ops.exchange_runs_"
PLANNED = "ops.PlannedExchange"
KEPT = "a kept plan's run"
Shape = tuple[int, ...]
Box = tuple[list[int], list[int]]
"""Offsets and sizes."""
Layout = Callable[[Shape, int], Box]
"""The box of a tensor of some shape that a rank holds."""

LAYERS = 50
SHAPES: list[Shape] = [(512,), (512, 512), (512, 512), (512,), (1152, 512), (1152, 512)] * LAYERS
"""300 tensors, 341 MB of float32: 50 layers of two norms, two projections and two FFN weights."""
SMALL_SHAPES: list[Shape] = [(256,)] * 5_000
"""1 KiB each."""


def cut(shape: Shape, dim: int, part: int, num_parts: int) -> Box:
    """One of even parts of a dim, of which ranks behind the last one hold nothing."""
    dim = min(dim, len(shape) - 1)
    size = math.ceil(shape[dim] / num_parts)
    begin, end = (min(shape[dim], part * size), min(shape[dim], (part + 1) * size))
    offsets, sizes = [0] * len(shape), list(shape)
    offsets[dim], sizes[dim] = begin, end - begin
    return offsets, sizes


def rows(num_parts: int) -> Layout:
    return lambda shape, rank: cut(shape, 0, rank, num_parts)


def columns(num_parts: int) -> Layout:
    return lambda shape, rank: cut(shape, 1, rank, num_parts)


def rows_and_columns(shape: Shape, rank: int) -> Box:
    """FSDP 2 x TP 2."""
    if len(shape) == 1:
        return cut(shape, 0, rank, 4)
    (row, _), (height, _) = cut(shape, 0, rank // 2, 2)
    (_, column), (_, width) = cut(shape, 1, rank % 2, 2)
    return [row, column], [height, width]


@dataclass
class Exchange:
    """What a rank has, wants, sends and receives."""

    sources: list[Tensor]
    targets: list[Tensor]
    sends: Tensor
    receives: Tensor
    sent_bytes: list[int]
    received_bytes: list[int]

    def run(self, **options: Any) -> None:
        name = dist.group.WORLD.group_name
        ops.exchange_runs_(self.sources, self.targets, self.sends, self.receives, group_name=name, **options)

    def planned(self) -> ops.PlannedExchange:
        name = dist.group.WORLD.group_name
        return ops.PlannedExchange(self.sources, self.targets, self.sends, self.receives, group_name=name)


def exchange_of(shapes: Sequence[Shape], held: Layout, wanted: Layout) -> Exchange:
    rank, ranks = dist.get_rank(), range(dist.get_world_size())
    sources = [torch.full(held(shape, rank)[1], float(rank)) for shape in shapes]
    targets = [torch.zeros(wanted(shape, rank)[1]) for shape in shapes]
    sends, sent_bytes = boxes_of(shapes, held, rank, wanted, ranks)
    receives, received_bytes = boxes_of(shapes, wanted, rank, held, ranks)
    return Exchange(sources, targets, sends, receives, sent_bytes, received_bytes)


def boxes_of(
    shapes: Sequence[Shape], own: Layout, rank: int, others: Layout, ranks: Sequence[int]
) -> tuple[Tensor, list[int]]:
    """The table of what a rank's tensors share with those of each other rank, and its bytes by rank."""
    table: list[int] = []
    peer_bytes = [0] * len(ranks)
    for peer in ranks:
        for index, shape in enumerate(shapes):
            (own_offsets, own_sizes), (offsets, sizes) = own(shape, rank), others(shape, peer)
            begins = [max(pair) for pair in zip(own_offsets, offsets, strict=True)]
            ends = [min(o + s, p + t) for o, s, p, t in zip(own_offsets, own_sizes, offsets, sizes, strict=True)]
            shared = [end - begin for begin, end in zip(begins, ends, strict=True)]
            if min(shared) > 0:
                local = [begin - offset for begin, offset in zip(begins, own_offsets, strict=True)]
                table += [peer, index, -1, len(shape), *local, *shared]
                peer_bytes[peer] += math.prod(shared) * torch.float32.itemsize
    return torch.tensor(table, dtype=torch.int64), peer_bytes


def flat_exchange(exchange: Exchange) -> Callable[[], object]:
    source = torch.zeros(sum(exchange.sent_bytes), dtype=torch.uint8)
    target = torch.zeros(sum(exchange.received_bytes), dtype=torch.uint8)
    return lambda: dist.all_to_all_single(target, source, exchange.received_bytes, exchange.sent_bytes)


@dataclass
class Workload:
    """What ranks hold and want. Where both can be DTensors: the shape of the wanted mesh, and the placements."""

    shapes: list[Shape]
    held: Layout
    wanted: Layout
    mesh_shape: Shape = ()
    placements: tuple[Placement, ...] = ()

    def contenders(self, folder: str) -> Contenders:
        exchange = exchange_of(self.shapes, self.held, self.wanted)
        contenders: dict[str, Callable[[], object]] = {
            LIMIT: flat_exchange(exchange),
            OURS: exchange.run,
            PLANNED: exchange.planned().run,
        }
        if self.placements:
            return contenders | self._whole_reshards(exchange, folder)
        return contenders | {KEPT: self._plan_of_boxes(exchange).run}

    def _plan_of_boxes(self, exchange: Exchange) -> TransferPlan:
        """Of tensors that say themselves which box they hold."""

        def state(tensors: Sequence[Tensor], layout: Layout) -> dict[str, Tensor]:
            for tensor, shape in zip(tensors, self.shapes, strict=True):
                offsets, sizes = layout(shape, dist.get_rank())
                tensor.global_shape, tensor.global_offsets = shape, (tuple(offsets),)
                tensor.local_offsets, tensor.local_sizes = ((0,) * len(shape),), (tuple(sizes),)
            return {f"{index}": tensor for index, tensor in enumerate(tensors)}

        return tte.transfer.plan_reshard(state(exchange.sources, self.held), state(exchange.targets, self.wanted))

    def _whole_reshards(self, exchange: Exchange, folder: str) -> Contenders:
        old_mesh = init_device_mesh("cpu", (WORLD_SIZE,))
        new_mesh = old_mesh if self.mesh_shape == (WORLD_SIZE,) else init_device_mesh("cpu", self.mesh_shape)
        sources, targets = {}, {}
        for index, shape in enumerate(self.shapes):
            new = [Shard(min(placement.dim, len(shape) - 1)) for placement in self.placements]
            sources[f"{index}"] = DTensor.from_local(exchange.sources[index], old_mesh, [Shard(0)])
            targets[f"{index}"] = DTensor.from_local(exchange.targets[index], new_mesh, new)
        plan = tte.transfer.plan_reshard(sources, targets)
        names = (f"{folder}/checkpoint{number}" for number in itertools.count())

        def redistribute() -> None:
            for name, source in sources.items():
                source.redistribute(new_mesh, targets[name].placements)

        def gather_and_distribute() -> None:
            for name, source in sources.items():
                distribute_tensor(source.full_tensor(), new_mesh, targets[name].placements)

        def dcp_save(state: dict[str, DTensor], path: str) -> None:
            dcp.save(state, checkpoint_id=path)

        def dcp_load(state: dict[str, DTensor], path: str) -> None:
            dcp.load(state, checkpoint_id=path)

        def save_and_load(save: Callable[[Any, str], object], load: Callable[[Any, str], object]) -> None:
            path = next(names)
            save(sources, path)
            load(targets, path)
            dist.barrier()
            if dist.get_rank() == 0:
                shutil.rmtree(path)

        return {
            KEPT: plan.run,
            "tte.reshard, planning included": lambda: tte.reshard(sources, targets),
            **({"DTensor.redistribute": redistribute} if new_mesh is old_mesh else {}),
            "full_tensor + distribute_tensor": gather_and_distribute,
            "tte.save + tte.load, RAM disk": lambda: save_and_load(tte.save, tte.load),
            "dcp.save + dcp.load, RAM disk": lambda: save_and_load(dcp_save, dcp_load),
        }


class FusedGenerator:
    """An fp32 trainer by rows of 4, and a bf16 generator of 2 that has q, k and v, and gate and up, in one tensor each.

    As engines have it, each rank of the generator holds its part of q, then of k, then of v.
    """

    def __init__(self, hidden: int, feed_forward: int, num_layers: int) -> None:
        attention, wide, narrow = (hidden, hidden), (feed_forward, hidden), (hidden, feed_forward)
        of_layer = {"q": attention, "k": attention, "v": attention, "o": attention}
        of_layer |= {"gate": wide, "up": wide, "down": narrow}
        self.sources = {f"{layer}.{name}": shape for layer in range(num_layers) for name, shape in of_layer.items()}
        self.shapes = list(self.sources.values())

        def fused(*names: str) -> Rule:
            by_ranks = [transforms.reshape([2, -1, hidden]), transforms.concat(1), transforms.reshape([-1, hidden])]
            return Rule([f"*.{name}" for name in names], f"*.{'_'.join(names)}", by_ranks)

        rules = [fused("q", "k", "v"), fused("gate", "up"), Rule("*.o", "*.o"), Rule("*.down", "*.down")]
        self.transform = Transform(rules)
        of_layer = {
            "q_k_v": (3 * hidden, hidden),
            "gate_up": (2 * feed_forward, hidden),
            "o": attention,
            "down": narrow,
        }
        self.targets = {f"{layer}.{name}": shape for layer in range(num_layers) for name, shape in of_layer.items()}

    def contenders(self, folder: str) -> Contenders:
        rank = dist.get_rank()
        mesh, of_generator = init_device_mesh("cpu", (WORLD_SIZE,)), dist.new_group([0, 1])
        source = {
            name: DTensor.from_local(torch.randn(shape[0] // WORLD_SIZE, shape[1]), mesh, [Shard(0)])
            for name, shape in self.sources.items()
        }
        target = None
        if rank < 2:
            halves = DeviceMesh.from_group(of_generator, "cpu")
            target = {}
            for name, (height, width) in self.targets.items():
                dim = 1 if name.endswith(("o", "down")) else 0
                sizes = (height // 2, width) if dim == 0 else (height, width // 2)
                target[name] = DTensor.from_local(torch.zeros(sizes, dtype=torch.bfloat16), halves, [Shard(dim)])
        options: dict[str, Any] = {"transform": self.transform, "cast": "allow"}
        plan = tte.transfer.plan_reshard(source, target, **options)

        def gather_and_fuse() -> None:
            whole = {name: tensor.full_tensor() for name, tensor in source.items()}
            if target is None:
                return
            for name, tensor in target.items():
                layer, _, parts = name.partition(".")
                names = parts.split("_")
                if len(names) > 1:
                    mine = [whole[f"{layer}.{part}"].chunk(2)[rank] for part in names]
                    tensor.to_local().copy_(torch.cat(mine))
                else:
                    tensor.to_local().copy_(whole[name].chunk(2, 1)[rank])

        sent, received = [0] * WORLD_SIZE, [0] * WORLD_SIZE
        for (sender, receiver), num_bytes in plan.bytes_between.items():
            if sender == rank:
                sent[receiver] = num_bytes
            if receiver == rank:
                received[sender] = num_bytes
        flat, filled = torch.zeros(sum(sent), dtype=torch.uint8), torch.zeros(sum(received), dtype=torch.uint8)
        return {
            LIMIT: lambda: dist.all_to_all_single(filled, flat, received, sent),
            KEPT: plan.run,
            "tte.reshard, planning included": lambda: tte.reshard(source, target, **options),
            "full_tensor, then cat, cast and copy": gather_and_fuse,
        }


FUSED = FusedGenerator(512, 1152, LAYERS)

FUSED_NAME = "564 MB in 350, fp32 rows of 4 -> fused bf16 of 2"
OVER_LINK = "over 1 Gbit/s"

WORKLOADS: dict[str, Workload | FusedGenerator] = {
    FUSED_NAME: FUSED,
    "341 MB in 300, rows of 4 -> columns of 4": Workload(SHAPES, rows(4), columns(4), (4,), (Shard(1),)),
    "341 MB in 300, rows of 4 -> FSDP 2 x TP 2": Workload(
        SHAPES, rows(4), rows_and_columns, (2, 2), (Shard(0), Shard(1))
    ),
    "341 MB in 300, columns of 4 -> rows of 4": Workload(SHAPES, columns(4), rows(4)),
    "341 MB in 300, rows of 4 -> rows of 3": Workload(SHAPES, rows(4), rows(3)),
    "341 MB in 300, rows of 4 -> rows of 2": Workload(SHAPES, rows(4), rows(2)),
    "5,000 x 1 KiB, rows of 4 -> rows of 3": Workload(SMALL_SHAPES, rows(4), rows(3)),
    "5,000 x 1 KiB, rows of 4 -> rows of 2": Workload(SMALL_SHAPES, rows(4), rows(2)),
}


def run_rank(rank: int, folder: str, num_rounds: int, wanted: str) -> None:
    torch.set_num_threads(1)  # The ranks share this machine's cores.
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=WORLD_SIZE)
    results: dict[str, Any] = {}
    workloads = {f"{OVER_LINK}, {FUSED_NAME}": FUSED} if wanted == OVER_LINK else WORKLOADS
    for name, workload in workloads.items():
        if wanted not in name:
            continue
        results[name] = compare(workload.contenders(folder), num_rounds)
        if rank == 0:
            print_table(name, results[name])
    if rank == 0:
        torch.save(results, Path(folder, "results"))
    dist.barrier()
    dist.destroy_process_group()


def print_table(name: str, rows: dict[str, Any]) -> None:
    print(f"\n{name:58} {'time':>11} {'ratio':>7} {'memory':>9}")
    for contender, row in rows.items():
        told = row.get("refused") or (
            f"{row['seconds'] * 1e3:8.1f} ms {row['ratio']:7.2f} {row['extra_bytes'] / 1e6:6.1f} MB"
        )
        print(f"  {contender:56} {told}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="times are medians of this many (default: 9)")
    parser.add_argument("--only", default="", help="workloads whose name contains this; writes no file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        arguments = (folder, options.rounds, options.only)
        results = {}
        if options.only != OVER_LINK:
            mp.start_processes(run_rank, arguments, nprocs=WORLD_SIZE, start_method="forkserver")
            results = torch.load(Path(folder, "results"))
        if options.only in ("", OVER_LINK):
            enter_namespace()
            limit_all(1000)
            Path(folder, "rendezvous").unlink(missing_ok=True)
            arguments = (folder, 3, OVER_LINK)
            mp.start_processes(run_rank, arguments, nprocs=WORLD_SIZE, start_method="spawn")
            results |= torch.load(Path(folder, "results"))
    if options.only:
        return
    sizes = {"backend": "gloo", "processes": WORLD_SIZE, "rounds": options.rounds}
    sizes["bucket_bytes"] = ops.DEFAULT_BUCKET_BYTES
    sizes["workload_bytes"] = {
        name: sum(math.prod(shape) * 4 for shape in workload.shapes) for name, workload in WORKLOADS.items()
    }
    path = write_results("reshard", sizes=sizes, results=results)
    print(f"\nwritten: benchmarks/results/{path.name}")


if __name__ == "__main__":
    main()
