"""Virtual shards: no sample lost or repeated whatever worlds serve them, and the sets of global batches as promised."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_loaders import Counted, Ranks
from tier import num_cases

from torchtitan_ext.elastic import ElasticDataLoader, Streams
from torchtitan_ext.errors import CannotReshardError

Sample = tuple[int, int, int]


def samples_of(shard: int, epoch: int, length: int) -> list[Sample]:
    return [(epoch, shard, position) for position in range(length)]


def streams_of(lengths: list[int], stateful: bool = True) -> Streams:
    """Shards of these lengths; sample i of shard v in epoch e is (e, v, i)."""

    def open_stream(shard: int, num_shards: int, epoch: int) -> Any:
        assert num_shards == len(lengths)
        samples = samples_of(shard, epoch, lengths[shard])
        return Counted(samples) if stateful else iter(samples)

    return Streams(open_stream, len(lengths))


def loader_over(source: Streams, **options: Any) -> Callable[[int, int], ElasticDataLoader]:
    def make(dp_rank: int, dp_size: int) -> ElasticDataLoader:
        return ElasticDataLoader(source, dp_rank=dp_rank, dp_size=dp_size, uneven=True, collate_fn=list, **options)

    return make


def real_samples(ranks: Ranks, batches: list[list[Sample]]) -> list[Sample]:
    pairs = zip(batches, ranks.loaders, strict=True)
    return [sample for batch, loader in pairs for sample in batch[: len(batch) - loader.num_padding]]


class Ledger:
    """What was served, by shard and epoch, against what the shards hold."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths
        self.served: dict[tuple[int, int], list[int]] = defaultdict(list)

    def book(self, samples: list[Sample]) -> None:
        for epoch, shard, position in samples:
            self.served[epoch, shard].append(position)

    def check_in_order(self) -> None:
        """Each shard gave a beginning of each epoch, each sample once; a later epoch only after the whole of it."""
        for (_, shard), positions in self.served.items():
            assert positions == list(range(len(positions))) and len(positions) <= self.lengths[shard]

    def check_whole(self, epoch: int) -> None:
        for shard, length in enumerate(self.lengths):
            assert self.served[epoch, shard] == list(range(length))

    def check_declared(self, epoch: int, state: dict[str, Any], dropped: int) -> None:
        """What an epoch did not serve is what its shards' entries declare."""
        num_known = 0
        for shard, length in enumerate(self.lengths):
            last_epoch = state[f"shard_{shard}_of_{len(self.lengths)}"][0]["last_epoch"]
            assert last_epoch["epoch"] == epoch
            assert self.served[epoch, shard] == list(range(last_epoch["served"]))
            if last_epoch["read_to_end"]:
                num_known += length - last_epoch["served"]
        assert num_known <= dropped


@settings(max_examples=num_cases(600, 0.25), deadline=None)
@given(st.data())
def test_no_sample_is_lost_or_repeated_across_restarts(data: st.DataObject) -> None:
    num_shards = data.draw(st.integers(1, 8), "shards")
    endless = data.draw(st.booleans(), "endless")
    lengths = data.draw(st.lists(st.integers(int(endless), 9), min_size=num_shards, max_size=num_shards), "lengths")
    last = data.draw(st.sampled_from(["drop", "pad"]), "last")
    source = streams_of(lengths, stateful=data.draw(st.booleans(), "stateful"))
    ledger = Ledger(lengths)
    saved: dict[str, Any] | None = None
    num_steps = 0
    for _ in range(data.draw(st.integers(1, 5), "restarts")):
        dp_size = data.draw(st.integers(1, num_shards), "ranks")
        size = data.draw(st.integers(dp_size, 9), "global batch")
        make = loader_over(source, global_batch_size=size, last=last, endless=endless)
        ranks = Ranks(make, dp_size, saved, by_reshard=data.draw(st.booleans(), "by reshard"))
        epoch, dropped = (0, 0) if saved is None else (epoch_of(saved), saved["loader"][0]["dropped"])
        for _ in range(data.draw(st.integers(0, 12), "steps")):
            batches = ranks.step()
            if batches is not None:
                assert sum(map(len, batches)) == size
                ledger.book(real_samples(ranks, batches))
                num_steps += size
                continue
            state = ranks.state()
            if last == "pad":
                ledger.check_whole(epoch)
            ledger.check_declared(epoch, state, state["loader"][0]["dropped"] - dropped)
            epoch, dropped = epoch + 1, state["loader"][0]["dropped"]
        saved = ranks.state()
    assert saved is not None
    ledger.check_in_order()
    num_served = sum(map(len, ledger.served.values()))
    common = saved["loader"][0]
    assert common["samples_seen"] == num_served and common["padded"] == num_steps - num_served
    if endless:
        for shard, length in enumerate(lengths):
            entry = saved[f"shard_{shard}_of_{num_shards}"][0]
            whole = [ledger.served[epoch, shard] for epoch in range(entry["epoch"])]
            assert whole == [list(range(length))] * entry["epoch"]
            assert ledger.served[entry["epoch"], shard] == list(range(entry["taken"]))


