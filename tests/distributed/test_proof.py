"""Loads that prove themselves: random states on random meshes are proved, and what is wrong is found and named."""

import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from boxed_tensors import CASES, cut, parts
from checkpoints import with_tables, without_metadata
from models import local_of, poison
from random_layouts import MESH_SHAPES, build, random_layouts, random_truth
from tier import SOAK, TIER
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import torchtitan_ext as tte
from torchtitan_ext import _core
from torchtitan_ext.errors import ProofFailedError, WrongValueError
from torchtitan_ext.storage import FileReader

RunWorld = Callable[..., list[Any]]

NUM_STATES = 300 if SOAK > 1 else 42
NUM_TENSORS = 12
WORLDS = [(4, 4), (4, 1), (1, 4), (2, 4), (4, 2), (2, 1)]
if TIER != "commit":
    WORLDS = [(8, 6), (6, 8), (4, 1), (1, 4), (2, 8), (8, 2), (4, 4)]
"""Ranks that save, and that load."""


class FlippingReader(FileReader):
    """Flips one bit of a loaded tensor right after the tensors were read.

    Attributes:
        local: The local tensor; ``None`` on ranks that flip nothing.
    """

    local: torch.Tensor | None = None

    def read_data(self, *args: Any) -> Any:
        done = super().read_data(*args)
        if self.local is not None:
            flip(self.local)
        return done


def flip(local: torch.Tensor, element: int = 0) -> None:
    storage = torch.empty(0, dtype=torch.uint8).set_(local.untyped_storage())
    begin = local.storage_offset() * local.element_size()
    index = torch.unravel_index(torch.tensor(element), local.shape) if local.dim() else ()
    begin += sum(int(at) * stride for at, stride in zip(index, local.stride(), strict=True)) * local.element_size()
    storage[begin] ^= 1


def save_many(rank: int, world_size: int, seeds: list[int], folder: Path) -> None:
    for seed in seeds:
        truth = random_truth(seed, NUM_TENSORS)
        state, orders = build(truth, random_layouts(seed, world_size, truth))
        tte.save(state, folder / str(seed), planner=tte.SavePlanner(layouts=orders), fingerprints=True)


def load_many(rank: int, world_size: int, seeds: list[int], folder: Path) -> None:
    for seed in seeds:
        truth, path = random_truth(seed, NUM_TENSORS), folder / str(seed)
        state, orders = build(truth, random_layouts(seed + 1000, world_size, truth))
        poison(state)
        planner = tte.LoadPlanner(layouts=orders)
        report = tte.load(state, path, planner=planner, prove=True)
        assert report is not None and report.proof is not None
        assert (sorted(report.proof.proved), report.proof.unproved) == (sorted(truth), {}), seed
        check_flip(random.Random(seed), state, path, planner)


def check_flip(draw: random.Random, state: dict[str, DTensor], path: Path, planner: tte.LoadPlanner) -> None:
    """One bit, of a random tensor on a random rank that holds elements of it, is found there and nowhere else."""
    held: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(held, [name for name, value in state.items() if local_of(value).numel() > 0])
    rank, name = draw.choice([(rank, name) for rank, names in enumerate(held) for name in names])
    reader = FlippingReader(path)
    reader.local = local_of(state[name]) if rank == dist.get_rank() else None
    with pytest.raises(ProofFailedError) as raised:
        tte.load(state, storage_reader=reader, planner=planner, prove=True)
    (part,) = raised.value.parts
    assert (raised.value.fqns, part.fqn, part.ranks, part.is_in_file) == ((name,), name, (rank,), False)
    assert (path / part.file).exists()


@pytest.mark.sampled(0.34)
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("position", range(len(WORLDS)), ids=[f"{old} to {new}" for old, new in WORLDS])
def test_random_states_and_meshes(run_world: RunWorld, tmp_path: Path, position: int) -> None:
    old, new = WORLDS[position]
    seeds = list(range(position, NUM_STATES, len(WORLDS)))
    run_world(old, save_many, seeds, tmp_path)
    run_world(new, load_many, seeds, tmp_path)


LAYOUTS: list[tuple[tuple[int, ...], list[Any]]] = [
    ((1,), [Shard(0)]),
    ((2,), [Shard(0)]),
    ((4,), [Shard(1)]),
    ((4,), [Replicate()]),
    ((2, 2), [Replicate(), Shard(0)]),
    ((2, 2), [Shard(0), Shard(1)]),
    ((3,), [Shard(0)]),
    ((2, 2), [Shard(0), Shard(0)]),
]
LAYOUT_IDS = [f"{'x'.join(map(str, shape))}-{placements}" for shape, placements in LAYOUTS]


