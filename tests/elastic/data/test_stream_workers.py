"""Workers for streams: the same batches and states for any number of them, and one error where one of them is lost."""

import gc
import multiprocessing.connection
import os
import signal
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import gloo_worlds
import numpy as np
import pytest
import torch
import warm_processes
from hypothesis import given, settings
from hypothesis import strategies as st
from signals import send, wait_until_gone
from simulated_loaders import Counted, Ranks
from tier import SOAK

from torchtitan_ext.elastic import ElasticDataLoader, IndexedStreams, PackedTokens, Streams, StreamWorkerError
from torchtitan_ext.elastic.data import workers
from torchtitan_ext.elastic.data.blocks import receive_block, send_block


def source_of(lengths: list[int], stateful: bool = True) -> Streams:
    def open_stream(shard: int, num_shards: int, epoch: int) -> Any:
        samples = [(epoch, shard, place) for place in range(lengths[shard])]
        return Counted(samples) if stateful else iter(samples)

    return Streams(open_stream, len(lengths))


def processes_of(loader: ElasticDataLoader) -> list[Any]:
    """Those of its workers."""
    return [worker.process for worker in loader._batches._reader._workers._running]  # type: ignore[attr-defined]


def workers_of(loader: ElasticDataLoader) -> list[int]:
    """Their process ids."""
    return [process.pid for process in processes_of(loader)]


@settings(max_examples=8 * SOAK, deadline=None)
@given(st.data())
def test_batches_and_states_are_the_same_for_any_number_of_workers(data: st.DataObject) -> None:
    num_shards = data.draw(st.integers(1, 5), "shards")
    endless = data.draw(st.booleans(), "endless")
    lengths = data.draw(st.lists(st.integers(int(endless), 40), min_size=num_shards, max_size=num_shards), "lengths")
    if data.draw(st.booleans(), "packed"):
        documents = [[100 * i + j for j in range(1 + i % 7)] for i in range(sum(lengths) + 2)]
        source: Any = PackedTokens(IndexedStreams(documents, num_shards=num_shards), seq_len=5)
    else:
        source = source_of(lengths, data.draw(st.booleans(), "stateful"))
    dp_size = data.draw(st.integers(1, min(2, num_shards)), "ranks")
    options = {
        "global_batch_size": data.draw(st.integers(dp_size, 9), "global batch"),
        "last": data.draw(st.sampled_from(["drop", "pad"]), "last"),
        "endless": endless,
        "collate_fn": repr,
    }

    def ranks_with(num_workers: int, saved: Any) -> Ranks:
        more = {"persistent_workers": persistent, "prefetch_factor": prefetch} if num_workers else {}

        def make(dp_rank: int, dp_size: int) -> ElasticDataLoader:
            return ElasticDataLoader(
                source, dp_rank=dp_rank, dp_size=dp_size, uneven=True, num_workers=num_workers, **more, **options
            )

        return Ranks(make, dp_size, saved)

    persistent = data.draw(st.booleans(), "persistent")
    prefetch = data.draw(st.sampled_from([None, 1, 4]), "prefetch")
    saved = None
    for _ in range(data.draw(st.integers(1, 2), "stops")):
        num_workers = data.draw(st.sampled_from([1, 2, 3, 7]), "workers")
        plain, ahead = ranks_with(0, saved), ranks_with(num_workers, saved)
        for _ in range(data.draw(st.integers(1, 15), "steps")):
            assert plain.step() == ahead.step()
            saved = ahead.state()
            assert plain.state() == saved


def test_more_workers_than_shards_are_not_started() -> None:
    loader = ElasticDataLoader(source_of([9, 9]), batch_size=2, num_workers=5, collate_fn=list)
    batches = iter(loader)
    next(batches)
    assert len(workers_of(loader)) == 2


