"""The orders of epochs: every index once, what old checkpoints had, and how random the keyed order is."""

import math
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan_ext import _core
from torchtitan_ext.elastic import ElasticBatchSampler, ElasticDataLoader
from torchtitan_ext.elastic.data.order import epoch_order

SEEDS = range(100)


def keyed_order(num_samples: int, seed: int, epoch: int = 0) -> Any:
    return epoch_order(num_samples, shuffle=True, order="feistel-1", seed=seed, epoch=epoch)(np.arange(num_samples))


@pytest.mark.parametrize("num_samples", [1, 2, 3, 5, 7, 1000, 4096, 10_007])
def test_every_index_once(num_samples: int) -> None:
    for seed in [*SEEDS, -1, 2**63, 2**64 + 3]:
        assert np.array_equal(np.sort(keyed_order(num_samples, seed)), np.arange(num_samples))


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 10**12), st.integers(0, 2**64 - 1), st.integers(0, 10**6), st.data())
def test_any_places_of_any_order(num_samples: int, seed: int, epoch: int, data: st.DataObject) -> None:
    places = np.array(data.draw(st.lists(st.integers(0, num_samples - 1), unique=True, max_size=20)), np.int64)
    indices = _core.IndexOrder(num_samples, seed, epoch).indices_at(places)
    assert len(set(indices.tolist())) == len(places)
    assert all(0 <= index < num_samples for index in indices.tolist())
    assert np.array_equal(_core.IndexOrder(num_samples, seed, epoch).indices_at(places[::-1]), indices[::-1])


def chi_square_p(counts: Any, expected: float, constraints: int) -> float:
    """The probability of a larger chi-square statistic, by Wilson and Hilferty's cube root (1931)."""
    degrees = counts.size - constraints
    statistic = float(((counts - expected) ** 2).sum() / expected)
    spread = 2 / (9 * degrees)
    return math.erfc(((statistic / degrees) ** (1 / 3) - (1 - spread)) / math.sqrt(spread) / math.sqrt(2)) / 2


def poisson_p(count: int, mean: float) -> float:
    """The probability of more events, of half of those that are as many."""
    log_terms = (k * math.log(mean) - mean - math.lgamma(k + 1) for k in range(count + 1))
    terms = [math.exp(term) for term in log_terms]
    return 1 - sum(terms) + terms[-1] / 2


def is_plausible(p: float) -> bool:
    return 0.001 < p < 0.999


@pytest.mark.parametrize("num_samples", [64, 97, 1000, 9_999, 65_536])
def test_places_are_uniform(num_samples: int) -> None:
    """How often an index of each part of the data stands in each part of the order, over 100 seeds."""
    num_parts = 16
    counts = np.zeros((num_parts, num_parts))
    part = np.arange(num_samples) * num_parts // num_samples
    for seed in SEEDS:
        np.add.at(counts, (part, part[keyed_order(num_samples, seed)]), 1)
    sizes = np.bincount(part)
    expected = np.outer(sizes, sizes) * len(SEEDS) / num_samples
    # In a permutation the sums of rows and columns are known. Its cells vary by n / (n - 1) more than independent ones.
    scaled = (counts - expected) / np.sqrt(expected * num_samples / (num_samples - 1))
    p = chi_square_p(scaled + 1, 1.0, 2 * num_parts - 1)
    assert is_plausible(p), p


@pytest.mark.parametrize("num_samples", [64, 97, 1000, 9_999, 65_536])
def test_fixed_points_are_as_many_as_chance_has(num_samples: int) -> None:
    num_fixed = sum(int((keyed_order(num_samples, seed) == np.arange(num_samples)).sum()) for seed in SEEDS)
    p = poisson_p(num_fixed, len(SEEDS))
    assert is_plausible(p), (num_fixed, p)


