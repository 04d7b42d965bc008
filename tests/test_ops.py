"""The operators: against indexing, under autograd, opcheck and torch.compile, and every refusal."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from raw_ops import RAW_REFUSAL
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import forward_ad
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from torchtitan_ext import ops
from torchtitan_ext.layout.layout import Chunk, LocalShard
from torchtitan_ext.op_library import load_full_abi

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.needs_cuda)]
DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float64,
    torch.bool,
    torch.uint8,
    torch.uint16,
    torch.int64,
    torch.complex64,
    torch.complex128,
]

# Rows [1, 3) and row 5 of columns [2, 4): two chunks of a 6 x 8 tensor.
TWO_CHUNKS = LocalShard((3, 2), (Chunk((1, 2), (2, 2), (0, 0)), Chunk((5, 2), (1, 2), (2, 0))))
WHOLE = LocalShard((6, 8), (Chunk((0, 0), (6, 8), (0, 0)),))


def box(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))


def bits(tensor: Tensor) -> Tensor:
    """The bytes of a tensor: NaNs compare equal to themselves, and every dtype can be compared."""
    values = torch.empty(tensor.numel(), dtype=tensor.dtype, device=tensor.device)
    return values.view(tensor.shape).copy_(tensor.detach()).reshape(-1).view(torch.uint8)


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, device: str = "cpu") -> Tensor:
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, device=device).bool()
    count = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(0, 256, (count,), dtype=torch.uint8, device=device).view(dtype).reshape(shape)


def reference_pack(src: Tensor, shard: LocalShard) -> Tensor:
    local = torch.zeros(shard.sizes, dtype=src.dtype, device=src.device)
    for chunk in shard.chunks:
        local[box(chunk.local_offsets, chunk.sizes)] = src[box(chunk.offsets, chunk.sizes)]
    return local


@st.composite
def shards(draw: st.DrawFn) -> tuple[tuple[int, ...], LocalShard]:
    """A global shape and a shard of it: some intervals of one dim, the whole of the others or a part of it."""
    num_dims = draw(st.integers(0, 4))
    shape = tuple(draw(st.integers(1, 7)) for _ in range(num_dims))
    if num_dims == 0:
        return shape, LocalShard((), (Chunk((), (), ()),))
    dim = draw(st.integers(0, num_dims - 1))
    cuts = sorted(draw(st.sets(st.integers(0, shape[dim]), max_size=6)))
    intervals = [(begin, end) for begin, end in zip(cuts[::2], cuts[1::2], strict=False)]
    other = [(lambda low: (low, draw(st.integers(low + 1, size))))(draw(st.integers(0, size - 1))) for size in shape]
    sizes = [end - begin for begin, end in other]
    sizes[dim] = sum(end - begin for begin, end in intervals)
    chunks, local = [], 0
    for begin, end in intervals:
        offsets = [low for low, _ in other]
        offsets[dim] = begin
        chunk_sizes = list(sizes)
        chunk_sizes[dim] = end - begin
        local_offsets = [0] * num_dims
        local_offsets[dim] = local
        chunks.append(Chunk(tuple(offsets), tuple(chunk_sizes), tuple(local_offsets)))
        local += end - begin
    return shape, LocalShard(tuple(sizes), tuple(chunks))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_pack_and_unpack_every_dtype(dtype: torch.dtype, device: str) -> None:
    src = random_tensor((6, 8), dtype, device)
    local = ops.pack_shard(src, TWO_CHUNKS)
    assert local.is_contiguous() and local.dtype == dtype and local.device == src.device
    assert torch.equal(bits(local), bits(reference_pack(src, TWO_CHUNKS)))
    dst = torch.zeros_like(src)
    ops.unpack_shard_(dst, local, TWO_CHUNKS)
    assert torch.equal(bits(ops.pack_shard(dst, TWO_CHUNKS)), bits(local))
    dst[box((1, 2), (2, 2))] = 0
    dst[box((5, 2), (1, 2))] = 0
    assert not bits(dst).any()  # nothing outside the chunks was written


@given(shards(), st.sampled_from([torch.int16, torch.float32, torch.complex128, torch.uint8]), st.randoms())
def test_pack_and_unpack_match_indexing(
    case: tuple[tuple[int, ...], LocalShard], dtype: torch.dtype, random: object
) -> None:
    shape, shard = case
    order = list(range(len(shape)))
    random.shuffle(order)  # type: ignore[attr-defined]
    inverse = [order.index(dim) for dim in range(len(shape))]
    src = random_tensor(tuple(shape[dim] for dim in order), dtype).permute(inverse)
    assert src.shape == shape
    local = ops.pack_shard(src, shard)
    assert torch.equal(bits(local), bits(reference_pack(src, shard)))

    dst = random_tensor(tuple(shape[dim] for dim in order), dtype).permute(inverse)
    expected = dst.clone()
    for chunk in shard.chunks:
        expected[box(chunk.offsets, chunk.sizes)] = local[box(chunk.local_offsets, chunk.sizes)]
    assert torch.equal(bits(ops.unpack_shard(dst, local, shard)), bits(expected))
    ops.unpack_shard_(dst, local.transpose(0, -1).contiguous().transpose(0, -1) if shape else local, shard)
    assert torch.equal(bits(dst), bits(expected))


def test_pack_from_a_box_of_the_global_tensor() -> None:
    whole = torch.arange(48.0).reshape(6, 8)
    part = whole[1:6, 2:5]
    assert torch.equal(ops.pack_shard(part, TWO_CHUNKS, src_offsets=(1, 2)), ops.pack_shard(whole, TWO_CHUNKS))
    dst = torch.zeros(5, 3)
    ops.unpack_shard_(dst, ops.pack_shard(whole, TWO_CHUNKS), TWO_CHUNKS, dst_offsets=(1, 2))
    assert torch.equal(dst[0:2, 0:2], whole[1:3, 2:4]) and torch.equal(dst[4, 0:2], whole[5, 2:4])


def test_expanded_source_conjugate_and_empty() -> None:
    assert torch.equal(ops.pack_shard(torch.arange(8.0).expand(6, 8), TWO_CHUNKS), torch.tensor([[2.0, 3.0]] * 3))
    source = torch.randn(6, 8, dtype=torch.complex64)
    assert torch.equal(ops.pack_shard(source.conj(), TWO_CHUNKS), reference_pack(source.conj(), TWO_CHUNKS))
    assert torch.equal(ops.pack_shard(source.conj().imag, TWO_CHUNKS), reference_pack(source.conj().imag, TWO_CHUNKS))
    dst = torch.zeros(6, 8, dtype=torch.complex64)
    ops.unpack_shard_(dst, ops.pack_shard(source, TWO_CHUNKS).conj(), TWO_CHUNKS)
    assert torch.equal(ops.pack_shard(dst, TWO_CHUNKS), reference_pack(source.conj(), TWO_CHUNKS))
    with pytest.raises(ValueError, match="lazily conjugated or negated view"):
        ops.unpack_shard_(dst.conj(), ops.pack_shard(source, TWO_CHUNKS), TWO_CHUNKS)
    empty = LocalShard((0, 8), ())
    assert ops.pack_shard(torch.randn(6, 8), empty).shape == (0, 8)
    ops.unpack_shard_(dst, torch.empty(0, 8, dtype=torch.complex64), empty)
    assert ops.pack_shard(torch.tensor(3.0), LocalShard((), (Chunk((), (), ()),))) == 3.0


# Beyond kGrainBytes several threads share the work, beyond kStreamingBytes stores go past the cache.
@pytest.mark.sampled(0.5)
@pytest.mark.parametrize("columns", [slice(0, 4096), slice(64, 128), slice(3, 4), slice(1, 4000)], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_large_copies(columns: slice, transposed: bool) -> None:
    src = torch.randint(0, 2**31, (3001, 4096), dtype=torch.int32)
    if transposed:
        src = src.t().contiguous().t()
    width = columns.stop - columns.start
    shard = LocalShard(
        (3000, width),
        (
            Chunk((0, columns.start), (1500, width), (0, 0)),
            Chunk((1501, columns.start), (1500, width), (1500, 0)),
        ),
    )
    local = ops.pack_shard(src, shard)
    assert torch.equal(local, torch.cat([src[:1500, columns], src[1501:, columns]]))
    dst = torch.zeros_like(src)
    ops.unpack_shard_(dst, local, shard)
    expected = torch.zeros_like(src)
    expected[:1500, columns] = src[:1500, columns]
    expected[1501:, columns] = src[1501:, columns]
    assert torch.equal(dst, expected)


# Runs that end within a cache line, and at each number of lines that one step copies; from 1 MiB and from 8 MiB on
# other stores are used. A storage offset shifts the destination within its cache line.
@pytest.mark.parametrize("num_bytes", [3 << 19, 9 << 20], ids=["1.5 MiB", "9 MiB"])
@pytest.mark.parametrize("run_bytes", [63, 65, 127, 128, 130, 192, 256, 321, 448, 511, 960, 1025, 4096, 8200])
def test_runs_of_every_length(run_bytes: int, num_bytes: int) -> None:
    rows = num_bytes // run_bytes
    src = torch.randint(0, 256, (rows, run_bytes + 37), dtype=torch.uint8)
    shard = LocalShard((rows, run_bytes), (Chunk((0, 5), (rows, run_bytes), (0, 0)),))
    whole = LocalShard((rows, run_bytes), (Chunk((0, 0), (rows, run_bytes), (0, 0)),))
    expected = src[:, 5 : 5 + run_bytes]
    assert torch.equal(ops.pack_shard(src, shard), expected)
    shifted = torch.zeros(rows * run_bytes + 100, dtype=torch.uint8)
    ops.unpack_shard_(shifted[13:-87].view(rows, run_bytes), expected, whole)
    assert torch.equal(shifted[13:-87].view(rows, run_bytes), expected)
    assert not shifted[:13].any() and not shifted[-87:].any()


# ---- many shards, flat buffers ----


MANY = [TWO_CHUNKS, WHOLE, LocalShard((), (Chunk((), (), ()),)), LocalShard((0, 8), ())]


def many_tensors(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(6, 8).to(dtype), torch.randn(8, 6).to(dtype).t(), torch.randn(()).to(dtype), torch.ones(6, 8)]


def test_many_shards_in_one_call() -> None:
    src = many_tensors(torch.bfloat16)
    shards = ops.pack_shards(src, MANY)
    for tensor, shard, local in zip(src, MANY, shards, strict=True):
        assert torch.equal(local, ops.pack_shard(tensor, shard)) and local.dtype == tensor.dtype
    dst = [torch.zeros_like(tensor) for tensor in src]
    versions = [tensor._version for tensor in dst]
    ops.unpack_shards_(dst, shards, MANY)
    for tensor, shard, local, version in zip(dst, MANY, shards, versions, strict=True):
        assert torch.equal(ops.pack_shard(tensor, shard), local)
        assert tensor._version == version + 1
    boxed = ops.pack_shards([src[0][1:, 2:]], [TWO_CHUNKS], src_offsets=[(1, 2)])
    assert torch.equal(boxed[0], shards[0])
    assert ops.pack_shards([], []) == []
    ops.unpack_shards_([], [], [])


@pytest.mark.parametrize("alignment", [1, 16, 64, 4096])
def test_flatten_mixed_tensors(alignment: int) -> None:
    tensors = [
        torch.randn(3, 5),
        torch.randn(7, 4).t(),
        torch.randn(2, 3, dtype=torch.complex128),
        torch.tensor(True),
        torch.empty(0, 4),
        torch.arange(5, dtype=torch.int8).expand(3, 5),
        torch.randn(11).to(torch.float8_e4m3fn),
        torch.randn(4, 6)[1:3, 2:5],
    ]
    offsets = ops.flat_offsets(tensors, alignment=alignment)
    flat = ops.flatten_tensors(tensors, alignment=alignment)
    assert flat.dtype == torch.uint8 and flat.shape == (offsets[-1],)
    expected = torch.zeros(offsets[-1], dtype=torch.uint8)
    for tensor, offset in zip(tensors, offsets, strict=False):
        assert offset % alignment == 0
        expected[offset : offset + tensor.nbytes] = bits(tensor)
    assert torch.equal(flat, expected)

    out = torch.full((offsets[-1] + 3,), 9, dtype=torch.uint8)
    ops.flatten_into_(tensors, out, alignment=alignment)
    assert torch.equal(out[:-3], expected) and out[-3:].eq(9).all()

    restored = [torch.zeros_like(tensor, memory_format=torch.contiguous_format) for tensor in tensors]
    restored[0] = torch.zeros(5, 3).t()
    ops.unflatten_tensors_(restored, flat, alignment=alignment)
    for tensor, copy in zip(tensors, restored, strict=True):
        assert torch.equal(bits(tensor), bits(copy))
    if alignment >= 16:
        for tensor, view in zip(tensors, ops.flat_views(flat, tensors, alignment=alignment), strict=True):
            assert view.shape == tensor.shape and torch.equal(bits(tensor), bits(view))
            assert view.numel() == 0 or view.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()


def test_tensors_of_a_buffer_have_storages_of_their_own() -> None:
    odd = torch.arange(3, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    like = [torch.randn(3, 5).t(), torch.tensor(True), torch.empty(0, 2), torch.ones(7).to(torch.float8_e5m2), odd]
    buffer = ops.flatten_tensors(like)
    made = torch.ops.torchtitan_ext.buffer_tensors(buffer, like, ops.DEFAULT_ALIGNMENT)
    for tensor, copy, offset in zip(like, made, ops.flat_offsets(like), strict=False):
        assert copy.shape == tensor.shape and torch.equal(bits(tensor), bits(copy))
        assert copy.is_contiguous() and copy.untyped_storage().nbytes() == tensor.nbytes
        assert copy.numel() == 0 or copy.data_ptr() == buffer.data_ptr() + offset
    died = weakref.ref(buffer)
    part = made[0][1:]
    del buffer, made, copy
    assert died() is not None  # the last view keeps it
    del part
    assert died() is None
    buffer = torch.empty(64, dtype=torch.uint8)
    with pytest.raises(RAW_REFUSAL, match="the buffer has 64 bytes, the tensors need 68"):
        torch.ops.torchtitan_ext.buffer_tensors(buffer, [torch.ones(1), torch.ones(1)], 64)
    with pytest.raises(RAW_REFUSAL, match="not a contiguous tensor of 1 dim in CPU memory"):
        torch.ops.torchtitan_ext.buffer_tensors(buffer.view(8, 8), like, 64)


def test_a_table_of_memory_shows_what_has_changed() -> None:
    def table(*tensors: torch.Tensor) -> torch.Tensor:
        return torch.ops.torchtitan_ext.memory_table(list(tensors))

    tensor, other = torch.randn(4, 6), torch.randn(4, 6)
    held = table(tensor, torch.tensor(1.0), torch.empty(0, 3), torch.ones(2, 3, device="meta"))
    assert held.shape == (4, 2) and held.dtype == torch.int64
    assert held[:, 0].tolist()[::2] == [tensor.data_ptr(), 0] and held[3, 0] == 0
    assert torch.equal(table(tensor), table(tensor.detach())) and torch.equal(table(tensor)[0], held[0])
    as_before = table(tensor)
    tensor.mul_(2)
    assert torch.equal(table(tensor), as_before), "values do not count"
    elsewhere = table(other)
    assert elsewhere[0, 0] != as_before[0, 0] and elsewhere[0, 1] == as_before[0, 1]
    forms = [tensor, tensor[:3], tensor[:, :5], tensor.view(6, 4), tensor.view(24), tensor.view(torch.int32)]
    forms += [tensor.as_strided((4, 6), (1, 4)), tensor.double(), tensor.to("meta"), tensor[None]]
    assert len({int(form) for form in table(*forms)[:, 1]}) == len(forms)
    tensor.data = other
    assert torch.equal(table(tensor), elsewhere)
    tensor.untyped_storage().resize_(0)
    assert table(tensor)[0, 0] == 0


def test_flatten_of_one_dtype_is_the_concatenation() -> None:
    tensors = [torch.randn(3, 5), torch.randn(4).expand(2, 4), torch.tensor(2.0)]
    flat = ops.flatten_tensors(tensors, alignment=4, dtype=torch.float32)
    assert torch.equal(flat, torch.cat([tensor.reshape(-1) for tensor in tensors]))
    assert ops.flatten_tensors([], dtype=torch.int8).shape == (0,)
    ops.unflatten_tensors_([], flat)
    ops.flatten_into_([], flat)
    assert not ops.flatten_tensors([torch.nn.Parameter(torch.ones(3))]).requires_grad  # bytes have no gradient


def test_flatten_many_large_tensors() -> None:
    tensors = [torch.randint(0, 255, (70_001,), dtype=torch.uint8) for _ in range(200)]
    flat = ops.flatten_tensors(tensors, alignment=1)
    assert torch.equal(flat, torch.cat(tensors))
    restored = [torch.zeros_like(tensor) for tensor in tensors]
    ops.unflatten_tensors_(restored, flat, alignment=1)
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(tensors, restored, strict=True))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_lists_and_fingerprints_are_the_same_bits_on_every_device(dtype: torch.dtype, device: str) -> None:
    """Spans and nests of every word size, aligned and not, in one launch and in several."""
    whole = [random_tensor((size,), dtype) for size in (1, 3, 1000, 70_001)]
    whole += [random_tensor((257, 33), dtype).t(), random_tensor((300, 70), dtype)]
    whole += [random_tensor((7,), dtype) for _ in range(1300)]
    # Sliced on the device: a copy to another one would be contiguous.
    tensors, there = ([*on[:5], on[5][:, 5:22], *on[6:]] for on in (whole, [tensor.to(device) for tensor in whole]))
    for alignment in (1, 64):
        flat = ops.flatten_tensors(tensors, alignment=alignment)
        flat_there = ops.flatten_tensors(there, alignment=alignment)
        assert torch.equal(flat_there.cpu(), flat)
        restored = [torch.zeros_like(tensor) for tensor in there]
        restored[5] = torch.zeros((300, 70), dtype=dtype, device=device)[:, 5:22]
        ops.unflatten_tensors_(restored, flat_there, alignment=alignment)
        assert all(torch.equal(bits(copy.cpu()), bits(tensor)) for copy, tensor in zip(restored, tensors, strict=True))
    src = random_tensor((6, 8), dtype)
    locals_there = ops.pack_shards([src.to(device)] * 400, [TWO_CHUNKS] * 400)
    assert all(torch.equal(bits(local.cpu()), bits(reference_pack(src, TWO_CHUNKS))) for local in locals_there)
    sums = [
        ops.fingerprint_shard(tensor, TWO_CHUNKS, (6, 8)).cpu() for tensor in (locals_there[0], locals_there[0].cpu())
    ]
    assert torch.equal(*sums)


@pytest.mark.needs_cuda
def test_kernels_wait_for_what_came_before_on_their_stream() -> None:
    tensors = [torch.zeros(1000, 30, device="cuda").t() for _ in range(40)]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        for tensor in tensors:
            tensor.fill_(3.0)
        flat = ops.flatten_tensors(tensors, dtype=torch.float32, alignment=4)
        ops.unflatten_tensors_(tensors, flat * 2, alignment=4)
        total = ops.flatten_tensors(tensors, dtype=torch.float32, alignment=4).sum()
    torch.cuda.current_stream().wait_stream(stream)
    assert float(total) == 6.0 * 40 * 30_000


# ---- autograd, versions, compile ----


def current_context() -> int:
    context = ctypes.c_void_p()
    assert ctypes.CDLL("libcuda.so.1").cuCtxGetCurrent(ctypes.byref(context)) == 0
    return context.value or 0


@pytest.mark.needs_cuda
def test_kernels_leave_the_current_context() -> None:
    """A green context, for example, which `cudaSetDevice` would replace."""
    last = torch.cuda.device_count() - 1
    source = torch.arange(64.0, device=f"cuda:{last}").view(8, 8)
    torch.cuda.set_device(0)
    torch.zeros(1, device="cuda:0")
    before = current_context()
    packed = ops.pack_shard(source, TWO_CHUNKS)
    hashed = ops.fingerprint_shard(packed, TWO_CHUNKS, (8, 8))
    assert current_context() == before
    assert torch.equal(packed.cpu(), ops.pack_shard(source.cpu(), TWO_CHUNKS))
    assert int(hashed) == int(ops.fingerprint_shard(packed.cpu(), TWO_CHUNKS, (8, 8)))


def test_gradients() -> None:
    src = torch.randn(6, 8, dtype=torch.float64, requires_grad=True)
    local = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda s: ops.pack_shard(s, TWO_CHUNKS), src)
    assert torch.autograd.gradgradcheck(lambda s: ops.pack_shard(s, TWO_CHUNKS), src)
    assert torch.autograd.gradcheck(lambda d, s: ops.unpack_shard(d, s, TWO_CHUNKS), (src, local))
    assert torch.autograd.gradgradcheck(lambda d, s: ops.unpack_shard(d, s, TWO_CHUNKS), (src, local))


def test_gradients_of_lists() -> None:
    first = torch.randn(6, 8, dtype=torch.float64, requires_grad=True)
    second = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    shards = [TWO_CHUNKS, LocalShard((5, 1), (Chunk((0, 2), (5, 1), (0, 0)),))]

    def flatten(*tensors: Tensor) -> Tensor:
        return ops.flatten_tensors(list(tensors), alignment=64, dtype=torch.float64)

    def pack(*tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(ops.pack_shards(list(tensors), shards))

    for function in (flatten, pack):
        assert torch.autograd.gradcheck(function, (first, second))
        assert torch.autograd.gradgradcheck(function, (first, second))


def flatten_pair(first: Tensor, second: Tensor) -> Tensor:
    return ops.flatten_tensors([first, second], alignment=64, dtype=first.dtype)


def pack_pair(first: Tensor, second: Tensor) -> Tensor:
    packed = ops.pack_shards([first, second], [TWO_CHUNKS, TWO_CHUNKS])
    return packed[0] + 2 * packed[1]


def pack_and_unpack(first: Tensor, second: Tensor) -> Tensor:
    return ops.unpack_shard(first, ops.pack_shard(second, TWO_CHUNKS), TWO_CHUNKS)


def dual(function: Callable[[Tensor], Tensor], tensor: Tensor) -> None:
    with forward_ad.dual_level():
        function(forward_ad.make_dual(tensor, tensor))


TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], object]] = {
    "dual": dual,
    "jvp": lambda function, tensor: torch.func.jvp(function, (tensor,), (tensor,)),
    "jacfwd": lambda function, tensor: torch.func.jacfwd(function)(tensor),
    "grad": lambda function, tensor: torch.func.grad(lambda given: function(given).sum())(tensor),
    "jacrev": lambda function, tensor: torch.func.jacrev(function)(tensor),
    "vmap": lambda function, tensor: torch.func.vmap(function)(torch.stack([tensor, tensor])),
    "compiled": lambda function, tensor: torch.compile(
        lambda given: torch.func.jvp(function, (given,), (given,)), backend="eager"
    )(tensor),
}


@pytest.mark.parametrize("function", [flatten_pair, pack_pair, pack_and_unpack])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_are_refused_so_that_no_tangent_is_lost(
    name: str, function: Callable[[Tensor, Tensor], Tensor]
) -> None:
    sentence = "knows neither forward-mode AD nor the transforms of torch.func .*; call it outside of them, and take"
    with pytest.raises(RuntimeError, match=sentence):
        TRANSFORMS[name](lambda tensor: function(tensor, tensor), torch.randn(6, 8, dtype=torch.float64))


def test_in_place_refuses_forward_gradients() -> None:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(torch.zeros(4), torch.ones(4))
        with pytest.raises(RuntimeError, match="is not differentiable: an argument has a forward gradient"):
            ops.unflatten_tensors_([dual], torch.zeros(4))
        with pytest.raises(RuntimeError, match="is not differentiable: an argument has a forward gradient"):
            ops.flatten_into_([dual], torch.zeros(4))


def test_in_place_list_ops_bump_versions() -> None:
    raw = torch.ops.torchtitan_ext
    tensors, out = [torch.ones(3), torch.ones(2)], torch.zeros(20)
    ops.flatten_into_(tensors, out, alignment=4)
    raw.flatten_into_(tensors, 4, out)
    assert out._version == 2 and tensors[0]._version == 0
    ops.unflatten_tensors_(tensors, out, alignment=4)
    raw.unflatten_tensors_(tensors, out, 4)
    assert [tensor._version for tensor in tensors] == [2, 2]
    with pytest.raises(RuntimeError, match="unflatten_tensors_ is not differentiable"):
        ops.unflatten_tensors_([torch.nn.Parameter(torch.ones(3))], out)
    with pytest.raises(RuntimeError, match="unflatten_tensors_ is not differentiable"):
        raw.unflatten_tensors_([torch.nn.Parameter(torch.ones(3))], out, 4)


def test_in_place_bumps_the_version() -> None:
    dst = torch.randn(6, 8)
    weight = torch.randn(6, 8, requires_grad=True)
    loss = (weight * dst).sum()  # saves dst for backward
    version = dst._version
    ops.unpack_shard_(dst, torch.zeros(3, 2), TWO_CHUNKS)
    assert dst._version == version + 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


NO_SUCH_LIBRARY = """
import torch

