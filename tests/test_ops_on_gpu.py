"""The operators on a GPU beyond `test_ops.py`: full tables of kernel arguments, alignments, sizes, streams, graphs.

What the operators give is compared with indexing, or with the same operator on the CPU.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from test_ops import TWO_CHUNKS, bits, random_tensor
from torch import Tensor

from torchtitan_ext import ops
from torchtitan_ext.layout.layout import Chunk, LocalShard

pytestmark = pytest.mark.needs_cuda

DTYPE_OF_BYTES = {1: torch.uint8, 2: torch.bfloat16, 4: torch.float32, 8: torch.int64, 16: torch.complex128}
GIB = 2**30


def whole(tensor: Tensor) -> LocalShard:
    shape, zeros = tuple(tensor.shape), (0,) * tensor.dim()
    return LocalShard(shape, (Chunk(zeros, shape, zeros),) if tensor.numel() else ())


def copy_all(dst: list[Tensor], src: list[Tensor]) -> None:
    ops.unpack_shards_(dst, src, [whole(tensor) for tensor in src])


# Around the number of entries that the small table holds (16), the large ones (1,160 spans), and several launches.
@pytest.mark.parametrize("count", [1, 16, 17, 1160, 1161, 5000])
def test_tables_of_spans(count: int) -> None:
    memory = random_tensor((count * 48,), torch.uint8, "cuda")
    tensors = [part[: 1 + index % 48] for index, part in enumerate(memory.split(48))]
    flat = ops.flatten_tensors(tensors, alignment=1)
    assert torch.equal(flat, torch.cat(tensors))
    restored = [torch.zeros_like(tensor) for tensor in tensors]
    ops.unflatten_tensors_(restored, flat, alignment=1)
    assert torch.equal(torch.cat(restored), flat)


# The same of nests of loops: 172 in a table.
@pytest.mark.parametrize("word_bytes", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("count", [16, 17, 172, 173, 700])
def test_tables_of_nests(count: int, word_bytes: int) -> None:
    dtype = DTYPE_OF_BYTES[word_bytes]
    memory = random_tensor((count, 12, 10), dtype, "cuda")
    tensors = [part[: 2 + index % 10, 1:8:3].t() for index, part in enumerate(memory)]
    restored = [
        torch.zeros_like(part)[: tensor.shape[1]].t()[1:4] for tensor, part in zip(tensors, memory, strict=True)
    ]
    copy_all(restored, tensors)
    assert all(torch.equal(bits(copy), bits(tensor)) for copy, tensor in zip(restored, tensors, strict=True))
    shard = whole(tensors[0])
    on_cpu = ops.fingerprint_shard(tensors[0].cpu(), shard, tensors[0].shape)
    assert torch.equal(ops.fingerprint_shard(tensors[0], shard, tensors[0].shape).cpu(), on_cpu)


@pytest.mark.parametrize("length", ["short", "tile"])
def test_every_alignment_of_both_sides(length: str) -> None:
    """Each pair of offsets within 16 bytes; guard bytes beside each copy stay as they were."""
    lengths = range(65) if length == "short" else (16383, 16384, 16385, 32767, 49169)
    stride = 32 * -(-(max(lengths) + 33) // 32)
    for shift in range(16):
        src = random_tensor((16 * len(lengths), stride), torch.uint8, "cuda")
        dst = torch.full_like(src, 99)
        expected = dst.clone()
        cases = [(16 + offset, size) for offset in range(16) for size in lengths]
        sources = [row[shift : shift + size] for row, (_, size) in zip(src, cases, strict=True)]
        copy_all([row[at : at + size] for row, (at, size) in zip(dst, cases, strict=True)], sources)
        for row, source, (at, size) in zip(expected, sources, cases, strict=True):
            row[at : at + size] = source
        assert torch.equal(dst, expected), f"source offset {shift}"


@pytest.mark.parametrize("num_dims", [5, 6, 7, 8])
def test_nests_of_many_loops(num_dims: int) -> None:
    """More loops than an entry has: the outer ones are entries of their own."""
    generator = torch.Generator().manual_seed(num_dims)
    for dtype in DTYPE_OF_BYTES.values():
        sizes = [int(size) for size in torch.randint(2, 4, (num_dims,), generator=generator)]
        src = random_tensor(tuple(2 * size for size in sizes), dtype, "cuda")[(slice(1, None, 2),) * num_dims]
        dst = torch.zeros([2 * size for size in reversed(sizes)], dtype=dtype, device="cuda")
        target = dst[(slice(0, None, 2),) * num_dims].permute(*reversed(range(num_dims)))
        ops.unpack_shard_(target, src, whole(src))
        assert torch.equal(bits(target), bits(src))
        target.zero_()
        assert not bits(dst).any(), "nothing between the elements was written"
        assert torch.equal(bits(ops.pack_shard(src, whole(src)).cpu()), bits(ops.pack_shard(src.cpu(), whole(src))))


@pytest.mark.parametrize(("dtype", "count"), [(torch.uint8, 2**32 + 12345), (torch.bfloat16, 2**31 + 777)], ids=str)
def test_more_elements_than_an_index_of_32_bits_counts(dtype: torch.dtype, count: int) -> None:
    num_bytes = count * dtype.itemsize
    if torch.cuda.mem_get_info()[1] < 4 * num_bytes:
        pytest.skip(f"the GPU has less than {4 * num_bytes / GIB:.0f} GiB")
    tensor = torch.empty(count, dtype=dtype, device="cuda")
    tensor.view(torch.uint8).random_(0, 256)
    # In columns too, which are nests of loops: a fingerprint and a copy of each half.
    shapes = [(count,), (3, count // 3)]
    for shape in shapes:
        source = tensor[: torch.Size(shape).numel()].view(shape)
        split = shape[-1] // 2 + 5
        parts = [source.narrow(-1, 0, split), source.narrow(-1, split, shape[-1] - split)]
        total = int(ops.fingerprint_shard(source, whole(source), shape))
        summed = 0
        for part, begin in zip(parts, (0, split), strict=True):
            offsets = (0,) * (len(shape) - 1) + (begin,)
            shard = LocalShard(tuple(part.shape), (Chunk(offsets, tuple(part.shape), (0,) * len(shape)),))
            packed = ops.pack_shard(source, shard)
            assert torch.equal(bits(packed), bits(part))
            summed += int(ops.fingerprint_shard(packed, shard, shape))
            del packed
        assert (summed - total) % 2**64 == 0
    sample = tensor[-1_000_003:].cpu()
    at = count - sample.numel()
    shard = LocalShard(tuple(sample.shape), (Chunk((at,), tuple(sample.shape), (0,)),))
    on_gpu = ops.fingerprint_shard(tensor[at:], shard, (count,))
    assert torch.equal(on_gpu.cpu(), ops.fingerprint_shard(sample, shard, (count,)))


def test_memory_freed_right_after_a_call_on_a_side_stream() -> None:
    """The stream is far behind the host, which frees and allocates what the kernels are still to read and write."""
    stream = torch.cuda.Stream()
    results = []
    for value in range(20):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)
            tensors = [torch.full((1000, 33), float(value), device="cuda").t() for _ in range(30)]
            flat = ops.flatten_tensors(tensors, dtype=torch.float32, alignment=4)
            del tensors
            noise = [torch.full((33, 1000), -1.0, device="cuda") for _ in range(30)]
            copies = [torch.empty(33, 1000, device="cuda") for _ in range(30)]
            ops.unflatten_tensors_(copies, flat, alignment=4)
            del flat, noise
            results.append((value, torch.stack([copy.amin() + copy.amax() for copy in copies])))
            del copies
    stream.synchronize()
    assert all(torch.equal(sums, torch.full_like(sums, 2.0 * value)) for value, sums in results)


IN_A_GRAPH = """
import torch
from torchtitan_ext import ops
from torchtitan_ext.layout.layout import Chunk, LocalShard

