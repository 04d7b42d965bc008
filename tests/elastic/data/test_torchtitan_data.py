"""Checkpoints of torchtitan 0.3.0's data loader, made by that code, go to other numbers of ranks."""

import base64
import json
import pickle
import re
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from simulated_loaders import Ranks

from torchtitan_ext.elastic import ElasticDataLoader, TorchtitanTextStreams
from torchtitan_ext.elastic.data.indexed import IndexedPart, run_of
from torchtitan_ext.elastic.data.virtual_shards import ShardState, from_entry, shard_key
from torchtitan_ext.errors import CannotReshardError, DamagedCheckpointError

SAVED = Path(__file__).parent / "torchtitan_0_3_0"
SEQ_LEN = 16
DOCUMENTS = [json.loads(line) for line in (SAVED / "texts" / "documents.json").read_text().splitlines()]


@cache
def read_saved(name: str) -> dict[str, Any]:
    return json.loads((SAVED / f"{name}.json").read_text())


def states_of(name: str) -> dict[str, Any]:
    """What torchtitan saved under ``dataloader``, of all ranks."""
    encoded = read_saved(name)["dataloader"]
    return {key: base64.b64decode(value) if isinstance(value, str) else value for key, value in encoded.items()}


def changed(states: dict[str, Any], rank: int, change: Any) -> dict[str, Any]:
    state = pickle.loads(states[f"dp_rank_{rank}"])
    change(state)
    return {**states, f"dp_rank_{rank}": pickle.dumps(state)}


def encode(text: str) -> list[int]:
    """As ``WordTokens`` of ``torchtitan_0_3_0/generate.py``."""
    words = (word.removeprefix("d").split("w") for word in text.split())
    return [1] + [3 + 32 * int(document) + int(place) for document, place in words] + [2]


def source_of(num_shards: int, data: Any = DOCUMENTS) -> TorchtitanTextStreams:
    return TorchtitanTextStreams(data, encode, seq_len=SEQ_LEN, num_shards=num_shards)


def loader_of(num_shards: int, *, data: Any = DOCUMENTS, **options: Any) -> Any:
    """A function from dp_rank and dp_size to a loader, with torchtitan's batch size unless given another."""
    options = options if "global_batch_size" in options else {"batch_size": 2, **options}

    def make(dp_rank: int, dp_size: int) -> ElasticDataLoader:
        source = source_of(num_shards, data)
        return ElasticDataLoader(source, dp_rank=dp_rank, dp_size=dp_size, uneven=True, collate_fn=list, **options)

    return make


def rows(samples: list[Any]) -> list[list[list[int]]]:
    return [[inputs["input"].tolist(), inputs["positions"].tolist(), labels.tolist()] for inputs, labels in samples]


def words_of(samples: list[Any]) -> Counter[int]:
    return Counter(token for inputs, _ in samples for token in inputs["input"].tolist() if token > 2)


ALL_WORDS = Counter(token for document in DOCUMENTS for token in encode(document["text"]) if token > 2)


def served_before(name: str) -> Counter[int]:
    """The words that the old ranks had served: their loaders' first batches, by our own source."""
    saved = read_saved(name)
    num_ranks = saved["dataloader"]["world_size"]
    old = Ranks(loader_of(num_ranks, endless=True), num_ranks)
    batches = [batch for _ in range(saved["steps_before"]) for batch in old.step() or []]
    return words_of([sample for batch in batches for sample in batch])