def state_of(mesh_shape: tuple[int, ...], placements: list[Any], first: float = 0) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", mesh_shape)
    whole = torch.arange(35.0).view(7, 5) + first
    return {name: distribute_tensor(whole + add, mesh, placements) for add, name in enumerate(["w_a", "w_b", "w_c"])}


def save_layout(rank: int, world_size: int, layout: int, path: Path) -> None:
    tte.save(state_of(*LAYOUTS[layout]), path, fingerprints=True)


def swap_entries(path: Path, how: str) -> None:
    """Swaps the storage entries of two keys, and makes the index match: of the metadata only, or its records too."""
    index = _core.parse_index((path / ".tte_index").read_bytes(), "index")
    content = b""
    if (path / ".metadata").exists():
        metadata = pickle.loads((path / ".metadata").read_bytes())
        entries = metadata.storage_data
        for place in [place for place in entries if place.fqn == "w_a"]:
            other = next(one for one in entries if one.fqn == "w_b" and one.offset == place.offset)
            entries[place], entries[other] = entries[other], entries[place]
        content = pickle.dumps(metadata)
        (path / ".metadata").write_bytes(content)
    files = []
    for file in index.files.values():
        records = file.records
        if how == "records too":
            records = records.replace(b"w_a", b"w_x").replace(b"w_b", b"w_a").replace(b"w_x", b"w_b")
        places = (file.name, file.rank, file.num_bytes, file.footer_offset, file.footer_digest)
        files.append(_core.RankFile(*places, records, file.sums))
    num_bytes = len(content) if content else -1
    notes = list(index.notes.items())
    sealed = _core.encode_index(index.save_id, num_bytes, _core.digest(content), notes, files, has_sums=True)
    (path / ".tte_index").write_bytes(with_tables(sealed, index.tables) if index.tables else sealed)


def load_swapped(rank: int, world_size: int, layout: int, path: Path) -> None:
    state, truth = state_of(*LAYOUTS[layout], first=100), state_of(*LAYOUTS[layout])
    tte.load(state, storage_reader=FileReader(path, verify="all"))  # no checksum sees it
    mine = local_of(state["w_a"])
    assert torch.equal(mine, local_of(truth["w_b"]))
    with pytest.raises(ProofFailedError, match="w_a.*has other elements there than were saved under this") as raised:
        tte.load(state, path, prove=True)
    assert raised.value.fqns == ("w_a", "w_b")
    of_key: dict[str, set[int]] = {}
    for part in raised.value.parts:
        of_key.setdefault(part.fqn, set()).update(part.ranks)
        assert part.is_in_file and (path / part.file).exists()
    held: list[Any] = [None] * world_size
    dist.all_gather_object(held, mine.numel() > 0)
    holders = {rank for rank, holds in enumerate(held) if holds}
    assert of_key == {"w_a": holders, "w_b": holders}


@pytest.mark.sampled(0.25)
@pytest.mark.parametrize("how", ["metadata only", "records too", "no metadata"])
@pytest.mark.parametrize("layout", range(len(LAYOUTS)), ids=LAYOUT_IDS)
def test_two_swapped_entries_are_found(run_world: RunWorld, tmp_path: Path, layout: int, how: str) -> None:
    saved_by = (layout + 3) % len(LAYOUTS)
    world = torch.Size(LAYOUTS[saved_by][0]).numel()
    run_world(world, save_layout, saved_by, tmp_path / "step-1")
    if how == "no metadata":
        without_metadata(tmp_path / "step-1")
    swap_entries(tmp_path / "step-1", "records too" if how == "no metadata" else how)
    run_world(torch.Size(LAYOUTS[layout][0]).numel(), load_swapped, layout, tmp_path / "step-1")


