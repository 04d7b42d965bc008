"""Ray Train: what four workers have saved, any other number goes on with, over the same batches.

python examples/ray_train.py /tmp/run 4 3; python examples/ray_train.py /tmp/run 2 6"""

import sys

try:
    import ray
    from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer
except ModuleNotFoundError as missing:
    sys.exit(f"{missing}: `make clients` installs what this example needs")

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from torchtitan_ext.elastic import ElasticDataLoader, RngState


def train_loop_per_worker(config):
    from torchtitan_ext.integrations.ray import RayCheckpointManager

    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(8, 13), torch.nn.Tanh(), torch.nn.Linear(13, 1))
    fully_shard(model, mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    samples = list(torch.randn(96, 8, generator=torch.Generator().manual_seed(2)))
    loader = ElasticDataLoader(samples, global_batch_size=8)
    manager = RayCheckpointManager(every=1, model=model, optimizer=optimizer, data=loader, rng=RngState(0))
    with manager:
        step = manager.resume()  # of any number of workers; 0 in a new run
        while step < config["steps"]:
            for batch in loader:  # the rest of the epoch, or the next one
                loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
                loss.backward()
                optimizer.step(), optimizer.zero_grad()
                step += 1
                dist.all_reduce(mean := loss.detach() / dist.get_world_size())
                manager.report_step({"step": step, "loss": mean.item()}, step=step)
                if step == config["steps"]:
                    break


if __name__ == "__main__":
    path, num_workers, num_steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    ray.init("local", num_cpus=num_workers, include_dashboard=False, object_store_memory=100 << 20)
    trainer = TorchTrainer(
        train_loop_per_worker,
        train_loop_config={"steps": num_steps},
        scaling_config=ScalingConfig(num_workers=(1, num_workers)),  # as many as there is room for
        run_config=RunConfig(
            name="run",
            storage_path=path,
            failure_config=FailureConfig(max_failures=3),
            checkpoint_config=CheckpointConfig(num_to_keep=8),
        ),
    )
    for _, metrics in trainer.fit().best_checkpoints:
        print(f"step {metrics['step']}: loss {metrics['loss']:.4f}")
