"""A trainer under FSDP2 over TP sends its generator what each step has changed, and nothing else.

torchrun --nproc-per-node 6 examples/delta_sync.py

Ranks 0 to 3 train bf16 weights with AdamW at a learning rate of 1e-6, which changes few of their bits; ranks 4 and 5
generate under TP. Both give the same logits after each step.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from live_model import TP_PLAN, VOCAB, build_model
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import parallel

import torchtitan_ext as tte

STEPS, FIRST_GENERATOR = 10, 4


def main() -> None:
    dist.init_process_group("gloo")
    train_mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
    generator_mesh = DeviceMesh("cpu", [4, 5], mesh_dim_names=("tp",))
    is_trainer = dist.get_rank() < FIRST_GENERATOR
    torch.manual_seed(0)  # what TP leaves whole must begin alike on all ranks
    model = build_model().bfloat16()
    parallel.parallelize_module(model, train_mesh["tp"] if is_trainer else generator_mesh, TP_PLAN)
    if is_trainer:
        fully_shard(model, mesh=train_mesh["dp"])
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    source, target = (model, None) if is_trainer else (None, model)

    plan = tte.transfer.plan_reshard(source, target)
    whole = bytes_of_all(plan.run(version=0 if is_trainer else None).bytes_received)
    base = tte.delta.Snapshot(source)
    for step in range(1, STEPS + 1):
        changes = None
        tokens = (7 * torch.arange(8 * 12).view(8, 12) + step) % VOCAB  # the same on all ranks
        if is_trainer:
            own = tokens.chunk(train_mesh["dp"].size())[train_mesh["dp"].get_local_rank()]
            F.cross_entropy(model(own[:, :-1]).flatten(0, 1), own[:, 1:].flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
            changes = base.changes(version=step)
        result = plan.run(changes=changes, verify=step == STEPS)
        if is_trainer:
            base.advance()
        num_bytes = bytes_of_all(result.bytes_received)
        with torch.no_grad():
            logits = model(tokens)
        is_equal = torch.equal(logits, from_rank(FIRST_GENERATOR, logits))
        if dist.get_rank() == 0:
            proved = ", proved" if step == STEPS else ""
            sizes = f"changes {num_bytes:,} bytes, all {whole:,}"
            print(f"version {result.version}: {sizes}, equal logits: {is_equal}{proved}")
    dist.barrier()  # lets gloo's threads release their tensors before Python ends (docs/use/adoption.md)
    dist.destroy_process_group()


def bytes_of_all(num_bytes: int) -> int:
    total = torch.tensor(num_bytes)
    dist.all_reduce(total)
    return int(total)


def from_rank(rank: int, value: torch.Tensor) -> torch.Tensor:
    sent = value.clone()
    dist.broadcast(sent, src=rank)
    return sent


if __name__ == "__main__":
    main()
