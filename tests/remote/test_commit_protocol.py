"""How a save commits into an object store: at each commit in a store of this process, at night on a server.

Whatever strikes, and wherever, the checkpoint is the old or the new one, whole: every load here proves itself by
fingerprints. ``test_object_commits.py`` has faults of the network, ranks and kills.
"""

import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from calls import call
from object_memory import Held, StoreInMemory, cut_before, lose_answer, refuse, repeat
from obstore.exceptions import AlreadyExistsError, GenericError, PermissionDeniedError, PreconditionError
from stored_names import left_at, names_at

import torchtitan_ext as tte
from torchtitan_ext.cli.output import FINE
from torchtitan_ext.errors import (
    CheckpointFailedError,
    LostRankError,
    SavedOverError,
    SaveInProgressError,
    TorchtitanExtError,
    UnknownOutcomeError,
)
from torchtitan_ext.storage.location import Location
from torchtitan_ext.storage.objects import commit, lease, leftovers
from torchtitan_ext.storage.objects.folder import ObjectFolder
from torchtitan_ext.storage.objects.leftovers import LeftSave, remove_left_save

METADATA, DATA, LEASE = r"/\.metadata$", r"\.distcp", r"\.lease$"


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[StoreInMemory]:
    monkeypatch.setattr(commit, "_FIRST_PAUSE", 0.0)
    with StoreInMemory().in_place() as store:
        yield store


@pytest.fixture(params=["memory", pytest.param("server", marks=pytest.mark.nightly("servers"))])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of a folder that is empty."""
    if request.param == "memory":
        request.getfixturevalue("store")
        return "s3://bucket/run"
    for name, value in request.getfixturevalue("object_server").environment.items():
        monkeypatch.setenv(name, value)
    return str(request.getfixturevalue("url"))


PLACE = "s3://bucket/run"
"""The same in the store of this process."""


def state_of(number: int) -> dict[str, Any]:
    return {"w": torch.arange(37 * 3.0).view(37, 3) + 1000 * number, "number": number}


def save(number: int, url: str) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*is overwritten")
        tte.save(state_of(number), url, fingerprints=True, no_dist=True)


def number_at(url: str) -> int:
    """Which state the checkpoint is; it is whole, as its fingerprints say and as it was made."""
    state = {"w": torch.zeros(37, 3), "number": -1}
    tte.load(state, url, prove=True, no_dist=True)
    assert torch.equal(state["w"], state_of(state["number"])["w"])
    return state["number"]


# A conflict of creators that S3 answers by 409 says nothing about the object.
HEALED = {
    "cut_before": cut_before,
    "lose_answer": lose_answer,
    "repeat": repeat,
    "conflict": refuse(AlreadyExistsError("ConditionalRequestConflict")),
    "refused": refuse(GenericError("500 Internal Server Error")),
}


@pytest.mark.parametrize("has_earlier", [False, True])
@pytest.mark.parametrize("fault", HEALED)
def test_a_fault_of_the_commit_is_healed(store: StoreInMemory, fault: str, has_earlier: bool) -> None:
    if has_earlier:
        save(1, PLACE)
    rule = store.at("put", METADATA, HEALED[fault], calls={1, 2})
    save(2, PLACE)
    assert rule.num_fired >= 1 and number_at(PLACE) == 2
    assert not any(name.endswith(".lease") for name in names_at(PLACE))


def test_the_decision_of_a_lease_conflicts_with_its_own_first_try(store: StoreInMemory) -> None:
    rule = store.at("put", LEASE, repeat, calls={2})
    save(1, PLACE)
    assert rule.num_fired == 1 and number_at(PLACE) == 1


def test_a_store_that_takes_no_data(store: StoreInMemory) -> None:
    save(1, PLACE)
    before = names_at(PLACE)
    store.at("open_writer", DATA, refuse(GenericError("500 Internal Server Error")))
    with pytest.raises(CheckpointFailedError, match="OSError.*500"):
        save(2, PLACE)
    assert number_at(PLACE) == 1 and names_at(PLACE) == before


def test_a_failed_save_that_cannot_clean_up(store: StoreInMemory) -> None:
    save(1, PLACE)
    store.at("open_writer", DATA, refuse(PermissionDeniedError("403 Forbidden")))
    rule = store.at("delete", "", refuse(GenericError("connection reset")))
    with pytest.warns(UserWarning, match="stay for gc"), pytest.raises(CheckpointFailedError, match="PermissionError"):
        save(2, PLACE)
    assert rule.num_fired > 1 and number_at(PLACE) == 1


def test_a_store_that_does_not_say(store: StoreInMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    save(1, PLACE)
    before = names_at(PLACE)
    monkeypatch.setattr(commit, "COMMIT_SECONDS", -1.0)
    rule = store.at("put", METADATA, refuse(GenericError("500 Internal Server Error")))
    with pytest.raises(UnknownOutcomeError, match="is there, whole, and nothing was deleted"):
        save(2, PLACE)
    store.remove(rule)
    assert number_at(PLACE) == 1 and names_at(PLACE) > before
    # What is left goes when no put of it can arrive any more.
    assert left_at(PLACE, -1) == []
    monkeypatch.setattr(leftovers, "LEASE_SECONDS", -1.0)
    (left,) = left_at(PLACE)
    assert not remove_left_save(Location(PLACE), left)
    monkeypatch.setattr(leftovers, "COMMIT_LEASE_SECONDS", -1.0)
    assert remove_left_save(Location(PLACE), left)
    assert number_at(PLACE) == 1 and names_at(PLACE) == before


def test_a_commit_that_arrives_late(store: StoreInMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store does not say in time, and commits after all."""
    save(1, PLACE)
    monkeypatch.setattr(commit, "COMMIT_SECONDS", -1.0)
    held = Held()
    store.at("put", METADATA, held)
    with pytest.raises(UnknownOutcomeError):
        save(2, PLACE)
    assert number_at(PLACE) == 1
    held.release()
    assert number_at(PLACE) == 2


