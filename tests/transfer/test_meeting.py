"""Jobs that were started apart meet in one group, move state from one to the other, lose each other and meet again."""

import json
import logging
import os
import signal
import socket
import textwrap
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
import warm_processes
from extent import IS_FULL, SOAK
from reference import same_bits
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import torchtitan_ext as tte
from torchtitan_ext import transfer
from torchtitan_ext.errors import LostRankError, MeetingError, WrongValueError
from torchtitan_ext.transfer import meeting

JOBS = {"trainer": 3, "generator": 2}


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def in_jobs(position: int, address: str, folder: Path) -> tuple[str, int, Any]:
    """Makes this process a rank of a job with a default group of its own, and meets the other job."""
    job, rank = ("trainer", position) if position < JOBS["trainer"] else ("generator", position - JOBS["trainer"])
    store = dist.FileStore(str(folder / job), JOBS[job])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=JOBS[job])
    return job, rank, transfer.meet(address, job=job, rank=rank, jobs=JOBS, timeout_seconds=60)


def two_jobs(position: int, world_size: int, address: str, folder: Path) -> None:
    job, rank, group = in_jobs(position, address, folder)
    assert (group.rank(), group.size()) == (position, 5)
    whole = torch.arange(35.0).view(7, 5)
    mesh = init_device_mesh("cpu", (JOBS[job],))
    trained, generated = (
        tte.full.distribute_tensor(whole if job == "trainer" else torch.zeros_like(whole), mesh, [Shard(dim)])
        for dim in (0, 1)
    )
    source = {"w": trained} if job == "trainer" else None
    target = {"w": generated} if job == "generator" else None
    plan = tte.transfer.plan_reshard(source, target, group)
    result = plan.run(version=5 if job == "trainer" else None, verify=True)
    assert (plan.version, result.unproved) == (5, ())
    if target is not None:
        assert same_bits(generated.to_local(), whole.chunk(2, 1)[rank])
        assert result.bytes_received == generated.to_local().nbytes
    flat = torch.full((3,), float(position))
    tte.sync.broadcast_tensors([flat], group=group, src=4)
    assert bool((flat == 4).all())
    dist.destroy_process_group()


def test_a_trainer_fills_a_generator_that_was_started_apart(run_world: Any, tmp_path: Path) -> None:
    run_world(5, two_jobs, free_address(), tmp_path, process_group=False)


def meet_as(position: int, world_size: int, address: str, calls: list[dict[str, Any]], together: Path) -> str:
    store = dist.FileStore(str(together), world_size)
    store.add("here", 1)
    while store.add("here", 0) < world_size:
        time.sleep(0.01)
    try:
        transfer.meet(address, **{"timeout_seconds": 60.0, "jobs": {"a": 1, "b": 2}, **calls[position]})
    except MeetingError as error:
        return error.detail
    return "met"


def test_who_is_late_or_says_something_else_is_named_on_both_sides(run_world: Any, tmp_path: Path) -> None:
    a, b0, b1 = ({"job": job, "rank": rank} for job, rank in (("a", 0), ("b", 0), ("b", 1)))

    def answers(*calls: dict[str, Any]) -> list[str]:
        return run_world(
            len(calls), meet_as, free_address(), list(calls), tmp_path / uuid.uuid4().hex, process_group=False
        )  # type: ignore[no-any-return]

    late = {"timeout_seconds": 8.0}  # far more than the two processes come apart
    assert answers({**a, **late}, {**b0, **late}) == ["rank(s) 1 of b did not come"] * 2
    found = answers(a, {**b0, "jobs": {"a": 1, "b": 3}}, b1)
    assert len(set(found)) == 1 and "jobs differ" in found[0] and "a: 1, b: 3" in found[0] and "a: 1, b: 2" in found[0]
    assert answers(a, b0, b1) == ["met"] * 3
    of_any = {**a, "jobs": {"a": 1, "b": None}}
    assert answers(of_any, b0, b1) == ["met"] * 3
    nobody = answers({**of_any, "timeout_seconds": 2.0})
    assert nobody == ["rank(s) 0 of b did not come"]
    assert "jobs differ" in answers(of_any, {**b0, "jobs": {"a": 2, "b": 2}}, b1)[0]


def test_a_first_rank_that_is_lost_after_it_came_holds_up_nobody_for_longer_than_asked() -> None:
    host, _, port = free_address().rpartition(":")
    store = dist.TCPStore(host, int(port), is_master=True, wait_for_workers=False)
    first = meeting._Member("a", 0, {"a": 1, "b": 1}, "lost")
    place = dist.PrefixStore("torchtitan_ext/meeting/0", store)
    place.set(f"arrival/{place.add('arrivals', 1)}", first.statement())
    with pytest.raises(MeetingError, match=r"rank\(s\) 0 of a came and was lost"):
        transfer.meet(f"{host}:{port}", job="b", rank=0, jobs=first.jobs, host_store=False, timeout_seconds=1)


