"""Checkpoints in an object store: there and back, read by stock and of stock's, overwritten, damaged, removed."""

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import obstore.fsspec
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoints import DTYPES, random_bits, tensors
from data.saved_by_0_2.generate import whole_tensors
from models import differences, poison
from object_server import ObjectServer
from random_layouts import build, random_layouts, random_truth
from reference import same_bits
from safetensors.torch import load_file
from safetensors.torch import save as serialize
from tier import SOAK
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import torchtitan_ext as tte
from torchtitan_ext.errors import (
    CheckpointFailedError,
    NoCheckpointError,
    SavedOverError,
    StateRefusedError,
    WrongValueError,
)
from torchtitan_ext.storage import location
from torchtitan_ext.storage.location import Location
from torchtitan_ext.storage.objects.folder import ObjectFolder
from torchtitan_ext.storage.objects.leftovers import LeftSave, left_saves, remove_left_save, store_time

pytestmark = pytest.mark.nightly("servers")

NUM_STATES = 5 * SOAK
NUM_TENSORS = 20


@pytest.fixture(autouse=True)
def environment(object_server: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    for name, value in object_server.environment.items():
        monkeypatch.setenv(name, value)
    return object_server.environment


def in_store(rank: int, world_size: int, environment: dict[str, str], function: Callable[..., Any], *args: Any) -> Any:
    """Calls a function of a rank that finds the store."""
    os.environ.update(environment)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*is overwritten")
        return function(rank, world_size, *args)


def left_at(url: str, grace_seconds: float = 3600.0) -> list[LeftSave]:
    """What dead and replaced saves left, by the store's clock."""
    return left_saves(Location(url), store_time(Location(url)), grace_seconds)


def data_of(url: str) -> str:
    """The name of the only data file of a checkpoint."""
    (name,) = [name for name in ObjectFolder(Location(url)).stamps() if name.endswith(".distcp")]
    return name


def save(state: dict[str, Any], url: str, **options: Any) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*is overwritten")
        tte.save(state, url, no_dist=True, **options)


def loaded(state: dict[str, Any], url: str, **options: Any) -> dict[str, Any]:
    """A state of these shapes, as a checkpoint has it."""
    empty = {key: torch.empty_like(one) if isinstance(one, torch.Tensor) else None for key, one in state.items()}
    tte.load(empty, url, no_dist=True, **options)
    return empty


def save_random(rank: int, world_size: int, url: str, seed: int) -> None:
    truth = random_truth(seed, NUM_TENSORS)
    state, orders = build(truth, random_layouts(seed, world_size, truth))
    tte.save(state, url, planner=tte.SavePlanner(layouts=orders), fingerprints=True)


def load_random(rank: int, world_size: int, url: str, seed: int, **options: Any) -> list[str]:
    truth = random_truth(seed, NUM_TENSORS)
    layouts = random_layouts(seed + 1000, world_size, truth)
    state, orders = build(truth, layouts)
    poison(state)
    tte.load(state, url, planner=tte.LoadPlanner(layouts=orders), prove=True, **options)
    return [
        line
        for name, layout in layouts.items()
        for line in differences({name: state[name]}, {name: truth[name]}, list(layout.steps))
    ]


@pytest.mark.parametrize("seed", range(NUM_STATES))
def test_random_layouts_there_and_back(run_world: Any, environment: dict[str, str], url: str, seed: int) -> None:
    source, target = [(4, 6), (6, 4), (8, 4), (4, 8)][seed % 4]
    run_world(source, in_store, environment, save_random, url, seed)
    assert run_world(target, in_store, environment, load_random, url, seed) == [[]] * target


def load_shared(rank: int, world_size: int, url: str, seed: int) -> list[str]:
    return load_random(rank, world_size, url, seed, share_reads=True)


def test_reads_that_ranks_share(run_world: Any, environment: dict[str, str], url: str) -> None:
    run_world(4, in_store, environment, save_random, url, 11)
    assert run_world(4, in_store, environment, load_shared, url, 11) == [[]] * 4


def test_all_dtypes_by_bits(url: str) -> None:
    state = tensors() | {"turned": torch.arange(12.0).view(3, 4).t(), "step": 3}
    state["tied"] = state["model.wide"]
    save(state, url)
    found = loaded(state, url)
    assert found.pop("step") == 3
    assert [key for key, one in found.items() if not same_bits(one, state[key])] == []


def test_parts_of_a_large_object(url: str) -> None:
    state = {"w": torch.arange(40 << 20, dtype=torch.int32), "small": torch.ones(3)}
    save(state, url)
    stamp = ObjectFolder(Location(url)).stamps()[data_of(url)]
    assert stamp.num_bytes > 160 << 20 and "-11" in (stamp.tag or ""), "one tag of eleven parts"
    found = loaded(state, url)
    assert torch.equal(found["w"], state["w"])
    assert torch.equal(loaded({"small": torch.empty(3)}, url)["small"], state["small"])


def test_stock_reads_ours_and_the_reverse(url: str, tmp_path: Path) -> None:
    obstore.fsspec.register("s3", asynchronous=False)
    state = {f"{dtype}".removeprefix("torch."): random_bits((9, 7), dtype) for dtype in DTYPES} | {"step": 3}
    save(state, f"{url}/ours")
    found = {key: torch.zeros_like(one) if isinstance(one, torch.Tensor) else 0 for key, one in state.items()}
    dcp.load(found, storage_reader=FsspecReader(f"{url}/ours"), no_dist=True)
    assert found.pop("step") == 3
    assert [key for key, one in found.items() if not same_bits(one, state[key])] == []
    dcp.save(state, storage_writer=FileSystemWriter(tmp_path), no_dist=True)
    for path in tmp_path.iterdir():
        ObjectFolder(Location(f"{url}/stock")).put(path.name, path.read_bytes())
    found = loaded(state, f"{url}/stock")
    assert found.pop("step") == 3
    assert [key for key, one in found.items() if not same_bits(one, state[key])] == []


def test_a_copy_on_a_disk_is_a_checkpoint(url: str, tmp_path: Path) -> None:
    state = {"w": torch.arange(1000.0), "step": 3}
    save(state, url, fingerprints=True)
    folder = ObjectFolder(Location(url))
    for name in folder.stamps():
        (tmp_path / name).write_bytes(folder.read(name))
    assert "all checksums match; 1 tensor proved" in run_command("verify", str(tmp_path), "--deep", "--prove").stdout
    assert torch.equal(loaded(state, str(tmp_path), prove=True)["w"], state["w"])


def test_a_reader_of_what_is_replaced(url: str) -> None:
    old, new = {"w": torch.zeros(3)}, {"w": torch.ones(3)}
    save(old, url)
    reader = tte.FileReader(url)
    metadata = reader.read_metadata()
    save(new, url)
    # Its objects are there until they are cleaned up: it reads the old step, whole.
    place = {"w": torch.full((3,), 7.0)}
    again = tte.FileReader(url)
    again.read_metadata = lambda *args, **kwargs: metadata  # type: ignore[method-assign]
    dcp.load(place, storage_reader=again, planner=tte.LoadPlanner(), no_dist=True)
    assert torch.equal(place["w"], old["w"])
    reader.set_up_storage_reader(metadata, True)
    assert left_at(url) == []
    (left,) = left_at(url, -1)
    assert remove_left_save(Location(url), left) and left_at(url, -1) == []
    assert torch.equal(loaded(new, url)["w"], new["w"])
    with pytest.raises(SavedOverError, match="of the earlier save is gone"):
        reader.read_box(next(iter(metadata.storage_data or {})), [0], torch.zeros(3))


def flip(content: bytes) -> bytes:
    return content[:100] + bytes([content[100] ^ 1]) + content[101:]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (flip, "do not match their checksum"),
        (lambda content: content[:-1], "the file has"),
        (lambda content: content[:10], "the file has"),
        (lambda content: content + b"x", "the file has"),
        (None, "is missing"),
    ],
)
def test_a_damaged_object_is_named(url: str, change: Callable[[bytes], bytes] | None, told: str) -> None:
    state = {"w": torch.arange(1000.0)}
    save(state, url)
    folder, name = ObjectFolder(Location(url)), data_of(url)
    if change is None:
        folder.delete([name])
    else:
        folder.put(name, change(folder.read(name)))
    with pytest.raises(CheckpointFailedError, match=f"DamagedCheckpointError.*{told}") as caught:
        loaded(state, url)
    assert f"{url}/{name}" in str(caught.value)
    done = run_command("verify", url, "--deep")
    assert done.returncode == 1 and name in done.stdout


