"""The trained frontier of map-style data: what was not acknowledged is given again, on any number of ranks."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from extent import SOAK
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_loaders import Ranks

from torchtitan_ext.elastic import ElasticDataLoader, TooManyInFlightError, UnknownSamplesError
from torchtitan_ext.errors import CannotReshardError


def make_loader(dp_rank: int = 0, dp_size: int = 1, *, num_samples: int = 20, **options: Any) -> ElasticDataLoader:
    options = {"global_batch_size": 2 * dp_size, "max_in_flight": 8, **options}
    return ElasticDataLoader(
        range(num_samples), dp_rank=dp_rank, dp_size=dp_size, uneven=True, collate_fn=list, **options
    )


def test_ids_are_those_of_the_samples_of_the_batch() -> None:
    loader = make_loader(1, 2, shuffle=False, num_samples=7, global_batch_size=4, last="pad", max_in_flight=None)
    assert loader.sample_ids.dtype == torch.int64 and loader.sample_ids.numel() == 0
    served = [(batch, loader.sample_ids.tolist(), loader.num_padding) for _ in range(2) for batch in loader]
    assert served == [([1, 3], [1, 3], 0), ([5, 0], [5], 1), ([1, 3], [8, 10], 0), ([5, 0], [12], 1)]
    loader.reset()
    assert loader.sample_ids.numel() == 0


def test_a_full_loader_says_so_and_goes_on_when_there_is_room() -> None:
    loader = make_loader(shuffle=False, max_in_flight=5)
    batches = iter(loader)
    assert next(batches) == [0, 1] and next(batches) == [2, 3]
    before = loader.state_dict()
    for _ in range(2):
        message = "4 samples of this rank are in flight, and the next batch of 2 would exceed max_in_flight=5"
        with pytest.raises(TooManyInFlightError, match=message) as caught:
            next(batches)
    assert isinstance(caught.value, RuntimeError) and caught.value.num_in_flight == 4
    assert loader.state_dict() == before
    loader.acknowledge([2])
    assert next(batches) == [4, 5]


@pytest.mark.parametrize(
    ("ids", "named"), [([7], "7"), ([2, 2], "2"), ([0, 1, 9, 4], "4, 9"), ([3, 0, 0, 17], "0, 17"), ([-1], "-1")]
)
def test_ids_that_are_not_in_flight_are_named_and_nothing_changes(ids: list[int], named: str) -> None:
    loader = make_loader(shuffle=False)
    batches = iter(loader)
    next(batches), next(batches)
    before = loader.state_dict()
    with pytest.raises(UnknownSamplesError, match=f"data-parallel rank 0, or twice: {named}; acknowledge") as caught:
        loader.acknowledge(ids)
    assert isinstance(caught.value, ValueError) and ", ".join(map(str, caught.value.ids)) == named
    assert loader.state_dict() == before
    loader.acknowledge([1])
    with pytest.raises(UnknownSamplesError, match="twice: 1;"):
        loader.acknowledge([1])
    loader.load_state_dict(loader.state_dict())
    with pytest.raises(UnknownSamplesError, match="twice: 0; .* none of before a load"):
        loader.acknowledge([0])


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor, lambda ids: np.array(ids, np.uint8)])
def test_ids_may_be_a_list_an_array_or_a_tensor(kind: Any) -> None:
    loader = make_loader(shuffle=False)
    next(iter(loader))
    loader.acknowledge(kind([1, 0]))
    loader.acknowledge(kind([]) if kind is not torch.tensor else torch.empty(0))
    assert loader.state_dict()["in_flight_0_of_1"] == ([],)


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="max_in_flight=1 has no room for a batch of this rank, 2 samples; choose"):
        make_loader(max_in_flight=1)
    with pytest.raises(TypeError, match="got max_in_flight='8', expected a whole number"):
        make_loader(max_in_flight="8")
    with pytest.raises(TypeError, match="acknowledge: got ids=a list, expected whole numbers"):
        make_loader().acknowledge([0.5])
    with pytest.raises(ValueError, match="acknowledge needs max_in_flight"):
        make_loader(max_in_flight=None).acknowledge([0])


@pytest.mark.parametrize("num_workers", [0, 2])
def test_what_workers_read_ahead_is_not_in_flight(num_workers: int) -> None:
    loader = make_loader(shuffle=False, num_workers=num_workers)
    batches = iter(loader)
    ids = []
    for _ in range(3):
        assert next(batches) == loader.sample_ids.tolist()
        ids += loader.sample_ids.tolist()
    loader.acknowledge([4, 1])
    state = loader.state_dict()
    assert ids == [0, 1, 2, 3, 4, 5] and state["in_flight_0_of_1"] == ([0, 2, 3, 5],)
    again = make_loader(shuffle=False, num_workers=num_workers, max_in_flight=100)
    again.load_state_dict(state)
    assert again.samples_seen == 2
    assert [sample for batch in again for sample in batch] == [0, 2, 3, 5, *range(6, 20)]


def test_a_loader_without_a_bound_gives_the_open_samples_again_too() -> None:
    ranks = Ranks(lambda rank, size: make_loader(rank, size, shuffle=False), 2)
    ranks.step(), ranks.step()
    ranks.loaders[1].acknowledge([1])
    again = Ranks(lambda rank, size: make_loader(rank, size, shuffle=False, max_in_flight=None), 3, ranks.state())
    assert again.loaders[0].samples_seen == 1
    assert [again.step(), again.step()] == [[[0, 4], [2, 5], [3, 6]], [[7, 10], [8, 11], [9, 12]]]
    assert again.loaders[0].samples_seen == 1 + 12 and "in_flight_0_of_3" not in again.state()


def test_the_own_entries_of_one_of_several_ranks_are_not_enough() -> None:
    ranks = Ranks(make_loader, 2)
    ranks.step()
    loader = make_loader(1, 2)
    before = loader.state_dict()
    with pytest.raises(CannotReshardError, match="no in_flight_0_of_2; load with .*policy=ElasticPolicy"):
        loader.load_state_dict(ranks.loaders[1].state_dict())
    assert loader.state_dict() == before
    loader.load_state_dict(ranks.state())
    assert loader.samples_seen == 0


def test_one_of_several_ranks_is_reset() -> None:
    loader = make_loader(1, 2, max_in_flight=8)
    batches = iter(loader)
    first = next(batches)
    next(batches)
    loader.reset()
    assert loader.describe().in_flight == 0
    assert next(iter(loader)) == first


def test_entries_of_different_moments_are_refused() -> None:
    ranks = Ranks(make_loader, 2)
    ranks.step()
    early, before = ranks.state(), ranks.loaders[0].state_dict()["loader"]
    ranks.step()
    late = ranks.state()
    loader = make_loader()
    twice = {**early, "in_flight_1_of_2": early["in_flight_0_of_2"]}
    for state in (twice, {**late, "loader": before}, {**early, "in_flight_1_of_2": ([-3],)}):
        with pytest.raises(CannotReshardError, match="do not fit each other: .*; load all data loader entries of one"):
            loader.load_state_dict(state)


def test_the_note_says_how_many_are_given_again() -> None:
    ranks = Ranks(make_loader, 2)
    ranks.step(), ranks.step()
    ranks.loaders[0].acknowledge(ranks.loaders[0].sample_ids)
    resharded = make_loader(0, 1, global_batch_size=4).reshard(ranks.state(), None, None)
    assert resharded.note.endswith("data-parallel ranks 2 -> 1, gives 6 samples again that were in flight")
    assert resharded.samples_seen == 2
    assert ranks.loaders[1].describe().in_flight == 4


def test_one_rank_goes_on_by_stock_planners(tmp_path: Any) -> None:
    loader = make_loader(shuffle=False)
    batches = iter(loader)
    next(batches), next(batches)
    loader.acknowledge([1, 2])
    dcp.save({"dataloader": loader}, checkpoint_id=tmp_path, no_dist=True)
    again = make_loader(shuffle=False)
    dcp.load({"dataloader": again}, checkpoint_id=tmp_path, no_dist=True)
    assert next(iter(again)) == [0, 3] and again.samples_seen == 4


def test_a_save_does_not_compare_what_no_rank_knows() -> None:
    loader = make_loader()
    next(iter(loader))
    assert loader.samples_seen == 2 and loader.sample_account().served is None


def test_what_is_given_again_goes_before_the_next_epoch_where_the_last_batch_is_dropped() -> None:
    loader = make_loader(num_samples=5, shuffle=False, endless=True)
    batches = iter(loader)
    next(batches), next(batches)
    loader.acknowledge([0, 2, 3])
    again = make_loader(num_samples=5, shuffle=False, endless=True, global_batch_size=4)
    again.load_state_dict(loader.state_dict())
    assert next(iter(again)) == [1, 0, 1, 2] and again.sample_ids.tolist() == [1, 5, 6, 7]
    assert again.dropped == 1 and again.samples_seen == 7


@settings(max_examples=300 * SOAK, deadline=None)
@given(st.data())
def test_what_is_trained_before_a_kill_and_after_is_each_sample_once(data: st.DataObject) -> None:
    num_samples = data.draw(st.integers(8, 14) | st.integers(8, 40), "samples")
    last = data.draw(st.sampled_from(["drop", "pad"]), "last")
    endless = data.draw(st.booleans(), "endless")
    shuffle = data.draw(st.booleans(), "shuffle")
    saved: dict[str, Any] | None = None
    trained: Counter[int] = Counter()  # by id, up to the latest checkpoint
    samples: dict[int, int] = {}
    for _ in range(data.draw(st.integers(1, 5), "jobs")):
        dp_size = data.draw(st.integers(1, 5), "ranks")
        size = data.draw(st.integers(dp_size, 8), "global batch")
        bound = data.draw(st.integers(-(-size // dp_size), 24), "bound")
        options = {"global_batch_size": size, "last": last, "endless": endless, "shuffle": shuffle}
        ranks = Ranks(
            lambda rank, dp_size, options=options, bound=bound: make_loader(
                rank, dp_size, num_samples=num_samples, max_in_flight=bound, seed=3, **options
            ),
            dp_size,
            saved,
        )
        in_flight: list[set[int]] = [set() for _ in range(dp_size)]
        since: Counter[int] = Counter()
        for _ in range(data.draw(st.integers(0, 14), "actions")):
            action = data.draw(st.sampled_from(["step", "step", "acknowledge", "save"]), "action")
            room = all(
                len(ids) + loader.batch_size <= bound for ids, loader in zip(in_flight, ranks.loaders, strict=True)
            )
            if action == "step" and room:
                batches = ranks.step()
                for batch, ids, loader in zip(batches or [], in_flight, ranks.loaders, strict=False):
                    new = loader.sample_ids.tolist()
                    real = batch[: len(batch) - loader.num_padding]
                    assert len(new) == len(real) and not ids & set(new)
                    assert all(samples.setdefault(id_, sample) == sample for id_, sample in zip(new, real, strict=True))
                    ids.update(new)
            elif action == "save":
                saved = ranks.state()
                trained += since
                since.clear()
            else:
                for ids, loader in zip(in_flight, ranks.loaders, strict=True):
                    some = data.draw(st.lists(st.sampled_from(sorted(ids)), unique=True), "ids") if ids else []
                    loader.acknowledge(some)
                    ids.difference_update(some)
                    since.update(some)
    # The last job trains what is left of its epoch, and of later ones as long as older samples go before them.
    size = data.draw(st.integers(1, 8), "last global batch")
    final = Ranks(
        lambda rank, dp_size: make_loader(
            rank, dp_size, num_samples=num_samples, global_batch_size=size, last=last, shuffle=shuffle, seed=3
        ),
        1,
        saved,
    )
    while True:
        batches = final.step()
        if batches is None and not final.loaders[0].state_dict()["loader"][0]["again"]:
            break
        for batch in batches or []:
            ids = final.loaders[0].sample_ids.tolist()
            assert all(samples.setdefault(id_, sample) == sample for id_, sample in zip(ids, batch, strict=False))
            final.loaders[0].acknowledge(ids)
            trained.update(ids)
    position = final.loaders[0].state_dict()["loader"][0]
    assert set(trained.values()) <= {1}, "a sample was trained twice"
    assert len(trained) + position["dropped"] == position["epoch"] * num_samples
    assert position["samples_seen"] == len(trained) and max(trained, default=-1) < position["epoch"] * num_samples
    assert last == "drop" or position["dropped"] == 0
    for epoch in range(position["epoch"]):
        of_epoch = [samples[id_] for id_ in trained if id_ // num_samples == epoch]
        assert len(set(of_epoch)) == len(of_epoch)
