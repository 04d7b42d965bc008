"""Map-style data: every sample of an epoch once, whatever the worlds and batch sizes that serve it."""

import itertools
from collections import defaultdict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_loaders import Ranks
from tier import num_cases
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from torchtitan_ext.elastic import ElasticBatchSampler, ElasticDataLoader
from torchtitan_ext.elastic.data.order import OrderName, epoch_order
from torchtitan_ext.errors import CannotReshardError


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's loader waits five seconds for a worker whose iterator was left before it terminates it."""
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.2)


def loader_over(num_samples: int, **options: Any) -> Any:
    def make(dp_rank: int, dp_size: int) -> ElasticDataLoader:
        return ElasticDataLoader(
            range(num_samples), dp_rank=dp_rank, dp_size=dp_size, uneven=True, collate_fn=list, **options
        )

    return make


def index_order(num_samples: int, *, shuffle: bool, seed: int, epoch: int, order: OrderName = "randperm") -> list[int]:
    made = epoch_order(num_samples, shuffle=shuffle, order=order, seed=seed, epoch=epoch)
    return made(np.arange(num_samples)).tolist()


def epoch_of(ranks: Ranks) -> int:
    return ranks.loaders[0].state_dict()["loader"][0]["epoch"]


@settings(max_examples=num_cases(600, 0.25), deadline=None)
@given(st.data())
def test_every_sample_once_across_restarts(data: st.DataObject) -> None:
    num_samples = data.draw(st.integers(8, 60), "samples")
    last = data.draw(st.sampled_from(["drop", "pad"]), "last")
    endless = data.draw(st.booleans(), "endless")
    shuffle = data.draw(st.booleans(), "shuffle")
    order_name = data.draw(st.sampled_from(["feistel-1", "randperm"]), "order")
    served: dict[int, list[int]] = defaultdict(list)
    num_served = 0
    saved = None
    for _ in range(data.draw(st.integers(1, 5), "restarts")):
        dp_size = data.draw(st.integers(1, 5), "ranks")
        global_batch_size = data.draw(st.integers(dp_size, 8), "global batch")
        ranks = Ranks(
            loader_over(
                num_samples,
                global_batch_size=global_batch_size,
                last=last,
                endless=endless,
                shuffle=shuffle,
                seed=3,
                order=order_name,
            ),
            dp_size,
            saved,
            by_reshard=data.draw(st.booleans(), "by reshard"),
        )
        for _ in range(data.draw(st.integers(0, 12), "steps")):
            batches = ranks.step()
            if batches is None:
                continue
            sizes = [len(batch) for batch in batches]
            assert sum(sizes) == global_batch_size and max(sizes) - min(sizes) <= 1
            padding = [loader.num_padding for loader in ranks.loaders]
            real = [batch[: len(batch) - num] for batch, num in zip(batches, padding, strict=True)]
            served[epoch_of(ranks)] += [sample for batch in real for sample in batch]
            num_served += global_batch_size
        saved = ranks.state()

    (position,) = saved["loader"]
    num_real = sum(map(len, served.values()))
    assert position["samples_seen"] == num_real and position["padded"] == num_served - num_real
    assert num_real + position["dropped"] == position["epoch"] * num_samples + position["next_sample"]
    for epoch, samples in served.items():
        # No sample twice, and what is left of the order when the epoch ends is what was dropped.
        order = index_order(num_samples, shuffle=shuffle, seed=3, epoch=epoch, order=order_name)
        assert sorted(samples) == sorted(order[: len(samples)])
    assert last == "drop" or position["dropped"] == 0


@settings(max_examples=num_cases(300, 0.25), deadline=None)
@given(st.integers(1, 8), st.integers(1, 8), st.integers(0, 5), st.integers(24, 50))
def test_the_sets_of_global_batches_do_not_depend_on_the_ranks(
    before: int, after: int, stop: int, num_samples: int
) -> None:
    def batches(ranks: Ranks, steps: int) -> list[set[int]]:
        return [set().union(*(ranks.step() or [])) for _ in range(steps)]

    make = loader_over(num_samples, global_batch_size=8, endless=True)
    whole = batches(Ranks(make, 1), stop + 6)
    first = Ranks(make, before)
    assert batches(first, stop) == whole[:stop]
    assert batches(Ranks(make, after, first.state()), 6) == whole[stop:]


def test_with_one_world_it_is_the_distributed_sampler() -> None:
    data = list(range(48))
    for rank in range(4):
        theirs = DistributedSampler(data, num_replicas=4, rank=rank, shuffle=True, seed=5)
        theirs.set_epoch(1)
        ours = ElasticBatchSampler(data, global_batch_size=12, dp_rank=rank, dp_size=4, seed=5, order="randperm")
        assert len(ours) == 4 and len(list(ours)) == 4
        assert list(ours) == list(BatchSampler(theirs, batch_size=3, drop_last=True))


