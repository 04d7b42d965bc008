"""Transfers over a transport of the caller's, here torch.distributed's messages from Python."""

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import torchtitan_ext as tte
from torchtitan_ext import ops
from torchtitan_ext.errors import TransferFailedError
from torchtitan_ext.transfer import boxes_of


class Messages:
    """A message per box. Receives before it sends, and packs all that it sends: simple, not fast."""

    def exchange(
        self,
        sources: list[Tensor],
        targets: list[Tensor],
        sends: Tensor,
        receives: Tensor,
        *,
        number: int,
        timeout_seconds: float,
    ) -> None:
        rank = dist.get_rank()
        packed = [(box.peer, box.packed()) for box in boxes_of(sends, sources)]
        kept = iter([part for peer, part in packed if peer == rank])
        arrivals = [(box, torch.empty_like(box.packed())) for box in boxes_of(receives, targets) if box.peer != rank]
        works: list[Any] = [dist.irecv(buffer, box.peer) for box, buffer in arrivals]
        works += [dist.isend(part, peer) for peer, part in packed if peer != rank]
        for box in boxes_of(receives, targets):
            if box.peer == rank:
                box.unpack(next(kept))
        for work in works:
            work.wait(timedelta(seconds=timeout_seconds))
        for box, buffer in arrivals:
            box.unpack(buffer)


def both_transports(rank: int, world_size: int) -> None:
    mesh = DeviceMesh("cpu", torch.tensor([0, 1]), _init_backend=False)
    whole = torch.arange(60.0).view(10, 6)
    source = target = None
    if rank < 2:
        local = whole.chunk(2)[rank].clone()
        source = {"w": DTensor.from_local(local, mesh, [Shard(0)], run_check=False), "s": torch.tensor(7), "n": 3}
        source["empty"] = torch.zeros(0, 2)
    if rank > 0:
        target = {
            "w": torch.zeros(6, 10, dtype=torch.float64).T,
            "s": torch.tensor(0),
            "n": 0,
            "empty": torch.ones(0, 2),
        }
    plan = tte.plan_reshard(source, target, cast="exact", transport=Messages())
    for step in (1, 2):
        if source is not None:
            local.add_(step)
        plan.run(version=step, verify=True)
        assert plan.version == step
        if target is not None:
            assert torch.equal(target["w"], whole.double() + step * (step + 1) / 2)
            assert (target["s"].item(), target["n"]) == (7, 3)


def test_a_transport_written_in_python(run_world: Any) -> None:
    run_world(3, both_transports)


class Broken:
    def exchange(self, *arguments: Any, **options: Any) -> None:
        if dist.get_rank() == 1:
            raise OSError("no link")


def broken(rank: int, world_size: int) -> None:
    plan = tte.plan_reshard({"w": torch.ones(3)}, {"w": torch.zeros(3)}, transport=Broken())
    with pytest.raises(TransferFailedError, match=r"in phase exchange: rank 1: OSError: no link.*part-written.*: w"):
        plan.run(version=1)
    assert plan.version is None


def test_what_a_transport_raises_is_raised_on_all_ranks(run_world: Any) -> None:
    run_world(2, broken)


def test_boxes_are_views_of_the_tensors() -> None:
    tensors = [torch.zeros(4, 5), torch.tensor(1.0)]
    number = ops.dtype_number(torch.float64)
    table = torch.tensor([0, 1, -1, 0, 2, 0, number, 2, 1, 2, 3, 2])
    scalar, part = boxes_of(table, tensors)
    assert (scalar.peer, scalar.part.shape, scalar.packed().numel()) == (0, (), 4)
    assert (part.peer, part.part.shape) == (2, (3, 2))
    part.part.fill_(1)
    assert tensors[0][1:4, 2:4].sum() == tensors[0].sum() == 6
    assert part.packed().view(torch.float64).tolist() == [1.0] * 6
    part.unpack(torch.arange(6.0, dtype=torch.float64).view(torch.uint8))
    assert tensors[0][1:4, 2:4].tolist() == [[0, 1], [2, 3], [4, 5]]
