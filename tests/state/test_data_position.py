"""Where a data loader stands by its state, and what other ranks would do, against the loaders themselves."""

import math
from typing import Any

import pytest

from torchtitan_ext.elastic import ElasticDataLoader, Streams
from torchtitan_ext.state.data_position import DataPosition, loaders_among, read_data_position


def served(data: Any, num_batches: int, **options: Any) -> ElasticDataLoader:
    loader = ElasticDataLoader(data, **options)
    batches = iter(loader)
    for _ in range(num_batches):
        next(batches)
    return loader


def shards(num_shards: int, length: int = 1000) -> Streams:
    return Streams(lambda shard, num_shards, epoch: iter(range(shard, length, num_shards)), num_shards)


def test_map_style_data() -> None:
    position = served(range(100), 3, global_batch_size=8, seed=5).describe()
    assert (position.kind, position.next_sample, position.num_samples, position.samples_left) == (
        "samples",
        24,
        100,
        76,
    )
    assert (position.first_epoch, position.samples_seen, position.seed, position.num_shards) == (0, 24, 5, 0)
    assert str(position).endswith(
        "76 left; 24 seen, 0 dropped, 0 padded; saved by 1 data-parallel rank, global batches of 8"
    )
    assert served(range(100), 1, global_batch_size=8, shuffle=False).describe().order == "none"


def test_streams_say_what_is_left_once_an_epoch_was_read_to_its_end() -> None:
    loader = ElasticDataLoader(shards(4, 22), global_batch_size=4, last="pad")
    first = loader.describe()
    assert first.samples_left is None and [one.served for one in first.shards] == [0] * 4
    assert len(list(loader)) == 6
    next(iter(loader))
    position = loader.describe()
    assert (position.first_epoch, position.last_epoch, position.samples_left) == (1, 1, 18)
    assert [(one.shard, one.served, one.total, one.samples_left) for one in position.shards] == [
        (0, 1, 7, 5),
        (1, 1, 7, 5),
        (2, 1, 6, 4),
        (3, 1, 6, 4),
    ]
    assert position.padded == 2 and position.samples_seen == 26


def test_a_rank_describes_its_own_shards() -> None:
    position = served(shards(5), 2, global_batch_size=4, dp_rank=1, dp_size=2, endless=True).describe()
    assert [one.shard for one in position.shards] == [1, 3] and position.num_shards == 5


def test_what_is_to_be_given_again_is_left() -> None:
    loader = ElasticDataLoader(range(100), global_batch_size=8, max_in_flight=30)
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    loader.acknowledge([0, 1, 2, 23])
    position = loader.describe()
    assert (position.in_flight, position.again, position.samples_left) == (20, 0, 96)
    assert "96 left, 20 of them to be given again" in str(position)
    loader.load_state_dict(loader.state_dict())
    position = loader.describe()
    assert (position.in_flight, position.again, position.samples_left, position.samples_seen) == (0, 20, 96, 4)


def test_what_shards_have_in_flight() -> None:
    loader = ElasticDataLoader(shards(4, 22), global_batch_size=4, last="pad", max_in_flight=99)
    for _ in loader:
        loader.acknowledge(loader.sample_ids)
    batches = iter(loader)
    assert next(batches) is not None
    loader.acknowledge(loader.sample_ids[:1])
    position = loader.describe()
    assert (position.in_flight, position.samples_left) == (3, 21)
    assert [one.in_flight for one in position.shards] == [0, 1, 1, 1]
    assert "21 left, 3 of them to be given again" in str(position)


def test_what_all_ranks_have_in_flight() -> None:
    (common,) = served(range(100), 3, global_batch_size=8).state_dict()["loader"]
    state = {"loader": (common,), "in_flight_0_of_2": ([20, 21],), "in_flight_1_of_2": ([23],)}
    assert read_data_position(state).in_flight == 3


@pytest.mark.parametrize("old", [1, 2, 3, 8])
@pytest.mark.parametrize("new", [1, 2, 4, 5, 16])
@pytest.mark.parametrize("num_shards", [16, 30])
def test_a_change_of_ranks(old: int, new: int, num_shards: int) -> None:
    change = read_data_position(state_of(num_shards, old)).on(new)
    own = [len(range(rank, num_shards, new)) for rank in range(new)]
    assert change.shards_per_rank == (min(own), max(own))
    assert change.num_moved == sum(shard % old != shard % new for shard in range(num_shards))
    assert change.keeps_batches == (num_shards % math.lcm(old, new) == 0 and 16 % math.lcm(old, new) == 0)
    assert change.problem is None and str(change).startswith(f"data-parallel ranks {old} -> {new}: ")


def state_of(num_shards: int, dp_size: int) -> dict[str, Any]:
    state: dict[str, Any] = {}
    for rank in range(dp_size):
        source = Streams(lambda shard, num_shards, epoch: iter(range(9)), num_shards)
        state |= ElasticDataLoader(
            source, global_batch_size=16, dp_rank=rank, dp_size=dp_size, uneven=True, endless=True
        ).state_dict()
    return state


def test_a_change_that_would_be_refused() -> None:
    position = read_data_position(state_of(30, 2))
    assert "30 virtual shards cannot feed 31 ranks" in str(position.on(31))
    assert "unless the global batch of 16 becomes larger" in str(position.on(17))
    assert "3 to 4 samples a rank in each global batch (which takes uneven=True)" in str(position.on(5))
    assert "uneven" not in str(position.on(4))
    with pytest.raises(ValueError, match="dp_size=0"):
        position.on(0)


GOOD = {"version": 1, "kind": "samples", "num_samples": 9, "shuffle": True, "seed": 0, "epoch": 0, "next_sample": 0}
GOOD |= {"samples_seen": 0, "dropped": 0, "padded": 0, "dp_size": 1, "global_batch_size": 1}
STREAMS = {**GOOD, "kind": "streams", "num_shards": 2}


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"loader": 3},
        {"loader": ()},
        {"loader": ([],)},
        {"loader": ({**GOOD, "version": 3},)},
        {"loader": ({**GOOD, "kind": []},)},
        {"loader": ({**GOOD, "num_samples": -1},)},
        {"loader": ({**GOOD, "dp_size": 0},)},
        {"loader": ({**GOOD, "epoch": 0.5},)},
        {"loader": ({**GOOD, "again": 7},)},
        {"loader": (GOOD,), "in_flight_0_of_1": 5},
        {"loader": ({**STREAMS, "num_shards": 0},)},
        {"loader": (STREAMS,), "shard_0_of_2": 4},
        {"loader": (STREAMS,), "shard_0_of_2": ({"epoch": 1},)},
    ],
)
def test_what_is_no_state_of_a_loader(state: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="not the state of an ElasticDataLoader"):
        read_data_position(state)


def test_a_huge_number_of_shards_costs_nothing() -> None:
    position = read_data_position({"loader": ({**STREAMS, "num_shards": 10**18},)})
    assert position.on(7).num_moved == 10**18 - -(-(10**18) // 7)


def test_loaders_among_keys() -> None:
    fqns = ["step", "a.loader", "a.shard_0_of_1", "b.c.loader", "b.other", "reloader", "loader", "shard_0_of_2"]
    assert loaders_among(fqns) == {
        "a.": ["a.loader", "a.shard_0_of_1"],
        "b.c.": ["b.c.loader"],
        "": ["step", "reloader", "loader", "shard_0_of_2"],
    }
    assert loaders_among(["step"]) == {}
    assert isinstance(read_data_position({"loader": (GOOD,)}), DataPosition)
