"""A process group that Python makes: the collectives of the package over one that knows no backends, or that fails."""

import torch
import torch.distributed as dist
from torch import Tensor


class PythonGroup(dist.ProcessGroup):
    """Sends as the group within it does, one call at a time; it has no backends that could be asked for anything.

    ``calls_left`` counts broadcasts and sends down; behind them the network is gone.
    """

    def __init__(self, inner: dist.ProcessGroup, *, calls_until_failure: int = 1 << 30) -> None:
        super().__init__(inner.rank(), inner.size())
        self.inner, self.calls_left = inner, calls_until_failure

    def getBackendName(self) -> str:
        return "python"

    def broadcast(self, tensors: list[Tensor], options: dist.BroadcastOptions) -> dist.Work:
        self._count()
        return self.inner.broadcast(tensors, options)

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> dist.Work:
        self._count()
        return self.inner.send(tensors, peer, tag)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> dist.Work:
        return self.inner.recv(tensors, peer, tag)

    def allgather(self, rows: list[list[Tensor]], row: list[Tensor], options: object) -> dist.Work:
        return self.inner.allgather(rows, row, options)

    def _count(self) -> None:
        self.calls_left -= 1
        if self.calls_left < 0:
            raise RuntimeError("the network is gone")


def register(group: PythonGroup, name: str) -> PythonGroup:
    """Returns the group, which lives only as long as somebody holds it."""
    torch._C._distributed_c10d._register_process_group(name, group)
    return group