def prove_replicas(rank: int, world_size: int, path: Path) -> None:
    """One rank of HSDP differs, in tensors that are sharded once and twice, and in a plain one."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    whole = torch.arange(35.0).view(7, 5)
    state: dict[str, Any] = {
        "rows": distribute_tensor(whole, mesh, [Replicate(), Shard(0)]),
        "all": distribute_tensor(whole, mesh, [Replicate(), Replicate()]),
        "plain": whole.clone(),
    }
    tte.save(state, path, fingerprints=True)
    for name in state:
        for bad in range(world_size):
            reader = FlippingReader(path)
            reader.local = local_of(state[name]) if rank == bad else None
            with pytest.raises(ProofFailedError) as raised:
                tte.load(state, storage_reader=reader, prove=True)
            assert [(part.fqn, part.ranks) for part in raised.value.parts] == [(name, (bad,))]
    bad_ones = FlippingReader(path)
    bad_ones.local = local_of(state["all"]) if rank in (1, 2) else None
    with pytest.raises(ProofFailedError, match=r"all\[0:7, 0:5\] of __\d_\w+.distcp on rank\(s\) 1, 2; the file has"):
        tte.load(state, storage_reader=bad_ones, prove=True)


def test_a_replica_that_differs_is_named(run_world: RunWorld, tmp_path: Path) -> None:
    run_world(4, prove_replicas, tmp_path)


def prove_boxes(rank: int, world_size: int, case: str, path: Path) -> None:
    shape, boxes = CASES[case]
    whole = torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape)
    state = {"w": cut(whole, boxes[rank])}
    tte.save(state, path, fingerprints=True)
    for part in parts(state["w"]):
        part.zero_()
    report = tte.load(state, path, prove=True)
    assert report is not None and report.proof is not None and report.proof.proved == ("w",), report
    if whole.numel() == 0 or rank >= len(boxes):
        return
    for bad in [rank for rank, held in enumerate(boxes) if any(torch.Size(sizes).numel() for _, sizes in held)]:
        reader = FlippingReader(path)
        reader.local = next(part for part in parts(state["w"]) if part.numel() > 0) if rank == bad else None
        with pytest.raises(ProofFailedError) as raised:
            tte.load(state, storage_reader=reader, prove=True)
        assert {rank for part in raised.value.parts for rank in part.ranks} == {bad}


@pytest.mark.parametrize("case", CASES)
def test_tensors_with_boxes_of_their_own(run_world: RunWorld, tmp_path: Path, case: str) -> None:
    run_world(len(CASES[case][1]), prove_boxes, case, tmp_path)


def prove_alone(rank: int, world_size: int, path: Path) -> None:
    """A load of each rank alone: what is on a mesh of all ranks cannot be added up."""
    state = {**state_of((2,), [Shard(0)]), "plain": torch.arange(3)}
    tte.save(state, path, fingerprints=True)
    report = tte.load(state, path, prove=True, no_dist=True)
    assert report is not None and report.proof is not None
    assert report.proof.proved == ("plain",) and sorted(report.proof.unproved) == ["w_a", "w_b", "w_c"]


def test_a_load_of_one_rank_of_a_mesh(run_world: RunWorld, tmp_path: Path) -> None:
    run_world(2, prove_alone, tmp_path)


def prove_stages(rank: int, world_size: int, path: Path) -> None:
    """Each rank has keys of its own, and is told of what is unproved on the other."""
    state: dict[str, Any] = {f"layers.{rank}": torch.arange(4) + rank, "shared": torch.ones(3)}
    tte.save(state, path, fingerprints=True)
    if rank == 1:
        state["layers.1"] = torch.zeros(4, dtype=torch.float64)
    report = tte.load(state, path, planner=tte.LoadPlanner(cast="allow"), prove=True)
    assert report is not None and report.proof is not None
    assert report.proof.proved == ("layers.0", "shared")
    assert report.proof.unproved == {"layers.1": "it was cast from torch.int64 to torch.float64"}


def test_ranks_with_keys_of_their_own(run_world: RunWorld, tmp_path: Path) -> None:
    run_world(2, prove_stages, tmp_path)


def refuse_without_fingerprints(rank: int, world_size: int, path: Path) -> None:
    state = state_of((2,), [Shard(0)])
    tte.save(state, path)
    poison(state)
    with pytest.raises(WrongValueError, match=r"has no fingerprints; save with tte.save\(..., fingerprints=True\)"):
        tte.load(state, path, prove=True)
    assert set(local_of(state["w_a"]).flatten().tolist()) == {77.0}, "nothing was changed"


def test_a_checkpoint_without_fingerprints_is_refused(run_world: RunWorld, tmp_path: Path) -> None:
    run_world(2, refuse_without_fingerprints, tmp_path)


def test_all_worlds_are_known() -> None:
    assert {size for pair in WORLDS for size in pair} <= MESH_SHAPES.keys()
