"""The shards of one rank: whose turn it is, and what is kept of each."""

from typing import Any

import pytest

from torchtitan_ext.elastic import ElasticDataLoader, Streams, TooFewShardsError
from torchtitan_ext.elastic.data.sampler import Share
from torchtitan_ext.elastic.data.virtual_shards import (
    EmptyShardError,
    EpochEnd,
    ShardReader,
    ShardState,
    from_entry,
    shard_key,
    to_entry,
)
from torchtitan_ext.elastic.data.workers import WorkerOptions
from torchtitan_ext.errors import CannotReshardError


def reader_of(lengths: list[int], *, dp_rank: int = 0, dp_size: int = 1, endless: bool = False) -> ShardReader:
    """Sample i of shard v in epoch e is "vi", or "vi" + "'" * e."""

    def open_stream(shard: int, num_shards: int, epoch: int) -> list[str]:
        return [f"{'abcd'[shard]}{i}" + "'" * epoch for i in range(lengths[shard])]

    share = Share(dp_size, dp_rank, dp_size, "drop", endless)
    return ShardReader(Streams(open_stream, len(lengths)), share, WorkerOptions())


@pytest.mark.parametrize(
    ("dp_size", "turns"),
    [
        (1, ["a0 b0 c0 d0 a1 b1 c1 d1"]),
        (2, ["a0 c0 a1 c1", "b0 d0 b1 d1"]),
        (3, ["a0 d0 a1 d1", "b0 b1", "c0 c1"]),
    ],
)
def test_the_example_of_the_module(dp_size: int, turns: list[str]) -> None:
    for rank in range(dp_size):
        assert reader_of([2] * 4, dp_rank=rank, dp_size=dp_size).draw(9) == turns[rank].split()


def test_the_shard_that_gave_the_fewest_comes_next() -> None:
    reader = reader_of([9, 9])
    reader.load({0: ShardState(taken=3, total=3), 1: ShardState(taken=1, total=1)})
    assert reader.draw(5) == ["b1", "b2", "a3", "b3", "a4"]
    assert {shard: state.taken for shard, state in reader.states().items()} == {0: 5, 1: 4}


def test_the_end_of_an_epoch_counts_what_was_served() -> None:
    reader = reader_of([1, 4])
    assert reader.draw(2) == ["a0", "b0"]
    reader.commit()
    assert reader.draw(2) == ["b1", "b2"]
    reader.end_epoch()
    states = reader.states()
    assert states[0].last_epoch == EpochEnd(epoch=0, served=1, read_to_end=True)
    assert states[1].last_epoch == EpochEnd(epoch=0, served=1, read_to_end=False)
    assert [states[shard].total for shard in (0, 1)] == [1, 1]
    assert reader.draw(2) == ["a0'", "b0'"]


def test_an_endless_shard_goes_on_by_itself() -> None:
    assert reader_of([1, 2], endless=True).draw(6) == ["a0", "b0", "a0'", "b1", "a0''", "b0'"]


def test_a_sample_to_pad_with_comes_from_the_own_shards_first() -> None:
    assert reader_of([2, 2], dp_rank=1, dp_size=2).first_sample() == "b0"
    assert reader_of([2, 0], dp_rank=1, dp_size=2).first_sample() == "a0"


def test_entries_go_there_and_back() -> None:
    state = ShardState(3, 7, 40, True, EpochEnd(2, 11, True), {"position": 7})
    entry = to_entry(state)
    assert from_entry("x", {"x": entry}) == state and isinstance(entry[0]["last_epoch"], dict)
    assert from_entry("x", {"x": to_entry(ShardState())}) == ShardState()
    assert shard_key(7, 16) == "shard_7_of_16"


@pytest.mark.parametrize("entry", [None, (), ({},), ({"epoch": 1},), "text"])
def test_foreign_entries_are_refused(entry: Any) -> None:
    with pytest.raises(CannotReshardError, match="the checkpoint's entry x is not a shard's"):
        from_entry("x", {"x": entry})
    with pytest.raises(CannotReshardError, match="the checkpoint's entry y is missing"):
        from_entry("y", {"x": entry})


def streams_of(lengths: list[int]) -> Streams:
    return Streams(lambda shard, num_shards, epoch: range(lengths[shard]), len(lengths))


def test_more_ranks_than_shards_are_refused_at_construction() -> None:
    message = "4 virtual shards cannot feed 6 data-parallel ranks, .*; choose num_shards=6 or a multiple"
    with pytest.raises(TooFewShardsError, match=message) as caught:
        ElasticDataLoader(streams_of([1] * 4), batch_size=1, dp_rank=0, dp_size=6)
    assert isinstance(caught.value, ValueError)


def test_an_endless_shard_without_samples_is_named() -> None:
    loader = ElasticDataLoader(streams_of([1, 0]), batch_size=2, endless=True)
    with pytest.raises(EmptyShardError, match="shard 1 of 2 gave no sample in 100 epochs; choose a smaller num_shards"):
        next(iter(loader))
