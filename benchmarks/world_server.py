"""The object server of a world of processes: its first rank starts it, and all ranks know its address.

It runs on the same machine, and takes from the same cores: the tests' SeaweedFS (tests/remote/object_server.py) 10
seconds of CPU for a gigabyte that it gets, memory_store.py 1.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import torch.distributed as dist
from limited_link import limit_port
from remote_contenders import environment_of

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "remote"))
from object_server import BUCKET, running_server

SERVERS = ("memory", "seaweedfs")


class WorldServer:
    """A server that can be replaced by a new and empty one. All methods are collective.

    Args:
        kind: One of ``SERVERS``.
        megabits: Of the link to the server, each way, in this network namespace; ``None`` for all that there is.
    """

    def __init__(self, kind: str, megabits: int | None = None) -> None:
        self._start = running_seaweedfs if kind == "seaweedfs" else running_memory_store
        self._megabits = megabits
        self._running = ExitStack()
        self._environment: dict[str, str] = {}
        self._pid = 0

    def restart(self) -> None:
        """Ends the server with what it holds, and starts one: it frees what is deleted only minutes later."""
        dist.barrier()
        environment: list[dict[str, str]] = [{}]
        self._forget()
        if dist.get_rank() == 0:
            self._running.close()
            server, self._pid = self._running.enter_context(self._start())
            if self._megabits is not None:
                limit_port(urlsplit(server["AWS_ENDPOINT"]).port, self._megabits)
            environment = [environment_of(server)]
        dist.broadcast_object_list(environment)
        (self._environment,) = environment
        os.environ.update(self._environment)

    def close(self) -> None:
        dist.barrier()
        self._running.close()
        self._forget()

    def _forget(self) -> None:
        """Obstore would prefer an old server's address in the environment to the one that it is given."""
        for name in self._environment:
            del os.environ[name]
        self._environment = {}

    def url(self, name: str) -> str:
        return f"s3://{BUCKET}/{name}/step-1"

    def cpu_seconds(self) -> float:
        """What the server has taken since its start; 0 on other ranks. Not collective."""
        if not self._pid:
            return 0.0
        fields = Path(f"/proc/{self._pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def running_seaweedfs() -> Iterator[tuple[dict[str, str], int]]:
    """What obstore reads from the environment, and the process."""
    # With the tests' 150 MiB it collects garbage half of the time.
    os.environ["GOMEMLIMIT"] = "4GiB"
    before = _children()
    with running_server() as server:
        (pid,) = _children() - before
        yield server.environment, pid


@contextmanager
def running_memory_store() -> Iterator[tuple[dict[str, str], int]]:
    """What obstore reads from the environment, and the process."""
    command = [sys.executable, str(Path(__file__).with_name("memory_store.py"))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        endpoint = f"http://127.0.0.1:{int(process.stdout.readline())}"
        environment = {"AWS_ENDPOINT": endpoint, "AWS_REGION": "us-east-1", "AWS_ALLOW_HTTP": "true"}
        yield environment | {"AWS_ACCESS_KEY_ID": "benchmark", "AWS_SECRET_ACCESS_KEY": "benchmark"}, process.pid
        process.stdin.close()


def _children() -> set[int]:
    """The processes that this one has started."""
    own, found = str(os.getpid()), set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[1] == own:
            found.add(int(path.parent.name))
    return found
