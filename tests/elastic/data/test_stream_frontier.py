"""The trained frontier of streams: what was not acknowledged is given again, whoever owns the shards then."""

import multiprocessing
import os
import pickle
import random
import signal
import time
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from extent import SOAK
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_loaders import Counted, Ranks

from torchtitan_ext.elastic import (
    ElasticDataLoader,
    EpochInFlightError,
    IndexedStreams,
    PackedTokens,
    Streams,
    StreamWorkerError,
    TooManyInFlightError,
    UnknownSamplesError,
)
from torchtitan_ext.errors import CannotReshardError

WORLDS = [2, 4, 8, 4, 2, 3, 1]


class Kept(Counted):
    """It goes on with the next epoch itself, and says that its state is small."""

    state_is_small = True

    def start_epoch(self, epoch: int) -> None:
        self.position = 0
        self.samples = [(epoch, *sample[1:]) for sample in self.samples]

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "samples": list(self.samples)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position, self.samples = state["position"], list(state["samples"])


KINDS: dict[str, Any] = {"plain": iter, "stateful": Counted, "kept": Kept}


def source_of(lengths: list[int], kind: str = "stateful") -> Streams:
    def open_stream(shard: int, num_shards: int, epoch: int) -> Any:
        return KINDS[kind]([(epoch, shard, place) for place in range(lengths[shard])])

    return Streams(open_stream, len(lengths))


def make_loader(dp_rank: int = 0, dp_size: int = 1, *, lengths: Any = (9, 9), **options: Any) -> ElasticDataLoader:
    options = {"global_batch_size": 2 * dp_size, "max_in_flight": 8, **options}
    source = source_of(list(lengths))
    return ElasticDataLoader(source, dp_rank=dp_rank, dp_size=dp_size, uneven=True, collate_fn=list, **options)


class Job:
    """A job that is stopped at any time and goes on from its latest checkpoint, on any ranks: what it has trained."""

    def __init__(self) -> None:
        self.saved: dict[str, Any] | None = None
        self.saved_trained: Counter[Any] = Counter()
        self.saved_given: set[Any] = set()

    def start(self, make: Any, dp_size: int, by_reshard: bool = True) -> None:
        self.ranks = Ranks(make, dp_size, self.saved, by_reshard)
        self.trained = self.saved_trained.copy()
        self.given = self.saved_given.copy()
        self.open: list[dict[int, Any]] = [{} for _ in range(dp_size)]

    def step(self) -> bool:
        """False where the epoch has ended."""
        batches = self.ranks.step()
        for batch, loader, open_ in zip(batches or [], self.ranks.loaders, self.open, strict=False):
            ids = loader.sample_ids.tolist()
            assert len(ids) == len(batch) - loader.num_padding and not open_.keys() & ids
            open_.update(zip(ids, batch, strict=False))
            self.given.update(open_.values())
        return batches is not None

    def waiting(self) -> set[Any]:
        """Samples that were given and are to be given again."""
        return self.given - self.trained.keys() - {sample for open_ in self.open for sample in open_.values()}

    def acknowledge(self, rank: int, ids: list[int]) -> None:
        self.ranks.loaders[rank].acknowledge(ids)
        self.trained.update(self.open[rank].pop(one) for one in ids)

    def acknowledge_some(self, choose: Any, room: int) -> None:
        """Some in any order, so many that there is room for a batch."""
        for rank, open_ in enumerate(self.open):
            ids = sorted(open_)
            choose.shuffle(ids)
            least = max(0, len(ids) + self.ranks.loaders[rank].batch_size - room)
            self.acknowledge(rank, ids[: choose.randint(least, len(ids))])

    def save(self) -> None:
        self.saved = pickle.loads(pickle.dumps(self.ranks.state()))
        self.saved_trained, self.saved_given = self.trained.copy(), self.given.copy()

    def finish_epoch(self, room: int) -> None:
        choose = random.Random(0)
        while True:
            self.acknowledge_some(choose, room)
            if not self.step():
                break
        for rank, open_ in enumerate(self.open):
            self.acknowledge(rank, list(open_))