def epoch_of(saved: dict[str, Any]) -> int:
    return next(value[0]["epoch"] for key, value in saved.items() if key.startswith("shard_"))


def round_robin(lengths: list[int], num_turns: int) -> list[Sample]:
    """The oracle: one sample of each shard in turn, each shard's epochs after one another."""
    turns = []
    for turn in range(num_turns):
        for shard, length in enumerate(lengths):
            epoch, position = divmod(turn, length)
            turns.append((epoch, shard, position))
    return turns


@settings(max_examples=num_cases(300, 0.25), deadline=None)
@given(st.data())
def test_global_batches_are_the_same_sets_in_every_world_that_divides_the_shards(data: st.DataObject) -> None:
    num_shards = data.draw(st.sampled_from([1, 2, 3, 4, 6, 8, 12]), "shards")
    divisors = [size for size in range(1, num_shards + 1) if num_shards % size == 0]
    size = num_shards * data.draw(st.integers(1, 2), "batches of a turn")
    if data.draw(st.booleans(), "half a turn in a batch") and size % 2 == 0:
        size //= 2
    divisors = [divisor for divisor in divisors if size % divisor == 0]
    endless = data.draw(st.booleans(), "endless")
    lengths = data.draw(st.lists(st.integers(1, 7), min_size=num_shards, max_size=num_shards), "lengths")
    # Until the first shard ends, or for ever.
    num_steps = 15 if endless else min(lengths) * num_shards // size
    expected = round_robin(lengths, 40)
    saved = None
    step = 0
    while step < num_steps:
        make = loader_over(streams_of(lengths), global_batch_size=size, endless=endless)
        ranks = Ranks(make, data.draw(st.sampled_from(divisors), "ranks"), saved)
        for _ in range(data.draw(st.integers(1, 4), "steps")):
            batches = ranks.step() if step < num_steps else None
            if batches is not None:
                served = sorted(sample for batch in batches for sample in batch)
                assert served == sorted(expected[step * size : (step + 1) * size])
                step += 1
        saved = ranks.state()


def test_uneven_ownership_is_caught_up_when_the_world_divides_again() -> None:
    """Ranks with fewer shards read on in each; later the shards that are behind come first."""
    make = loader_over(streams_of([100] * 4), global_batch_size=12, endless=True)
    uneven = Ranks(make, 3)
    for _ in range(6):
        uneven.step()
    counts = [entry[0]["total"] for key, entry in sorted(uneven.state().items()) if key != "loader"]
    assert counts == [12, 24, 24, 12]
    even = Ranks(make, 4, uneven.state())
    for _ in range(4):
        even.step()
    # Two ranks with a shard each that is behind cannot help that; one that owns all does.
    one = Ranks(make, 1, even.state())
    for _ in range(2):
        one.step()
    counts = [entry[0]["total"] for key, entry in sorted(one.state().items()) if key != "loader"]
    assert counts == [36, 36, 36, 36]


