"""Saves with ``reuse=`` in an object store: what has not changed is copied by the store, under faults and kills too."""

import os
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import obstore.fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from fault_proxy import FaultProxy
from models import differences
from ranks_of_stores import in_store
from request_faults import Fault
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import torchtitan_ext as tte
from torchtitan_ext.checkpoint import SaveResult
from torchtitan_ext.storage.checkpoint_files import shared_name, sharing_save
from torchtitan_ext.storage.commit.leftovers import find_dead_files, is_checkpoint_name, save_id_of
from torchtitan_ext.storage.inspect.verify import verify
from torchtitan_ext.storage.location import Location
from torchtitan_ext.storage.native import shared_files
from torchtitan_ext.storage.objects import commit, leftovers
from torchtitan_ext.storage.objects.folder import ObjectFolder
from torchtitan_ext.storage.objects.leftovers import left_saves, remove_left_save, remove_object_step, store_time

NUM_BASE = 20
SHAPE = (64, 96)
BASE_BYTES = NUM_BASE * 64 * 96 * 4
COPY = "x-amz-copy-source"

pytestmark = pytest.mark.usefixtures("faulty")


def whole(step: int, changed: int = 1) -> dict[str, torch.Tensor]:
    """Tensors of which the last ones change with each step."""
    state = {f"base.{number:02}": torch.arange(64 * 96.0).view(SHAPE) + 7 * number for number in range(NUM_BASE)}
    return state | {key: state[key] - 1000 * step for key in sorted(state)[NUM_BASE - changed :]}


def save(url: str, step: int, *, reuse: str | None = "latest", changed: int = 1) -> SaveResult:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*is overwritten")
        return tte.save(whole(step, changed) | {"step": step}, f"{url}/step-{step}", no_dist=True, reuse=reuse)


def check(url: str, step: int, changed: int = 1) -> None:
    """It is whole, by all checksums and by fingerprints, and as it was made."""
    assert verify(Location(f"{url}/step-{step}"), is_deep=True).damages == []
    found = {key: torch.zeros(SHAPE) for key in whole(step)} | {"step": 0}
    tte.load(found, f"{url}/step-{step}", prove=True, no_dist=True)
    assert found.pop("step") == step and differences(found, whole(step, changed)) == []


def names_at(url: str, step: int) -> list[str]:
    return sorted(ObjectFolder(Location(f"{url}/step-{step}")).stamps())


def copies(proxy: FaultProxy, url: str, step: int) -> list[str]:
    """What the folder of a step has of other saves, by the names of its objects."""
    named = {name: (sharing_save(name), save_id_of(name)) for name in names_at(url, step)}
    return [name for name, (writer, owner) in named.items() if writer not in (None, owner)]


def uploaded_bytes(url: str, step: int, proxy: FaultProxy) -> int:
    found = ObjectFolder(Location(f"{url}/step-{step}")).stamps()
    return sum(found[name].num_bytes for name in found if name not in copies(proxy, url, step))


def test_what_has_not_changed_is_copied_by_the_store(url: str, proxy: FaultProxy) -> None:
    assert save(url, 1).reused_bytes == 0
    for step in (2, 3, 4):
        result = save(url, step)
        # Nineteen tensors of twenty: the object is copied as it is, with the one that has changed.
        assert result.reused_bytes >= BASE_BYTES * 19 // 20 and result.not_reused == ""
        assert result.num_bytes < 2 * BASE_BYTES // 20
        assert len(copies(proxy, url, step)) == 1 and uploaded_bytes(url, step, proxy) < 3 * BASE_BYTES // 20
    for step in (1, 2):
        remove_object_step(Location(f"{url}/step-{step}"))
    for step in (3, 4):
        check(url, step)


