"""One process group over two jobs that were started apart, such as a trainer and a generator.

Each process tells a store that it is there. Where all have come, the first rank of the first job makes the list of who
meets, and all connect under it. A process that died in between, and comes again, finds a list without itself, and waits
for the next one.
"""

from __future__ import annotations

import json
import operator
import time
import uuid
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore, _register_process_group
from torch.distributed.distributed_c10d import PrefixStore, Store

from torchtitan_ext.checkpoint.operation.arguments import check_seconds
from torchtitan_ext.errors import MeetingError, WrongValueError, check_argument
from torchtitan_ext.ranks.groups import Meeting, remember_meeting
from torchtitan_ext.ranks.presence import answer_for

ROLL_CALL_SECONDS = 5.0
"""How long ranks have to answer when one is lost. A thread of each process asks for a call once in half a second."""

_POLL_SECONDS = 0.05
_GRACE_SECONDS = 5.0
_MOST_GENERATIONS = 1_000_000

# The stores that this process has started. They live as long as it does: the next meeting reads what the last one left.
_hosted: dict[str, TCPStore] = {}


def meet(
    address: str,
    *,
    job: str,
    rank: int,
    jobs: Mapping[str, int | None],
    generation: int | None = None,
    backend: str = "gloo",
    host_store: bool | None = None,
    timeout_seconds: float = 300.0,
    roll_call_seconds: float = ROLL_CALL_SECONDS,
) -> dist.ProcessGroup:
    """Makes one process group of the ranks of several jobs. Collective over all of them; needs no default group.

    ``plan_reshard``, ``reshard``, ``fingerprint`` and ``broadcast_tensors`` take the group. Positions in it count the
    ranks of the first job, then those of the next; ``torch.distributed`` does not know it, so take them from
    ``group.rank()``. After an error of a transfer, such as a lost rank, meet again.

    Args:
        address: ``"host:port"`` of the meeting's store.
        job: The name of this process's job.
        rank: Its rank in the job.
        jobs: The number of ranks of each job, in the same order everywhere. ``None`` for another job that may come with
            any number, such as a trainer that was started again on fewer machines: as many as its ranks say.
        generation: Meetings of one generation find each other, and each generation meets once. By default the first
            that has not met yet, so that a job that was started again meets the one that has lost it.
        backend: ``"gloo"``, or ``"cpu:gloo,cuda:nccl"``.
        host_store: Whether this process starts the store. By default rank 0 of the first job does. ``False`` on all
            where something that outlives them hosts it (``dist.TCPStore(host, port, is_master=True)``).
        timeout_seconds: How long to wait for the others.
        roll_call_seconds: How long ranks have to answer when one is lost, the same everywhere. A thread of each process
            answers, also of one that is busy with other things; one that does not answer in time is named as silent.

    Raises:
        MeetingError: Some rank did not come in time, or ranks name other jobs, sizes or versions; names them.
        WrongValueError: An argument is out of range.
    """
    check_seconds("meet", timeout_seconds)
    check_seconds("meet", roll_call_seconds, "roll_call_seconds")
    me = _Member(job, rank, dict(jobs), uuid.uuid4().hex, roll_call_seconds)
    me.check()
    deadline = time.monotonic() + timeout_seconds
    is_host = me.is_first if host_store is None else host_store
    devices = _devices(backend)
    store = _connect(address, is_host, deadline)
    for number in range(_MOST_GENERATIONS) if generation is None else [generation]:
        place = PrefixStore(f"torchtitan_ext/meeting/{number}", store)
        with _as_meeting_error(address):
            found = _gather(place, me, deadline, address)
            if found is not None:
                name, sizes = found
                return _connected(PrefixStore(name, place), name, me, sizes, devices, address, timeout_seconds)
    raise MeetingError(f"generation {generation} has met at {address} already; pass the next one", address)


