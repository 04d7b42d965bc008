"""A thousand random compositions of steps, against numpy on whole tensors; any box of the result, from any chunks."""

import random
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from torchtitan_ext import _core, transforms
from torchtitan_ext.transforms import Rule, Transform

NUM_COMPOSITIONS = 1_000
MAX_DIM = 12


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

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
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
        kind = rng.choice(
            ["permute", "transpose", "reshape", "reshape", "slice", "concat", "stack", "split", "unstack"]
        )
        if array.size > 2_000 and kind in ("concat", "stack"):
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


def random_chunks(rng: random.Random, shape: tuple[int, ...]) -> list[tuple[list[int], list[int]]]:
    """A grid of boxes that tile a tensor."""
    boxes: list[tuple[list[int], list[int]]] = [([], [])]
    for size in shape:
        ends = sorted({0, size, *(rng.randint(0, size) for _ in range(rng.randint(0, 2)))})
        boxes = [
            ([*offsets, begin], [*sizes, end - begin])
            for offsets, sizes in boxes
            for begin, end in zip(ends, ends[1:], strict=False)
        ]
    rng.shuffle(boxes)
    return boxes


def gathered(composition: Composition, names: list[str], tensor_map: _core.TensorMap) -> np.ndarray:
    flat = [composition.sources[names[source]].reshape(-1)[position] for source, position in tensor_map.enumerate()]
    return np.array(flat, dtype=np.int64).reshape(tensor_map.shape)


