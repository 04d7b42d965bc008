"""Checkpoints written as another mesh would save them."""

import errno
import os
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoints import flip_byte, random_bits, save_as, tensors, training_state
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import torchtitan_ext as tte
from torchtitan_ext import _core
from torchtitan_ext.checkpoint.tables.component import World, saved_world
from torchtitan_ext.errors import DamagedCheckpointError, LayoutError
from torchtitan_ext.offline.compare.diff import DiffReport, diff
from torchtitan_ext.offline.rewrite.reshard import ReshardReport, reshard
from torchtitan_ext.offline.selection import Selection
from torchtitan_ext.offline.sources import open_source
from torchtitan_ext.storage import FileReader
from torchtitan_ext.storage.inspect.verify import find_damage, verify
from torchtitan_ext.storage.metadata.saved_state import SavedState


def resharded(source: Path, target: Path, **options: Any) -> ReshardReport:
    return reshard(open_source(source), target, **{"num_processes": 1, "max_bytes": 8 << 20, **options})


def chunks_of(path: Path) -> dict[str, set[tuple[Any, Any]]]:
    entries = FileReader(path).read_metadata().state_dict_metadata
    chunks = {fqn: getattr(entry, "chunks", []) for fqn, entry in entries.items()}
    return {fqn: {(tuple(c.offsets), tuple(c.sizes)) for c in members} for fqn, members in chunks.items()}


@pytest.mark.parametrize("kind", ["ours", "stock", "torch", "dp=3"])
@pytest.mark.parametrize("mesh", [{"dp": 1}, {"dp": 4}, {"dp_replicate": 2, "dp_shard": 2, "tp": 2}, {"dp": 40}])
def test_the_state_is_the_same_on_every_mesh(tmp_path: Path, kind: str, mesh: dict[str, int]) -> None:
    state = training_state()
    source = save_as(kind, tmp_path / "a", state)
    report = resharded(source, tmp_path / "b", mesh=mesh)
    assert report.num_ranks == torch.Size(mesh.values()).numel()
    assert diff(open_source(source), open_source(tmp_path / "b")) == DiffReport((), report.num_keys)
    assert find_damage(tmp_path / "b") is None
    metadata = FileReader(tmp_path / "b").read_metadata()
    assert saved_world(metadata) == World(report.num_ranks, mesh)
    if report.num_ranks <= 4:
        assert {path.name for path in (tmp_path / "b").iterdir()} == {
            ".metadata", ".tte_index", *(f"__{rank}_0.distcp" for rank in range(report.num_ranks)),
        }  # fmt: skip


def test_stock_reads_what_was_written(tmp_path: Path) -> None:
    state = training_state()
    resharded(save_as("ours", tmp_path / "a", state), tmp_path / "b", mesh={"dp": 3, "tp": 2})
    loaded = training_state()
    for tensor in loaded["model"].values():
        tensor.view(-1).view(torch.uint8).fill_(1) if tensor.dim() else tensor.fill_(0)
    loaded["step"] = 0
    dcp.load(loaded, checkpoint_id=tmp_path / "b", no_dist=True)
    for key, tensor in state["model"].items():
        assert torch.equal(loaded["model"][key].view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8)), key
    assert loaded["step"] == 7
    assert loaded["optimizer"]["groups"] == state["optimizer"]["groups"]


class Block(torch.nn.Module):
    def __init__(self, num_rows: int = 18) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.w1 = torch.nn.Linear(6, num_rows)
        self.w2 = torch.nn.Linear(num_rows, 7, bias=False)
        self.norm = torch.nn.LayerNorm(9)


def save_on_mesh(rank: int, world_size: int, path: str, shape: tuple[int, ...]) -> None:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp_shard", "tp"))
    model = Block()
    parallelize_module(model, mesh["tp"], {"w1": ColwiseParallel(), "w2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp_shard"])
    tte.save({"model": model.state_dict(), "step": 3}, path)


@pytest.mark.parametrize("new", [(4, 2), (3, 2)])
def test_chunks_are_those_of_a_real_save_on_that_mesh(tmp_path: Path, run_world: Any, new: tuple[int, int]) -> None:
    run_world(4, save_on_mesh, str(tmp_path / "old"), (2, 2))
    run_world(new[0] * new[1], save_on_mesh, str(tmp_path / "new"), new)
    resharded(tmp_path / "old", tmp_path / "offline", mesh={"dp_shard": new[0], "tp": new[1]})
    assert chunks_of(tmp_path / "offline") == chunks_of(tmp_path / "new")
    assert diff(open_source(tmp_path / "offline"), open_source(tmp_path / "new")).differences == ()
    names = [{path.name for path in (tmp_path / name).iterdir()} for name in ("offline", "new")]
    assert names[0] == names[1]


def test_an_empty_view_may_begin_behind_its_memory(tmp_path: Path) -> None:
    state = {"none": torch.zeros(3, 0)[1:], "w": torch.arange(12.0)}
    for kind in ("stock", "torch"):
        source, target = save_as(kind, tmp_path / kind, state), tmp_path / f"{kind}-resharded"
        assert not verify(source, is_deep=True).damages
        resharded(source, target, mesh={"dp": 2})
        assert diff(open_source(source), open_source(target)).differences == ()