torch.__version__, said = "9.9.0", "this installation has no _full_abi_9_9.so"
"""
PRE_RELEASE = """
import torch

torch.__version__ = ".".join(torch.__version__.split("+")[0].split(".")[:2]) + ".0.dev20261101+cpu"
said = "_0_dev20261101_cpu.so, which is built for one minor version or pre-release of torch"
"""
BROKEN_LIBRARY = """
import torch

load, said = torch.ops.load_library, "does not load beside torch"

def broken(path):
    if "_full_abi" in str(path):
        raise OSError("undefined symbol: _ZN3c10")
    load(path)

torch.ops.load_library = broken
"""


@pytest.mark.sampled(0.33)
@pytest.mark.parametrize(
    "missing", [NO_SUCH_LIBRARY, PRE_RELEASE, BROKEN_LIBRARY], ids=["no file", "a pre-release", "does not load"]
)
def test_in_place_without_the_library_of_this_torch(missing: str) -> None:
    program = """
from torch.autograd import forward_ad

from torchtitan_ext import op_library, ops

flat, tensors = torch.arange(4.0), [torch.zeros(4)]
ops.unflatten_tensors_(tensors, flat)
assert torch.equal(tensors[0], flat) and tensors[0]._version == 1, tensors
try:
    ops.unflatten_tensors_([torch.nn.Parameter(torch.zeros(4))], flat)
