"""What a dry run says against what real ranks do: bytes per rank, refusals."""

import dataclasses
import random
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from models import (
    BY_NAME,
    HANDMADE_BY_NAME,
    INTERLEAVED_QKV,
    UNEVEN,
    HandMade,
    Layout,
    build_handmade,
    build_model,
    distribute_by_index,
    handmade_truth,
    left_to_right,
    random_whole,
    trained,
)
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

import torchtitan_ext as tte
from torchtitan_ext.elastic import ElasticPolicy, RngState
from torchtitan_ext.errors import StateRefusedError

ROWS_OF_TWO = left_to_right("rows", (2,), Shard(0))


class Counting(tte.LoadPlanner):
    """Notes what its rank reads."""

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        plan = super().finish_plan(central_plan)
        self.seen = [plan.items, self.metadata]
        return plan

    def with_rules(self, rules: Any) -> Any:
        self.copied = super().with_rules(rules)
        return self.copied


def reads_of(items: list[Any], metadata: Metadata) -> int:
    """The bytes that are read; those of an optimizer's options too, which each rank reads before the plan is made."""
    options = [index for index in metadata.storage_data if ".param_groups." in index.fqn]
    num_bytes = sum(metadata.storage_data[index].length for index in options)
    for item in items:
        place = metadata.storage_data[item.storage_index]
        if item.type == LoadItemType.BYTE_IO:
            num_bytes += place.length
        else:
            dtype = metadata.state_dict_metadata[item.storage_index.fqn].properties.dtype
            num_bytes += item.lengths.numel() * dtype.itemsize
    return num_bytes


def state_of(layout: Layout | HandMade) -> dict[str, Any]:
    if isinstance(layout, HandMade):
        return {"model": build_handmade(layout, handmade_truth()), "step": 3}
    return {**trained(build_model(layout, UNEVEN)), "step": 3, "names": ["a", "b"]}


def save_and_foresee(rank: int, world_size: int, layout: Layout | HandMade, path: Path) -> dict[str, Any]:
    state = state_of(layout)
    tte.save(state, path)
    return tte.dry_run(state).to_dict()


def load_and_foresee(
    rank: int, world_size: int, layout: Layout | HandMade, path: Path, has_values: bool = True
) -> tuple[dict[str, Any], int]:
    state = state_of(layout) if has_values else trained(build_model(layout, UNEVEN))
    foreseen = tte.dry_run(state, checkpoint=path)
    planner = Counting()
    tte.load(state, path, planner=planner)
    return foreseen.to_dict(), reads_of(*planner.copied.seen)


def without_viewer(found: Mapping[str, Any]) -> Any:
    return found["save"], found["world"]


def check_save(found: Mapping[str, Any], path: Path) -> None:
    """What lies in the files of all ranks, to the byte."""
    save = found["save"]
    metadata = tte.FileReader(path).read_metadata()
    sizes: Counter[str] = Counter()
    for fqn, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, BytesStorageMetadata):
            place = metadata.storage_data[MetadataIndex(fqn)]
            sizes[place.relative_path.partition(".")[0]] += place.length
            continue
        for chunk in entry.chunks:
            place = metadata.storage_data[MetadataIndex(fqn, chunk.offsets)]
            sizes[place.relative_path.partition(".")[0]] += chunk.sizes.numel() * entry.properties.dtype.itemsize
    assert {f"__{one['rank']}_0": one["num_bytes"] for one in save["ranks"] if one["num_bytes"]} == +sizes
    assert save["problems"] == ()


SAVES = [
    BY_NAME["fsdp4_tp2"],
    BY_NAME["hsdp2x2_tp2"],
    BY_NAME["fsdp2"],
    HANDMADE_BY_NAME["strided_1d_dim1"],
    HANDMADE_BY_NAME["three_axes_nested"],
]


@pytest.mark.sampled(0.34)
@pytest.mark.parametrize("layout", SAVES, ids=lambda layout: layout.name)
def test_ranks_write_what_every_rank_foresees(run_world, tmp_path: Path, layout: Any) -> None:
    found = run_world(layout.world_size, save_and_foresee, layout, tmp_path)
    assert all(without_viewer(one) == without_viewer(found[0]) for one in found)
    check_save(found[0], tmp_path)


LOADS = [
    (BY_NAME["fsdp4_tp2"], BY_NAME["hsdp2x2"]),
    (BY_NAME["hsdp2x2"], BY_NAME["fsdp2_tp4"]),
    (BY_NAME["fsdp2_tp2"], BY_NAME["fsdp8"]),
    (HANDMADE_BY_NAME["three_axes_nested"], HANDMADE_BY_NAME["strided_1d_dim1"]),
    (HANDMADE_BY_NAME["strided_1d"], HANDMADE_BY_NAME["shard0_shard0_wide"]),
]


@pytest.mark.sampled(0.34)
@pytest.mark.parametrize(("saved", "wanted"), LOADS, ids=lambda layout: layout.name)
def test_ranks_read_what_every_rank_foresees(run_world, tmp_path: Path, saved: Any, wanted: Any) -> None:
    run_world(saved.world_size, save_and_foresee, saved, tmp_path)
    found = run_world(wanted.world_size, load_and_foresee, wanted, tmp_path)
    for foreseen, _ in found:
        assert foreseen["load"]["problems"] == ()
        ranks = foreseen["load"]["ranks"]
        assert [one["num_bytes"] for one in ranks] == [read for _, read in found]


