"""Commits into an object store under faults: lost answers, errors, kills, two savers, a clean-up beside living saves.

Whatever happens, the checkpoint is the old or the new one, whole: every load here proves itself by fingerprints.
"""

import random
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fault_proxy import FaultProxy
from lost_worlds import struck_after
from object_server import ObjectServer
from ranks_of_stores import hurried_in_store as in_store
from request_faults import Fault
from stored_names import left_at, names_at
from tier import SOAK
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import torchtitan_ext as tte
from torchtitan_ext.errors import (
    CheckpointFailedError,
    SaveInProgressError,
    TorchtitanExtError,
    UnknownOutcomeError,
)
from torchtitan_ext.storage.location import Location
from torchtitan_ext.storage.objects import commit, leftovers
from torchtitan_ext.storage.objects.leftovers import remove_left_save

NUM_RACES = 5 * SOAK
NUM_CLEANINGS = 5 * SOAK

METADATA = r"/\.metadata$"
DATA = r"\.distcp"
INDEX = r"/\.tte_index"

pytestmark = [pytest.mark.nightly("servers"), pytest.mark.usefixtures("faulty", "hurried")]


@pytest.fixture
def direct(object_server: ObjectServer) -> dict[str, str]:
    """How the store is reached past the proxy."""
    return object_server.environment


def state_of(number: int, rows: int = 37) -> dict[str, Any]:
    whole = torch.arange(rows * 3.0).view(rows, 3) + 1000 * number
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return {"w": whole, "number": number}
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {"w": tte.full.distribute_tensor(whole, mesh, [Shard(0)]), "number": number}


def save(number: int, url: str, **options: Any) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*is overwritten")
        tte.save(state_of(number), url, fingerprints=True, **options)


