"""Loads of safetensors, by the library's own files: into any layout, the wanted runs alone, or refused by name."""

import gc
import json
import random
import resource
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoints import DTYPES, random_bits, save_as
from models import differences, poison
from random_layouts import MESH_SHAPES, build, random_layouts
from safetensors.torch import load_file, save_file
from tier import of_at_most_four
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import torchtitan_ext as tte
from torchtitan_ext import _core, transforms
from torchtitan_ext.elastic import ElasticPolicy, Source
from torchtitan_ext.errors import MissingStateError, ReshardError, StateRefusedError
from torchtitan_ext.storage.commit import opened as opened_module
from torchtitan_ext.storage.weights.safetensors_reader import SafetensorsReader, reader_at
from torchtitan_ext.transforms import Rule, Transform


def random_truth(seed: int) -> dict[str, torch.Tensor]:
    draw = random.Random(seed)
    truth = {}
    for number in range(8):
        shape = tuple(draw.choice([0, 1, 2, 3, 5, 7, 9, 12, 17, 24, 33]) for _ in range(draw.randint(1, 3)))
        truth[f"layers.{number}.w"] = random_bits(shape, draw.choice(DTYPES), seed * 10 + number)
    return truth


def load_randomly(rank: int, world_size: int, cases: list[tuple[int, Path]]) -> list[str]:
    lines = []
    for seed, path in cases:
        truth = random_truth(seed)
        state, orders = build(truth, random_layouts(seed + 1, world_size, truth))
        poison(state)
        tte.load(state, path, planner=tte.LoadPlanner(layouts=orders), share_reads=seed % 3 == 1)
        for name in state:
            full = tte.full_tensor(state[name], layout=orders.get(name))
            lines += [f"{seed}: {line}" for line in differences({name: full}, {name: truth[name]})]
    return lines


@pytest.mark.parametrize("world_size", of_at_most_four([1, 2, 4, 6, 8]))
def test_random_states_are_loaded_into_random_layouts(run_world, tmp_path: Path, world_size: int) -> None:
    assert world_size in MESH_SHAPES
    kinds = ("safetensors", "safetensors file")
    cases = [
        (seed, save_as(kinds[seed % 2], tmp_path / f"{seed}", random_truth(seed)))
        for seed in range(world_size * 100, world_size * 100 + 8)
    ]
    assert run_world(world_size, load_randomly, cases) == [[]] * world_size


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """Two files and an index, of three tensors."""
    return save_as("safetensors", tmp_path / "hub", truth())


def truth() -> dict[str, torch.Tensor]:
    return {
        "embed": random_bits((64, 40), torch.bfloat16),
        "norm": torch.arange(40.0),
        "head": random_bits((40, 64), torch.int8, 3),
    }


def zeros() -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(value) for name, value in truth().items()}


def load_shards(rank: int, world_size: int, path: Path, share_reads: bool) -> tuple[int, list[str]]:
    mesh = init_device_mesh("cpu", (world_size,))
    wanted = truth()
    state = {
        "embed": distribute_tensor(torch.zeros_like(wanted["embed"]), mesh, [Shard(1)]),
        "head": distribute_tensor(torch.zeros_like(wanted["head"]), mesh, [Shard(0)]),
    }
    readers: list[SafetensorsReader] = []
    seen = SafetensorsReader.open_file
    SafetensorsReader.open_file = lambda self, runs, name: readers.append(self) or seen(self, runs, name)  # type: ignore
    try:
        tte.load(state, path, share_reads=share_reads)
    finally:
        SafetensorsReader.open_file = seen  # type: ignore[method-assign]
    full = {name: value.full_tensor() for name, value in state.items()}
    return readers[0].num_bytes_read, differences(full, {name: wanted[name] for name in state})


@pytest.mark.parametrize("share_reads", [False, True])
def test_each_rank_reads_what_its_shards_want(run_world, weights: Path, share_reads: bool) -> None:
    num_bytes = 64 * 40 * 2 // 4 + 40 * 64 // 4
    assert run_world(4, load_shards, weights, share_reads) == [(num_bytes, [])] * 4


