"""Lists of tensors: what is tied goes once."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import torchtitan_ext as tte
from torchtitan_ext.errors import SyncMismatchError
from torchtitan_ext.sync.batches import ListBatch, collect_list


class Marked(torch.Tensor):
    """A class of its own, without any behaviour."""


def tied_lists(rank: int, world_size: int) -> list[Any]:
    weight, other = torch.full((3, 2), float(rank)), torch.full((2,), float(rank))
    empty = torch.empty(0)
    tensors = [weight, other, weight.detach(), weight.view(3, 2), empty, empty]
    found = collect_list(tensors, dist.group.WORLD, 0)
    assert found.tied == {"tensors[2]": "tensors[0]", "tensors[3]": "tensors[0]"}
    tte.sync.broadcast_tensors(tensors, src=1)
    tte.sync.broadcast_tensors(tensors, src=1, check=False)
    # One rank has them in a class of its own: alike all the same.
    marked = [tensor.as_subclass(Marked) for tensor in tensors] if rank else tensors
    (batch,) = collect_list(marked, dist.group.WORLD, 0).batches.values()
    assert isinstance(batch, ListBatch) and batch.positions == (0, 1, 4, 5)
    tte.sync.broadcast_tensors(marked)
    with pytest.raises(SyncMismatchError) as caught:
        tte.sync.broadcast_tensors([weight, weight if rank == 0 else torch.zeros(3, 2)])
    with pytest.raises(SyncMismatchError, match="share memory and would both be received into"):
        tte.sync.broadcast_tensors([weight, weight.t()])
    square = torch.zeros(2, 2)
    with pytest.raises(SyncMismatchError, match="share memory and would both be received into"):
        tte.sync.broadcast_tensors([square, square.t()])
    with pytest.raises(SyncMismatchError, match="tensors: is a list of 3 tensors on rank 0, of 2 tensors on rank 1"):
        tte.sync.broadcast_tensors([weight] * (3 - rank))
    return [weight.tolist(), other.tolist(), str(caught.value).splitlines()[-1].strip()]


def test_tied_tensors_are_sent_once(run_world: Callable[..., list[Any]]) -> None:
    text = "tensors[1]: has the memory of tensors[0] on rank 0, memory of its own on rank 1; tie it on all or none"
    assert run_world(2, tied_lists) == [[[[1.0, 1.0]] * 3, [1.0, 1.0], text]] * 2
