"""Safetensors that ranks write together, whatever their layouts, read by the safetensors library bit for bit.

Twenty-four random states at commit, thousands with ``make soak``.
"""

import json
import os
import random
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import boxed_tensors
import pytest
import torch
import torch.distributed as dist
from lost_worlds import strike
from models import BY_NAME, EVEN, UNEVEN, build_model, build_whole, differences, poison, random_whole
from random_layouts import SideOfTransfer, build, random_layouts
from reference import same_bits
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from safetensors.torch import save_model as save_by_the_library
from tier import SOAK, num_cases
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.testing._internal.two_tensor import TwoTensor

import torchtitan_ext as tte
from torchtitan_ext import transforms
from torchtitan_ext.errors import (
    CheckpointFailedError,
    DifferentCallsError,
    LostRankError,
    ReplicaMismatchError,
    StateRefusedError,
    WrongValueError,
)
from torchtitan_ext.storage.raw_tensor import DTYPES
from torchtitan_ext.storage.weights import boxes as boxes_module
from torchtitan_ext.storage.weights import one_writer as one_writer_module
from torchtitan_ext.storage.weights.writer import SafetensorsWriter
from torchtitan_ext.transforms import Rule, Transform
from torchtitan_ext.transforms.weights import TransformedTensors

FORMAT_DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.float8_e8m0fnu, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16,
    torch.uint8, torch.bool, torch.complex64,
]  # fmt: skip
INDEX = "model.safetensors.index.json"


