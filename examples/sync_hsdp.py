"""Brings the replicas of a tiny Llama on a 2 x 2 HSDP mesh to the same bits, proves it, breaks one and finds it.

python examples/sync_hsdp.py
"""

import sys
from typing import NamedTuple

import torch
import torch.distributed as dist
from tiny_llama import TinyLlama
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from worlds import run_world

import torchtitan_ext as tte

BROKEN_RANK, BROKEN_FQN, BROKEN_INDEX = 3, "layers.1.ffn.w2.weight", (5, 7)


class Outcome(NamedTuple):
    num_shards: int
    num_different: int  # shards whose replicas differ before the sync
    num_left: int  # and after it
    found: list[str]  # what the check says after one bit was flipped
    num_repaired: int  # shards that differ after a second sync


def sync() -> Outcome:
    """On every rank: replica 0 is ranks 0 and 1, replica 1 ranks 2 and 3."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    with torch.device("meta"):
        model = TinyLlama()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    torch.manual_seed(dist.get_rank())  # The mistake: every rank initialises with a seed of its own.
    with torch.no_grad():
        for param in model.parameters():
            param.to_local().normal_(std=0.02)
    num_different = len(tte.check_replicas(model))

    tte.sync_module_states(model, verify=True)
    num_left = len(tte.check_replicas(model))

    if dist.get_rank() == BROKEN_RANK:
        flip_a_bit(model.get_parameter(BROKEN_FQN).to_local())
    found = [str(difference) for difference in tte.check_replicas(model)]
    tte.sync_module_states(model, verify=True)
    num_shards = mesh["dp_shard"].size() * len(list(model.parameters()))
    return Outcome(num_shards, num_different, num_left, found, len(tte.check_replicas(model)))


def flip_a_bit(local: torch.Tensor) -> None:
    local.detach().view(torch.int32)[BROKEN_INDEX] ^= 1  # The lowest bit of one float32, as a faulty memory would.


def main() -> int:
    outcome = run_world(sync, world_size=4)
    print(f"initialised apart:  {outcome.num_different} of {outcome.num_shards} shards differ between the replicas")
    print(f"synced:             {outcome.num_left} differ")
    print(f"one bit flipped:    {len(outcome.found)} differ")
    for line in outcome.found:
        print(f"                    {line}")
    print(f"synced again:       {outcome.num_repaired} differ")
    as_it_must_be = outcome.num_different == outcome.num_shards and len(outcome.found) == 1
    return (
        0
        if as_it_must_be and outcome.found[0].startswith(BROKEN_FQN) and outcome.num_left == outcome.num_repaired == 0
        else 1
    )


if __name__ == "__main__":
    sys.exit(main())