def test_a_process_that_was_killed_before_it_said_who_it_is_holds_up_nobody() -> None:
    host, _, port = free_address().rpartition(":")
    store = dist.TCPStore(host, int(port), is_master=True, wait_for_workers=False)
    dist.PrefixStore("torchtitan_ext/meeting/0", store).add("arrivals", 1)
    group = transfer.meet(f"{host}:{port}", job="a", rank=0, jobs={"a": 1}, host_store=False, timeout_seconds=5)
    assert (group.rank(), group.size()) == (0, 1)


def lose_in_a_sync(position: int, world_size: int, address: str, folder: Path, has_default: bool) -> None:
    """Survivors write down what they got: the world fails as a whole."""
    job, rank = ("a", position) if position < 2 else ("b", 0)
    if has_default:
        store = dist.FileStore(str(folder / f"store_{job}"), 2 if job == "a" else 1)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2 if job == "a" else 1)
    with caplog_at_info() as logged:
        group = transfer.meet(address, job=job, rank=rank, jobs={"a": 2, "b": 1}, host_store=False, timeout_seconds=60)
        tensors = [torch.full((10,), float(position))]
        tte.sync.broadcast_tensors(tensors, group=group, src=2)
    assert bool((tensors[0] == 2).all()) and len(logged) == (position == 0)
    if job == "b":
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(LostRankError) as caught:
        tte.sync.broadcast_tensors(tensors, group=group, src=2)
    assert caught.value.rank == position and caught.value.silent == (2,)
    (folder / str(position)).write_text(str(caught.value))


def lose_a_generator(position: int, world_size: int, address: str, folder: Path) -> None:
    """Rank 1 of the generator dies in a run, for which rank 0 waits, while the trainer trains. It comes later."""
    job, rank = ("trainer", position) if position < 2 else ("generator", position - 2)
    jobs = {"trainer": 2, "generator": 2}
    options = {"host_store": False, "timeout_seconds": 60, "roll_call_seconds": 3.0}
    group = transfer.meet(address, job=job, rank=rank, jobs=jobs, **options)
    sides = ({"w": torch.ones(3)}, None) if job == "trainer" else (None, {"w": torch.zeros(3)})
    plan = tte.transfer.plan_reshard(*sides, group)
    if position == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    if job == "trainer":  # as soon as the others have told who is lost
        while not (folder / "2").exists():
            time.sleep(0.1)
    with pytest.raises(LostRankError) as caught:
        plan.run(version=1 if job == "trainer" else None)
    assert (caught.value.silent, caught.value.elsewhere) == ((3,), (0, 1))
    (folder / f"{position}.part").write_text(str(caught.value))
    (folder / f"{position}.part").rename(folder / str(position))


def test_a_busy_job_is_not_a_lost_one(run_world: Any, tmp_path: Path) -> None:
    host, _, port = free_address().rpartition(":")
    store = dist.TCPStore(host, int(port), is_master=True, wait_for_workers=False)
    with pytest.raises(RuntimeError, match="the worker process died"):
        run_world(4, lose_a_generator, f"{host}:{port}", tmp_path, process_group=False)
    del store
    texts = {(tmp_path / str(position)).read_text() for position in range(3)}
    assert len(texts) == 1, texts
    text = texts.pop()
    assert "; rank(s) 3 did not answer a roll call; rank(s) 0, 1 are alive, but not in this call; " in text
    assert "; rank 3 is generator rank 1; " in text and text.endswith("meet again, and plan again")


@contextmanager
def caplog_at_info() -> Iterator[list[logging.LogRecord]]:
    """The records of syncs."""
    logger, records = logging.getLogger("torchtitan_ext.sync"), []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.INFO)
    try:
        yield records
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)


@pytest.mark.parametrize("has_default", [False, True])
def test_a_sync_of_a_meeting_names_who_is_lost_by_job(run_world: Any, tmp_path: Path, has_default: bool) -> None:
    """With a default group, too, which knows nothing of the meeting's group and has other ranks."""
    host, _, port = free_address().rpartition(":")
    store = dist.TCPStore(host, int(port), is_master=True, wait_for_workers=False)
    with pytest.raises(RuntimeError, match="the worker process died"):
        run_world(3, lose_in_a_sync, f"{host}:{port}", tmp_path, has_default, process_group=False)
    del store
    for position in (0, 1):
        text = (tmp_path / str(position)).read_text()
        assert text.startswith(f"broadcast_tensors failed on rank {position} while ranks agreed on what to sync")
        assert "; rank(s) 2 did not answer a roll call; rank 2 is b rank 0; the backend says: " in text


