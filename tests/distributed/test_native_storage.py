"""FileWriter and FileReader in worlds of several ranks: stock on the other side, other meshes, every way to save."""

import os
import pickle
import resource
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from models import (
    BY_NAME,
    UNEVEN,
    Layout,
    Sizes,
    build_model,
    build_optimizer,
    build_whole,
    differences,
    poison,
    trained,
    training_state,
    training_truth,
)
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.tensor import DTensor

import torchtitan_ext as tte
from torchtitan_ext.errors import StateRefusedError, WrongValueError
from torchtitan_ext.storage import FileReader, FileWriter

WHOLE = Layout("whole", (1,), ())


def save_trained(rank: int, world_size: int, layout: Layout, path: Path, is_ours: bool, ours_plans: bool) -> None:
    state = trained(build_model(layout, UNEVEN) if layout.axes else build_whole(UNEVEN))
    writer = FileWriter(path, sync=False) if is_ours else FileSystemWriter(path, sync_files=False)
    dcp.save(state, storage_writer=writer, planner=tte.SavePlanner() if ours_plans else DefaultSavePlanner())


def load_trained(rank: int, world_size: int, layout: Layout, path: Path, is_ours: bool, ours_plans: bool) -> list[str]:
    model = build_model(layout, UNEVEN, seed=1) if layout.axes else build_whole(UNEVEN, seed=1)
    state = training_state(model, build_optimizer(model, lr=0.5))
    poison(state)
    reader = FileReader(path, "all") if is_ours else FileSystemReader(path)
    dcp.load(state, storage_reader=reader, planner=tte.LoadPlanner() if ours_plans else DefaultLoadPlanner())
    return differences(state, training_truth(UNEVEN))


@pytest.mark.parametrize("ours_reads", [True, False])
def test_our_files_on_other_meshes(run_world, tmp_path: Path, ours_reads: bool) -> None:
    run_world(4, save_trained, BY_NAME["fsdp2_tp2"], tmp_path, True, True)
    for target in [BY_NAME["fsdp4"], BY_NAME["tp2"], BY_NAME["hsdp2x2"], WHOLE]:
        has_group = target.axes != ()
        for ours_plans in (True, False):
            answers = run_world(
                target.world_size, load_trained, target, tmp_path, ours_reads, ours_plans, process_group=has_group
            )
            assert (target.name, answers) == (target.name, [[]] * target.world_size)


@pytest.mark.sampled(0.34)
@pytest.mark.filterwarnings("ignore:.*has no checksums")
@pytest.mark.parametrize("is_ours, ours_plans", [(True, False), (False, False), (False, True)])
def test_files_of_either_with_planners_of_either(run_world, tmp_path: Path, is_ours: bool, ours_plans: bool) -> None:
    run_world(4, save_trained, BY_NAME["fsdp2_tp2"], tmp_path, is_ours, ours_plans)
    for target in [BY_NAME["fsdp4"], WHOLE]:
        for reads_ours in (True, False):
            answers = run_world(
                target.world_size, load_trained, target, tmp_path, reads_ours, True, process_group=target.axes != ()
            )
            assert answers == [[]] * target.world_size


def test_dcp_to_torch_save(run_world, tmp_path: Path) -> None:
    run_world(4, save_trained, BY_NAME["fsdp2_tp2"], tmp_path / "ours", True, True)
    dcp_to_torch_save(tmp_path / "ours", tmp_path / "one_file.pt")
    assert differences(torch.load(tmp_path / "one_file.pt", weights_only=True), training_truth(UNEVEN)) == []


def model_state(layout: Layout, sizes: Sizes, value: float) -> dict[str, Any]:
    state = build_model(layout, sizes).state_dict()
    return {name: fill(tensor, value) for name, tensor in state.items() if isinstance(tensor, DTensor)}


def fill(tensor: DTensor, value: float) -> DTensor:
    tensor.to_local().fill_(value)
    return tensor


def is_filled(state: dict[str, Any], value: float) -> bool:
    return state != {} and all(bool((tensor.to_local() == value).all()) for tensor in state.values())


def save_with_cached_plans(rank: int, world_size: int, layout: Layout, path: Path) -> list[bool]:
    answers = []
    for step in range(3):
        state = model_state(layout, UNEVEN, float(step))
        writer = FileWriter(path / str(step), sync=False)
        dcp.save(state, storage_writer=writer, planner=DefaultSavePlanner(enable_plan_caching=True))
        dcp.load(state, storage_reader=FileReader(path / str(step), "all"), planner=tte.LoadPlanner())
        answers.append(is_filled(state, float(step)))
    return answers


def test_cached_plans_of_stock_belong_to_the_save_that_uses_them(run_world, tmp_path: Path) -> None:
    assert run_world(4, save_with_cached_plans, BY_NAME["fsdp4"], tmp_path) == [[True] * 3] * 4


