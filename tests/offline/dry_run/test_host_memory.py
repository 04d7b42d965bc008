"""What a dry run says of the host's memory; benchmarks/bench_dry_run_memory.py measures it."""

from pathlib import Path

import torch

import torchtitan_ext as tte
from torchtitan_ext.offline.dry_run.host_memory import Device, loading_bytes
from torchtitan_ext.state.host_copies import BUCKET_BYTES
from torchtitan_ext.storage.native.fills import BUFFER_BYTES

MIB = 1 << 20


def saving(state: dict[str, object], device: Device | None = None) -> int:
    return tte.dry_run(state, device=device).save.ranks[0].buffer_bytes


def test_tensors_pass_through_buffers_on_their_way_from_a_gpu_alone() -> None:
    state: dict[str, object] = {"w": torch.zeros(4, MIB)}
    assert saving(state) == saving(state, "cpu")
    assert saving(state, "cuda") == saving(state, "cpu") + 16 * MIB
    larger: dict[str, object] = {"w": torch.zeros(17, MIB, device="meta")}
    assert saving(larger, "cuda") == saving(larger, "cpu") + 2 * BUCKET_BYTES
    assert "cuda" not in str(tte.dry_run(state).device)
    assert tte.dry_run({"w": torch.zeros(4, device="meta")}).device == "cuda"


def test_elements_that_lie_otherwise_are_packed_in_blocks() -> None:
    packed = saving({"w": torch.zeros(MIB, 4).t()}) - saving({"w": torch.zeros(4, MIB)})
    assert MIB // 2 < packed <= 8 * MIB


def test_values_are_held_as_they_are_pickled() -> None:
    assert saving({"text": "x" * (8 * MIB)}) - saving({"text": "x"}) in range(8 * MIB, 10 * MIB)


def test_what_torch_casts_or_goes_to_a_gpu_is_read_beside_its_target(tmp_path: Path) -> None:
    for saved in (torch.float32, torch.int32):
        state = {f"w{index}": torch.zeros(1024, dtype=saved) for index in range(8)}
        tte.save(state, tmp_path / str(saved), no_dist=True)

    def loading(saved: torch.dtype, dtype: torch.dtype, device: Device) -> int:
        targets = {f"w{index}": torch.empty(1024, dtype=dtype) for index in range(8)}
        found = tte.dry_run(targets, checkpoint=tmp_path / str(saved), device=device)
        return found.load.ranks[0].buffer_bytes

    plain = loading(torch.float32, torch.float32, "cpu")
    assert loading(torch.float32, torch.float64, "cpu") == plain
    assert loading(torch.float32, torch.float32, "cuda") - plain == 8 * 4096
    assert loading(torch.float32, torch.float64, "cuda") - plain == 8 * 4096
    counted = loading(torch.int32, torch.int32, "cpu")
    assert loading(torch.int32, torch.int64, "cpu") - counted == 8 * 4096


def test_no_more_is_held_than_the_buffers_of_casts() -> None:
    def loading(staged_bytes: int, device: Device) -> int:
        return loading_bytes(
            num_reads=100,
            num_bytes=100 * MIB,
            value_bytes=[],
            staged_bytes=staged_bytes,
            device=device,
            is_packed=False,
            metadata_bytes=0,
            index_bytes=0,
        )

    assert loading(1 << 40, "cpu") - loading(0, "cpu") == BUFFER_BYTES
    assert loading(1 << 40, "cuda") - loading(0, "cuda") == 2 * BUCKET_BYTES


def test_the_metadata_of_many_ranks_is_held_by_who_writes_and_who_reads_it(tmp_path: Path) -> None:
    with torch.device("meta"):
        state = {f"layers.{index}.w": torch.empty(512, 8) for index in range(200)}
    save = tte.dry_run(state, mesh={"dp": 512}, device="cpu").save
    first, second = save.ranks[:2]
    assert first.buffer_bytes - second.buffer_bytes > 4 * save.index_bytes > 4 * save.metadata_bytes > 4 * MIB
