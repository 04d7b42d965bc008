"""Staging of an accelerator's tensors: bytes right whatever the streams' delay, and few copies.

Runs on the device "late" (``late_device.cpp``), and on a GPU where there is one.
"""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import late
import pytest
import torch
import torch.distributed.checkpoint as dcp
from states import DTYPES, bits, blank, differences, mixed_state, on_device, random_tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.two_tensor import TwoTensor

import torchtitan_ext as tte
from torchtitan_ext.checkpoint import CpuStager
from torchtitan_ext.state import host_copies

Run = Callable[..., list[Any]]


@contextmanager
def buckets_of(num_bytes: int, delay_seconds: float = 0.0005) -> Iterator[None]:
    if "late" in vars(torch):
        late.set_delay(delay_seconds)
    with mock.patch.object(host_copies, "BUCKET_BYTES", num_bytes):
        yield


def large_views() -> dict[str, torch.Tensor]:
    """Strided tensors of which one, and some of whose rows, are larger than the buckets of these tests."""
    state = {f"columns {dtype}": random_tensor((9, 700), dtype)[:, 1::3] for dtype in DTYPES}
    state["cube"] = random_tensor((3, 40, 50), torch.int16).movedim(0, 2)
    return state | {"row": random_tensor((2, 3000), torch.float32)[:, ::2]}


@pytest.mark.parametrize("bucket_bytes", [256, 4096, 64 << 20])
def test_every_kind_of_tensor(run_on_accelerator: Run, bucket_bytes: int) -> None:
    run_on_accelerator(1, check_every_kind, bucket_bytes)


def check_every_kind(rank: int, world_size: int, device: str, bucket_bytes: int) -> None:
    state = mixed_state() | large_views()
    if bucket_bytes < 4096:
        del state["two_pages"]  # thousands of buckets
    stager = CpuStager()
    with buckets_of(bucket_bytes):
        for every in (1, 2, 3):
            staged = stager.stage(on_device(state, device, every))
            assert all(value.is_cpu for value in staged.values() if isinstance(value, torch.Tensor))
            assert differences(staged, state) == []
            del staged


def test_thousands_of_small_tensors_are_a_few_copies(run_late_world: Run) -> None:
    (copies,) = run_late_world(1, count_copies)
    assert copies.to_host <= 10 and copies.to_device == 0 and copies.within_device == 0


def count_copies(rank: int, world_size: int) -> late.Copies:
    state = {f"w{index}": random_tensor((32, 16), torch.float32, index) for index in range(4000)}
    late.set_delay(0)
    there = on_device(state, "late", every=7)
    torch.accelerator.synchronize()
    late.set_delay(0.0015)
    late.count_copies()
    staged = CpuStager().stage(there)
    copies = late.count_copies()
    assert differences(staged, state) == []
    return copies


def test_saves_in_the_background(run_on_accelerator: Run, tmp_path: Path) -> None:
    run_on_accelerator(1, check_save, tmp_path)


def check_save(rank: int, world_size: int, device: str, path: Path) -> None:
    state = mixed_state()
    stager = CpuStager()
    with buckets_of(64 << 20, 0.005):
        for every in (1, 3):
            there = on_device(state, device, every)
            tied = there["transposed"]
            saving = tte.async_save({"state": there, "tied": tied}, path / str(every), stager=stager)
            for value in there.values():
                if isinstance(value, torch.Tensor) and not value.is_cpu and 0 not in value.stride():
                    value.detach().zero_()  # right after the call
            saving.result()
            loaded = {"state": blank(state), "tied": torch.zeros(tied.shape)}
            tte.load(loaded, path / str(every), no_dist=True)
            assert differences(loaded["state"], state) == []
            assert torch.equal(bits(loaded["tied"]), bits(state["transposed"]))


def test_the_memory_of_the_device_is_one_bucket(run_late_world: Run) -> None:
    run_late_world(1, check_device_memory)


def check_device_memory(rank: int, world_size: int) -> None:
    state = {f"w{index}": torch.rand(64, 64) for index in range(20)} | {"columns": torch.rand(300, 400)[:, 1:200]}
    there = on_device(state, "late") | {"large": torch.rand(100_000).to("late")}
    torch.accelerator.synchronize()
    used, _ = late.count_bytes()
    with buckets_of(32 << 10, 0):
        CpuStager().stage(there)
    torch.accelerator.synchronize()
    assert used < late.count_bytes()[1] <= used + (32 << 10)


def test_tied_weights_and_parts_of_subclasses(run_on_accelerator: Run) -> None:
    run_on_accelerator(1, check_tied_weights)


def check_tied_weights(rank: int, world_size: int, device: str) -> None:
    weight = torch.arange(12.0).view(3, 4).to(device)
    nested = torch.nested.nested_tensor([torch.ones(2), torch.zeros(3)], layout=torch.jagged).to(device)
    state = {
        "embed": weight,
        "step": torch.tensor(3),
        "head": torch.nn.Parameter(weight.detach()),
        "transposed": weight.t(),
        "parts": TwoTensor(weight[0], weight[1].clone()),
        "nested": nested,
    }
    staged = CpuStager().stage(state)
    assert staged["embed"].data_ptr() == staged["head"].data_ptr() != staged["transposed"].data_ptr()
    assert staged["head"].requires_grad and not staged["embed"].requires_grad
    expected = torch.arange(12.0).view(3, 4)
    assert torch.equal(staged["head"], expected) and torch.equal(staged["transposed"], expected.t())
    assert torch.equal(staged["parts"].a, expected[0]) and torch.equal(staged["parts"].b, expected[1])
    assert staged["nested"].is_cpu and torch.equal(staged["nested"].values(), torch.tensor([1.0, 1, 0, 0, 0]))
    assert staged["step"] == 3


