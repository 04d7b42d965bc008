"""Random transforms: one tensor on its way through random steps, by numpy on whole tensors and as rules.

Elements are numbered through all sources; what a step pads has numbers below 0.
"""

import random
from typing import Any

import numpy as np

from torchtitan_ext import transforms
from torchtitan_ext.transforms import Rule, Transform

MAX_DIM = 12
KINDS = ("permute", "transpose", "reshape", "slice", "concat", "stack", "split", "unstack", "pad", "crop")


def random_shape(rng: random.Random, num_dims: int) -> list[int]:
    return [rng.choice([1, 2, 3, 4, 5, 6, 8, MAX_DIM]) for _ in range(num_dims)]


def random_factors(rng: random.Random, total: int) -> list[int]:
    """Sizes of a random number of dims with so many elements."""
    sizes = []
    while total > 1 and rng.random() < 0.8:
        divisor = rng.choice([number for number in range(1, total + 1) if total % number == 0])
        sizes.append(divisor)
        total //= divisor
    sizes.append(total)
    rng.shuffle(sizes)
    return sizes


class Composition:
    """One tensor on its way through random steps, by numpy and as a transform of several stages."""

    def __init__(self, rng: random.Random, *, pads: bool = True) -> None:
        self.rng, self.pads = rng, pads
        self.sources: dict[str, np.ndarray] = {}
        self.num_elements = 0
        self.rules: list[Transform] = []
        shape = random_shape(rng, rng.randint(1, 3))
        self.array = self.new_source("s0", shape)
        self.name = "s0"

    def new_source(self, name: str, shape: list[int]) -> np.ndarray:
        count = int(np.prod(shape, dtype=np.int64))
        values = np.arange(self.num_elements, self.num_elements + count).reshape(shape)
        self.num_elements += count
        self.sources[name] = values
        return values

    def step(self) -> None:
        number = len(self.rules) + 1
        if self.array.ndim == 0:
            self.follow([transforms.reshape([1])], self.array.reshape(1))
            return
        rng, array = self.rng, self.array
        dim = rng.randrange(array.ndim)
        kind = rng.choice([kind for kind in (*KINDS, "reshape") if self.pads or kind != "pad"])
        if array.size > 2_000 and kind in ("concat", "stack", "pad"):
            kind = "slice"
        if kind == "permute":
            dims = rng.sample(range(array.ndim), array.ndim)
            self.follow([transforms.permute(dims)], array.transpose(dims))
        elif kind == "transpose":
            other = rng.randrange(array.ndim)
            self.follow([transforms.transpose(dim, other)], array.swapaxes(dim, other))
        elif kind == "reshape":
            sizes = random_factors(rng, array.size)
            asked = list(sizes)
            if rng.random() < 0.3:
                asked[rng.randrange(len(asked))] = -1
            self.follow([transforms.reshape(asked)], array.reshape(sizes))
        elif kind == "slice":
            begin = rng.randrange(array.shape[dim])
            end = rng.randint(begin + 1, array.shape[dim])
            self.follow([transforms.slice_dim(dim, begin, end)], np.take(array, range(begin, end), axis=dim))
        elif kind == "pad":
            width = [(0, 0)] * array.ndim
            width[dim] = (0, rng.randint(0, 3))
            value = -rng.randint(1, 5)
            padded = np.pad(array, width, constant_values=value)
            self.follow([transforms.pad(dim, padded.shape[dim], value=value)], padded)
        elif kind == "crop":
            end = rng.randint(1, array.shape[dim])
            self.follow([transforms.crop(dim, end)], np.take(array, range(end), axis=dim))
        elif kind in ("concat", "stack"):
            name = f"s{number}"
            shape = list(array.shape)
            if kind == "concat":
                shape[dim] = rng.randint(1, 7)
            other = self.new_source(name, shape)
            first = rng.random() < 0.5
            arrays = [array, other] if first else [other, array]
            names = [self.name, name] if first else [name, self.name]
            if kind == "concat":
                self.follow([transforms.concat(dim)], np.concatenate(arrays, dim), names)
            else:
                self.follow([transforms.stack(dim)], np.stack(arrays, dim), names)
        elif kind == "split":
            begin = rng.randint(0, array.shape[dim])
            parts = np.split(array, [begin], dim)
            order = [transforms.split(dim, sizes=[begin, array.shape[dim] - begin])]
            # Both parts, in the other order.
            self.follow([*order, transforms.concat(dim)], np.concatenate(parts, dim))
        else:
            parts = [np.take(array, index, axis=dim) for index in range(array.shape[dim])]
            other_dim = rng.randint(0, array.ndim - 1)
            self.follow([transforms.unstack(dim), transforms.stack(other_dim)], np.stack(parts, other_dim))

    def follow(self, steps: list[Any], array: np.ndarray, names: list[str] | None = None) -> None:
        names = names or [self.name]
        target = f"t{len(self.rules) + 1}"
        # All tensors go on beside the new one, for later steps.
        self.rules.append(Transform([Rule(names, [target], steps), Rule("**", "**")], drop=["**"]))
        self.name, self.array = target, array

    def transform(self) -> Transform:
        first, *others = self.rules
        for other in others:
            first = first.then(other)
        return Transform.from_json(first.to_json())
