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
from torch.testing._internal.two_tensor import TwoTensor

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


class Cell:
    """An object with references to others."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.neighbours: list[Cell] = []


def grid(side: int) -> list[Cell]:
    """Neighbours of neighbours: the number of paths grows by a power with each step."""
    cells = [Cell(number) for number in range(side * side)]
    for cell in cells:
        row, column = divmod(cell.number, side)
        around = [(row - 1, column), (row + 1, column), (row, column - 1), (row, column + 1)]
        cell.neighbours = [cells[r * side + c] for r, c in around if 0 <= r < side and 0 <= c < side]
    return cells


@pytest.mark.timeout(60)
def test_objects_that_refer_to_each_other_take_linear_time() -> None:
    for side in (6, 20):
        cells = grid(side)
        digest = digest_value(cells)
        assert digest == digest_value(grid(side))
        cells[-1].number = 0
        assert digest_value(cells) != digest


@pytest.mark.timeout(60)
def test_a_member_that_many_paths_lead_to_takes_linear_time() -> None:
    def doubled(value: Any) -> Any:
        for _ in range(500):
            value = {"list": [value, value], "again": value}
        return value

    assert digest_value(doubled(1)) == digest_value(doubled(1)) != digest_value(doubled(2))


def test_values_may_be_deeper_than_the_stack() -> None:
    deep: list[Any] = []
    for _ in range(20_000):
        deep = [deep]
    assert digest_value(deep) != digest_value(deep[0])


def loop(*values: Any) -> list[Any]:
    """A cycle of lists, one for each value."""
    lists: list[list[Any]] = [[value] for value in values]
    for number, member in enumerate(lists):
        member.append(lists[(number + 1) % len(lists)])
    return lists[0]


def test_cycles_are_equal_where_they_unfold_alike() -> None:
    alike = [loop(0), loop(0, 0), loop(0, 0, 0), [0, loop(0)], [0, [0, loop(0, 0)]]]
    assert len({digest_value(value) for value in alike}) == 1
    others = [loop(0, 1), loop(1, 0), loop(0, 0, 1), loop(0, 1, 0), loop(1), [1, loop(0)], [[0, loop(0)]]]
    assert len({digest_value(value) for value in [*alike, *others]}) == 1 + len(others)
    twice = loop(0, 1)
    assert digest_value([twice, twice]) == digest_value([loop(0, 1), loop(0, 1, 0, 1)])
    assert digest_value({"a": twice, "b": twice[1]}) == digest_value({"b": loop(1, 0), "a": loop(0, 1)})


def random_graph(draw: random.Random, kinds: str) -> list[Any]:
    """Lists, dicts and tuples (as far as these can be in a cycle) that hold atoms and each other, at random."""
    nodes: list[Any] = [[] if draw.choice(kinds) == "l" else {} for _ in range(draw.randint(1, 6))]
    for node in nodes:
        members = [draw.choice([0, 1, *nodes, (draw.choice(nodes),)]) for _ in range(draw.randint(0, 2))]
        node.extend(members) if isinstance(node, list) else node.update(enumerate(members))
    return nodes


def are_equal(left: Any, right: Any) -> bool:
    """Whether two graphs unfold alike: no path leads to a difference. Slow and obvious."""
    seen, pending = set(), [(left, right)]
    while pending:
        one, other = pending.pop()
        if (id(one), id(other)) in seen:
            continue
        seen.add((id(one), id(other)))
        if type(one) is not type(other) or (isinstance(one, int) and one != other):
            return False
        if not isinstance(one, int):
            if len(one) != len(other):
                return False
            pending += [(one[key], other[key]) for key in range(len(one))]
    return True


def test_digests_of_random_graphs_are_equal_exactly_where_these_unfold_alike() -> None:
    draw = random.Random(0)
    num_equal = 0
    for _ in range(300):
        nodes = random_graph(draw, "lld") + random_graph(draw, "lld")
        digests = [digest_value(node) for node in nodes]
        for one, other in itertools.combinations(range(len(nodes)), 2):
            is_equal = are_equal(nodes[one], nodes[other])
            num_equal += is_equal and nodes[one] not in (0, 1)
            assert (digests[one] == digests[other]) == is_equal, (nodes[one], nodes[other])
    assert num_equal > 500


class Endless:
    """Makes a new member whenever it is asked for one, which pickle cannot follow."""

    def __reduce__(self) -> Any:
        return (Endless, (Endless(), Endless()))


class Reader:
    """Has a method of streams, but another one."""

    def __init__(self, offset: int) -> None:
        self.offset = offset

    def getvalue(self, default: int) -> int:
        return default


@pytest.mark.timeout(60)
def test_objects_that_only_look_like_others() -> None:
    assert digest_value(Endless()) == digest_value(Endless())
    assert digest_value(Reader(1)) == digest_value(Reader(1)) != digest_value(Reader(2))
    closed = io.BytesIO(b"x")
    closed.close()
    assert digest_value(closed) != digest_value(io.BytesIO(b"x"))
    assert digest_value([1].append) == digest_value([1].append) != digest_value([2].append)
    assert digest_value(10**5000) != digest_value(10**5000 + 1)


ONE, TWO, THREE = torch.ones(1), torch.ones(2), torch.ones(3)
ODD_TENSORS = [
    TWO, torch.empty(2, device="meta"), TwoTensor(TWO, TWO),
    torch.eye(2).to_sparse(), (torch.eye(2) * 2).to_sparse(), torch.eye(2).to_sparse_csr(),
    torch.nested.nested_tensor([ONE, TWO]), torch.nested.nested_tensor([ONE, THREE]),
    torch.nested.nested_tensor([ONE, TWO], layout=torch.jagged),
    torch.quantize_per_tensor(TWO, 1.0, 0, torch.qint8), torch.quantize_per_tensor(TWO, 0.5, 0, torch.qint8),
]  # fmt: skip


def test_tensors_of_all_kinds_have_digests_inside_of_values() -> None:
    digests = [digest_value((tensor,)) for tensor in ODD_TENSORS]
    assert len(set(digests)) == len(digests)
    assert [digest_value((tensor.clone(),)) for tensor in ODD_TENSORS] == digests


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