def test_arguments() -> None:
    with pytest.raises(WrongValueError, match="got job='c', expected one of a, b"):
        transfer.meet("h:1", job="c", rank=0, jobs={"a": 1, "b": 2})
    with pytest.raises(WrongValueError, match="got rank=2, expected 0 to 1 of b"):
        transfer.meet("h:1", job="b", rank=2, jobs={"a": 1, "b": 2})
    with pytest.raises(WrongValueError, match="got None ranks of b, which this process is of; expected their number"):
        transfer.meet("h:1", job="b", rank=0, jobs={"a": 1, "b": None})
    with pytest.raises(WrongValueError, match="expected 'host:port'"):
        transfer.meet("h", job="a", rank=0, jobs={"a": 1})
    with pytest.raises(MeetingError, match="cannot reach the store"):
        transfer.meet("127.0.0.1:1", job="b", rank=0, jobs={"a": 1, "b": 1}, timeout_seconds=1)


# A member of a job that trains, or takes what the other has; it goes on in the next generation where it loses somebody.
MEMBER = textwrap.dedent("""
    import json, sys, time, torch
    import torchtitan_ext as tte
    from torchtitan_ext import transfer
    from torchtitan_ext.errors import LostRankError, MeetingError
    from torchtitan_ext.transfer.phases import transfer_phases

    address, job, rank, steps = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    # 0: any number.
    jobs = {"trainer": int(sys.argv[5]) or None, "generator": int(sys.argv[6]) or None}
    w = torch.zeros(1000)
    step = 0
    while step < steps:
        try:
            group = transfer.meet(address, job=job, rank=rank, jobs=jobs, host_store=False, timeout_seconds=60)
            state = {"w": w}
            sides = (state, None) if job == "trainer" else (None, state)
            print(json.dumps({"met": group.group_name}), flush=True)
            # A rank that was killed begins anew, and one may have seen the end of a run that failed on the others.
            with transfer_phases(group, 5) as phases:
                step = max(phases.on_all("step", lambda: step, doing="ranks agreed on a step"))
            plan = tte.transfer.plan_reshard(*sides, group, timeout_seconds=5)
            while step < steps:
                if job == "trainer":
                    w.fill_(step)
                plan.run(version=step if job == "trainer" else None)
                assert job == "trainer" or bool((w == plan.version).all())
                step = plan.version + 1
                print(json.dumps({"step": plan.version}), flush=True)
                time.sleep(0.02)
        except (LostRankError, MeetingError) as error:
            print(json.dumps({"lost": type(error).__name__, "text": str(error)}), flush=True)
""")


def start(
    address: str, job: str, rank: int, steps: int, log: Path, sizes: tuple[int, int] = (2, 1)
) -> warm_processes.Popen:
    command = ["-c", MEMBER, address, job, rank, steps, *sizes]
    with log.open("ab") as stdout:
        return warm_processes.Popen(command, stdout=stdout, env={**os.environ, "OMP_NUM_THREADS": "1"})