class Failing(Counted):
    """Raises an error at its fourth sample, unless a file says that this has happened."""

    def __init__(self, shard: int, once: Path) -> None:
        super().__init__([(shard, place) for place in range(6)])
        self.once = once

    def __iter__(self) -> Any:
        for sample in super().__iter__():
            if sample == (1, 3) and not self.once.exists():
                self.once.touch()
                raise OSError("bad block")
            yield sample


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("persistent", [True, False])
def test_an_error_in_a_worker_names_shard_and_position_and_loses_nothing(
    tmp_path: Path, num_workers: int, persistent: bool
) -> None:
    source = Streams(lambda shard, num_shards, epoch: Failing(shard, tmp_path / "once"), 3)
    options = {"num_workers": num_workers, "persistent_workers": persistent, "collate_fn": list}
    loader = ElasticDataLoader(source, batch_size=4, last="pad", **options)
    served = []
    batches = iter(loader)
    with pytest.raises(
        StreamWorkerError, match=r"sample 3 of virtual shard 1 of 3, in epoch 0, .*: OSError: bad block;"
    ):
        for batch in batches:
            served += batch
    state = loader.state_dict()
    assert len(served) == loader.samples_seen == 8 and state["loader"][0]["samples_seen"] == 8
    assert list(batches) == [], "the old iterator has ended"
    again = ElasticDataLoader(source, batch_size=4, last="pad", collate_fn=list)
    again.load_state_dict(state)
    rest = [list(one) for one in (loader, again)]
    assert rest[0] == rest[1]
    served += [sample for batch in rest[0] for sample in batch[:4]][: 18 - len(served)]
    assert sorted(served) == [(shard, place) for shard in range(3) for place in range(6)]


def test_the_error_has_the_trace_of_the_worker(tmp_path: Path) -> None:
    source = Streams(lambda shard, num_shards, epoch: Failing(shard, tmp_path / "once"), 2)
    with pytest.raises(StreamWorkerError) as caught:
        list(ElasticDataLoader(source, batch_size=4, num_workers=1, collate_fn=list))
    assert isinstance(caught.value, RuntimeError) and caught.value.shard == 1 and caught.value.sample == 3
    assert "in __iter__" in str(caught.value.__cause__)


@pytest.mark.parametrize(
    ("signal_number", "how"),
    [(signal.SIGKILL, "was killed by SIGKILL"), (signal.SIGTERM, "has ended with exit code 0")],  # by the trainer
)
def test_a_killed_worker_is_one_error_and_a_new_iterator_goes_on(signal_number: signal.Signals, how: str) -> None:
    loader = ElasticDataLoader(source_of([30] * 4), batch_size=4, num_workers=2, collate_fn=list)
    expected = list(ElasticDataLoader(source_of([30] * 4), batch_size=4, collate_fn=list))
    served = []
    for round_ in range(3):
        batches = iter(loader)
        served.append(next(batches))
        state = loader.state_dict()
        victim = processes_of(loader)[round_ % 2]
        send(signal_number, victim.pid)
        multiprocessing.connection.wait([victim.sentinel])  # before all is read
        with pytest.raises(StreamWorkerError, match=f"of 4, in epoch 0, .*process {victim.pid}. {how}"):
            while True:
                served.append(next(batches))
                state = loader.state_dict()
        assert loader.state_dict() == state and not workers_of(loader)
    served += list(loader)
    assert served == expected


def test_a_worker_that_hangs_is_an_error_after_the_timeout() -> None:
    loader = ElasticDataLoader(source_of([30] * 2), batch_size=2, num_workers=1, timeout=60, prefetch_factor=1)
    batches = iter(loader)
    next(batches)
    (pid,) = workers_of(loader)
    send(signal.SIGSTOP, pid)
    pool = loader._batches._reader._workers  # type: ignore[attr-defined]
    pool._options = replace(pool._options, timeout=0.01)
    with pytest.raises(StreamWorkerError, match="did not answer within 0.01 seconds"):
        for _ in range(9):
            next(batches)
    wait_until_gone(pid)


def test_the_samples_before_one_that_cannot_be_pickled_are_served() -> None:
    source = Streams(lambda shard, num_shards, epoch: [0, 1, 2, (lambda: 0) if shard else 3], 2)
    batches = iter(ElasticDataLoader(source, batch_size=2, num_workers=1, prefetch_factor=9, collate_fn=list))
    assert [next(batches) for _ in range(3)] == [[i, i] for i in range(3)]
    with pytest.raises(StreamWorkerError, match="sample 3 of virtual shard 1"):
        next(batches)