def test_a_lost_index(url: str) -> None:
    state = {"w": torch.arange(1000.0), "step": 3}
    save(state, url)
    folder = ObjectFolder(Location(url))
    folder.delete([name for name in folder.stamps() if name.startswith(".tte_index")])
    with pytest.warns(UserWarning, match="has no index"):
        assert torch.equal(loaded(state, url)["w"], state["w"])


def train(rank: int, world_size: int, run: str, num_steps: int) -> list[int]:
    state: dict[str, Any] = {"weight": torch.zeros(3), "step": 0}
    with tte.CheckpointManager(run, every=1, keep=2) as manager:
        step = manager.resume(state)
        for number in range(step + 1, step + 1 + num_steps):
            state = {"weight": state["weight"] + number, "step": number}
            manager.save(state, number)
        manager.wait()
        dist.barrier()
        return [step, *manager.steps(), int(state["weight"][0])]


def test_a_run_that_grows_and_shrinks(run_world: Any, environment: dict[str, str], url: str) -> None:
    assert run_world(2, in_store, environment, train, url, 3) == [[0, 2, 3, 6]] * 2
    assert run_world(4, in_store, environment, train, url, 2) == [[3, 4, 5, 15]] * 4
    assert tte.latest(url) == f"{url}/step-5"
    folder = ObjectFolder(Location(f"{url}/step-5"))
    folder.put(data_of(f"{url}/step-5"), b"")
    with pytest.warns(UserWarning, match="step 4 is loaded, 1 newer skipped"):
        assert tte.CheckpointManager(url).resume(state := {"weight": torch.zeros(3), "step": 0}) == 4
    assert state["weight"].tolist() == [10.0] * 3


