"""Writes what version 0.2 saved: `python generate.py` with version 0.2.0 installed, and never again.

Each folder beside this file is a checkpoint, or a run of some; `position_*.json` are states of data loaders of one
rank. `tests/storage/test_saved_by_0_2.py` says what each is for.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import torchtitan_ext as tte

HERE = Path(__file__).parent
sys.path += [str(HERE.parents[1] / name) for name in ("support", "harness")]

from gloo_worlds import WorldPool  # noqa: E402
from object_server import running_server  # noqa: E402


def whole_tensors() -> dict[str, torch.Tensor]:
    rows = torch.arange(35, dtype=torch.float32).view(7, 5)
    return {"rows": rows, "columns": (rows / 8).to(torch.bfloat16), "plain": torch.arange(6, dtype=torch.int64)}


def sharded_state() -> dict[str, Any]:
    """What each of two ranks holds."""
    whole = whole_tensors()
    mesh = init_device_mesh("cpu", (2,))
    sharded = {name: distribute_tensor(whole[name], mesh, [Shard(dim)]) for dim, name in enumerate(["rows", "columns"])}
    return {**sharded, "plain": whole["plain"], "step": 7, "names": ["a", "b"]}


def save_checkpoints(rank: int, world_size: int, environment: dict[str, str], url: str) -> None:
    os.environ.update(environment)
    os.chdir(HERE)
    state = sharded_state()
    tte.save(state, "native", fingerprints=True)
    writer = tte.FileWriter("metadata_per_rank")
    dcp.save(state, storage_writer=writer, planner=tte.SavePlanner(), use_collectives=False)
    tte.weights.save({name: state[name] for name in whole_tensors()}, "safetensors")
    tte.save(state, url, fingerprints=True)
    tte.save(state, "linked/step-1", fingerprints=True)
    state["step"] = 8
    tte.save(state, "linked/step-2", reuse="latest")


def trained_objects(num_steps: int) -> dict[str, Any]:
    """A model, an optimizer and a scheduler after some steps whose gradients are ones."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 3))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for _ in range(num_steps):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return {
        "model": model,
        "optimizer": optimizer,
        "lr_scheduler": tte.elastic.ElasticLRScheduler(scheduler, global_batch_size=4),
        "dataloader": loader_of(list(range(24)), dist.get_rank(), dist.get_world_size()),
    }


def loader_of(data: Any, dp_rank: int = 0, dp_size: int = 1, **options: Any) -> Any:
    return tte.elastic.ElasticDataLoader(data, global_batch_size=4, dp_rank=dp_rank, dp_size=dp_size, **options)


def save_run(rank: int, world_size: int) -> None:
    os.chdir(HERE)
    objects = trained_objects(3)
    batches = iter(objects["dataloader"])
    with tte.CheckpointManager("run", every=1, asynchronous=False, **objects) as manager:
        for step in (1, 2):
            next(batches)
            manager.save(step=step)


def open_stream(shard: int, num_shards: int, epoch: int) -> Any:
    return iter(range(100 * shard, 100 * shard + 6))


def save_positions() -> None:
    for name, data in (("samples", list(range(24))), ("streams", tte.elastic.Streams(open_stream, 4))):
        for suffix, options in (("", {}), ("_in_flight", {"max_in_flight": 8})):
            loader = loader_of(data, **options)
            batches = iter(loader)
            next(batches)
            if options:
                loader.acknowledge(loader.sample_ids[:3])
            next(batches)
            (HERE / f"position_{name}{suffix}.json").write_text(json.dumps(loader.state_dict(), indent=1) + "\n")


if __name__ == "__main__":
    assert tte.__version__ == "0.2.0"
    pool = WorldPool()
    with running_server() as server:
        pool.run(2, save_checkpoints, server.environment, f"s3://{server.bucket}/golden")
        os.environ.update(server.environment)
        from torchtitan_ext.storage.location import Location
        from torchtitan_ext.storage.objects.folder import ObjectFolder

        folder = ObjectFolder(Location(f"s3://{server.bucket}/golden"))
        for name in folder.stamps():
            path = HERE / "in_a_store" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(folder.read(name))
    pool.run(2, save_run)
    save_positions()
    pool.close()