@settings(max_examples=150 * SOAK, deadline=None)
@given(st.data())
def test_what_is_trained_is_each_sample_once_wherever_a_job_is_stopped(data: st.DataObject) -> None:
    num_shards = data.draw(st.integers(1, 8), "shards")
    endless = data.draw(st.booleans(), "endless")
    lengths = data.draw(st.lists(st.integers(int(endless), 30), min_size=num_shards, max_size=num_shards), "lengths")
    source = source_of(lengths, data.draw(st.sampled_from(sorted(KINDS)), "kind"))
    last = data.draw(st.sampled_from(["drop", "pad"]), "last")
    choose = random.Random(data.draw(st.integers(0, 10**6), "choices"))
    job = Job()
    for _ in range(data.draw(st.integers(1, 4), "stops")):
        dp_size = data.draw(st.integers(1, num_shards), "ranks")
        size = data.draw(st.integers(dp_size, 9), "global batch")
        room = data.draw(st.integers(size, 20), "room")

        def make(dp_rank: int, dp_size: int, size: int = size, room: int = room) -> ElasticDataLoader:
            options = {"global_batch_size": size, "max_in_flight": room, "last": last, "endless": endless}
            return ElasticDataLoader(source, dp_rank=dp_rank, dp_size=dp_size, uneven=True, collate_fn=list, **options)

        job.start(make, dp_size, by_reshard=data.draw(st.booleans(), "by reshard"))
        for _ in range(data.draw(st.integers(0, 12), "steps")):
            job.acknowledge_some(choose, room)
            if not job.step() and not endless:
                if choose.random() < 0.5:
                    job.save()
                for rank, open_ in enumerate(job.open):
                    job.acknowledge(rank, list(open_))
            if choose.random() < 0.4:
                job.save()
    job.save()
    assert max(job.trained.values(), default=1) == 1
    job.start(make, dp_size)
    if endless:
        while min(epochs_of(job)) < 2 or job.waiting():
            job.acknowledge_some(choose, room)
            job.step()
        for rank, open_ in enumerate(job.open):
            job.acknowledge(rank, list(open_))
        expected = {
            (epoch, v, place) for epoch in range(2) for v, length in enumerate(lengths) for place in range(length)
        }
        assert expected <= job.trained.keys()
    else:
        epoch = job.ranks.loaders[0].epoch
        job.finish_epoch(room)
        expected = {(epoch, v, place) for v, length in enumerate(lengths) for place in range(length)}
        trained = {sample for sample in job.trained if sample[0] == epoch}
        assert trained == expected if last == "pad" else trained <= expected
    assert job.given == set(job.trained), "what a checkpoint says was given is trained in the end"
    assert max(job.trained.values(), default=1) == 1


def epochs_of(job: Job) -> list[int]:
    return [value[0]["epoch"] for key, value in job.ranks.state().items() if key != "loader"]


def test_ids_are_shard_and_number() -> None:
    loader = make_loader(1, 2, lengths=(3, 9, 3, 1), last="pad", global_batch_size=6, max_in_flight=99)
    loader._batches._sum_over_ranks = lambda count: count + 3  # type: ignore[attr-defined]
    served = [
        (batch, loader.sample_ids.tolist(), loader.num_padding) for _, batch in zip(range(4), loader, strict=False)
    ]
    assert served[0] == ([(0, 1, 0), (0, 3, 0), (0, 1, 1)], [1, 3, 5], 0)
    assert served[3][1:] == ([33], 2)


def test_a_full_loader_says_so_and_goes_on_when_there_is_room() -> None:
    loader = make_loader(max_in_flight=5)
    batches = iter(loader)
    assert next(batches) == [(0, 0, 0), (0, 1, 0)] and next(batches) == [(0, 0, 1), (0, 1, 1)]
    before = loader.state_dict()
    with pytest.raises(TooManyInFlightError):
        next(batches)
    assert loader.state_dict() == before
    with pytest.raises(UnknownSamplesError, match="twice: 7;"):
        loader.acknowledge([1, 7])
    assert loader.state_dict() == before
    loader.acknowledge([1])
    assert next(batches) == [(0, 0, 2), (0, 1, 2)]
    again = make_loader(dp_size=1)
    again.load_state_dict(loader.state_dict())
    assert again.describe().in_flight == 5 and again.samples_seen == 1
    served = [again.sample_ids.tolist() for _, _ in zip(range(4), again, strict=False)]
    assert served == [[0, 2], [4, 3], [5, 6], [7, 8]], "shard 0 first, then shard 1, then what is new"