def read_box(
    rng: random.Random, sources: list[np.ndarray], tensor_map: _core.TensorMap, offsets: list[int], sizes: list[int]
) -> np.ndarray:
    """A box as a rank reads it: from sources that lie in chunks, into memory of any strides."""
    chunks = [random_chunks(rng, source.shape) for source in sources]
    indices = [
        _core.ChunkIndex([ChunkStorageMetadata(torch.Size(one), torch.Size(size)) for one, size in boxes])
        for boxes in chunks
    ]
    shapes = [source.shape for source in sources]
    memory = np.full([*sizes, 2], -1, dtype=np.int64)[..., 0]
    if rng.random() < 0.5:
        memory = np.full(sizes[::-1], -1, dtype=np.int64).transpose()
    flat = np.lib.stride_tricks.as_strided(memory, (1,), (8,))
    strides = [stride // 8 for stride in memory.strides]
    for part in tensor_map.find_parts(
        offsets, sizes, strides, _core.MapSources(list(zip(shapes, indices, strict=True)))
    ):
        begin, size = indices[part.source].box(part.chunk)
        box = tuple(slice(one, one + length) for one, length in zip(begin, size, strict=True))
        chunk = np.ascontiguousarray(sources[part.source][box])
        stored = part.stored(_core.StoredTensor("int64", chunk.shape, None, 0))
        values = np.lib.stride_tricks.as_strided(
            chunk.reshape(-1)[stored.data_offset // 8 :], stored.sizes, [8 * stride for stride in stored.strides]
        )
        place = np.lib.stride_tricks.as_strided(
            np.lib.stride_tricks.as_strided(flat, (part.memory_offset + 1,), (8,))[part.memory_offset :],
            stored.sizes,
            [8 * stride for stride in part.memory_strides],
        )
        assert (place == -1).all(), "an element is read twice"
        place[...] = values
    return memory


def test_random_compositions_are_those_of_numpy() -> None:
    rng = random.Random(29)
    num_boxes = 0
    for _ in range(NUM_COMPOSITIONS):
        composition = Composition(rng)
        for _ in range(rng.randint(1, 7)):
            composition.step()
        names = list(composition.sources)
        sources = [(name, "int64", array.shape) for name, array in composition.sources.items()]
        resolved = _core.resolve_transform(composition.transform().encoded(), sources)
        assert resolved.problems == []
        target = next(one for one in resolved.targets if one.name == composition.name)
        assert target.values.shape == composition.array.shape
        np.testing.assert_array_equal(gathered(composition, names, target.values), composition.array)
        for _ in range(2):
            offsets = [rng.randrange(size) for size in composition.array.shape]
            sizes = [rng.randint(1, size - begin) for size, begin in zip(composition.array.shape, offsets, strict=True)]
            arrays = list(composition.sources.values())
            box = read_box(rng, arrays, target.values, offsets, sizes)
            wanted = composition.array[tuple(slice(b, b + s) for b, s in zip(offsets, sizes, strict=True))]
            np.testing.assert_array_equal(box, wanted)
            num_boxes += 1
    assert num_boxes == 2 * NUM_COMPOSITIONS


def test_boxes_at_random_places_are_proved_as_counting_proves_them() -> None:
    rng = random.Random(30)
    num_exact = 0
    for _ in range(400):
        shape = random_shape(rng, rng.randint(1, 3))
        boxes = [box for box in random_chunks(rng, tuple(shape)) if 0 not in box[1]]
        if rng.random() < 0.5:  # one box more, less, or elsewhere
            number = rng.randrange(len(boxes))
            offsets, sizes = boxes[number]
            moved = [rng.randint(0, whole - size) for whole, size in zip(shape, sizes, strict=True)]
            boxes[number] = (moved, sizes)
            boxes += [boxes[number]] if rng.random() < 0.3 else []
        counts = np.zeros(shape, dtype=np.int64)
        for offsets, sizes in boxes:
            counts[tuple(slice(begin, begin + size) for begin, size in zip(offsets, sizes, strict=True))] += 1
        sources = [(f"s{number}", "int64", sizes) for number, (_, sizes) in enumerate(boxes)]
        step = transforms.place(shape, [offsets for offsets, _ in boxes])
        transform = Transform([Rule([name for name, _, _ in sources], ["t"], [step])])
        problems = _core.resolve_transform(transform.encoded(), sources).problems
        assert (problems == []) == bool((counts == 1).all())
        if problems:
            ((key, detail),) = problems
            wrong = [int(index) for index in np.argwhere(counts != 1)[0]]
            assert key == "t" and (str(wrong) in detail or "twice" in detail)
        num_exact += problems == []
    assert 50 < num_exact < 350


def test_used_elements_of_sources_are_proved_as_counting_proves_them() -> None:
    rng = random.Random(31)
    num_used = 0
    for _ in range(400):
        shape = random_shape(rng, rng.randint(1, 3))
        seen = np.zeros(shape, dtype=bool)
        rules = []
        for number in range(rng.randint(1, 4)):
            dim = rng.randrange(len(shape))
            order = rng.sample(range(len(shape)), len(shape))
            begin, end = sorted((rng.randint(0, shape[dim]), rng.randint(0, shape[dim])))
            if rng.random() < 0.4:
                begin = 0
            if rng.random() < 0.5:
                end = shape[dim]
            seen[tuple(slice(begin, end) if one == dim else slice(None) for one in range(len(shape)))] = True
            steps = [transforms.permute(order), transforms.slice_dim(order.index(dim), begin, end)]
            rules.append(Rule("s", f"t{number}", steps))
        problems = _core.resolve_transform(Transform(rules).encoded(), [("s", "int64", shape)]).problems
        assert (problems == []) == bool(seen.all())
        if problems:
            ((key, detail),) = problems
            assert key == "s" and str([int(index) for index in np.argwhere(~seen)[0]]) in detail
        assert _core.resolve_transform(Transform(rules, drop=["s"]).encoded(), [("s", "int64", shape)]).problems == []
        num_used += problems == []
    assert 50 < num_used < 350


def test_scales_of_blocks_are_those_of_numpy() -> None:
    rng = random.Random(32)
    for _ in range(100):
        shape = random_shape(rng, rng.randint(1, 3))
        block = [rng.randint(1, 5) for _ in shape]
        grid = [-(-size // length) for size, length in zip(shape, block, strict=True)]
        scales = np.arange(int(np.prod(grid))).reshape(grid)
        whole = scales
        for dim, length in enumerate(block):
            whole = whole.repeat(length, dim)
        order = rng.sample(range(len(shape)), len(shape))
        whole = whole[tuple(slice(0, size) for size in shape)].transpose(order)
        steps = [transforms.dequantize(block, dtype="float32"), transforms.permute(order)]
        rule = Rule(["w", "w_scale"], ["t"], steps)
        sources = [("w", "float8_e4m3fn", shape), ("w_scale", "float32", grid)]
        resolved = _core.resolve_transform(Transform([rule]).encoded(), sources)
        assert resolved.problems == []
        found = resolved.targets[0].scales
        assert found is not None and found.shape == whole.shape
        positions = np.array([position for _, position in found.enumerate()]).reshape(whole.shape)
        np.testing.assert_array_equal(positions, whole)
        offsets = [rng.randrange(size) for size in whole.shape]
        sizes = [rng.randint(1, size - begin) for size, begin in zip(whole.shape, offsets, strict=True)]
        box = read_box(rng, [np.zeros(shape, dtype=np.int64), scales], found, offsets, sizes)
        np.testing.assert_array_equal(box, whole[tuple(slice(b, b + s) for b, s in zip(offsets, sizes, strict=True))])
