"""Wrapper subclasses (quantised values and their scales): one key as in stock, cut and filled by the subclass."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from models import distribute_by_index, left_to_right, random_whole, same_bits, strided
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from wrapped_tensors import ALLOWED, BlockInt8, CastOnGather, CopiedSlices

import torchtitan_ext as tte
from torchtitan_ext.errors import StateRefusedError, TorchtitanExtError
from torchtitan_ext.storage import FileReader, FileWriter
from torchtitan_ext.sync import sync_state_dict

ROWS = 24
FP8 = torch.float8_e4m3fn

WRITERS = {
    "stock": (DefaultSavePlanner, FileSystemWriter),
    "planner": (tte.SavePlanner, FileSystemWriter),
    "native": (tte.SavePlanner, FileWriter),
}
READERS = {
    "stock": (DefaultLoadPlanner, FileSystemReader),
    "planner": (tte.LoadPlanner, FileSystemReader),
    "native": (tte.LoadPlanner, FileReader),
}


@pytest.fixture(autouse=True)
def _allowed() -> Any:
    with torch.serialization.safe_globals(ALLOWED):
        yield


@contextmanager
def nothing_allowed() -> Iterator[None]:
    held = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    try:
        yield
    finally:
        torch.serialization.add_safe_globals(held)


def whole_state(block_rows: int = 2) -> dict[str, Tensor]:
    codes = random_whole((ROWS, 4), torch.int8, 0)
    scale = random_whole((ROWS // block_rows,), torch.float32, 1)
    return {
        "moment": BlockInt8(codes, scale, block_rows),
        "weight": CastOnGather(random_whole((ROWS, 4), torch.bfloat16, 2), FP8),
    }


def zeros_like(state: dict[str, Tensor]) -> dict[str, Tensor]:
    moment, weight = state["moment"], state["weight"]
    return {
        "moment": BlockInt8(torch.zeros_like(moment.codes), torch.zeros_like(moment.scale), moment.block_rows),
        "weight": CastOnGather(torch.zeros_like(weight.weight), FP8),
    }


def rows_of(state: dict[str, Tensor], rank: int, world_size: int) -> dict[str, Tensor]:
    size = ROWS // world_size
    rows = {fqn: value.narrow(0, rank * size, size) for fqn, value in state.items()}
    moment, weight = rows["moment"], rows["weight"]
    return {
        "moment": BlockInt8(moment.codes.clone(), moment.scale.clone(), moment.block_rows),
        "weight": CastOnGather(weight.weight.clone(), FP8),
    }


def on_mesh(local: dict[str, Tensor], world_size: int) -> dict[str, Tensor]:
    mesh = init_device_mesh("cpu", (world_size,))
    return {fqn: DTensor.from_local(value, mesh, [Shard(0)], run_check=False) for fqn, value in local.items()}


def parts(state: dict[str, Tensor]) -> list[Tensor]:
    return [state["moment"].codes, state["moment"].scale, state["weight"].weight]


def save(state: dict[str, Any], how: str, path: Path) -> None:
    planner, writer = WRITERS[how]
    dcp.save(state, storage_writer=writer(path), planner=planner())


def load(state: dict[str, Any], how: str, path: Path) -> None:
    planner, reader = READERS[how]
    dcp.load(state, storage_reader=reader(path), planner=planner())


def save_sharded(rank: int, world_size: int, path: Path) -> None:
    torch.serialization.add_safe_globals(ALLOWED)
    local = rows_of(whole_state(), rank, world_size)
    for how in WRITERS:
        save(on_mesh(local, world_size), how, path / how)


def load_sharded(rank: int, world_size: int, path: Path) -> list[str]:
    torch.serialization.add_safe_globals(ALLOWED)
    wrong = []
    wanted = rows_of(whole_state(), rank, world_size)
    for written in WRITERS:
        for read in READERS:
            local = zeros_like(wanted)
            load(on_mesh(local, world_size), read, path / written)
            if not all(map(same_bits, parts(local), parts(wanted))):
                wrong.append(f"{written} -> {read}")
    return wrong


def test_four_to_two_to_three_ranks(run_world, tmp_path: Path) -> None:
    run_world(4, save_sharded, tmp_path / "4")
    assert run_world(2, load_sharded, tmp_path / "4") == [[], []]
    run_world(2, save_sharded, tmp_path / "2")
    assert run_world(3, load_sharded, tmp_path / "2") == [[], [], []]


@pytest.mark.parametrize("written", WRITERS)
@pytest.mark.parametrize("read", READERS)
def test_unsharded_ones_have_the_key_of_stock(tmp_path: Path, written: str, read: str) -> None:
    save(whole_state(), written, tmp_path)
    assert set(FileSystemReader(tmp_path).read_metadata().state_dict_metadata) == {"moment", "weight"}
    target = zeros_like(whole_state())
    load(target, read, tmp_path)
    assert all(map(same_bits, parts(target), parts(whole_state())))
    plain = {"moment": torch.zeros(ROWS, 4)}
    load(plain, read, tmp_path)
    assert same_bits(plain["moment"], whole_state()["moment"].dense())


@pytest.mark.parametrize("written", ["planner", "native"])
def test_what_lies_beside_a_part_is_not_written(tmp_path: Path, written: str) -> None:
    large = torch.zeros(1 << 20, 4, dtype=torch.int8)
    save({"moment": BlockInt8(large[:ROWS], torch.ones(ROWS // 2), 2)}, written, tmp_path)
    size = sum(file.stat().st_size for file in tmp_path.iterdir())
    assert size < 1 << 20 if written == "native" else size > 1 << 22  # stock's writer writes all of it


def test_those_that_stock_cannot_read_are_walked(tmp_path: Path) -> None:
    with nothing_allowed():
        tte.save(whole_state(), tmp_path)
    keys = set(FileSystemReader(tmp_path).read_metadata().state_dict_metadata)
    assert keys == {"moment.codes", "moment.scale", "weight.weight"}
    target = zeros_like(whole_state())
    tte.load(target, tmp_path)  # what is allowed now is read as it was saved then
    assert all(map(same_bits, parts(target), parts(whole_state())))


def test_a_class_that_this_job_does_not_allow(tmp_path: Path) -> None:
    save(whole_state(), "stock", tmp_path)
    with nothing_allowed():
        with pytest.raises(StateRefusedError, match="moment: .*BlockInt8, which no load reads.*add_safe_globals"):
            tte.load(zeros_like(whole_state()), tmp_path)


def moment_on_mesh(rank: int, world_size: int, block_rows: int) -> dict[str, Tensor]:
    moment = whole_state(block_rows)["moment"].narrow(0, rank * ROWS // world_size, ROWS // world_size)
    return on_mesh({"moment": moment}, world_size)


def save_blocks(rank: int, world_size: int, path: Path, block_rows: int) -> None:
    torch.serialization.add_safe_globals(ALLOWED)
    dcp.save(moment_on_mesh(rank, world_size, block_rows), storage_writer=FileWriter(path), planner=tte.SavePlanner())


def load_refused(rank: int, world_size: int, path: Path, block_rows: int) -> tuple[str, bool]:
    torch.serialization.add_safe_globals(ALLOWED)
    state = moment_on_mesh(rank, world_size, block_rows)
    before = state["moment"].to_local().codes.clone()
    try:
        tte.load(state, path)
    except TorchtitanExtError as error:
        return f"{type(error).__name__}: {error}", torch.equal(state["moment"].to_local().codes, before)
    return "", True


def test_a_box_that_cuts_a_block_of_the_target(run_world, tmp_path: Path) -> None:
    """Ranks of 12 rows become ranks of 8, which have one block: rows 8 to 12 are half of it."""
    run_world(2, save_blocks, tmp_path, 2)
    answers = run_world(3, load_refused, tmp_path, 8)
    assert len({text for text, _ in answers}) == 1 and all(unchanged for _, unchanged in answers)
    text = answers[0][0]
    assert "load refused, nothing was changed" in text, text
    assert "moment: its BlockInt8 of (8, 4) cannot be cut at (0, 0), (4, 4)" in text
    assert "rows 0 to 4 do not end on blocks of 8" in text and "use meshes whose shards end between its blocks" in text


def test_a_box_that_cuts_a_block_of_the_checkpoint(run_world, tmp_path: Path) -> None:
    """What blocks a checkpoint has shows when it is read."""
    run_world(2, save_blocks, tmp_path, 6)
    for text, _ in run_world(3, load_refused, tmp_path, 2):
        assert "moment: as it was saved, its BlockInt8 of (12, 4) cannot be cut at" in text, text
    for values, wanted in run_world(3, load_dense, tmp_path):
        assert torch.equal(values, wanted)


def load_dense(rank: int, world_size: int, path: Path) -> tuple[Tensor, Tensor]:
    """A plain target takes the values that blocks stand for, wherever they are cut."""
    torch.serialization.add_safe_globals(ALLOWED)
    size = ROWS // world_size
    target = torch.zeros(size, 4)
    tte.load(on_mesh({"moment": target}, world_size), path)
    return target, whole_state(6)["moment"].dense()[rank * size : (rank + 1) * size]


def test_a_target_whose_slices_are_copies(run_world, tmp_path: Path) -> None:
    run_world(2, save_copied, tmp_path)
    for text in run_world(3, load_copied, tmp_path):
        assert "weight: a slice of its CopiedSlices is a copy" in text, text


def save_copied(rank: int, world_size: int, path: Path) -> None:
    torch.serialization.add_safe_globals(ALLOWED)
    tte.save(on_mesh({"weight": CopiedSlices(torch.ones(ROWS // world_size, 4), FP8)}, world_size), path)


def load_copied(rank: int, world_size: int, path: Path) -> str:
    torch.serialization.add_safe_globals(ALLOWED)
    try:
        tte.load(on_mesh({"weight": CopiedSlices(torch.zeros(ROWS // world_size, 4), FP8)}, world_size), path)
    except StateRefusedError as error:
        return str(error)
    return ""


def read_elsewhere(rank: int, world_size: int, path: Path) -> None:
    """Asynchronous saves, replicas, fingerprints, full tensors and meta targets."""
    torch.serialization.add_safe_globals(ALLOWED)
    state, local = whole_state(), rows_of(whole_state(), rank, world_size)
    sharded = on_mesh(local, world_size)
    assert tte.fingerprint(sharded).values == tte.fingerprint(state).values
    dense = {"moment": state["moment"].dense(), "weight": state["weight"].weight}
    for fqn, value in dense.items():
        assert same_bits(tte.full_tensor(sharded[fqn]), value) and type(tte.full_tensor(sharded[fqn])) is Tensor
    tte.async_save(sharded, path / "async").result()
    for target in local["moment"].codes, local["moment"].scale, local["weight"].weight:
        target.zero_()
    tte.load(sharded, path / "async")
    assert all(map(same_bits, parts(local), parts(rows_of(state, rank, world_size))))
    mesh = init_device_mesh("cpu", (world_size,))
    replicated = {"moment": DTensor.from_local(state["moment"], mesh, [Replicate()], run_check=False)}
    tte.save(replicated, path / "replicated")
    state["moment"].scale.add_(rank)
    with pytest.raises((StateRefusedError, CheckpointException), match="moment"):
        tte.save(replicated, path / "differing")
    sync_state_dict(replicated, src=1, verify=True)
    assert same_bits(state["moment"].scale, whole_state()["moment"].scale + 1)
    empty = {"weight": CastOnGather(torch.empty(ROWS // world_size, 4, dtype=torch.bfloat16, device="meta"), FP8)}
    target = on_mesh(empty, world_size)
    tte.load(target, path / "async")
    assert same_bits(target["weight"].to_local().weight, local["weight"].weight)
    codes = torch.empty(ROWS // world_size, 4, dtype=torch.int8, device="meta")
    meta = BlockInt8(codes, torch.empty(ROWS // world_size // 2, device="meta"), 2)
    with pytest.raises(StateRefusedError, match="moment: is a BlockInt8 on the meta device.*give it memory"):
        tte.load(on_mesh({"moment": meta}, world_size), path / "async")


def test_staging_replicas_fingerprints_and_full_tensors(run_world, tmp_path: Path) -> None:
    run_world(2, read_elsewhere, tmp_path)


@pytest.mark.parametrize("how", [READERS["native"], READERS["planner"]])
def test_a_copy_that_fails(tmp_path: Path, how: tuple[Callable[..., Any], Callable[..., Any]]) -> None:
    save(whole_state(2), "stock", tmp_path)
    planner, reader = how
    message = "moment: a BlockInt8 was saved.* blocks differ" if reader is FileReader else "blocks differ"
    with pytest.raises(CheckpointException, match=message):
        target = {"moment": zeros_like(whole_state(4))["moment"]}
        dcp.load(target, storage_reader=reader(tmp_path), planner=planner())


def interleaved(world_size: int) -> tuple[dict[str, Tensor], BlockInt8]:
    """A moment of which each rank holds three boxes, as of fused query, key and value."""
    whole = whole_state()["moment"]
    mesh = init_device_mesh("cpu", (world_size,))
    layout = left_to_right("", (world_size,), strided(0, 3))
    codes, scale = (distribute_by_index(part, mesh, layout).to_local() for part in (whole.codes, whole.scale))
    local = BlockInt8(codes, scale, 2)
    placed = DTensor.from_local(local, mesh, layout.placements, run_check=False, shape=whole.shape, stride=(4, 1))
    return {"moment": placed}, local


def through_interleaved(rank: int, world_size: int, path: Path) -> None:
    torch.serialization.add_safe_globals(ALLOWED)
    state, local = interleaved(world_size)
    held = [local.codes.clone(), local.scale.clone()]
    for how in ("planner", "native"):
        save(state, how, path / how)
        local.codes.zero_()
        local.scale.zero_()
        load(state, how, path / how)
        assert same_bits(local.codes, held[0]) and same_bits(local.scale, held[1])
    assert same_bits(tte.full_tensor(state["moment"]), whole_state()["moment"].dense())


def test_ranks_with_several_boxes(run_world, tmp_path: Path) -> None:
    run_world(2, through_interleaved, tmp_path)
    for how in READERS:
        target = {"moment": zeros_like(whole_state())["moment"]}
        load(target, how, tmp_path / "native")
        assert same_bits(target["moment"].codes, whole_state()["moment"].codes)
        assert same_bits(target["moment"].scale, whole_state()["moment"].scale)
