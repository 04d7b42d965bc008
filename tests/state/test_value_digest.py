"""Equal values have equal digests however they came about; values that differ in anything that counts do not."""

import collections
import copy
import datetime
import enum
import functools
import io
import itertools
import pickle
import random
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from torchtitan_ext.state.value_digest import digest_tensor, digest_value


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


@dataclass
class Progress:
    step: int = 0
    losses: list[float] = field(default_factory=list)


def cyclic(value: Any) -> list[Any]:
    cycle = [value]
    cycle.append(cycle)
    return cycle


# No two of these are equal.
DIFFERENT: list[Any] = [
    None, False, 0, 0.0, -0.0, 0j, "", b"", (), [], {}, set(), "0", 1, True, 1.0, 2**80, float("nan"), float("inf"),
    (1,), [1], {1}, {1: 1}, {1: 2}, {2: 1}, {"1": 1}, [1, 2], [2, 1], [[1], 2], [[1, 2]], ("a", "bc"), ("ab", "c"),
    torch.zeros(2), torch.zeros(2, dtype=torch.int32), torch.zeros(1, 2), -torch.zeros(2), torch.zeros(0),
    torch.zeros(0, 1), torch.zeros(()), np.zeros(2), np.zeros(2, np.float32), np.zeros((1, 2)), np.float32(0),
    torch.float32, torch.float64, torch.Size([1]), torch.device("cpu"), torch.device("meta"), Colour.RED, Colour.BLUE,
    Progress(), Progress(1), Progress(0, [0.5]), collections.OrderedDict(a=1), collections.deque([1]),
    datetime.timedelta(1), datetime.date(2026, 1, 1), io.BytesIO(b"x"), io.BytesIO(b"y"), print, len, Progress, Colour,
    functools.partial(int, base=2), functools.partial(int, base=3), cyclic(1), cyclic(2), range(2), range(3),
    random.Random(0), random.Random(1), np.random.RandomState(0), np.array(["a"]), np.array([{"a": 1}], dtype=object),
]  # fmt: skip


def test_different_values_have_different_digests() -> None:
    digests = [digest_value(value) for value in DIFFERENT]
    for (left, of_left), (right, of_right) in itertools.combinations(zip(DIFFERENT, digests, strict=True), 2):
        assert of_left != of_right, (left, right)


@pytest.mark.parametrize("value", DIFFERENT, ids=lambda value: type(value).__name__)
def test_a_copy_and_a_pickled_copy_have_the_same_digest(value: Any) -> None:
    assert digest_value(copy.deepcopy(value)) == digest_value(value)
    assert digest_value(pickle.loads(pickle.dumps(value))) == digest_value(value)


def test_what_pickle_notices_but_equality_does_not() -> None:
    one = "".join(["a", "b"])
    pairs = [
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ({3, 1, 2}, {2, 3, 1}),
        ([one, one], ["".join(["a", "b"]), "".join(["a", "b"])]),
        ({"x": torch.zeros(2)}, {"x": torch.zeros(4)[:2]}),
        (torch.device("cuda", 0), torch.device("cuda", 1)),
    ]
    for left, right in pairs:
        assert digest_value(left) == digest_value(right)


def test_the_same_member_twice_is_no_cycle() -> None:
    shared = [1]
    assert digest_value([shared, shared]) == digest_value([[1], [1]])


def test_a_value_that_cannot_be_reduced_has_a_digest_of_its_class() -> None:
    assert digest_value(iter([]).__class__) != digest_value(io.StringIO)
    assert digest_value(x for x in ()) == digest_value(x for x in (1,))


DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.int64, torch.uint16, torch.complex64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strides_and_storage_do_not_count(dtype: torch.dtype) -> None:
    tensor = (torch.arange(12).view(3, 4) % 3).to(dtype)
    views = [tensor.t().contiguous().t(), torch.cat([tensor, tensor])[3:], tensor.clone().requires_grad_(False)]
    assert {digest_tensor(view) for view in views} == {digest_tensor(tensor)}
    changed = tensor.clone()
    changed.view(torch.uint8)[2, -1] ^= 1
    assert digest_tensor(changed) != digest_tensor(tensor)


def test_one_element_of_an_odd_stride_counts_as_its_copy() -> None:
    column = torch.arange(2.0).view(1, 2)[:, 1]
    assert digest_tensor(column) == digest_tensor(column.clone())


def test_conjugated_and_negated_views_count_as_they_read() -> None:
    numbers = torch.arange(4) * (1 + 2j)
    assert digest_tensor(numbers.conj()) == digest_tensor(numbers.conj().resolve_conj()) != digest_tensor(numbers)
    negated = torch._neg_view(torch.arange(4.0))
    assert digest_tensor(negated) == digest_tensor(negated.resolve_neg()) != digest_tensor(torch.arange(4.0))


def test_payloads_of_nan_count() -> None:
    first, second = (torch.tensor([bits], dtype=torch.int32).view(torch.float32) for bits in (0x7FC00000, 0x7FC00001))
    assert digest_tensor(first) != digest_tensor(second)


class Tagged(list[int]):
    """A list that holds more than its members."""


def test_what_containers_hold_beside_their_members_counts() -> None:
    one, other = Tagged([1]), Tagged([1])
    one.lr, other.lr = 0.1, 0.2  # type: ignore[attr-defined]
    assert digest_value(one) != digest_value(other)
    other.lr = 0.1  # type: ignore[attr-defined]
    assert digest_value(one) == digest_value(other)
    assert digest_value(defaultdict(int)) != digest_value(defaultdict(list))