def test_a_commit_that_arrives_late_finds_that_of_another_save(
    store: StoreInMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(1, PLACE)
    held = Held()
    with monkeypatch.context() as patch:
        patch.setattr(commit, "COMMIT_SECONDS", -1.0)
        store.at("put", METADATA, held, calls={1})
        with pytest.raises(UnknownOutcomeError):
            save(2, PLACE)
    save(3, PLACE)
    with pytest.raises(PreconditionError):
        held.release()
    assert number_at(PLACE) == 3


STAGES = {
    "data": ("open_writer", DATA),
    "lease": ("put", LEASE),
    "index": ("put", r"/\.tte_index"),
    "metadata": ("put", METADATA),
}


@pytest.mark.parametrize("has_earlier", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_a_save_within_another_commits_first(store: StoreInMemory, stage: str, has_earlier: bool) -> None:
    """Another saver begins and ends before a request of this one, wherever it stands."""
    if has_earlier:
        save(1, PLACE)

    def save_first(proceed: Callable[[], Any]) -> Any:
        save(3, PLACE)
        return proceed()

    # The lease is taken after the version that is replaced was noted, but before anything else.
    store.at(*STAGES[stage], save_first, calls={1})
    with pytest.raises(SaveInProgressError, match="committed first"):
        save(2, PLACE)
    assert number_at(PLACE) == 3
    assert not any(name.endswith(".lease") for name in names_at(PLACE))


@pytest.mark.parametrize("fault", HEALED)
def test_a_save_within_a_commit_under_a_fault(store: StoreInMemory, fault: str) -> None:
    """The first put meets a fault, and another save commits before the second one: one of them has won."""
    save(1, PLACE)
    told = []

    def act(proceed: Callable[[], Any]) -> Any:
        try:
            return HEALED[fault](proceed)
        finally:
            save(3, PLACE)
            told.append(number_at(PLACE))

    store.at("put", METADATA, act, calls={1})
    # The saver whose put arrived, and was replaced by the other, cannot know that it had committed.
    with pytest.raises(SaveInProgressError, match="committed first"):
        save(2, PLACE)
    assert told == [3] and number_at(PLACE) == 3


def test_of_two_savers_one_wins(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads; both have begun before one commits."""
    put, both = commit.RunningObjectSave.put, threading.Barrier(2)
    told: dict[int, str] = {}

    def put_together(self: Any, *args: Any) -> None:
        both.wait()
        put(self, *args)

    def save_or_say(number: int) -> None:
        try:
            save(number, place)
            told[number] = "saved"
        except SaveInProgressError as error:
            told[number] = "lost" if "committed first" in str(error) else str(error)

    monkeypatch.setattr(commit.RunningObjectSave, "put", put_together)
    savers = [threading.Thread(target=save_or_say, args=(number,)) for number in (2, 3)]
    for saver in savers:
        saver.start()
    for saver in savers:
        saver.join()
    assert sorted(told.values()) == ["lost", "saved"] and told[number_at(place)] == "saved"


@pytest.fixture
def short_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every lease has expired at once: a clean-up takes each living save for dead."""
    monkeypatch.setattr(leftovers, "LEASE_SECONDS", -1.0)


@pytest.mark.parametrize("stage", STAGES)
def test_a_clean_up_within_a_save(store: StoreInMemory, short_leases: None, stage: str) -> None:
    """It takes the save for dead before it has decided, and not after that."""
    save(1, PLACE)

    def clean(proceed: Callable[[], Any]) -> Any:
        for left in left_at(PLACE):
            remove_left_save(Location(PLACE), left)
        return proceed()

    call, name = STAGES[stage]
    # The first put of the lease is what there is to be cleaned, the second one the decision.
    store.at(call, name, clean, calls={2} if stage == "lease" else {1})
    if stage == "metadata":
        save(2, PLACE)
        assert number_at(PLACE) == 2
        return
    with pytest.raises(SaveInProgressError, match="a clean-up"):
        save(2, PLACE)
    assert number_at(PLACE) == 1


def test_a_save_that_was_taken_for_dead(place: str, short_leases: None, monkeypatch: pytest.MonkeyPatch) -> None:
    save(1, place)
    decide = lease.Lease.decide

    def go_on(self: lease.Lease) -> None:
        (left,) = left_at(place)
        assert remove_left_save(Location(place), left)
        decide(self)

    monkeypatch.setattr(lease.Lease, "decide", go_on)
    # What this save would commit is not there any more.
    with pytest.raises(SaveInProgressError, match="a clean-up"):
        save(2, place)
    assert number_at(place) == 1 and not any(".tte_save" in name for name in names_at(place))


def test_a_save_that_slept_through_gc_cannot_commit(
    place: str, short_leases: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, run_on = f"{place}/step-1", commit.RunningObjectSave.commit
    save(1, step)

    def go_on(self: Any, *args: Any, **options: Any) -> Any:
        assert call("gc", place, "--yes").code == FINE
        return run_on(self, *args, **options)

    monkeypatch.setattr(commit.RunningObjectSave, "commit", go_on)
    before = names_at(step)
    with pytest.raises(SaveInProgressError, match="a clean-up"):
        save(2, step)
    assert number_at(step) == 1 and names_at(step) == before


def test_a_renewed_lease_is_left_alone(place: str) -> None:
    """Also where the clean-up has found it expired before."""
    save_id, store = "3f" * 16, ObjectFolder(Location(place))
    saver = lease.Lease(store, save_id)
    store.put(f"__0_{save_id}.distcp", b"part")
    assert not remove_left_save(Location(place), LeftSave(save_id, tuple(names_at(place)), 4))
    saver.decide()
    assert not remove_left_save(Location(place), LeftSave(save_id, tuple(names_at(place)), 4))
    saver.release()
    assert names_at(place) == {f"__0_{save_id}.distcp"}


def test_a_save_that_wakes_up_in_its_clean_up(place: str, short_leases: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever of it is deleted already: it must not commit."""
    save_id, store = "3f" * 16, ObjectFolder(Location(place))
    saver = lease.Lease(store, save_id)
    store.put(f"__0_{save_id}.distcp", b"part")
    (left,) = left_at(place)
    delete, num_refused = ObjectFolder.delete, 0

    def delete_and_wake_up(self: ObjectFolder, names: list[str]) -> None:
        nonlocal num_refused
        delete(self, names)
        if names[0].startswith(".tte_clock"):
            return
        with monkeypatch.context() as patch:
            patch.setattr(ObjectFolder, "delete", delete)
            with pytest.raises(SaveInProgressError, match="a clean-up"):
                saver.decide()
        num_refused += 1

    monkeypatch.setattr(ObjectFolder, "delete", delete_and_wake_up)
    assert remove_left_save(Location(place), left) and num_refused == 2
    saver.stop()


def test_a_save_that_has_decided_is_left_alone(place: str, short_leases: None, monkeypatch: pytest.MonkeyPatch) -> None:
    save(1, place)
    put = commit.RunningObjectSave.put

    def go_on(self: Any, *args: Any) -> None:
        (left,) = left_at(place)
        assert not remove_left_save(Location(place), left)
        put(self, *args)

    monkeypatch.setattr(commit.RunningObjectSave, "put", go_on)
    save(2, place)
    assert number_at(place) == 2


def test_errors_have_types() -> None:
    for kind in (UnknownOutcomeError, SaveInProgressError, SavedOverError, LostRankError):
        assert issubclass(kind, TorchtitanExtError)


def corrupt(answer: Any) -> Any:
    class Corrupt:
        meta = answer.meta

        def bytes(self) -> bytes:
            content = bytearray(bytes(answer.bytes()))
            content[0] ^= 1
            return bytes(content)

    return Corrupt()


@pytest.mark.parametrize("name", [DATA, METADATA, r"/\.tte_index"])
def test_answers_that_change_on_the_way_are_told(store: StoreInMemory, name: str) -> None:
    save(1, PLACE)
    rule = store.at("get", name, lambda proceed: corrupt(proceed()))
    with pytest.raises(TorchtitanExtError, match="checksum|damaged|other bytes stand there|does not begin as"):
        number_at(PLACE)
    store.remove(rule)
    assert rule.num_fired and number_at(PLACE) == 1