@dataclass(frozen=True)
class _Member:
    """This process in a meeting; ``token`` tells it from one that was there before it in its place."""

    job: str
    rank: int
    jobs: dict[str, int | None]
    token: str
    roll_call_seconds: float = ROLL_CALL_SECONDS

    def check(self) -> None:
        for name, size in self.jobs.items():
            check_argument("meet", "jobs", name, str, "a mapping from names of jobs to numbers of ranks")
            if size is None and name == self.job:
                raise WrongValueError(
                    f"meet: got None ranks of {name}, which this process is of; expected their number"
                )
            if size is not None and (not isinstance(size, int) or size < 1):
                raise WrongValueError(f"meet: got {size!r} ranks of {name}, expected at least 1")
        if self.job not in self.jobs:
            raise WrongValueError(f"meet: got job={self.job!r}, expected one of {', '.join(self.jobs)}")
        if not isinstance(self.rank, int) or not 0 <= self.rank < self.size:
            last = self.size - 1
            raise WrongValueError(f"meet: got rank={self.rank!r}, expected 0 to {last} of {self.job}")

    @property
    def size(self) -> int:
        """Of its job."""
        return self.jobs[self.job] or 0

    @property
    def is_first(self) -> bool:
        """Whether it makes the list, and hosts the store."""
        return self.rank == 0 and self.job == next(iter(self.jobs))

    def statement(self) -> str:
        """What the others get to know, and must agree on but for the name."""
        text: dict[str, Any] = {"job": self.job, "rank": self.rank, "token": self.token}
        text |= {"jobs": list(self.jobs.items()), "roll_call_seconds": self.roll_call_seconds}
        return json.dumps({**text, "version": version("torchtitan-ext"), "torch": torch.__version__.split("+")[0]})


def _connect(address: str, is_host: bool, deadline: float) -> Store:
    host, separator, port = address.rpartition(":")
    if not separator or not port.isdecimal():
        raise WrongValueError(f"meet: got address={address!r}, expected 'host:port'")
    left = timedelta(seconds=max(1.0, deadline - time.monotonic()))
    try:
        if not is_host:
            return TCPStore(host, int(port), is_master=False, timeout=left)
        if address not in _hosted:
            _hosted[address] = TCPStore(host, int(port), is_master=True, wait_for_workers=False, timeout=left)
        return _hosted[address]
    except RuntimeError as error:
        doing = "start" if is_host else "reach"
        raise MeetingError(f"cannot {doing} the store at {address}: {error}", address) from None


def _gather(place: Store, me: _Member, deadline: float, address: str) -> tuple[str, dict[str, int]] | None:
    """The meeting's name and the sizes of its jobs; ``None`` where this generation has met without this process."""
    if place.check(["list"]):
        return None
    place.set(f"arrival/{place.add('arrivals', 1)}", me.statement())
    arrived: dict[tuple[str, int], dict[str, Any]] = {}
    num_counted, unread, ends = 0, list[int](), deadline
    while not place.check(["list"]):
        counted = place.add("arrivals", 0)
        unread += range(num_counted + 1, counted + 1)
        num_counted = counted
        # A process that was killed between its number and its statement leaves a number without one.
        for number in [one for one in unread if place.check([f"arrival/{one}"])]:
            unread.remove(number)
            other = json.loads(place.get(f"arrival/{number}"))
            arrived.pop((other["job"], other["rank"]), None)  # the last one to come is to stand last
            arrived[other["job"], other["rank"]] = other
        sizes, here = _present(me, arrived)
        problem = _disagreement(me, here.values())
        absent = [member for member in _members(sizes) if member not in here]
        if problem is None:
            ends = deadline
        elif ends == deadline:  # those that are on their way are to hear of it too
            ends = min(deadline, time.monotonic() + _GRACE_SECONDS)
        if time.monotonic() > ends or (problem is not None and not absent):
            lost = f"{_named(absent)} did not come" if absent else f"{_named(_members(sizes)[:1])} came and was lost"
            problem = problem or lost
            place.compare_set("list", "", json.dumps({"problem": problem}))
        elif not absent and me.is_first:
            tokens = [here[member]["token"] for member in _members(sizes)]
            place.compare_set("list", "", json.dumps({"name": uuid.uuid4().hex, "tokens": tokens, "sizes": sizes}))
        else:
            time.sleep(_POLL_SECONDS)
    found = json.loads(place.get("list"))
    if "problem" in found:
        raise MeetingError(found["problem"], address)
    return (str(found["name"]), found["sizes"]) if me.token in found["tokens"] else None


