"""What a dry run says against what real ranks do: sizes of files, reads, bytes and files per rank, refusals."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from models import (
    HANDMADE,
    INTERLEAVED_QKV,
    LAYOUTS,
    UNEVEN,
    HandMade,
    Layout,
    build_handmade,
    build_model,
    handmade_truth,
    trained,
)
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan

import torchtitan_ext as tte
from torchtitan_ext.errors import StateRefusedError

LAYOUT = {layout.name: layout for layout in LAYOUTS}
BY_HAND = {layout.name: layout for layout in HANDMADE}


class Counting(tte.LoadPlanner):
    """Notes what its rank reads."""

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        plan = super().finish_plan(central_plan)
        self.seen = [plan.items, self.metadata]
        return plan

    def with_rules(self, rules: Any) -> Any:
        self.copied = super().with_rules(rules)
        return self.copied


def reads_of(items: list[Any], metadata: Metadata) -> tuple[int, int, int]:
    """Reads, bytes and files."""
    num_bytes = 0
    files = set()
    for item in items:
        place = metadata.storage_data[item.storage_index]
        files.add(place.relative_path)
        if item.type == LoadItemType.BYTE_IO:
            num_bytes += place.length
        else:
            dtype = metadata.state_dict_metadata[item.storage_index.fqn].properties.dtype
            num_bytes += item.lengths.numel() * dtype.itemsize
    return len(items), num_bytes, len(files)


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
) -> tuple[dict[str, Any], tuple[int, int, int]]:
    state = state_of(layout) if has_values else trained(build_model(layout, UNEVEN))
    foreseen = tte.dry_run(state, checkpoint=path)
    planner = Counting()
    tte.load(state, path, planner=planner)
    return foreseen.to_dict(), reads_of(*planner.copied.seen)


def without_viewer(found: Mapping[str, Any]) -> Any:
    return found["save"]["ranks"], found["save"]["num_parts"], found["world"], found["copies"]


SAVES = [
    LAYOUT["fsdp4_tp2"],
    LAYOUT["hsdp2x2_tp2"],
    LAYOUT["fsdp2"],
    BY_HAND["strided_1d_dim1"],
    BY_HAND["three_axes_nested"],
]


@pytest.mark.parametrize("layout", SAVES, ids=lambda layout: layout.name)
def test_files_of_a_save_have_the_sizes_that_every_rank_foresees(run_world, tmp_path: Path, layout: Any) -> None:
    found = run_world(layout.world_size, save_and_foresee, layout, tmp_path)
    assert all(without_viewer(one) == without_viewer(found[0]) for one in found)
    ranks = found[0]["save"]["ranks"]
    sizes = {f"__{one['rank']}_0.distcp": one["file_bytes"] for one in ranks if one["file_bytes"]}
    assert sizes == {path.name: os.path.getsize(path) for path in tmp_path.glob("*.distcp")}
    metadata = tte.FileReader(tmp_path).read_metadata()
    assert found[0]["save"]["num_parts"] == len(metadata.storage_data)
    assert sum(one["num_records"] for one in ranks) == len(metadata.storage_data)
    assert found[0]["save"]["problems"] == ()


LOADS = [
    (LAYOUT["fsdp4_tp2"], LAYOUT["hsdp2x2"]),
    (LAYOUT["hsdp2x2"], LAYOUT["fsdp2_tp4"]),
    (LAYOUT["fsdp2_tp2"], LAYOUT["fsdp8"]),
    (BY_HAND["three_axes_nested"], BY_HAND["strided_1d_dim1"]),
    (BY_HAND["strided_1d"], BY_HAND["shard0_shard0_wide"]),
]


@pytest.mark.parametrize(("saved", "wanted"), LOADS, ids=lambda layout: layout.name)
def test_ranks_read_what_every_rank_foresees(run_world, tmp_path: Path, saved: Any, wanted: Any) -> None:
    run_world(saved.world_size, save_and_foresee, saved, tmp_path)
    found = run_world(wanted.world_size, load_and_foresee, wanted, tmp_path)
    for foreseen, _ in found:
        assert foreseen["load"]["problems"] == ()
        ranks = foreseen["load"]["ranks"]
        assert [(one["num_reads"], one["num_bytes"], one["num_files"]) for one in ranks] == [read for _, read in found]
    sizes = {path.name: os.path.getsize(path) for path in tmp_path.glob("*.distcp")}
    assert found[0][0]["load"]["file_bytes"] == sizes


def save_alike_described(rank: int, world_size: int, layout: Layout, path: Path) -> None:
    tte.save(trained(build_model(layout, UNEVEN)), path)


@pytest.mark.parametrize(("saved", "wanted"), [("fsdp2", "fsdp4"), ("fsdp2_tp2", "fsdp4_tp2")])
def test_a_described_mesh_is_as_a_real_one(run_world, tmp_path: Path, saved: str, wanted: str) -> None:
    """The mesh of the checkpoint's own axes, in other sizes: which dims they cut is found in the checkpoint."""
    run_world(LAYOUT[saved].world_size, save_alike_described, LAYOUT[saved], tmp_path)
    layout = LAYOUT[wanted]
    found = tte.dry_run(tmp_path, mesh=dict(zip(layout.axes, layout.mesh_shape, strict=True)))
    real = run_world(layout.world_size, load_and_foresee, layout, tmp_path, False)
    assert [(one.num_reads, one.num_bytes, one.num_files) for one in found.load.ranks] == [read for _, read in real]
    assert found.save.num_bytes == real[0][0]["save"]["num_bytes"]
    if "tp" not in layout.axes:  # there norms lie on the mesh of dp alone: other ranks write them
        assert [one.file_bytes for one in found.save.ranks] == [
            one["file_bytes"] for one in real[0][0]["save"]["ranks"]
        ]


def save_of_two(rank: int, world_size: int, path: Path) -> None:
    state = {"dataloader": {f"dp_rank_{rank}": rank}, "model": {"float32": torch.zeros(17, 3), "w": torch.zeros(4)}}
    tte.save(state, path)


def load_on_four(rank: int, world_size: int, path: Path) -> tuple[Any, Any]:
    state: dict[str, Any] = {
        "dataloader": {f"dp_rank_{rank}": rank},
        "model": {"float32": torch.zeros(4, 5), "w": torch.zeros(4, dtype=torch.int64), "extra": torch.zeros(3)},
    }
    foreseen = tte.dry_run(state, checkpoint=path)
    with pytest.raises(StateRefusedError) as refused:
        tte.load(state, path)
    return foreseen.load.problems, refused.value.problems


def test_refusals_of_a_load_are_foreseen_word_by_word(run_world, tmp_path: Path) -> None:
    run_world(2, save_of_two, tmp_path)
    for foreseen, refused in run_world(4, load_on_four, tmp_path):
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
