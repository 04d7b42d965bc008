"""Random good and bad calls of every op: a right result or one sentence; never a crash, never a half-written tensor."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_ops import bits, box, random_tensor, reference_pack
from tier import num_cases
from torch import Tensor

from torchtitan_ext import ops
from torchtitan_ext.layout.layout import Chunk, LocalShard

NUM_CALLS = num_cases(10_000, 0.15)
DTYPES = [torch.float32, torch.bfloat16, torch.uint8, torch.int64, torch.complex128, torch.bool, torch.float8_e5m2]
HUGE = [2**31, 2**40, 2**62, 2**63 - 1, 2**63, 2**70, -(2**63), -(2**64)]
ALLOWED = (ValueError, OverflowError, RuntimeError, TypeError)

Random = random.Random


def some_shape(rng: Random) -> tuple[int, ...]:
    return tuple(rng.choice([0, 1, 1, 2, 3, 4, 5]) for _ in range(rng.choice([0, 1, 1, 2, 2, 2, 3, 4])))


def some_tensor(rng: Random, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Contiguous, transposed, or a slice of something larger."""
    form = rng.randrange(3)
    if form == 0 or not shape:
        return random_tensor(shape, dtype)
    if form == 1:
        return random_tensor(shape[::-1], dtype).permute(tuple(range(len(shape)))[::-1])
    larger = random_tensor(tuple(size + 2 for size in shape), dtype)
    return larger[tuple(slice(1, 1 + size) for size in shape)]


def some_shard(rng: Random, shape: tuple[int, ...]) -> LocalShard:
    """A few rows' intervals of a box."""
    if not shape:
        return LocalShard((), (Chunk((), (), ()),))
    begin = [rng.randint(0, size) for size in shape]
    sizes = [rng.randint(0, size - low) for low, size in zip(begin, shape, strict=True)]
    cuts = sorted({rng.randint(0, shape[0]) for _ in range(rng.choice([2, 2, 4, 6]))})
    intervals = list(zip(cuts[::2], cuts[1::2], strict=False))
    sizes[0] = sum(end - low for low, end in intervals)
    if 0 in sizes:
        return LocalShard(tuple(sizes), ())
    chunks, local = [], 0
    for low, end in intervals:
        rest = (0,) * (len(shape) - 1)
        chunks.append(Chunk((low, *begin[1:]), (end - low, *sizes[1:]), (local, *rest)))
        local += end - low
    return LocalShard(tuple(sizes), tuple(chunks))


def bad_number(rng: Random, number: int) -> int:
    return rng.choice([number + 1, number - 1, -number - 1, 0, *HUGE])


def bad_ints(rng: Random, numbers: tuple[int, ...]) -> tuple[int, ...]:
    kind = rng.randrange(4)
    if kind == 0 or not numbers:
        return (*numbers, rng.choice([0, 1, 2**40]))
    if kind == 1:
        return numbers[:-1]
    where = rng.randrange(len(numbers))
    return (*numbers[:where], bad_number(rng, numbers[where]), *numbers[where + 1 :])


def bad_shard(rng: Random, shard: LocalShard) -> LocalShard:
    if not shard.chunks or rng.randrange(4) == 0:
        return LocalShard(bad_ints(rng, shard.sizes), shard.chunks)
    chunks = list(shard.chunks)
    where = rng.randrange(len(chunks))
    if rng.randrange(5) == 0:
        chunks.insert(where, chunks[where])
    else:
        fields = list(chunks[where])
        field = rng.randrange(3)
        fields[field] = bad_ints(rng, fields[field])
        chunks[where] = Chunk(*fields)
    return LocalShard(shard.sizes, tuple(chunks))


def bad_tensor(rng: Random, tensor: Tensor) -> Any:
    kind = rng.randrange(11)
    if kind == 0:
        return tensor.to("meta")
    if kind == 1 and tensor.dim() > 0:
        return torch.zeros((1,) * tensor.dim(), dtype=tensor.dtype).expand(tensor.shape)
    if kind == 2:
        freed = tensor.clone()
        freed.untyped_storage().resize_(0)
        return freed
    if kind == 3:
        shrunk = tensor.clone()
        shrunk.untyped_storage().resize_(max(shrunk.untyped_storage().nbytes() - 1, 0))
        return shrunk
    if kind == 4:
        return tensor.float().to_sparse()
    if kind == 5:
        return torch.quantize_per_tensor(tensor.float().nan_to_num(), 1.0, 0, torch.qint8)
    if kind == 6:
        return tensor.double().requires_grad_()
    if kind == 7:
        return rng.choice([None, 3, "tensor", [1.0], object()])
    if kind == 8:
        return tensor.to(torch.float64 if tensor.dtype != torch.float64 else torch.int8)
    if kind == 9:
        return tensor.to(torch.complex64).conj()
    memory = random_tensor((4 + 3 * sum(tensor.shape),), tensor.dtype)
    return memory.as_strided(tensor.shape, [rng.randint(0, 3) for _ in tensor.shape], rng.randint(0, 3))