@pytest.mark.parametrize("end", ["end", "close", "del", "break"])
def test_workers_end_with_the_iterator(end: str) -> None:
    loader = ElasticDataLoader(source_of([9] * 2), batch_size=2, num_workers=2, collate_fn=list)
    batches = iter(loader)
    next(batches)
    pids = workers_of(loader)
    if end == "end":
        list(batches)
    elif end == "close":
        batches.close()
    else:
        del batches
    wait_until_gone(*pids)
    assert not workers_of(loader)
    assert next(iter(loader)) == ([(1, 0, 0), (1, 1, 0)] if end == "end" else [(0, 0, 1), (0, 1, 1)])


def test_persistent_workers_end_with_the_loader() -> None:
    loader = ElasticDataLoader(source_of([3] * 2), batch_size=2, num_workers=2, persistent_workers=True)
    assert len(list(loader)) == 3
    pids = workers_of(loader)
    assert len(list(loader)) == 3 and workers_of(loader) == pids
    gc.disable()
    try:
        del loader
        wait_until_gone(*pids)
    finally:
        gc.enable()


def send_to_all(pids: list[Any]) -> None:
    """Sends what a launcher or a terminal sends to all processes of a job; from a process that is not their parent."""
    for name in ("TERM", "INT", "HUP", "USR1", "TERM"):
        subprocess.run(["kill", f"-{name}", *map(str, pids)], check=True)


