"""States of the storage benchmark: tensors of known values, cut by rows or by columns over a mesh."""

from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

State = dict[str, DTensor]
ROWS, COLUMNS = 0, 1

NUM_LARGE, NUM_SMALL = 120, 4000
SMALL_BYTES = 2048
RUN_BYTES = 8192  # of a row of a large tensor that lies on one rank when it is cut by columns


@dataclass(frozen=True)
class Workload:
    """Matrices that are cut evenly both ways.

    Attributes:
        count: Number of tensors.
        shape: Global shape of each.
        dtype: Of all elements.
    """

    count: int
    shape: tuple[int, int]
    dtype: torch.dtype


def large(gigabytes: float, dtype: torch.dtype, world_size: int) -> Workload:
    """About so many bytes, of all ranks together; rows -> columns moves runs of RUN_BYTES."""
    row_bytes = RUN_BYTES * world_size
    num_rows = round(gigabytes * 2**30 / NUM_LARGE / row_bytes / world_size) * world_size
    return Workload(NUM_LARGE, (num_rows, row_bytes // dtype.itemsize), dtype)


def small(dtype: torch.dtype) -> Workload:
    return Workload(NUM_SMALL, (16, SMALL_BYTES // 16 // dtype.itemsize), dtype)


def filled(workload: Workload, mesh: DeviceMesh, dim: int) -> State:
    """A state whose rows hold numbers that tell row and tensor."""
    state = {}
    for index in range(workload.count):
        part = _values(workload, mesh, dim, index).contiguous()
        state[f"layers.{index}.weight"] = DTensor.from_local(part, mesh, [Shard(dim)], run_check=False)
    return state


def clear(state: State) -> None:
    for tensor in state.values():
        tensor.to_local().fill_(-1)


def check(workload: Workload, mesh: DeviceMesh, dim: int, state: State) -> None:
    """Raises ValueError unless a state is what `filled` makes."""
    for index, (name, tensor) in enumerate(state.items()):
        if not torch.equal(tensor.to_local(), _values(workload, mesh, dim, index)):
            raise ValueError(f"{name} was loaded with other values on rank {mesh.get_rank()}")


def local_parts(state: State) -> dict[str, torch.Tensor]:
    return {name: tensor.to_local() for name, tensor in state.items()}


def _values(workload: Workload, mesh: DeviceMesh, dim: int, index: int) -> torch.Tensor:
    shape = list(workload.shape)
    shape[dim] //= mesh.size()
    first_row = shape[0] * mesh.get_local_rank() if dim == ROWS else 0
    # Integers up to 256 are exact in bfloat16 too.
    rows = (torch.arange(first_row, first_row + shape[0]) + index) % 251
    return rows.to(workload.dtype)[:, None].expand(shape)
