"""The order of an epoch, and a rank's share of a batch: functions without a world."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler

from torchtitan_ext.elastic.index_order import index_order, local_size


@given(st.integers(0, 80), st.integers(0, 5), st.integers(0, 5))
def test_every_index_once(num_samples: int, seed: int, epoch: int) -> None:
    order = index_order(num_samples, shuffle=True, seed=seed, epoch=epoch)
    assert sorted(order) == list(range(num_samples))
    assert order == index_order(num_samples, shuffle=True, seed=seed, epoch=epoch)
    assert index_order(num_samples, shuffle=False, seed=seed, epoch=epoch) == range(num_samples)


def test_it_is_the_order_of_the_distributed_sampler() -> None:
    theirs = DistributedSampler(range(50), num_replicas=1, rank=0, shuffle=True, seed=5)
    theirs.set_epoch(3)
    assert index_order(50, shuffle=True, seed=5, epoch=3) == list(theirs)
    assert index_order(50, shuffle=True, seed=5, epoch=4) != list(theirs)


def test_the_global_generator_stays() -> None:
    before = torch.get_rng_state()
    index_order(50, shuffle=True, seed=5, epoch=3)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(("size", "dp_size", "sizes"), [(8, 4, [2, 2, 2, 2]), (7, 3, [3, 2, 2]), (2, 3, [1, 1, 0])])
def test_local_sizes_add_up(size: int, dp_size: int, sizes: list[int]) -> None:
    assert [local_size(size, dp_rank=rank, dp_size=dp_size) for rank in range(dp_size)] == sizes
    assert sum(sizes) == size
