"""Loads with ``share_reads``: every byte is read once, by a rank that wants it, and the results are the same."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from boxed_tensors import cut, parts
from models import (
    BY_NAME,
    UNEVEN,
    Layout,
    build_model,
    build_optimizer,
    local_of,
    poison,
    shards_of,
    take_steps,
    trained,
    training_state,
)
from random_layouts import build, random_layouts, random_truth
from reference import same_bits
from safetensors.torch import save_file
from tier import num_cases
from torch.distributed.checkpoint import FileSystemReader, HuggingFaceStorageReader
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import torchtitan_ext as tte
from torchtitan_ext.checkpoint.operation import share_reads as sharing
from torchtitan_ext.errors import CheckpointFailedError, StateRefusedError, WrongValueError
from torchtitan_ext.storage import FileReader

RunWorld = Callable[..., list[Any]]

NUM_TENSORS = 12


def save_many(rank: int, world_size: int, seeds: list[int], folder: Path) -> None:
    for seed in seeds:
        truth = random_truth(seed, NUM_TENSORS)
        state, orders = build(truth, random_layouts(seed, world_size, truth))
        tte.save(state, folder / str(seed), planner=tte.SavePlanner(layouts=orders), fingerprints=True)


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().contiguous().view(-1).view(torch.uint8).clone()


def bytes_read(reader: FileReader) -> int:
    amounts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(amounts, reader.num_bytes_read)
    return sum(amounts)


def load_many(rank: int, world_size: int, seeds: list[int], folder: Path) -> None:
    for seed in seeds:
        truth, path = random_truth(seed, NUM_TENSORS), folder / str(seed)
        state, orders = build(truth, random_layouts(seed + 1000, world_size, truth))
        loaded = []
        for share_reads in (False, True):
            poison(state)
            reader, planner = FileReader(path), tte.LoadPlanner(layouts=orders)
            tte.load(state, path, planner=planner, storage_reader=reader, share_reads=share_reads, prove=True)
            loaded.append([bits_of(local_of(value)) for value in state.values()])
            if share_reads:
                assert bytes_read(reader) == sum(value.nbytes for value in truth.values()), (seed, share_reads)
        assert all(map(torch.equal, *loaded)), seed


@pytest.mark.sampled(0.34)
@pytest.mark.parametrize(("saving", "loading"), [(4, 2), (2, 4), (1, 4)])
def test_random_states_are_read_once_and_equal(run_world: RunWorld, tmp_path: Path, saving: int, loading: int) -> None:
    seeds = list(range(num_cases(8)))
    run_world(saving, save_many, seeds, tmp_path)
    run_world(loading, load_many, seeds, tmp_path)


DTYPES = [
    *(torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.bool, torch.int64, torch.uint16),
]


def kinds(rank: int, *, value: int) -> dict[str, Any]:
    """Targets of odd kinds; each rank's are alike but for their memory."""
    state: dict[str, Any] = {}
    for dtype in DTYPES:
        numbers = torch.arange(600).reshape(20, 30) % 7 + value
        state[f"{dtype}"] = numbers.to(dtype) if dtype != torch.bool else numbers % 2 == 0
        state[f"0-d {dtype}"] = state[f"{dtype}"][3, 5].clone()
    state["no elements"] = torch.zeros(0, 4)
    state["transposed"] = torch.full((8, 6), 1.5 + value).t() if rank == 1 else torch.full((6, 8), 1.5 + value)
    state["columns"] = torch.full((6, 9), 2.5 + value)[:, 2:7]
    state["conj"] = torch.full((5, 2), complex(1, value)).conj()
    tied = torch.arange(40.0).reshape(5, 8) + value
    state["tied"], state["also tied"] = tied, tied
    buffer = torch.arange(10.0) + value
    state["buffer"], state["part of it"] = buffer, buffer[2:5]
    state["cast"] = torch.full((7, 3), 4.0 + value, dtype=torch.float64 if value == 0 else torch.float32)
    state["number"], state["text"] = value, f"text {value}"
    return {"model": state, "step": value}


def load_kinds(rank: int, world_size: int, path: Path) -> None:
    truth = kinds(0, value=3)
    if rank == 0:
        tte.save(truth, path, no_dist=True)
    dist.barrier()
    for share_reads in (False, True):
        state = kinds(rank, value=0)
        report = tte.load(state, path, share_reads=share_reads, policy=tte.elastic.ElasticPolicy())
        assert (report.sharing is not None and report.sharing.chosen) == share_reads, report.sharing
        assert state["step"] == 3 and (state["model"]["number"], state["model"]["text"]) == (3, "text 3")
        for key, expected in truth["model"].items():
            value = state["model"][key]
            if isinstance(value, torch.Tensor):
                assert torch.equal(bits_of(value.to(expected.dtype)), bits_of(expected)), (share_reads, key)
        assert state["model"]["tied"] is state["model"]["also tied"]