def test_rules_say_which_dims_are_cut(tmp_path: Path) -> None:
    source = save_as("safetensors", tmp_path / "a", {"wq": torch.ones(8, 8), "wo": torch.ones(8, 8)})
    report = resharded(source, tmp_path / "b", mesh={"dp": 1, "tp": 2}, rules={"wo": {"tp": 1}})
    assert report.assumed == ("wq",)
    assert chunks_of(tmp_path / "b") == {
        "wq": {((0, 0), (4, 8)), ((4, 0), (4, 8))},
        "wo": {((0, 0), (8, 4)), ((0, 4), (8, 4))},
    }
    with pytest.raises(LayoutError, match="lm_head"):
        resharded(source, tmp_path / "c", mesh={"dp": 1, "tp": 2}, rules={"lm_head": {"tp": 1}})
    assert not (tmp_path / "c").exists()


def test_processes_write_what_one_would(tmp_path: Path) -> None:
    source = save_as("ours", tmp_path / "a", training_state() | {"big": random_bits((700, 1001), torch.float32)})
    resharded(source, tmp_path / "one", mesh={"dp": 3, "tp": 2})
    done: list[int] = []
    report = resharded(
        source, tmp_path / "more", mesh={"dp": 3, "tp": 2}, num_processes=3, max_bytes=32 << 20, progress=done.append
    )
    assert sum(done) == report.num_bytes
    assert chunks_of(tmp_path / "one") == chunks_of(tmp_path / "more")
    assert diff(open_source(tmp_path / "one"), open_source(tmp_path / "more")).differences == ()
    assert find_damage(tmp_path / "more") is None


def test_a_component_alone(tmp_path: Path) -> None:
    state = training_state()
    resharded(
        save_as("ours", tmp_path / "a", state), tmp_path / "b", mesh={"dp": 2}, selection=Selection(prefix="model")
    )
    loaded = {key: torch.empty_like(tensor) for key, tensor in state["model"].items()}
    tte.load(loaded, tmp_path / "b")
    assert tte.fingerprint(loaded) == tte.fingerprint(state["model"])


def test_damage_leaves_no_target(tmp_path: Path) -> None:
    source = save_as("dp=2", tmp_path / "a", {"w": random_bits((512, 300), torch.float32)})
    flip_byte(source / "__1_0.distcp", 200_000)
    for num_processes in (1, 2):
        with pytest.raises(DamagedCheckpointError, match=r"__1_0\.distcp"):
            resharded(source, tmp_path / "b", mesh={"dp": 4}, num_processes=num_processes, max_bytes=32 << 20)
    assert {path.name for path in tmp_path.iterdir()} == {"a", "a-plain"}


def test_an_existing_target_stays_unless_it_may_be_replaced(tmp_path: Path) -> None:
    source = save_as("ours", tmp_path / "a", tensors())
    target = save_as("ours", tmp_path / "b", {"w": torch.ones(3)})
    with pytest.raises(FileExistsError, match="pass overwrite=True"):
        resharded(source, target, mesh={"dp": 2})
    assert chunks_of(target).keys() == {"w"}
    resharded(source, target, mesh={"dp": 2}, overwrite=True)
    assert diff(open_source(source), open_source(target)).differences == ()
    resharded(target, target, mesh={"dp": 3}, overwrite=True)
    assert diff(open_source(source), open_source(target)).differences == ()


@pytest.mark.parametrize("num_processes", [1, 2])
def test_a_full_disk_is_an_error_and_leaves_nothing(tmp_path: Path, num_processes: int) -> None:
    source = save_as("ours", tmp_path / "a", {"w": random_bits((2048, 300), torch.float32)})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        with pytest.raises(OSError, match=r"__[01]_0\.distcp") as caught:
            resharded(source, tmp_path / "b", mesh={"dp": 2}, num_processes=num_processes, max_bytes=32 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert caught.value.errno == errno.EFBIG
    assert os.listdir(tmp_path) == ["a"]


def test_tensors_that_are_not_plain_memory_are_refused(tmp_path: Path) -> None:
    state = {"plain": torch.ones(3), "quantised": torch.quantize_per_tensor(torch.ones(4), 0.5, 0, torch.qint8)}
    source = save_as("stock", tmp_path / "a", state)
    with pytest.raises(LayoutError, match="quantised"):
        resharded(source, tmp_path / "b", mesh={"dp": 2})
    assert os.listdir(tmp_path) == ["a"]


def test_a_lost_chunk_is_damage(tmp_path: Path) -> None:
    source = open_source(save_as("dp=2", tmp_path / "a", {"w": torch.ones(4, 4)}))
    half = source.state.tensors["w"]._replace(chunks=_core.ChunkIndex.of_boxes([((0, 0), (2, 4))]))
    source.state = SavedState({"w": half}, source.state.planner_data)
    with pytest.raises(DamagedCheckpointError, match="do not hold every element"):
        reshard(source, tmp_path / "b", mesh={"dp": 2}, num_processes=1)
    assert not (tmp_path / "b").exists()