def test_meta_tensors_and_other_dtypes(weights: Path) -> None:
    with torch.device("meta"):
        model = nn.Linear(40, 64, bias=False)
    model.register_parameter("norm", nn.Parameter(torch.zeros(40, dtype=torch.float64)))
    state = {"w": model}
    source = Source(weights, rename={"w.weight": "embed", "w.norm": "norm"})
    report = tte.load(state, source, policy=ElasticPolicy())
    assert report is not None and report.components
    assert torch.equal(model.weight.nan_to_num(), truth()["embed"].float().nan_to_num())
    assert torch.equal(model.norm, truth()["norm"].double())


def test_large_tensors_are_cast_in_parts_where_the_reader_has_no_cast(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchtitan_ext.storage.native.fills.BUFFER_BYTES", 1000)
    saved = {"w": torch.arange(2100, dtype=torch.int16).view(300, 7), "b": torch.randn(5), "s": torch.tensor(2.0)}
    save_file(saved, tmp_path / "model.safetensors")
    whole = torch.zeros(300, 14, dtype=torch.float64)
    state = {"w": whole[:, ::2], "b": torch.zeros(5, dtype=torch.float64), "s": torch.zeros((), dtype=torch.float64)}
    versions = {name: value._version for name, value in state.items()}
    tte.load(state, tmp_path)
    assert differences(state, {name: value.double() for name, value in saved.items()}) == []
    assert all(value._version > versions[name] for name, value in state.items())
    assert not whole[:, 1::2].any()


def test_what_does_not_fit_is_refused(weights: Path) -> None:
    with pytest.raises(MissingStateError, match=r"embeds.*\n.*|Missing key in checkpoint.*embeds"):
        tte.load({"embeds": torch.zeros(64, 40)}, weights)
    with pytest.raises(ReshardError, match="head"):
        tte.load({"head": torch.zeros(3)}, weights)
    state = zeros() | {"head": torch.zeros(40, 64, dtype=torch.bool)}
    with pytest.raises(ReshardError, match="head"):
        tte.load(state, weights)
    assert differences(state, zeros() | {"head": state["head"]}) == [] and not state["head"].any()
    with pytest.raises(ValueError, match="has no fingerprints"):
        tte.load(zeros(), weights, prove=True)


def rewrite_header(path: Path, rewritten: Callable[[str], bytes]) -> None:
    content = path.read_bytes()
    num_bytes = int.from_bytes(content[:8], "little")
    header = rewritten(content[8 : 8 + num_bytes].decode())
    path.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + num_bytes :])


def damage(path: Path, kind: str) -> str:
    """Damages a directory, and returns the name of what a refusal must name."""
    first = path / "model-00001-of-00002.safetensors"
    index = path / "model.safetensors.index.json"
    if kind == "short":
        first.write_bytes(first.read_bytes()[:-3])
    elif kind == "header":
        content = bytearray(first.read_bytes())
        content[20] ^= 0xFF
        first.write_bytes(content)
    elif kind == "missing":
        first.unlink()
    elif kind == "index":
        index.write_text("{")
        return index.name
    elif kind == "of another":
        save_file({"other": torch.zeros(3)}, first)
        return "1 tensor(s) of its index are not in their files"
    elif kind == "outside":
        names = json.loads(index.read_text())
        names["weight_map"]["embed"] = "../other.safetensors"
        index.write_text(json.dumps(names))
        return "../other.safetensors"
    elif kind == "utf-16":
        rewrite_header(first, lambda text: text.encode("utf-16"))
    elif kind == "doubled key":
        rewrite_header(first, lambda text: (text[: text.rindex("}")] + "," + text[1:]).encode())
    elif kind == "twice":
        index.unlink()
        save_file({"embed": truth()["embed"]}, path / "old.safetensors")
        return r"embed: stands in 2 files (model-00001-of-00002.safetensors, old.safetensors)"
    return first.name


def load_refused(rank: int, world_size: int, path: Path) -> str:
    state = zeros()
    with pytest.raises(ReshardError) as caught:
        tte.load(state, path)
    assert not any(value.any() for value in state.values())
    return str(caught.value)


DAMAGE = ["short", "header", "utf-16", "doubled key", "missing", "index", "of another", "outside", "twice"]


def test_damage_is_refused_by_name_on_all_ranks(run_world, tmp_path: Path) -> None:
    for kind in DAMAGE:
        path = save_as("safetensors", tmp_path / kind, truth())
        named = damage(path, kind)
        texts = run_world(2, load_refused, path)
        assert len(set(texts)) == 1 and named in texts[0], (kind, texts[0])


