"""How boxes of tensors travel from rank to rank: what stands below the plan of a transfer."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch.distributed as dist
from torch import Tensor

from torchtitan_ext import ops


@dataclass(frozen=True)
class GroupTransport:
    """The point-to-point messages of a process group, by ``ops.exchange_runs_``; what has a number is planned once."""

    group: dist.ProcessGroup | None
    bucket_bytes: int
    _planned: dict[int, ops.PlannedExchange] = field(default_factory=dict)

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
        """Sends all boxes and receives all boxes. Collective: all ranks have agreed on this run before.

        Args:
            sources: Plain tensors of this rank, to be read.
            targets: The same, to be written where boxes say so. None shares memory with another one or with a source.
            sends, receives: Tables of boxes, as ``ops.exchange_runs_`` takes them.
            number: Of this memory, the same on all ranks. Under one number, other than 0, the tensors and boxes are the
                same in each call. Under 0 they are of this call alone.
            timeout_seconds: How long a rank may keep others waiting.
        """
        planned = self._planned.get(number)
        if planned is None:
            planned = ops.PlannedExchange(
                sources,
                targets,
                sends,
                receives,
                group_name="" if self.group is None else self.group.group_name,
                bucket_bytes=self.bucket_bytes,
            )
            if number:
                self._planned[number] = planned
        planned.run(digest=number, timeout_seconds=timeout_seconds)
