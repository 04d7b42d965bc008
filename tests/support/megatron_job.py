"""Two ranks save with the real Megatron-Core on the CPU.

torchrun --nproc-per-node 2 megatron_job.py DIRECTORY
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedTensor, save
from megatron.core.dist_checkpointing.mapping import ShardedObject


def whole_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "embedding.weight": torch.randn(8, 4, generator=generator),
        "decoder.layers.fc.weight": torch.randn(3, 4, 6, generator=generator).bfloat16(),
        "decoder.norm.weight": torch.randn(5, generator=generator),
        "optimizer.state.exp_avg.embedding.weight": torch.randn(8, 4, generator=generator),
    }


def main(directory: Path) -> None:
    # Megatron asks CUDA for these whatever the backend is.
    torch.cuda.synchronize = lambda device=None: None
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    full = whole_tensors()

    def rows_of(key: str) -> ShardedTensor:
        return ShardedTensor.from_rank_offsets(key, full[key].chunk(size)[rank].clone(), (0, rank, size))

    stacked = full["decoder.layers.fc.weight"]
    layers = {
        str(layer): ShardedTensor.from_rank_offsets(
            "decoder.layers.fc.weight",
            stacked[layer].chunk(size, dim=1)[rank].clone(),
            (0, layer, 3),
            (2, rank, size),
            prepend_axis_num=1,
        )
        for layer in range(3)
    }
    state = {
        "embedding": rows_of("embedding.weight"),
        "layers": layers,
        "norm": ShardedTensor.from_rank_offsets("decoder.norm.weight", full["decoder.norm.weight"], replica_id=rank),
        "moments": rows_of("optimizer.state.exp_avg.embedding.weight"),
        "rng": ShardedObject("rng_state", {"seed": rank}, (size,), (rank,)),
        "iteration": 7,
        "args": {"lr": 0.1},
    }
    if rank == 0:
        directory.mkdir()
    dist.barrier()
    save(state, str(directory))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