def _members(sizes: Mapping[str, int | None]) -> list[tuple[str, int]]:
    """All members, by position. Of a job of which nobody has come one is known, its first."""
    return [(job, rank) for job, size in sizes.items() for rank in range(1 if size is None else size)]


def _present(
    me: _Member, arrived: Mapping[tuple[str, int], dict[str, Any]]
) -> tuple[dict[str, int | None], dict[tuple[str, int], dict[str, Any]]]:
    """The number of ranks of each job, and who of them has come, in the order in which they came.

    A job whose number somebody leaves open has as many as the last of its ranks to come has said: those that have said
    another number were of an earlier start.
    """
    sizes = dict(me.jobs)
    told = [dict(other["jobs"]) for other in arrived.values()]
    said = {member: jobs[member[0]] for member, jobs in zip(arrived, told, strict=True)}
    are_open = {job for jobs in (me.jobs, *told) for job, size in jobs.items() if size is None}
    sizes |= {job: size for (job, _), size in said.items() if job in are_open}
    earlier = {member for member, size in said.items() if member[0] in are_open and size != sizes[member[0]]}
    return sizes, {member: other for member, other in arrived.items() if member not in earlier}


def _disagreement(me: _Member, arrived: Collection[dict[str, Any]]) -> str | None:
    own = json.loads(me.statement())
    for other in arrived:
        for what in ("jobs", "version", "torch", "roll_call_seconds"):
            if (_are_other_jobs if what == "jobs" else operator.ne)(other[what], own[what]):
                sides = f"{me.job} rank {me.rank} has {_shown(own[what])}, {other['job']} rank {other['rank']} has "
                return f"{what} differ: {sides}{_shown(other[what])}"
    return None


def _are_other_jobs(left: list[Any], right: list[Any]) -> bool:
    sizes = dict(right)
    if [job for job, _ in left] != list(sizes):
        return True
    return any(None not in (size, sizes[job]) and size != sizes[job] for job, size in left)


def _shown(value: Any) -> str:
    if not isinstance(value, list):
        return str(value)
    return ", ".join(f"{name}: {'any' if size is None else size}" for name, size in value)


def _named(members: list[tuple[str, int]]) -> str:
    ranks: dict[str, list[str]] = {}
    for job, rank in members:
        ranks.setdefault(job, []).append(str(rank))
    return " and ".join(f"rank(s) {', '.join(numbers)} of {job}" for job, numbers in ranks.items())


def _connected(
    place: Store,
    name: str,
    me: _Member,
    sizes: Mapping[str, int],
    devices: Mapping[str, str],
    address: str,
    timeout_seconds: float,
) -> dist.ProcessGroup:
    members, timeout = _members(sizes), timedelta(seconds=timeout_seconds)
    position, size = members.index((me.job, me.rank)), len(members)
    group: Any = dist.ProcessGroup(place, position, size)
    for device, kind in devices.items():
        connection = PrefixStore(device, place)
        if kind == "gloo":
            made: Any = dist.ProcessGroupGloo(connection, position, size, timeout)
        else:
            made = dist.ProcessGroupNCCL(connection, position, size, dist.ProcessGroupNCCL.Options())
        kinds = dist.ProcessGroup.BackendType
        group._register_backend(torch.device(device), kinds.GLOO if kind == "gloo" else kinds.NCCL, made)
    group_name: Any = f"torchtitan_ext/meeting/{name}"
    group._set_group_name(group_name)
    _register_process_group(group_name, group)
    remember_meeting(group, Meeting(PrefixStore("watch", place), address, tuple(members), me.roll_call_seconds))
    answer_for(group)
    made_group: dist.ProcessGroup = group
    return made_group


def _devices(backend: str) -> dict[str, str]:
    """Backend by device type."""
    pairs = [part.partition(":") for part in backend.split(",")]
    found = {device if separator else "cpu": kind if separator else device for device, separator, kind in pairs}
    if not set(found.items()) <= {("cpu", "gloo"), ("cuda", "nccl")}:
        raise WrongValueError(f"meet: got backend={backend!r}, expected 'gloo' or 'cpu:gloo,cuda:nccl'")
    return found


@contextmanager
def _as_meeting_error(address: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, MeetingError):
            raise
        raise MeetingError(f"ranks or their store were lost meanwhile ({error}); meet again", address) from None
