"""Staging of an accelerator's tensors: bytes right whatever the streams' delay, and few copies.

Runs on the device "late" (``late_device.cpp``), and on a GPU where there is one.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import late
import pytest
import torch
from states import DTYPES, bits, blank, differences, mixed_state, on_device, random_tensor

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
    return state | {"cube": random_tensor((3, 40, 50), torch.int16).movedim(0, 2), "row": torch.rand(2, 3000)[:, ::2]}


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


@pytest.mark.parametrize("host_memory_bytes", [None, 100_000])
def test_saves_in_the_background(run_on_accelerator: Run, tmp_path: Path, host_memory_bytes: int | None) -> None:
    """The second stager has no room for all: the rest is written from the device before the call returns."""
    run_on_accelerator(1, check_save, tmp_path, host_memory_bytes)


def check_save(rank: int, world_size: int, device: str, path: Path, host_memory_bytes: int | None) -> None:
    state = mixed_state()
    stager = CpuStager(host_memory_bytes)
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
