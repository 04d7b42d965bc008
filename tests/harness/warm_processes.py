"""Python processes that have imported torch when they begin: forked from the server of `gloo_worlds`.

`run` and `Popen` stand for those of `subprocess` where a command is Python's, without the interpreter at its head:

    done = run(["-m", "torchtitan_ext", "ls", path], capture_output=True)
    with Popen(["-c", PROGRAM, "7"], stdout=subprocess.PIPE) as process: ...

A fresh process takes seconds for torch. What needs one starts one: another `LD_PRELOAD`, a measurement of its memory, a
test of what is imported or of what the interpreter does at its end.
"""

import atexit
import os
import runpy
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import IO, Any

import torch
import torch.distributed as dist
from gloo_worlds import GLOO_AT_EXIT, fork_children_from_my_server, fork_server
from tier import RUNS_ALL

Stream = int | IO[Any] | None
"""`subprocess.PIPE`, `subprocess.STDOUT`, an open file, or `None` for that of this process."""


class Popen:
    """As `subprocess.Popen(..., text=True)`, as far as the tests use it."""

    def __init__(
        self,
        command: Sequence[object],
        *,
        stdin: Stream = None,
        stdout: Stream = None,
        stderr: Stream = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.stdin: IO[str] | None = None
        self.stdout: IO[str] | None = None
        self.stderr: IO[str] | None = None
        streams: dict[int, Connection] = {}
        for number, stream in enumerate((stdin, stdout, stderr)):
            if stream == subprocess.PIPE:
                reads, writes = os.pipe()
                ours, theirs = (writes, reads) if number == 0 else (reads, writes)
                setattr(self, ("stdin", "stdout", "stderr")[number], os.fdopen(ours, "w" if number == 0 else "r"))
                streams[number] = Connection(theirs)
            elif stream == subprocess.STDOUT:
                streams[number] = Connection(os.dup(streams[1].fileno()))
            elif stream is not None:
                assert not isinstance(stream, int)
                streams[number] = Connection(os.dup(stream.fileno()))
        arguments = ([str(part) for part in command], streams, dict(os.environ if env is None else env))
        self._process = fork_server().Process(target=_run_command, args=arguments)
        self._process.start()
        for theirs in streams.values():
            theirs.close()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def __enter__(self) -> "Popen":
        return self

    def __exit__(self, *_: object) -> None:
        for stream in (self.stdin, self.stdout, self.stderr):
            if stream is not None:
                stream.close()
        self.wait()

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0)
        return self._process.exitcode

    def communicate(self, text: str = "", timeout: float | None = None) -> tuple[str, str]:
        """Writes a text to the process, and reads what it says until it ends."""
        if self.stdin is not None:
            self.stdin.write(text)
            self.stdin.close()
        with ThreadPoolExecutor(2) as pool:
            reads = [pool.submit(stream.read) if stream else None for stream in (self.stdout, self.stderr)]
            said, complained = (read.result(timeout) if read else "" for read in reads)
        self.wait(timeout)
        return said, complained

    def kill(self) -> None:
        self._process.kill()

    def send_signal(self, signal: int) -> None:
        os.kill(self.pid, signal)


def run(
    command: Sequence[object],
    *,
    capture_output: bool = False,
    check: bool = False,
    env: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run(..., text=True)`."""
    pipe = subprocess.PIPE if capture_output else None
    with Popen(command, stdout=pipe, stderr=pipe, env=env) as process:
        texts = process.communicate()
    done = subprocess.CompletedProcess(list(map(str, command)), process.wait(), *texts)
    if check:
        done.check_returncode()
    return done


def torchrun(num_ranks: int, *command: object) -> subprocess.CompletedProcess[str]:
    """A job of torchrun: the real one at night, else warm processes that have what it gives its ranks.

    Its code is 1 where a rank fails, which ends the others.
    """
    run_ranks = _run_torchrun if RUNS_ALL else _run_warm_ranks
    for _ in range(3):
        done = run_ranks(num_ranks, [str(part) for part in command])
        if GLOO_AT_EXIT not in done.stderr:
            break
    return done


def _run_torchrun(num_ranks: int, command: list[str]) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    return subprocess.run([*launcher, *command], capture_output=True, text=True, check=False)


def _run_warm_ranks(num_ranks: int, command: list[str]) -> subprocess.CompletedProcess[str]:
    # This process hosts the store of the process groups, as the agent of torchrun does.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "GLOO_SOCKET_IFNAME": "lo"}
    place |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "OMP_NUM_THREADS": "1"}
    size = {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)}
    with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
        ranks = [
            Popen(command, stdout=stdout, stderr=stderr, env={**os.environ, **place, **size, **rank})
            for rank in ({"RANK": str(number), "LOCAL_RANK": str(number)} for number in range(num_ranks))
        ]
        try:
            while None in (codes := [rank.poll() for rank in ranks]) and not any(codes):
                time.sleep(0.05)
            if any(codes):
                time.sleep(1)  # what the others have to say
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        stdout.seek(0)
        stderr.seek(0)
        return subprocess.CompletedProcess(command, int(any(codes)), stdout.read(), stderr.read())


def _run_command(command: list[str], streams: dict[int, Connection], environment: dict[str, str]) -> None:
    for number, stream in streams.items():
        os.dup2(stream.fileno(), number)
        stream.close()
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w", buffering=1)  # noqa: SIM115
    os.environ.clear()
    os.environ.update(environment)
    fork_children_from_my_server()
    if "OMP_NUM_THREADS" in environment:
        torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    kind, *rest = command
    try:
        if kind == "-c":
            sys.argv = ["-c", *rest[1:]]
            sys.modules["__main__"] = types.ModuleType("__main__")
            exec(compile(rest[0], "<string>", "exec"), vars(sys.modules["__main__"]))
        elif kind == "-m":
            sys.argv = rest
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        else:
            sys.argv = command
            sys.path[0] = os.path.dirname(kind)
            runpy.run_path(kind, run_name="__main__")
    except Exception as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>"):
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        sys.exit(1)
    finally:  # as Python ends
        threading._shutdown()
        atexit._run_exitfuncs()
