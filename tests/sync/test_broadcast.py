"""`ops.broadcast_coalesced_` and `broadcast_tensors`: every dtype, shape and stride arrives bit for bit, in place."""

import resource

import pytest
import torch
import torch.distributed as dist
from eventually import eventually
from python_group import PythonGroup, register
from torch import Tensor

import torchtitan_ext as tte
from torchtitan_ext import ops, sync
from torchtitan_ext.sync.batches import ListBatch

DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32, torch.uint64),
    *(torch.int64, torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.bfloat16, torch.float32),
    *(torch.float64, torch.complex32, torch.complex64, torch.complex128),
]
BUCKETS = [64, 1000, 4096, ops.DEFAULT_BUCKET_BYTES]


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """NaN payloads, -0.0 and denormals among them."""
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    count = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator).view(dtype).reshape(shape)


def bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def build_tensors(seed: int) -> list[Tensor]:
    """All dtypes in many shapes: empty, 0-d, odd, of strides, below and above the size that is sent directly."""
    generator = torch.Generator().manual_seed(seed)
    tensors = []
    for dtype in DTYPES:
        tensors += [random_bits(shape, dtype, generator) for shape in [(3, 5), (), (0, 4), (1,), (129,)]]
        tensors.append(random_bits((7, 6), dtype, generator).t())
        tensors.append(random_bits((6, 9), dtype, generator)[::2, 1:8:3])
    tensors.append(random_bits((150_001,), torch.float32, generator))
    tensors.append(random_bits((300, 200), torch.bfloat16, generator).t())
    tensors.append(random_bits((40, 30, 50), torch.float64, generator).permute(2, 0, 1)[3:, :, 1:29])
    tensors.append(random_bits((5_000_001,), torch.uint8, generator))
    return tensors


def broadcast_all(rank: int, world_size: int) -> list[str]:
    wrong = []
    for src in {0, world_size - 1}:
        expected = [bits(tensor) for tensor in build_tensors(src)]
        for bucket_bytes in BUCKETS:
            # Buckets of one line make a message of every line: small tensors suffice there.
            tensors = [tensor for tensor in build_tensors(rank) if tensor.nbytes < 100 * bucket_bytes]
            wanted = [value for value in expected if value.numel() < 100 * bucket_bytes]
            addresses = [tensor.data_ptr() for tensor in tensors]
            versions = [tensor._version for tensor in tensors]
            ops.broadcast_coalesced_(tensors, dist.group.WORLD.group_name, src=src, bucket_bytes=bucket_bytes)
            assert [tensor.data_ptr() for tensor in tensors] == addresses
            assert all(tensor._version > before for tensor, before in zip(tensors, versions, strict=True))
            wrong += [
                f"src {src}, bucket {bucket_bytes}, {tensor.dtype} {tuple(tensor.shape)}"
                for tensor, value in zip(tensors, wanted, strict=True)
                if not torch.equal(bits(tensor), value)
            ]
    return wrong


@pytest.mark.parametrize("world_size", [1, 3])
def test_every_bit_arrives(run_world, world_size: int) -> None:
    assert run_world(world_size, broadcast_all) == [[]] * world_size


def differently_strided(rank: int, world_size: int) -> bool:
    """What is contiguous on one rank goes through a bucket on another: the messages are the same."""
    tensors = build_tensors(rank)
    if rank == 1:
        tensors = [
            torch.empty(tensor.shape[::-1], dtype=tensor.dtype).permute(list(range(tensor.dim()))[::-1])
            for tensor in tensors
        ]
    ops.broadcast_coalesced_(tensors, dist.group.WORLD.group_name, bucket_bytes=100_000)
    return all(torch.equal(bits(got), bits(want)) for got, want in zip(tensors, build_tensors(0), strict=True))


def test_strides_may_differ_between_ranks(run_world) -> None:
    assert run_world(3, differently_strided) == [True] * 3


def in_a_subgroup(rank: int, world_size: int) -> list[float]:
    group = dist.new_group([1, 3])
    tensors = [torch.full((5,), float(rank)), torch.full((90_000,), float(rank))]
    if rank in (1, 3):
        tte.sync.broadcast_tensors(tensors, group=group, src=1)
    return [float(tensor[-1]) for tensor in tensors]


def test_subgroup_and_source_counted_in_it(run_world) -> None:
    assert run_world(4, in_a_subgroup) == [[0.0] * 2, [3.0] * 2, [2.0] * 2, [3.0] * 2]


