"""A job of Ray Train on nodes of this machine, for ``tests/clients/test_ray.py``: ``ray_job.py FOLDER SCENARIO``.

Every worker appends what it has trained to a file of its own, ``<time>-<rank>.jsonl``, and the driver writes
what Ray knows in the end. Scenarios:

- ``undisturbed``: four workers.
- ``resized``: four workers on two nodes, of which one is killed, then two, and four again once there is another node.
  Where the number of nodes is to change, all workers wait until they are ended, so that no clock decides anything.
- ``attacked``: two workers, and in each attempt but the last one something happens (see ``attack``).
- ``drained``: four workers, which are told that a node is about to be taken, save their step, and are two afterwards.
- ``refused``: one worker, and storage refuses one of its steps.
"""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

import ray
import torch
import torch.distributed as dist
from ray.cluster_utils import Cluster
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch.distributed.fsdp import fully_shard

import torchtitan_ext as tte

NUM_STEPS = 20
GLOBAL_BATCH = 8
NUM_SAMPLES = 72  # an epoch ends in the middle of the run
WORKERS = {"undisturbed": 4, "resized": (2, 4), "drained": (2, 4), "attacked": 2, "refused": 1}


def train(config: dict[str, Any]) -> None:
    from torchtitan_ext.integrations.ray import RayCheckpointManager

    rank, world_size = dist.get_rank(), dist.get_world_size()
    folder, scenario = Path(config["folder"]), config["scenario"]
    log = open(folder / f"{time.monotonic_ns()}-{rank}.jsonl", "w", buffering=1)  # noqa: SIM115
    dist.barrier()
    attempt = len(list(folder.glob("*-0.jsonl")))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 9), torch.nn.Tanh(), torch.nn.Linear(9, 1))
    fully_shard(model, mesh=dist.init_device_mesh("cpu", (world_size,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    inputs = torch.randn(NUM_SAMPLES, 4, generator=torch.Generator().manual_seed(1))
    samples = [{"id": number, "x": row, "y": row.sum(0, keepdim=True)} for number, row in enumerate(inputs)]
    loader = tte.elastic.ElasticDataLoader(samples, global_batch_size=GLOBAL_BATCH)
    options = {"on_error": "warn"} if scenario == "refused" else {}
    with RayCheckpointManager(every=4, model=model, optimizer=optimizer, data=loader, **options) as manager:
        step = manager.resume()
        log.write(json.dumps({"attempt": attempt, "num_workers": world_size, "resumed": step}) + "\n")
        while step < NUM_STEPS:
            for batch in loader:
                loss = (model(batch["x"]) - batch["y"]).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                step += 1
                log.write(json.dumps({"step": step, "ids": batch["id"].tolist(), "loss": loss.item()}) + "\n")
                if scenario == "attacked":
                    attack(attempt, step, rank, manager)
                is_told = scenario == "drained" and (world_size, step) == (4, 6) and wait_for_the_news(folder / "drain")
                with refused(scenario == "refused" and step == 8):
                    manager.report_step({"step": step, "loss": loss.item()}, step=step, save=is_told)
                    if scenario == "refused":
                        manager.wait()
                if is_told:
                    manager.wait()
                    wait_for_the_end()
                if scenario == "resized" and (world_size, step) in [(4, 6), (2, 14)]:
                    wait_for_the_end(folder / ("shrink" if step == 6 else "grow"))
                if step == NUM_STEPS:
                    break


def attack(attempt: int, step: int, rank: int, manager: Any) -> None:
    """What happens in an attempt, before a step is reported."""
    if (attempt, step, rank) == (1, 6, 1):
        raise RuntimeError("an error of the user's own")
    if (attempt, step, rank) == (2, 8, 1):
        tte.FileWriter.write_data = no_space
    if (attempt, step, rank) == (3, 8, 1):  # in the middle of the save: rank 0 has written its part
        tte.FileWriter.write_data = die
    if (attempt, step) == (4, 12):  # it is committed, and Ray does not know of it
        manager.save(step=step)
        manager.wait()
        wait_for_death(rank)
    if (attempt, step) == (5, 18):
        manager.wait()
        if rank == 0:
            part = next(Path(manager.run, "step-16").glob("*.distcp"))
            part.write_bytes(b"\0" * part.stat().st_size)
        dist.barrier()
        wait_for_death(rank)


def wait_for_the_news(marker: Path) -> bool:
    """Waits until Ray has told the workers that a node is about to be taken. Collective."""
    marker.touch()
    while ray.train.get_preemption_info() is None:
        time.sleep(0.05)
    return True


class refused:
    """Storage has no space meanwhile, if ``is_refused``."""

    def __init__(self, is_refused: bool) -> None:
        self.is_refused = is_refused

    def __enter__(self) -> None:
        self.writes = tte.FileWriter.write_data
        if self.is_refused:
            tte.FileWriter.write_data = no_space

    def __exit__(self, *_: object) -> None:
        tte.FileWriter.write_data = self.writes


def no_space(*_: object) -> NoReturn:
    raise OSError(errno.ENOSPC, "no space")


def die(*_: object) -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def wait_for_death(rank: int) -> None:
    if rank == 1:
        die()
    wait_for_the_end()


def wait_for_the_end(marker: Path | None = None) -> NoReturn:
    if marker is not None:
        marker.touch()
    while True:
        time.sleep(0.05)


def has_come(path: Path, fitted: Future[Any]) -> bool:
    """Waits until a worker has made the file; false if the job ends before."""
    while not path.exists() and not fitted.done():
        time.sleep(0.05)
    return path.exists()


def drain(address: str, node: str) -> None:
    """As a cloud does that takes a machine back: those on it have some seconds."""
    command = [sys.executable, "-m", "ray.scripts.scripts", "drain-node", "--address", address, "--node-id", node]
    reason = ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "taken back"]
    subprocess.run([*command, *reason, "--deadline-remaining-seconds", "15"], check=True)


def main() -> None:
    folder, scenario = Path(sys.argv[1]), sys.argv[2]
    os.environ["RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"] = "0.2"
    os.environ["RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S"] = "0.5"
    os.environ["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"] = "5"  # it takes a dead node for a living one at first
    os.environ["TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S"] = "1"  # of a group that has lost a rank: it does not shut down
    memory = {"object_store_memory": 100 * 1024 * 1024}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False, **memory})
    second = cluster.add_node(num_cpus=2, **memory)
    ray.init(address=cluster.address)
    trainer = TorchTrainer(
        train,
        train_loop_config={"folder": str(folder), "scenario": scenario},
        scaling_config=ScalingConfig(num_workers=WORKERS[scenario], elastic_resize_monitor_interval_s=1.0),
        run_config=RunConfig(
            name="run",
            storage_path=str(folder / "storage"),
            failure_config=FailureConfig(max_failures=5),
            checkpoint_config=CheckpointConfig(num_to_keep=None if scenario == "refused" else 2),
        ),
    )
    with ThreadPoolExecutor(1) as pool:  # nodes start in the main thread
        fitted = pool.submit(trainer.fit)
        if scenario == "resized" and has_come(folder / "shrink", fitted):
            cluster.remove_node(second, allow_graceful=False)  # by SIGKILL, and with it its workers
            if has_come(folder / "grow", fitted):
                cluster.add_node(num_cpus=2, **memory)
        if scenario == "drained" and has_come(folder / "drain", fitted):
            drain(cluster.address, second.node_id)
        result = fitted.result()
    listed = [[os.path.basename(one.path), metrics["step"]] for one, metrics in result.best_checkpoints]
    latest = [os.path.basename(result.checkpoint.path), result.metrics["step"]]
    (folder / "result.json").write_text(json.dumps({"latest": latest, "listed": listed}))
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main()
