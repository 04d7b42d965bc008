"""One shard's samples and marks: what a checkpoint keeps, and how a stream goes on from it."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_loaders import Counted, Ranks
from tier import num_cases

from torchtitan_ext.elastic import ElasticDataLoader, Streams
from torchtitan_ext.elastic.data.shard_samples import Mark, SamplePosition, ShardSamples
from torchtitan_ext.elastic.data.virtual_shards import ShardState, from_entry, stream_state


class Small(Counted):
    """It says that its state is small."""

    state_is_small = True


class Carrying(Counted):
    """It says at each epoch how much it has read in all."""

    num_read = 0

    def __iter__(self) -> Any:
        for sample in super().__iter__():
            self.num_read += 1
            yield (*sample, self.num_read)

    def start_epoch(self, epoch: int) -> None:
        self.position = 0
        self.samples = [(epoch, place) for _, place in self.samples]

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "num_read": self.num_read, "epoch": self.samples[0][0]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start_epoch(state["epoch"])
        self.position, self.num_read = state["position"], state["num_read"]


KINDS: dict[str, Any] = {"plain": iter, "stateful": Counted, "small": Small, "carrying": Carrying}


def source_of(kind: str, length: int) -> Streams:
    return Streams(lambda shard, num_shards, epoch: KINDS[kind]([(epoch, i) for i in range(length)]), 1)


def totals_of(kind: str, length: int) -> list[int]:
    items = ShardSamples(source_of(kind, length), 0, SamplePosition(Mark(), 0))
    marks = [item if isinstance(item, Mark) else item[1] for item in items]
    return [mark.total for mark in marks if mark is not None]


def test_when_marks_are_made() -> None:
    assert totals_of("plain", 40) == []
    assert totals_of("stateful", 40) == [16, 32, 40]
    assert totals_of("stateful", 32) == [16, 32, 32], "the last is behind what the stream read after its last sample"
    assert totals_of("small", 3) == [1, 2, 3, 3]


@settings(max_examples=num_cases(200, 0.25), deadline=None)
@given(st.data())
def test_a_loader_that_stops_anywhere_goes_on_as_if_it_had_not(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(sorted(KINDS)), "kind")
    length = data.draw(st.integers(1, 50), "length")
    options = {"batch_size": data.draw(st.integers(1, 7), "batch"), "endless": data.draw(st.booleans(), "endless")}

    def make(dp_rank: int, dp_size: int) -> ElasticDataLoader:
        return ElasticDataLoader(source_of(kind, length), **options, collate_fn=list)

    whole = Ranks(make, 1)
    parts = Ranks(make, 1)
    for _ in range(data.draw(st.integers(1, 5), "stops")):
        for _ in range(data.draw(st.integers(0, 9), "steps")):
            assert whole.step() == parts.step()
        assert whole.state() == parts.state()
        parts = Ranks(make, 1, parts.state())
        assert whole.state() == parts.state()


def test_states_of_version_1_go_on() -> None:
    """Their stream's state is that after all samples; none says that all are to be skipped."""
    entry = {"epoch": 0, "taken": 21, "total": 21, "finished": False, "last_epoch": None}
    common = {"kind": "streams", "num_shards": 1, "dp_size": 1, "global_batch_size": 3}
    counts = {"samples_seen": 21, "dropped": 0, "padded": 0}
    for kind, stream in (("stateful", {"position": 21}), ("plain", None)):
        state = {"loader": ({"version": 1, **common, **counts},), "shard_0_of_1": ({**entry, "stream": stream},)}
        loader = ElasticDataLoader(source_of(kind, 50), batch_size=3, collate_fn=list)
        loader.load_state_dict(state)
        assert next(iter(loader)) == [(0, 21), (0, 22), (0, 23)]
        assert loader.state_dict()["loader"][0]["version"] == 2


@pytest.mark.parametrize("kind", ["stateful", "small", "carrying"])
def test_the_state_after_all_samples_that_were_served(kind: str) -> None:
    loader = ElasticDataLoader(source_of(kind, 50), batch_size=1, collate_fn=list)
    for _ in zip(range(21), loader, strict=False):
        pass
    entry = from_entry("shard_0_of_1", loader.state_dict())
    assert entry.since == (0 if kind == "small" else 5) and entry.stream["position"] == 21 - entry.since
    assert stream_state(source_of(kind, 50), 0, entry)["position"] == 21
    assert stream_state(source_of(kind, 50), 0, ShardState()) is None


class Fails(Exception):
    pass


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("in_collate", [True, False])
def test_a_batch_that_fails_is_not_served(kind: str, in_collate: bool) -> None:
    failures = [20]

    def fail_at(place: int) -> None:
        if place in failures:
            failures.clear()
            raise Fails

    class Failing(KINDS[kind] if kind != "plain" else list):  # type: ignore[misc]
        def __iter__(self) -> Any:
            for sample in super().__iter__():
                if not in_collate:
                    fail_at(sample[1])
                yield sample

    def collate(samples: list[Any]) -> list[int]:
        if in_collate:
            fail_at(samples[-1][1])
        return [sample[1] for sample in samples]

    source = Streams(lambda shard, num_shards, epoch: Failing([(epoch, i) for i in range(30)]), 1)
    loader = ElasticDataLoader(source, batch_size=3, collate_fn=collate)
    served: list[int] = []
    with pytest.raises(Fails):
        for batch in loader:
            served += batch
    assert loader.samples_seen == len(served) == 18
    assert from_entry("shard_0_of_1", loader.state_dict()).taken == 18
    for batch in loader:
        served += batch
    assert served == list(range(30))
