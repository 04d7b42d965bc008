"""A training job that gives the same losses on every mesh."""

import hashlib
from typing import Any

import torch
import torch.distributed as dist
from parallelize_llama import parallelize
from text_batches import read_batch
from tiny_llama import TinyLlama
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import torchtitan_ext as tte


class LlamaJob:
    """Model, AdamW and step on one rank of a mesh, given as {axis name: size}; without axes, in one plain process."""

    def __init__(self, axes: dict[str, int], *, seed: int) -> None:
        torch.manual_seed(seed)  # The same on all ranks: each builds the whole model and keeps its shard.
        self.model, self.step = TinyLlama(), 0
        self.data_rank, self.data_size = 0, 1
        if axes:
            mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
            parallelize(self.model, mesh)
            # TP is the last axis: its ranks are neighbours and train on the same rows.
            self.data_rank, self.data_size = mesh.get_rank() // axes["tp"], mesh.size() // axes["tp"]
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "step": self.step}

    def restore(self, state: dict[str, Any]) -> None:
        model, optimizer = state["model"], state["optimizer"]
        set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)
        self.step = state["step"]

    def train(self, *, last_step: int) -> list[float]:
        """Trains up to and with `last_step`; returns the losses, means over the whole batch. All ranks call it.

        Rank 0 prints a dot for every step.
        """
        losses = []
        while self.step < last_step:
            self.step += 1
            tokens = read_batch(self.step).chunk(self.data_size)[self.data_rank]
            loss = self.model(tokens[:, :-1], targets=tokens[:, 1:])
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(mean_over_ranks(loss))
            if not dist.is_initialized() or dist.get_rank() == 0:
                print(".", end="", flush=True)
        return losses

    def digests(self) -> dict[str, str]:
        """SHA-256 of every parameter and optimizer tensor as one full tensor, by fqn. All ranks call it."""
        state = self.state()
        tensors = dict(state["model"])
        for fqn, moments in state["optimizer"]["state"].items():
            tensors |= {f"{fqn}.{name}": moment for name, moment in moments.items()}
        return {fqn: digest(tensor) for fqn, tensor in tensors.items()}


def digest(tensor: torch.Tensor) -> str:
    full = tte.full_tensor(tensor) if isinstance(tensor, DTensor) else tensor
    return hashlib.sha256(full.contiguous().view(-1).view(torch.uint8).numpy()).hexdigest()


def mean_over_ranks(loss: torch.Tensor) -> float:
    total = loss.detach().clone()
    if dist.is_initialized():
        dist.all_reduce(total)
        total /= dist.get_world_size()
    return total.item()
