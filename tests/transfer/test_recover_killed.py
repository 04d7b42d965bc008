"""Processes of a job are killed for good; the others, and new ones in their places, meet at a store and recover."""

import json
import os
import subprocess
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import warm_processes

# A rank of a 2 x 2 job: says that it is ready, waits to be told that others were lost, and recovers with whoever comes.
RANK = textwrap.dedent("""
    import json, os, sys, time
    from datetime import timedelta
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor import Replicate, Shard
    import torchtitan_ext as tte
    from torchtitan_ext import transfer

    port, rank, run, is_fresh = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4] == "fresh"
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    values = {"w": torch.arange(63.0).view(9, 7), "norm": torch.arange(5.0)}

    def begin():
        group = transfer.meet(
            f"127.0.0.1:{port}", job="job", rank=rank, jobs={"job": 4}, host_store=False, timeout_seconds=100
        )
        place = dist.PrefixStore(f"job/{group.group_name}", store)
        dist.init_process_group("gloo", store=place, rank=rank, world_size=4, timeout=timedelta(seconds=100))
        return group, dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))

    def state_on(mesh, factor):
        placed = [Replicate(), Shard(0)]
        model = {fqn: tte.full.distribute_tensor(factor * one, mesh, placed) for fqn, one in values.items()}
        return {"model": model, "note": "before" if factor else ""}

    survived = None
    if not is_fresh:
        _, mesh = begin()
        survived = state_on(mesh, 1)
        tte.save(state_on(mesh, 2), f"{run}/step-3")
        store.set(f"ready/{rank}", "")
        store.wait(["lost"], timedelta(seconds=100))
        dist.destroy_process_group()
    group, mesh = begin()
    alive = json.loads(store.get("lost"))
    state = state_on(mesh, 0)
    report = transfer.recover(
        state, survived=survived, alive=alive, step=None if is_fresh else 3, group=group, path=run, timeout_seconds=100
    )
    first = {fqn: float(one.to_local().flatten()[-1]) for fqn, one in state["model"].items()}
    expected = {fqn: float(one.to_local().flatten()[-1]) for fqn, one in state_on(mesh, 1)["model"].items()}
    factors = {fqn: first[fqn] / expected[fqn] for fqn in first}
    print(json.dumps({"factors": factors, "note": state["note"], "keys": report.keys_from_checkpoint}), flush=True)
    os._exit(0)  # gloo's threads may abort Python's end (pytorch#190489)
""")


@pytest.mark.sampled(0.5)
@pytest.mark.parametrize("killed", [(0,), (1, 3)], ids=["rank 0", "both copies of a shard"])
def test_ranks_that_were_killed_are_replaced(tmp_path: Path, killed: tuple[int, ...]) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def start(rank: int, how: str) -> warm_processes.Popen:
        command = ["-c", RANK, store.port, rank, tmp_path, how]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        return warm_processes.Popen(command, stdout=subprocess.PIPE, env=environment)

    ranks = [start(rank, "old") for rank in range(4)]
    try:
        deadline = time.monotonic() + 100
        while not store.check([f"ready/{rank}" for rank in range(4)]):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        for rank in killed:
            ranks[rank].kill()
            ranks[rank].wait()
            ranks[rank] = start(rank, "fresh")
        store.set("lost", json.dumps([None if rank in killed else rank for rank in range(4)]))
        told: list[dict[str, Any]] = []
        for process in ranks:
            output, _ = process.communicate(timeout=150)
            assert process.returncode == 0, output
            told.append(json.loads(output.splitlines()[-1]))
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    assert {one["note"] for one in told} == {"before"}
    lost = {1, 3} if killed == (1, 3) else set()  # of these ranks' shard nobody has anything: the checkpoint doubles it
    for rank, one in enumerate(told):
        assert one["factors"] == dict.fromkeys(("w", "norm"), 2.0 if rank in lost else 1.0), told
        assert set(one["keys"]) == ({"model.w", "model.norm"} if lost else set())