def test_what_is_partly_unchanged_is_uploaded_once_more_and_then_copied(url: str, proxy: FaultProxy) -> None:
    save(url, 1, changed=10)
    result = save(url, 2, changed=10)
    assert result.reused_bytes == 0 and result.num_bytes > BASE_BYTES and result.not_reused == ""
    assert len([name for name in names_at(url, 2) if name.endswith(".distcp")]) == 2
    for step in (3, 4):
        result = save(url, step, changed=10)
        assert BASE_BYTES // 2 <= result.reused_bytes < result.num_bytes + 2000
        assert result.num_bytes < BASE_BYTES * 6 // 10
    remove_object_step(Location(f"{url}/step-2"))
    check(url, 4, changed=10)


def save_sharded(rank: int, world_size: int, url: str, step: int) -> tuple[int, str]:
    mesh = init_device_mesh("cpu", (world_size,))
    state = {key: tte.full.distribute_tensor(one, mesh, [Shard(0)]) for key, one in whole(step).items()}
    result = tte.save(state | {"step": step}, f"{url}/step-{step}", reuse="latest")
    return result.reused_bytes, result.not_reused


@pytest.mark.parametrize("world_size", [2, 4])
def test_each_rank_copies_its_own(run_world: Any, faulty: dict[str, str], url: str, world_size: int) -> None:
    for step in (1, 2):
        run_world(world_size, in_store, faulty, save_sharded, url, step)
    answers = run_world(world_size, in_store, faulty, save_sharded, url, 3)
    assert answers[0][0] >= BASE_BYTES * 19 // 20 and answers == [(answers[0][0], "")] * world_size
    run_world(3, in_store, faulty, save_sharded, url, 4)  # is cut otherwise
    assert run_world(3, in_store, faulty, save_sharded, url, 5)[0][0] >= BASE_BYTES * 19 // 20
    for step in (3, 5):
        check(url, step)


def run_manager(rank: int, world_size: int, url: str, stop: int) -> list[int]:
    with tte.CheckpointManager(url, every=1, keep=2, reuse=True) as manager:
        state = {**whole(0), "step": 0}
        start = manager.resume(state)
        reused = []
        for step in range(start + 1, stop + 1):
            manager.save(whole(step) | {"step": step}, step)
            result = manager.wait()
            assert result is not None and result.not_reused == ""
            reused.append(result.reused_bytes)
    return reused


def test_a_managed_run(run_world: Any, faulty: dict[str, str], url: str) -> None:
    first, *others = run_world(2, in_store, faulty, run_manager, url, 4)[0]
    assert first == 0 and min(others) > 0
    assert run_world(2, in_store, faulty, run_manager, url, 5)[0][0] > 0
    assert tte.latest(url) == f"{url}/step-5" and names_at(url, 1) == []
    check(url, 5)


def test_stock_reads_copies_and_a_copy_of_all_on_a_disk_is_a_checkpoint(url: str, tmp_path: Path) -> None:
    for step in (1, 2):
        save(url, step)
    obstore.fsspec.register("s3", asynchronous=False)
    found = {key: torch.zeros(SHAPE) for key in whole(2)} | {"step": 0}
    dcp.load(found, storage_reader=FsspecReader(f"{url}/step-2"), no_dist=True)
    assert found.pop("step") == 2 and differences(found, whole(2)) == []
    store, step = ObjectFolder(Location(f"{url}/step-2")), tmp_path / "step-2"
    step.mkdir()
    for name in store.stamps():
        assert is_checkpoint_name(name)
        (step / name).write_bytes(store.read(name))
    assert verify(step, is_deep=True).damages == [] and find_dead_files(step, None) == []
    result = tte.save(whole(3) | {"step": 3}, tmp_path / "step-3", reuse="latest", no_dist=True)
    assert result.reused_bytes >= BASE_BYTES * 19 // 20
    dcp.load(found, checkpoint_id=tmp_path / "step-3", no_dist=True)
    assert differences({key: found[key] for key in whole(3)}, whole(3)) == []