@pytest.mark.parametrize("pin_memory", [True, False, "auto"])
def test_pinned_memory(run_on_accelerator: Run, pin_memory: Any) -> None:
    run_on_accelerator(1, check_pinned_memory, pin_memory)


def check_pinned_memory(rank: int, world_size: int, device: str, pin_memory: Any) -> None:
    stager = CpuStager(pin_memory=pin_memory)
    for step in range(3):
        staged = stager.stage({"w": torch.full((1000,), step, device=device), "b": torch.ones(3, device=device)})
        assert staged["w"].is_pinned() == (pin_memory is not False)
        assert staged["w"].tolist() == [step] * 1000 and staged["b"].tolist() == [1] * 3
        del staged


def test_a_stream_of_its_own(run_late_world: Run) -> None:
    run_late_world(1, check_streams)


def check_streams(rank: int, world_size: int) -> None:
    late.set_delay(0.01)
    weight, other = torch.zeros(100, device="late"), torch.zeros(100, device="late")
    busy = torch.Stream("late")
    with busy:
        for _ in range(100):
            other.fill_(1)
        is_done = busy.record_event()
    with torch.Stream("late"):
        for value in range(5):
            weight.fill_(value)
        staged = CpuStager().stage({"w": weight})
        weight.fill_(77)
    assert staged["w"].tolist() == [4] * 100
    assert not is_done.query()
    late.set_delay(0)
    torch.accelerator.synchronize()


def test_a_device_without_operators(run_on_accelerator: Run) -> None:
    run_on_accelerator(1, check_without_operators)


def check_without_operators(rank: int, world_size: int, device: str) -> None:
    state = mixed_state()
    with mock.patch.object(host_copies, "takes_operators", lambda device: False):
        assert differences(CpuStager().stage(on_device(state, device, every=2)), state) == []


def test_a_failed_copy_leaves_its_memory_free(run_late_world: Run) -> None:
    run_late_world(1, check_failed_copy)


def check_failed_copy(rank: int, world_size: int) -> None:
    stager = CpuStager()
    freed, whole = torch.ones(4, device="late"), torch.ones(1000, device="late")
    freed.untyped_storage().resize_(0)
    with buckets_of(256):
        for _ in range(2):
            with pytest.raises(ValueError, match="was it freed or resized"):
                stager.stage({"whole": whole, "small": torch.ones(3, device="late"), "freed": freed})
        assert stager.stage({"whole": whole})["whole"].tolist() == [1] * 1000


def test_training_goes_on_at_once(run_on_accelerator: Run, tmp_path: Path) -> None:
    run_on_accelerator(1, check_training, tmp_path)


def check_training(rank: int, world_size: int, device: str, path: Path) -> None:
    """The values are still on their way when the save begins, on a stream that only this thread knows."""
    stager = CpuStager()
    state = mixed_state() | large_views() | {"filled": torch.full((100,), 299)}
    with buckets_of(4096, 0.001), torch.Stream(device):
        for step in range(2):
            filled = torch.empty(100, dtype=torch.int64, device=device)
            there = on_device(mixed_state() | large_views(), device, every=3) | {"filled": filled}
            for value in range(300):
                filled.fill_(value)
            saved = tte.async_save(there, path / str(step), stager=stager)
            change(there)
            saved.result(timeout=120)
            loaded = blank(state)
            tte.load(loaded, path / str(step), no_dist=True)
            assert differences(loaded, state) == []


def change(state: dict[str, Any]) -> None:
    for value in state.values():
        if isinstance(value, torch.Tensor) and not (value.is_conj() or value.is_neg()):
            torch.empty(0, dtype=torch.uint8, device=value.device).set_(value.untyped_storage()).fill_(7)


PLACEMENTS = [[Shard(0)], [Shard(1)], [Replicate()], [_StridedShard(0, split_factor=2)]]


def test_dtensors_on_a_mesh(run_on_accelerator: Run, tmp_path: Path) -> None:
    run_on_accelerator(2, check_dtensors, tmp_path)


def check_dtensors(rank: int, world_size: int, device: str, path: Path) -> None:
    mesh = init_device_mesh(device, (world_size,))
    cases = itertools.product((torch.float32, torch.bfloat16, torch.uint8), ((8, 6), (5, 3), (1, 4)), PLACEMENTS)
    whole, state = {}, {}
    for index, (dtype, shape, placements) in enumerate(cases):
        key = f"w{index}"
        whole[key] = random_tensor(shape, dtype, index)
        state[key] = distribute_tensor(whole[key].to(device), mesh, placements, src_data_rank=None)
    locals_of = {key: value.to_local().cpu() for key, value in state.items()}
    stager = CpuStager()
    with buckets_of(256, 0.001):
        staged = stager.stage({"model": state})["model"]
        for key, value in staged.items():
            assert isinstance(value, DTensor) and value.placements == state[key].placements
            assert torch.equal(bits(value.to_local()), bits(locals_of[key]))
        del staged, value
        saved = tte.async_save({"model": state}, path / "tte", stager=stager)
        saved.result(timeout=120)
        planner = tte.SavePlanner()
        saved = dcp.async_save({"model": state}, checkpoint_id=path / "dcp", async_stager=stager, planner=planner)
        for value in state.values():
            value.to_local().zero_()
        getattr(saved, "upload_completion", saved).result(timeout=120)
    for name in ("tte", "dcp"):
        loaded = {"model": blank(whole)}
        tte.load(loaded, path / name, no_dist=True)
        assert differences(loaded["model"], whole) == []
