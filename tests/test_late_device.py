"""The device that stands in for an accelerator (``late_device.cpp``): its streams run late, and our ops run on them."""

from typing import Any

import late
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from torchtitan_ext import ops
from torchtitan_ext.layout.layout import Chunk, LocalShard


def test_it_is_the_accelerator(run_late_world):
    run_late_world(1, check_accelerator)


def check_accelerator(rank: int, world_size: int) -> None:
    assert torch.accelerator.current_accelerator() == torch.device("late")
    assert torch.accelerator.device_count() == 1
    stream = torch.Stream("late")
    with stream:
        assert torch.accelerator.current_stream() == stream
    assert torch.accelerator.current_stream() != stream


DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.uint8, torch.float8_e4m3fn]


def test_tensors_go_there_and_back(run_late_world):
    run_late_world(1, check_round_trips)


def check_round_trips(rank: int, world_size: int) -> None:
    for dtype in DTYPES:
        given = torch.arange(24).view(4, 6).to(dtype)
        there = given.to("late")
        assert there.device == torch.device("late", 0)
        for view in (lambda tensor: tensor, torch.t, lambda tensor: tensor[1:, ::2], lambda tensor: tensor[2, 3]):
            assert same(view(there).cpu(), view(given))
        assert same(there.clone().cpu(), given)
        assert same(torch.zeros_like(there).cpu(), torch.zeros_like(given))
    assert torch.empty(0, 3, device="late").cpu().shape == (0, 3)
    assert (torch.arange(5, device="late") + 1).tolist() == [1, 2, 3, 4, 5]
    assert same(torch.tensor([1 + 2j]).conj().to("late").cpu(), torch.tensor([1 - 2j]))


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.equal(
        left.contiguous().reshape(-1).view(torch.uint8), right.contiguous().reshape(-1).view(torch.uint8)
    )


def test_what_nobody_waits_for_is_wrong(run_late_world):
    run_late_world(1, check_missing_waits)


@late.held()
def check_missing_waits(rank: int, world_size: int) -> None:
    given = torch.arange(1000)
    there = given.to("late")
    pinned = torch.empty(1000, dtype=torch.int64, pin_memory=True)
    assert pinned.is_pinned() and not given.is_pinned()

    # To the host.
    pinned.copy_(there, non_blocking=True)
    assert set(pinned.view(torch.uint8).tolist()) == {late.FRESH_BYTE}
    torch.accelerator.synchronize()
    assert torch.equal(pinned, given)

    # To the device: the source is overwritten too early.
    there.copy_(pinned, non_blocking=True)
    pinned.zero_()
    assert not there.cpu().any()

    # Between streams.
    stream = torch.Stream("late")
    with stream:
        other = torch.zeros(1000, dtype=torch.int64, device="late")
        for _ in range(4):
            other.fill_(7)
    assert 7 not in other.cpu()  # on the default stream
    event = stream.record_event()
    torch.accelerator.current_stream().wait_event(event)
    assert (other.cpu() == 7).all()

    # Memory that is given back is another tensor's, when the stream that it was made on has come so far.
    there = given.to("late")
    with stream:
        copy = torch.empty_like(there)
        for _ in range(4):
            copy.copy_(there)
    del there
    stream.synchronize()
    assert not torch.equal(copy.cpu(), given)
    there = given.to("late")
    with stream:
        for _ in range(4):
            copy.copy_(there)
    there.record_stream(stream)
    del there
    stream.synchronize()
    assert torch.equal(copy.cpu(), given)


def test_blocking_copies_wait(run_late_world):
    run_late_world(1, check_blocking_copies)


@late.held()
def check_blocking_copies(rank: int, world_size: int) -> None:
    there = torch.arange(1000).to("late")
    pinned = torch.empty(1000, dtype=torch.int64, pin_memory=True)
    pinned.copy_(there)
    assert torch.equal(pinned, torch.arange(1000))
    unpinned = torch.empty(1000, dtype=torch.int64)
    unpinned.copy_(there, non_blocking=True)  # as on a GPU: only pinned memory is copied behind one's back
    assert torch.equal(unpinned, torch.arange(1000))
    torch.accelerator.current_stream().synchronize()