def test_a_lost_index_leaves_the_checksums_of_a_copy(url: str, proxy: FaultProxy) -> None:
    for step in (1, 2):
        save(url, step)
    store = ObjectFolder(Location(f"{url}/step-2"))
    store.delete([name for name in store.stamps() if name.startswith(".tte_index")])
    found = {"base.00": torch.zeros(SHAPE)}
    with pytest.warns(UserWarning, match="has no index"):
        tte.load(found, f"{url}/step-2", no_dist=True)
    assert torch.equal(found["base.00"], whole(2)["base.00"])
    (name,) = copies(proxy, url, 2)
    content = bytearray(store.read(name))
    content[5000] ^= 1
    store.put(name, bytes(content))
    with pytest.raises(Exception, match="do not match their checksum"), pytest.warns(UserWarning, match="no index"):
        tte.load(found, f"{url}/step-2", no_dist=True)


def test_a_step_over_itself(url: str) -> None:
    save(url, 1)
    result = save(url, 1)
    assert result.reused_bytes == pytest.approx(BASE_BYTES, rel=0.05)
    check(url, 1)


HEALED = [
    Fault("lose_answer"),
    Fault("lose_answer", cut="reset"),
    Fault("cut_before"),
    Fault("cut_before", cut="reset"),
    Fault("cut_answer", num_bytes=10),
    Fault("answer", status=500),
    Fault("answer", status=503),
    Fault("answer", status=429, retry_after_seconds=1),
    Fault("late", seconds=0.7),
]


@pytest.mark.sampled(0.4)
@pytest.mark.parametrize("fault", HEALED, ids=str)
def test_a_fault_of_a_copy_is_healed(url: str, proxy: FaultProxy, fault: Fault) -> None:
    save(url, 1)
    rule = proxy.add(fault, method="PUT", header=COPY, matches={1})
    result = save(url, 2)
    assert rule.num_fired == 1 and result.not_reused == "" and result.reused_bytes > 0
    proxy.wait_until_idle()
    assert len(copies(proxy, url, 2)) == 1
    check(url, 2)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (Fault("answer", status=404), "cannot be shared: there is no such object"),
        (Fault("answer", status=403), "cannot be shared: .*403"),
        (Fault("answer", status=503), "cannot be shared: .*503"),
        (Fault("answer", status=409), "409"),
        (Fault("lose_answer"), "cannot be shared"),
    ],
    ids=str,
)
def test_what_the_store_does_not_copy_is_uploaded(url: str, proxy: FaultProxy, fault: Fault, reason: str) -> None:
    save(url, 1)
    rule = proxy.add(fault, method="PUT", header=COPY)
    with pytest.warns(UserWarning, match=f"written again: .*{reason}"):
        result = save(url, 2)
    proxy.remove(rule)
    assert result.reused_bytes == 0 and result.num_bytes > BASE_BYTES and copies(proxy, url, 2) == []
    check(url, 2)
    assert save(url, 3).reused_bytes > 0


def test_an_object_that_a_clean_up_takes_meanwhile_is_uploaded(
    url: str, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(url, 1)
    find = shared_files._worth_sharing

    def find_too_late(*args: Any) -> list[str]:
        remove_object_step(Location(f"{url}/step-1"))
        return find(*args)

    monkeypatch.setattr(shared_files, "_worth_sharing", find_too_late)
    with pytest.warns(UserWarning, match="cannot be shared: there is no such object"):
        save(url, 2)
    check(url, 2)


def _another_object(url: str) -> None:
    (name,) = [name for name in names_at(url, 1) if name.endswith(".distcp")]
    store = ObjectFolder(Location(f"{url}/step-1"))
    store.put(name, store.read(name)[:-1] + b"x")


def _shorter_object(url: str) -> None:
    (name,) = [name for name in names_at(url, 1) if name.endswith(".distcp")]
    store = ObjectFolder(Location(f"{url}/step-1"))
    store.put(name, store.read(name)[:100])


def _no_fingerprints(url: str) -> None:
    save(url, 1, reuse=None)


def _lost_index(url: str) -> None:
    store = ObjectFolder(Location(f"{url}/step-1"))
    store.delete([name for name in store.stamps() if ".tte_index" in name])


def _damaged_metadata(url: str) -> None:
    ObjectFolder(Location(f"{url}/step-1")).put(".metadata", b"damaged")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_another_object, "is not the file that its index describes"),
        (_shorter_object, "cannot be shared|is not the file"),
        (_no_fingerprints, "was saved without fingerprints"),
        (_lost_index, "has no index of ours"),
        (_damaged_metadata, r"step-1/\.metadata"),
    ],
)
def test_what_cannot_be_reused_is_uploaded_and_said(
    url: str, proxy: FaultProxy, change: Callable[[str], None], reason: str
) -> None:
    save(url, 1)
    change(url)
    with pytest.warns(UserWarning, match=f"written again: .*({reason})"):
        result = save(url, 2)
    assert result.reused_bytes == 0 and copies(proxy, url, 2) == []
    assert len([name for name in names_at(url, 2) if name.endswith(".distcp")]) <= 2
    check(url, 2)