def call(function: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return function(), None
    except ALLOWED as error:
        message = str(error)
        assert message and "please report" not in message
        assert "\n" not in message.strip() or not isinstance(error, ValueError), message
        return None, error


def is_plain(tensor: Any) -> bool:
    """Whether the tensor has values that a test can look at."""
    if not isinstance(tensor, Tensor) or tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        return False
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    needed = (tensor.storage_offset() + span) * tensor.element_size()
    return tensor.numel() == 0 or needed <= tensor.untyped_storage().nbytes()


def fuzz_pack(rng: Random) -> str:
    shape, dtype = some_shape(rng), rng.choice(DTYPES)
    src, shard, offsets = some_tensor(rng, shape, dtype), some_shard(rng, shape), None
    good = True
    for mutate in range(3):
        if rng.randrange(5) == 0:
            good = False
            if mutate == 0:
                src = bad_tensor(rng, src)
            elif mutate == 1:
                shard = bad_shard(rng, shard)
            else:
                offsets = bad_ints(rng, (0,) * len(shape))
    many = rng.randrange(2)
    if many:
        starts = None if offsets is None else [offsets] * 2
        result, error = call(lambda: ops.pack_shards([src, src], [shard, shard], src_offsets=starts))
        result = result and result[1]
    else:
        result, error = call(lambda: ops.pack_shard(src, shard, src_offsets=offsets))
    assert error is None or not good, error
    if error is None and offsets is None and is_plain(src):
        assert torch.equal(bits(result), bits(reference_pack(src, shard)))
    return "good" if error is None else "bad"


def fuzz_unpack(rng: Random) -> str:
    shape, dtype = some_shape(rng), rng.choice(DTYPES)
    dst, shard, offsets = some_tensor(rng, shape, dtype), some_shard(rng, shape), None
    local = some_tensor(rng, shard.sizes, dtype)
    good = True
    for mutate in range(5):
        if rng.randrange(8) == 0:
            good = False
            if mutate == 0:
                dst = bad_tensor(rng, dst)
            elif mutate == 1:
                shard = bad_shard(rng, shard)
            elif mutate == 2:
                offsets = bad_ints(rng, (0,) * len(shape))
            elif mutate == 3:
                local = bad_tensor(rng, local)
            elif (
                is_plain(dst)
                and is_plain(local)
                and dst.numel() >= local.numel() > 0
                and dst.is_contiguous()
                and dst.dtype == dtype
            ):
                local = dst.view(-1)[: local.numel()].view(local.shape)
    before = dst.clone() if is_plain(dst) and not dst.requires_grad else None
    if rng.randrange(2):
        starts = None if offsets is None else [offsets]
        _, error = call(lambda: ops.unpack_shards_([dst], [local], [shard], dst_offsets=starts))
    else:
        _, error = call(lambda: ops.unpack_shard_(dst, local, shard, dst_offsets=offsets))
    assert error is None or not good, error
    if before is not None and is_plain(local) and offsets is None:
        if error is None:
            for chunk in shard.chunks:
                before[box(chunk.offsets, chunk.sizes)] = local[box(chunk.local_offsets, chunk.sizes)]
        assert torch.equal(bits(dst), bits(before))
    return "good" if error is None else "bad"


def some_list(rng: Random) -> tuple[list[Any], bool]:
    one_dtype = rng.choice(DTYPES)
    mixed = rng.randrange(2)
    tensors: list[Any] = []
    for _ in range(rng.randrange(6)):
        tensors.append(some_tensor(rng, some_shape(rng), rng.choice(DTYPES) if mixed else one_dtype))
    good = True
    if tensors and rng.randrange(4) == 0:
        good = False
        where = rng.randrange(len(tensors))
        tensors[where] = bad_tensor(rng, tensors[where])
    return tensors, good


def expected_flat(tensors: list[Tensor], alignment: int) -> Tensor:
    parts = []
    for tensor in tensors:
        parts.append(torch.zeros(-sum(part.numel() for part in parts) % alignment, dtype=torch.uint8))
        parts.append(bits(tensor))
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)