def test_it_is_a_batch_sampler() -> None:
    data = torch.arange(10) * 10
    sampler = ElasticBatchSampler(data, global_batch_size=4, dp_rank=1, dp_size=2, shuffle=False)
    assert [batch.tolist() for batch in DataLoader(data, batch_sampler=sampler)] == [[10, 30], [50, 70]]
    assert sampler.position.epoch == 1 and sampler.position.dropped == 2


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"num_workers": 1, "persistent_workers": True}], ids=str)
def test_a_loader_of_ones_own_loses_nothing_on_resume(options: dict[str, Any]) -> None:
    def sampler() -> ElasticBatchSampler:
        return ElasticBatchSampler(range(22), global_batch_size=2, shuffle=False)

    def loader_of(batches: ElasticBatchSampler) -> Any:
        return DataLoader(range(22), batch_sampler=batches, collate_fn=list, **options)

    first = sampler()
    loader = loader_of(first)
    served = list(itertools.islice(loader, 3))
    assert first.position.samples_seen == 6 and served[-1] == [4, 5]
    # On in the same process, and after a restart.
    again = sampler()
    again.load_state_dict(first.state_dict())
    for batches, rest in ((first, loader), (again, loader_of(again))):
        assert [sample for batch in rest for sample in batch] == list(range(6, 22))
        assert batches.position.epoch == 1 and batches.position.next_sample == 0
        assert next(iter(rest)) == [0, 1]
        assert batches.position.samples_seen == 24
        batches.load_state_dict({"loader": ({**batches.state_dict()["loader"][0], "next_sample": 20},)})
        assert list(rest) == [[20, 21]]


def test_batches_in_another_order_have_no_position() -> None:
    sampler = ElasticBatchSampler(range(22), global_batch_size=2)
    loader = DataLoader(range(22), batch_sampler=sampler, num_workers=1, in_order=False)
    served = iter(loader)
    next(served)
    with pytest.raises(ValueError, match="in_order=False has no position to resume from; leave it out"):
        sampler.state_dict()
    assert len(list(served)) == 10 and sampler.position.epoch == 1


def test_iterating_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    list(loader_over(20, batch_size=2, order="randperm")(0, 2))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_loaded_state_brings_its_seed_and_says_what_changed() -> None:
    ranks = Ranks(loader_over(20, global_batch_size=4, seed=7), 2)
    ranks.step()
    loader = loader_over(20, global_batch_size=5, seed=1)(0, 3)
    resharded = loader.reshard(ranks.state(), None, None)
    assert resharded.note == (
        "goes on at sample 4 of 20 of epoch 0, data-parallel ranks 2 -> 3, global batch 4 -> 5, seed 7 as saved, not 1"
    )
    assert loader.state_dict()["loader"][0]["seed"] == 1
    loader.load_state_dict(resharded.state)
    assert loader.state_dict()["loader"][0]["seed"] == 7


def test_states_of_other_data_are_refused_and_change_nothing() -> None:
    loader = loader_over(20, batch_size=2)(0, 1)
    next(iter(loader))
    before = loader.state_dict()
    (entry,) = before["loader"]
    refusals = [
        ({"loader": ({**entry, "num_samples": 30},)}, "saved over 30 samples, this data set has 20"),
        ({"loader": ({**entry, "kind": "streams"},)}, "saved over streams, this loader reads samples"),
        ({"loader": ({**entry, "version": 3},)}, "has version 3, this package reads up to 2"),
        (
            {"loader": ({**entry, "order": "bitrev"},)},
            "are in the order 'bitrev', this package knows feistel-1, randperm",
        ),
        ({"dp_rank_0": b"", "world_size": 1}, "none of ElasticDataLoader's .it has dp_rank_0, world_size, but no"),
        ({}, "it has nothing, but no 'loader'"),
    ]
    for state, message in refusals:
        for take in (loader.load_state_dict, lambda state: loader.reshard(state, None, None)):
            with pytest.raises(CannotReshardError, match=message):
                take(state)
    assert loader.state_dict() == before


def test_wrong_arguments_of_the_sampler_itself() -> None:
    with pytest.raises(TypeError, match="ElasticBatchSampler: got data=the class list, expected a data set with a len"):
        ElasticBatchSampler(list, global_batch_size=2)
    with pytest.raises(TypeError, match="got data=9, expected a data set with a length"):
        ElasticBatchSampler(9, global_batch_size=2)
    with pytest.raises(ValueError, match='last is .keep., expected "drop" or "pad"'):
        ElasticBatchSampler(range(9), global_batch_size=2, last="keep")
