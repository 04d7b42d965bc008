"""Safetensors in an object store: of any layout, in bounded memory, seen as a whole or not at all, under faults too."""

import json
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from extent import SOAK
from fault_proxy import FaultProxy
from models import BY_NAME, UNEVEN, build_model, build_whole, random_whole
from random_layouts import SideOfTransfer, build, random_layouts
from ranks_of_stores import hurried_in_store as in_store
from reference import same_bits
from request_faults import Fault
from safetensors.torch import load as parse
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import torchtitan_ext as tte
from torchtitan_ext import transforms
from torchtitan_ext.errors import SaveInProgressError, TorchtitanExtError
from torchtitan_ext.storage.formats.safetensors_files import NAME_OF_DTYPE
from torchtitan_ext.storage.location import Location
from torchtitan_ext.storage.objects import commit, parts
from torchtitan_ext.storage.objects.folder import ObjectFolder
from torchtitan_ext.storage.raw_tensor import DTYPES
from torchtitan_ext.storage.weights import object_weights
from torchtitan_ext.storage.weights import one_writer as one_writer_module
from torchtitan_ext.transforms import Rule, Transform

NUM_STATES = 6 * SOAK
INDEX = "model.safetensors.index.json"
SHARD = r"/model-.*\.safetensors"

pytestmark = pytest.mark.usefixtures("faulty", "hurried")


def names_at(url: str) -> list[str]:
    return sorted(ObjectFolder(Location(url)).stamps())


def read_by_the_library(url: str) -> dict[str, torch.Tensor]:
    """The tensors of the files that the index names, as Hugging Face's libraries read a copy of the folder."""
    store = ObjectFolder(Location(url))
    index = json.loads(store.read(INDEX))
    files = {name: parse(store.read(name)) for name in sorted(set(index["weight_map"].values()))}
    assert index["weight_map"] == {fqn: name for name, part in files.items() for fqn in part}
    assert sorted([*files, INDEX]) == names_at(url)
    return {fqn: tensor for part in files.values() for fqn, tensor in part.items()}


def assert_same(found: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]) -> None:
    assert found.keys() == truth.keys()
    assert [fqn for fqn, whole in truth.items() if not same_bits(found[fqn], whole.detach().contiguous())] == []


def random_tensors(seed: int) -> dict[str, torch.Tensor]:
    draw = random.Random(seed)
    dtypes = [DTYPES[name] for name in NAME_OF_DTYPE if name in DTYPES and "e8m0" not in name]
    return {
        f"layers.{number}.w": random_whole(
            tuple(draw.choice([0, 1, 2, 3, 5, 7, 12, 33]) for _ in range(draw.randint(1, 3))),
            draw.choice(dtypes),
            draw.randrange(2**31),
        )
        for number in range(draw.randint(1, 14))
    }


@contextmanager
def small(round_bytes: int, window_bytes: int) -> Iterator[None]:
    with (
        patch.multiple(one_writer_module, ROUND_BYTES=round_bytes, _LEAST_BYTES=round_bytes),
        patch.object(object_weights, "_WINDOW_BYTES", window_bytes),
        patch.object(parts, "_LEAST_PART_BYTES", 5 << 20),  # smaller ones no store takes
    ):
        yield


def save_random(rank: int, world_size: int, url: str, seed: int) -> None:
    draw = random.Random(seed)
    truth = random_tensors(seed)
    if draw.random() < 0.5:
        side = SideOfTransfer(draw, world_size, truth)
        state, orders = side.tensors, side.orders
    else:
        state, orders = build(truth, random_layouts(seed, world_size, truth))
    # Pieces, windows and rounds that are much smaller than the tensors.
    with small(draw.choice([64, 1000, 1 << 20]), draw.choice([64, 1000, 1 << 20])):
        size = draw.choice([1, 500, 5000, 10**9])
        tte.weights.save(state, url, planner=tte.SavePlanner(layouts=orders), max_file_bytes=size)


@pytest.mark.sampled(0.5)
@pytest.mark.parametrize("seed", range(NUM_STATES))
def test_random_layouts(run_world: Any, faulty: dict[str, str], url: str, seed: int) -> None:
    run_world([1, 2, 4, 6][seed % 4], in_store, faulty, save_random, url, seed)
    assert_same(read_by_the_library(url), random_tensors(seed))


def save_model(rank: int, world_size: int, layout: str, url: str, transform: Transform | None) -> None:
    model = build_model(BY_NAME[layout], UNEVEN)
    tte.weights.save(model.state_dict(), url, max_file_bytes=1000, transform=transform)


