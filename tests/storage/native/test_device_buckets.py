"""Saves and loads of an accelerator's tensors: bytes right whatever the streams' delay, and few copies.

They run on the device "late" (``late_device.cpp``), and on a GPU where there is one.
"""

import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import late
import pytest
import torch
import torch.distributed.checkpoint as dcp
from casts import without_nan
from states import DTYPES, bits, blank, differences, load, mixed_state, on_device, on_host, random_tensor, save
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import torchtitan_ext as tte
from torchtitan_ext import _core, transforms
from torchtitan_ext.state.host_copies import row_major_boxes, takes_operators
from torchtitan_ext.storage import FileReader, FileWriter
from torchtitan_ext.storage.native import device_buckets, fills
from torchtitan_ext.storage.native.device_buckets import OutgoingBuckets
from torchtitan_ext.storage.raw_tensor import ELEMENT_TYPES, NAMES


@contextmanager
def buckets_of(num_bytes: int, delay_seconds: float = 0.0005) -> Iterator[None]:
    if "late" in vars(torch):
        late.set_delay(delay_seconds)
    with mock.patch.object(device_buckets, "BUCKET_BYTES", num_bytes):
        yield


@pytest.mark.parametrize("bucket_bytes", [256, 4096, 64 << 20])
def test_every_kind_of_tensor(run_on_accelerator: Callable[..., Any], tmp_path: Path, bucket_bytes: int) -> None:
    run_on_accelerator(1, check_every_kind, tmp_path, bucket_bytes)


def check_every_kind(rank: int, world_size: int, device: str, path: Path, bucket_bytes: int) -> None:
    state = mixed_state()
    if bucket_bytes < 4096:
        del state["two_pages"]  # thousands of buckets
    with buckets_of(bucket_bytes):
        save(on_device(state, device), FileWriter(path / "device"), tte.SavePlanner())
        save(on_device(state, device, every=3), FileWriter(path / "both"), tte.SavePlanner())
        for name in ("device", "both"):
            loaded = load(blank(state), FileReader(path / name, "all"), tte.LoadPlanner())
            assert differences(loaded, state) == []
            for every, verify in ((1, "auto"), (3, "all")):
                targets = on_device(blank(state), device, every=every)
                load(targets, FileReader(path / name, verify), tte.LoadPlanner())
                assert differences(on_host(targets), state) == []
        stock = load(blank(state), dcp.FileSystemReader(path / "both"), tte.LoadPlanner())
        assert differences(stock, state) == []


@pytest.mark.parametrize("bucket_bytes", [4096, 64 << 20])
def test_what_passes_through_buckets_is_proved(
    run_on_accelerator: Callable[..., Any], tmp_path: Path, bucket_bytes: int
) -> None:
    run_on_accelerator(1, check_proof, tmp_path, bucket_bytes)


def check_proof(rank: int, world_size: int, device: str, path: Path, bucket_bytes: int) -> None:
    state = mixed_state()
    with buckets_of(bucket_bytes):
        for every in (1, 3):
            tte.save(on_device(state, device, every=every), path / str(every), fingerprints=True)
            report = tte.load(blank(state), path / str(every), prove=True)
            assert report is not None and report.proof is not None and len(report.proof.proved) > 20
            on_host_alone = set(report.proof.unproved)
            report = tte.load(on_device(blank(state), device), path / str(every), prove=True)
            assert report is not None and report.proof is not None
            assert set(report.proof.unproved) == on_host_alone


@pytest.mark.parametrize("bucket_bytes", [256, 4096, 64 << 20])
def test_strided_targets(run_on_accelerator: Callable[..., Any], tmp_path: Path, bucket_bytes: int) -> None:
    run_on_accelerator(1, check_strided_targets, tmp_path, bucket_bytes)


