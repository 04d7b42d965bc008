"""By default each block of a file of which anything is read is verified once in a load, by one of the ranks."""

import functools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from models import local_of, poison
from random_layouts import build, random_layouts, random_truth
from reference import same_bits
from tier import SOAK
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from transformed_states import TRANSFORM, saved_state, wanted_state

import torchtitan_ext as tte
from torchtitan_ext import _core
from torchtitan_ext.errors import CheckpointFailedError, DamagedCheckpointError
from torchtitan_ext.storage import FileReader
from torchtitan_ext.storage.native import file_writer

RunWorld = Callable[..., list[Any]]

BLOCK_BYTES = 512
NUM_TENSORS = 10


def save_in_blocks(state: dict[str, Any], path: Path, block_bytes: int = BLOCK_BYTES, **options: Any) -> None:
    usual = file_writer.BLOCK_BYTES
    file_writer.BLOCK_BYTES = block_bytes
    try:
        tte.save(state, path, **options)
    finally:
        file_writer.BLOCK_BYTES = usual


def damage_of(error: BaseException) -> str:
    """The part of an error's text that tells of damage; empty where it is about something else."""
    text = str(error)
    return text if "do not match their checksum" in text or isinstance(error, DamagedCheckpointError) else ""


def blocks_of(path: Path, block_bytes: int) -> list[tuple[Path, int, int]]:
    """All blocks of all rank files: the file, first byte, one past the last byte."""
    found = []
    for file in sorted(path.glob("*.distcp")):
        end = _core.find_footer(str(file), file.name, -1).footer_offset
        found += [(file, begin, min(begin + block_bytes, end)) for begin in range(0, end, block_bytes)]
    return found


def flipped(file: Path, position: int, bit: int) -> None:
    with file.open("r+b") as stream:
        stream.seek(position)
        value = stream.read(1)[0]
        stream.seek(position)
        stream.write(bytes([value ^ (1 << bit)]))


def at_rank_0(rank: int, work: Callable[[], None]) -> None:
    if rank == 0:
        work()
    dist.barrier()


def check_each_flip(
    rank: int,
    path: Path,
    seed: int,
    num_flips: int,
    load: Callable[[], bool],
    block_bytes: int = BLOCK_BYTES,
) -> None:
    """Flips one bit of a block, loads, flips it back: the load fails on every rank, if anything of the block is read.

    Args:
        load: Loads; returns whether all is as it was saved.
    """
    draw = random.Random(seed)
    blocks = blocks_of(path, block_bytes)
    for file, begin, end in draw.sample(blocks, min(num_flips, len(blocks))):
        position, bit = draw.randrange(begin, end), draw.randrange(8)
        at_rank_0(rank, lambda file=file, position=position, bit=bit: flipped(file, position, bit))
        try:
            is_right = load()
        except (CheckpointFailedError, DamagedCheckpointError, dcp.api.CheckpointException) as error:
            assert damage_of(error), error
        else:
            assert not is_read(file, begin, end), (seed, file.name, position, "was loaded without a word")
            assert is_right
        at_rank_0(rank, lambda file=file, position=position, bit=bit: flipped(file, position, bit))
    assert load()  # undamaged


@functools.cache
def read_spans(path: Path) -> list[tuple[str, int, int]]:
    """What a load of the whole checkpoint reads: elements of tensors, and records of values whole; with their files."""
    reader = FileReader(path)
    metadata = reader.read_metadata()
    reader.set_up_storage_reader(metadata, True)
    spans = []
    for index, record in zip(metadata.storage_data, reader.find_records(list(metadata.storage_data)), strict=True):
        stored, begin, num_bytes = record.tensor, record.offset, record.num_bytes
        if stored is not None:
            begin, num_bytes = stored.data_offset, torch.Size(stored.sizes).numel() * stored.item_bytes
        if num_bytes > 0 and not index.fqn.startswith("optimizer"):  # a transform drops these
            spans.append((record.file, begin, begin + num_bytes))
    return spans