@pytest.mark.parametrize("num_samples", [64, 97, 1000, 9_999, 65_536])
def test_neighbours_in_the_order_are_none_in_the_data(num_samples: int) -> None:
    """Cyclic distances between indices at neighbouring places, and how often the next index follows."""
    num_parts = 32 if num_samples > 64 else 9
    counts = np.zeros(num_parts)
    num_following = 0
    for seed in SEEDS:
        order = keyed_order(num_samples, seed)
        distances = (order[1:] - order[:-1]) % num_samples
        num_following += int((distances == 1).sum())
        counts += np.bincount((distances - 1) * num_parts // (num_samples - 1), minlength=num_parts)
    sizes = np.bincount(np.arange(num_samples - 1) * num_parts // (num_samples - 1))
    expected = sizes * counts.sum() / (num_samples - 1)
    p = chi_square_p((counts - expected) / np.sqrt(expected) + 1, 1.0, 1)
    assert is_plausible(p), p
    p = poisson_p(num_following, len(SEEDS))
    assert is_plausible(p), (num_following, p)


@pytest.mark.parametrize("num_samples", [97, 1000, 65_536])
def test_seeds_and_epochs_do_not_resemble_each_other(num_samples: int) -> None:
    """Places where two orders have the same index, between seeds that follow each other and between epochs."""
    for others in ([(seed + 1, 0) for seed in SEEDS], [(seed, 1) for seed in SEEDS]):
        num_same = sum(
            int((keyed_order(num_samples, seed) == keyed_order(num_samples, *other)).sum())
            for seed, other in zip(SEEDS, others, strict=True)
        )
        p = poisson_p(num_same, len(SEEDS))
        assert is_plausible(p), (num_same, p)


def test_tiny_data_has_all_orders_equally_often() -> None:
    orders = np.array([keyed_order(4, seed) for seed in range(24_000)]) @ np.array([64, 16, 4, 1])
    counts = np.unique(orders, return_counts=True)[1]
    assert len(counts) == 24 and is_plausible(chi_square_p(counts, 1000, 1))


OLD_STATE = {
    "version": 1,
    "kind": "samples",
    "global_batch_size": 4,
    "num_samples": 20,
    "shuffle": True,
    "seed": 5,
    "epoch": 2,
    "next_sample": 8,
    "samples_seen": 48,
    "dropped": 0,
    "padded": 0,
    "dp_size": 2,
}
OLD_REST = [4, 11, 18, 8, 2, 14, 16, 0, 10, 13, 6, 5]


def test_a_state_without_an_order_keeps_that_of_randperm() -> None:
    """A state as it was written before orders had names, and what it went on with."""
    loader = ElasticDataLoader(range(20), global_batch_size=4, collate_fn=list)
    loader.load_state_dict({"loader": (OLD_STATE,)})
    served = [sample for batch in loader for sample in batch]
    assert served == OLD_REST
    # It stays readable for the package that wrote it.
    (saved,) = loader.state_dict()["loader"]
    assert saved["version"] == 1 and saved["order"] == "randperm"
    assert OLD_STATE.keys() < saved.keys()


def test_the_name_of_the_order_is_in_the_state_and_wins() -> None:
    first = ElasticDataLoader(range(50), batch_size=5, collate_fn=list, seed=3)
    assert first.state_dict()["loader"][0]["order"] == "feistel-1" and first.state_dict()["loader"][0]["version"] == 2
    again = ElasticDataLoader(range(50), batch_size=5, collate_fn=list, order="randperm")
    again.load_state_dict(first.state_dict())
    served = [sample for batch in again for sample in batch]
    assert served == keyed_order(50, 3).tolist()


def test_an_unknown_order_is_refused() -> None:
    with pytest.raises(ValueError, match='order is .bitrev., expected "feistel-1" or "randperm"'):
        ElasticBatchSampler(range(9), global_batch_size=2, order="bitrev")  # type: ignore[arg-type]


def test_a_billion_samples_need_no_memory() -> None:
    """Start and resume late in an epoch, by what is asked of Python and numpy meanwhile."""
    num_samples = 10**9
    tracemalloc.start()
    loader = ElasticDataLoader(range(num_samples), global_batch_size=64, collate_fn=list)
    next(iter(loader))
    (state,) = loader.state_dict()["loader"]
    loader.load_state_dict({"loader": ({**state, "next_sample": num_samples - 128},)})
    assert sum(len(batch) for batch in loader) == 128
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 1 << 20
