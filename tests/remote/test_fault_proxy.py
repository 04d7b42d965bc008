"""Each fault of the proxy does what it says, and what obstore makes of it without and with retries."""

import os
from collections.abc import Callable
from typing import Any

import obstore
import pytest
from fault_proxy import FaultProxy
from object_server import ObjectServer, open_store
from obstore.exceptions import AlreadyExistsError, GenericError, PreconditionError
from obstore.store import S3Store
from request_faults import Fault

pytestmark = pytest.mark.nightly("servers")

DATA = os.urandom(300_000)
HALF = len(DATA) // 2


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


def test_a_late_request_replaces_what_came_after_it(
    through: Callable[..., S3Store], direct: S3Store, proxy: FaultProxy
) -> None:
    proxy.add(Fault("late"), matches={1})
    with pytest.raises(GenericError):
        obstore.put(through(), "x", b"old")
    obstore.put(through(), "x", b"new")
    assert content(direct) == b"new"
    assert answers(proxy) == [("PUT", 200, None), ("PUT", 200, "late")]
    assert content(direct) == b"old"


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