def load_of_two(rank: int, world_size: int, path: Path) -> str:
    with pytest.raises(StateRefusedError) as caught:
        tte.load(zeros(), path / str(rank))
    return str(caught.value)


def test_one_rank_with_other_weights_is_refused(run_world, tmp_path: Path) -> None:
    for rank in range(2):
        save_as("safetensors", tmp_path / str(rank), truth() | ({"more": torch.zeros(2)} if rank else {}))
    texts = run_world(2, load_of_two, tmp_path)
    assert len(set(texts)) == 1 and "pass the same path on every rank" in texts[0]


def load_copies(rank: int, world_size: int, path: Path) -> list[str]:
    state = zeros()
    tte.load(state, path / str(rank))
    return differences(state, truth())


def test_hosts_may_have_copies(run_world, tmp_path: Path) -> None:
    for rank in range(2):
        save_as("safetensors", tmp_path / str(rank), truth())
    assert run_world(2, load_copies, tmp_path) == [[], []]


class ReplacedMeanwhile(tte.LoadPlanner):
    """Other weights come into the directory after the headers were read, for the first load alone."""

    def __init__(self, path: Path, is_moved: bool) -> None:
        super().__init__()
        self._path = path
        self._is_moved = is_moved

    def create_local_plan(self):  # type: ignore[no-untyped-def]
        new = self._path.with_name("new")
        if new.exists() and dist.get_rank() == 0:
            if self._is_moved:
                self._path.rename(self._path.with_name("old"))
                new.rename(self._path)
            else:
                for file in new.iterdir():
                    file.replace(self._path / file.name)
                new.rmdir()
        dist.barrier()
        return super().create_local_plan()


def load_replaced(rank: int, world_size: int, path: Path, is_moved: bool) -> float:
    state = {"a": torch.zeros(4), "b": torch.zeros(4)}
    tte.load(state, path, planner=ReplacedMeanwhile(path, is_moved))
    assert state["a"].unique().numel() == 1 and torch.equal(state["a"], state["b"])
    return state["a"][0].item()


@pytest.mark.parametrize("is_moved", [False, True])
def test_weights_that_are_replaced_meanwhile_are_old_or_new(run_world, tmp_path: Path, is_moved: bool) -> None:
    for name, value in (("now", 1.0), ("new", 2.0)):
        (tmp_path / name).mkdir()
        for key in "ab":
            save_file({key: torch.full((4,), value)}, tmp_path / name / f"{key}.safetensors")
    found = run_world(2, load_replaced, tmp_path / "now", is_moved)
    assert found in ([1.0, 1.0], [2.0, 2.0])


def test_of_two_indices_that_of_transformers_is_read(tmp_path: Path) -> None:
    for name, fqn, value in (("consolidated", "layers.w", 1.0), ("model", "model.layers.w", 2.0)):
        save_file({fqn: torch.full((2,), value)}, tmp_path / f"{name}-00001-of-00001.safetensors")
        index = {"metadata": {}, "weight_map": {fqn: f"{name}-00001-of-00001.safetensors"}}
        (tmp_path / f"{name}.safetensors.index.json").write_text(json.dumps(index))
    state = {"model.layers.w": torch.zeros(2)}
    tte.load(state, tmp_path, no_dist=True)
    assert state["model.layers.w"].tolist() == [2.0, 2.0]


def test_tensors_without_elements_may_stand_in_any_order(tmp_path: Path) -> None:
    header = {
        "a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]},
        "b": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]},
    }
    text = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + b"\1\2")
    assert load_file(tmp_path / "model.safetensors")["a"].tolist() == [1, 2]
    state = {"a": torch.zeros(2, dtype=torch.uint8), "b": torch.zeros(0, dtype=torch.uint8)}
    tte.load(state, tmp_path, no_dist=True)
    assert state["a"].tolist() == [1, 2]


def test_more_files_than_are_held_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchtitan_ext.storage.commit.opened._MAX_HELD", 2)
    saved = {f"w{number}": torch.full((3,), float(number)) for number in range(7)}
    for name, value in saved.items():
        save_file({name: value}, tmp_path / f"{name}.safetensors")
    state = {name: torch.zeros(3) for name in saved}
    tte.load(state, tmp_path)
    assert differences(state, saved) == []