def save_alike_described(rank: int, world_size: int, layout: Layout, path: Path) -> None:
    tte.save(trained(build_model(layout, UNEVEN)), path)


@pytest.mark.parametrize(("saved", "wanted"), [("fsdp2", "fsdp4"), ("fsdp2_tp2", "fsdp4_tp2")])
def test_a_described_mesh_is_as_a_real_one(run_world, tmp_path: Path, saved: str, wanted: str) -> None:
    """The mesh of the checkpoint's own axes, in other sizes: which dims they cut is found in the checkpoint."""
    run_world(BY_NAME[saved].world_size, save_alike_described, BY_NAME[saved], tmp_path)
    layout = BY_NAME[wanted]
    found = tte.dry_run(tmp_path, mesh=dict(zip(layout.axes, layout.mesh_shape, strict=True)))
    real = run_world(layout.world_size, load_and_foresee, layout, tmp_path, False)
    assert [one.num_bytes for one in found.load.ranks] == [read for _, read in real]
    written = [one["num_bytes"] for one in real[0][0]["save"]["ranks"]]
    assert sum(one.num_bytes for one in found.save.ranks) == sum(written)
    if "tp" not in layout.axes:  # there norms lie on the mesh of dp alone: other ranks write them
        assert [one.num_bytes for one in found.save.ranks] == written


def load_safetensors(rank: int, world_size: int, shapes: Mapping[str, tuple[int, ...]], path: Path) -> Any:
    planner = Counting()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    state = {key: distribute_by_index(torch.zeros(shape), mesh, ROWS_OF_TWO) for key, shape in shapes.items()}
    foreseen = tte.dry_run(state, checkpoint=path)
    tte.load(state, path, planner=planner)
    right = {key: torch.equal(one.full_tensor(), torch.ones(shapes[key])) for key, one in state.items()}
    items, _ = planner.copied.seen
    return foreseen, 4 * sum(item.lengths.numel() for item in items), right


def test_safetensors_files_are_read_as_foreseen(run_world, tmp_path: Path) -> None:
    save_file = pytest.importorskip("safetensors.torch").save_file
    shapes = {"a": (9, 4), "b": (16, 3), "c": (5,)}
    for number, keys in enumerate((("a", "b"), ("c",))):
        save_file({key: torch.ones(shapes[key]) for key in keys}, tmp_path / f"model-{number}.safetensors")
    found = run_world(2, load_safetensors, shapes, tmp_path)
    described = tte.dry_run(tmp_path, mesh={"dp": 2}).load
    for foreseen, _, right in found:
        assert all(right.values())
        assert foreseen.problems == ()
        for load in (foreseen.load, described):
            assert [one.num_bytes for one in load.ranks] == [reads for _, reads, _ in found]


# Axes of which none cuts what another has cut: the shape on one rank then tells the others'.
MESHES = {2: [(2,)], 3: [(3,)], 4: [(4,), (2, 2)], 6: [(3, 2)], 8: [(8,), (2, 4), (2, 2, 2)]}


def random_state(rank: int, world_size: int, seed: int, placing: int) -> dict[str, Any]:
    """Tensors of any placements, empty, without dims or tied, plain tensors, values, and values of single ranks.

    Args:
        seed: Of shapes and values.
        placing: Of mesh and placements.
    """
    draw, place = random.Random(seed), random.Random(placing)
    shape = place.choice(MESHES[world_size])
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=tuple(f"axis{axis}" for axis in range(len(shape))))
    layers = {}
    for layer in range(12):
        sizes = tuple(draw.choice((0, 1, 2, 3, 7, 8, 13)) for _ in range(draw.randrange(4)))
        whole = random_whole(sizes, draw.choice((torch.float32, torch.bfloat16, torch.int64)), seed + layer)
        free = list(range(len(sizes)))
        placements: list[Placement] = []
        for _ in shape:
            is_cut = bool(free) and place.random() < 0.7
            placements.append(Shard(free.pop(place.randrange(len(free)))) if is_cut else Replicate())
        is_plain = not sizes or place.random() < 0.1
        layout = left_to_right("", shape, *placements)
        layers[str(layer)] = {"w": whole if is_plain else distribute_by_index(whole, mesh, layout)}
    state: dict[str, Any] = {
        "layers": layers,
        "tied": layers["3"]["w"],
        "step": seed,
        "names": ["a"] * draw.randrange(9),
    }
    if draw.random() < 0.5:
        state["rng"] = {f"rank_{rank}": [rank, "x" * draw.randrange(99)]}
    return state


def save_random(rank: int, world_size: int, seeds: range, path: Path) -> list[dict[str, Any]]:
    found = []
    for seed in seeds:
        state = random_state(rank, world_size, seed, seed)
        tte.save(state, path / str(seed))
        found.append(tte.dry_run(state).to_dict())
    return found


