"""Saves of several ranks that write only what has changed, on one mesh and over changes of it."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import torchtitan_ext as tte
from torchtitan_ext import _core
from torchtitan_ext.storage import FileReader, FileWriter
from torchtitan_ext.storage.inspect.verify import verify
from torchtitan_ext.storage.native import shared_files

# Of each layout its mesh and placements; without a mesh every rank has all of it.
LAYOUTS: dict[str, tuple[tuple[int, ...], tuple[Any, ...]]] = {
    "one": ((), ()),
    "ddp2": ((), ()),
    "ddp4": ((), ()),
    "fsdp2": ((2,), (Shard(0),)),
    "fsdp4": ((4,), (Shard(0),)),
    "columns2": ((2,), (Shard(1),)),
    "hsdp2x2": ((2, 2), (Replicate(), Shard(0))),
}
WORLDS = {"one": 1, "ddp2": 2, "ddp4": 4, "fsdp2": 2, "fsdp4": 4, "columns2": 2, "hsdp2x2": 4}

NUM_BASE = 50
SHAPE = (64, 256)
LORA_BYTES = 64 * 256 * 4


def whole_state(step: int) -> dict[str, Any]:
    """A frozen base of 50 times what changes with each step."""
    generator = torch.Generator().manual_seed(0)
    base = {f"base.{number}": torch.randn(SHAPE, generator=generator) for number in range(NUM_BASE)}
    return base | {"lora": torch.full(SHAPE, float(step)), "step": step}


def state_on(layout: str, step: int) -> dict[str, Any]:
    shape, placements = LAYOUTS[layout]
    mesh = init_device_mesh("cpu", shape) if shape else None
    return {
        key: distribute_tensor(value, mesh, placements)
        if mesh is not None and isinstance(value, torch.Tensor)
        else value
        for key, value in whole_state(step).items()
    }


def full(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def save_steps(
    rank: int, world_size: int, layout: str, run: Path, steps: list[int], without_links: tuple[int, ...] = ()
) -> list[tuple[int, int, str]]:
    link = os.link
    if rank in without_links:

        def refuse(*args: Any, **kwargs: Any) -> None:
            raise PermissionError(1, "Operation not permitted")

        os.link = refuse
    try:
        results = [tte.save(state_on(layout, step), run / f"step-{step}", reuse="latest") for step in steps]
    finally:
        os.link = link
    return [(result.num_bytes, result.reused_bytes, result.not_reused) for result in results]


def load_steps(rank: int, world_size: int, layout: str, run: Path, steps: list[int]) -> list[str]:
    """What is not as it was saved, read by ours and by stock."""
    wrong = []
    for step in steps:
        truth = whole_state(step)
        for reader in (FileReader(run / f"step-{step}", "all"), dcp.FileSystemReader(run / f"step-{step}")):
            loaded = state_on(layout, -1)
            for value in loaded.values():
                if isinstance(value, torch.Tensor):
                    value.fill_(-2.0)
            dcp.load(loaded, storage_reader=reader, planner=tte.LoadPlanner())
            for key, expected in truth.items():
                found = full(loaded[key])
                if not (torch.equal(found, expected) if isinstance(expected, torch.Tensor) else found == expected):
                    wrong.append(f"{step} {type(reader).__name__} {key}")
    return wrong


def prove_step(rank: int, world_size: int, layout: str, path: Path) -> tuple[int, list[str]]:
    report = tte.load(state_on(layout, -1), path, prove=True)
    assert report is not None and report.proof is not None
    return len(report.proof.proved), sorted(report.proof.unproved)


def check(run_world: Any, run: Path, layouts: list[str], steps: list[int]) -> None:
    for step in steps:
        assert verify(run / f"step-{step}", is_deep=True).damages == []
    for layout in layouts:
        answers = run_world(WORLDS[layout], load_steps, layout, run, steps)
        assert (layout, answers) == (layout, [[]] * WORLDS[layout])


@pytest.mark.sampled(0.17)
@pytest.mark.parametrize("layout", ["one", "ddp2", "ddp4", "fsdp2", "fsdp4", "hsdp2x2"])
def test_a_lora_save_writes_little_more_than_the_adapter(run_world, tmp_path: Path, layout: str) -> None:
    (first, *others), *ranks = run_world(WORLDS[layout], save_steps, layout, tmp_path, [1, 2, 3])
    assert all(answer == [first, *others] for answer in ranks)
    assert first[0] > NUM_BASE * LORA_BYTES and first[1] == 0
    for written, reused, not_reused in others:
        assert written <= 1.1 * LORA_BYTES and reused >= NUM_BASE * LORA_BYTES and not_reused == ""
    check(run_world, tmp_path, [layout, "columns2"], [1, 2, 3])


@pytest.mark.sampled(0.5, "chains over meshes")
def test_after_a_change_of_the_mesh_a_save_writes_what_is_cut_otherwise_once(run_world, tmp_path: Path) -> None:
    step = 0
    for layout in ("fsdp2", "fsdp4", "hsdp2x2", "ddp2", "one", "fsdp2"):
        answers = run_world(WORLDS[layout], save_steps, layout, tmp_path, [step + 1, step + 2])
        step += 2
        assert answers[0][1][0] <= 1.1 * LORA_BYTES, layout
    check(run_world, tmp_path, ["hsdp2x2", "one"], list(range(1, step + 1)))
    answers = run_world(4, prove_step, "fsdp4", tmp_path / f"step-{step}")
    assert answers == [(NUM_BASE + 1, ["step"])] * 4


@pytest.mark.sampled(0.5, "chains over meshes")
def test_the_same_chunks_are_found_whoever_wrote_them(run_world, tmp_path: Path) -> None:
    """Four ranks in two replicas wrote them in four files; two ranks write each half of them alone."""
    run_world(4, save_steps, "hsdp2x2", tmp_path, [1])
    answers = run_world(2, save_steps, "fsdp2", tmp_path, [2])
    assert answers[0][0][0] <= 1.1 * LORA_BYTES and answers[0][0][1] >= NUM_BASE * LORA_BYTES
    check(run_world, tmp_path, ["fsdp2", "one"], [1, 2])


@pytest.mark.sampled(0.34)
@pytest.mark.parametrize("without_links", [(0,), (1,), (0, 1, 2, 3)])
def test_links_may_be_impossible_on_one_rank_or_all(run_world, tmp_path: Path, without_links: tuple[int, ...]) -> None:
    run_world(4, save_steps, "fsdp4", tmp_path, [1])
    answers = run_world(4, save_steps, "fsdp4", tmp_path, [2], without_links)
    (written, reused, not_reused), base = answers[0][0], NUM_BASE * LORA_BYTES
    assert answers == [answers[0]] * 4
    assert "Operation not permitted" in not_reused
    share = len(without_links) / 4
    assert share * base < written < share * base * 1.05 + 1.3 * LORA_BYTES
    assert (1 - share) * base <= reused < (1 - share) * base * 1.05 + 1
    assert run_world(4, save_steps, "fsdp4", tmp_path, [3])[0][0][0] <= 1.1 * LORA_BYTES
    check(run_world, tmp_path, ["fsdp4", "one"], [1, 2, 3])


def save_halves(rank: int, world_size: int, path: Path, earlier: Path | None) -> list[tuple[str, list[str]]]:
    state = {key: torch.arange(80_000.0) + number for number, key in enumerate("ab")}
    decide = shared_files._worth_sharing
    shared_files._worth_sharing = lambda index, found, _: sorted(found)  # each of two ranks uses not quite half of it
    try:
        result = tte.save(state, path, reuse=earlier or path)
    finally:
        shared_files._worth_sharing = decide
    index = _core.parse_index((path / ".tte_index").read_bytes(), "index")
    assert result.not_reused == "" or earlier is None
    return [(file.name, [record.fqn for record in _core.parse_records(file)]) for file in index.files.values()]


@pytest.mark.filterwarnings("ignore:.*written again")
def test_two_ranks_share_one_file(run_world, tmp_path: Path) -> None:
    run_world(1, save_halves, tmp_path / "1", None)
    (shared,) = run_world(2, save_halves, tmp_path / "2", tmp_path / "1")[0]
    assert sorted(shared[1]) == ["a", "b"] and shared[0].endswith(".0.distcp")
    assert verify(tmp_path / "2", is_deep=True).damages == []
    assert run_world(1, save_halves, tmp_path / "3", tmp_path / "2")[0] == [shared]


def save_with_dcp(rank: int, world_size: int, run: Path, ours_plans: bool) -> list[int]:
    writer = FileWriter(run / "step-1", reuse="latest")
    planner = tte.SavePlanner() if ours_plans else dcp.DefaultSavePlanner()
    sizes = []
    for step in (1, 2, 3):
        dcp.save(state_on("fsdp2", step), checkpoint_id=run / f"step-{step}", storage_writer=writer, planner=planner)
        dist.barrier()
        files = [file.stat() for file in (run / f"step-{step}").glob("*.distcp")]
        sizes.append(sum(status.st_size for status in files if status.st_nlink == 1))
        dist.barrier()
    return sizes


@pytest.mark.sampled(0.25, "other saves")
@pytest.mark.parametrize("ours_plans", [True, False])
def test_dcp_save_shares_too(run_world, tmp_path: Path, ours_plans: bool) -> None:
    sizes = run_world(2, save_with_dcp, tmp_path, ours_plans)[0]
    assert max(sizes[1:]) <= 1.1 * LORA_BYTES
    check(run_world, tmp_path, ["fsdp2", "one"], [1, 2, 3])


def save_in_background(rank: int, world_size: int, run: Path) -> list[int]:
    return [
        tte.async_save(state_on("fsdp2", step), run / f"step-{step}", reuse="latest").result().num_bytes
        for step in (1, 2, 3)
    ]


@pytest.mark.sampled(0.25, "other saves")
def test_asynchronous_saves_share_too(run_world, tmp_path: Path) -> None:
    written = run_world(2, save_in_background, tmp_path)[0]
    assert max(written[1:]) <= 1.1 * LORA_BYTES
    check(run_world, tmp_path, ["fsdp2"], [2, 3])
