"""What the tests of object stores rely on: the server keeps S3's promises, seen through obstore."""

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import obstore
import pytest
from object_server import PORTS, ObjectServer, open_store, remove_sockets
from obstore.exceptions import AlreadyExistsError, GenericError, PermissionDeniedError, PreconditionError
from obstore.store import S3Store

# The server takes a lock for a conditional put, and asks once a second for one that is taken: losers wait for seconds.
NUM_THREADS, NUM_RACES = 4, 5
MIN_PART_BYTES = 5 << 20


@pytest.fixture
def store(object_server: ObjectServer, bucket_prefix: str) -> S3Store:
    return open_store(object_server, prefix=bucket_prefix)


def paths(store: S3Store, prefix: str | None = None) -> list[str]:
    return [str(meta["path"]) for batch in obstore.list(store, prefix) for meta in batch]


def content(store: S3Store, path: str) -> bytes:
    return bytes(obstore.get(store, path).bytes())


def test_objects_are_put_read_listed_and_deleted(store: S3Store) -> None:
    for name in ["a/1", "a/2", "ab"]:
        obstore.put(store, name, name.encode() * 100)
    assert content(store, "a/1") == b"a/1" * 100
    assert bytes(obstore.get_range(store, "a/2", start=3, end=6)) == b"a/2"
    assert [bytes(part) for part in obstore.get_ranges(store, "ab", starts=[0, 199], ends=[2, 200])] == [b"ab", b"b"]
    assert obstore.head(store, "ab")["size"] == 200
    assert paths(store) == ["a/1", "a/2", "ab"] and paths(store, "a") == ["a/1", "a/2"]
    listed = obstore.list_with_delimiter(store)
    assert listed["common_prefixes"] == ["a"] and [meta["path"] for meta in listed["objects"]] == ["ab"]
    obstore.delete(store, ["a/1", "ab"])
    assert paths(store) == ["a/2"]
    with pytest.raises(FileNotFoundError):
        obstore.get(store, "ab")


def test_options_and_environment_open_the_same_bucket(
    object_server: ObjectServer, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    obstore.put(obstore.store.from_url(url, **object_server.options), "x", b"1")
    for name, value in object_server.environment.items():
        monkeypatch.setenv(name, value)
    assert content(obstore.store.from_url(url), "x") == b"1"


def test_the_key_is_needed(object_server: ObjectServer) -> None:
    for wrong in [replace(object_server, secret_access_key="?"), replace(object_server, access_key_id="?")]:
        with pytest.raises(PermissionDeniedError):
            obstore.put(open_store(wrong), "x", b"1")
    with pytest.raises(PermissionDeniedError):
        obstore.put(open_store(object_server, skip_signature=True), "x", b"1")


def test_errors_do_not_have_the_key(object_server: ObjectServer) -> None:
    wrong = replace(object_server, access_key_id="my-id", secret_access_key="my-secret")
    with pytest.raises(PermissionDeniedError) as caught:
        obstore.put(open_store(wrong), "x", b"1")
    text = str(caught.value)
    assert "/tests/x" in text and "my-secret" not in text and "Signature=" not in text


def test_an_object_is_created_once(store: S3Store) -> None:
    obstore.put(store, "x", b"1", mode="create")
    with pytest.raises(AlreadyExistsError):
        obstore.put(store, "x", b"2", mode="create")
    assert content(store, "x") == b"1"


def test_an_object_is_replaced_by_who_knows_its_tag(store: S3Store) -> None:
    old = obstore.put(store, "x", b"1")
    new = obstore.put(store, "x", b"2", mode={"e_tag": old["e_tag"]})
    with pytest.raises(PreconditionError):
        obstore.put(store, "x", b"3", mode={"e_tag": old["e_tag"]})
    with pytest.raises(PreconditionError):
        obstore.put(store, "missing", b"3", mode={"e_tag": old["e_tag"]})
    assert content(store, "x") == b"2" and obstore.head(store, "x")["e_tag"] == new["e_tag"]


@pytest.mark.parametrize("kind", ["create", "update"])
def test_one_of_many_wins_a_race(store: S3Store, kind: str) -> None:
    tags = [obstore.put(store, str(race), b"old")["e_tag"] for race in range(NUM_RACES)] if kind == "update" else []
    barrier = threading.Barrier(NUM_THREADS)

    def race_all(thread: int) -> list[bool]:
        won = []
        for race in range(NUM_RACES):
            barrier.wait(60)
            try:
                mode = {"e_tag": tags[race]} if tags else "create"
                obstore.put(store, str(race), f"by {thread}".encode(), mode=mode)
                won.append(True)
            except (AlreadyExistsError, PreconditionError):
                won.append(False)
        return won

    with ThreadPoolExecutor(NUM_THREADS) as threads:
        wins = list(threads.map(race_all, range(NUM_THREADS)))
    for race in range(NUM_RACES):
        winners = [thread for thread in range(NUM_THREADS) if wins[thread][race]]
        assert len(winners) == 1 and content(store, str(race)) == f"by {winners[0]}".encode()


@pytest.mark.parametrize("checksum", [None, "SHA256"])
def test_parts_make_an_object(object_server: ObjectServer, bucket_prefix: str, checksum: str | None) -> None:
    options = {"checksum_algorithm": checksum} if checksum else {}
    store = open_store(object_server, prefix=bucket_prefix, **options)
    data = os.urandom(3 * MIN_PART_BYTES + 1)
    obstore.put(store, "x", data, use_multipart=True, chunk_size=MIN_PART_BYTES, max_concurrency=2)
    assert content(store, "x") == data
    assert str(obstore.head(store, "x")["e_tag"]).endswith('-4"')


JOB_WITH_A_SERVER = """
import time
from object_server import running_server
with running_server() as server:
    print(server.endpoint, flush=True)
    time.sleep(60)
"""


def test_the_server_dies_with_its_tests(object_server: ObjectServer, tmp_path: Path) -> None:
    job = subprocess.Popen(
        [sys.executable, "-c", JOB_WITH_A_SERVER],
        cwd=Path(__file__).parent,
        stdout=subprocess.PIPE,
        env=os.environ | {"TMPDIR": str(tmp_path)},
    )
    assert job.stdout is not None
    endpoint = job.stdout.readline().decode().strip()
    store = open_store(ObjectServer(endpoint, "tests", "?", "?"))
    with pytest.raises(PermissionDeniedError):
        obstore.head(store, "x")
    job.send_signal(signal.SIGKILL)
    job.wait()
    end = time.monotonic() + 10
    while time.monotonic() < end:
        try:
            obstore.head(store, "x")
        except PermissionDeniedError:
            time.sleep(0.05)
        except GenericError:
            break
    else:
        raise AssertionError("the server outlives the process that started it")
    first_port = int(urlsplit(endpoint).port or 0) - PORTS.index("s3")
    remove_sockets(list(range(first_port, first_port + len(PORTS))))
