"""Fingerprints: the op against the definition in plain integers, and the same digests on every mesh."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_ops import DEVICES, random_tensor
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import torchtitan_ext as tte
from torchtitan_ext import ops
from torchtitan_ext.fingerprints import fingerprint
from torchtitan_ext.layout.layout import Chunk, LocalShard, ShardOrder
from torchtitan_ext.state import value_digest

MASK = 2**64 - 1


def hash_word(word: int, position: int) -> int:
    bits = word ^ ((position + 1) * 0x9E3779B97F4A7C15 & MASK)
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB & MASK
    return bits ^ (bits >> 31)


def reference_sum(tensor: Tensor) -> int:
    """Of a whole tensor, word by word."""
    word_bytes = min(tensor.element_size(), 8)
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    words = [int.from_bytes(data[at : at + word_bytes], "little") for at in range(0, len(data), word_bytes)]
    return sum(hash_word(word, position) for position, word in enumerate(words)) & MASK


def whole(shape: tuple[int, ...]) -> LocalShard:
    zeros = (0,) * len(shape)
    return LocalShard(shape, (Chunk(zeros, shape, zeros),) if 0 not in shape else ())


@pytest.mark.parametrize(
    "dtype",
    [torch.uint8, torch.bool, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128],
    ids=str,
)
def test_op_is_the_definition(dtype: torch.dtype) -> None:
    for shape in [(5, 7), (0, 3), (), (2, 3, 4), (1,)]:
        tensor = (
            torch.randn(shape, dtype=torch.complex128).to(dtype) if dtype.is_complex else torch.randn(shape).to(dtype)
        )
        total = ops.fingerprint_shard(tensor, whole(shape), shape)
        assert total.dtype == torch.int64 and total.shape == ()
        assert total.item() & MASK == reference_sum(tensor)
        if len(shape) == 2:
            transposed = tensor.t().contiguous().t()
            assert ops.fingerprint_shard(transposed, whole(shape), shape) == total


def test_sums_of_shards_add_up() -> None:
    tensor = torch.randn(300, 500)
    total = ops.fingerprint_shard(tensor, whole((300, 500)), (300, 500))
    parts = torch.zeros((), dtype=torch.int64)
    for rows, columns in [((0, 100), (0, 500)), ((100, 300), (0, 3)), ((100, 300), (3, 500))]:
        sizes = (rows[1] - rows[0], columns[1] - columns[0])
        shard = LocalShard(sizes, (Chunk((rows[0], columns[0]), sizes, (0, 0)),))
        parts += ops.fingerprint_shard(tensor[slice(*rows), slice(*columns)], shard, (300, 500))
    assert parts == total
    both = LocalShard((200, 500), (Chunk((0, 0), (50, 500), (0, 0)), Chunk((150, 0), (150, 500), (50, 0))))
    middle = LocalShard((100, 500), (Chunk((50, 0), (100, 500), (0, 0)),))
    local = ops.pack_shard(tensor, both)
    sums = ops.fingerprint_shard(local, both, (300, 500)) + ops.fingerprint_shard(tensor[50:150], middle, (300, 500))
    assert sums == total


def test_accidents_change_it() -> None:
    tensor = torch.randn(64, 64)
    digests = {ops.fingerprint_shard(tensor, whole((64, 64)), (64, 64)).item()}
    flipped = tensor.clone()
    flipped.view(torch.int32)[3, 5] ^= 1
    swapped_rows = tensor[[1, 0, *range(2, 64)]]
    swapped_neighbours = tensor[:, [1, 0, *range(2, 64)]]
    for other in (flipped, swapped_rows, swapped_neighbours, tensor.t(), -tensor, torch.zeros(64, 64)):
        digests.add(ops.fingerprint_shard(other, whole((64, 64)), (64, 64)).item())
    assert len(digests) == 7


def random_shards(device: str) -> tuple[list[Tensor], list[LocalShard], list[tuple[int, int]]]:
    """Of every word size, some in two chunks or with odd strides, some without elements, one in several entries."""
    draw = random.Random(5)
    dtypes = [torch.uint8, torch.bfloat16, torch.float32, torch.float64, torch.complex128]
    tensors, shards, shapes = [], [], []
    for _ in range(400):
        rows, columns = draw.choice([0, 1, 3, 40]), draw.choice([1, 7, 33])
        local = random_tensor((columns, rows), draw.choice(dtypes), device).t()
        halves = (
            Chunk((1, 2), (rows // 2, columns), (0, 0)),
            Chunk((50, 0), (rows - rows // 2, columns), (rows // 2, 0)),
        )
        tensors.append(local if draw.random() < 0.5 else local.contiguous())
        shards.append(LocalShard((rows, columns), tuple(chunk for chunk in halves if 0 not in chunk.sizes)))
        shapes.append((100, 100))
    large = random_tensor((300, 4000), torch.float32, device)  # longer than one thread sums alone
    return [*tensors, large], [*shards, whole((300, 4000))], [*shapes, (300, 4000)]


@pytest.mark.parametrize("device", DEVICES)
def test_many_shards_in_one_call(device: str) -> None:
    tensors, shards, shapes = random_shards(device)
    sums = ops.fingerprint_shards(tensors, shards, shapes)
    singles = [ops.fingerprint_shard(*one).item() for one in zip(tensors, shards, shapes, strict=True)]
    assert sums.device == tensors[0].device and sums.tolist() == singles
    of_cpu = ops.fingerprint_shards([tensor.cpu() for tensor in tensors], shards, shapes)
    assert of_cpu.tolist() == singles


def test_many_shards_are_refused_by_number() -> None:
    tensors, four = [torch.ones(4), torch.ones(4)], whole((4,))
    with pytest.raises(ValueError, match="got 2 tensors and 1 shards"):
        ops.fingerprint_shards(tensors, [four], [(4,)])
    with pytest.raises(ValueError, match="got no tensors"):
        ops.fingerprint_shards([], [], [])
    with pytest.raises(ValueError, match=r"shards\[1\] is sparse"):
        ops.fingerprint_shards([tensors[0], tensors[1].to_sparse()], [four, four], [(4,), (4,)])
    with pytest.raises(ValueError, match=r"chunk 0 is \[0, 4\) of dim 0, but the larger tensor holds \[0, 3\)"):
        ops.fingerprint_shards(tensors, [four, four], [(4,), (3,)])
    table = [1, 4, 4, 0, 4, 0] * 2
    torch.library.opcheck(torch.ops.torchtitan_ext.fingerprint_shards.default, (tensors, table))
    compiled = torch.compile(lambda x: ops.fingerprint_shards([x * 2, x], [four, four], [(4,), (4,)]), fullgraph=True)
    assert torch.equal(
        compiled(tensors[0]), ops.fingerprint_shards([tensors[0] * 2, tensors[0]], [four] * 2, [(4,)] * 2)
    )


def test_sums_of_many_shards_say_which_one_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(value_digest, "_BATCH_BYTES", 100)  # several calls
    sums = value_digest.ShardSums[int]()
    tensors = [torch.randn(7) + number for number in range(20)]
    for number, tensor in enumerate(tensors):
        sums.add_box(number, tensor if number != 4 else tensor.to_sparse(), (0,), (7,))
    numbers, errors = sums.found()
    assert errors.keys() == {4} and "fingerprint_shard: the shard is sparse" in str(errors[4])
    assert numbers == {
        number: ops.fingerprint_shard(tensor, whole((7,)), (7,)).item()
        for number, tensor in enumerate(tensors)
        if number != 4
    }
    with pytest.raises(ValueError, match="sparse"):
        sums.numbers()
    alone = value_digest.ShardSums[int]()
    assert alone.found() == ({}, {})
    alone.add_box(0, tensors[0].to_sparse(), (0,), (7,))
    assert alone.found()[0] == {} and alone.found()[1].keys() == {0}


def test_op_refusals_and_opcheck() -> None:
    tensor = torch.randn(4, 4)
    with pytest.raises(ValueError, match=r"chunk 0 is \[0, 4\) of dim 0, but the larger tensor holds \[0, 3\)"):
        ops.fingerprint_shard(tensor, whole((4, 4)), (3, 4))
    with pytest.raises(ValueError, match="chunks 0 and 1 overlap in the global tensor"):
        twice = LocalShard((4, 4), (Chunk((0, 0), (2, 4), (0, 0)), Chunk((1, 0), (2, 4), (2, 0))))
        ops.fingerprint_shard(tensor, twice, (8, 4))
    with pytest.raises(OverflowError, match="overflows int64"):
        ops.fingerprint_shard(tensor, whole((4, 4)), (2**40, 2**40))
    torch.library.opcheck(torch.ops.torchtitan_ext.fingerprint_shard.default, (tensor, [4, 4], [0, 0, 4, 4, 0, 0]))
    compiled = torch.compile(lambda x: ops.fingerprint_shard(x * 2, whole((4, 4)), (4, 4)), fullgraph=True)
    assert compiled(tensor) == ops.fingerprint_shard(tensor * 2, whole((4, 4)), (4, 4))


def truth() -> dict[str, Any]:
    torch.manual_seed(0)
    return {
        "model": {"w": torch.randn(17, 6), "b": torch.randn(5).bfloat16(), "scalar": torch.tensor(3.5)},
        "step": 7,
        "names": ["a", "b"],
    }


def on_mesh(rank: int, world_size: int) -> list[Any]:
    results = []
    layouts: list[tuple[tuple[int, ...], list[Any]]] = [
        ((world_size,), [Shard(0)]),
        ((world_size,), [Shard(1)]),
        ((world_size,), [Replicate()]),
        ((2, world_size // 2), [Shard(0), Shard(0)]),
        ((2, world_size // 2), [Replicate(), Shard(1)]),
        ((2, world_size // 2), [_StridedShard(0, split_factor=world_size // 2), Shard(0)]),
    ]
    for shape, placements in layouts:
        mesh = init_device_mesh("cpu", shape)
        state = truth()
        order = ShardOrder(((1, 0, 1), (0, 0, 1))) if isinstance(placements[0], _StridedShard) else None
        state["model"]["w"] = tte.full.distribute_tensor(state["model"]["w"], mesh, placements, layout=order)
        layout_rules = None if order is None else {"w": order}
        state["model"]["b"] = tte.full.distribute_tensor(state["model"]["b"], mesh, [Shard(0)] * len(shape))
        results.append(fingerprint(state, layouts=layout_rules))
        if placements == [Replicate(), Shard(1)]:
            state["model"]["w"].to_local()[0] += float(rank // (world_size // 2))
            results.append(fingerprint(state))
    partial = init_device_mesh("cpu", (world_size,))
    state["model"]["w"] = torch.distributed.tensor.DTensor.from_local(torch.ones(3), partial, [Partial()])
    with pytest.raises(tte.errors.LayoutError, match="Partial"):
        fingerprint(state)
    local = torch.ones(3, dtype=torch.float32 if rank == 0 else torch.float64)
    state["model"]["w"] = torch.distributed.tensor.DTensor.from_local(local, partial, [Shard(0)], run_check=False)
    with pytest.raises(tte.errors.StateRefusedError, match="rank 0 has dtype torch.float32, rank 1 has dtype"):
        fingerprint(state)
    state["model"]["w"] = torch.ones(3, device="meta" if rank == 1 else "cpu")
    with pytest.raises(tte.errors.StateRefusedError, match="model.w: is on the meta device"):
        fingerprint(state)
    twice = {"a.b": 1, "a": {"b": 2}} if rank == 1 else {"a.b": 1}
    with pytest.raises(tte.errors.StateRefusedError, match="duplicated flatten key a.b"):
        fingerprint(twice)
    return results


def test_equal_on_every_mesh_and_in_one_process(run_world: Callable[..., list[Any]]) -> None:
    expected = fingerprint(truth())
    assert not expected.differing
    assert set(expected.values) == {"model.w", "model.b", "model.scalar", "step", "names"}
    ranks = run_world(4, on_mesh)
    assert all(results == ranks[0] for results in ranks)
    drifted = ranks[0].pop(5)
    assert drifted.differing == ("model.w",)
    for result in ranks[0]:
        assert result == expected
    changed = truth()
    changed["step"] = 8
    assert fingerprint(changed).total != expected.total
    assert fingerprint({"w": torch.zeros(4)}).total != fingerprint({"w": torch.zeros(2, 2)}).total
    assert fingerprint({"w": torch.zeros(4)}).total != fingerprint({"w": torch.zeros(4, dtype=torch.int32)}).total
