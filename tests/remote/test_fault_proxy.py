"""Each fault of the proxy does what it says, and what obstore makes of it without and with retries."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import obstore
import pytest
from fault_proxy import FaultProxy
from object_server import ObjectServer, open_store
from obstore.exceptions import AlreadyExistsError, BaseError, GenericError, PermissionDeniedError, PreconditionError
from obstore.store import S3Store
from request_faults import Exchange, Fault

DATA = os.urandom(300_000)
HALF = len(DATA) // 2
PART_BYTES = 5 << 20


@pytest.fixture
def direct(object_server: ObjectServer, bucket_prefix: str) -> S3Store:
    """The store as it is, for looking at what arrived."""
    return open_store(object_server, prefix=bucket_prefix)


@pytest.fixture
def through(object_server: ObjectServer, bucket_prefix: str, proxy: FaultProxy) -> Callable[..., S3Store]:
    """`through(max_retries)`: the store by way of the proxy."""

    def make(max_retries: int = 0, **options: Any) -> S3Store:
        return open_store(object_server.at(proxy.endpoint), prefix=bucket_prefix, max_retries=max_retries, **options)

    return make


def content(store: S3Store, path: str = "x") -> bytes | None:
    try:
        return bytes(obstore.get(store, path).bytes())
    except FileNotFoundError:
        return None


def answers(proxy: FaultProxy) -> list[tuple[str, int | None, str | None]]:
    proxy.wait_until_idle()
    return [(exchange.method, exchange.status, exchange.fault) for exchange in proxy.log()]


def test_without_rules_requests_pass_as_they_are(through: Callable[..., S3Store], proxy: FaultProxy) -> None:
    store = through()
    obstore.put(store, "a b/ä%", DATA)
    assert content(store, "a b/ä%") == DATA
    assert bytes(obstore.get_range(store, "a b/ä%", start=5, length=7)) == DATA[5:12]
    assert [meta["path"] for meta in obstore.list(store).collect()] == ["a b/ä%"]
    obstore.delete(store, "a b/ä%")
    assert proxy.counts() == {"PUT": 1, "GET": 3, "POST": 1}
    assert all(exchange.status in (200, 206) and exchange.fault is None for exchange in proxy.log())


def test_many_connections_pass_large_bodies_at_once(
    through: Callable[..., S3Store], direct: S3Store, proxy: FaultProxy
) -> None:
    store = through()
    data = os.urandom(8 << 20)
    obstore.put(store, "x", data, chunk_size=5 << 20)
    proxy.add(Fault("delay", seconds=2), method="GET")
    with ThreadPoolExecutor(8) as threads:
        assert all(part == data for part in threads.map(lambda _: content(store), range(8)))
    assert proxy.most_at_once == 8
    assert proxy.counts() == {"POST": 2, "PUT": 2, "GET": 8}


def test_clients_in_other_processes_meet_the_faults(
    object_server: ObjectServer, url: str, through: Callable[..., S3Store], proxy: FaultProxy
) -> None:
    code = f"import obstore; obstore.put(obstore.store.from_url({url!r}), 'x', b'1')"
    proxy.add(Fault("answer", status=403), method="PUT", path="/x$")
    environment = os.environ | object_server.at(proxy.endpoint).environment
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert "PermissionDeniedError" in done.stderr and "AccessDenied" in done.stderr
    assert answers(proxy) == [("PUT", 403, "answer")]


CUTS = {
    "cut_before": Fault("cut_before"),
    "cut_request": Fault("cut_request", num_bytes=HALF),
    "lose_answer": Fault("lose_answer"),
}


@pytest.mark.parametrize("kind", CUTS)
@pytest.mark.parametrize("cut", ["close", "reset"])
def test_a_put_that_is_cut_is_an_error_or_repeated(
    through: Callable[..., S3Store], direct: S3Store, proxy: FaultProxy, kind: str, cut: Any
) -> None:
    fault = Fault(CUTS[kind].kind, num_bytes=CUTS[kind].num_bytes, cut=cut)
    status = 200 if kind == "lose_answer" else None
    rule = proxy.add(fault, method="PUT")
    with pytest.raises(GenericError, match="error sending request"):
        obstore.put(through(), "x", DATA)
    assert answers(proxy) == [("PUT", status, kind)] and rule.num_fired == 1
    assert content(direct) == (DATA if kind == "lose_answer" else None)
    proxy.clear()
    proxy.add(fault, method="PUT", matches={1, 2})
    obstore.put(through(max_retries=3), "x", DATA)
    assert answers(proxy) == [("PUT", status, kind)] * 2 + [("PUT", 200, None)]
    assert content(direct) == DATA


@pytest.mark.parametrize("cut", ["close", "reset"])
def test_an_answer_that_is_cut_is_an_error_or_continued(
    through: Callable[..., S3Store], direct: S3Store, proxy: FaultProxy, cut: Any
) -> None:
    obstore.put(direct, "x", DATA)
    proxy.add(Fault("cut_answer", num_bytes=HALF, cut=cut), method="GET", matches={1, 2})
    with pytest.raises(GenericError, match="body error"):
        content(through())
    # obstore asks for the rest of the body, by a range.
    assert content(through(max_retries=1)) == DATA
    assert answers(proxy) == [("GET", 200, "cut_answer"), ("GET", 200, "cut_answer"), ("GET", 206, None)]


@pytest.mark.parametrize("status", [500, 503, 429])
def test_a_refusal_is_an_error_or_repeated(through: Callable[..., S3Store], proxy: FaultProxy, status: int) -> None:
    proxy.add(Fault("answer", status=status), matches={1, 2})
    with pytest.raises(GenericError, match=f"{status} .*InternalError|{status} .*SlowDown|{status} .*TooMany"):
        obstore.put(through(), "x", DATA)
    obstore.put(through(max_retries=1), "x", DATA)
    assert answers(proxy) == [("PUT", status, "answer")] * 2 + [("PUT", 200, None)]


def test_obstore_does_not_wait_as_long_as_it_is_told(through: Callable[..., S3Store], proxy: FaultProxy) -> None:
    proxy.add(Fault("answer", status=503, retry_after_seconds=30), matches={1})
    begin = time.monotonic()
    obstore.put(through(max_retries=1), "x", DATA)
    assert time.monotonic() - begin < 20


def test_a_delay_delays(through: Callable[..., S3Store], direct: S3Store, proxy: FaultProxy) -> None:
    proxy.add(Fault("delay", seconds=1.0), method="PUT")
    begin = time.monotonic()
    obstore.put(through(), "x", DATA)
    assert time.monotonic() - begin >= 1.0
    with pytest.raises(GenericError, match="timed out|error sending request"):
        obstore.put(through(client_options={"allow_http": True, "timeout": "200ms"}), "y", DATA)


def test_a_late_request_replaces_what_came_after_it(
    through: Callable[..., S3Store], direct: S3Store, proxy: FaultProxy
) -> None:
    proxy.add(Fault("late", seconds=4.0), matches={1})  # the next two requests come before it, on a busy machine too
    with pytest.raises(GenericError):
        obstore.put(through(), "x", b"old")
    obstore.put(through(), "x", b"new")
    assert content(direct) == b"new"
    assert answers(proxy) == [("PUT", 200, None), ("PUT", 200, "late")]
    assert content(direct) == b"old"


def test_rules_choose_by_method_path_header_and_count(through: Callable[..., S3Store], proxy: FaultProxy) -> None:
    store = through()
    by_path = proxy.add(Fault("answer", status=403), method="PUT", path="/y$", matches={2})
    by_header = proxy.add(Fault("answer", status=412), header="If-None-Match")
    for name in ["x", "y"]:
        obstore.put(store, name, b"1")
    with pytest.raises(BaseError, match="AccessDenied"):
        obstore.put(store, "y", b"1")
    with pytest.raises(AlreadyExistsError):
        obstore.put(store, "z", b"1", mode="create")
    assert (by_path.num_matches, by_path.num_fired, by_header.num_fired) == (2, 1, 1)
    proxy.remove(by_header)
    obstore.put(store, "z", b"1", mode="create")


def test_draws_repeat_with_their_seed(object_server: ObjectServer, bucket_prefix: str) -> None:
    def draw(seed: int) -> list[Exchange]:
        with FaultProxy(object_server.endpoint, seed=seed) as proxy:
            proxy.add(Fault("answer"), probability=0.5)
            for number in range(20):
                try:
                    obstore.head(open_store(object_server.at(proxy.endpoint), prefix=bucket_prefix), str(number))
                except (FileNotFoundError, GenericError):
                    pass
            return proxy.log()

    assert draw(1) == draw(1) != draw(2)
    assert {exchange.fault for exchange in draw(1)} == {"answer", None}


@pytest.mark.parametrize("options", [{}, {"checksum_algorithm": "SHA256"}, {"checksum_algorithm": "CRC64NVME"}])
def test_a_corrupt_put_is_refused_if_it_has_a_checksum(
    through: Callable[..., S3Store], direct: S3Store, proxy: FaultProxy, options: dict[str, Any]
) -> None:
    proxy.add(Fault("corrupt_request", num_bytes=HALF), method="PUT", matches={1})
    if not options:
        # The hash of the content that obstore signs: S3 compares it with the content, this server does not.
        obstore.put(through(), "x", DATA)
        assert content(direct) == DATA[:HALF] + bytes([DATA[HALF] ^ 1]) + DATA[HALF + 1 :]
        return
    # A refusal by 400 is not repeated: who has whole data must do that.
    with pytest.raises(GenericError, match="400 Bad Request: .*\n.*BadDigest"):
        obstore.put(through(max_retries=3, **options), "x", DATA)
    assert answers(proxy) == [("PUT", 400, "corrupt_request")] and content(direct) is None


def test_obstore_does_not_see_that_an_answer_is_corrupt(
    through: Callable[..., S3Store], direct: S3Store, proxy: FaultProxy
) -> None:
    obstore.put(direct, "x", DATA)
    proxy.add(Fault("corrupt_answer", num_bytes=HALF), method="GET")
    assert content(through(checksum_algorithm="SHA256")) == DATA[:HALF] + bytes([DATA[HALF] ^ 1]) + DATA[HALF + 1 :]


# What a writer must know of parts.


def parts_of(data: bytes, *, fail_at: int | None = None) -> Iterator[memoryview]:
    for number, begin in enumerate(range(0, len(data), PART_BYTES)):
        if number == fail_at:
            raise ValueError("no more parts")
        yield memoryview(data)[begin : begin + PART_BYTES]


def test_as_many_parts_are_on_their_way_as_allowed(
    through: Callable[..., S3Store], direct: S3Store, proxy: FaultProxy
) -> None:
    data = os.urandom(3 * PART_BYTES)
    proxy.add(Fault("delay", seconds=1), path="partNumber=")
    obstore.put(through(), "x", parts_of(data), chunk_size=PART_BYTES, max_concurrency=1)
    assert proxy.most_at_once == 1 and content(direct) == data
    # A buffer that is larger than a part is cut into parts that all leave at once.
    obstore.put(through(), "x", iter([data]), chunk_size=PART_BYTES, max_concurrency=1)
    assert proxy.most_at_once == 3 and content(direct) == data


def test_what_an_iterator_gave_is_sent_from_its_memory(direct: S3Store) -> None:
    buffer = bytearray(1)

    def reuse() -> Iterator[memoryview]:
        for letter in b"abc":
            buffer[0] = letter
            yield memoryview(buffer)

    obstore.put(direct, "x", reuse(), use_multipart=False)
    assert content(direct) == b"ccc"


def test_an_upload_whose_iterator_fails_is_aborted(
    through: Callable[..., S3Store], direct: S3Store, proxy: FaultProxy
) -> None:
    data = bytes(3 * PART_BYTES)
    with pytest.raises(ValueError, match="no more parts"):
        obstore.put(through(), "x", parts_of(data, fail_at=2), chunk_size=PART_BYTES, max_concurrency=1)
    assert [answer for answer in answers(proxy) if answer[0] == "DELETE"] == [("DELETE", 204, None)]
    assert content(direct) is None
    # The error of an abort that fails takes the place of the iterator's.
    proxy.add(Fault("answer", status=403), method="DELETE")
    with pytest.raises(PermissionDeniedError):
        obstore.put(through(), "x", parts_of(data, fail_at=0), chunk_size=PART_BYTES, max_concurrency=1)


@pytest.mark.parametrize("max_retries", [0, 1])
def test_an_upload_whose_end_is_not_heard_has_taken_effect(
    through: Callable[..., S3Store], direct: S3Store, proxy: FaultProxy, max_retries: int
) -> None:
    data = os.urandom(2 * PART_BYTES)
    proxy.add(Fault("lose_answer"), method="POST", path="uploadId=", matches={1})
    if max_retries:
        obstore.put(through(max_retries), "x", parts_of(data), chunk_size=PART_BYTES)
    else:
        with pytest.raises(GenericError, match="error sending request"):
            obstore.put(through(), "x", parts_of(data), chunk_size=PART_BYTES)
    assert content(direct) == data


# What a writer must know that relies on conditional puts.


@pytest.mark.parametrize("kind", ["create", "update"])
def test_obstore_repeats_conditional_puts_and_takes_its_own_object_for_that_of_another(
    through: Callable[..., S3Store], direct: S3Store, proxy: FaultProxy, kind: str
) -> None:
    mode: Any = "create" if kind == "create" else {"e_tag": obstore.put(direct, "x", b"old")["e_tag"]}
    error = AlreadyExistsError if kind == "create" else PreconditionError
    proxy.add(Fault("lose_answer"), matches={1})
    with pytest.raises(error):
        obstore.put(through(max_retries=3), "x", b"mine", mode=mode)
    assert answers(proxy) == [("PUT", 200, "lose_answer"), ("PUT", 412, None)]
    assert content(direct) == b"mine"


@pytest.mark.parametrize("kind", ["create", "update"])
def test_without_retries_a_lost_answer_of_a_conditional_put_is_no_conflict(
    through: Callable[..., S3Store], direct: S3Store, proxy: FaultProxy, kind: str
) -> None:
    mode: Any = "create" if kind == "create" else {"e_tag": obstore.put(direct, "x", b"old")["e_tag"]}
    proxy.add(Fault("lose_answer"), matches={1})
    with pytest.raises(GenericError, match="error sending request"):
        obstore.put(through(), "x", b"mine", mode=mode)
    assert content(direct) == b"mine"


def test_obstore_does_not_repeat_a_conditional_put_after_a_reset(
    through: Callable[..., S3Store], proxy: FaultProxy
) -> None:
    proxy.add(Fault("lose_answer", cut="reset"), matches={1})
    with pytest.raises(GenericError, match="error sending request"):
        obstore.put(through(max_retries=3), "x", b"mine", mode="create")
    assert answers(proxy) == [("PUT", 200, "lose_answer")]


def test_a_conflict_of_creators_looks_to_obstore_as_if_the_object_were_there(
    through: Callable[..., S3Store], direct: S3Store, proxy: FaultProxy
) -> None:
    # S3 answers 409 when another conditional request is under way: it says nothing about the object.
    proxy.add(Fault("answer", status=409), matches={1})
    with pytest.raises(AlreadyExistsError, match="ConditionalRequestConflict"):
        obstore.put(through(max_retries=3), "x", b"mine", mode="create")
    assert content(direct) is None


def test_obstore_repeats_an_update_after_a_conflict(
    through: Callable[..., S3Store], direct: S3Store, proxy: FaultProxy
) -> None:
    mode: Any = {"e_tag": obstore.put(direct, "x", b"old")["e_tag"]}
    proxy.add(Fault("answer", status=409), matches={1})
    obstore.put(through(max_retries=1), "x", b"new", mode=mode)
    assert answers(proxy) == [("PUT", 409, "answer"), ("PUT", 200, None)]