def check_strided_targets(rank: int, world_size: int, device: str, path: Path, bucket_bytes: int) -> None:
    state = {str(dtype): random_tensor((9, 70), dtype) for dtype in DTYPES}
    state |= {"row": random_tensor((1, 3000), torch.int32), "cube": random_tensor((3, 40, 50), torch.int16)}
    save(state, FileWriter(path))
    targets = {}
    for key, value in blank(state).items():
        whole = torch.full((2, *value.shape[1:-1], value.shape[0], 3 * value.shape[-1]), 7).to(value.dtype).to(device)
        targets[key] = whole.select(0, 1).movedim(-2, 0)[..., 1::3]
        assert targets[key].shape == value.shape
    with buckets_of(bucket_bytes):
        load(targets, FileReader(path, "all"), tte.LoadPlanner())
    assert differences(on_host(targets), state) == []


def test_targets_of_other_dtypes_are_cast(run_on_accelerator: Callable[..., Any], tmp_path: Path) -> None:
    run_on_accelerator(1, check_casts, tmp_path)


def check_casts(rank: int, world_size: int, device: str, path: Path) -> None:
    state = {f"w{index}": torch.randn(50, 7) for index in range(20)}
    save(state, FileWriter(path))
    dtypes = itertools.cycle([torch.float64, torch.float32, torch.bfloat16])
    for bucket_bytes in (1024, 4096, 64 << 20):
        targets = {key: torch.zeros(50, 7, dtype=next(dtypes), device=device) for key in state}
        with buckets_of(bucket_bytes, 0.002):
            load(targets, FileReader(path), dcp.DefaultLoadPlanner())
        assert differences(on_host(targets), {key: value.to(targets[key].dtype) for key, value in state.items()}) == []


def test_transformed_targets(run_on_accelerator: Callable[..., Any], tmp_path: Path) -> None:
    run_on_accelerator(1, check_transforms, tmp_path)


def check_transforms(rank: int, world_size: int, device: str, path: Path) -> None:
    """Turned, cast and scaled on the device, as the host does it."""
    state: dict[str, torch.Tensor] = {}
    for index in range(6):
        state[f"w{index}"] = random_tensor((24, 40), torch.float32, index).to(torch.float8_e4m3fn)
        state[f"s{index}"] = random_tensor((3, 5), torch.float32, 10 + index)
        state[f"b{index}"] = random_tensor((9, 20), torch.bfloat16, index)
    save(state, FileWriter(path))
    quantised = [transforms.dequantize([8, 8], dtype="bfloat16"), transforms.transpose(0, 1)]
    transform = transforms.Transform(
        [
            transforms.Rule(["w*", "s*"], "w*", quantised),
            transforms.Rule("b*", "b*", [transforms.transpose(0, 1), transforms.cast("float32")]),
        ]
    )
    targets = {f"w{index}": torch.zeros(40, 24, dtype=torch.bfloat16) for index in range(6)}
    targets |= {f"b{index}": torch.zeros(20, 9) for index in range(6)}
    targets |= {"w2": torch.zeros(40, 24, dtype=torch.float64), "b3": torch.zeros(20, 18)[:, ::2]}
    wanted = {key: torch.zeros_like(value) for key, value in targets.items()}
    tte.load(wanted, path, transform=transform, no_dist=True)
    assert all(value.any() for value in wanted.values())
    for bucket_bytes in (256, 4096, 64 << 20):
        there = on_device(targets, device)
        with buckets_of(bucket_bytes, 0.002):
            tte.load(there, path, transform=transform, no_dist=True)
        assert differences(of_equal_nans(on_host(there)), of_equal_nans(wanted)) == []
    # The smallest bucket has room for an element and its scale.
    save({"w0": torch.ones(1, 1).to(torch.float8_e4m3fn), "s0": torch.full((1, 1), 3.0)}, FileWriter(path / "one"))
    one = {"w0": torch.zeros(1, 1, dtype=torch.bfloat16, device=device)}
    one_rule = transforms.Transform([transforms.Rule(["w*", "s*"], "w*", quantised)])
    tte.load(one, path / "one", transform=one_rule, no_dist=True)
    assert one["w0"].item() == 3