except RuntimeError as error:
    assert "unflatten_tensors_ is not differentiable" in str(error), error
else:
    raise AssertionError("written although it requires grad")
with forward_ad.dual_level():
    dual = forward_ad.make_dual(torch.zeros(4), torch.ones(4))
    for written, read in (([dual], flat), ([torch.zeros(4)], forward_ad.make_dual(flat, flat))):
        try:
            op_library.kernels.unflatten_tensors_(written, read, 64)
        except RuntimeError as error:
            assert "has a forward gradient" in str(error), error
        else:
            raise AssertionError("the tangent is lost")
for view in (torch.zeros(4, dtype=torch.complex64).conj(), torch._neg_view(torch.zeros(4))):
    try:
        op_library.kernels.unflatten_tensors_([view], torch.zeros(32, dtype=torch.uint8), 64)
    except ValueError as error:
        assert "conjugated or negated view" in str(error), error
    else:
        raise AssertionError("written through a lazy view")
with torch.inference_mode():
    inference = torch.zeros(4)
try:
    ops.unflatten_tensors_([inference], flat)
except RuntimeError as error:
    assert "was made in inference mode" in str(error), error
else:
    raise AssertionError("written outside of inference mode")
try:
    ops.broadcast_coalesced_(tensors, "default_pg")