def test_files_may_be_links_as_in_the_cache_of_the_hub(tmp_path: Path) -> None:
    made = save_as("safetensors", tmp_path / "made", truth())
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshots" / "main").mkdir(parents=True)
    for number, file in enumerate(made.iterdir()):
        file.rename(tmp_path / "blobs" / str(number))
        (tmp_path / "snapshots" / "main" / file.name).symlink_to(f"../../blobs/{number}")
    same = transforms.Transform([transforms.Rule("*", "*")])
    for transform in (None, same):
        state = zeros()
        tte.load(state, tmp_path / "snapshots" / "main", transform=transform)
        assert differences(state, truth()) == []
    state = zeros()
    tte.load(
        state,
        tmp_path / "snapshots" / "main" / "model-00001-of-00002.safetensors",
        policy=ElasticPolicy(strict="ignore"),
    )
    assert torch.equal(state["embed"].view(torch.uint8), truth()["embed"].view(torch.uint8))


def save_in_shards(rank: int, world_size: int, path: Path) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    state = {name: distribute_tensor(value, mesh, [Shard(0)]) for name, value in truth().items()}
    dcp.save(state, storage_writer=HuggingFaceStorageWriter(str(path), save_distributed=True))


def test_chunks_of_dcps_writer_are_put_together(run_world, tmp_path: Path) -> None:
    run_world(4, save_in_shards, tmp_path / "hf")
    assert run_world(2, load_shards, tmp_path / "hf", False) == [((64 * 40 * 2 + 40 * 64) // 2, [])] * 2


def load_by_dcp(rank: int, world_size: int, path: Path) -> list[str]:
    """DCP reads the metadata on one rank, for all; its own planner and ours."""
    lines = []
    for planner in (None, tte.LoadPlanner()):
        state = zeros()
        dcp.load(state, storage_reader=reader_at(path), planner=planner)
        lines += differences(state, truth())
    return lines


def test_dcp_loads_by_the_reader(run_world, weights: Path) -> None:
    assert run_world(2, load_by_dcp, weights) == [[], []]


def test_the_dry_run_of_one_file(tmp_path: Path) -> None:
    path = save_as("safetensors file", tmp_path / "hub", truth())
    found = tte.dry_run(zeros(), checkpoint=path)
    assert found.problems == () and found.notes == tte.dry_run(zeros()).notes
    assert [one.num_bytes for one in found.load.ranks] == [sum(value.nbytes for value in load_file(path).values())]


NOTES = [b'{"x": ["w"]}', b'{"x": {"w": 1}}', b'{"\\ud800": "w"}', b'{"x": "nothing"}', b'{"w": "w"}']


@pytest.mark.parametrize("note", NOTES)
def test_notes_that_name_no_tensor_are_passed_over(tmp_path: Path, note: bytes) -> None:
    text = b'{"__metadata__": %s, "w": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}}' % note
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + b"\1\2")
    assert list(reader_at(tmp_path).read_metadata().state_dict_metadata) == ["w"]


@pytest.mark.parametrize("transform", [None, Transform([Rule("w*", "w*", [transforms.transpose(0, 1)])])])
def test_more_files_than_a_process_may_open(
    tmp_path: Path, transform: Transform | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opened_module, "_MAX_HELD", 64)  # this process may have hundreds of others open
    truth = {f"w{number}": torch.full((2, 3), float(number)) for number in range(400)}
    tte.weights.save(truth, tmp_path, max_file_bytes=1, no_dist=True)
    state = {fqn: torch.zeros((2, 3) if transform is None else (3, 2)) for fqn in truth}
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_open = len(list(Path("/proc/self/fd").iterdir()))
    resource.setrlimit(resource.RLIMIT_NOFILE, (num_open + 280, hard))
    try:
        tte.load(state, tmp_path, transform=transform, no_dist=True)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert all((state[fqn] == number).all() for number, fqn in enumerate(truth))


def test_what_was_packed_outlives_its_owner() -> None:
    content = np.arange(1 << 16, dtype=np.uint8)
    writer = _core.RunWriter()
    number = writer.add_file(b"not opened", 1 << 20, False)
    writer.add_box(number, 1, [1 << 16], content.ctypes.data, [1], 0, [1])
    runs, data = (lambda packed: (packed.runs, packed.data))(writer.pack([0], 1))
    gc.collect()
    others = [np.full(1 << 16, 0xAB, dtype=np.uint8) for _ in range(50)]
    assert np.array_equal(data, content) and runs.tolist() == [0, 0, 1 << 16]
    assert len(others) == 50