def of_equal_nans(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Which bits a NaN gets by a cast or a product, each device decides for itself."""
    return {key: without_nan(value) for key, value in state.items()}


def test_tied_targets(run_on_accelerator: Callable[..., Any], tmp_path: Path) -> None:
    run_on_accelerator(1, check_tied_targets, tmp_path)


def check_tied_targets(rank: int, world_size: int, device: str, path: Path) -> None:
    weight, other = torch.randn(8, 4).to(device), torch.randn(5).to(device)
    state = {"embed": weight, "head": weight, "other": other}
    tte.save(state, path, no_dist=True)
    filled = torch.zeros(8, 4, device=device)
    targets = {"embed": filled, "head": filled, "other": torch.zeros(5, device=device)}
    tte.load(targets, path, no_dist=True)
    assert torch.equal(filled.cpu(), weight.cpu()) and torch.equal(targets["other"].cpu(), other.cpu())


def test_thousands_of_small_tensors_are_a_few_copies(run_late_world: Callable[..., Any], tmp_path: Path) -> None:
    (counts,) = run_late_world(1, count_copies, tmp_path)
    print(counts)
    assert all(copies.to_host <= 10 and copies.to_device <= 10 for copies in counts.values())


def count_copies(rank: int, world_size: int, path: Path) -> dict[str, late.Copies]:
    state = {f"w{index}": random_tensor((32, 16), torch.float32, index) for index in range(4000)}
    late.set_delay(0)
    there, targets = on_device(state, "late"), {key: torch.zeros(32, 16, device="late") for key in state}
    counts = {}
    torch.accelerator.synchronize()
    late.set_delay(0.0015)
    late.count_copies()
    tte.save(there, path / "tte", no_dist=True)
    counts["tte.save"] = late.count_copies()
    tte.load(targets, path / "tte", no_dist=True)
    counts["tte.load"] = late.count_copies()
    save(there, FileWriter(path / "dcp"))
    counts["dcp.save"] = late.count_copies()
    load(targets, FileReader(path / "dcp"))
    counts["dcp.load"] = late.count_copies()
    late.set_delay(0)
    assert differences(on_host(targets), state) == []
    return counts


def test_a_bucket_is_the_memory_of_the_device_that_is_needed(
    run_late_world: Callable[..., Any], tmp_path: Path
) -> None:
    run_late_world(1, check_memory, tmp_path)


def check_memory(rank: int, world_size: int, path: Path) -> None:
    bucket_bytes = 256 << 10
    state = {f"w{index}": torch.randn(33, 1000, device="late").t() for index in range(40)}
    targets = {key: torch.zeros(33, 1000, device="late").t() for key in state}
    with buckets_of(bucket_bytes):
        torch.accelerator.synchronize()
        before, _ = late.count_bytes()
        tte.save(state, path, no_dist=True)
        _, saving = late.count_bytes()
        tte.load(targets, path, no_dist=True)
        torch.accelerator.synchronize()
        after, loading = late.count_bytes()
    assert before == after
    for peak in (saving, loading):
        assert bucket_bytes <= peak - before <= bucket_bytes + 4096


def test_a_missing_wait_shows(run_late_world: Callable[..., Any], tmp_path: Path) -> None:
    run_late_world(1, check_missing_waits, tmp_path)


def check_missing_waits(rank: int, world_size: int, path: Path) -> None:
    state = {f"w{index}": random_tensor((64, 64), torch.float32, index) for index in range(16)}
    there = on_device(state, "late")

    def saved_and_loaded(name: str) -> bool:
        targets = {key: torch.zeros(64, 64, device="late") for key in state}
        tte.save(there, path / name, no_dist=True)
        tte.load(targets, path / name, no_dist=True)
        return differences(on_host(targets), state) == []

    with buckets_of(32 << 10, 0.01):
        assert saved_and_loaded("right")
        with mock.patch.object(device_buckets, "_recorded", lambda device: mock.Mock()):
            assert not saved_and_loaded("wrong")


def test_all_streams_see_what_was_loaded(run_on_accelerator: Callable[..., Any], tmp_path: Path) -> None:
    """On the stream of the load reads come behind it; on another one they are right if the load has waited."""
    run_on_accelerator(1, check_another_stream, tmp_path)


def check_another_stream(rank: int, world_size: int, device: str, path: Path) -> None:
    state = {f"w{index}": torch.randn(50, 7) for index in range(16)}
    save(state, FileWriter(path))
    # Each of them is a cast of its own, the last one late.
    targets = {key: torch.zeros(50, 7, dtype=torch.float64, device=device) for key in state}
    torch.accelerator.synchronize()
    with buckets_of(64 << 20, 0.01):
        load(targets, FileReader(path), dcp.DefaultLoadPlanner())
        with torch.Stream(device):
            there = on_host({key: targets[key] for key in reversed(targets)})
    assert differences(there, {key: value.double() for key, value in state.items()}) == []


def test_a_device_without_operators(run_on_accelerator: Callable[..., Any], tmp_path: Path) -> None:
    run_on_accelerator(1, check_without_operators, tmp_path)


def check_without_operators(rank: int, world_size: int, device: str, path: Path) -> None:
    state = mixed_state()
    with (
        buckets_of(4096, 0.001),
        mock.patch.object(device_buckets, "takes_operators", lambda device: False),
        mock.patch.object(fills, "takes_operators", lambda device: False),
    ):
        save(on_device(state, device), FileWriter(path), tte.SavePlanner())
        targets = on_device(blank(state), device)
        load(targets, FileReader(path, "all"), tte.LoadPlanner())
    assert differences(on_host(targets), state) == []


def test_what_takes_operators(run_late_world: Callable[..., Any]) -> None:
    assert run_late_world(1, ask_devices) == [(True, False, False)]
    assert not takes_operators(torch.device("cpu"))


def ask_devices(rank: int, world_size: int) -> tuple[bool, bool, bool]:
    return tuple(takes_operators(torch.device(name)) for name in ("late:0", "cpu", "meta"))


PLACEMENTS = [[Shard(0)], [Shard(1)], [Replicate()], [_StridedShard(0, split_factor=2)]]


def test_dtensors_on_a_mesh(run_on_accelerator: Callable[..., Any], tmp_path: Path) -> None:
    run_on_accelerator(2, check_dtensors, tmp_path)


def check_dtensors(rank: int, world_size: int, device: str, path: Path) -> None:
    mesh = init_device_mesh(device, (world_size,))
    whole = {
        f"{position}.{dtype}.{shape}": random_tensor(shape, dtype, position)
        for position, (dtype, shape) in enumerate(
            itertools.product((torch.float32, torch.bfloat16, torch.uint8), ((8, 6), (5, 3), (1, 4)))
        )
    }

    def sharded(tensors: dict[str, torch.Tensor], seed: int) -> dict[str, Any]:
        draw = random.Random(seed)
        return {
            key: distribute_tensor(value.to(device), mesh, draw.choice(PLACEMENTS), src_data_rank=None)
            for key, value in tensors.items()
        }

    with buckets_of(256, 0.001):
        for seed in range(3):
            saved, targets = sharded(whole, seed), sharded(blank(whole), seed + 10)
            expected = sharded(whole, seed + 10)
            tte.save({"model": saved, "step": seed}, path / f"tte-{seed}")
            loaded = {"model": targets, "step": -1}
            tte.load(loaded, path / f"tte-{seed}")
            assert loaded["step"] == seed
            assert different_shards(targets, expected) == []
            targets = sharded(blank(whole), seed + 10)
            dcp.save({"model": saved}, storage_writer=FileWriter(path / f"dcp-{seed}"), planner=tte.SavePlanner())
            dcp.load(
                {"model": targets}, storage_reader=FileReader(path / f"dcp-{seed}", "all"), planner=tte.LoadPlanner()
            )
            assert different_shards(targets, expected) == []


def different_shards(found: dict[str, DTensor], expected: dict[str, DTensor]) -> list[str]:
    return [
        key
        for key in expected
        if not torch.equal(bits(found[key].to_local().cpu()), bits(expected[key].to_local().cpu()))
    ]


class Seen(tte.SavePlanner):
    """Notes which tensors a writer got contiguous."""

    def resolve_data(self, write_item: WriteItem) -> Any:
        value = super().resolve_data(write_item)
        vars(self).setdefault("seen", set()).add(value.is_contiguous())
        return value


def test_stock_writers_get_packed_tensors(run_on_accelerator: Callable[..., Any], tmp_path: Path) -> None:
    run_on_accelerator(1, check_stock_writer, tmp_path)


def check_stock_writer(rank: int, world_size: int, device: str, path: Path) -> None:
    state = {str(dtype): random_tensor((5, 7), dtype)[:, 1:4] for dtype in DTYPES}
    there = on_device(state, device)
    for writer, contiguous in ((dcp.FileSystemWriter(path / "stock"), True), (FileWriter(path / "ours"), False)):
        planner = Seen()
        save(there, writer, planner)
        assert planner.seen == {contiguous}
        assert differences(load(blank(state), dcp.FileSystemReader(writer.path)), state) == []


@pytest.mark.parametrize("bucket_bytes", [64, 4096, 1 << 20])
def test_tensors_of_other_devices_pass_through_buckets(tmp_path: Path, bucket_bytes: int) -> None:
    """The way of an accelerator's tensors, with tensors of the CPU."""
    path = str(tmp_path / "file")
    state = {str(dtype): random_tensor((33, 65), dtype) for dtype in DTYPES} | {"t": torch.rand(9, 700).t()}
    records = _core.RecordWriter(path.encode(), 1 << 16, 2, False)
    buckets = OutgoingBuckets(bucket_bytes, records.write_queued)
    for name, tensor in state.items():
        key, sizes = (name, None, None), tensor.shape
        buckets.then(
            lambda key=key, sizes=sizes, dtype=tensor.dtype: records.begin_tensor(
                key, NAMES[dtype], sizes, ELEMENT_TYPES[dtype]
            )
        )
        buckets.add(tensor, records.add_bytes)
        buckets.then(records.end_tensor)
    buckets.finish()
    written = records.finish("file", bytes(16), 0)
    reader = _core.RunReader()
    file = reader.add_checked_file(path, written, bytes(16))
    targets = {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in state.items()}
    for one in _core.parse_records(written):
        target, zero = targets[one.fqn], (0,) * len(one.sizes)
        stored = _core.StoredTensor(one.dtype, one.sizes, target.stride(), one.data_offset)
        reader.add_box(file, stored, zero, one.sizes, target.data_ptr(), target.stride())
    assert reader.read(2, "all") == []
    assert differences(targets, state) == []


@pytest.mark.parametrize("shape", [(), (0, 3), (7,), (4, 5), (3, 1, 4), (2, 3, 4, 5), (1, 100)])
def test_row_major_boxes(shape: tuple[int, ...]) -> None:
    for tensor in (torch.arange(torch.Size(shape).numel()).view(shape), torch.randn(*shape, 2)[..., 0]):
        for max_elements in (1, 2, 3, 7, 20, 1000):
            found = list(row_major_boxes(tensor, max_elements))
            assert torch.equal(torch.cat([box.reshape(-1) for _, box in found]), tensor.reshape(-1))
            for offsets, box in found:
                assert box.numel() <= max_elements and box.dim() == tensor.dim() == len(offsets)
                if box.numel():
                    inside = tuple(slice(begin, begin + size) for begin, size in zip(offsets, box.shape, strict=True))
                    assert torch.equal(tensor[inside], box)