@pytest.mark.parametrize(
    "name", ["8_ranks_first_epoch", "8_ranks_two_epochs", "16_ranks_first_epoch", "2_ranks_one_worker"]
)
def test_the_same_ranks_go_on_as_torchtitan_does(name: str) -> None:
    """Inputs, positions and labels of every old rank, also where an epoch ends in between."""
    saved = read_saved(name)
    num_ranks = saved["dataloader"]["world_size"]
    ranks = Ranks(loader_of(num_ranks, endless=True), num_ranks, states_of(name))
    continued: list[list[Any]] = [[] for _ in range(num_ranks)]
    for _ in range(len(saved["continued"][0]) // 2):
        for rank, batch in enumerate(ranks.step() or []):
            continued[rank] += rows(batch)
    assert continued == saved["continued"]


@pytest.mark.parametrize("name", ["8_ranks_first_epoch", "8_ranks_two_epochs", "16_ranks_first_epoch"])
def test_a_new_job_is_torchtitan_s_from_the_beginning(name: str) -> None:
    saved = read_saved(name)
    num_ranks = saved["dataloader"]["world_size"]
    fresh = Ranks(loader_of(num_ranks, endless=True), num_ranks)
    for _ in range(saved["steps_before"]):
        fresh.step()
    batches = fresh.step() or []
    assert [rows(batch) for batch in batches] == [continued[:2] for continued in saved["continued"]]
    adopted = Ranks(loader_of(num_ranks, endless=True), num_ranks, states_of(name))
    ours, theirs = fresh.loaders[1].state_dict(), adopted.loaders[1].state_dict()
    assert ours["loader"][0]["samples_seen"] == theirs["loader"][0]["samples_seen"] + 2 * num_ranks


@pytest.mark.parametrize(
    "name, num_shards, new_ranks",
    [
        ("8_ranks_first_epoch", 16, 16),
        ("8_ranks_first_epoch", 16, 4),
        ("8_ranks_first_epoch", 8, 4),
        ("8_ranks_first_epoch", 24, 12),
        ("8_ranks_first_epoch", 16, 3),
        ("16_ranks_first_epoch", 16, 8),
        ("16_ranks_first_epoch", 32, 8),
    ],
)
def test_the_rest_of_the_epoch_is_served_once_by_other_ranks(name: str, num_shards: int, new_ranks: int) -> None:
    """Every word of every document: served by the old ranks, by the new ones, or left over in the new state."""
    ranks = Ranks(loader_of(num_shards, last="pad"), new_ranks, states_of(name))
    assert ranks.loaders[0].samples_seen == sum_of_samples(name)
    served = served_before(name)
    while (batches := ranks.step()) is not None:
        for batch, loader in zip(batches, ranks.loaders, strict=True):
            served += words_of(batch[: len(batch) - loader.num_padding])
    entries = [value[0] for key, value in ranks.state().items() if key != "loader"]
    left = Counter(token for entry in entries for token in entry["stream"]["inputs"] if token > 2)
    assert served + left == ALL_WORDS
    assert {entry["epoch"] for entry in entries} == {1}


def sum_of_samples(name: str) -> int:
    saved = read_saved(name)
    return saved["steps_before"] * 2 * saved["dataloader"]["world_size"]


@pytest.mark.parametrize("num_parts", [1, 2, 3, 16])
@pytest.mark.parametrize("name", ["8_ranks_first_epoch", "8_ranks_two_epochs"])
def test_every_epoch_has_every_document_once_for_ever(name: str, num_parts: int) -> None:
    """Document by document: what old rank r had read of its epoch, and what its shards read, is its part."""
    num_shards = 8 * num_parts
    loader = loader_of(num_shards, endless=True)(0, 1)
    state = loader.reshard(states_of(name), None, None).state
    assert len(state) == num_shards + 1
    read: Counter[tuple[int, str]] = Counter()
    expected: Counter[tuple[int, str]] = Counter()
    last = 4
    for rank in range(8):
        data_state = pickle.loads(states_of(name)[f"dp_rank_{rank}"])["dataset_state"]
        run = run_of(IndexedPart(len(DOCUMENTS), rank, 8))
        for epoch in range(data_state["epoch"], last):
            expected.update((epoch, DOCUMENTS[index]["text"]) for index in run)
        # The old rank's own documents of its epoch: its stream from the beginning of that epoch, as many as it counts.
        documents = source_of(8)._documents.open_stream(rank, data_state["epoch"])
        for _, document in zip(range(data_state["sample_idx"]), documents, strict=False):
            read[data_state["epoch"], document["text"]] += 1
    for shard in range(num_shards):
        (entry,) = state[f"shard_{shard}_of_{num_shards}"]
        epoch = entry["epoch"]

        def note(sample: Any) -> list[int]:
            read[epoch, sample["text"]] += 1  # noqa: B023 read in this turn of the loop
            return encode(sample["text"])

        source = source_of(num_shards)
        source._encode = note
        stream = source.open_stream(shard, epoch)
        stream.load_state_dict(entry["stream"])
        while epoch < last:
            list(stream)
            epoch += 1
            stream.start_epoch(epoch)
    assert read == expected


def test_an_adopted_loader_saves_its_own_state_and_goes_on_anywhere() -> None:
    """8 -> 16 -> 4 -> 16 with 32 shards: restarts do not change what is served."""
    make = loader_of(16, global_batch_size=16, endless=True)
    adopted = Ranks(make, 1, states_of("8_ranks_two_epochs"))
    whole = [sorted(rows((adopted.step() or [[]])[0])) for _ in range(9)]
    saved: dict[str, Any] = states_of("8_ranks_two_epochs")
    step = 0
    for new_ranks in (16, 4, 16):
        ranks = Ranks(make, new_ranks, saved)
        for _ in range(3):
            served = sorted(row for batch in ranks.step() or [] for row in rows(batch))
            assert served == whole[step]
            step += 1
        saved = ranks.state()
    finer = loader_of(32, global_batch_size=16, endless=True)(0, 2)
    note = finer.reshard(saved, None, None).note
    samples = sum_of_samples("8_ranks_two_epochs") + 9 * 16
    assert note == (
        f"goes on after {samples} samples in epochs 1 to 3, virtual shards 16 -> 32, each dealt to 2, "
        "data-parallel ranks 16 -> 2"
    )


def test_the_note_says_whose_state_it_was() -> None:
    note = loader_of(16)(0, 16).reshard(states_of("8_ranks_first_epoch"), None, None).note
    assert note == (
        "adopted from torchtitan, goes on after 48 samples in epoch 0, virtual shards 8 -> 16, each dealt to 2, "
        "data-parallel ranks 8 -> 16"
    )


@pytest.mark.parametrize("name", ["8_ranks_first_epoch", "8_ranks_two_epochs", "16_ranks_first_epoch"])
def test_shards_go_back_as_what_torchtitan_saved(name: str) -> None:
    states = states_of(name)
    num_ranks = states["world_size"]
    source = source_of(num_ranks)
    adopted = source.adopt(states)
    assert adopted is not None
    for rank in range(num_ranks):
        theirs = pickle.loads(states[f"dp_rank_{rank}"])
        served = theirs["_sampler_iter_state"]["samples_yielded"]
        shard = from_entry(shard_key(rank, num_ranks), adopted)
        state = source.as_torchtitan(rank, shard, samples_served=served, batch_size=2)
        assert state is not None and pickle.loads(state) == theirs


def test_streaming_shards_go_back_as_what_torchtitan_saved(streamed: Any) -> None:
    states = states_of("2_ranks_streaming")
    source = source_of(2, streamed)
    adopted = source.adopt(states)
    assert adopted is not None
    theirs = pickle.loads(states["dp_rank_1"])
    shard = from_entry(shard_key(1, 2), adopted)
    served = theirs["_sampler_iter_state"]["samples_yielded"]
    state = source.as_torchtitan(1, shard, samples_served=served, batch_size=1)
    assert state is not None and pickle.loads(state)["dataset_state"] == theirs["dataset_state"]


def test_parts_of_a_shard_and_ended_data_do_not_go_back() -> None:
    half = Ranks(loader_of(16, endless=True), 16, states_of("8_ranks_first_epoch")).loaders[3].state_dict()
    shard = from_entry(shard_key(3, 16), half)
    assert source_of(16).as_torchtitan(3, shard, samples_served=4, batch_size=2) is None
    assert source_of(2).as_torchtitan(1, ShardState(finished=True), samples_served=4, batch_size=2) is None


def test_our_own_states_are_read_where_both_are_there() -> None:
    states = states_of("8_ranks_first_epoch")
    assert source_of(8).adopt({**states, "loader": ({},)}) is None


def refusal(states: dict[str, Any], num_shards: int = 2, dp_size: int = 2, **options: Any) -> CannotReshardError:
    loader = loader_of(num_shards, **options)(0, dp_size)
    before = loader.state_dict()
    with pytest.raises(CannotReshardError) as caught:
        loader.reshard(states, None, None)
    with pytest.raises(CannotReshardError):
        loader.load_state_dict(states)
    assert loader.state_dict() == before
    return caught.value


@pytest.mark.parametrize("num_shards, dp_size, choice", [(12, 12, 24), (4, 4, 8), (20, 10, 40)])
def test_shards_that_are_no_multiple_are_refused_with_the_number_to_choose(
    num_shards: int, dp_size: int, choice: int
) -> None:
    error = refusal(states_of("8_ranks_first_epoch"), num_shards, dp_size)
    assert error.reason == (
        f"the checkpoint has 8 virtual shards (the data-parallel ranks of torchtitan), this loader {num_shards}, and "
        + ("shards cannot be merged" if num_shards < 8 else "shards can be split into equal parts only")
    )
    assert error.remedy == f"choose num_shards={choice}, or another multiple of 8"


def test_missing_ranks_are_refused() -> None:
    states = states_of("8_ranks_first_epoch")
    del states["dp_rank_3"]
    error = refusal(states, 8)
    assert "was saved by 8 data-parallel ranks, but has states of 7; without dp_rank_3" in error.reason
    assert "all data loader entries of one checkpoint" in error.remedy


def test_several_workers_are_refused() -> None:
    error = refusal(states_of("2_ranks_two_workers"))
    assert "dp_rank_0 cannot be taken over: it was saved with 2 loader workers, each at its own place" in error.reason
    assert error.remedy == "reset the data loader, or go on with torchtitan and 2 data-parallel ranks"


def test_a_snapshot_older_than_the_checkpoint_is_refused() -> None:
    assert "snapshot is 1 batches older than the checkpoint" in refusal(states_of("2_ranks_old_snapshot")).reason


def test_leftover_tokens_that_a_worker_saved_too_late_are_refused() -> None:
    """As the two files of torchtitan's own workers show: the lists went on changing after the state was taken."""

    def change(state: dict[str, Any]) -> None:
        worker = state["_snapshot"]["_worker_snapshots"]["worker_0"]["dataset_state"]
        for name, token in (("inputs_buffer", 1), ("labels_buffer", 2211), ("positions_buffer", 0)):
            worker[name].append(token)

    error = refusal(changed(states_of("2_ranks_one_worker"), 1, change))
    assert "leftover tokens are not those before document" in error.reason and "while they change" in error.reason


def test_interleaved_data_sets_are_refused() -> None:
    error = refusal(states_of("1_rank_interleaved"), 2)
    assert "mixes several data sets by a random state" in error.reason


def test_streaming_states_need_a_streaming_data_set() -> None:
    assert "it is of a streaming data set, and this source" in refusal(states_of("2_ranks_streaming")).reason


@pytest.mark.parametrize(
    "change, reason",
    [
        (lambda state: state["dataset_state"].update(pending_input_ids=[]), "ChatDataset, which packs whole"),
        (
            lambda state: state["dataset_state"].update(extra=1),
            "none that is known .its state has epoch, extra, inputs",
        ),
        (lambda state: state.update(dataset_state=None), "its data set has no state"),
        (lambda state: state["dataset_state"].update(sample_idx=999), "had read 999 documents .* which has 16 here"),
        (lambda state: state.update(_sampler_iter_state=None), "had no batch size of its own"),
        (lambda state: state.pop("_sampler_iter_state"), "dp_rank_1 is not as version 0.3.0 writes it"),
        (lambda state: (state.clear(), state.update(step=1)), "not the state of a StatefulDataLoader"),
        (lambda state: state.update(hook=print), "found builtins.print.; store plain data instead"),
    ],
)
def test_states_that_are_not_exact_are_refused(change: Any, reason: str) -> None:
    error = refusal(changed(states_of("8_ranks_first_epoch"), 1, change), 8)
    assert re.search(reason, error.reason), error.reason
    assert "dp_rank_1" in error.reason


def test_other_bytes_are_refused() -> None:
    states = states_of("8_ranks_first_epoch")
    with pytest.raises(DamagedCheckpointError, match="dp_rank_2: its bytes are damaged .*; load another step"):
        refusal({**states, "dp_rank_2": states["dp_rank_2"][:40]}, 8)
    assert "it is a dict, not the pickle" in refusal({**states, "dp_rank_2": {}}, 8).reason


def test_states_of_the_grain_loader_are_refused() -> None:
    """https://github.com/pytorch/torchtitan/blob/main/torchtitan/components/data/loader.py"""
    error = refusal({"version": 1, "dp_world_size": 2, "dp_rank_0": {"next_index": 3}, "dp_rank_1": {"next_index": 3}})
    assert "dp_rank_0 to dp_rank_1 are of torchtitan's Grain loader (version 1)" in error.reason
    assert "go on with torchtitan and 2 data-parallel ranks" in error.remedy


def test_ranks_in_different_epochs_need_an_endless_loader() -> None:
    assert "are in epochs 0 to 1" in refusal(states_of("8_ranks_two_epochs"), 8).reason


def test_a_loader_over_other_data_says_who_adopts_them() -> None:
    with pytest.raises(CannotReshardError, match="it has dp_rank_0.*TorchtitanTextStreams, which adopts torchtitan's"):
        ElasticDataLoader(DOCUMENTS, batch_size=1).reshard(states_of("8_ranks_first_epoch"), None, None)


def test_a_shorter_data_set_is_refused() -> None:
    loader = ElasticDataLoader(source_of(8, DOCUMENTS[:8]), batch_size=1)
    with pytest.raises(
        CannotReshardError, match=r"of the data, which has 1 here: this is not the data set it was saved"
    ):
        loader.reshard(states_of("8_ranks_first_epoch"), None, None)


def test_a_data_set_of_another_length_is_refused() -> None:
    ranks = Ranks(loader_of(2, endless=True), 2)
    ranks.step()
    for num_shards in (2, 4):
        loader = ElasticDataLoader(source_of(num_shards, DOCUMENTS[:50]), batch_size=1, endless=True)
        for load in (loader.load_state_dict, lambda state, loader=loader: loader.reshard(state, None, None)):
            with pytest.raises(CannotReshardError, match="saved over 122 documents, this data set has 50"):
                load(ranks.state())
        assert loader.samples_seen == 0


def test_torchtitan_makes_the_same_files() -> None:
    pytest.importorskip("torchtitan")
    pytest.importorskip("torchdata")
    sys.path.insert(0, str(SAVED))
    try:
        generate = pytest.importorskip("generate")
    finally:
        sys.path.remove(str(SAVED))
    assert generate.make_documents() == DOCUMENTS
    for name, case in generate.SAVED.items():
        # What workers save is not the same twice: see _RACE in torchtitan_data.py.
        if not case[3].get("num_workers"):
            again = generate.make_saved(*case)
            theirs = {key: value for key, value in read_saved(name).items() if key != "dataloader"}
            assert {key: value for key, value in again.items() if key != "dataloader"} == theirs
            for key, value in states_of(name).items():
                if key != "world_size":
                    assert pickle.loads(base64.b64decode(again["dataloader"][key])) == pickle.loads(value)


@pytest.fixture
def streamed() -> Any:
    datasets = pytest.importorskip("datasets")
    return datasets.load_dataset(str(SAVED / "texts"), split="train", streaming=True)


def test_streaming_states_go_on_one_to_one(streamed: Any) -> None:
    saved = read_saved("2_ranks_streaming")
    one_rank = Ranks(loader_of(2, data=streamed, endless=True), 1, states_of("2_ranks_streaming"))
    continued: list[list[Any]] = [[], []]
    for _ in range(len(saved["continued"][0])):
        for shard, sample in enumerate((one_rank.step() or [])[0]):
            continued[shard] += rows([sample])
    assert continued == saved["continued"]


def test_streaming_states_cannot_be_split(streamed: Any) -> None:
    error = refusal(states_of("2_ranks_streaming"), 4, 2, data=streamed)
    assert error.reason == (
        "the checkpoint has 2 virtual shards (the data-parallel ranks of torchtitan), this loader 4, and these streams "
        "cannot be split"
    )
    assert error.remedy == "choose num_shards=2"


def test_map_style_states_need_a_map_style_data_set(streamed: Any) -> None:
    error = refusal(states_of("8_ranks_first_epoch"), 8, 2, data=streamed)
    assert "it is of a map-style data set, and this source reads a streaming one" in error.reason


def test_streaming_states_of_a_worker_are_refused(streamed: Any) -> None:
    def change(state: dict[str, Any]) -> None:
        worker = state["_snapshot"]["_worker_snapshots"]["worker_0"]["dataset_state"]
        del worker["sample_idx"], worker["epoch"]
        worker["data"] = {"epoch": 0}

    error = refusal(changed(states_of("2_ranks_one_worker"), 0, change), data=streamed)
    assert "streaming data set that was read by a loader worker" in error.reason


def test_encode_is_a_function() -> None:
    with pytest.raises(TypeError, match="TorchtitanTextStreams: got encode='utf8', expected a function"):
        TorchtitanTextStreams(DOCUMENTS, "utf8", seq_len=4, num_shards=2)