except ImportError as error:
    assert "no collectives: " in str(error) and said in str(error), error
else:
    raise AssertionError("broadcast without c10d")
no_boxes = torch.zeros(0, 4, dtype=torch.int64)
try:
    ops.exchange_runs_([], [], no_boxes, no_boxes, group_name="default_pg")
except ImportError as error:
    assert "no collectives: " in str(error) and said in str(error), error
else:
    raise AssertionError("exchange without c10d")
"""
    done = subprocess.run([sys.executable, "-c", missing + program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_library_that_does_not_load_says_why(tmp_path: Path) -> None:
    broken = tmp_path / "_full_abi_2_13.so"
    broken.write_bytes(b"no library")
    assert "_full_abi_2_13.so does not load" in load_full_abi(broken)
    assert "file too short" in load_full_abi(broken) or "invalid ELF header" in load_full_abi(broken)


def test_in_place_refuses_what_requires_grad() -> None:
    local = torch.zeros(3, 2)
    parameter = torch.nn.Parameter(torch.ones(6, 8))
    with pytest.raises(RuntimeError, match="unpack_shard_ is not differentiable"):
        ops.unpack_shard_(parameter, local, TWO_CHUNKS)
    with pytest.raises(RuntimeError, match="unpack_shard_ is not differentiable"):
        ops.unpack_shard_(torch.ones(6, 8), local.clone().requires_grad_(), TWO_CHUNKS)
    with torch.no_grad():
        ops.unpack_shard_(parameter, local, TWO_CHUNKS)
    assert parameter.sum() == 42
    with torch.inference_mode():
        ops.unpack_shard_(torch.ones(6, 8), local, TWO_CHUNKS)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_opcheck(requires_grad: bool) -> None:
    raw = torch.ops.torchtitan_ext
    table = [1, 2, 2, 2, 0, 0, 5, 2, 1, 2, 2, 0]
    src = torch.randn(6, 8, requires_grad=requires_grad)
    local = torch.randn(3, 2, requires_grad=requires_grad)
    torch.library.opcheck(raw.pack_shard.default, (src, [0, 0], [3, 2], table))
    torch.library.opcheck(raw.unpack_shard.default, (src, [0, 0], local, table))
    torch.library.opcheck(raw.unpack_shard_.default, (src.detach(), [0, 0], local.detach(), table))
    torch.library.opcheck(raw.pack_shards.default, ([src, src[:4]], [2, 0, 0, 3, 2, *table, 1, 0, 0, 2, 2, *table[:6]]))
    tensors = [src, local]
    torch.library.opcheck(raw.flatten_tensors.default, (tensors, 4, torch.float32))
    torch.library.opcheck(raw.flatten_tensors.default, (tensors, 64, torch.uint8))
    plain = [tensor.detach() for tensor in tensors]
    torch.library.opcheck(raw.flatten_into_.default, (plain, 4, torch.zeros(60)))
    torch.library.opcheck(raw.unflatten_tensors_.default, (plain, torch.zeros(60), 4))
    torch.library.opcheck(raw.unpack_shards_.default, ([src.detach()], [local.detach()], [2, 0, 0, 3, 2, *table]))


@pytest.mark.sampled(0.34, "compiled")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile(backend: str) -> None:
    def step(src: Tensor, weight: Tensor, buffer: Tensor) -> Tensor:
        local = ops.pack_shard(src * 2, TWO_CHUNKS)
        buffer = buffer + 1
        ops.unpack_shard_(buffer, torch.full((3, 2), 7.0), TWO_CHUNKS)
        return (local * weight).sum() + ops.unpack_shard(src, weight, TWO_CHUNKS).square().sum() + buffer.sum()

    results = []
    for function in (step, torch.compile(step, fullgraph=True, backend=backend)):
        torch.manual_seed(0)
        src = torch.randn(6, 8, requires_grad=True)
        weight = torch.randn(3, 2, requires_grad=True)
        value = function(src, weight, torch.zeros(6, 8))
        value.backward()
        results.append((value.detach(), src.grad, weight.grad))
    torch.testing.assert_close(results[0], results[1])


@pytest.mark.sampled(0.34, "compiled")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile_flat_buffers_with_dynamic_shapes(backend: str) -> None:
    def step(first: Tensor, second: Tensor) -> Tensor:
        flat = ops.flatten_tensors([first * 2, second.t()], alignment=16, dtype=torch.float32)
        out = torch.zeros(flat.numel() + 4)
        ops.flatten_into_([flat.detach(), second.detach()[:1, :1]], out, alignment=4)
        restored = [torch.zeros_like(first), torch.zeros_like(second.t())]
        ops.unflatten_tensors_(restored, flat.detach(), alignment=16)
        return flat.square().sum() + out.sum() + restored[0].sum() + restored[1].square().sum()

    compiled = torch.compile(step, fullgraph=True, backend=backend, dynamic=True)
    for rows in (3, 5, 8):
        results = []
        for function in (step, compiled):
            torch.manual_seed(0)
            first = torch.randn(rows, 5, requires_grad=True)
            second = torch.randn(4, rows + 1, requires_grad=True)
            value = function(first, second)
            value.backward()
            results.append((value.detach(), first.grad, second.grad))
        torch.testing.assert_close(results[0], results[1])


@pytest.mark.sampled(0.34, "compiled")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile_shards_with_dynamic_shapes(backend: str) -> None:
    def step(src: Tensor, dst: Tensor) -> Tensor:
        first, second = ops.pack_shards([src * 2, src + 1], [TWO_CHUNKS, TWO_CHUNKS])
        filled = dst.clone()
        ops.unpack_shards_([filled], [first.detach()], [TWO_CHUNKS])
        return first.square().sum() + (ops.pack_shard(src, TWO_CHUNKS) * second).sum() + filled.sum()

    compiled = torch.compile(step, fullgraph=True, backend=backend, dynamic=True)
    for rows in (6, 7, 12):
        results = []
        for function in (step, compiled):
            torch.manual_seed(0)
            src = torch.randn(rows, rows + 2, requires_grad=True)
            value = function(src, torch.randn(rows, 8))
            value.backward()
            results.append((value.detach(), src.grad))
        torch.testing.assert_close(results[0], results[1])


def test_what_no_cuda_graph_can_hold_says_so() -> None:
    raw = torch.ops.torchtitan_ext
    for name in ("broadcast_coalesced_", "exchange_runs_"):
        assert torch.Tag.cudagraph_unsafe in getattr(raw, name).default.tags
    for name in ("pack_shard", "unflatten_tensors_", "fingerprint_shard"):
        assert torch.Tag.cudagraph_unsafe not in getattr(raw, name).default.tags


def test_compiled_shards_of_symbolic_sizes_are_one_graph() -> None:
    """More lengths than dynamo compiles anew (8): offsets and sizes of shards are symbols like those of tensors."""

    def step(src: Tensor) -> tuple[Tensor, ...]:
        half = src.shape[0] // 2
        shard = LocalShard((half, 4), (Chunk((1, 0), (half, 4), (0, 0)),))
        (packed,) = ops.pack_shards([src * 3], [shard])
        filled = ops.unpack_shard(src, packed, shard)
        ops.unpack_shards_([filled.detach()], [packed.detach()], [shard])
        return packed + ops.pack_shard(src, shard), filled, ops.fingerprint_shard(packed.detach(), shard, src.shape)

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=counter)
    for rows in range(10, 40, 2):
        gradients = []
        for function in (step, compiled):
            src = torch.arange(4.0 * rows).view(rows, 4).requires_grad_()
            results = function(src)
            (results[0].square().sum() + results[1].sum()).backward()
            gradients.append((*results, src.grad))
        for got, wanted in zip(*gradients, strict=True):
            assert torch.equal(got, wanted)
    assert counter.frame_count == 1


# ---- refusals ----


def bad_shard(offsets: tuple[int, ...], sizes: tuple[int, ...], local: tuple[int, ...]) -> LocalShard:
    return LocalShard((3, 2), (Chunk(offsets, sizes, local),))


@pytest.mark.parametrize(
    ("shard", "message"),
    [
        (bad_shard((1, 7), (3, 2), (0, 0)), r"chunk 0 is \[7, 9\) of dim 1, but the larger tensor holds \[0, 8\)"),
        (bad_shard((-1, 0), (3, 2), (0, 0)), r"chunk 0 is \[-1, 2\) of dim 0"),
        (bad_shard((0, 0), (3, 2), (1, 0)), r"chunk 0 covers \[1, 4\) of dim 0 of the shard, which has 3 elements"),
        (bad_shard((0, 0), (2, 2), (0, 0)), "the chunks cover 4 of the shard's 6 elements"),
        (bad_shard((0, 0), (0, 2), (0, 0)), "chunk 0 has size 0 in dim 0, expected at least 1"),
        (bad_shard((0,), (3,), (0,)), r"the table of chunks has 3 integers, expected a multiple of 3 \* 2"),
        (LocalShard((3,), ()), "the shard has 1 dims, expected 2"),
        (LocalShard((-3, 2), ()), "the shard has a negative size -3"),
        (
            LocalShard((3, 2), (Chunk((0, 0), (2, 2), (0, 0)), Chunk((3, 0), (2, 2), (1, 0)))),
            "chunks 0 and 1 overlap in the shard",
        ),
    ],
)
def test_bad_shards_are_refused(shard: LocalShard, message: str) -> None:
    with pytest.raises(ValueError, match="pack_shard: .*" + message):
        ops.pack_shard(torch.randn(6, 8), shard)


def test_overflow_is_refused() -> None:
    huge = 2**62
    with pytest.raises((ValueError, OverflowError)):
        ops.pack_shard(torch.randn(6, 8), LocalShard((huge, huge), ()))
    with pytest.raises(OverflowError, match="overflows int64"):
        ops.pack_shard(torch.randn(6, 8), TWO_CHUNKS, src_offsets=(2**63 - 2, 0))


def test_bad_destinations_are_refused_and_unchanged() -> None:
    local = torch.ones(3, 2)
    overlapping = LocalShard((4, 2), (Chunk((0, 0), (2, 2), (0, 0)), Chunk((1, 0), (2, 2), (2, 0))))
    dst = torch.zeros(6, 8)
    with pytest.raises(ValueError, match="chunks 0 and 1 overlap in the larger tensor"):
        ops.unpack_shard_(dst, torch.ones(4, 2), overlapping)
    with pytest.raises(ValueError, match="several of its elements share memory"):
        ops.unpack_shard_(torch.zeros(8).expand(6, 8), local, TWO_CHUNKS)
    with pytest.raises(ValueError, match="source and destination share memory"):
        ops.unpack_shard_(dst, dst[1:4, 2:4], TWO_CHUNKS)
    with pytest.raises(ValueError, match="different dtypes"):
        ops.unpack_shard_(dst, local.double(), TWO_CHUNKS)
    with pytest.raises(ValueError, match=r"shape \(2, 2\), expected the shard's \(3, 2\)"):
        ops.unpack_shard_(dst, local[:2], TWO_CHUNKS)
    with pytest.raises(ValueError, match="dst_offsets has 1 dims, expected 2"):
        ops.unpack_shard_(dst, local, TWO_CHUNKS, dst_offsets=(0,))
    assert not dst.any()


def test_bad_lists_are_refused_and_nothing_is_written() -> None:
    tensors, out = [torch.ones(3), torch.ones(4)], torch.zeros(8)
    with pytest.raises(ValueError, match="flatten_into_: out has 24 bytes, the tensors need 28"):
        ops.flatten_into_(tensors, out[:6], alignment=4)
    with pytest.raises(ValueError, match="alignment is 3, expected a power of two"):
        ops.flatten_into_(tensors, out, alignment=3)
    with pytest.raises(ValueError, match=r"out is neither uint8 nor of the dtype of tensors\[0\]"):
        ops.flatten_into_(tensors, out.double(), alignment=4)
    with pytest.raises(ValueError, match="out has 2 dims, expected a contiguous tensor of 1"):
        ops.flatten_into_(tensors, out.view(2, 4), alignment=4)
    with pytest.raises(ValueError, match="source and destination share memory"):
        ops.flatten_into_([out[5:], torch.ones(4)], out, alignment=4)
    with pytest.raises(ValueError, match="alignment 1 does not fit|neither uint8"):
        ops.flatten_tensors([torch.ones(3), torch.ones(3, dtype=torch.uint8)], alignment=1, dtype=torch.float32)
    assert not out.any()
    with pytest.raises(ValueError, match=r"tensors\[0\] and tensors\[1\] share memory and would both be written"):
        ops.unflatten_tensors_([out[:4], out[3:]], torch.ones(9), alignment=4)
    matrix = torch.zeros(4, 4)  # interleaved columns do not share memory
    ops.unflatten_tensors_([matrix[:, :2], matrix[:, 2:]], torch.arange(16.0), alignment=4)
    assert torch.equal(matrix[:, :2].reshape(-1), torch.arange(8.0))
    with pytest.raises(ValueError, match="the buffer has 4 bytes, needs 28"):
        ops.flat_views(torch.zeros(1), tensors, alignment=4)
    with pytest.raises(ValueError, match="got 2 tensors and 1 shards"):
        ops.pack_shards(tensors, [TWO_CHUNKS])
    with pytest.raises(ValueError, match=r"dst\[0\] and dst\[1\] share memory"):
        ops.unpack_shards_([matrix, matrix], [torch.ones(0, 4)] * 2, [LocalShard((0, 4), ())] * 2)
    with pytest.raises(ValueError, match="got a NoneType as tensors, expected a tensor"):
        ops.flatten_tensors([None])  # type: ignore[list-item]


def test_a_tensor_is_no_list_of_tensors() -> None:
    zero, shards = torch.zeros(1), [LocalShard((1,), ())]
    calls: list[tuple[str, Callable[..., object]]] = [
        ("flatten_tensors: got tensors", ops.flatten_tensors),
        ("flatten_into_: got tensors", lambda wrong: ops.flatten_into_(wrong, torch.zeros(1))),
        ("unflatten_tensors_: got tensors", lambda wrong: ops.unflatten_tensors_(wrong, torch.zeros(1))),
        ("flat_offsets: got tensors", ops.flat_offsets),
        ("flat_views: got like", lambda wrong: ops.flat_views(torch.zeros(1), wrong)),
        ("pack_shards: got src", lambda wrong: ops.pack_shards(wrong, shards)),
        ("unpack_shards_: got dst", lambda wrong: ops.unpack_shards_(wrong, [zero], shards)),
        ("unpack_shards_: got locals", lambda wrong: ops.unpack_shards_([zero], wrong, shards)),
        ("broadcast_coalesced_: got tensors", lambda wrong: ops.broadcast_coalesced_(wrong, "no group")),
        ("check_broadcast: got tensors", ops.check_broadcast),
    ]
    for text, call in calls:
        for wrong, what in (
            (zero, "a Tensor"),
            (torch.ones(2, 2), "a Tensor"),
            (None, "None"),
            ({"w": zero}, "a dict"),
        ):
            with pytest.raises(TypeError, match=f"^{text}={what}, expected a list of tensors$"):
                call(wrong)
    assert ops.flatten_tensors(iter([zero])).numel() == 4 and ops.pack_shards((), ()) == []


def test_dtypes_that_the_stable_abi_does_not_know_are_one_sentence() -> None:
    for dtype in (torch.uint4, torch.bits8, torch.bits2x4):
        with pytest.raises(
            ValueError, match=rf"^flatten_tensors: got dtype={dtype}, .*take a view of the bytes as that"
        ):
            ops.flatten_tensors([torch.empty(64, dtype=torch.uint8)], dtype=dtype)
    scales = torch.arange(1, 6, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    assert torch.equal(ops.flatten_tensors([scales]).view(torch.float8_e8m0fnu).float(), scales.float())


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ([], "the table ends too early: 0 integers are left, expected 1"),
        ([-1, 0, 0, 3, 2], "the table says -1 chunks"),
        ([2**62, 0, 0, 3, 2], "the table says 4611686018427387904 chunks and has 4 more integers"),
        ([1, 0, 0, 3, 2, 0, 0], "the table ends too early: 2 integers are left, expected 6"),
        ([0, 0, 0, 0, 2, 7], "the table has 1 integers behind the last tensor's"),
    ],
)
def test_bad_tables_are_refused(tables: list[int], message: str) -> None:
    with pytest.raises(RAW_REFUSAL, match=message):
        torch.ops.torchtitan_ext.pack_shards([torch.randn(6, 8)], tables)


def test_real_and_imaginary_parts_share_no_memory() -> None:
    values = torch.randn(5 << 20, dtype=torch.complex64)
    flat = ops.flatten_tensors([values.real, values.imag], alignment=4, dtype=torch.float32)
    target = torch.zeros_like(values)
    ops.unflatten_tensors_([target.real, target.imag], flat, alignment=4)
    assert torch.equal(target, values)
    with pytest.raises(ValueError, match="share memory and would both be written"):
        ops.unflatten_tensors_([target.real, torch.view_as_real(target)[:, 0]], flat, alignment=4)


def test_inference_tensors_are_written_in_inference_mode_only() -> None:
    with torch.inference_mode():
        target = torch.zeros(4)
        ops.unflatten_tensors_([target], torch.ones(4))
    assert torch.equal(target, torch.ones(4))
    with pytest.raises(RuntimeError, match="was made in inference mode and is written outside of it"):
        ops.unflatten_tensors_([target], torch.zeros(4))
    assert torch.equal(target, torch.ones(4))


def test_bad_tensors_are_refused() -> None:
    src = torch.randn(6, 8)
    with pytest.raises(ValueError, match="src is sparse"):
        ops.pack_shard(src.to_sparse(), TWO_CHUNKS)
    with pytest.raises(ValueError, match="src is sparse"):
        ops.pack_shard(src.to_mkldnn(), TWO_CHUNKS)
    with pytest.raises(ValueError, match="src is quantized"):
        ops.pack_shard(torch.quantize_per_tensor(src, 1.0, 0, torch.qint8), TWO_CHUNKS)
    with pytest.raises(ValueError, match="got a list as src, expected a tensor"):
        ops.pack_shard([1.0], TWO_CHUNKS)  # type: ignore[arg-type]
    freed = src.clone()
    freed.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="src spans 192 bytes of storage, which has 0; was it freed or resized?"):
        ops.pack_shard(freed, TWO_CHUNKS)
    assert ops.pack_shard(src.to("meta"), TWO_CHUNKS).shape == (3, 2)


def test_failures_below_the_ops_keep_their_type_and_say_what_failed() -> None:
    with pytest.raises(RuntimeError, match=r"a tensor of 140737488355328 bytes could not be made on the CPU"):
        ops.flatten_tensors([torch.zeros(1).expand(2**45)])


def test_dtensors_are_refused(tmp_path: object) -> None:
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        dtensor = DTensor.from_local(torch.randn(6, 8), DeviceMesh("cpu", [0]), [Replicate()])
        with pytest.raises(ValueError, match="got a DTensor as src; pass the rank"):
            ops.pack_shard(dtensor, TWO_CHUNKS)
    finally:
        torch.distributed.destroy_process_group()