def events(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def wait_for(log: Path, step: int) -> None:
    deadline = time.monotonic() + 90
    while max((event.get("step", -1) for event in events(log)), default=-1) < step:
        assert time.monotonic() < deadline, events(log)[-5:]
        time.sleep(0.02)


@pytest.mark.sampled(0.5)
@pytest.mark.parametrize("killed", ["generator", "trainer"])
def test_a_job_that_was_killed_meets_the_other_again(tmp_path: Path, killed: str) -> None:
    """The other side gets a typed error within the deadline, and both go on in the next generation."""
    address, steps = free_address(), 400
    host, _, port = address.rpartition(":")
    store = dist.TCPStore(host, int(port), is_master=True, wait_for_workers=False)  # outlives both jobs
    members = [("trainer", 0), ("trainer", 1), ("generator", 0)]
    logs = {member: tmp_path / f"{member[0]}{member[1]}" for member in members}
    processes = {member: start(address, *member, steps, logs[member]) for member in members}
    try:
        wait_for(logs["generator", 0], 5)
        for member in members:
            if member[0] == killed:
                processes[member].send_signal(signal.SIGKILL)
                processes[member].wait()
        began = time.monotonic()
        survivor = ("trainer", 0) if killed == "generator" else ("generator", 0)
        while not any("lost" in event for event in events(logs[survivor])):
            assert time.monotonic() < began + 30
            time.sleep(0.02)
        for member in members:
            if member[0] == killed:
                processes[member] = start(address, *member, steps, logs[member])
        last = max(event["step"] for event in events(logs["generator", 0]) if "step" in event)
        wait_for(logs["generator", 0], 5 if killed == "trainer" else last + 5)
        lost = [event for event in events(logs[survivor]) if "lost" in event]
        assert lost[0]["lost"] == "LostRankError" and f"is {killed} rank 0" in lost[0]["text"], lost
        assert "this process group can serve no further transfer: meet again, and plan again" in lost[0]["text"]
    finally:
        for process in processes.values():
            process.kill()
            process.wait()
        del store


def test_a_trainer_comes_back_with_other_numbers_of_ranks(tmp_path: Path) -> None:
    """The generator goes on: it takes whatever trainer comes. A start that was lost before it met leaves no trace."""
    address, steps = free_address(), 1_000_000
    host, _, port = address.rpartition(":")
    store = dist.TCPStore(host, int(port), is_master=True, wait_for_workers=False)
    generator = tmp_path / "generator"
    processes = [start(address, "generator", 0, steps, generator, (0, 1))]
    try:
        num_met = 0
        for life, (size, num_started) in enumerate([(2, 2), (4, 3), (3, 3), (1, 1)]):
            logs = [tmp_path / f"trainer{life}-{rank}" for rank in range(num_started)]
            trainers = [start(address, "trainer", rank, steps, log, (size, 1)) for rank, log in enumerate(logs)]
            processes += trainers
            if num_started < size:  # it never meets
                deadline = time.monotonic() + 60
                while store.add(f"torchtitan_ext/meeting/{num_met}/arrivals", 0) < num_started:
                    assert time.monotonic() < deadline
                    time.sleep(0.02)
            else:
                num_met += 1
                wait_for(logs[0], 5)
                assert len({met(log)[-1] for log in (generator, *logs)}) == 1
            for trainer in trainers:
                trainer.send_signal(signal.SIGKILL)
                trainer.wait()
        assert len(met(generator)) == num_met == 3
        assert processes[0].poll() is None
    finally:
        for process in processes:
            process.kill()
            process.wait()
        del store


def met(log: Path) -> list[str]:
    return [event["met"] for event in events(log) if "met" in event]


def num_lost(log: Path) -> int:
    return sum("lost" in event for event in events(log))


# 2 + 1 and 4 + 2 processes; make soak takes 25 moments of each.
MOMENTS = {(2, 1): 25, (4, 2): 25} if SOAK > 1 else {(2, 1): 6, (4, 2): 4} if IS_FULL else {(2, 1): 2, (4, 2): 1}


@pytest.mark.parametrize("sizes", MOMENTS, ids=lambda sizes: f"{sizes[0]}+{sizes[1]}")
def test_either_job_is_killed_at_random_moments(tmp_path: Path, sizes: tuple[int, int]) -> None:
    """Whatever the others do then, planning, agreeing or moving: they get a typed error, and meet again."""
    address, random = free_address(), Random(27)
    host, _, port = address.rpartition(":")
    store = dist.TCPStore(host, int(port), is_master=True, wait_for_workers=False)  # outlives both jobs
    members = [(job, rank) for job, size in zip(("trainer", "generator"), sizes, strict=True) for rank in range(size)]
    logs = {member: tmp_path / f"{member[0]}{member[1]}" for member in members}
    steps = 1_000_000_000
    processes = {member: start(address, *member, steps, logs[member], sizes) for member in members}

    def wait_until(what: str, is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 120
        while not is_so():
            assert time.monotonic() < deadline, (what, {member: events(log)[-3:] for member, log in logs.items()})
            assert all(process.poll() is None for process in processes.values()), what
            time.sleep(0.02)

    try:
        for moment in range(MOMENTS[sizes]):
            if moment == 0:
                wait_until("met", lambda: all(met(log) for log in logs.values()))
            time.sleep(random.uniform(0, 0.4))  # a step takes a few hundredths of a second, the plan before it too
            job = random.choice(["trainer", "generator"])
            killed = [member for member in members if member[0] == job]
            killed = random.sample(killed, random.randint(1, len(killed)))
            known = {member: len(met(log)) for member, log in logs.items()}
            errors = {member: num_lost(log) for member, log in logs.items()}
            for member in killed:
                processes[member].kill()
            for member in killed:
                processes[member].wait()
                processes[member] = start(address, *member, steps, logs[member], sizes)
            wait_until("met again", lambda known=known: all(len(met(logs[one])) > known[one] for one in members))  # type: ignore[misc]
            wait_until("the same", lambda: len({met(log)[-1] for log in logs.values()}) == 1)
            # All others have got an error of ours in between; any other one would have ended their process.
            assert all(num_lost(logs[member]) > errors[member] for member in set(members) - set(killed))
        wait_until("a step", lambda: all("step" in events(log)[-1] for log in logs.values()))
    finally:
        for process in processes.values():
            process.kill()
            process.wait()
        del store