def test_drop_ends_the_epoch_when_one_rank_is_dry_and_says_where_each_shard_was_cut() -> None:
    ranks = Ranks(loader_over(streams_of([2, 9]), batch_size=2), 2)
    assert ranks.step() == [[(0, 0, 0), (0, 0, 1)], [(0, 1, 0), (0, 1, 1)]]
    assert ranks.step() is None
    state = ranks.state()
    assert state["loader"][0]["dropped"] == 2
    assert state["shard_0_of_2"][0]["last_epoch"] == {"epoch": 0, "served": 2, "read_to_end": True}
    assert state["shard_1_of_2"][0]["last_epoch"] == {"epoch": 0, "served": 2, "read_to_end": False}
    assert ranks.step() == [[(1, 0, 0), (1, 0, 1)], [(1, 1, 0), (1, 1, 1)]]


def test_pad_serves_everything_and_marks_the_repeats() -> None:
    ranks = Ranks(loader_over(streams_of([1, 4]), batch_size=2, last="pad"), 2)
    assert ranks.step() == [[(0, 0, 0), (0, 0, 0)], [(0, 1, 0), (0, 1, 1)]]
    assert [loader.num_padding for loader in ranks.loaders] == [1, 0]
    assert ranks.step() == [[(0, 0, 0), (0, 0, 0)], [(0, 1, 2), (0, 1, 3)]]
    assert [loader.num_padding for loader in ranks.loaders] == [2, 0]
    assert [loader.padded for loader in ranks.loaders] == [3, 3]
    assert [loader.samples_seen for loader in ranks.loaders] == [5, 5]
    assert ranks.step() is None


def test_a_rank_whose_shards_are_empty_pads_with_what_others_have() -> None:
    ranks = Ranks(loader_over(streams_of([0, 3]), batch_size=2, last="pad"), 2)
    assert ranks.step() == [[(0, 1, 0), (0, 1, 0)], [(0, 1, 0), (0, 1, 1)]]


def test_the_saved_state_does_not_change_with_the_loader() -> None:
    loader = loader_over(streams_of([5]), batch_size=2)(0, 1)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    text = repr(state)
    next(iterator)
    loader.load_state_dict(state)
    next(iter(loader))
    assert repr(state) == text


class Growing(Counted):
    """Its samples carry what earlier epochs left behind."""

    def __init__(self, shard: int) -> None:
        super().__init__([(0, shard, i) for i in range(3)])
        self.left = 0

    def start_epoch(self, epoch: int) -> None:
        self.left += 1
        self.position = 0
        self.samples = [(epoch, self.left, i) for i in range(3)]

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "left": self.left, "samples": self.samples}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position, self.left, self.samples = state["position"], state["left"], state["samples"]


@pytest.mark.parametrize("endless", [True, False])
def test_a_stream_may_carry_over_into_the_next_epoch(endless: bool) -> None:
    def make(dp_rank: int, dp_size: int) -> ElasticDataLoader:
        source = Streams(lambda shard, num_shards, epoch: Growing(shard), 2)
        return ElasticDataLoader(
            source, global_batch_size=2, dp_rank=dp_rank, dp_size=dp_size, uneven=True, endless=endless, collate_fn=list
        )

    served = []
    saved = None
    for dp_size in [1, 2, 1, 2, 1, 2, 2, 1]:
        ranks = Ranks(make, dp_size, saved)
        for _ in range(2):
            served += [sample for batch in ranks.step() or [] for sample in batch]
        saved = ranks.state()
    epoch_2 = [sample for sample in served if sample[0] == 2]
    assert epoch_2 == [(2, 2, i) for i in range(3) for _ in range(2)]


@pytest.mark.parametrize(
    "num_shards, dp_size, reason, remedy",
    [
        (
            6,
            2,
            "the checkpoint has 4 virtual shards, this loader 6, and these streams cannot be split",
            "choose num_shards=4",
        ),
        (
            2,
            2,
            "the checkpoint has 4 virtual shards, this loader 2, and shards cannot be merged",
            "choose num_shards=4",
        ),
        (8, 2, "the checkpoint has 4 virtual shards, this loader 8, and these streams cannot be split", "num_shards=4"),
        (8, 8, "cannot be split", "choose num_shards=4 and at most 4 data-parallel ranks, or reset the data loader"),
    ],
)
def test_another_number_of_shards_is_refused(num_shards: int, dp_size: int, reason: str, remedy: str) -> None:
    saved = Ranks(loader_over(streams_of([3] * 4), batch_size=1), 4).state()
    loader = loader_over(streams_of([3] * num_shards), batch_size=1)(0, dp_size)
    before = loader.state_dict()
    with pytest.raises(CannotReshardError) as caught:
        loader.reshard(saved, None, None)
    assert reason in caught.value.reason and remedy in caught.value.remedy
    assert loader.state_dict() == before


