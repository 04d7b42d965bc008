"""Kills one rank of a 2 x 2 HSDP job; the others keep the state, and training goes on as if nothing had happened.

python examples/lose_a_replica.py"""

import os
import subprocess
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.fsdp import fully_shard

from torchtitan_ext import transfer

STEPS, SIZE, KILLED, KILLED_AT = 8, 4, 3, 4
NOTICED = timedelta(seconds=10)  # neighbours of a lost rank notice at once, those that wait for neighbours after this


def build(mesh: dist.DeviceMesh) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 33), nn.Tanh(), nn.Linear(33, 1))
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, object]]:
    return {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}  # makes it, if new


def train_a_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> float:
    torch.manual_seed(100 * step + dist.get_rank())
    loss = model(torch.randn(16, 8)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    dist.barrier()  # all have their gradients: from here on nobody waits for another one
    optimizer.step()
    return float(loss.detach())


def work(rank: int, address: str, may_be_killed: bool) -> None:
    host, _, port = address.rpartition(":")
    store, survived, step = dist.TCPStore(host, int(port), is_master=False), None, None
    while step is None or step < STEPS:
        group = transfer.meet(address, job="trainer", rank=rank, jobs={"trainer": SIZE}, host_store=False)
        meeting = dist.PrefixStore(f"job/{group.group_name}", store)
        dist.init_process_group("gloo", store=meeting, rank=rank, world_size=SIZE, timeout=NOTICED)
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
        for along_axis in mesh.get_all_groups():
            _set_pg_timeout(NOTICED, along_axis)
        model, optimizer = build(mesh)
        alive: list[int | None] = [None] * SIZE
        dist.all_gather_object(alive, None if survived is None else rank)
        if any(old is not None for old in alive):
            state = state_of(model, optimizer)
            report = transfer.recover(state, survived=survived, alive=alive, step=step, group=group)
            set_optimizer_state_dict(model, optimizer, state["optimizer"])
            step = report.step
            if rank == 0:
                print(report, flush=True)
        step = step or 0
        try:
            while step < STEPS:
                if rank == KILLED and step == KILLED_AT and may_be_killed:
                    store.set("ready", "to be killed")
                    time.sleep(600)
                loss = train_a_step(model, optimizer, step)
                step += 1
                if rank == 0:
                    print(f"step {step}: loss {loss:.9f}", flush=True)
        except RuntimeError as error:
            print(f"rank {rank} lost another one at step {step}: {str(error).splitlines()[0][:60]}", flush=True)
            survived = state_of(model, optimizer)
        dist.destroy_process_group()


def supervise(kills: bool) -> int:
    """Hosts the store, and starts a process in the place of one that dies: torchrun would restart all of them."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def start(rank: int, may_be_killed: bool) -> subprocess.Popen[bytes]:
        command = [sys.executable, __file__, str(rank), f"127.0.0.1:{store.port}", str(may_be_killed)]
        return subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})

    ranks = [start(rank, kills) for rank in range(SIZE)]
    while kills and not store.check(["ready"]):
        time.sleep(0.1)
    if kills:
        ranks[KILLED].kill()
        ranks[KILLED].wait()
        print(f"rank {KILLED} was killed", flush=True)
        ranks[KILLED] = start(KILLED, False)
    return max(process.wait() for process in ranks)


if __name__ == "__main__":
    if len(sys.argv) == 4:
        work(int(sys.argv[1]), sys.argv[2], sys.argv[3] == "True")
    else:
        sys.exit(supervise(kills="undisturbed" not in sys.argv))
