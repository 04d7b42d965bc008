"""A transport of the caller's: torch.distributed's messages from Python, one per box."""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_ext.transfer import boxes_of


class Messages:
    """A message per box. Receives before it sends, and packs all that it sends: simple, not fast."""

    group: Any = None
    culprit = -1

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
        if rank == self.culprit:
            raise OSError("no link")
        packed = [(box.peer, box.packed()) for box in boxes_of(sends, sources)]
        kept = iter([part for peer, part in packed if peer == rank])
        arrivals = [(box, torch.empty_like(box.packed())) for box in boxes_of(receives, targets) if box.peer != rank]
        works: list[Any] = [dist.irecv(buffer, box.peer, self.group) for box, buffer in arrivals]
        works += [dist.isend(part, peer, self.group) for peer, part in packed if peer != rank]
        for box in boxes_of(receives, targets):
            if box.peer == rank:
                box.unpack(next(kept))
        for work in works:
            work.wait(timedelta(seconds=timeout_seconds))
        for box, buffer in arrivals:
            box.unpack(buffer)


class MessagesOfHosts(Messages):
    """For tensors of an accelerator, of which it gets no others."""

    def exchange(self, sources: list[Tensor], targets: list[Tensor], *tables: Tensor, **options: Any) -> None:
        assert {tensor.device.type for tensor in (*sources, *targets)} <= {"late"}
        filled = [tensor.cpu() for tensor in targets]
        super().exchange([tensor.cpu() for tensor in sources], filled, *tables, **options)
        for tensor, values in zip(targets, filled, strict=True):
            tensor.copy_(values)