def test_without_acknowledgements_what_is_in_flight_is_given_again_too() -> None:
    loader = make_loader()
    next(iter(loader))
    again = make_loader(max_in_flight=None, global_batch_size=4)
    again.load_state_dict(loader.state_dict())
    assert next(iter(again)) == [(0, 0, 0), (0, 1, 0), (0, 0, 1), (0, 1, 1)]
    assert again.samples_seen == 4 and again.describe().in_flight == 0


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_epoch_with_an_end_is_left_when_all_of_it_is_trained(num_workers: int) -> None:
    loader = make_loader(lengths=(3, 2), num_workers=num_workers, max_in_flight=8)
    batches = list(loader)
    assert len(batches) == 2 and loader.epoch == 0 and loader.dropped == 0
    between = loader.state_dict()
    for _ in range(2):
        with pytest.raises(EpochInFlightError, match="4 samples of epoch 0 are in flight on data-parallel rank 0, and"):
            iter(loader)
    assert loader.state_dict() == between
    loader.acknowledge([0, 1, 2, 3])
    assert next(iter(loader)) == [(1, 0, 0), (1, 1, 0)] and loader.dropped == 1 and loader.epoch == 1
    again = make_loader(lengths=(3, 2), num_workers=num_workers, max_in_flight=8)
    again.load_state_dict(between)
    assert list(again) == [[(0, 0, 0), (0, 0, 1)], [(0, 1, 0), (0, 1, 1)]]
    again.acknowledge([0, 1, 2, 3])
    assert next(iter(again)) == [(1, 0, 0), (1, 1, 0)] and again.dropped == 1


def test_what_is_given_again_is_not_dropped() -> None:
    """Its batch is filled, though the epoch has nothing else."""
    loader = make_loader(lengths=(3, 2))
    list(loader)
    loader.acknowledge([0])
    again = make_loader(lengths=(3, 2), global_batch_size=4)
    again.load_state_dict(loader.state_dict())
    assert list(again) == [[(0, 0, 1), (0, 1, 0), (0, 1, 1), (0, 0, 2)]]
    short = make_loader(lengths=(3, 2), global_batch_size=5, max_in_flight=20)
    short.load_state_dict(loader.state_dict())
    assert list(short) == [[(0, 0, 1), (0, 1, 0), (0, 1, 1), (0, 0, 2), (0, 0, 1)]] and short.num_padding == 1


def test_the_oldest_open_sample_may_be_of_an_earlier_epoch() -> None:
    loader = make_loader(lengths=(3, 40), endless=True, max_in_flight=20)
    batches = iter(loader)
    for _ in range(30):
        next(batches)
        loader.acknowledge([one for one in loader.sample_ids.tolist() if one not in (4, 10)])
    state = loader.state_dict()
    (entry,) = state["shard_0_of_2"]
    assert entry["in_flight"] == (2, 5) and entry["epoch"] == 9 and entry["stream_epoch"] == 0
    again = make_loader(lengths=(3, 40), endless=True)
    again.load_state_dict(state)
    assert next(iter(again)) == [(0, 0, 2), (1, 0, 2)] and next(iter(again)) == [(10, 0, 0), (0, 1, 30)]


def test_shards_that_give_again_are_not_split() -> None:
    def make(num_shards: int) -> ElasticDataLoader:
        source = IndexedStreams(range(20), num_shards=num_shards)
        return ElasticDataLoader(source, batch_size=2, max_in_flight=4, collate_fn=list)

    loader = make(2)
    next(iter(loader))
    with pytest.raises(CannotReshardError, match="1 samples of virtual shard 0 are in flight.*choose num_shards=2"):
        make(4).reshard(loader.state_dict(), None, None)
    loader.acknowledge(loader.sample_ids)
    make(4).reshard(loader.state_dict(), None, None)