shard = LocalShard((3, 2), (Chunk((1, 2), (2, 2), (0, 0)), Chunk((5, 2), (1, 2), (2, 0))))
source = torch.randn(6, 8, device="cuda")
many = [torch.randn(5, 300, device="cuda").t() for _ in range(400)]
target = torch.zeros(6, 8, device="cuda")
restored = [torch.zeros(300, 5, device="cuda") for _ in many]
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    packed = ops.pack_shard(source, shard)
    ops.unpack_shard_(target, packed, shard)
    flat = ops.flatten_tensors(many)
    ops.unflatten_tensors_(restored, flat)
    total = ops.fingerprint_shard(packed, shard, (6, 8))
for _ in range(3):
    source.normal_()
    for tensor in many:
        tensor.normal_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(packed, torch.cat([source[1:3, 2:4], source[5:6, 2:4]]))
    assert torch.equal(target[5, 2:4], source[5, 2:4]) and not target[0].any()
    assert all(torch.equal(one, other) for one, other in zip(restored, many))
    assert torch.equal(total.cpu(), ops.fingerprint_shard(packed.cpu(), shard, (6, 8)))
"""


@pytest.mark.parametrize("loading", ["LAZY", "EAGER"])
def test_first_calls_of_a_process_within_a_graph(loading: str) -> None:
    environment = os.environ | {"CUDA_MODULE_LOADING": loading}
    run = subprocess.run([sys.executable, "-c", IN_A_GRAPH], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


UNDER_AN_ALLOCATOR = """
import torch
from torchtitan_ext import ops