def load_model(rank: int, world_size: int, url: str) -> list[str]:
    whole = build_whole(UNEVEN).state_dict()
    mesh = init_device_mesh("cpu", (world_size,))
    state = {
        key: tte.full.distribute_tensor(torch.zeros_like(one), mesh, [Shard(0)]) if one.ndim else torch.zeros_like(one)
        for key, one in whole.items()
    }
    tte.weights.load(state, url)
    return [key for key, one in whole.items() if not same_bits(tte.full_tensor(state[key]), one)]


@pytest.mark.parametrize("layout", ["fsdp2", "hsdp2x2_tp2", "fsdp4_tp2"])
def test_models_of_any_mesh(run_world: Any, faulty: dict[str, str], url: str, layout: str) -> None:
    run_world(BY_NAME[layout].world_size, in_store, faulty, save_model, layout, url, None)
    assert len(names_at(url)) > 3
    assert_same(read_by_the_library(url), build_whole(UNEVEN).state_dict())
    assert run_world(3, in_store, faulty, load_model, url) == [[]] * 3


def test_through_a_transform(run_world: Any, faulty: dict[str, str], url: str) -> None:
    whole = build_whole(UNEVEN).state_dict()
    turned = next(key for key, one in whole.items() if one.ndim == 2)
    rules = [Rule(turned, "turned", [transforms.transpose(0, 1), transforms.cast("bfloat16")])]
    rules += [Rule(key, key) for key in whole if key != turned]
    run_world(2, in_store, faulty, save_model, "fsdp2", url, Transform(rules))
    found = read_by_the_library(url)
    assert same_bits(found.pop("turned"), whole[turned].T.contiguous().bfloat16())
    assert_same(found, {key: one for key, one in whole.items() if key != turned})


def test_a_save_beside_training(url: str) -> None:
    state = {"w": torch.arange(30.0)}
    tte.weights.async_save(state, url).result()
    assert_same(read_by_the_library(url), state)


def save_beside_training(rank: int, world_size: int, url: str) -> str:
    with pytest.raises(TorchtitanExtError) as caught:
        tte.weights.async_save({"w": torch.arange(30.0)}, url).result()
    return str(caught.value)


def test_ranks_have_no_group_beside_training(run_world: Any, faulty: dict[str, str], url: str) -> None:
    told = run_world(2, in_store, faulty, save_beside_training, url)
    assert all("call tte.weights.save" in one for one in told) and names_at(url) == []


def save_unevenly(rank: int, world_size: int, url: str) -> int:
    """The first ranks have all of the first half of the file. Returns the most memory of the file at a time."""
    send, most = object_weights.FilesToObjects._send, 0

    def watched(self: Any, number: int, end: int) -> None:
        nonlocal most
        most = max(most, os.stat(self.paths[number]).st_blocks * 512)
        send(self, number, end)

    mesh = init_device_mesh("cpu", (world_size,))
    whole = torch.arange(4096 * 1024, dtype=torch.int32).view(4096, 1024)  # 16 MiB
    state: dict[str, Any] = {f"shared.{dim}": tte.full.distribute_tensor(whole, mesh, [Shard(dim)]) for dim in range(2)}
    state |= {f"own.{number}": whole[:1024] + number for number in range(8)}
    with small(4 << 20, 1 << 20), patch.object(object_weights.FilesToObjects, "_send", watched):
        tte.weights.save(state, url)
    return most


def test_a_file_is_never_in_memory(run_world: Any, faulty: dict[str, str], url: str) -> None:
    most = run_world(4, in_store, faulty, save_unevenly, url)
    # Of a file of 64 MiB a part that is not full, and what comes in few rounds.
    assert sorted(most)[:3] == [0, 0, 0] and 0 < max(most) <= 24 << 20
    found = read_by_the_library(url)
    assert sum(one.nbytes for one in found.values()) == 64 << 20
    assert torch.equal(found["shared.1"].view(-1), torch.arange(4096 * 1024, dtype=torch.int32))
    assert torch.equal(found["own.7"], found["shared.0"][:1024] + 7)


@pytest.mark.parametrize("name", [INDEX, "model.safetensors", "adapter.safetensors", ".metadata"])
def test_what_is_there_is_not_replaced(url: str, name: str) -> None:
    ObjectFolder(Location(url)).put(name, b"")
    with pytest.raises(Exception, match=f"FileExistsError.*holds {name}; give a folder without weights"):
        tte.weights.save({"w": torch.ones(3)}, url, no_dist=True)
    assert names_at(url) == [name]


def test_other_files_stay(url: str) -> None:
    ObjectFolder(Location(url)).put("tokenizer.json", b"{}")
    tte.weights.save({"w": torch.ones(3)}, url, no_dist=True)
    assert "tokenizer.json" in names_at(url)