def number_at(url: str, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> int:
    """Which state the checkpoint is; it is whole, as its fingerprints say and as it was made."""
    with monkeypatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        state = {"w": torch.zeros(37, 3), "number": -1}
        tte.load(state, url, prove=True, no_dist=True)
    assert torch.equal(state["w"], state_of(state["number"])["w"])
    return state["number"]


@pytest.fixture
def number_of(direct: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Callable[[str], int]:
    return lambda url: number_at(url, direct, monkeypatch)


HEALED = [
    Fault("lose_answer"),
    Fault("lose_answer", cut="reset"),
    Fault("cut_before"),
    Fault("cut_request", num_bytes=10),
    Fault("answer", status=500),
    Fault("answer", status=503),
    Fault("answer", status=429, retry_after_seconds=1),
    Fault("answer", status=409),
    Fault("late"),
]


@pytest.mark.parametrize("has_earlier", [False, True])
@pytest.mark.parametrize("fault", HEALED, ids=str)
def test_a_fault_of_the_commit_is_healed(
    proxy: FaultProxy, url: str, number_of: Callable[[str], int], fault: Fault, has_earlier: bool
) -> None:
    if has_earlier:
        save(1, url, no_dist=True)
    rule = proxy.add(fault, method="PUT", path=METADATA, matches=range(1, 3))
    save(2, url, no_dist=True)
    assert rule.num_fired >= 1
    proxy.wait_until_idle()
    assert number_of(url) == 2
    assert not any(".lease" in name for name in names_at(url))


@pytest.mark.parametrize("fault", [one for one in HEALED if one.status != 409], ids=str)
def test_a_fault_of_data_is_healed(proxy: FaultProxy, url: str, number_of: Callable[[str], int], fault: Fault) -> None:
    rule = proxy.add(fault, method="PUT", path=DATA, matches=range(1, 3))
    save(1, url, no_dist=True)
    assert rule.num_fired >= 1 and number_of(url) == 1


@pytest.mark.parametrize(
    "fault",
    [
        Fault("cut_before"),
        Fault("cut_answer", num_bytes=50),
        Fault("answer", status=503),
        Fault("answer", status=429),
        Fault("lose_answer", cut="reset"),
    ],
    ids=str,
)
def test_a_fault_of_a_read_is_healed(
    proxy: FaultProxy, url: str, faulty: dict[str, str], monkeypatch: pytest.MonkeyPatch, fault: Fault
) -> None:
    save(1, url, no_dist=True)
    rule = proxy.add(fault, method="GET", path=f"{METADATA}|{DATA}|{INDEX}", matches=range(1, 20, 2))
    assert number_at(url, faulty, monkeypatch) == 1 and rule.num_fired >= 2


def test_a_store_that_takes_no_data(proxy: FaultProxy, url: str, number_of: Callable[[str], int]) -> None:
    save(1, url, no_dist=True)
    before = names_at(url)
    rule = proxy.add(Fault("answer", status=500), method="PUT", path=DATA)
    with pytest.raises(CheckpointFailedError, match="OSError.*500"):
        save(2, url, no_dist=True)
    proxy.remove(rule)
    assert number_of(url) == 1 and names_at(url) == before


def test_a_failed_save_that_cannot_clean_up(proxy: FaultProxy, url: str, number_of: Callable[[str], int]) -> None:
    save(1, url, no_dist=True)
    proxy.add(Fault("answer", status=403), method="PUT", path=DATA)
    proxy.add(Fault("cut_before", cut="reset"), method="POST")
    with pytest.warns(UserWarning, match="stay for gc"), pytest.raises(CheckpointFailedError, match="PermissionError"):
        save(2, url, no_dist=True)
    assert number_of(url) == 1


def test_a_store_that_does_not_say(
    proxy: FaultProxy, url: str, number_of: Callable[[str], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    save(1, url, no_dist=True)
    before = names_at(url)
    rule = proxy.add(Fault("answer", status=500), method="PUT", path=METADATA)
    with pytest.raises(UnknownOutcomeError, match="is there, whole, and nothing was deleted"):
        save(2, url, no_dist=True)
    proxy.remove(rule)
    assert number_of(url) == 1 and names_at(url) > before
    # What is left goes when no put of it can arrive any more.
    assert left_at(url, -1) == []
    monkeypatch.setattr(leftovers, "LEASE_SECONDS", -1.0)
    (left,) = left_at(url)
    assert not remove_left_save(Location(url), left)
    monkeypatch.setattr(leftovers, "COMMIT_LEASE_SECONDS", -1.0)
    assert remove_left_save(Location(url), left)
    assert number_of(url) == 1 and names_at(url) == before


def test_a_commit_that_arrives_late(proxy: FaultProxy, url: str, number_of: Callable[[str], int]) -> None:
    """The store does not say in time, and commits after all."""
    save(1, url, no_dist=True)
    slow = proxy.add(Fault("late"), method="PUT", path=METADATA, matches={1})
    proxy.add(Fault("answer", status=500), method="PUT", path=METADATA)
    with pytest.raises(UnknownOutcomeError):
        save(2, url, no_dist=True)
    proxy.wait_until_idle()
    assert slow.num_fired == 1 and number_of(url) == 2


def two_savers(rank: int, world_size: int, url: str, race: int) -> str:
    """Each rank saves by itself; both have begun before one commits."""
    put = commit.RunningObjectSave.put

    def put_together(self: Any, *args: Any) -> None:
        dist.barrier()
        put(self, *args)

    commit.RunningObjectSave.put = put_together  # type: ignore[method-assign]
    try:
        whole = torch.arange(37 * 3.0).view(37, 3) + 1000 * (10 * race + rank)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*is overwritten")
            tte.save({"w": whole, "number": 10 * race + rank}, url, fingerprints=True, no_dist=True)
        return "saved"
    except SaveInProgressError as error:
        return "lost" if "committed first" in str(error) else str(error)
    finally:
        commit.RunningObjectSave.put = put  # type: ignore[method-assign]


@pytest.mark.parametrize("race", range(NUM_RACES))
def test_of_two_savers_one_wins(
    run_world: Any, direct: dict[str, str], url: str, number_of: Callable[[str], int], race: int
) -> None:
    if race % 2:
        save(1, url, no_dist=True)
    told = run_world(2, in_store, direct, two_savers, url, race)
    assert sorted(told) == ["lost", "saved"]
    assert number_of(url) == 10 * race + told.index("saved")


def save_or_say(rank: int, world_size: int, url: str, number: int) -> str:
    try:
        save(number, url)
    except TorchtitanExtError as error:
        return f"{type(error).__name__}: {error}"
    return "saved"


KINDS = [
    lambda draw: Fault("lose_answer", cut=draw.choice(["close", "reset"])),
    lambda draw: Fault("cut_before", cut=draw.choice(["close", "reset"])),
    lambda draw: Fault("cut_request", num_bytes=draw.randint(0, 2000)),
    lambda draw: Fault("cut_answer", num_bytes=draw.randint(0, 2000)),
    lambda draw: Fault("answer", status=draw.choice([500, 503, 429, 409])),
    lambda draw: Fault("late"),
]


@pytest.mark.parametrize("case", range(SOAK))
def test_random_faults(
    run_world: Any,
    proxy: FaultProxy,
    faulty: dict[str, str],
    url: str,
    number_of: Callable[[str], int],
    case: int,
) -> None:
    """Twenty saves over each other, each under faults of one kind at random requests."""
    draw = random.Random(case)
    before = 0
    save(0, url, no_dist=True)
    for number in range(1, 21):
        world_size = draw.choice([1, 2, 4])
        rule = proxy.add(
            draw.choice(KINDS)(draw),
            method=draw.choice(["PUT", "GET", None]),
            path=draw.choice(["", METADATA, DATA, "tte_save"]),
            probability=draw.choice([0.2, 0.5, 1.0]),
        )
        told = run_world(world_size, in_store, faulty, save_or_say, url, number)
        proxy.remove(rule)
        proxy.wait_until_idle()
        found = number_of(url)
        assert len(set(told)) == 1, told
        if told[0] == "saved":
            assert found == number, rule
        else:
            assert told[0].startswith(("CheckpointFailedError", "UnknownOutcomeError")), told
            assert found == before or (found == number and "UnknownOutcomeError" in told[0]), (found, before, told)
        before = found


def save_until_killed(rank: int, world_size: int, url: str, number: int, victim: int, seconds: float) -> str:
    with struck_after(seconds, "kill") if rank == victim else nullcontext():
        return save_or_say(rank, world_size, url, number)


@pytest.mark.parametrize("case", range(SOAK))
def test_random_kills(
    run_world: Any, direct: dict[str, str], url: str, number_of: Callable[[str], int], case: int
) -> None:
    draw = random.Random(case)
    before, num_killed = 0, 0
    save(0, url, no_dist=True)
    for number in range(1, 11):
        world_size = draw.choice([1, 2, 4])
        victim = draw.randrange(world_size)
        try:
            told = run_world(
                world_size, in_store, direct, save_until_killed, url, number, victim, draw.uniform(0.0, 0.15)
            )
        except RuntimeError as error:
            assert "died" in str(error), error
            num_killed += 1
            told = []
        found = number_of(url)
        assert found in ((number,) if told and told[0] == "saved" else (before, number))
        before = found
    assert num_killed > 0


@pytest.fixture
def short_leases(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every lease has expired at once: a clean-up takes each living save for dead."""
    monkeypatch.setattr(leftovers, "LEASE_SECONDS", -1.0)
    yield


@pytest.mark.parametrize("case", range(NUM_CLEANINGS))
def test_a_clean_up_beside_living_saves(
    run_world: Any, direct: dict[str, str], url: str, number_of: Callable[[str], int], short_leases: None, case: int
) -> None:
    save(0, url, no_dist=True)
    is_over = threading.Event()
    removed: list[bool] = []

    def clean() -> None:
        while not is_over.is_set():
            removed.extend(remove_left_save(Location(url), left) for left in left_at(url, 3.0))

    cleaner = threading.Thread(target=clean)
    cleaner.start()
    try:
        told = run_world(2, in_store, direct, save_many, url, 10 * case)
    finally:
        is_over.set()
        cleaner.join()
    assert told[0] == told[1]
    saved = [number for number, outcome in told[0] if outcome == "saved"]
    others = [outcome for _, outcome in told[0] if outcome != "saved"]
    assert all("SaveInProgressError" in outcome and "a clean-up" in outcome for outcome in others), others
    assert number_of(url) == max(saved, default=0)


def save_many(rank: int, world_size: int, url: str, first: int) -> list[tuple[int, str]]:
    return [(number, save_or_say(rank, world_size, url, number)) for number in range(first + 1, first + 9)]


@pytest.mark.parametrize("path", [DATA, METADATA, INDEX])
def test_answers_that_change_on_the_way_are_told(
    proxy: FaultProxy, url: str, faulty: dict[str, str], monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    save(1, url, no_dist=True)
    rule = proxy.add(Fault("corrupt_answer"), method="GET", path=path)
    with pytest.raises(TorchtitanExtError, match="checksum|damaged|other bytes stand there|does not begin as"):
        number_at(url, faulty, monkeypatch)
    proxy.remove(rule)
    assert rule.num_fired and number_at(url, faulty, monkeypatch) == 1


@pytest.mark.parametrize("path", [DATA, METADATA, INDEX, r"\.lease$"])
def test_requests_that_change_on_the_way_are_refused_by_the_store(
    proxy: FaultProxy, url: str, number_of: Callable[[str], int], path: str
) -> None:
    save(1, url, no_dist=True)
    rule = proxy.add(Fault("corrupt_request"), method="PUT", path=path)
    with pytest.raises(TorchtitanExtError, match="BadDigest"):
        save(2, url, no_dist=True)
    proxy.remove(rule)
    assert rule.num_fired and number_of(url) == 1