def test_copies_and_bytes_are_counted(run_late_world):
    run_late_world(1, check_counts)


def check_counts(rank: int, world_size: int) -> None:
    late.count_copies()
    there = torch.ones(1000).to("late")
    there.clone()
    there.cpu()
    assert late.count_copies() == late.Copies(to_host=1, to_device=1, within_device=1)
    torch.accelerator.synchronize()
    used, _ = late.count_bytes()
    more = torch.empty(10_000, dtype=torch.uint8, device="late")
    assert late.count_bytes() == (used + 10_000, used + 10_000)
    del more
    torch.accelerator.synchronize()


def test_our_ops_run_on_its_streams(run_late_world):
    run_late_world(1, check_ops)


@late.held()
def check_ops(rank: int, world_size: int) -> None:
    late.count_copies()
    tensors = [torch.randn(5, 7).t(), torch.arange(9), torch.tensor(3.0), torch.empty(0, 2)]
    there = [tensor.to("late") for tensor in tensors]
    flat = ops.flatten_tensors(there)
    assert flat.device.type == "late" and torch.equal(flat.cpu(), ops.flatten_tensors(tensors))
    out = torch.zeros_like(flat)
    version = out._version
    ops.flatten_into_(there, out)
    assert out._version == version + 1
    with torch.Stream("late"):  # does not wait for the other stream
        assert not torch.equal(out.cpu(), flat.cpu())
    torch.accelerator.synchronize()
    assert torch.equal(out.cpu(), flat.cpu())
    filled = [torch.zeros_like(tensor) for tensor in there]
    ops.unflatten_tensors_(filled, out)
    assert all(torch.equal(one.cpu(), other) for one, other in zip(filled, tensors, strict=True))

    shard = LocalShard((4, 2), (Chunk((1, 0), (2, 2), (0, 0)), Chunk((5, 0), (2, 2), (2, 0))))
    source = torch.randn(8, 2)
    (packed,) = ops.pack_shards([source.to("late")], [shard])
    assert torch.equal(packed.cpu(), torch.cat([source[1:3], source[5:7]]))
    target = torch.zeros(8, 2, device="late")
    ops.unpack_shards_([target], [packed], [shard])
    assert torch.equal(target.cpu()[[1, 2, 5, 6]], packed.cpu())
    expected = ops.fingerprint_shard(packed.cpu(), shard, (8, 2))
    assert ops.fingerprint_shard(packed, shard, (8, 2)).item() == expected.item()
    with pytest.raises(ValueError, match="out has 3 bytes"):
        ops.flatten_into_(there, out[:3])
    with pytest.raises(ValueError, match="different devices"):
        ops.flatten_into_(there, torch.zeros_like(out, device="cpu"))


def test_all_our_ops_run_on_its_streams(run_late_world):
    assert run_late_world(1, ops_without_kernel) == [[]]


def ops_without_kernel(rank: int, world_size: int) -> list[str]:
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("torchtitan_ext::")]
    assert len(names) > 10
    keys = ("PrivateUse1", "CompositeExplicitAutograd")
    return [name for name in names if not any(has_kernel(name, key) for key in keys)]


def test_meshes_and_groups(run_late_world):
    assert run_late_world(2, make_mesh) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def make_mesh(rank: int, world_size: int) -> Any:
    mesh = init_device_mesh("late", (2,))
    whole = torch.arange(8)
    gathered: list[Any] = [None] * world_size
    dist.all_gather_object(gathered, rank)
    assert gathered == [0, 1]
    tensor = distribute_tensor(whole.to("late"), mesh, [Shard(0)], src_data_rank=None)
    assert tensor.device.type == "late"
    return tensor.to_local().tolist()
