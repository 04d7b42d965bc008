"""Positions of other libraries' loaders, known by class or key, are refused for other data-parallel ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.utils.data import DistributedSampler, Sampler

import torchtitan_ext as tte
from torchtitan_ext.elastic import ElasticPolicy
from torchtitan_ext.errors import StateRefusedError
from torchtitan_ext.layout.mesh_axes import num_data_parallel


class CountingSampler(Sampler[int]):
    """Keeps its position under keys that nobody knows."""

    def __init__(self, count: int = 0, key: str = "count") -> None:
        self.count, self.key = count, key

    def state_dict(self) -> dict[str, int]:
        return {self.key: self.count}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.count = state_dict[self.key]


class ResettingSampler(CountingSampler):
    def reset(self) -> None:
        self.count = -1


def torchdata_state(count: int) -> dict[str, Any]:
    """As ``StatefulDataLoader.state_dict()`` with workers: equal on ranks that have served equally many batches."""
    return {"_snapshot": {"_main_snapshot": {"_sampler_iter_yielded": count}, "_snapshot_step": count}, "other": 1}


def state_of(count: int) -> dict[str, Any]:
    return {"sampler": ResettingSampler(count), "trainer": {"loader": torchdata_state(count), "step": count}}


def counts(state: dict[str, Any]) -> list[int]:
    snapshot = state["trainer"]["loader"]["_snapshot"]
    return [state["sampler"].count, snapshot["_main_snapshot"]["_sampler_iter_yielded"], state["trainer"]["step"]]


def save_positions(rank: int, world_size: int, path: Path) -> None:
    tte.save(state_of(5), path / "ours")
    dcp.save({"trainer": state_of(5)["trainer"]}, checkpoint_id=path / "stock")


def load_positions(rank: int, world_size: int, path: Path) -> str:
    texts = []
    for policy in (None, ElasticPolicy()):
        state = state_of(0)
        with pytest.raises(StateRefusedError) as caught:
            tte.load(state, path / "ours", policy=policy)
        assert counts(state) == [0, 0, 0]
        assert [problem.fqn for problem in caught.value.problems] == ["sampler", "trainer.loader"]
        texts.append(str(caught.value))
    assert "ResettingSampler" in texts[0] and "torchdata's loader" in texts[0] and "ElasticDataLoader" in texts[0]
    state = state_of(0)
    tte.load(state, path / "ours", policy=ElasticPolicy({"sampler": "reset", "trainer.loader.*": "reset"}))
    assert counts(state) == [-1, 0, 5]
    state = state_of(0)
    tte.load(state, path / "ours", policy=ElasticPolicy({"sampler": "keep", "trainer.loader.*": "keep"}))
    assert counts(state) == [5, 5, 5]
    trainer = {"trainer": state_of(0)["trainer"]}
    with pytest.raises(CheckpointException, match=r"trainer\.loader"):
        dcp.load(trainer, checkpoint_id=path / "ours", planner=tte.LoadPlanner())
    if rank == 0:
        with pytest.warns(UserWarning, match=r"trainer\.loader is the position of torchdata's loader"):
            tte.load(trainer, path / "stock")
    else:
        tte.load(trainer, path / "stock")
    return texts[1]


def test_positions_do_not_go_to_other_numbers_of_ranks(run_world, tmp_path: Path) -> None:
    run_world(2, save_positions, tmp_path)
    (text, *others) = run_world(3, load_positions, tmp_path)
    assert all(other == text for other in others)
    assert "saved by 2 ranks, loaded by 3 ranks" in text


def on_meshes(rank: int, world_size: int, path: Path, sizes: dict[str, int], is_saving: bool) -> str:
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    tensor = distribute_tensor(torch.ones(4), mesh, [Replicate()] * mesh.ndim)
    sampler = CountingSampler(5 if is_saving else 0)
    state = {"model": {"w": tensor}, "sampler": sampler}
    if is_saving:
        tte.save(state, path)
        return "saved"
    try:
        tte.load(state, path)
    except StateRefusedError:
        assert sampler.count == 0
        return "refused"
    assert sampler.count == 5
    return "loaded"


def test_the_data_parallel_ranks_count_where_meshes_tell_them(run_world, tmp_path: Path) -> None:
    run_world(2, on_meshes, tmp_path, {"dp": 2}, True)
    assert run_world(2, on_meshes, tmp_path, {"dp": 2}, False) == ["loaded"] * 2
    assert run_world(4, on_meshes, tmp_path, {"dp": 2, "tp": 2}, False) == ["loaded"] * 4
    assert run_world(2, on_meshes, tmp_path, {"tp": 2}, False) == ["refused"] * 2
    assert run_world(4, on_meshes, tmp_path, {"dp": 4}, False) == ["refused"] * 4
    assert run_world(4, on_meshes, tmp_path, {"dp": 2, "mine": 2}, False) == ["refused"] * 4, "nobody knows this axis"


def test_data_parallel_ranks_of_a_mesh() -> None:
    assert num_data_parallel({"dp_replicate": 2, "dp_shard": 4, "tp": 2}, 16) == 8
    assert num_data_parallel({"tp": 4}, 4) == 1
    for mesh, size in (({}, 4), ({"x": 4}, 4), ({"dp": 2, "dp_shard": 2, "tp": 2}, 4), ({"dp": 2}, 4)):
        assert num_data_parallel(mesh, size) is None


def of_ranks(rank: int, world_size: int, path: Path) -> None:
    state = {"sampler": CountingSampler(7, f"rank_{rank}")}
    if world_size == 2:
        tte.save(state, path)
        return
    with pytest.raises(StateRefusedError) as caught:
        tte.load(state, path)
    assert [problem.kind for problem in caught.value.problems] == ["missing_key"], "one rule says it"


def test_entries_of_ranks_have_a_rule_of_their_own(run_world, tmp_path: Path) -> None:
    run_world(2, of_ranks, tmp_path)
    run_world(3, of_ranks, tmp_path)


def stateful_loader(rank: int, world_size: int, path: Path, num_workers: int, is_saving: bool) -> list[int]:
    from torchdata.stateful_dataloader import StatefulDataLoader

    data = list(range(64))
    sampler = DistributedSampler(data, world_size, rank, shuffle=False)
    loader = StatefulDataLoader(data, batch_size=4, sampler=sampler, num_workers=num_workers)
    batches = iter(loader)
    if is_saving:
        first = next(batches).tolist()
        tte.save({"data": loader}, path)
        return first
    if world_size == 4:
        for policy in (None, ElasticPolicy()):
            with pytest.raises(StateRefusedError, match="data: it is the position of StatefulDataLoader"):
                tte.load({"data": loader}, path, policy=policy)
        return []
    tte.load({"data": loader}, path)
    return [sample for batch in loader for sample in batch.tolist()]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_stateful_data_loaders(run_world, tmp_path: Path, num_workers: int) -> None:
    pytest.importorskip("torchdata")
    first = run_world(2, stateful_loader, tmp_path, num_workers, True)
    run_world(4, stateful_loader, tmp_path, num_workers, False)
    rest = run_world(2, stateful_loader, tmp_path, num_workers, False)
    assert sorted(sum(first + rest, [])) == list(range(64))
