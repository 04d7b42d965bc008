"""Loaders in real process groups: ranks agree on the end of an epoch, and checkpoints go to other worlds."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from simulated_loaders import Counted
from torch.distributed.device_mesh import init_device_mesh

import torchtitan_ext as tte
from torchtitan_ext.elastic import ElasticDataLoader, Streams


def streams_of(lengths: list[int]) -> Streams:
    return Streams(lambda shard, _, epoch: Counted([(epoch, shard, i) for i in range(lengths[shard])]), len(lengths))


def serve_epochs(rank: int, world_size: int, lengths: list[int], last: Any, num_epochs: int) -> list[list[Any]]:
    """The batches of each epoch, real samples only; every step is a collective, as in training."""
    loader = ElasticDataLoader(
        streams_of(lengths), batch_size=2, dp_rank=rank, dp_size=world_size, last=last, collate_fn=list
    )
    epochs = []
    for _ in range(num_epochs):
        served = []
        for batch in loader:
            dist.all_reduce(torch.ones(1))
            served.append(batch[: len(batch) - loader.num_padding])
        epochs.append(served)
    return epochs


@pytest.mark.parametrize("lengths", [[4, 4, 4, 4], [1, 9, 3, 0], [0, 0, 0, 7], [0, 0, 0, 0], [5, 6, 7, 8, 9, 1]])
def test_pad_serves_every_sample_and_no_rank_waits(run_world: Any, lengths: list[int]) -> None:
    ranks = run_world(4, serve_epochs, lengths, "pad", 2)
    for epoch in range(2):
        assert len({len(served[epoch]) for served in ranks}) == 1
        served = [sample for epochs in ranks for batch in epochs[epoch] for sample in batch]
        assert sorted(served) == [(epoch, v, i) for v, length in enumerate(lengths) for i in range(length)]


@pytest.mark.parametrize("lengths", [[4, 4, 4, 4], [1, 9, 3, 0], [5, 6, 7, 8, 9, 3]])
def test_drop_ends_with_the_first_rank_that_cannot_fill_its_batch(run_world: Any, lengths: list[int]) -> None:
    world_size = 4
    own = [sum(lengths[rank::world_size]) for rank in range(world_size)]
    for epochs in run_world(world_size, serve_epochs, lengths, "drop", 2):
        assert [len(served) for served in epochs] == [min(own) // 2] * 2
        assert all(len(batch) == 2 for served in epochs for batch in served)


def save_and_load(rank: int, world_size: int, path: str, steps: int, load: bool, stock: bool) -> tuple[Any, Any]:
    """Loads a checkpoint, serves some steps and saves; data-parallel ranks times two tensor-parallel ones."""
    mesh = init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("dp", "tp"))
    loader = ElasticDataLoader(
        streams_of([5, 9, 7, 6]),
        global_batch_size=4,
        dp_rank=mesh.get_local_rank("dp"),
        dp_size=world_size // 2,
        last="pad",
        group=mesh.get_group("dp"),
        collate_fn=list,
    )
    planners: dict[str, Any] = {} if stock else {"planner": tte.LoadPlanner()}
    if load:
        dcp.load({"dataloader": loader}, checkpoint_id=path, **planners)
    served = []
    for _, batch in zip(range(steps), loader, strict=False):
        served += batch[: len(batch) - loader.num_padding]
    dcp.save({"dataloader": loader}, checkpoint_id=f"{path}.next")
    return served, loader.samples_seen


@pytest.mark.parametrize("stock", [True, False], ids=["stock DCP", "our planner"])
def test_a_checkpoint_goes_to_other_worlds_and_tensor_ranks_hold_the_same(
    run_world: Any, tmp_path: Any, stock: bool
) -> None:
    served: list[Any] = []
    path = str(tmp_path / "step")
    for run, (world_size, steps) in enumerate([(4, 2), (8, 1), (2, 2), (6, 20)]):
        ranks = run_world(world_size, save_and_load, path, steps, run > 0, stock)
        for tensor_ranks in zip(ranks[::2], ranks[1::2], strict=True):
            assert tensor_ranks[0] == tensor_ranks[1]
        served += [sample for samples, _ in ranks[::2] for sample in samples]
        assert {seen for _, seen in ranks} == {len(served)}
        path += ".next"
    assert sorted(served) == sorted((0, v, i) for v, length in enumerate([5, 9, 7, 6]) for i in range(length))


def default_group_is_too_large(rank: int, world_size: int) -> None:
    loader = ElasticDataLoader(streams_of([3, 3]), batch_size=1, dp_rank=rank // 2, dp_size=2)
    with pytest.raises(
        ValueError, match="2 data-parallel ranks must agree .* group has 4 ranks; pass the data-parallel"
    ):
        next(iter(loader))


def test_the_wrong_group_is_named(run_world: Any) -> None:
    run_world(4, default_group_is_too_large)
