"""The loader alone, and in real process groups: ranks agree on the end of an epoch, checkpoints go to other worlds."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from simulated_loaders import Counted
from torch.distributed.device_mesh import init_device_mesh

import torchtitan_ext as tte
from torchtitan_ext.elastic import ElasticDataLoader, Streams, World
from torchtitan_ext.errors import CannotReshardError


def streams_of(lengths: list[int]) -> Streams:
    return Streams(lambda shard, _, epoch: Counted([(epoch, shard, i) for i in range(lengths[shard])]), len(lengths))


def serve_epochs(rank: int, world_size: int, lengths: list[int], last: Any, num_epochs: int) -> list[list[Any]]:
    """The batches of each epoch, real samples only; every step is a collective, as in training."""
    loader = ElasticDataLoader(
        streams_of(lengths), batch_size=2, dp_rank=rank, dp_size=world_size, uneven=True, last=last, collate_fn=list
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
        uneven=True,
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
    options: dict[str, Any] = {"batch_size": 1, "dp_rank": rank // 2, "dp_size": 2, "collate_fn": list}
    with pytest.raises(ValueError, match="2 data-parallel ranks must agree .* group has 4 ranks; pass .*get_group"):
        ElasticDataLoader(streams_of([3, 3]), **options)
    others = dist.new_group([0, 2])
    if rank % 2:
        with pytest.raises(ValueError, match="group does not hold this rank; pass"):
            ElasticDataLoader(streams_of([3, 3]), **options, group=others)
    next(iter(ElasticDataLoader(streams_of([3, 3]), **options, endless=True)))  # without any communication
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    assert len(list(ElasticDataLoader(streams_of([3, 3]), **options, group=mesh["dp"].get_group()))) == 3


def test_the_wrong_group_is_named_when_the_loader_is_made(run_world: Any) -> None:
    run_world(4, default_group_is_too_large)


def test_a_loader_may_be_made_before_the_process_group() -> None:
    loader = ElasticDataLoader(streams_of([3, 3]), batch_size=1, dp_rank=0, dp_size=2)
    with pytest.raises(
        ValueError, match="2 data-parallel ranks must agree .* process group does not exist; pass .*endless=True"
    ):
        next(iter(loader))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_state_counts_what_was_served_not_what_workers_read_ahead(num_workers: int) -> None:
    options: dict[str, Any] = {"global_batch_size": 4, "num_workers": num_workers, "collate_fn": list}
    loader = ElasticDataLoader(range(40), dp_rank=0, dp_size=2, **options)
    iterator = iter(loader)
    first = [next(iterator) for _ in range(3)]
    state = loader.state_dict()
    rest = list(iterator)
    assert len(first) + len(rest) == 10 and state["loader"][0]["next_sample"] == 12
    again = ElasticDataLoader(range(40), dp_rank=0, dp_size=2, **options)
    again.load_state_dict(state)
    assert list(again) == rest


def test_default_collate_and_local_batch_size() -> None:
    loader = ElasticDataLoader(torch.arange(12.0), batch_size=3, dp_rank=1, dp_size=2, shuffle=False)
    assert loader.global_batch_size == 6
    assert [batch.tolist() for batch in loader] == [[1, 3, 5], [7, 9, 11]]


@pytest.mark.parametrize(
    "options, message",
    [
        ({}, "exactly one of batch_size .per rank. and global_batch_size"),
        ({"batch_size": 2, "global_batch_size": 4}, "exactly one of"),
        (
            {"batch_size": 0},
            "leaves some of 1 data-parallel ranks without a sample; choose a multiple of 1 as global_batch_size",
        ),
        (
            {"global_batch_size": 3, "dp_rank": 0, "dp_size": 4},
            "a global batch of 3 leaves some of 4 data-parallel ranks",
        ),
        ({"batch_size": 1, "dp_rank": 2, "dp_size": 2}, "dp_rank is 2, expected 0 <= dp_rank < dp_size = 2"),
        ({"batch_size": 11}, 'has 10 samples, less than one global batch of 11; .* or last="pad"'),
        ({"batch_size": 1, "last": "keep"}, 'last is \'keep\', expected "drop" or "pad"'),
        ({"batch_size": 2, "num_workers": 1, "in_order": False}, "in_order=False has no position"),
    ],
)
def test_arguments_that_do_not_fit(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ElasticDataLoader(range(10), **options)


def test_data_of_no_known_kind() -> None:
    with pytest.raises(
        ValueError, match="generator is neither a map-style data set .* Streams or HuggingFaceStreams of tte.elastic"
    ):
        ElasticDataLoader((i for i in range(3)), batch_size=1)


def test_options_of_the_map_style_loader_are_refused() -> None:
    with pytest.raises(ValueError, match="sampler, shuffle_files cannot be applied to streams"):
        ElasticDataLoader(
            streams_of([1, 1]), batch_size=1, num_workers=2, shuffle_files=1, sampler=2, dp_rank=0, dp_size=2
        )


def test_a_reset_loader_begins_anew() -> None:
    for data, options in ((streams_of([3, 3]), {"endless": True}), (range(9), {"seed": 4})):
        loader = ElasticDataLoader(data, batch_size=2, collate_fn=list, **options)
        first = next(iter(loader))
        loader.reset()
        assert loader.samples_seen == 0 and next(iter(loader)) == first


def test_older_iterators_serve_nothing_again_and_skip_nothing() -> None:
    loader = ElasticDataLoader(list(range(6)), batch_size=2, shuffle=False, seed=np.int64(1), collate_fn=list)
    old, new = iter(loader), iter(loader)
    before = loader.state_dict()
    assert [next(old), next(new)] == [[0, 1], [2, 3]]
    with pytest.raises(RuntimeError, match="a newer iterator goes on from here"):
        next(old)
    assert next(new) == [4, 5]
    loader.load_state_dict(before)
    with pytest.raises(RuntimeError, match="a state was loaded under this iterator"):
        next(new)
    assert loader.epoch == 0 and len(list(loader)) == 3


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_data_set_that_raises_stop_iteration_does_not_end_the_epoch(num_workers: int) -> None:
    class Broken(list[int]):
        def __getitem__(self, index: Any) -> Any:
            return next(iter([index] if index != 5 else []))

    loader = ElasticDataLoader(Broken(range(8)), batch_size=2, shuffle=False, num_workers=num_workers, collate_fn=None)
    with pytest.raises(RuntimeError, match="raised StopIteration for a sample"):
        list(loader)
    assert (loader.samples_seen, loader.epoch, loader.dropped) == (4, 0, 0)


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        (Streams, {}, "got data=the class Streams, expected an instance: a data set or a source of streams"),
        (list, {}, "got data=the class list, expected an instance"),
        (range(9), {"batch_size": "2"}, "got batch_size='2', expected a whole number"),
        (
            range(9),
            {"batch_size": None, "global_batch_size": 2.0},
            "got global_batch_size=2.0, expected a whole number",
        ),
        (range(9), {"dp_size": "1"}, "got dp_size='1', expected a whole number"),
        (range(9), {"dp_rank": 0.0, "dp_size": 1}, "got dp_rank=0.0, expected a whole number"),
    ],
)
def test_arguments_of_another_type(data: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        ElasticDataLoader(data, **{"batch_size": 1, **options})


# States of version 0.2 that say which samples were handed out and not yet trained.


def streams() -> Streams:
    return Streams(lambda shard, num_shards, epoch: iter(range(shard, 40, num_shards)), 2)


def with_in_flight(state: dict[str, Any], *ids: list[int]) -> dict[str, Any]:
    """The state of map-style data with the entries of these ranks."""
    entries = {f"in_flight_{rank}_of_{len(ids)}": (of_rank,) for rank, of_rank in enumerate(ids)}
    return {"loader": ({**state["loader"][0], "version": 2, "again": [], "in_flight_of": len(ids)},), **entries}


def in_flight_states(state: dict[str, Any], of_streams: dict[str, Any]) -> dict[str, tuple[dict[str, Any], str]]:
    (entry,) = of_streams["shard_1_of_2"]
    shard = {**entry, "stream_epoch": None, "in_flight": (1, 3), "num_waiting": 1}
    missing = with_in_flight(state, [], [])
    del missing["in_flight_1_of_2"]
    return {
        "two ranks": (
            with_in_flight(state, [4, 6], [5]),
            "has 3 samples in flight, .*; load it with torchtitan_ext 0.2, ack",
        ),
        "waiting": ({"loader": ({**state["loader"][0], "version": 2, "again": [3]},)}, "has 1 samples in flight"),
        "a rank's own": (missing, "on 2 .* no in_flight_1_of_2; load with .*policy=Ela"),
        "streams": ({**of_streams, "shard_1_of_2": (shard,)}, "has 2 samples in flight"),
    }


@pytest.mark.parametrize("name", ["two ranks", "waiting", "a rank's own", "streams"])
def test_states_with_samples_in_flight_are_refused_and_nothing_changes(name: str) -> None:
    loader, of_streams = ElasticDataLoader(range(40), batch_size=4), ElasticDataLoader(streams(), batch_size=4)
    next(iter(loader)), next(iter(of_streams))
    state, message = in_flight_states(loader.state_dict(), of_streams.state_dict())[name]
    refused = of_streams if name == "streams" else loader
    before = refused.state_dict()
    for load in (refused.load_state_dict, lambda saved: refused.reshard(saved, World(1), World(1))):
        with pytest.raises(CannotReshardError, match=message):
            load(state)
    assert refused.state_dict() == before


def test_states_of_which_all_was_trained_load() -> None:
    loader = ElasticDataLoader(range(40), batch_size=4)
    next(iter(loader))
    state = loader.state_dict()
    again = ElasticDataLoader(range(40), batch_size=4)
    again.load_state_dict(with_in_flight(state, [], []))
    assert again.state_dict() == state
    streaming = ElasticDataLoader(streams(), batch_size=4)
    next(iter(streaming))
    state = streaming.state_dict()
    other = ElasticDataLoader(streams(), batch_size=4)
    old = {"stream_epoch": None, "in_flight": (), "num_waiting": 0}
    other.load_state_dict({key: (({**value[0], **old}),) for key, value in state.items()})
    assert other.state_dict() == state
