"""Dry runs in one process: states on the meta device over a process group that is none, descriptions of meshes, stages,
checkpoints that cannot be read, refusals.
"""

import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoints import without_metadata
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.testing._internal.distributed.fake_pg import FakeStore

import torchtitan_ext as tte
from torchtitan_ext.elastic import ElasticPolicy, RngState
from torchtitan_ext.errors import LayoutError, ReshardError
from torchtitan_ext.offline.amounts import parse_amount, text_of_bytes


@pytest.fixture
def fake_world() -> Iterator[Any]:
    """Starts worlds of any size of which this process is one rank."""

    def start(world_size: int, rank: int = 0) -> None:
        dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())

    yield start
    if dist.is_initialized():
        dist.destroy_process_group()


def on_meta(mesh: DeviceMesh, rows: int, *placements: Placement) -> DTensor:
    """Rows of 8 float32 each, evenly cut."""
    shape = [rows, 8]
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard):
            shape[placement.dim] //= mesh.shape[axis]
    local = torch.empty(shape, device="meta")
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size((rows, 8)), stride=(8, 1))


def saved(path: Path, state: dict[str, Any]) -> Path:
    tte.save(state, path, no_dist=True)
    return path


def pickled(value: Any) -> bytes:
    """A value as it is written."""
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def test_a_state_on_meta_stands_for_a_thousand_ranks(fake_world) -> None:
    fake_world(1024, rank=700)
    mesh = init_device_mesh("cpu", (2, 64, 8), mesh_dim_names=("dp_replicate", "dp_shard", "tp"))
    state = {
        "model": {
            "w": on_meta(mesh, 1024, Replicate(), Shard(0), Shard(1)),
            "norm": on_meta(mesh, 64, Replicate(), Shard(0), Replicate()),
            "step": torch.tensor(3.0, device="meta"),
        },
        "lr": 0.5,
    }
    found = tte.dry_run(state)
    assert (found.world.size, found.world.mesh) == (1024, {"dp_replicate": 2, "dp_shard": 64, "tp": 8})
    w_bytes, norm_bytes = 1024 * 8 * 4, 64 * 8 * 4
    assert {one.state_bytes for one in found.save.ranks} == {w_bytes // 512 + norm_bytes // 64 + 4}
    value_bytes = len(pickled(0.5))
    assert sum(one.num_bytes for one in found.save.ranks) == w_bytes + norm_bytes + 4 + value_bytes
    assert found.save.problems == ()


def test_tensors_on_part_of_the_mesh_have_siblings_on_the_rest(fake_world) -> None:
    fake_world(8, rank=3)
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
    found = tte.dry_run({"w": on_meta(mesh["tp"], 8, Shard(0)), "v": on_meta(mesh["dp"], 8, Shard(0))})
    assert {one.state_bytes for one in found.save.ranks} == {4 * 32 + 2 * 32}
    assert sum(one.num_bytes for one in found.save.ranks) == 2 * 8 * 32


def test_stages_of_a_pipeline_hold_different_keys(fake_world) -> None:
    fake_world(4)
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    first = {name: on_meta(mesh, rows, Shard(0)) for name, rows in {"embed": 64, "layers.0": 8}.items()}
    second = {name: on_meta(mesh, rows, Shard(0)) for name, rows in {"layers.1": 8, "head": 32}.items()}
    found = tte.dry_run([first, second])
    assert [one.state_bytes for one in found.save.ranks] == [72 * 8] * 4 + [40 * 8] * 4
    assert [one.num_bytes for one in found.save.ranks] == [72 * 8] * 4 + [40 * 8] * 4
    assert found.save.problems == ()
    apart = DeviceMesh("cpu", torch.tensor([2, 1, 3, 6]), mesh_dim_names=("dp",), _init_backend=False, _rank=2)
    beyond = {"w": on_meta(apart, 8, Shard(0))}
    with pytest.raises(ValueError, match="ranks 0, 1, 1, 2, 2, 3, 3, 6, ...; expected each rank of the job in one"):
        tte.dry_run([{"w": on_meta(mesh, 8, Shard(0))}, beyond])


def test_whole_tensors_and_a_mesh(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(64, 32, bias=False), torch.nn.LayerNorm(32))
    found = tte.dry_run({"model": model}, mesh={"dp": 4, "tp": 2}, placements={"0.weight": {"tp": 1}})
    assert {one.state_bytes for one in found.save.ranks} == {64 * 32 * 4 // 8 + 2 * 32 * 4 // 4}
    assert found.notes == ()
    assumed = tte.dry_run({"model": model}, mesh={"dp": 4, "tp": 2})
    assert "nothing says which dims tp cuts of 1 tensors (model.0.weight)" in assumed.notes[0]

    path = saved(tmp_path, {"model": {"0.weight": torch.zeros(32, 64), "1.weight": torch.zeros(31)}})
    refused = tte.dry_run({"model": model}, mesh={"dp": 4}, checkpoint=path, policy=ElasticPolicy())
    assert refused.load is not None
    assert [(one.kind, one.fqn) for one in refused.problems] == [
        ("wrong_shape", "model.1.weight"),
        ("missing_key", "model.1.bias"),
    ]
    assert refused.load.report is not None
    assert "model  reshard  REFUSED, 1 entry, 1 missing" in str(refused)


def test_values_of_ranks_are_asked_for_by_rank(tmp_path: Path) -> None:
    state = {"w": torch.zeros(8, 8), "dataloader": {f"dp_rank_{rank}": {"at": rank} for rank in range(4)}}
    path = saved(tmp_path, {**state, "rng": {f"rank_{rank}": [rank] for rank in range(8)}})
    same = tte.dry_run(path, mesh={"dp": 4, "tp": 2})
    assert same.problems == ()
    assert {one.num_bytes for one in same.load.ranks} == {32 + len(pickled(0)) + len(pickled([0]))}
    fewer = tte.dry_run(path, mesh={"dp": 2, "tp": 4})
    assert [(one.kind, one.fqn) for one in fewer.problems] == [("unclaimed_keys", "dataloader.dp_rank_*.at")]
    more = tte.dry_run(path, mesh={"dp": 16})
    assert {one.fqn for one in more.problems} == {"dataloader.dp_rank_4.at", "rng.rank_8"}
    reset = tte.dry_run(path, mesh={"dp": 16}, policy=ElasticPolicy({"dataloader": "reset", "rng": "reset"}))
    assert reset.problems == ()
    part = tte.dry_run(path, mesh={"dp": 16}, components=["w"])
    assert part.problems == ()
    assert {one.num_bytes for one in part.load.ranks} == {32, 0}


def test_virtual_shards_that_cannot_feed_all_ranks(tmp_path: Path) -> None:
    shards = {f"shard_{shard}_of_8": ({"taken": shard},) for shard in range(8)}
    path = saved(tmp_path, {"w": torch.zeros(64, 8), "dataloader": {**shards, "epoch": 1}})
    assert tte.dry_run(path, mesh={"dp": 8, "tp": 2}).problems == ()
    (problem,) = tte.dry_run(path, mesh={"dp": 16}).problems
    assert (problem.kind, problem.fqn) == ("cannot_reshard", "dataloader")
    assert "8 virtual shards cannot feed 16 data-parallel ranks" in problem.detail
    assert tte.dry_run(path, mesh={"dp": 16}, policy=ElasticPolicy({"dataloader": "reset"})).problems == ()


def test_components_that_are_nowhere_are_refused_with_the_nearest_names(tmp_path: Path) -> None:
    path = saved(tmp_path, {"layers.0.w": torch.zeros(16, 8), "optimizer": {"step": torch.tensor(3)}, "step": 3})
    words = "no component and no key matches 'modle'; perhaps 'model' is meant; there are model, optimizer, step"
    for state in (path, {"layers.0.w": torch.zeros(16, 8)}):
        with pytest.raises(ValueError, match=re.escape(words)):
            tte.dry_run(state, mesh={"dp": 2}, components=["modle"], checkpoint=None if state is path else path)


@pytest.mark.parametrize(
    ("components", "num_tensor_bytes", "has_value"),
    [(["model"], 256, False), (["optimizer"], 8, False), (["model", "step"], 256, True), (["*"], 264, True)],
)
def test_tensors_at_the_top_are_the_component_model(
    tmp_path: Path, components: list[str], num_tensor_bytes: int, has_value: bool
) -> None:
    path = saved(tmp_path, {"layers.0.w": torch.zeros(16, 8), "optimizer": {"step": torch.tensor(3)}, "step": 3})
    for policy in (None, ElasticPolicy()):
        found = tte.dry_run(path, mesh={"dp": 2}, components=components, policy=policy)
        num_bytes = num_tensor_bytes + (len(pickled(3)) if has_value else 0)
        assert found.problems == () and [one.num_bytes for one in found.load.ranks] == [num_bytes] * 2


def test_generators_that_start_anew(tmp_path: Path) -> None:
    path = saved(tmp_path, {"rng": RngState(0, device="cpu"), "step": 3})
    report = tte.dry_run(path, mesh={"dp": 2}, policy=ElasticPolicy({"rng": "reset"})).load.report
    assert {line.name: line.outcome for line in report.components} == {"rng": "starts anew", "step": "1 entry"}
    report = tte.dry_run(path, mesh={"dp": 2}, policy=ElasticPolicy({"rng.common": "reset"})).load.report
    assert "its own rule is for all its keys" in report.problems[0].detail


def test_the_example_of_the_document_runs() -> None:
    document = Path(__file__).parents[3] / "docs" / "use" / "dry_run.md"
    (example,) = re.findall(r"```python\n(.*?)```", document.read_text(), re.S)
    exec(example, {})


class Counter:
    """A component that says how it reshards."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("a dry run changes nothing")

    def reshard(self, saved: Any, old: Any, new: Any) -> Any:
        raise tte.errors.CannotReshardError(f"counted on {old.size} ranks, not on {new.size}", "count anew")


def test_components_with_a_rule_of_their_own_are_asked(tmp_path: Path, fake_world) -> None:
    path = saved(tmp_path, {"w": torch.zeros(8, 8), "counter": Counter()})
    fake_world(4)
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    state = {"w": on_meta(mesh, 8, Shard(0)), "counter": Counter()}
    for policy in (ElasticPolicy(), None):  # a load asks them without a policy too
        (problem,) = tte.dry_run(state, checkpoint=path, policy=policy).problems
        assert problem.detail.startswith("counted on 1 ranks, not on 4")
    assert tte.dry_run(state, checkpoint=path, policy=ElasticPolicy({"counter": "keep"})).problems == ()


def test_a_save_that_would_be_refused(fake_world) -> None:
    fake_world(4)
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    local = torch.empty(3, 8, device="meta")
    wrong = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=torch.Size((8, 8)), stride=(8, 1))
    found = tte.dry_run({"sum": on_meta(mesh, 8, Partial()), "wrong": wrong, "right": on_meta(mesh, 8, Shard(0))})
    assert {(one.kind, one.fqn) for one in found.problems} == {
        ("partial_placement", "sum"),
        ("layout_matches_nothing", "wrong"),
    }
    assert all(one.num_bytes == 0 for one in found.save.ranks)
    assert "A save would end with:" in str(found)


def test_results_are_plain_data(tmp_path: Path) -> None:
    path = saved(tmp_path, {"model": {"w": torch.zeros(16, 8)}, "step": 3})
    found = tte.dry_run(path, mesh={"dp": 4}, policy=ElasticPolicy())
    loaded = json.loads(json.dumps(found.to_dict()))
    assert loaded["world"] == {"size": 4, "mesh": {"dp": 4}}
    assert loaded["load"]["report"]["text"].startswith("saved by 1 rank, loaded by 4 ranks (dp 4)")
    assert [one["num_bytes"] for one in loaded["load"]["ranks"]] == [found.load.ranks[0].num_bytes] * 4
    assert "load: bytes" in str(found)


@pytest.mark.parametrize("name", [".metadata", ".tte_index"])
def test_metadata_that_is_broken(tmp_path: Path, name: str) -> None:
    tte.save({"w": torch.zeros(16, 8)}, tmp_path, no_dist=True)
    if name == ".tte_index":
        without_metadata(tmp_path)
    content = (tmp_path / name).read_bytes()
    assert tte.dry_run(tmp_path, mesh={"dp": 2}).problems == ()
    for broken in (b"", content[: len(content) // 2], b"c__builtin__\neval\n(S'1/0'\ntR."):
        (tmp_path / name).write_bytes(broken)
        with pytest.raises(ReshardError, match="has no .metadata that can be read"):
            tte.dry_run(tmp_path, mesh={"dp": 2})


def test_checkpoints_without_tensors(tmp_path: Path) -> None:
    found = tte.dry_run(saved(tmp_path, {"step": 3}), mesh={"dp": 2})
    assert [one.state_bytes for one in found.load.ranks] == [0, 0]
    assert [one.num_bytes for one in found.load.ranks] == [len(pickled(3))] * 2


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (("/nowhere",), ValueError, "got a checkpoint and no mesh"),
        (("/nowhere", {"checkpoint": "/there", "mesh": {"dp": 2}}), ValueError, "twice"),
        (({},), None, ""),
        (({"w": torch.zeros(2)}, {"placements": {}}), ValueError, "got placements and no mesh"),
        (({}, {"components": ["w"]}), ValueError, "got components and no checkpoint"),
        (([],), ValueError, "got no state dict"),
        (([{}, {}], {"mesh": {"dp": 2}}), ValueError, "several stages and a mesh"),
        ((3,), TypeError, "expected a state dict"),
        (({}, {"policy": "reset"}), TypeError, "expected an ElasticPolicy"),
        (({}, {"mesh": {"dp": 1 << 20}}), ValueError, "expected at most 65,536"),
        (({"w": torch.zeros(2, 2)}, {"mesh": {"dp": 2}, "placements": {"v": {"dp": 0}}}), LayoutError, "v: matches"),
    ],
)
def test_arguments(arguments: tuple[Any, ...], error: type[Exception] | None, words: str) -> None:
    state, *options = arguments
    if error is None:
        assert tte.dry_run(state).world.size == 1
        return
    with pytest.raises(error, match=words):
        tte.dry_run(state, **(options[0] if options else {}))


def test_amounts() -> None:
    assert [parse_amount(text) for text in ("2GB", "1.5 kB", "64MiB", "7")] == [2e9, 1500.0, 64.0 * 1024**2, 7.0]
    for text in ("", "GB", "0GB", "-1GB", "2XB"):
        with pytest.raises(ValueError, match="expected bytes such as 2GB or 64MiB"):
            parse_amount(text)
    assert text_of_bytes(1_230_000) == "1.2 MB"


def test_storage_of_others_says_the_same(tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    path = saved(tmp_path, {"model": {"w": torch.zeros(16, 8), "v": torch.zeros(16, 8)}, "step": 3})
    ours = tte.dry_run(path, mesh={"dp": 4}).load
    theirs = tte.dry_run(f"file://{path}", mesh={"dp": 4}).load
    assert ours.ranks == theirs.ranks