def is_read(file: Path, begin: int, end: int) -> bool:
    """Whether a load of the whole checkpoint reads anything of a block."""
    return any(name == file.name and first < end and last > begin for name, first, last in read_spans(file.parent))


def flip_random_states(rank: int, world_size: int, seed: int, num_flips: int, folder: Path) -> None:
    truth, path = random_truth(seed, NUM_TENSORS), folder / str(seed)
    state, orders = build(truth, random_layouts(seed, world_size, truth))
    values = {"step": seed, "names": [f"n{number}" for number in range(30)], "lr": 0.5}
    save_in_blocks({**state, **values}, path, planner=tte.SavePlanner(layouts=orders))
    target, orders = build(truth, random_layouts(seed + 1000, world_size, truth))
    expected = {name: local_of(value).clone() for name, value in target.items()}
    for share_reads in (False, True):

        def load(
            target: Any = target, orders: Any = orders, path: Path = path, share_reads: bool = share_reads
        ) -> bool:
            poison(target)
            loaded = {**target, "step": 0, "names": [], "lr": 0.0}
            tte.load(loaded, path, planner=tte.LoadPlanner(layouts=orders), share_reads=share_reads)
            is_right = {name: loaded[name] for name in values} == values
            return is_right and all(same_bits(local_of(target[name]), expected[name]) for name in expected)

        check_each_flip(rank, path, seed, num_flips, load)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_flipped_bit_of_any_block_is_found(run_world: RunWorld, tmp_path: Path, world_size: int) -> None:
    for seed in range(2 if SOAK == 1 else 40):  # a world each: all of them would take longer than one may
        run_world(world_size, flip_random_states, seed, 6 * SOAK, tmp_path)


# Rows and gaps that are too long to be read along, so that no rank reads most of a block.
WIDE = (32, 8192)
WIDE_BLOCK_BYTES = 64 << 10


def wide_state() -> dict[str, torch.Tensor]:
    return {"w": torch.arange(32 * 8192, dtype=torch.float32).view(WIDE), "norm": torch.arange(5.0)}


def save_wide(rank: int, world_size: int, path: Path) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    by_rows = {name: distribute_tensor(value, mesh, [Shard(0)]) for name, value in wide_state().items()}
    save_in_blocks(by_rows, path, WIDE_BLOCK_BYTES)


def flip_parts(rank: int, world_size: int, num_flips: int, path: Path) -> list[list[tuple[str, int]]]:
    """Loads rows and columns by ``tte.load`` and ``dcp.load``. Returns the blocks that each rank verified later."""
    mesh = init_device_mesh("cpu", (world_size,))
    truth, verified = wide_state(), []
    save_in_blocks(
        {name: distribute_tensor(value, mesh, [Shard(0)]) for name, value in truth.items()}, path, WIDE_BLOCK_BYTES
    )
    for dim in (0, 1):
        target = {
            "w": distribute_tensor(torch.zeros(WIDE), mesh, [Shard(dim)]),
            "norm": distribute_tensor(torch.zeros(5), mesh, [Replicate()]),
        }
        expected = {"w": truth["w"].tensor_split(world_size, dim)[rank], "norm": truth["norm"]}
        for by in ("tte", "ours", "stock"):

            def load(target: Any = target, expected: Any = expected, by: str = by) -> bool:
                poison(target)
                if by == "tte":
                    tte.load(target, path)
                else:
                    planner = tte.LoadPlanner() if by == "ours" else DefaultLoadPlanner()
                    dcp.load(target, storage_reader=FileReader(path), planner=planner)
                return all(same_bits(local_of(target[name]), expected[name]) for name in expected)

            check_each_flip(rank, path, dim, num_flips, load, WIDE_BLOCK_BYTES)
        later: list[tuple[str, int]] = []
        with pytest.MonkeyPatch.context() as patch:
            usual = FileReader.verify_blocks

            def noted(reader: FileReader, ranges: Any, later: Any = later) -> None:
                later.extend((one.file, block) for one in ranges for block in range(one.first, one.last))
                usual(reader, ranges)  # noqa: B023

            patch.setattr(FileReader, "verify_blocks", noted)
            tte.load(target, path)
        verified.append(later)
    return verified


