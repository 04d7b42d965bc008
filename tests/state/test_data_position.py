"""Where a data loader stands by its state, against the loaders themselves."""

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
        {"loader": ({**STREAMS, "num_shards": 0},)},
        {"loader": (STREAMS,), "shard_0_of_2": 4},
        {"loader": (STREAMS,), "shard_0_of_2": ({"epoch": 1},)},
    ],
)
def test_what_is_no_state_of_a_loader(state: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="not the state of an ElasticDataLoader"):
        read_data_position(state)


def test_a_huge_number_of_shards_costs_nothing() -> None:
    assert read_data_position({"loader": ({**STREAMS, "num_shards": 10**18},)}).num_shards == 10**18


def test_loaders_among_keys() -> None:
    fqns = ["step", "a.loader", "a.shard_0_of_1", "b.c.loader", "b.other", "reloader", "loader", "shard_0_of_2"]
    assert loaders_among(fqns) == {
        "a.": ["a.loader", "a.shard_0_of_1"],
        "b.c.": ["b.c.loader"],
        "": ["step", "reloader", "loader", "shard_0_of_2"],
    }
    assert loaders_among(["step"]) == {}
    assert isinstance(read_data_position({"loader": (GOOD,)}), DataPosition)
