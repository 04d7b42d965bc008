"""Random nested states: containers, plain values and those of classes, tensors of all forms, subclasses."""

import argparse
import collections
import datetime
import decimal
import enum
import random
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from reference import same_bits
from torch.testing._internal.two_tensor import TwoTensor

Pair = collections.namedtuple("Pair", "weight step")


class Mode(enum.Enum):
    FAST = 1


@dataclass
class Progress:
    step: int = 3


DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.int32,
    torch.int8, torch.uint8, torch.uint16, torch.bool, torch.complex64,
]  # fmt: skip
VALUES: list[Callable[[random.Random], Any]] = [
    lambda draw: draw.randint(-3, 3),
    lambda draw: 1 << draw.randint(0, 100),
    lambda draw: draw.random(),
    lambda draw: draw.choice([float("nan"), float("inf"), -0.0]),
    lambda draw: draw.choice([True, False, None]),
    lambda draw: draw.choice(["", "text", "\u00e4\n"]),
    lambda draw: draw.choice([b"", b"bytes", bytearray(b"x"), 2 + 3j]),
    lambda draw: draw.choice([{1, 2}, frozenset({"a"}), range(3), slice(1, 2)]),
    lambda draw: draw.choice([torch.float32, torch.Size([1, 2]), torch.device("cpu")]),
    lambda draw: draw.choice([np.arange(3), np.float32(0.5), np.array(["a"]), np.random.RandomState(0).get_state()]),
    lambda draw: draw.choice([datetime.timedelta(3), decimal.Decimal("0.5"), uuid.UUID(int=3), Path("a/b")]),
    lambda draw: argparse.Namespace(lr=draw.random(), sizes=[1, 2]),
    lambda draw: random.Random(draw.random()).getstate(),
    lambda draw: draw.choice([Mode.FAST, Progress(), collections.deque([1, 2])]),
]


def random_tensor(draw: random.Random) -> torch.Tensor:
    shape = [draw.choice([0, 1, 2, 3, 5]) for _ in range(draw.randint(0, 3))]
    dtype = draw.choice(DTYPES)
    tensor = torch.tensor([draw.randint(0, 1) for _ in range(torch.Size(shape).numel())]).view(shape).to(dtype)
    form = draw.randint(0, 7)
    if form == 0 and tensor.dim() > 1:
        return tensor.transpose(0, 1)
    if form == 1 and tensor.dim() > 0:
        return torch.cat([tensor, tensor])[1 : 1 + shape[0]]
    if form == 2 and dtype == torch.float32:
        return torch.nn.Parameter(tensor)
    if form == 3:
        return tensor.expand(2, *shape)
    if form == 4 and dtype == torch.complex64:
        return tensor.conj()
    if form == 5 and draw.random() < 0.3:
        return TwoTensor(tensor, tensor.clone())
    return tensor


def random_value(draw: random.Random, depth: int) -> Any:
    kind = draw.randint(0, 11 if depth > 0 else 7)
    if kind < 4:
        return draw.choice(VALUES)(draw)
    if kind < 8:
        return random_tensor(draw)
    members = [random_value(draw, depth - 1) for _ in range(draw.randint(0, 3))]
    if kind == 8:
        return members
    if kind == 9:
        return Pair(*members[:2]) if len(members) > 1 and draw.random() < 0.3 else tuple(members)
    names: list[Any] = ["w", "b.c", "step", "\u00e4"] if draw.random() < 0.8 else [0, 1, 10]
    state = dict(zip(draw.sample(names, k=min(len(members), len(names))), members, strict=False))
    return collections.OrderedDict(state) if kind == 10 else state


def random_state(seed: int) -> dict[str, Any]:
    draw = random.Random(seed)
    return {f"key_{number}": random_value(draw, 3) for number in range(draw.randint(1, 5))}


def blank(value: Any) -> Any:
    """A target for a value: the same containers, zeros for tensors and nothing for the rest."""
    if isinstance(value, TwoTensor):
        return TwoTensor(torch.zeros_like(value.a), torch.zeros_like(value.b))
    if isinstance(value, torch.nn.Parameter):
        return torch.nn.Parameter(torch.zeros_like(value))
    if isinstance(value, torch.Tensor):
        return torch.zeros(value.shape, dtype=value.dtype)
    if isinstance(value, dict):
        return type(value)((key, blank(member)) for key, member in value.items())
    if isinstance(value, Pair):
        return Pair(*map(blank, value))
    if type(value) in (list, tuple):
        return type(value)(map(blank, value))
    return None


def are_equal(one: Any, other: Any) -> bool:
    if isinstance(one, TwoTensor):
        return isinstance(other, TwoTensor) and are_equal([one.a, one.b], [other.a, other.b])
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and same_bits(one.detach(), other.detach())
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(are_equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(are_equal, one, other))
    return one == other or repr(one) == repr(other) == "nan"


def holds(value: Any, is_it: Callable[[Any], bool], *, inside: tuple[type, ...] = (dict, list, tuple)) -> bool:
    if is_it(value):
        return True
    members = value.values() if isinstance(value, dict) else value
    return isinstance(value, inside) and any(holds(member, is_it, inside=inside) for member in members)


def is_foreign(value: Any) -> bool:
    """Of a class that no load reads by default."""
    return isinstance(value, (Mode, Progress, collections.deque)) or (
        isinstance(value, Pair) and not holds(value, lambda member: isinstance(member, torch.Tensor))
    )


def is_walked_by_us_only(value: Any) -> bool:
    """A tensor made of others, or a named tuple with tensors: stock pickles these whole."""
    with_tensors = isinstance(value, tuple) and holds(value, lambda member: isinstance(member, torch.Tensor))
    return isinstance(value, TwoTensor) or (isinstance(value, Pair) and with_tensors)