def test_counts_are_those_of_what_is_trained() -> None:
    ranks = Ranks(make_loader, 2)
    ranks.step(), ranks.step()
    ranks.loaders[0].acknowledge([0])
    resharded = make_loader().reshard(ranks.state(), None, None)
    assert resharded.samples_seen == 1 and resharded.state["loader"][0]["samples_seen"] == 1
    loader = make_loader()
    for state in (ranks.state(), resharded.state):
        loader.load_state_dict(state)
        assert loader.samples_seen == 1 and "counts_trained" not in loader.state_dict()["loader"][0]
    next(iter(loader))  # two of the seven that were open: the five that still wait are not counted
    assert loader.samples_seen == 3
    later = make_loader()
    later.load_state_dict(loader.state_dict())
    assert later.samples_seen == 1


def test_tokens_of_packed_sequences_across_worlds() -> None:
    documents = [[100 * i + j for j in range(2 + i % 9)] for i in range(60)]

    def make(dp_rank: int, dp_size: int) -> ElasticDataLoader:
        source = PackedTokens(IndexedStreams(documents, num_shards=8), seq_len=5)
        options = {"global_batch_size": 8, "max_in_flight": 12, "last": "pad", "collate_fn": tokens_of}
        return ElasticDataLoader(source, dp_rank=dp_rank, dp_size=dp_size, uneven=True, **options)

    job = Job()
    choose = random.Random(1)
    for dp_size in WORLDS:
        job.start(make, dp_size)
        job.step()
        job.acknowledge_some(choose, 8)
        job.save()
        job.step()  # lost
    job.start(make, 1)
    job.finish_epoch(12)
    one = ElasticDataLoader(make(0, 1)._batches._source, batch_size=1, last="pad", collate_fn=tokens_of)  # type: ignore[attr-defined]
    whole = [token for sample in one for token in sample[0]]
    assert sorted(token for sample in job.trained.elements() for token in sample) == sorted(whole)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_what_is_dropped_at_the_end_of_an_epoch_is_not_left_over_for_the_next(num_workers: int) -> None:
    def epochs(**options: Any) -> list[Any]:
        documents = Streams(lambda shard, _, epoch: [[100 * epoch + i for i in range(16 * (1 + shard))]], 2)
        source = PackedTokens(documents, seq_len=5)  # 3 and 6 sequences, each shard's of one document
        options |= {"num_workers": num_workers, "batch_size": 4, "collate_fn": tokens_of}
        loader = ElasticDataLoader(source, **options)
        served: list[Any] = []
        for _ in range(3):
            for batch in loader:
                served.append(batch)
                if options.get("max_in_flight"):
                    loader.acknowledge(loader.sample_ids)
        iter(loader)  # leaves the last epoch
        return [*served, loader.dropped]

    assert epochs(max_in_flight=8) == epochs()


def test_a_sample_that_stays_open_keeps_no_state_of_each_later_one() -> None:
    class State(dict[str, Any]):
        alive: weakref.WeakSet["State"] = weakref.WeakSet()
        __hash__ = object.__hash__  # type: ignore[assignment]

        def __init__(self, **values: Any) -> None:
            super().__init__(**values)
            State.alive.add(self)

    class Numbers:
        state_is_small = True
        place = 0

        def __iter__(self) -> Any:
            while self.place < 500:
                self.place += 1
                yield self.place

        def state_dict(self) -> dict[str, Any]:
            return State(place=self.place)

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.place = state["place"]

    loader = ElasticDataLoader(Streams(lambda *_: Numbers(), 1), batch_size=1, max_in_flight=200, collate_fn=list)
    for number, _ in enumerate(loader):
        if number == 400:
            break
        if 100 <= number < 300:
            loader.acknowledge(loader.sample_ids)
        elif number == 300:
            loader.acknowledge(range(1, 99))
    assert len(State.alive) < 20
    other = ElasticDataLoader(Streams(lambda *_: Numbers(), 1), batch_size=1, collate_fn=list)
    other.load_state_dict(loader.state_dict())
    assert [sample for batch in other for sample in batch] == [1, 100, *range(301, 501)]


