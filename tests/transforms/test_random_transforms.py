"""A thousand random compositions of steps, against numpy on whole tensors; any box of the result, from any chunks."""

import gc
import random

import numpy as np
import torch
from random_transforms import Composition, random_shape
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from torchtitan_ext import _core, transforms
from torchtitan_ext.layout.dtensor import view_of
from torchtitan_ext.transforms import Rule, Transform

NUM_COMPOSITIONS = 1_000


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
    flat = [
        composition.sources[names[source]].reshape(-1)[position] if source < len(names) else 0
        for source, position in tensor_map.enumerate()
    ]
    whole = np.array(flat, dtype=np.int64).reshape(tensor_map.shape)
    for value, (offsets, sizes, steps) in tensor_map.find_fills([0] * whole.ndim, whole.shape):
        view_of(torch.from_numpy(whole), (offsets, sizes, steps)).fill_(value)
    return whole


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
    for value, view in tensor_map.find_fills(offsets, sizes):
        part = view_of(torch.from_numpy(memory), view)
        assert bool((part == -1).all()), "an element is filled twice"
        part.fill_(value)
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


def test_sources_of_a_map_keep_their_chunks() -> None:
    """The indexes below are freed and their memory is used again, unless the sources keep them."""
    rules = transforms.Transform.from_json('{"rules":[{"from":["a"],"to":["b"],"steps":[]}],"drop":[]}')
    tensor_map = rules.resolve([("a", "float32", (64, 8))], "test")[0].values

    def rows_of(num_rows: int, num_chunks: int) -> _core.ChunkIndex:
        sizes = torch.Size([num_rows, 8])
        chunks = [ChunkStorageMetadata(torch.Size([num_rows * row, 0]), sizes) for row in range(num_chunks)]
        return _core.ChunkIndex(chunks)

    sources = _core.MapSources([((64, 8), rows_of(16, 4))])
    gc.collect()
    others = [rows_of(2, 32) for _ in range(4)]
    assert len(tensor_map.find_parts((0, 0), (64, 8), (8, 1), sources)) == 4
    assert len(others) == 4