@pytest.fixture
def three_steps(url: str) -> Iterator[str]:
    for step in (1, 2, 3):
        save({"w": torch.ones(3) * step}, f"{url}/step-{step}")
    save({"w": torch.ones(3)}, f"{url}/step-2")
    yield url


def run_command(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, "-m", "torchtitan_ext", *arguments], capture_output=True, text=True)


def command(*arguments: str) -> Any:
    """What a command that ends well says as JSON."""
    done = run_command(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_commands(three_steps: str) -> None:
    listed = command("ls", three_steps)["steps"]
    assert [(step["step"], step["state"], step["world_size"]) for step in listed] == [
        (step, "finished", 1) for step in (1, 2, 3)
    ]
    assert command("latest", three_steps)["step"] == 3
    assert command("verify", three_steps, "--deep")["is_whole"]
    dry = command("gc", three_steps, "--keep", "2")
    assert [step["step"] for step in dry["removed"]] == [1] and not dry["is_done"]
    assert [step["step"] for step in command("ls", three_steps)["steps"]] == [1, 2, 3]
    assert command("gc", three_steps, "--keep", "2", "--yes")["not_removed"] == []
    assert [step["step"] for step in command("ls", three_steps)["steps"]] == [2, 3]


def test_a_clean_up_of_a_damaged_step_removes_nothing(three_steps: str) -> None:
    """Of two saves in one folder only ``.metadata`` says which is the checkpoint."""
    url = f"{three_steps}/step-2"
    assert len(left_at(url, -1)) == 1
    ObjectFolder(Location(url)).put(".metadata", b"damaged")
    before = sorted(ObjectFolder(Location(url)).stamps())
    assert left_at(url, -1) == []
    assert [step["state"] for step in command("ls", three_steps)["steps"]] == ["finished"] * 3
    command("gc", three_steps, "--keep", "3", "--yes")
    assert sorted(ObjectFolder(Location(url)).stamps()) == before


def test_commands_that_read_a_checkpoint(url: str, tmp_path: Path) -> None:
    state = {"model": {"w": torch.arange(60.0).view(6, 10), "b": torch.ones(3)}, "step": 3}
    save(state, f"{url}/step-3", fingerprints=True)
    state["model"]["w"][0, 0] = 7.0
    save(state, f"{url}/step-4", fingerprints=True)
    found = command("inspect", f"{url}/step-3")
    assert {key["name"]: key["value"] for key in found["keys"]}["step"] == 3 and found["world_size"] == 1
    assert command("verify", f"{url}/step-3", "--prove")["num_proved"] == 2
    assert not run_command("diff", f"{url}/step-3", f"{url}/step-3").returncode
    told = run_command("diff", f"{url}/step-3", f"{url}/step-4")
    assert told.returncode == 1 and "model.w" in told.stdout
    command("reshard", f"{url}/step-4", str(tmp_path / "dcp"), "--mesh", "dp=2", "--processes", "2")
    command("convert", f"{url}/step-4", str(tmp_path / "hf"), "--to", "safetensors", "--prefix", "model")
    assert torch.equal(load_file(next((tmp_path / "hf").glob("*.safetensors")))["w"], state["model"]["w"])
    assert not run_command("diff", f"{url}/step-4", str(tmp_path / "dcp")).returncode
    told = run_command("reshard", f"{url}/step-4", f"{url}/step-5", "--mesh", "dp=2")
    assert told.returncode == 2 and "expected a directory" in told.stderr


def test_what_is_not_there(url: str) -> None:
    assert tte.latest(url) is None
    with pytest.raises(NoCheckpointError, match="has no finished checkpoint"):
        tte.load({"w": torch.ones(3)}, url, step="latest", no_dist=True)
    with pytest.raises(StateRefusedError, match="there is no such object"):
        loaded({"w": torch.ones(3)}, f"{url}/step-1")


def test_no_secret_is_told(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "wrong-secret-of-nobody"
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
    with pytest.raises(Exception) as caught:
        save({"w": torch.ones(3)}, url)
    assert url in str(caught.value) and "PermissionError" in str(caught.value)
    assert secret not in str(caught.value)


@pytest.mark.parametrize("name", ["s3://", "s3://bucket//x"])
def test_a_url_that_names_nothing(name: str) -> None:
    with pytest.raises(CheckpointFailedError, match=r"OSError: \[Errno \d+\] Generic URL error") as caught:
        save({"w": torch.ones(3)}, name)
    assert str(caught.value).count("Errno") == 1


def test_old_weights_are_not_joined(url: str) -> None:
    ObjectFolder(Location(url)).put("model.safetensors", b"")
    with pytest.raises(Exception, match="old weights"):
        save({"w": torch.ones(3)}, url)
    assert list(ObjectFolder(Location(url)).stamps()) == ["model.safetensors"]


def test_without_obstore(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(location, "has_obstore", lambda: False)
    with pytest.warns(UserWarning, match=r"no commit.*torchtitan-ext\[remote\]"), suppress(Exception):
        tte.save({"w": torch.ones(3)}, url, no_dist=True)  # without a package of fsspec for S3 it fails


def put_weights(url: str, tensors_of_files: dict[str, dict[str, torch.Tensor]]) -> None:
    """Weights as Hugging Face's hub has them: files, and an index."""
    folder = ObjectFolder(Location(url))
    weight_map = {key: name for name, of_file in tensors_of_files.items() for key in of_file}
    for name, of_file in tensors_of_files.items():
        folder.put(name, serialize(of_file))
    folder.put("model.safetensors.index.json", json.dumps({"weight_map": weight_map}).encode())


def load_weights(rank: int, world_size: int, url: str) -> list[bool]:
    mesh = init_device_mesh("cpu", (world_size,))
    state = {
        "w": tte.full.distribute_tensor(torch.zeros(7, 300), mesh, [Shard(0)]),
        "b": torch.zeros(5, dtype=torch.bfloat16),
    }
    tte.weights.load(state, url)
    return [torch.equal(tte.full_tensor(state["w"]), torch.arange(2100.0).view(7, 300)), bool((state["b"] == 1).all())]


def test_weights_of_a_hub(run_world: Any, environment: dict[str, str], url: str) -> None:
    # A header that is longer than the first request brings.
    many = {f"layers.{number}.weight": torch.full((1,), float(number)) for number in range(4000)}
    files = {
        "model-00001-of-00002.safetensors": {"w": torch.arange(2100.0).view(7, 300), **many},
        "model-00002-of-00002.safetensors": {"b": torch.ones(5, dtype=torch.bfloat16)},
    }
    put_weights(url, files)
    assert run_world(3, in_store, environment, load_weights, url) == [[True, True]] * 3
    one = {"layers.3999.weight": torch.zeros(1)}
    tte.load(one, f"{url}/model-00001-of-00002.safetensors", no_dist=True)
    assert one["layers.3999.weight"].item() == 3999
    renamed = {"v": torch.zeros(7, 300)}
    rules = tte.transforms.Transform([tte.transforms.Rule("w", "v")], drop=["*", "**"])
    tte.load(renamed, url, transform=rules, no_dist=True)
    assert torch.equal(renamed["v"], files["model-00001-of-00002.safetensors"]["w"])
    ObjectFolder(Location(url)).put("model-00002-of-00002.safetensors", b"cut")
    with pytest.raises(StateRefusedError, match="model-00002-of-00002.safetensors"):
        tte.load(one, url, no_dist=True)
    with pytest.raises(WrongValueError, match="expected a safetensors file"):
        save({"w": torch.ones(3)}, f"{url}/step-1")
        tte.weights.load({"w": torch.ones(3)}, f"{url}/step-1")


def test_a_checkpoint_that_version_0_2_saved_loads(url: str) -> None:
    folder = ObjectFolder(Location(url))
    for path in (Path(__file__).parents[1] / "data" / "saved_by_0_2" / "in_a_store").iterdir():
        folder.put(path.name, path.read_bytes())
    state: dict[str, Any] = {name: torch.zeros_like(tensor) for name, tensor in whole_tensors().items()}
    report = tte.load(state, url, prove=True, no_dist=True)
    assert report.proof is not None and set(report.proof.proved) == set(state)
    assert all(same_bits(state[name], tensor) for name, tensor in whole_tensors().items())