@pytest.mark.parametrize("world_size", [2, 4])
def test_blocks_of_which_each_rank_reads_little_are_dealt_out(
    run_world: RunWorld, tmp_path: Path, world_size: int
) -> None:
    of_ranks = run_world(world_size, flip_parts, 4 * SOAK, tmp_path / "step")
    num_blocks = len(blocks_of(tmp_path / "step", WIDE_BLOCK_BYTES))
    for dim in (0, 1):
        later = [block for of_rank in of_ranks for block in of_rank[dim]]
        assert len(set(later)) == len(later)  # once
        # By columns on four ranks each reads a quarter of each block, but for the last one of each file.
        assert len(later) == num_blocks - world_size if (dim, world_size) == (1, 4) else len(later) < num_blocks / 2
    if world_size == 4:
        shares = [len(of_rank[1]) for of_rank in of_ranks]
        assert max(shares) - min(shares) <= 8


def dealt_by_dcp(rank: int, world_size: int, path: Path) -> list[list[int]]:
    """How many blocks each rank got to verify in a ``dcp.load`` of columns, with our planner and with stock's."""
    mesh = init_device_mesh("cpu", (world_size,))
    target = {
        "w": distribute_tensor(torch.zeros(WIDE), mesh, [Shard(1)]),
        "norm": distribute_tensor(torch.zeros(5), mesh, [Replicate()]),
    }
    dealt: list[list[int]] = []
    with pytest.MonkeyPatch.context() as patch:
        usual = FileReader.prepare_global_plan

        def noted(reader: FileReader, plans: Any) -> Any:
            made = usual(reader, plans)
            dealt.append([sum(one.last - one.first for one in plan.storage_data.part) for plan in made])
            return made

        patch.setattr(FileReader, "prepare_global_plan", noted)
        for planner in (tte.LoadPlanner(), DefaultLoadPlanner()):
            dcp.load(target, storage_reader=FileReader(path), planner=planner)
    return dealt


def test_dcp_deals_blocks_out_with_the_plans(run_world: RunWorld, tmp_path: Path) -> None:
    run_world(2, save_wide, tmp_path / "step")
    num_blocks = len(blocks_of(tmp_path / "step", WIDE_BLOCK_BYTES))
    for parts in run_world(4, dealt_by_dcp, tmp_path / "step")[0]:
        assert sum(parts) == num_blocks
        assert max(parts) <= num_blocks / 4 + 8


def flip_under_a_transform(rank: int, world_size: int, num_flips: int, path: Path) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    if rank == 0:
        save_in_blocks({**saved_state(), "step": 3}, path, no_dist=True)
    dist.barrier()
    wanted = {f"model.{name}": value for name, value in wanted_state().items()}
    target = {
        name: distribute_tensor(torch.zeros_like(value), mesh, [Shard(number % value.dim())])
        for number, (name, value) in enumerate(wanted.items())
    }
    expected = {name: distribute_tensor(value, mesh, target[name].placements) for name, value in wanted.items()}

    def load() -> bool:
        poison(target)
        state = {**target, "step": 0}
        tte.load(state, path, transform=TRANSFORM)
        return state["step"] == 3 and all(
            same_bits(local_of(target[name]), local_of(expected[name])) for name in expected
        )

    check_each_flip(rank, path, 0, num_flips, load)


@pytest.mark.parametrize("world_size", [1, 2])
def test_flipped_bits_under_a_transform(run_world: RunWorld, tmp_path: Path, world_size: int) -> None:
    run_world(world_size, flip_under_a_transform, 12 * SOAK, tmp_path / "step")