def load_random(rank: int, world_size: int, seeds: range, path: Path) -> list[tuple[Any, Any, Any, Any]]:
    """Ranks and problems that were foreseen, and what was read or refused."""
    found = []
    for seed in seeds:
        state = random_state(rank, world_size, seed, 1000 + seed)
        foreseen = tte.dry_run(state, checkpoint=path / str(seed)).to_dict()["load"]
        planner = Counting()
        reads, refused = None, []
        try:
            tte.load(state, path / str(seed), planner=planner)
            reads = reads_of(*planner.copied.seen)
        except StateRefusedError as error:
            refused = [dataclasses.asdict(problem) for problem in error.problems]
        found.append((foreseen["ranks"], foreseen["problems"], reads, refused))
    return found


@pytest.mark.sampled(0.4)
@pytest.mark.parametrize(("saved", "wanted"), [(2, 3), (3, 8), (4, 4), (6, 4), (8, 2)])
def test_random_states_are_saved_and_loaded_as_foreseen(run_world, tmp_path: Path, saved: int, wanted: int) -> None:
    seeds = range(100 * saved, 100 * saved + 6)
    for found in zip(*run_world(saved, save_random, seeds, tmp_path), seeds, strict=True):
        *of_ranks, seed = found
        assert all(without_viewer(one) == without_viewer(of_ranks[0]) for one in of_ranks)
        check_save(of_ranks[0], tmp_path / str(seed))
    loaded = list(zip(*run_world(wanted, load_random, seeds, tmp_path), strict=True))
    assert any(read is not None for of_ranks in loaded for _, _, read, _ in of_ranks)
    for of_ranks in loaded:
        reads = [read for _, _, read, _ in of_ranks]
        for ranks, problems, _, refused in of_ranks:
            assert sorted(map(str, problems)) == sorted(map(str, refused))
            if not refused:
                assert [one["num_bytes"] for one in ranks] == reads


def save_of_two(rank: int, world_size: int, path: Path) -> None:
    state = {"dataloader": {f"dp_rank_{rank}": rank}, "model": {"float32": torch.zeros(17, 3), "w": torch.zeros(4)}}
    tte.save(state, path)
    tte.save({"rng": RngState(7, device="cpu", step=lambda: 12), "step": 3}, path / "rng")


def load_on_four(rank: int, world_size: int, path: Path) -> tuple[Any, Any, Any, Any]:
    state: dict[str, Any] = {
        "dataloader": {f"dp_rank_{rank}": rank},
        "model": {"float32": torch.zeros(4, 5), "w": torch.zeros(4, dtype=torch.int64), "extra": torch.zeros(3)},
    }
    foreseen = tte.dry_run(state, checkpoint=path)
    with pytest.raises(StateRefusedError) as refused:
        tte.load(state, path)
    state = {"rng": RngState(7, device="cpu"), "step": 0}
    known = tte.dry_run(state, checkpoint=path / "rng", policy=ElasticPolicy()).load
    reader = tte.FileReader(path / "rng")
    report = tte.load(state, storage_reader=reader, policy=ElasticPolicy())
    return foreseen.load.problems, refused.value.problems, known, (report.components, reader.num_bytes_read)


def test_refusals_of_a_load_and_what_generators_do_are_foreseen_word_by_word(run_world, tmp_path: Path) -> None:
    run_world(2, save_of_two, tmp_path)
    path = tmp_path / "rng"
    plain = {"rng": RngState(7, device="cpu"), "step": 0}
    loads = [
        tte.dry_run(path, mesh={"dp": 4}, policy=ElasticPolicy()).load,
        tte.dry_run(plain, checkpoint=path, mesh={"dp": 4}, policy=ElasticPolicy()).load,
    ]
    for rank, (foreseen, refused, known, (lines, num_bytes)) in enumerate(run_world(4, load_on_four, tmp_path)):
        for load in (known, *loads):
            assert set(load.report.components) == set(lines) and load.problems == ()
            assert load.ranks[rank].num_bytes == num_bytes
        assert "seeded from seed 7, step 12 and rank: 2 -> 4 ranks" in {line.outcome for line in lines}
        assert {problem.kind for problem in refused} == {"missing_key", "wrong_shape", "wrong_dtype"}
        assert set(foreseen) == set(refused)
    described = tte.dry_run(tmp_path, mesh={"dp": 4})
    (missing,) = described.load.problems
    assert missing.fqn == "dataloader.dp_rank_2"
    assert "others up to dataloader.dp_rank_3" in missing.detail


def refuse_save(rank: int, world_size: int) -> tuple[Any, Any]:
    state = build_handmade(INTERLEAVED_QKV, {"wqkv": torch.zeros(12, 1)})
    foreseen = tte.dry_run(state)
    with pytest.raises(StateRefusedError) as refused:
        tte.save(state, "/tmp/never-written")
    return foreseen.save.problems, refused.value.problems


def test_refusals_of_a_save_are_foreseen_word_by_word(run_world) -> None:
    for foreseen, refused in run_world(4, refuse_save):
        assert foreseen == refused
        assert {problem.kind for problem in refused} == {"layout_in_doubt"}
