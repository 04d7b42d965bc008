"""Which data-parallel rank a loader serves: as given, or as the job tells; where nothing tells it, it is refused."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import IterableDataset

from torchtitan_ext.elastic import ElasticBatchSampler, ElasticDataLoader, RngState, Streams


def loader_of(**options: Any) -> ElasticDataLoader:
    return ElasticDataLoader(range(16), global_batch_size=4, shuffle=False, collate_fn=list, **options)


def samples_by_default(rank: int, world_size: int) -> list[int]:
    loader = loader_of()
    sampler = ElasticBatchSampler(range(16), global_batch_size=4, shuffle=False)
    streams = ElasticDataLoader(Streams(lambda *_: range(4), 4), global_batch_size=4, last="pad")
    for one in (loader, sampler, streams):
        assert (one.dp_rank, one.dp_size) == (rank, world_size)
    assert [sample for batch in loader for sample in batch] == [sample for batch in sampler for sample in batch]
    assert len(list(streams)) == 4
    return [sample for batch in loader for sample in batch]


def test_all_ranks_of_a_job_are_data_parallel_ranks(run_world: Any) -> None:
    assert sorted(sum(run_world(2, samples_by_default), [])) == list(range(16)), "each sample once"


def on_meshes(rank: int, world_size: int) -> None:
    replicas = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    for options in ({}, {"mesh": replicas}):
        assert (loader_of(**options).dp_rank, loader_of(**options).dp_size) == (rank, 4), "HSDP: all ranks"
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with pytest.raises(ValueError, match=r"not all 4 ranks .* \(.*tp.*\); pass mesh=mesh\['dp'\], or dp_rank="):
        loader_of()
    with pytest.raises(ValueError, match="ElasticBatchSampler: got no data-parallel rank"):
        ElasticBatchSampler(range(16), global_batch_size=4)
    with pytest.raises(ValueError, match="got a mesh with the axis tp, whose ranks get the same samples"):
        loader_of(mesh=mesh)
    with pytest.raises(ValueError, match="dp_rank=0 and dp_size=2; pass mesh= alone"):
        loader_of(mesh=mesh["dp"], dp_rank=0, dp_size=2)
    for options in ({"mesh": mesh["dp"]}, {"group": mesh["dp"].get_group()}):
        assert (loader_of(**options).dp_rank, loader_of(**options).dp_size) == (rank // 2, 2)
    streams = ElasticDataLoader(Streams(lambda *_: range(4), 4), global_batch_size=4, mesh=mesh["dp"])
    assert len(list(streams)) == 4, "the ranks of the mesh agree on the end"


def test_meshes_say_which_ranks_are_data_parallel(run_world: Any) -> None:
    run_world(4, on_meshes)


def test_one_of_the_two_numbers_is_not_enough() -> None:
    for options in ({"dp_rank": 0}, {"dp_size": 2}):
        with pytest.raises(ValueError, match="expected both or none; pass mesh="):
            loader_of(**options)
    assert loader_of(dp_size=1).dp_rank == 0


def test_a_rank_without_a_process_group_is_not_the_only_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not dist.is_initialized()
    monkeypatch.setenv("WORLD_SIZE", "2")
    for make in (loader_of, lambda: RngState(0)):
        with pytest.raises(ValueError, match="one of 2 ranks by WORLD_SIZE, .*init_process_group first"):
            make()
    assert loader_of(dp_rank=1, dp_size=2).dp_rank == 1 and RngState(0, rank=1, world_size=2).rank == 1


def test_ranks_get_equally_many_samples_unless_told() -> None:
    expected = "gives ranks 4 and 3 samples, .* choose global_batch_size=6 or 8, or pass uneven=True"
    for make in (ElasticDataLoader, ElasticBatchSampler):
        with pytest.raises(ValueError, match=expected):
            make(range(20), global_batch_size=7, dp_rank=0, dp_size=2)
    assert ElasticDataLoader(range(20), global_batch_size=7, dp_rank=0, dp_size=2, uneven=True).batch_size == 4


class Shards(IterableDataset[int]):
    """As MosaicML's StreamingDataset: iterable, with a length and items."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> int:
        return index

    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        (
            range(9),
            {"num_wokers": 2},
            "num_wokers cannot be applied to map-style data, .* perhaps num_workers is meant",
        ),
        (range(9), {"drop_last": True}, "drop_last cannot be applied .* pass last='drop' or last='pad'"),
        (range(9), {"sampler": [1]}, "sampler cannot be applied .* order=, shuffle= and seed="),
        (range(9), {"batch_sizes": 1}, "perhaps batch_size is meant"),
        (range(9), {"prefetch_factor": 2}, "prefetch_factor option could only be specified in multiprocessing"),
        (range(9), {"num_workers": -1}, "num_workers option should be non-negative"),
        (Streams(lambda *_: range(3), 2), {"num_wokers": 2}, "num_wokers cannot be applied to streams, .*num_workers"),
        (Shards(), {}, "Shards is an IterableDataset, .* wrap what opens its shards in Streams"),
    ],
)
def test_what_a_loader_cannot_use_fails_in_the_constructor(data: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ElasticDataLoader(data, batch_size=1, **options)


def test_options_that_a_checkpoint_overrides_are_in_the_note() -> None:
    saved = ElasticDataLoader(range(20), batch_size=2, seed=3).state_dict()
    note = ElasticDataLoader(range(20), batch_size=2, seed=4, order="randperm").reshard(saved, None, None).note
    assert note.endswith(", seed 3 as saved, not 4, order feistel-1 as saved, not randperm")
    note = ElasticDataLoader(range(20), batch_size=2, seed=4, shuffle=False).reshard(saved, None, None).note
    assert "shuffle True as saved, not False" in note
    unordered = ElasticDataLoader(range(20), batch_size=2, seed=4, shuffle=False).state_dict()
    note = ElasticDataLoader(range(20), batch_size=2, seed=3).reshard(unordered, None, None).note
    assert note.endswith(", shuffle False as saved, not True"), "a seed of no order does not matter"
    assert "as saved" not in ElasticDataLoader(range(20), batch_size=2, seed=3).reshard(saved, None, None).note


@pytest.mark.parametrize("order", ["feistel-1", "randperm"])
def test_seeds_of_64_bits_last_for_all_epochs(order: Any) -> None:
    for seed in (2**63, 2**64 - 1, -1, 2**64 + 3):
        loader = ElasticDataLoader(range(6), batch_size=3, seed=seed, order=order, collate_fn=list)
        for _ in range(3):
            assert sorted(sum(loader, [])) == list(range(6))