def fuzz_flatten(rng: Random) -> str:
    tensors, good = some_list(rng)
    alignment = rng.choice([1, 2, 8, 16, 64, 4096])
    if rng.randrange(8) == 0:
        good, alignment = False, rng.choice([0, -1, 3, 2**21, *HUGE])
    kind = rng.randrange(3)
    plain = all(map(is_plain, tensors))
    if kind == 0:
        result, error = call(lambda: ops.flatten_tensors(tensors, alignment=alignment))
    elif kind == 1:
        dtype = rng.choice(DTYPES)
        result, error = call(lambda: ops.flatten_tensors(tensors, alignment=alignment, dtype=dtype))
        good = False
    else:
        size = rng.choice([0, 10, 20_000, 50_000])
        out: Any = torch.zeros(size, dtype=torch.uint8)
        if rng.randrange(4) == 0:
            out = bad_tensor(rng, out)
        good = False
        result, error = call(lambda: ops.flatten_into_(tensors, out, alignment=alignment))
        result = out
        plain = plain and is_plain(out) and out.is_contiguous()
    assert error is None or not good, error
    if error is None and plain and tensors:
        flat = expected_flat(tensors, alignment)
        assert torch.equal(bits(result)[: flat.numel()], flat)
    return "good" if error is None else "bad"


def fuzz_unflatten(rng: Random) -> str:
    tensors, good = some_list(rng)
    alignment = rng.choice([1, 2, 8, 16, 64])
    if tensors and rng.randrange(8) == 0:
        good = False
        tensors.append(tensors[rng.randrange(len(tensors))])
    values = [random_tensor(tuple(tensor.shape), tensor.dtype) for tensor in tensors if is_plain(tensor)]
    flat: Any = expected_flat(values, alignment)
    expected_bytes = flat
    if rng.randrange(5) == 0:
        good, flat = False, rng.choice([bad_tensor(rng, flat), flat[: flat.numel() // 2], flat.view(1, -1)])
    before = [tensor.clone() for tensor in tensors if is_plain(tensor)]
    _, error = call(lambda: ops.unflatten_tensors_(tensors, flat, alignment=alignment))
    assert error is None or not good, error
    if len(values) == len(tensors):
        expected = before if error is not None else values
        if error is None or not any(tensor.requires_grad for tensor in tensors):
            for tensor, value in zip(tensors, expected, strict=True):
                assert flat is not expected_bytes or torch.equal(bits(tensor), bits(value))
    return "good" if error is None else "bad"


def fuzz_fingerprint(rng: Random) -> str:
    shape, dtype = some_shape(rng), rng.choice(DTYPES)
    shard = some_shard(rng, shape)
    local: Any = some_tensor(rng, shard.sizes, dtype)
    sizes, good = shape, True
    for mutate in range(3):
        if rng.randrange(5) == 0:
            good = False
            if mutate == 0:
                local = bad_tensor(rng, local)
            elif mutate == 1:
                shard = bad_shard(rng, shard)
            else:
                sizes = bad_ints(rng, shape)
    result, error = call(lambda: ops.fingerprint_shard(local, shard, sizes))
    assert error is None or not good, error
    if error is None and is_plain(local):
        again = ops.fingerprint_shard(local.clone(memory_format=torch.contiguous_format), shard, sizes)
        assert torch.equal(result, again)
    return "good" if error is None else "bad"


FUZZED = [
    fuzz_pack,
    fuzz_unpack,
    fuzz_flatten,
    fuzz_unflatten,
    fuzz_fingerprint,
]
IN_LISTS = {fuzz_pack, fuzz_unpack, fuzz_flatten}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("fuzz", FUZZED, ids=lambda fuzz: fuzz.__name__[5:])
def test_random_calls(fuzz: Callable[[Random], str]) -> None:
    """Half of the calls go to the list form where there is one, so each op sees at least 10,000."""
    calls = NUM_CALLS * (2 if fuzz in IN_LISTS else 1)
    outcomes: Counter[str] = Counter()
    for seed in range(calls):
        try:
            outcomes[fuzz(Random(seed))] += 1
        except BaseException as error:
            error.add_note(f"seed {seed}") if hasattr(error, "add_note") else print("seed", seed)
            raise
    assert outcomes["good"] > calls // 5 and outcomes["bad"] > calls // 20, outcomes
