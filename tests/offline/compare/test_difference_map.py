"""Where tensors differ: counts of cells against the places of the elements, one by one."""

import random
from collections import Counter
from itertools import product

import pytest
import torch

from torchtitan_ext.offline.compare.measure import DifferenceMap


def cut(size: int, draw: random.Random) -> list[tuple[int, int]]:
    """Where parts of a dim begin, and their sizes."""
    begins = sorted({0, *(draw.randrange(size) for _ in range(2))})
    return [(begin, end - begin) for begin, end in zip(begins, [*begins[1:], size], strict=True)]


@pytest.mark.parametrize("shape", [(3,), (200,), (130, 5), (5, 130), (3, 70, 129), (1, 1), (4, 2, 3, 2)])
def test_each_element_is_counted_in_its_cell(shape: tuple[int, ...]) -> None:
    draw = random.Random(sum(shape))
    differs = torch.rand(shape, generator=torch.Generator().manual_seed(0)) < 0.2
    found = DifferenceMap(shape)
    for boxes in product(*(cut(size, draw) for size in shape)):
        box = differs[tuple(slice(begin, begin + size) for begin, size in boxes)]
        offsets, sizes = zip(*boxes, strict=True)
        found.add(offsets, sizes, box.reshape(-1).nonzero().view(-1))
    expected: Counter[tuple[int, ...]] = Counter()
    for index in differs.nonzero().tolist():
        cell = [index[dim] // size for dim, size in zip(found.dims, found.cell_sizes, strict=False)]
        expected[tuple([*cell, 0, 0][:2])] += 1
    assert {tuple(cell): int(found.counts[tuple(cell)]) for cell in found.counts.nonzero().tolist()} == expected
    assert max(found.counts.shape) <= 64


def test_a_single_number() -> None:
    found = DifferenceMap(())
    found.add((), (), torch.tensor([0]))
    assert (found.counts.tolist(), found.dims, found.sizes) == ([[1]], (), (1, 1))


def test_the_largest_dims_are_drawn() -> None:
    found = DifferenceMap((70, 3, 128, 128))
    assert found.dims == (2, 3) and found.counts.shape == (64, 64)
    assert DifferenceMap((128, 3, 2)).dims == (0, 1)