def tokens_of(samples: list[Any]) -> list[tuple[int, ...]]:
    return [tuple(inputs["input"].tolist()) for inputs, _ in samples]


def run_job(path: Path, dp_size: int, num_workers: int, seed: int) -> None:
    """Goes on from the checkpoint at ``path``, trains and saves without end."""
    job = Job()
    if path.exists():
        job.saved, job.saved_trained, job.saved_given = pickle.loads(path.read_bytes())
    choose = random.Random(seed)

    def make(dp_rank: int, dp_size: int) -> ElasticDataLoader:
        options: dict[str, Any] = {"global_batch_size": 8, "max_in_flight": 24, "num_workers": num_workers}
        source = source_of([50] * 8)
        return ElasticDataLoader(
            source, dp_rank=dp_rank, dp_size=dp_size, uneven=True, endless=True, collate_fn=list, **options
        )

    job.start(make, dp_size)
    while True:
        job.acknowledge_some(choose, 24)
        job.step()
        if choose.random() < 0.3:
            job.save()
            path.with_suffix(".new").write_bytes(pickle.dumps((job.saved, job.saved_trained, job.saved_given)))
            path.with_suffix(".new").rename(path)


def test_jobs_that_are_killed_at_random_moments_train_each_sample_once(tmp_path: Path) -> None:
    """kill -9 of the trainer, then other ranks with other workers go on."""
    fork = multiprocessing.get_context("fork")
    choose = random.Random(3)
    path = tmp_path / "checkpoint"
    for kill in range(20 * SOAK):
        num_workers = choose.randint(0, 3)
        dp_size = WORLDS[kill % len(WORLDS)] if num_workers < 2 else choose.randint(1, 2)
        process = fork.Process(target=run_job, args=(path, dp_size, num_workers, choose.randint(0, 10**6)))
        process.start()
        process.join(choose.uniform(0.05, 0.5))
        assert process.exitcode is None, "it has ended by itself"
        process.kill()
        process.join()
    saved, trained, given = pickle.loads(path.read_bytes())
    assert max(trained.values()) == 1 and set(trained) <= given
    job = Job()
    job.saved, job.saved_trained, job.saved_given = saved, trained, given
    last = max(epoch for epoch, _, _ in given)
    job.start(lambda rank, size: make_loader(rank, size, lengths=[50] * 8, endless=True, max_in_flight=8), 1)
    while min(epochs_of(job)) <= last or job.waiting():
        job.acknowledge_some(choose, 8)
        job.step()
    job.acknowledge(0, list(job.open[0]))
    assert max(job.trained.values()) == 1
    assert {(epoch, v, i) for epoch in range(last + 1) for v in range(8) for i in range(50)} <= job.trained.keys()


def test_workers_that_are_killed_lose_nothing_that_is_open() -> None:
    choose = random.Random(4)
    job = Job()
    options: dict[str, Any] = {"lengths": [40] * 4, "global_batch_size": 8, "max_in_flight": 24, "num_workers": 2}
    job.start(lambda rank, size: make_loader(rank, size, **options), 1)
    (loader,) = job.ranks.loaders
    num_errors = 0
    while True:
        job.acknowledge_some(choose, 24)
        running = loader._batches._reader._workers._running  # type: ignore[attr-defined]
        if running and choose.random() < 0.4:
            os.kill(running[choose.randrange(2)].process.pid, signal.SIGKILL)
            time.sleep(0.01)
        try:
            if not job.step():
                break
        except StreamWorkerError:
            num_errors += 1
            job.ranks._iterators = [None]
    job.acknowledge(0, list(job.open[0]))
    assert num_errors and job.trained == Counter((0, v, i) for v in range(4) for i in range(40))
