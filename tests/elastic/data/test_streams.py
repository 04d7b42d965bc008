"""Sources over what users have: plain iterables, parts of a data set, Hugging Face ``datasets``, ``torchdata``."""

from typing import Any

import pytest
from simulated_loaders import Counted, Ranks
from torch.utils.data import IterableDataset

from torchtitan_ext.elastic import (
    ElasticDataLoader,
    HuggingFaceStreams,
    IndexedStreams,
    PackedTokens,
    Streams,
    StreamSource,
)
from torchtitan_ext.elastic.data.streams import AdoptsStates, ChecksStates, SplitsStates, Stream


def loader_over(source: Any, **options: Any) -> Any:
    def make(dp_rank: int, dp_size: int) -> ElasticDataLoader:
        return ElasticDataLoader(source, dp_rank=dp_rank, dp_size=dp_size, uneven=True, collate_fn=list, **options)

    return make


def serve_with_restarts(make: Any, worlds: list[tuple[int, int]]) -> list[list[Any]]:
    """The global batches of worlds of (ranks, steps), each going on from the one before."""
    batches = []
    saved = None
    for dp_size, steps in worlds:
        ranks = Ranks(make, dp_size, saved)
        for _ in range(steps):
            batches.append([sample for batch in ranks.step() or [] for sample in batch])
        saved = ranks.state()
    return batches


def test_what_the_protocols_take() -> None:
    assert isinstance(Streams(lambda *_: [], 2), StreamSource)
    assert not isinstance(Streams(lambda *_: [], 2), (SplitsStates, AdoptsStates))
    assert isinstance(IndexedStreams([], num_shards=2), SplitsStates)
    assert isinstance(IndexedStreams([], num_shards=2), ChecksStates)
    assert isinstance(PackedTokens(IndexedStreams([], num_shards=2), seq_len=2), ChecksStates)
    assert not isinstance(PackedTokens(Streams(lambda *_: [], 2), seq_len=2), ChecksStates)
    assert isinstance(Counted([]), Stream) and not isinstance(iter([]), Stream)


class Numbers(IterableDataset):
    """What a user hands to a torchdata loader: stateful, and divided among its workers."""

    def __init__(self, shard: int, length: int) -> None:
        self.samples = Counted([(shard, i) for i in range(length)])

    def __iter__(self) -> Any:
        return iter(self.samples)

    def state_dict(self) -> dict[str, Any]:
        return self.samples.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.samples.load_state_dict(state)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_loaders_of_torchdata_are_streams(num_workers: int) -> None:
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")

    def open_stream(shard: int, num_shards: int, epoch: int) -> Any:
        return torchdata.StatefulDataLoader(Numbers(shard, 6), batch_size=None, num_workers=num_workers)

    make = loader_over(Streams(open_stream, 4), global_batch_size=4)
    batches = serve_with_restarts(make, [(2, 2), (4, 1), (1, 3)])
    assert [sorted(map(tuple, batch)) for batch in batches] == [[(v, i) for v in range(4)] for i in range(6)]


@pytest.fixture
def datasets() -> Any:
    return pytest.importorskip("datasets")


def streaming(datasets: Any, num_samples: int, num_files: int) -> Any:
    data = datasets.Dataset.from_dict({"index": list(range(num_samples))})
    return data.to_iterable_dataset(num_shards=num_files)


@pytest.mark.nightly("clients")
@pytest.mark.parametrize("num_files", [1, 8])
def test_a_streaming_data_set_of_hugging_face(datasets: Any, num_files: int) -> None:
    source = HuggingFaceStreams(streaming(datasets, 32, num_files), num_shards=4)
    make = loader_over(source, global_batch_size=4)
    whole = serve_with_restarts(make, [(1, 8)])
    restarted = serve_with_restarts(make, [(2, 3), (4, 2), (1, 3)])
    key = [sorted(sample["index"] for sample in batch) for batch in whole]
    assert [sorted(sample["index"] for sample in batch) for batch in restarted] == key
    assert sorted(sum(key, [])) == list(range(32))


@pytest.mark.nightly("clients")
def test_a_shuffled_streaming_data_set_is_replayed(datasets: Any) -> None:
    shuffled = streaming(datasets, 32, 4).shuffle(seed=0, buffer_size=10)
    with pytest.raises(ValueError, match='loses its shuffle buffer .*; pass resume="replay"'):
        HuggingFaceStreams(shuffled, num_shards=4)
    make = loader_over(HuggingFaceStreams(shuffled, num_shards=4, resume="replay"), global_batch_size=4)
    served = serve_with_restarts(make, [(2, 3), (4, 2), (1, 3)])
    assert sorted(sample["index"] for batch in served for sample in batch) == list(range(32))


@pytest.mark.nightly("clients")
def test_a_map_style_data_set_of_hugging_face(datasets: Any) -> None:
    data = datasets.Dataset.from_dict({"index": list(range(20))})
    served = serve_with_restarts(loader_over(data, global_batch_size=4), [(2, 2), (4, 1), (1, 2)])
    assert sorted(sample["index"] for batch in served for sample in batch) == list(range(20))


class Epochs:
    """What a streaming data set is told apart by."""

    def set_epoch(self, epoch: int) -> None: ...


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: Streams([1, 2], 2), TypeError, "Streams: got open=a list, expected a function of shard, num_shards"),
        (lambda: Streams(Counted, "2"), TypeError, "Streams: got num_shards='2', expected a whole number"),
        (lambda: Streams(Counted, 0), ValueError, "Streams: got num_shards=0, expected at least 1"),
        (lambda: HuggingFaceStreams([1], num_shards=2), TypeError, "got dataset=a list, expected a streaming data set"),
        (
            lambda: HuggingFaceStreams(Epochs, num_shards=2),
            TypeError,
            "got dataset=the class Epochs, expected a str",
        ),
        (lambda: HuggingFaceStreams(Epochs(), num_shards=0), ValueError, "got num_shards=0, expected at least 1"),
        (lambda: HuggingFaceStreams(Epochs(), num_shards=2, resume="states"), ValueError, "got resume='states', expec"),
    ],
)
def test_wrong_arguments(make: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        make()