def test_shards_in_different_epochs_cannot_become_finite() -> None:
    endless = Ranks(loader_over(streams_of([1, 5]), batch_size=2, endless=True), 2)
    endless.step()
    with pytest.raises(
        CannotReshardError, match="are in epochs 0 to 1, and a loader that is not endless.*endless=True"
    ):
        loader_over(streams_of([1, 5]), batch_size=2)(0, 1).reshard(endless.state(), None, None)


def test_missing_and_foreign_entries_are_refused() -> None:
    saved = Ranks(loader_over(streams_of([3] * 4), batch_size=1), 4).state()
    loader = loader_over(streams_of([3] * 4), batch_size=1)(1, 2)
    missing = {key: value for key, value in saved.items() if key != "shard_3_of_4"}
    with pytest.raises(CannotReshardError, match="entry shard_3_of_4 is missing; load all data loader entries of one"):
        loader.load_state_dict(missing)
    with pytest.raises(CannotReshardError, match="entry shard_1_of_4 is not a shard's"):
        loader.load_state_dict({**saved, "shard_1_of_4": ({"epoch": 1},)})
    with pytest.raises(CannotReshardError, match="saved over samples, this loader reads streams"):
        loader.load_state_dict({"loader": ({"kind": "samples", "version": 1},)})


def test_the_note_names_both_worlds() -> None:
    ranks = Ranks(loader_over(streams_of([3] * 4), batch_size=1), 4)
    ranks.step()
    note = loader_over(streams_of([3] * 4), batch_size=1)(0, 2).reshard(ranks.state(), None, None).note
    assert note == "goes on after 4 samples in epoch 0, 4 virtual shards, data-parallel ranks 4 -> 2"


def test_a_finished_shard_goes_on_in_an_endless_loader() -> None:
    source = Streams(
        lambda shard, num_shards, epoch: range(100 * shard, 100 * shard + (3 if shard else 40)), num_shards=2
    )
    finite = ElasticDataLoader(source, batch_size=2, collate_fn=list)
    batches = iter(finite)
    for _ in range(6):
        next(batches)
    endless = ElasticDataLoader(source, batch_size=2, collate_fn=list, endless=True)
    endless.load_state_dict(finite.state_dict())
    served = [sample for _, batch in zip(range(20), iter(endless), strict=False) for sample in batch]
    assert any(sample >= 100 for sample in served)


class BeginsAgain:
    """As torchdata's loaders: a state that was taken at the end begins the samples again."""

    def __init__(self, samples: list[Any]) -> None:
        self.samples, self.place = samples, 0

    def __iter__(self) -> Iterator[Any]:
        self.place %= len(self.samples) + 1
        while self.place < len(self.samples):
            self.place += 1
            yield self.samples[self.place - 1]
        self.place = len(self.samples) + 1

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.place = state_dict["place"]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_stream_that_begins_again_at_its_end_is_not_asked_again(num_workers: int) -> None:
    def open_samples(shard: int, num_shards: int, epoch: int) -> list[Any]:
        return [(epoch, shard, place) for place in range(5 + shard)]

    def following(open_stream: Callable[[int, int, int], Any]) -> list[Any]:
        options: dict[str, Any] = {"batch_size": 1, "collate_fn": list, "num_workers": num_workers}
        finite = ElasticDataLoader(Streams(open_stream, 2), **options)
        batches = iter(finite)
        for _ in range(11):  # all samples: shard 0 has ended, and the epoch has not
            next(batches)
        endless = ElasticDataLoader(Streams(open_stream, 2), **options, endless=True)
        endless.load_state_dict(finite.state_dict())
        batches = iter(endless)
        return [next(batches) for _ in range(20)]

    without_states = following(open_samples)
    assert min(without_states)[0][0] == 1, "epoch 0 is over"
    assert following(lambda *where: BeginsAgain(open_samples(*where))) == without_states