def test_odd_kinds_of_targets(run_world: RunWorld, tmp_path: Path) -> None:
    run_world(3, load_kinds, tmp_path / "step")


def load_differently(rank: int, world_size: int, path: Path) -> None:
    state = {"w": torch.ones(4)}
    tte.save(state, path)
    for _ in range(2):
        with pytest.raises(StateRefusedError, match="share_reads.*is True on rank 0, False on rank 1"):
            tte.load(state, path, share_reads=rank == 0)
    assert state["w"].tolist() == [1] * 4


def test_ranks_that_disagree_are_refused(run_world: RunWorld, tmp_path: Path) -> None:
    run_world(2, load_differently, tmp_path / "step")


def load_damaged(rank: int, world_size: int, path: Path) -> str:
    state = {f"w{number}": torch.full((1 << 19,), float(number)) for number in range(8)}  # 16 MiB
    tte.save(state, path)
    if rank == 0:
        for file in path.glob("*.distcp"):
            content = bytearray(file.read_bytes())
            content[len(content) // 2] ^= 4
            file.write_bytes(content)
    dist.barrier()
    with pytest.raises(CheckpointFailedError) as caught:
        tte.load(state, path, share_reads=True)
    tte.load(state, path, storage_reader=FileReader(path, verify="none"), share_reads=True)  # the group goes on
    return str(caught.value)


def test_a_flipped_bit_is_one_error_on_all_ranks(run_world: RunWorld, tmp_path: Path) -> None:
    texts = run_world(4, load_damaged, tmp_path / "step")
    assert len(set(texts)) == 1
    assert "DamagedCheckpointError" in texts[0] and ".distcp" in texts[0]


class Counted:
    """Counts the elements that a reader of others is asked for."""

    num_elements = 0

    def read_data(self, plan: LoadPlan, planner: Any) -> Any:
        self.num_elements += sum(item.lengths.numel() for item in plan.items if item.type == LoadItemType.TENSOR)
        return super().read_data(plan, planner)  # type: ignore[misc]


class CountedFiles(Counted, FileSystemReader): ...


class CountedSafetensors(Counted, HuggingFaceStorageReader): ...


def sum_over_ranks(number: int) -> int:
    numbers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(numbers, number)
    return sum(numbers)


def load_by_others(rank: int, world_size: int, folder: Path) -> None:
    truth = {f"w{number}": torch.arange(40.0 + number).reshape(-1, 1) * torch.ones(4) for number in range(5)}
    mesh = init_device_mesh("cpu", (2, 2))
    saved = {name: distribute_tensor(value, mesh, [Replicate(), Shard(0)]) for name, value in truth.items()}
    dcp.save(saved, checkpoint_id=folder / "dcp")
    if rank == 0:
        (folder / "hf").mkdir()
        save_file(truth, folder / "hf" / "model.safetensors")
    dist.barrier()
    for placements in ([Replicate(), Shard(0)], [Replicate(), Replicate()], [Shard(1), Replicate()]):
        for reader in (CountedFiles(folder / "dcp"), CountedSafetensors(str(folder / "hf"))):
            state = {name: distribute_tensor(torch.zeros_like(one), mesh, placements) for name, one in truth.items()}
            tte.load(state, storage_reader=reader, share_reads=True)
            for name, value in state.items():
                assert torch.equal(value.full_tensor(), truth[name]), (placements, name)
            assert sum_over_ranks(reader.num_elements) == sum(value.numel() for value in truth.values())


def test_readers_of_others_are_asked_once(run_world: RunWorld, tmp_path: Path) -> None:
    run_world(4, load_by_others, tmp_path)


def load_windows(rank: int, world_size: int, path: Path) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    truth = {name: torch.rand(11, 5, generator=torch.Generator().manual_seed(ord(name))) for name in "abcd"}
    tte.save({"m": truth}, path, fingerprints=True)
    # Window of rows that overlap in part, replicas, shards, and a meta tensor.
    begin, end = rank, 11 - (world_size - 1 - rank)
    state = {
        "m": {
            "a": cut(torch.zeros(11, 5), [((begin, 0), (end - begin, 5))]),
            "b": torch.empty(11, 5, device="meta"),
            "c": distribute_tensor(torch.zeros(11, 5), mesh, [Shard(0)]),
            "d": torch.zeros(11, 5),
        }
    }
    reader = FileReader(path)
    report = tte.load(state, tte.elastic.Source(storage_reader=reader), share_reads=True, prove=True)
    assert report.sharing is not None and report.sharing.chosen
    assert "one rank read what several want" in str(report)
    (window,) = parts(state["m"]["a"])
    assert torch.equal(window, truth["a"][begin:end])
    assert torch.equal(state["m"]["c"].full_tensor(), truth["c"])
    assert torch.equal(state["m"]["b"], truth["b"]) and torch.equal(state["m"]["d"], truth["d"])
    assert bytes_read(reader) == 4 * 11 * 5 * 4


def test_windows(run_world: RunWorld, tmp_path: Path) -> None:
    run_world(3, load_windows, tmp_path / "step")


def load_trained(rank: int, world_size: int, layout: Layout, path: Path) -> list[str]:
    """A model with its optimizer; returns what is not as it was."""
    model = build_model(layout, UNEVEN)
    saved = trained(model)
    truth = {name: tensor.clone() for name, (_, _, tensor) in shards_of(saved).items()}
    tte.save(saved, path)
    optimizer = build_optimizer(model, lr=0.5)
    take_steps(model, optimizer)
    state = training_state(model, optimizer)
    poison(state)
    reader = FileReader(path)
    tte.load(state, storage_reader=reader, share_reads=True)
    metadata = FileReader(path).read_metadata()
    expected = 0
    for index, info in metadata.storage_data.items():
        if isinstance(metadata.state_dict_metadata[index.fqn], BytesStorageMetadata):
            expected += info.length * world_size  # each rank reads values that are no tensors
    for entry in metadata.state_dict_metadata.values():
        if isinstance(entry, TensorStorageMetadata):
            expected += entry.size.numel() * entry.properties.dtype.itemsize
    assert bytes_read(reader) == expected
    loaded = shards_of(state)
    return [name for name in truth if not same_bits(loaded[name][2], truth[name])]


def test_a_trained_state(run_world: RunWorld, tmp_path: Path) -> None:
    layout = BY_NAME["hsdp2x2"]
    assert not any(run_world(math.prod(layout.mesh_shape), load_trained, layout, tmp_path / "step"))


def load_on_hosts(rank: int, world_size: int, path: Path) -> None:
    truth = {"w": torch.arange(1000.0), "v": torch.arange(7)}
    tte.save(truth, path)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(sharing, "host_digest", lambda: b"one" if rank < 2 else b"two")
        for share_reads, times in ((False, 4), (True, 1)):
            state = {name: torch.zeros_like(value) for name, value in truth.items()}
            reader, policy = FileReader(path), tte.elastic.ElasticPolicy()
            tte.load(state, storage_reader=reader, share_reads=share_reads, policy=policy)
            assert bytes_read(reader) == times * (4000 + 56)
            assert all(torch.equal(state[name], value) for name, value in truth.items())


def test_ranks_of_two_hosts_read_once(run_world: RunWorld, tmp_path: Path) -> None:
    run_world(4, load_on_hosts, tmp_path / "step")


def load_on_device(rank: int, world_size: int, device: str, path: Path) -> None:
    """Targets in the memory of an accelerator, beside some on the CPU."""
    truth = {f"w{number}": torch.arange(1000.0 * (number + 1)).reshape(-1, 10) for number in range(6)}
    tte.save(truth, path)
    state = {name: torch.zeros_like(value, device="cpu" if name == "w3" else device) for name, value in truth.items()}
    state["w4"] = torch.zeros(10, 500, device=device).t()
    reader = FileReader(path)
    tte.load(state, storage_reader=reader, share_reads=True)
    assert all(torch.equal(state[name].cpu(), value) for name, value in truth.items())
    if device == "cuda":
        assert bytes_read(reader) == sum(value.nbytes for value in truth.values())


def test_targets_on_an_accelerator(run_on_accelerator: RunWorld, tmp_path: Path) -> None:
    run_on_accelerator(2, load_on_device, tmp_path / "step")


def test_arguments_are_checked(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="share_reads='yes', expected True or False"):
        tte.load({}, tmp_path, share_reads="yes")  # type: ignore[arg-type]
    with pytest.raises(WrongValueError, match="share_reads=True and a DefaultLoadPlanner, expected a LoadPlanner"):
        tte.load({}, tmp_path, planner=DefaultLoadPlanner(), share_reads=True)
