"""Ranks that make different calls, or some of which refuse their arguments: one error on all, and the group goes on."""

import re
from collections.abc import Callable
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import torchtitan_ext as tte
from torchtitan_ext.errors import DifferentCallsError, ReplicaMismatchError, WrongArgumentError


def calls_of(path: Path) -> dict[str, Callable[..., Any]]:
    """By the name that messages give them."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def state() -> dict[str, Any]:
        return {"w": torch.ones(3)}

    plan = tte.transfer.plan_reshard(state(), state())
    calls = {
        "save": lambda **more: tte.save(state(), path / "save", **more),
        "async_save": lambda **more: tte.async_save(state(), path / "async", **more).result(),
        "load": lambda **more: tte.load(state(), path / "saved", **more),
        "load(prove=True)": lambda **more: tte.load(state(), path / "saved", prove=True, **more),
        "weights.save": lambda: tte.weights.save(state(), path / "weights"),
        "reshard": lambda **more: tte.reshard(state(), state(), **more),
        "plan.run": lambda **more: plan.run(**more),
        "fingerprint": lambda: tte.fingerprint(state()),
        "check_replicas": lambda: tte.check_replicas(state(), mesh),
        "broadcast_tensors": lambda: tte.sync.broadcast_tensors([torch.ones(3)]),
    }
    tte.save(state(), path / "saved", fingerprints=True)
    return calls


# Of both exchanges, by values and in phases, with every kind of second part.
PAIRS = [
    *permutations(["save", "load", "reshard", "fingerprint", "check_replicas", "broadcast_tensors"], 2),
    *permutations(["load", "load(prove=True)"], 2),
    *permutations(["save", "weights.save", "async_save"], 2),
    *permutations(["plan.run", "save"], 2),
]
OF_SYNCS = {"check_replicas", "broadcast_tensors"}


def make_pairs(rank: int, world_size: int, path: Path) -> dict[tuple[str, str], tuple[str, str]]:
    calls, found = calls_of(path), {}
    for pair in PAIRS:
        with pytest.raises(Exception) as caught:
            calls[pair[rank == 1]]()
        found[pair] = type(caught.value).__name__, str(caught.value)
        dist.barrier()
    for name in {name for pair in PAIRS for name in pair}:  # the group is as good as before
        calls[name]()
    return found


@pytest.mark.parametrize("world_size", [2, 4])
def test_every_rank_gets_both_names(run_world: Callable[..., Any], tmp_path: Path, world_size: int) -> None:
    results = run_world(world_size, make_pairs, tmp_path)
    assert all(result == results[0] for result in results)
    others = "rank 0 calls" if world_size == 2 else "ranks 0, 2, 3 call"
    for (first, second), (error, text) in results[0].items():
        if {first, second} == OF_SYNCS:
            assert error == "SyncMismatchError" and f"operation: is '{first}'" not in text
            continue
        assert error == "DifferentCallsError", (first, second, text)
        names = [{"plan.run": "reshard"}.get(name, name) for name in (first, second)]
        assert text == (
            f"ranks make different calls: {others} {names[0]}, rank 1 {names[1]}; make the same calls, in one order, "
            "on all ranks"
        )


REFUSED = [
    ("save", {"timeout_seconds": -1}, r"save: got timeout_seconds=-1, expected"),
    ("save", {"fingerprints": 1}, r"save: got fingerprints=1, expected"),
    ("async_save", {"timeout_seconds": "long"}, r"async_save: got timeout_seconds='long', expected"),
    ("load", {"prove": "yes"}, r"load: got prove='yes', expected"),
    ("reshard", {"cast": "maybe"}, r"plan_reshard: got cast='maybe', expected"),
    ("reshard", {"bucket_bytes": 1.5}, r"plan_reshard: got bucket_bytes=1.5, expected"),
    ("plan.run", {"version": "seven"}, r"TransferPlan.run: got version='seven', expected"),
    ("reshard", {"replicas": "last"}, r"plan_reshard: got replicas='last', expected"),
]


def refuse_on_one(rank: int, world_size: int, path: Path) -> list[str]:
    calls, texts = calls_of(path), []
    for name, options, _ in REFUSED:
        with pytest.raises(WrongArgumentError) as caught:
            calls[name](**(options if rank == 1 else {}))
        assert isinstance(caught.value, (TypeError, ValueError))
        texts.append(str(caught.value))
        with pytest.raises((TypeError, ValueError)) as alike:  # as of one process
            calls[name](**options)
        assert not isinstance(alike.value, WrongArgumentError)
    return texts


def test_what_one_rank_refuses_all_refuse(run_world: Callable[..., Any], tmp_path: Path) -> None:
    first, second = run_world(2, refuse_on_one, tmp_path)
    assert first == second
    for text, (_, _, pattern) in zip(first, REFUSED, strict=True):
        assert re.search(rf"refused, nothing was changed; 1 problem\(s\):.*\n.*\n  rank 1: ({pattern})", text), text


def run_in_other_ways(rank: int, world_size: int) -> list[str]:
    source, target, texts = {"w": torch.ones(3)}, {"w": torch.zeros(3)}, []
    plan = tte.transfer.plan_reshard(source, target)
    for call, name, values in (
        (plan.run, "verify", (False, True)),
        (tte.reshard, "verify", (False, True)),
        (tte.reshard, "replicas", ("equal", "first")),
        (tte.transfer.plan_reshard, "replicas", ("equal", "first")),
    ):
        with pytest.raises(ReplicaMismatchError) as caught:
            call(*(() if call == plan.run else (source, target)), **{name: values[rank]})
        texts.append(str(caught.value).splitlines()[-1])
    return texts


def test_runs_with_other_arguments_are_refused_by_name(run_world: Callable[..., Any]) -> None:
    first, second = run_world(2, run_in_other_ways)
    verify, replicas = (
        "  verify: is False on rank 0, True on rank 1",
        "  replicas: is 'equal' on rank 0, 'first' on rank 1",
    )
    assert first == second == [verify, verify, replicas, replicas]


def different_phases(rank: int, world_size: int) -> str:
    """One call, of which one rank is elsewhere."""
    plan = tte.transfer.plan_reshard({"w": torch.ones(3)}, {"w": torch.zeros(3)})
    with pytest.raises(DifferentCallsError) as caught:
        if rank == 0:
            plan.run(version=1)
        else:
            tte.reshard({"w": torch.ones(3)}, {"w": torch.zeros(3)})
    return str(caught.value)


def test_one_call_in_two_phases(run_world: Callable[..., Any]) -> None:
    for text in run_world(2, different_phases):
        assert "rank 0 calls phase agree of reshard, rank 1 phase plan of reshard;" in text