def compiled(rank: int, world_size: int) -> list[float]:
    name = dist.group.WORLD.group_name
    # The schema and the fake kernel; gradients are refused by design.
    for utility in ("test_schema", "test_faketensor"):
        torch.library.opcheck(
            torch.ops.torchtitan_ext.broadcast_coalesced_.default,
            ([torch.zeros(3), torch.zeros(70_000)], name, 0, 1 << 20),
            test_utils=utility,
        )

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(tensors: list[Tensor]) -> Tensor:
        ops.broadcast_coalesced_(tensors, name)
        return tensors[0] + tensors[1].sum()

    tensors = [torch.full((3,), float(rank)), torch.full((2, 2), rank + 1.0)]
    return [*step(tensors).tolist(), float(tensors[0][0]), float(tensors[1][0, 0])]


def test_opcheck_and_compile(run_world) -> None:
    assert run_world(2, compiled) == [[4.0, 4.0, 4.0, 0.0, 1.0]] * 2


def overwritten(rank: int, world_size: int) -> str:
    weight = torch.ones(3, requires_grad=True)
    hidden = weight * 2
    loss = (hidden * hidden).sum()
    with torch.no_grad():
        ops.broadcast_coalesced_([hidden.detach()], dist.group.WORLD.group_name)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with pytest.raises(RuntimeError, match="not differentiable"):
        ops.broadcast_coalesced_([weight], dist.group.WORLD.group_name)
    return ""


def test_autograd_notices(run_world) -> None:
    run_world(2, overwritten)


def refused(rank: int, world_size: int) -> None:
    name = dist.group.WORLD.group_name
    whole = torch.zeros(4, 4)
    for tensors, text in [
        ([torch.zeros(2, device="meta")], "meta"),
        ([torch.zeros(2), torch.zeros(2, device="meta")], "meta"),
        ([torch.eye(2).to_sparse()], "is sparse"),
        ([torch.eye(2).to_sparse_csr()], "is sparse"),
        ([torch.zeros(1).expand(3)], "several of its elements share memory"),
        ([whole[:3], whole[2:]], "share memory and would both be received"),
        ([torch.zeros(2, dtype=torch.complex64).conj()], "lazily conjugated"),
        (["weights"], "expected a tensor"),
    ]:
        with pytest.raises(ValueError, match=text):
            ops.broadcast_coalesced_(tensors, name)
    with pytest.raises(ValueError, match="got src 2, expected a rank of the group, 0 to 1"):
        ops.broadcast_coalesced_([torch.zeros(1)], name, src=2)
    with pytest.raises(ValueError, match="got bucket_bytes 0"):
        ops.broadcast_coalesced_([torch.zeros(1)], name, bucket_bytes=0)
    with pytest.raises(RuntimeError, match="no such group"):
        ops.broadcast_coalesced_([torch.zeros(1)], "no such group")
    ops.broadcast_coalesced_([], name)
    ops.broadcast_coalesced_([torch.zeros(0, 3)], name)


def test_refusals_of_the_op(run_world) -> None:
    run_world(2, refused)


def staged(rank: int, world_size: int) -> bool:
    """The way by an accelerator, with the CPU in its place."""
    tensors = [tensor for tensor in build_tensors(rank) if tensor.nbytes < 1_000_000]
    batch = ListBatch(dist.group.WORLD, 1, tensors)
    sync._send_staged(batch, 10_000, torch.device("cpu"))
    wanted = [tensor for tensor in build_tensors(1) if tensor.nbytes < 1_000_000]
    return all(torch.equal(bits(got), bits(want)) for got, want in zip(tensors, wanted, strict=True))


def test_staging(run_world) -> None:
    assert run_world(2, staged) == [True] * 2


def without_check(rank: int, world_size: int) -> float:
    tensor = torch.full((4,), float(rank))
    with torch.inference_mode():
        inference = torch.full((4,), float(rank))
    tte.sync.broadcast_tensors([tensor, inference], src=1, check=False)
    with pytest.raises(tte.errors.SyncMismatchError, match="meta device"):
        tte.sync.broadcast_tensors([torch.zeros(1, device="meta")], check=False)
    return float(tensor.sum() + inference.sum())


def test_without_agreement_and_of_inference_tensors(run_world) -> None:
    assert run_world(2, without_check) == [8.0] * 2


def through_a_python_group(rank: int, world_size: int) -> list[float]:
    group = register(PythonGroup(dist.group.WORLD), "python group")
    tensors = [torch.full((3,), float(rank)), torch.full((3 << 20,), float(rank)), torch.full((2, 2), rank).t()]
    ops.broadcast_coalesced_(tensors, "python group", src=1)
    assert group.calls_left < 1 << 30
    return [float(tensor.flatten()[-1]) for tensor in tensors]


def test_groups_that_python_makes_need_no_backend(run_world) -> None:
    assert run_world(2, through_a_python_group) == [[1.0, 1.0, 1.0]] * 2