def read_by_the_library(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a directory, under all their names; its index, if there is one, names those that are written."""
    files = {name: load_file(path / name) for name in sorted(os.listdir(path)) if name.endswith(".safetensors")}
    tensors = {fqn: tensor for part in files.values() for fqn, tensor in part.items()}
    tied = {}
    for name in files:
        with safe_open(path / name, "pt") as file:
            tied |= {fqn: tensors[first] for fqn, first in file.metadata().items() if fqn != "format"}
    assert not tied.keys() & tensors.keys()
    if (path / INDEX).exists():
        content = json.loads((path / INDEX).read_text())
        assert content["weight_map"] == {fqn: name for name, part in files.items() for fqn in part}
        assert content["metadata"]["total_size"] == sum(x.nbytes for part in files.values() for x in part.values())
    else:
        assert list(files) == ["model.safetensors"]
    return tensors | tied


def assert_same(found: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]) -> None:
    assert found.keys() == truth.keys()
    for fqn, whole in truth.items():
        assert same_bits(found[fqn], whole.detach().contiguous()), fqn


def save_model(rank: int, world_size: int, layout: str, sizes: Any, path: Path, is_async: bool) -> None:
    model = build_model(BY_NAME[layout], sizes)
    if is_async:
        tte.weights.async_save(model.state_dict(), path, max_file_bytes=3000).result()
    else:
        tte.weights.save(model.state_dict(), path, max_file_bytes=3000)


@pytest.mark.parametrize(
    ("layout", "sizes", "is_async"),
    [
        ("fsdp2", EVEN, False),
        ("fsdp2_tp2", UNEVEN, True),
        ("hsdp2x2", UNEVEN, False),
    ],
    ids=str,
)
def test_models_of_any_mesh(
    run_world: Callable[..., Any], tmp_path: Path, layout: str, sizes: Any, is_async: bool
) -> None:
    run_world(BY_NAME[layout].world_size, save_model, layout, sizes, tmp_path / "hf", is_async)
    assert_same(read_by_the_library(tmp_path / "hf"), build_whole(sizes).state_dict())
    assert len(list((tmp_path / "hf").iterdir())) > 2


def random_tensors(seed: int) -> dict[str, torch.Tensor]:
    draw = random.Random(seed)
    truth = {}
    for number in range(draw.randint(1, 14)):
        shape = tuple(draw.choice([0, 1, 2, 3, 5, 7, 9, 12, 17, 24, 33]) for _ in range(draw.randint(1, 3)))
        truth[f"layers.{number}.w"] = random_whole(shape, draw.choice(FORMAT_DTYPES), draw.randrange(2**31))
    return truth


def plain_tensors(seed: int) -> dict[str, torch.Tensor]:
    """Equal on all ranks, on no mesh: without dims, turned, repeated, conjugated, tied."""
    draw = random.Random(seed)
    values = torch.arange(60, dtype=torch.float32).view(5, 12) + draw.random()
    conjugated = torch.complex(values, values + 1).conj()
    forms = {"scalar": values.sum(), "turned": values.T, "repeated": values[:1].expand(4, 12), "conj": conjugated}
    forms |= {"tied.a": values, "tied.b": values, "inside": values[1:3, 2:7], "parameter": torch.nn.Parameter(values)}
    return {f"plain.{name}": forms[name] for name in draw.sample(list(forms), draw.randint(0, len(forms)))}


def save_random(rank: int, world_size: int, seeds: list[int], folder: Path, one_writer: bool) -> None:
    for seed in seeds:
        draw = random.Random(seed)
        truth = random_tensors(seed)
        if draw.random() < 0.5:
            side = SideOfTransfer(draw, world_size, truth)
            state, orders = side.tensors, side.orders
        else:
            state, orders = build(truth, random_layouts(seed, world_size, truth))
        options = {"max_file_bytes": draw.choice([1, 500, 5000, 10**9]), "one_writer_per_file": one_writer}
        writer = SafetensorsWriter(folder / str(seed), **options)
        planner = tte.SavePlanner(layouts=orders)
        with patch.multiple(one_writer_module, ROUND_BYTES=draw.choice([512, 4096, 1 << 20]), _LEAST_BYTES=16):
            saved = tte.save({**state, **plain_tensors(seed)}, storage_writer=writer, planner=planner)
        memories = {(tensor.data_ptr(), tensor.shape): tensor.nbytes for tensor in plain_tensors(seed).values()}
        assert saved.num_bytes == sum(tensor.nbytes for tensor in truth.values()) + sum(memories.values())


@pytest.mark.parametrize(
    ("world_size", "one_writer"), [(1, False), (2, False), (4, False), (1, True), (2, True), (4, True)]
)
def test_random_states(run_world: Callable[..., Any], tmp_path: Path, world_size: int, one_writer: bool) -> None:
    seeds = [1000 * world_size + number for number in range(num_cases(10 if SOAK == 1 else 75))]
    run_world(world_size, save_random, seeds, tmp_path, one_writer)
    for seed in seeds:
        plain = {fqn: tensor.resolve_conj() for fqn, tensor in plain_tensors(seed).items()}
        assert_same(read_by_the_library(tmp_path / str(seed)), {**random_tensors(seed), **plain})
    others = {1: 4, 2: 1, 4: 2}[world_size]
    assert run_world(others, load_random, seeds, tmp_path) == [[]] * others


def load_random(rank: int, world_size: int, seeds: list[int], folder: Path) -> list[str]:
    lines = []
    for seed in seeds:
        truth = random_tensors(seed)
        state, orders = build(truth, random_layouts(seed + 500, world_size, truth))
        plain = {fqn: torch.empty_like(tensor).contiguous() for fqn, tensor in plain_tensors(seed).items()}
        poison(state)
        tte.load({**state, **plain}, folder / str(seed), planner=tte.LoadPlanner(layouts=orders))
        for fqn in state:
            full = tte.full_tensor(state[fqn], layout=orders.get(fqn))
            lines += [f"{seed}: {line}" for line in differences({fqn: full}, {fqn: truth[fqn]})]
        wanted = {fqn: tensor.detach().resolve_conj().contiguous() for fqn, tensor in plain_tensors(seed).items()}
        lines += [f"{seed}: {fqn}" for fqn in plain if not same_bits(plain[fqn].detach(), wanted[fqn])]
    return lines


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(24, 10)
        self.head = torch.nn.Linear(10, 24, bias=False)
        self.head.weight = self.embed.weight


def save_tied(rank: int, world_size: int, path: Path, how: str) -> None:
    torch.manual_seed(3)
    model = Tied()
    if world_size > 1:
        fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    if how == "save":
        tte.weights.save(model.state_dict(), path)
    else:
        tte.weights.async_save(model.state_dict(), path).result()


@pytest.mark.parametrize(("world_size", "how"), [(1, "save"), (3, "save"), (2, "thread")])
def test_tied_weights_are_written_once(
    run_world: Callable[..., Any], tmp_path: Path, world_size: int, how: str
) -> None:
    run_world(world_size, save_tied, tmp_path, how)
    assert list(load_file(tmp_path / "model.safetensors")) == ["embed.weight"]
    torch.manual_seed(3)
    truth, loaded = Tied(), Tied()
    load_model(loaded, tmp_path / "model.safetensors")
    assert same_bits(loaded.head.weight, truth.head.weight)
    apart = {name: torch.empty(24, 10) for name in ("embed.weight", "head.weight")}
    tte.load(apart, tmp_path, no_dist=True)
    assert all(same_bits(tensor, truth.embed.weight.detach()) for tensor in apart.values())


def test_tied_weights_of_the_library(tmp_path: Path) -> None:
    model = Tied()
    save_by_the_library(model, str(tmp_path / "model.safetensors"))
    loaded = {name: torch.empty(24, 10) for name in ("embed.weight", "head.weight")}
    tte.load(loaded, tmp_path, no_dist=True)
    assert all(same_bits(tensor, model.embed.weight.detach()) for tensor in loaded.values())


def save_half_tied(rank: int, world_size: int, path: Path) -> str:
    values = torch.zeros(3)
    with pytest.raises(StateRefusedError) as caught:
        tte.weights.save({"a": values, "b": values if rank else values.clone()}, path)
    return str(caught.value)


def test_weights_tied_on_some_ranks_are_refused(run_world: Callable[..., Any], tmp_path: Path) -> None:
    first, *others = run_world(3, save_half_tied, tmp_path / "hf")
    assert others == [first] * 2 and not (tmp_path / "hf").exists()
    assert "b: has the memory of a on rank 1, memory of its own on another rank; tie it on all or none" in first


def save_many_files(rank: int, world_size: int, path: Path) -> str:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    writer = SafetensorsWriter(path, max_file_bytes=1, one_writer_per_file=True)
    state = {f"w.{number}": torch.zeros(1) for number in range(113)}
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
    try:
        with pytest.raises(WrongValueError) as caught:
            tte.save(state, storage_writer=writer)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    tte.save(state, storage_writer=writer)
    return str(caught.value)


def test_more_files_than_can_be_open(run_world: Callable[..., Any], tmp_path: Path) -> None:
    first, second = run_world(2, save_many_files, tmp_path / "hf")
    assert first == second and "got 113 safetensors files, expected at most 112 of 2 rank(s)" in first
    assert len(load_file(tmp_path / "hf" / "model-00113-of-00113.safetensors")) == 1


def save_boxes(rank: int, world_size: int, case: str, path: Path) -> None:
    shape, boxes = boxed_tensors.CASES[case]
    tte.weights.save({"w": boxed_tensors.cut(whole_of(shape), boxes[rank])}, path)


def whole_of(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)


@pytest.mark.parametrize("case", ["several boxes", "a rank without boxes", "no elements", "no dims"])
def test_tensors_that_state_their_own_boxes(run_world: Callable[..., Any], tmp_path: Path, case: str) -> None:
    shape, boxes = boxed_tensors.CASES[case]
    run_world(len(boxes), save_boxes, case, tmp_path)
    assert_same(read_by_the_library(tmp_path), {"w": whole_of(shape)})


def test_files_are_cut_by_bytes_and_have_no_gaps(tmp_path: Path) -> None:
    state = {
        name: torch.full((size,), 1, dtype=torch.uint8)
        for name, size in zip("abcde", (40, 60, 250, 1, 99), strict=True)
    }
    saved = tte.weights.save(state, tmp_path / "hf", max_file_bytes=100, no_dist=True)
    names = sorted(os.listdir(tmp_path / "hf"))
    assert names == [*(f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)), INDEX]
    assert [sorted(load_file(tmp_path / "hf" / name)) for name in names[:-1]] == [["a", "b"], ["c"], ["d", "e"]]
    assert (saved.path, saved.num_bytes) == (str(tmp_path / "hf"), 450)
    tte.weights.save({"a": state["a"]}, tmp_path / "hf", no_dist=True)
    assert os.listdir(tmp_path / "hf") == ["model.safetensors"]


def test_files_of_others_stay(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "vocab.txt").write_text("a b c")
    for value, max_file_bytes in ((1.0, 10), (2.0, 1000), (3.0, 10)):
        state = {"a": torch.full((3,), value), "b": torch.full((4,), value)}
        tte.weights.save(state, tmp_path, max_file_bytes=max_file_bytes, no_dist=True)
        assert_same(read_by_the_library(tmp_path), state)
    assert (tmp_path / "config.json").read_text() == "{}"
    assert (tmp_path / "tokenizer" / "vocab.txt").read_text() == "a b c"
    assert len(os.listdir(tmp_path)) == 2 + 3


def test_a_mounted_directory_is_filled_from_within(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "mounted"
    target.mkdir()
    monkeypatch.setattr("torchtitan_ext.storage.commit.commit._is_mounted", lambda path: path == target)
    before = os.listdir(tmp_path)
    for value in (1.0, 2.0):
        tte.weights.save({"a": torch.full((3,), value)}, target, no_dist=True)
        assert_same(read_by_the_library(target), {"a": torch.full((3,), value)})
    assert os.listdir(target) == ["model.safetensors"] and os.listdir(tmp_path) == before


def refuse(rank: int, world_size: int, path: Path) -> str:
    mesh = init_device_mesh("cpu", (world_size,))
    state = {
        "step": 3,
        "__metadata__": torch.zeros(2),
        "half": distribute_tensor(torch.zeros(4, dtype=torch.complex128), mesh, [Shard(0)]),
        "two": DTensor.from_local(TwoTensor(torch.zeros(2), torch.zeros(2)), mesh, [Shard(0)]),
        "differs": distribute_tensor(torch.zeros(4), mesh, [Replicate()]) + rank,
        "fine": torch.zeros(3),
    }
    with torch.serialization.safe_globals([TwoTensor]), pytest.raises(StateRefusedError) as caught:
        tte.weights.save(state, path)
    return str(caught.value)


def test_all_that_the_format_lacks_is_refused_at_once(run_world: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    tte.weights.save({"w": torch.ones(2)}, tmp_path / "old", no_dist=True)
    before = sorted(path.name for path in tmp_path.rglob("*"))
    texts = run_world(2, refuse, tmp_path / "old")
    assert texts[0] == texts[1]
    for part in (
        "step: is no tensor, and safetensors files have nothing else",
        "half: is complex128, which safetensors files have no name for",
        "two: is a TwoTensor",
        "__metadata__: safetensors files keep their notes under this name",
        "differs",
    ):
        assert texts[0].count(part) == 1, texts[0]
    assert sorted(path.name for path in tmp_path.rglob("*")) == before


@pytest.mark.parametrize("dtype", sorted(set(DTYPES.values()) - set(FORMAT_DTYPES), key=str), ids=str)
def test_dtypes_that_the_format_lacks(tmp_path: Path, dtype: torch.dtype) -> None:
    with pytest.raises(StateRefusedError, match="which safetensors files have no name for"):
        tte.weights.save({"w": torch.zeros(2, dtype=dtype)}, tmp_path / "hf", no_dist=True)
    assert os.listdir(tmp_path) == []


def test_a_stock_planner_is_refused_the_same(tmp_path: Path) -> None:
    for state, text in (({"step": 3}, "is no tensor"), ({"w": torch.zeros(2, dtype=torch.complex128)}, "complex128")):
        with pytest.raises(StateRefusedError, match=text):
            tte.weights.save(state, tmp_path / "hf", planner=DefaultSavePlanner(), no_dist=True)
    assert os.listdir(tmp_path) == []
    state = {"w": torch.arange(5.0)}
    tte.weights.save(state, tmp_path / "hf", planner=DefaultSavePlanner(), no_dist=True)
    assert_same(read_by_the_library(tmp_path / "hf"), state)


def test_a_checkpoint_is_not_put_beside_old_weights(tmp_path: Path) -> None:
    tte.weights.save({"w": torch.ones(2)}, tmp_path / "hf", no_dist=True)
    before = {path.name: path.read_bytes() for path in (tmp_path / "hf").iterdir()}
    with pytest.raises(CheckpointFailedError, match=r"holds model.safetensors, old weights .* another directory"):
        tte.save({"w": torch.zeros(2)}, tmp_path / "hf", no_dist=True)
    assert {path.name: path.read_bytes() for path in (tmp_path / "hf").iterdir()} == before
    (tmp_path / "hf" / "model.safetensors").unlink()
    tte.save({"w": torch.zeros(2)}, tmp_path / "hf", no_dist=True)


def test_a_checkpoint_is_not_replaced_by_weights(tmp_path: Path) -> None:
    tte.save({"w": torch.ones(2)}, tmp_path, no_dist=True)
    with pytest.raises(CheckpointFailedError, match="of a checkpoint of DCP; use another directory"):
        tte.weights.save({"w": torch.ones(2)}, tmp_path, no_dist=True)
    assert (tmp_path / ".metadata").exists()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"max_file_bytes": 0}, "weights.save: got max_file_bytes=0, expected at least 1"),
        ({"path": "memory://bucket/hf"}, "expected a directory"),
        ({"path": "hf/model.safetensors"}, "expected a directory, in which the files"),
    ],
)
def test_arguments_that_do_not_go_together(tmp_path: Path, options: dict[str, Any], text: str) -> None:
    with pytest.raises(WrongValueError, match=text):
        tte.weights.save({"w": torch.ones(2)}, no_dist=True, **{"path": tmp_path / "hf", **options})


def test_what_is_no_safetensors_is_not_loaded_as_such(tmp_path: Path) -> None:
    state = {"w": torch.ones(2)}
    tte.save(state, tmp_path / "dcp", no_dist=True)
    tte.weights.save(state, tmp_path / "hf", no_dist=True)
    for place in (tmp_path / "dcp", tmp_path / "nothing"):
        with pytest.raises(WrongValueError, match="expected a safetensors file, or a directory with some"):
            tte.weights.load(state, place, no_dist=True)
    loaded = {"w": torch.zeros(2)}
    report = tte.weights.load(loaded, tmp_path / "hf", no_dist=True)
    assert_same(loaded, state)
    assert "1 entry" in str(report)


def test_a_file_is_not_replaced_by_a_directory(tmp_path: Path) -> None:
    (tmp_path / "weights").write_text("theirs")
    with pytest.raises(CheckpointFailedError, match="weights is a file, expected a directory"):
        tte.weights.save({"w": torch.ones(2)}, tmp_path / "weights", no_dist=True)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"weights": "theirs"}


@pytest.mark.parametrize("mode", [0o700, 0o2770, 0o755])
def test_a_directory_keeps_its_mode_and_its_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int
) -> None:
    target = tmp_path / "hf"
    target.mkdir()
    target.chmod(mode)
    monkeypatch.chdir(target if mode == 0o755 else tmp_path)
    for value in (1.0, 2.0):
        saved = tte.weights.save({"w": torch.full((2,), value)}, target, no_dist=True)
        assert target.stat().st_mode & 0o7777 == mode and os.path.samefile(os.getcwd(), os.curdir)
    assert_same(read_by_the_library(target), {"w": torch.full((2,), 2.0)})
    assert list(saved.metadata.state_dict_metadata) == ["w"]


def save_by_other_rules(rank: int, world_size: int, path: Path) -> str:
    mesh = init_device_mesh("cpu", (world_size,))
    state = {name: distribute_tensor(torch.zeros(4), mesh, [Shard(0)]) for name in "ab"}
    renames = [Transform([Rule("a", "x"), Rule("b", "y")]), Transform([Rule("a", "y"), Rule("b", "x")])]
    texts = []
    for options in (
        {"transform": renames[rank]},
        {"transform": renames[0] if rank == 0 else None},
    ):
        with pytest.raises(ReplicaMismatchError) as caught:
            tte.weights.save(state, path, **options)
        texts.append(str(caught.value))
    with pytest.raises(DifferentCallsError, match=r"rank 0 calls save, rank 1 weights.save"):
        (tte.weights.save if rank else tte.save)(state, path)
    return "\n".join(texts)


def test_ranks_that_would_write_other_tensors_are_refused(run_world: Callable[..., Any], tmp_path: Path) -> None:
    first, second = run_world(2, save_by_other_rules, tmp_path / "hf")
    assert first == second and first.count("make the same call with the same transform on all ranks") == 2
    assert os.listdir(tmp_path) == []


def save_where_files_come_late(rank: int, world_size: int, path: Path) -> None:
    late = 10 * rank
    stat = Path.stat

    def stat_of(self: Path, **options: Any) -> os.stat_result:
        nonlocal late
        if self.suffix == ".safetensors" and late > 0:
            late -= 1
            raise FileNotFoundError(2, "No such file or directory", str(self))
        return stat(self, **options)

    # Rank 1 holds nothing, and writes the second file.
    state = {"a": torch.ones(2), "b": torch.ones(3)} if rank == 0 else {}
    with patch.object(Path, "stat", stat_of):
        tte.save(state, storage_writer=SafetensorsWriter(path, max_file_bytes=1, one_writer_per_file=True))


def test_files_that_a_rank_sees_late(run_world: Callable[..., Any], tmp_path: Path) -> None:
    run_world(2, save_where_files_come_late, tmp_path / "hf")
    assert_same(read_by_the_library(tmp_path / "hf"), {"a": torch.ones(2), "b": torch.ones(3)})


def save_numbered(rank: int, world_size: int, path: Path) -> None:
    state = {"a": torch.full((3,), 1.0), "b": torch.full((2,), 2.0), "c": torch.full((2,), 3.0)}
    writer = SafetensorsWriter(path, file_numbers={"a": 2, "b": 1, "c": 2})
    if rank == 0:
        state.pop("b")
    tte.save(state, storage_writer=writer, planner=tte.SavePlanner(replicas="first"))
    dist.barrier()
    found = [sorted(load_file(path / f"model-0000{number}-of-00002.safetensors")) for number in (1, 2)]
    assert found == [["b"], ["a", "c"]]


def test_a_writer_that_is_told_the_file_of_each_tensor(run_world: Callable[..., Any], tmp_path: Path) -> None:
    run_world(2, save_numbered, tmp_path)


def save_with_one_planner(rank: int, world_size: int, path: Path) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    planner = tte.SavePlanner()
    for number, save in enumerate((tte.weights.save, tte.weights.save, tte.save, tte.weights.save)):
        local = torch.full((3,), float(10 * number + rank))
        state = {"w": DTensor.from_local(local, mesh, [Shard(0)], run_check=False)}
        save(state, path / str(number), planner=planner)


def test_a_planner_of_several_saves(run_world: Callable[..., Any], tmp_path: Path) -> None:
    run_world(2, save_with_one_planner, tmp_path)
    for number in (0, 1, 3):
        wanted = torch.tensor([10.0 * number] * 3 + [10.0 * number + 1] * 3)
        assert_same(read_by_the_library(tmp_path / str(number)), {"w": wanted})


def fail_on_one_rank(rank: int, world_size: int, path: Path, method: str, one_writer: bool) -> str:
    class Planner(tte.SavePlanner):
        def __getattribute__(self, name: str) -> Any:
            if rank == 1 and name == method:
                raise OSError(28, "No space left on device")
            return super().__getattribute__(name)

    mesh = init_device_mesh("cpu", (world_size,))
    state = {"w": DTensor.from_local(torch.zeros(4), mesh, [Shard(0)], run_check=False)}
    writer = SafetensorsWriter(path, one_writer_per_file=one_writer)
    with pytest.raises(CheckpointFailedError) as caught:
        tte.save(state, storage_writer=writer, planner=Planner())
    assert caught.value.is_of_storage
    tte.weights.save({"v": torch.zeros(1)}, path.with_name("again"))
    return str(caught.value)


@pytest.mark.parametrize("method", ["resolve_data", "finish_plan"])
@pytest.mark.parametrize("one_writer", [False, True])
def test_a_rank_that_fails_leaves_the_old_weights(
    run_world: Callable[..., Any], tmp_path: Path, method: str, one_writer: bool
) -> None:
    tte.weights.save({"w": torch.ones(2)}, tmp_path / "hf", no_dist=True)
    texts = run_world(3, fail_on_one_rank, tmp_path / "hf", method, one_writer)
    assert len(set(texts)) == 1 and "rank 1: OSError: [Errno 28] No space left on device" in texts[0]
    assert texts[0].count("another rank failed") == (2 if one_writer else 0)
    assert_same(read_by_the_library(tmp_path / "hf"), {"w": torch.ones(2)})
    assert sorted(os.listdir(tmp_path)) == ["again", "hf"]


def lose_a_rank(rank: int, world_size: int, path: Path) -> None:
    class Planner(tte.SavePlanner):
        def resolve_data(self, item: Any) -> Any:
            if rank == 1:
                strike("kill")
            return super().resolve_data(item)

    mesh = init_device_mesh("cpu", (world_size,))
    state = {"w": DTensor.from_local(torch.zeros(4), mesh, [Shard(0)], run_check=False)}
    with pytest.raises(LostRankError) as caught:
        tte.save(state, storage_writer=SafetensorsWriter(path, one_writer_per_file=True), planner=Planner())
    path.with_name(f"error{rank}").write_text(str(caught.value))


@pytest.mark.nightly("lost")
def test_a_rank_that_is_killed_is_named(run_world: Callable[..., Any], tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="the worker process died"):
        run_world(3, lose_a_rank, tmp_path / "hf")
    assert all("rank(s) 1 did not answer" in (tmp_path / f"error{rank}").read_text() for rank in (0, 2))


def save_of_device(rank: int, world_size: int, device: str, path: Path, one_writer: bool) -> None:
    mesh = DeviceMesh(device, torch.arange(world_size), _init_backend=False)
    whole = device_tensors()
    state: dict[str, Any] = {"plain": whole["plain"].to(device), "cpu": whole["cpu"]}
    for dim, name in enumerate(("rows", "columns")):
        local = whole[name].tensor_split(world_size, dim)[rank].to(device)
        form = {"shape": whole[name].shape, "stride": whole[name].stride()}
        state[name] = DTensor.from_local(local, mesh, [Shard(dim)], run_check=False, **form)
    cast = Transform(
        [
            Rule("columns", "columns", [transforms.cast("bfloat16")]),
            Rule(["plain"], ["plain"]),
            Rule("cpu", "cpu"),
            Rule("rows", "rows"),
        ]
    )
    writer = SafetensorsWriter(path, one_writer_per_file=one_writer, weights_map=TransformedTensors(cast))
    with (
        patch.multiple(one_writer_module, ROUND_BYTES=4096, _LEAST_BYTES=1024),
        patch.multiple(boxes_module, _BATCH_BYTES=2048, _CAST_BYTES=500),
    ):
        tte.save(state, storage_writer=writer)


def device_tensors() -> dict[str, torch.Tensor]:
    names = {"plain": (7, 3), "cpu": (5,), "rows": (31, 40), "columns": (40, 31)}
    return {name: random_whole(shape, torch.float32, len(name)) for name, shape in names.items()}


@pytest.mark.parametrize("one_writer", [False, True])
def test_tensors_of_accelerators(run_on_accelerator: Callable[..., Any], tmp_path: Path, one_writer: bool) -> None:
    run_on_accelerator(2, save_of_device, tmp_path, one_writer)
    truth = device_tensors()
    assert_same(read_by_the_library(tmp_path), truth | {"columns": truth["columns"].bfloat16()})
