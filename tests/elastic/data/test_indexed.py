"""Virtual shards over a map-style data set: runs, and parts of them that are dealt on."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tier import num_cases

from torchtitan_ext.elastic import ElasticDataLoader, IndexedStreams
from torchtitan_ext.elastic.data.indexed import IndexedPart, run_of
from torchtitan_ext.errors import CannotReshardError


@given(st.integers(0, 60), st.integers(1, 9))
def test_runs_are_one_after_another_and_differ_by_one_at_most(num_samples: int, num_splits: int) -> None:
    runs = [run_of(IndexedPart(num_samples, split, num_splits)) for split in range(num_splits)]
    assert [index for run in runs for index in run] == list(range(num_samples))
    sizes = [len(run) for run in runs]
    assert sizes == sorted(sizes, reverse=True) and max(sizes) - min(sizes) <= 1


def test_a_part_is_dealt_in_turn() -> None:
    first, second = IndexedPart(13, 0, 1, next_place=5).deal(2)
    assert (first.next_place, first.offset, first.stride) == (5, 0, 2)
    assert (second.next_place, second.offset, second.stride) == (6, 1, 2)


def test_later_epochs_are_shuffled_within_the_run() -> None:
    stream = IndexedStreams(range(100), num_shards=2, seed=3).open_stream(1, 0)
    assert list(stream) == list(range(50, 100))
    stream.start_epoch(1)
    shuffled = list(stream)
    assert sorted(shuffled) == list(range(50, 100)) and shuffled != list(range(50, 100))


@pytest.mark.parametrize(
    ("data", "num_shards", "error", "text"),
    [
        (list, 2, TypeError, "IndexedStreams: got data=the class list, expected a map-style data set"),
        (iter([]), 2, TypeError, "got data=a list_iterator, expected a map-style data set"),
        ([], "2", TypeError, "got num_shards='2', expected a whole number"),
        ([], 0, ValueError, "got num_shards=0, expected at least 1"),
    ],
)
def test_wrong_arguments(data: Any, num_shards: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        IndexedStreams(data, num_shards=num_shards)


def test_a_source_with_another_seed_is_refused() -> None:
    loader = ElasticDataLoader(IndexedStreams(list(range(20)), num_shards=2, seed=1), batch_size=2, collate_fn=list)
    next(iter(loader))
    other = ElasticDataLoader(IndexedStreams(list(range(20)), num_shards=2, seed=2), batch_size=2, collate_fn=list)
    with pytest.raises(CannotReshardError, match="ordered by seed 1, this source has seed 2.*pass seed=1"):
        other.load_state_dict(loader.state_dict())


@settings(max_examples=num_cases(200, 0.25), deadline=None)
@given(st.integers(0, 30), st.integers(1, 5), st.lists(st.integers(1, 4), max_size=3), st.integers(0, 8), st.data())
def test_parts_of_a_data_set_can_be_dealt_on_and_on(
    num_samples: int, num_splits: int, deals: list[int], stop: int, data: st.DataObject
) -> None:
    """Each deal, in the middle of an epoch, gives the rest of it once, and later epochs whole."""
    source = IndexedStreams(range(num_samples), num_shards=num_splits)
    streams = [(source.open_stream(shard, 0), shard) for shard in range(num_splits)]
    served: list[int] = []
    num_shards = num_splits
    for num_parts in deals:
        dealt = {}
        for stream, shard in streams:
            served += [sample for _, sample in zip(range(data.draw(st.integers(0, stop))), stream, strict=False)]
            states = source.split_state(stream.state_dict(), shard=shard, num_shards=num_shards, num_parts=num_parts)
            for part, state in enumerate(states):
                dealt[part * num_shards + shard] = state
        num_shards *= num_parts
        streams = []
        for shard, state in sorted(dealt.items()):
            stream = IndexedStreams(range(num_samples), num_shards=num_shards).open_stream(shard, 0)
            stream.load_state_dict(state)
            streams.append((stream, shard))
    served += [sample for stream, _ in streams for sample in stream]
    assert sorted(served) == list(range(num_samples))
    for epoch in (1, 2):
        for stream, _ in streams:
            stream.start_epoch(epoch)
        assert sorted(sample for stream, _ in streams for sample in stream) == list(range(num_samples))