def failing_part_way(rank: int, world_size: int) -> None:
    group = register(PythonGroup(dist.group.WORLD, calls_until_failure=1), "failing group")
    weight = torch.ones(3, requires_grad=True)
    first, second = torch.full((3 << 20,), float(rank)), torch.full((3 << 20,), float(rank))
    hidden = [first + weight[0], second + weight[1]]
    loss = sum((value * value).sum() for value in hidden)
    versions = [value._version for value in hidden]
    with torch.no_grad(), pytest.raises(RuntimeError, match="the network is gone"):
        ops.broadcast_coalesced_(hidden, "failing group")
    assert group.calls_left == -1
    dist.barrier()
    assert all(value._version > before for value, before in zip(hidden, versions, strict=True))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_broadcast_that_fails_part_way_bumps_versions(run_world) -> None:
    run_world(2, failing_part_way)


# Allocators and gloo keep some of what they had; a kept bucket would be 96 MiB.
LITTLE_BYTES = 90 << 20


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def large_buckets(rank: int, world_size: int) -> None:
    """One call with buckets of 96 MiB leaves nothing behind for longer than gloo's thread takes to let it go."""
    ops.broadcast_coalesced_([torch.zeros(10)], dist.group.WORLD.group_name)
    before = resident_bytes()
    tensors = torch.zeros(24 << 20).split(1 << 20)
    ops.broadcast_coalesced_(tensors, dist.group.WORLD.group_name, bucket_bytes=96 << 20)
    del tensors
    eventually(lambda: resident_bytes() - before < LITTLE_BYTES)


@pytest.mark.nightly("memory")
def test_large_buckets_are_not_kept(run_world) -> None:
    run_world(2, large_buckets)


def checks(rank: int, world_size: int) -> None:
    good = ops.check_broadcast([torch.zeros(2, 3), torch.zeros(0)])
    assert len(good.digest) == 2 and (good.positions, good.reason) == ((), "")
    assert ops.check_broadcast([torch.ones(2, 3), torch.zeros(0)]) == good
    assert ops.check_broadcast([torch.ones(3, 2), torch.zeros(0)]).digest != good.digest
    whole = torch.zeros(4, 4)
    shared = ops.check_broadcast([torch.zeros(1), whole[:3], whole[2:]])
    assert shared == ops.BroadcastCheck((), (1, 2), "share memory and would both be received into")
    expanded = ops.check_broadcast([torch.zeros(1), torch.zeros(1).expand(3)])
    assert expanded.positions == (1,) and "several of its elements share memory" in expanded.reason
    values = torch.zeros(5 << 20, dtype=torch.complex64)
    assert ops.check_broadcast([values.real, values.imag]).positions == ()


def test_the_check_gives_positions_and_a_reason(run_world) -> None:
    run_world(1, checks)


def build_gpu_tensors(rank: int) -> list[Tensor]:
    """With one that is sent directly, and one whose rows lie apart."""
    large = torch.full((9 << 18,), rank, dtype=torch.int32, device="cuda")
    strided = torch.full((768, 1024), rank, dtype=torch.int32, device="cuda")[:, 3:1000]
    return [*(tensor.cuda() for tensor in build_tensors(rank)), large, strided]


def on_gpu(rank: int, world_size: int) -> list[str]:
    """All ranks on one GPU, with gloo: NCCL wants one each."""
    wrong = []
    for bucket_bytes in (1 << 16, 1 << 20, ops.DEFAULT_BUCKET_BYTES):
        tensors = build_gpu_tensors(rank)
        tte.sync.broadcast_tensors(tensors, src=1, bucket_bytes=bucket_bytes)
        wrong += [
            f"{bucket_bytes}: {tensor.dtype} {tuple(tensor.shape)}"
            for tensor, value in zip(tensors, build_gpu_tensors(1), strict=True)
            if not torch.equal(bits(tensor), bits(value))
        ]
    return wrong


@pytest.mark.needs_cuda
def test_every_bit_arrives_on_a_gpu(run_world) -> None:
    assert run_world(2, on_gpu) == [[]] * 2


def on_the_gpu_of_the_tensors(rank: int, world_size: int) -> int:
    """The group sees the tensors' GPU as the current one, whatever the caller's is."""
    last = torch.cuda.device_count() - 1
    seen = []

    class Watching(PythonGroup):
        def broadcast(self, tensors: list[Tensor], options: dist.BroadcastOptions) -> dist.Work:
            seen.append(torch.cuda.current_device())
            return super().broadcast(tensors, options)

    group = register(Watching(dist.group.WORLD), "watching group")
    torch.cuda.set_device(0)
    ops.broadcast_coalesced_([torch.zeros(3, device=f"cuda:{last}")], "watching group")
    assert seen == [last] and group.calls_left < 1 << 30
    return torch.cuda.current_device()


@pytest.mark.needs_cuda
def test_a_broadcast_runs_on_the_gpu_of_its_tensors(run_world) -> None:
    assert run_world(2, on_the_gpu_of_the_tensors) == [0, 0]