HEALED = [
    Fault("lose_answer"),
    Fault("lose_answer", cut="reset"),
    Fault("cut_before"),
    Fault("answer", status=500),
    Fault("answer", status=503),
    Fault("late", seconds=0.7),
]


@pytest.mark.sampled(0.4)
@pytest.mark.parametrize("fault", HEALED, ids=str)
@pytest.mark.parametrize("path", [SHARD, INDEX])
def test_a_fault_is_healed(url: str, proxy: FaultProxy, path: str, fault: Fault) -> None:
    rule = proxy.add(fault, method="PUT", path=path, matches=range(1, 3))
    state = {"a": torch.arange(3000.0), "b": torch.arange(2000)}
    tte.weights.save(state, url, no_dist=True, max_file_bytes=1)
    assert rule.num_fired >= 1
    proxy.wait_until_idle()
    assert_same(read_by_the_library(url), state)


def save_or_say(rank: int, world_size: int, url: str) -> str:
    mesh = init_device_mesh("cpu", (world_size,))
    try:
        tte.weights.save(
            {"w": tte.full.distribute_tensor(torch.arange(64.0), mesh, [Shard(0)]), "v": torch.ones(99)},
            url,
            max_file_bytes=1,
        )
    except TorchtitanExtError as error:
        return f"{type(error).__name__}: {error}"
    return "saved"


@pytest.mark.parametrize("path", [SHARD, INDEX])
def test_a_store_that_refuses(run_world: Any, faulty: dict[str, str], url: str, proxy: FaultProxy, path: str) -> None:
    rule = proxy.add(Fault("answer", status=403), method="PUT", path=path)
    told = run_world(2, in_store, faulty, save_or_say, url)
    assert told[0] == told[1] and "PermissionError" in told[0] and "403" in told[0]
    proxy.remove(rule)
    assert names_at(url) == []
    assert run_world(2, in_store, faulty, save_or_say, url) == ["saved"] * 2


def test_a_store_that_does_not_say_keeps_all(url: str, proxy: FaultProxy) -> None:
    proxy.add(Fault("answer", status=500), method="PUT", path=INDEX)
    with pytest.raises(TorchtitanExtError, match="nothing was deleted"):
        tte.weights.save({"w": torch.ones(3)}, url, no_dist=True)
    assert len(names_at(url)) == 1


def two_savers(rank: int, world_size: int, url: str) -> str:
    """Each rank saves by itself; both have begun before one commits."""
    put = commit.ObjectCommit.put

    def put_together(self: Any, *args: Any) -> None:
        dist.barrier()
        put(self, *args)

    commit.ObjectCommit.put = put_together  # type: ignore[method-assign]
    try:
        tte.weights.save(
            {"w": torch.full((30,), rank), "v": torch.full((30,), rank)}, url, no_dist=True, max_file_bytes=1
        )
        return "saved"
    except SaveInProgressError:
        return "lost"
    finally:
        commit.ObjectCommit.put = put  # type: ignore[method-assign]


def test_of_two_savers_one_wins(run_world: Any, faulty: dict[str, str], url: str) -> None:
    told = run_world(2, in_store, faulty, two_savers, url)
    assert sorted(told) == ["lost", "saved"]
    winner = torch.full((30,), told.index("saved"))
    assert_same(read_by_the_library(url), {"w": winner, "v": winner})


def save_until_killed(rank: int, world_size: int, url: str, victim: int, seconds: float) -> str:
    if rank == victim:
        threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
    told = save_or_say(rank, world_size, url)
    if rank == victim:
        time.sleep(5.0)
    return told


@pytest.mark.parametrize("case", range(2 * SOAK))
def test_kills(run_world: Any, faulty: dict[str, str], url: str, case: int) -> None:
    """There is an index that names whole files, or none, and the next save of the folder has all."""
    draw = random.Random(case)
    for number in range(3):
        with pytest.raises(RuntimeError, match="died"):
            run_world(
                2, in_store, faulty, save_until_killed, f"{url}/{number}", draw.randrange(2), draw.uniform(0.0, 0.2)
            )
        names = names_at(f"{url}/{number}")
        if INDEX not in names:
            assert run_world(2, in_store, faulty, save_or_say, f"{url}/{number}") == ["saved"] * 2
        store = ObjectFolder(Location(f"{url}/{number}"))
        index = json.loads(store.read(INDEX))["weight_map"]
        assert_same(
            {key: parse(store.read(name))[key] for key, name in index.items()},
            {"w": torch.arange(64.0), "v": torch.ones(99)},
        )
        found = {"w": torch.zeros(64), "v": torch.zeros(99)}
        tte.weights.load(found, f"{url}/{number}", no_dist=True)
        assert torch.equal(found["w"], torch.arange(64.0))