def save_asynchronously(rank: int, world_size: int, layout: Layout, path: Path) -> bool:
    state = model_state(layout, UNEVEN, 5.0)
    future = tte.async_save(state, storage_writer=FileWriter(path, sync=False))
    for tensor in state.values():
        fill(tensor, 0.0)
    future.result()
    tte.load(state, storage_reader=FileReader(path, "all"))
    return is_filled(state, 5.0)


def test_asynchronous_saves(run_world, tmp_path: Path) -> None:
    assert run_world(2, save_asynchronously, BY_NAME["fsdp2"], tmp_path) == [True] * 2


def save_each_rank_alone(rank: int, world_size: int, layout: Layout, path: Path) -> bool:
    state = model_state(layout, UNEVEN, float(rank))
    with pytest.raises(WrongValueError, match="use_collectives=False, expected True: .*FileSystemWriter"):
        dcp.save(state, storage_writer=FileWriter(path), planner=tte.SavePlanner(), use_collectives=False)
    dcp.save(state, checkpoint_id=path, planner=tte.SavePlanner(), use_collectives=False)
    loaded = model_state(layout, UNEVEN, -1.0)
    dcp.load(loaded, storage_reader=FileReader(path, "all"), planner=tte.LoadPlanner())
    return is_filled(loaded, float(rank))


def test_without_collectives_each_rank_has_metadata_of_its_own(run_world, tmp_path: Path) -> None:
    assert run_world(2, save_each_rank_alone, BY_NAME["fsdp2"], tmp_path) == [True] * 2
    assert {f"__{rank}.metadata" for rank in range(2)} <= set(os.listdir(tmp_path))


def save_with_a_limit(rank: int, world_size: int, path: Path) -> str:
    limit, on_limit = resource.getrlimit(resource.RLIMIT_FSIZE), signal.getsignal(signal.SIGXFSZ)
    if rank == 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, limit[1]))
    try:
        with pytest.raises(tte.errors.CheckpointFailedError) as caught:
            tte.save({f"rank_{rank}": torch.ones(400_000)}, storage_writer=FileWriter(path, sync=False))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, on_limit)
    return str(caught.value)


def test_a_rank_that_cannot_write_fails_the_save_on_all(run_world, tmp_path: Path) -> None:
    texts = run_world(2, save_with_a_limit, tmp_path)
    assert texts[0] == texts[1] and "rank 1" in texts[0] and "__1_0.distcp" in texts[0]
    assert list(tmp_path.parent.glob(".tte*")) == [] and list(tmp_path.iterdir()) == []


def save_and_read_later(rank: int, world_size: int, path: Path) -> tuple[bool, int, str]:
    state = trained(build_model(BY_NAME["fsdp2_tp2"], UNEVEN))
    writer = FileWriter(path, sync=False)
    metadata = dcp.save(state, storage_writer=writer, planner=tte.SavePlanner())
    sent_bytes = len(pickle.dumps(metadata))  # what DCP has broadcast
    read = FileReader(path).read_metadata()
    assert read.storage_meta is not None
    read.storage_meta.load_id = None  # the reader's own
    return metadata == read, sent_bytes, type(metadata).__name__


def test_the_metadata_is_not_broadcast(run_world, tmp_path: Path) -> None:
    for is_equal, sent_bytes, name in run_world(4, save_and_read_later, tmp_path):
        assert is_equal and sent_bytes < 1000, name  # three places in the file, whatever the number of chunks
    for target in (BY_NAME["fsdp4"], WHOLE):
        answers = run_world(
            target.world_size, load_trained, target, tmp_path, True, True, process_group=target.axes != ()
        )
        assert answers == [[]] * target.world_size


def load_own_directory(rank: int, world_size: int, path: Path) -> str:
    with pytest.raises(StateRefusedError) as caught:
        tte.load({"w": torch.zeros(3)}, path / str(rank // 2))
    return str(caught.value)


def test_ranks_that_see_other_metadata_are_refused(run_world, tmp_path: Path) -> None:
    for name in ("0", "1"):
        dcp.save({"w": torch.ones(3)}, storage_writer=FileWriter(tmp_path / name, sync=False), no_dist=True)
    (first, *others) = run_world(4, load_own_directory, tmp_path)
    assert all(other == first for other in others)
    assert f"is {tmp_path}/0 on ranks 0, 1, {tmp_path}/1 on ranks 2, 3; pass the same path on every rank" in first


def load_own_copy(rank: int, world_size: int, path: Path) -> list[float]:
    state = {"w": torch.zeros(3)}
    tte.load(state, path / str(rank))
    return state["w"].tolist()


def test_copies_on_the_disks_of_hosts_are_one_checkpoint(run_world, tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(3)}, storage_writer=FileWriter(tmp_path / "0", sync=False), no_dist=True)
    shutil.copytree(tmp_path / "0", tmp_path / "1")
    assert run_world(2, load_own_copy, tmp_path) == [[1.0] * 3] * 2
