"""Packed sequences: the tokens of documents as one line, whatever the stops, restarts and owners."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_loaders import MAX_RANKS, Counted, Ranks
from tier import num_cases

from torchtitan_ext.elastic import ElasticDataLoader, IndexedStreams, PackedTokens, Streams

documents_strategy = st.lists(st.lists(st.integers(0, 99), max_size=12), min_size=1, max_size=8)


def line_of(documents: list[list[int]], seq_len: int) -> list[tuple[list[int], list[int], list[int]]]:
    """The oracle: shifted within documents, joined, cut; positions from 0 at each document and sequence."""
    line = [(document[i], document[i + 1], i) for document in documents for i in range(len(document) - 1)]
    sequences = []
    for start in range(0, len(line) - seq_len + 1, seq_len):
        part = line[start : start + seq_len]
        positions = []
        for i, (_, _, position) in enumerate(part):
            positions.append(0 if i == 0 or position == 0 else positions[-1] + 1)
        sequences.append(([token for token, _, _ in part], positions, [label for _, label, _ in part]))
    return sequences


def lists(sample: Any) -> tuple[list[int], list[int], list[int]]:
    inputs, labels = sample
    assert inputs["input"].dtype == inputs["positions"].dtype == labels.dtype == torch.int64
    return inputs["input"].tolist(), inputs["positions"].tolist(), labels.tolist()


@settings(max_examples=num_cases(200, 0.25), deadline=None)
@given(documents_strategy, st.integers(1, 9), st.integers(0, 12), st.booleans())
def test_sequences_are_a_line_of_tokens_and_go_on_where_they_stopped(
    documents: list[list[int]], seq_len: int, stop: int, stateful: bool
) -> None:
    source = PackedTokens(
        Streams(lambda shard, num_shards, epoch: Counted(documents) if stateful else iter(documents), 1),
        seq_len=seq_len,
    )
    stream = source.open_stream(0, 0)
    samples = []
    for _, sample in zip(range(stop), stream, strict=False):
        samples.append(lists(sample))
    again = source.open_stream(0, 0)
    again.load_state_dict(stream.state_dict())
    samples += [lists(sample) for sample in again]
    assert samples == line_of(documents, seq_len)


def test_the_epoch_after_a_resume_has_all_documents() -> None:
    documents = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    source = PackedTokens(Streams(lambda *_: iter(documents), 1), seq_len=2)
    stream = source.open_stream(0, 0)
    next(iter(stream))
    resumed = source.open_stream(0, 0)
    resumed.load_state_dict(stream.state_dict())
    assert [lists(sample)[0] for sample in resumed] == [[4, 5], [7, 8]]
    resumed.start_epoch(1)
    assert [lists(sample)[0] for sample in resumed] == [[1, 2], [4, 5], [7, 8]]


@settings(max_examples=num_cases(200, 0.25), deadline=None)
@given(st.data())
def test_no_token_is_lost_across_worlds_epochs_and_splits(data: st.DataObject) -> None:
    """Every token that was read is in a sequence that was served or in the state; documents in each epoch once."""
    num_documents = data.draw(st.integers(3, 14), "documents")
    documents = [[100 * i + j for j in range(data.draw(st.integers(2, 9), "tokens"))] for i in range(num_documents)]
    seq_len = data.draw(st.integers(1, 6), "seq_len")
    num_shards = data.draw(st.integers(1, 3), "shards")
    served: list[int] = []
    saved = None
    for _ in range(data.draw(st.integers(1, 4), "restarts")):
        num_shards *= data.draw(st.sampled_from([1, 1, 2]), "split")
        dp_size = data.draw(st.integers(1, min(num_shards, MAX_RANKS)), "ranks")

        def make(dp_rank: int, dp_size: int, num_shards: int = num_shards) -> ElasticDataLoader:
            source = PackedTokens(IndexedStreams(documents, num_shards=num_shards), seq_len=seq_len)
            return ElasticDataLoader(
                source, batch_size=1, dp_rank=dp_rank, dp_size=dp_size, uneven=True, last="pad", collate_fn=list
            )

        ranks = Ranks(make, dp_size, saved)
        for _ in range(data.draw(st.integers(0, 8), "steps")):
            batches = ranks.step() or []
            for batch, loader in zip(batches, ranks.loaders, strict=False):
                real = batch[: len(batch) - loader.num_padding]
                served += [token for sample in real for token in lists(sample)[0]]
        saved = ranks.state()

    assert saved is not None
    entries = [value[0] for key, value in saved.items() if key != "loader"]
    left = [token for entry in entries for token in (entry["stream"] or {"inputs": []})["inputs"]]
    epochs = {entry["epoch"] for entry in entries}
    (epoch,) = epochs
    counts = [(served + left).count(token) for document in documents for token in document[:-1]]
    assert len(served + left) == sum(counts) and set(counts) <= {epoch, epoch + 1}


def test_padding_where_an_epoch_has_less_tokens_than_a_sequence() -> None:
    """A rank without samples pads with what a fresh stream gives, which may need the tokens of several epochs."""

    def make(dp_rank: int, dp_size: int) -> ElasticDataLoader:
        source = PackedTokens(IndexedStreams([[1, 2], [3, 4], [5, 6]], num_shards=2), seq_len=3)
        return ElasticDataLoader(
            source, batch_size=1, dp_rank=dp_rank, dp_size=dp_size, uneven=True, last="pad", collate_fn=list
        )

    ranks = Ranks(make, 2)
    steps = [ranks.step() for _ in range(8)]
    served = [[lists(sample)[0] for (sample,) in batches] for batches in steps if batches]
    assert served[0] == [[1, 3, 1], [1, 3, 1]], "rank 1 has two tokens by now"


def test_a_batch_of_packed_sequences() -> None:
    source = PackedTokens(IndexedStreams([[1, 2, 3, 4, 5]] * 4, num_shards=1), seq_len=4)
    inputs, labels = next(iter(ElasticDataLoader(source, batch_size=2)))
    assert inputs["input"].tolist() == [[1, 2, 3, 4]] * 2 and inputs["positions"].tolist() == [[0, 1, 2, 3]] * 2
    assert labels.tolist() == [[2, 3, 4, 5]] * 2


def test_encode_makes_tokens_of_documents() -> None:
    source = PackedTokens(
        IndexedStreams(["ab", "c"], num_shards=1), seq_len=2, encode=lambda text: [0, *map(ord, text)]
    )
    assert [lists(sample)[0] for sample in source.open_stream(0, 0)] == [[0, 97]]


def test_a_sequence_has_tokens() -> None:
    with pytest.raises(ValueError, match="seq_len is 0, expected at least 1"):
        PackedTokens(Streams(lambda *_: [], 1), seq_len=0)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: PackedTokens([1, 2], seq_len=2), "PackedTokens: got documents=a list, expected a source of streams"),
        (lambda: PackedTokens(Streams, seq_len=2), "got documents=the class Streams, expected a source of streams"),
        (lambda: PackedTokens(Streams(list, 2), seq_len="2"), "got seq_len='2', expected a whole number"),
        (lambda: PackedTokens(Streams(list, 2), seq_len=2, encode="utf8"), "got encode='utf8', expected a function"),
    ],
)
def test_arguments_of_another_type(make: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        make()