def test_more_than_a_store_copies_at_once_is_uploaded(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    save(url, 1)
    monkeypatch.setattr(shared_files, "MAX_COPY_BYTES", 1000)
    with pytest.warns(UserWarning, match="a store copies at most 1000"):
        save(url, 2)
    check(url, 2)


def test_of_another_bucket_nothing_is_copied(url: str, proxy: FaultProxy) -> None:
    proxy.clear()
    with pytest.raises(OSError, match="within one bucket, not from s3://other"):
        ObjectFolder(Location(url)).copy_from(ObjectFolder(Location("s3://other/run/step-1")), "a", "b")
    assert proxy.log() == []


def test_names_that_a_url_encodes(url: str) -> None:
    store, target = ObjectFolder(Location(f"{url}/a%20run")), ObjectFolder(Location(f"{url}/b%2Bc"))
    store.put("a", b"content")
    target.copy_from(store, "a", "b")
    assert target.read("b") == b"content"


def kill_before_the_commit(rank: int, world_size: int, url: str) -> None:
    commit.RunningObjectSave.commit = lambda *args, **kwargs: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore
    save_sharded(rank, world_size, url, 2)


def test_a_kill_between_copies_and_commit(
    run_world: Any, faulty: dict[str, str], url: str, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_world(2, in_store, faulty, save_sharded, url, 1)
    before = names_at(url, 1)
    with pytest.raises(RuntimeError, match="died"):
        run_world(2, in_store, faulty, kill_before_the_commit, url)
    step = Location(f"{url}/step-2")
    assert len(copies(proxy, url, 2)) == 2 and tte.latest(url) == f"{url}/step-1"
    assert left_saves(step, store_time(step)) == [], "its lease may be renewed yet"
    monkeypatch.setattr(leftovers, "LEASE_SECONDS", -1.0)
    (left,) = left_saves(step, store_time(step))
    assert set(copies(proxy, url, 2)) < set(left.names)
    assert remove_left_save(step, left) and names_at(url, 2) == [] and names_at(url, 1) == before
    check(url, 1)
    assert run_world(2, in_store, faulty, save_sharded, url, 2)[0][0] > 0
    check(url, 2)


def test_a_failed_save_deletes_its_copies(url: str, proxy: FaultProxy) -> None:
    save(url, 1)
    proxy.add(Fault("answer", status=403), method="PUT", path=r"\.tte_index")
    with pytest.raises(Exception, match="403"):
        save(url, 2)
    assert names_at(url, 2) == []
    check(url, 1)


def test_names_say_who_wrote_a_file_and_whose_it_is() -> None:
    first, second, third = ("1" * 32, "2" * 32, "3" * 32)
    copy = shared_name(f"__4_{first}.distcp", second)
    assert copy == f"__4_{first}.0.{second}.distcp" and is_checkpoint_name(copy)
    assert sharing_save(copy) == first and save_id_of(copy) == second
    assert shared_name(copy, third) == f"__4_{first}.0.{third}.distcp"
    assert shared_name(copy) == f"__4_{first}.0.distcp", "a link on a disk"
    assert shared_name(f"__4_{first}.1.{first}.distcp", second) == f"__4_{first}.1.{second}.distcp"
    # Links of a checkpoint that was copied into a store are not taken for what another save left.
    assert save_id_of(f"__4_{first}.0.distcp") is None
    assert shared_name("__4_0.distcp", second) is None