class Squares(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 120

    def __getitem__(self, index: int) -> int:
        return index**2


def note_worker(worker: int, folder: Path) -> None:
    (folder / str(worker)).touch()


@pytest.mark.parametrize("kind", ["streams", "map-style", "map-style with a function of the user's"])
def test_signals_to_all_processes_of_a_job_end_no_worker(tmp_path: Path, kind: str) -> None:
    data: Any = source_of([30] * 4) if kind == "streams" else Squares()
    options: dict[str, Any] = {"collate_fn": list, "batch_size": 4}
    expected = list(ElasticDataLoader(data, **options))
    if kind.endswith("user's"):
        options["worker_init_fn"] = partial(note_worker, folder=tmp_path)
    batches = iter(ElasticDataLoader(data, num_workers=2, prefetch_factor=1, **options))
    served = [next(batches), next(batches)]
    pids = [child.pid for child in multiprocessing.active_children() if child.daemon]
    assert len(pids) >= 2
    send_to_all(pids)
    assert served + list(batches) == expected
    assert len(os.listdir(tmp_path)) == (2 if kind.endswith("user's") else 0)


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.nightly("kills"))])
def test_a_signal_before_a_worker_has_begun_does_not_end_it(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    start, started = workers._Worker.__init__, []

    def start_and_send(worker: Any, *arguments: Any) -> None:
        start(worker, *arguments)
        started.append(worker.process.pid)
        send_to_all(started[-1:])  # spawned, it imports torch yet

    monkeypatch.setattr(workers._Worker, "__init__", start_and_send)
    options: dict[str, Any] = {"batch_size": 4, "collate_fn": list}
    source = Streams(open_range, 2)
    served = list(ElasticDataLoader(source, num_workers=1, multiprocessing_context=method, **options))
    assert len(started) == 1 and served == list(ElasticDataLoader(source, **options))


SCRIPT = """
import os, sys, time
import multiprocessing
import torch
from torchtitan_ext.elastic import ElasticDataLoader, Streams

multiprocessing.set_start_method("fork", force=True)

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 99
    def __getitem__(self, index):
        return index

def read_one_and_hang(shard, *_):
    yield 0
    open(f"hangs-{shard}", "w").close()
    time.sleep(1000)

how, kind = sys.argv[1:]
hangs = how == "kill, hanging"
data = Data() if kind == "map-style" else Streams(read_one_and_hang if hangs else lambda *_: range(99), 4)
loader = ElasticDataLoader(data, batch_size=4, num_workers=2, prefetch_factor=1, persistent_workers=True)
batches = iter(loader)
next(batches)
while hangs and sum(name.startswith("hangs-") for name in os.listdir()) < 2:
    time.sleep(0.01)
print(*[child.pid for child in multiprocessing.active_children() if child.daemon], flush=True)
if how.startswith("kill"):
    os.kill(os.getpid(), 9)
if how == "raise":
    raise SystemExit(3)
"""


@pytest.mark.parametrize("is_fresh", [False, pytest.param(True, marks=pytest.mark.nightly("kills"))])
@pytest.mark.parametrize("kind", ["streams", "map-style"])
@pytest.mark.parametrize("how", ["return", "raise", "kill"])
def test_no_worker_outlives_the_trainer(how: str, kind: str, is_fresh: bool) -> None:
    """At night with what an interpreter does at its end, too."""
    command = ["-c", SCRIPT, how, kind]
    done = (
        subprocess.run([sys.executable, *command], capture_output=True, text=True)
        if is_fresh
        else warm_processes.run(command, capture_output=True)
    )
    assert done.returncode == {"return": 0, "raise": 3, "kill": -9}[how]
    pids = [int(pid) for pid in done.stdout.split()]
    wait_until_gone(*pids)
    assert len(pids) == 2


def test_a_worker_that_hangs_when_its_trainer_was_killed_ends_by_a_signal(tmp_path: Path) -> None:
    command = ["-c", f"import os; os.chdir({str(tmp_path)!r})\n{SCRIPT}", "kill, hanging", "streams"]
    with warm_processes.Popen(command, stdout=subprocess.PIPE) as trainer:
        assert trainer.stdout is not None
        pids = trainer.stdout.readline().split()  # its end comes when the workers have ended
    assert len(pids) == 2
    for pid in pids:
        send(signal.SIGTERM, int(pid))
    wait_until_gone(*map(int, pids))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"num_workers": -1}, "num_workers=-1, .*expected none below 0"),
        ({"num_workers": 1, "prefetch_factor": 0}, "prefetch_factor=0, .*at least 1"),
        ({"num_workers": 1, "timeout": -1}, "timeout=-1, expected none below 0"),
        ({"prefetch_factor": 2}, "need workers; pass num_workers"),
        ({"persistent_workers": True}, "need workers; pass num_workers"),
    ],
)
def test_options_that_do_not_fit(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        ElasticDataLoader(source_of([1]), batch_size=1, **options)


def open_range(shard: int, num_shards: int, epoch: int) -> range:
    return range(shard, 20, num_shards)


def test_another_start_method_and_pinned_memory() -> None:
    """Without an accelerator there is no pinned memory, as in torch."""
    gloo_worlds.fork_server()  # whose processes have imported torch
    options: dict[str, Any] = {"num_workers": 1, "multiprocessing_context": "forkserver", "pin_memory": True}
    batches = list(ElasticDataLoader(Streams(open_range, 2), batch_size=4, **options))
    assert [sorted(batch.tolist()) for batch in batches] == [list(range(i, i + 4)) for i in range(0, 20, 4)]
    assert all(batch.is_pinned() == torch.accelerator.is_available() for batch in batches)


def test_a_block_has_the_same_values_at_the_other_end() -> None:
    import multiprocessing

    values: list[Any] = [
        torch.arange(5),
        torch.zeros(0, 3),
        torch.tensor(3.5, dtype=torch.bfloat16),
        torch.randn(4, 3).t(),
        torch.randn(3, dtype=torch.complex64).conj(),
        torch.tensor([True, False]),
        torch.ones(2, requires_grad=True),
        torch.eye(3).to_sparse(),
        np.arange(6).reshape(2, 3),
        np.zeros((0, 2)),
        {"text": "abc", "ids": [1, 2]},
    ]
    ours, theirs = multiprocessing.Pipe()
    send_block(theirs, values)
    received = receive_block(ours)
    for value, got in zip(values, received, strict=True):
        if isinstance(value, torch.Tensor):
            assert got.dtype == value.dtype and got.requires_grad == value.requires_grad
            assert torch.equal(got.to_dense().resolve_conj(), value.to_dense().resolve_conj())
        elif isinstance(value, np.ndarray):
            assert got.dtype == value.dtype and np.array_equal(got, value)
        else:
            assert got == value
    received[0] += 1  # views of one buffer, but nobody else's