for value in range(10):
    torch.cuda._sleep(10_000_000)
    tensors = [torch.full((70, 330), float(value + index % 3), device="cuda").t() for index in range(200)]
    flat = ops.flatten_tensors(tensors, dtype=torch.float32, alignment=64)
    del tensors
    large = torch.empty(1 << 28, dtype=torch.uint8, device="cuda").fill_(255)
    assert float(flat.double().sum()) == sum((value + index % 3) * 70 * 330 for index in range(200))
    del large, flat
"""


@pytest.mark.parametrize(
    "setting",
    [
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        "PYTORCH_CUDA_ALLOC_CONF=backend:cudaMallocAsync",
        "PYTORCH_NO_CUDA_MEMORY_CACHING=1",
    ],
)
def test_under_every_allocator(setting: str) -> None:
    name, _, value = setting.partition("=")
    run = subprocess.run(
        [sys.executable, "-c", UNDER_AN_ALLOCATOR], env=os.environ | {name: value}, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_by_inductor(mode: str) -> None:
    """In the second mode the code and its gradients are CUDA graphs, which are recorded in the second call."""

    def step(src: Tensor, weight: Tensor, buffer: Tensor) -> tuple[Tensor, ...]:
        local, other = ops.pack_shards([src * 2, src + 1], [TWO_CHUNKS, TWO_CHUNKS])
        filled = buffer + 1
        ops.unpack_shard_(filled, local.detach(), TWO_CHUNKS)
        flat = ops.flatten_tensors([local, other.t()], alignment=16, dtype=torch.float32)
        restored = [torch.zeros_like(local), torch.zeros_like(local.t())]
        ops.unflatten_tensors_(restored, flat.detach(), alignment=16)
        loss = (local * weight).sum() + flat.square().sum() + ops.unpack_shard(src, weight, TWO_CHUNKS).square().sum()
        digest = ops.fingerprint_shard(filled, whole(filled), (6, 8))
        return loss, filled, digest, restored[0] + 1, restored[1] + 1

    compiled = torch.compile(step, fullgraph=True, mode=mode)
    for seed in range(5):
        results = []
        for function in (step, compiled):
            torch.manual_seed(seed)
            src = torch.randn(6, 8, device="cuda", requires_grad=True)
            weight = torch.randn(3, 2, device="cuda", requires_grad=True)
            loss, *others = function(src, weight, torch.randn(6, 8, device="cuda"))
            loss.backward()
            results.append([one.detach().clone() for one in (loss, src.grad, weight.grad, *others)])
        torch.testing.assert_close(results[0][:3], results[1][:3])
        assert all(torch.equal(*pair) for pair in zip(results[0][3:], results[1][3:], strict=True))


def test_within_a_green_context() -> None:
    green_contexts = pytest.importorskip("torch.cuda.green_contexts")
    source = random_tensor((6, 8), torch.float32, "cuda")
    try:
        context = green_contexts.GreenContext.create(num_sms=16, device_id=0)
    except RuntimeError as error:
        pytest.skip(f"this torch makes no green context: {error}")
    context.set_context()
    try:
        packed = ops.pack_shard(source, TWO_CHUNKS)
        flat = ops.flatten_tensors([source.t(), packed])
    finally:
        context.pop_context()
    torch.cuda.synchronize()
    assert torch.equal(bits(packed), bits(torch.cat([source[1:3, 2:4], source[5:6, 2:4]])))
    assert torch.equal(flat, ops.flatten_tensors([source.t(), packed]))
