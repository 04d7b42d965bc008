"""Which elements of what a rank holds go where in the tensors of files."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import WriteItem

from torchtitan_ext.errors import Problem, refusal
from torchtitan_ext.layout.layout import row_major_position
from torchtitan_ext.storage.raw_tensor import dtype_name, raw_memory
from torchtitan_ext.storage.weights.layout import dtype_problems, name_problems, value_problem

Value = torch.Tensor | io.BytesIO
"""What a planner gives for an item."""

TensorForms = dict[str, tuple[str, tuple[int, ...]]]
"""Dtype and shape of each tensor, by name."""


@dataclass(frozen=True)
class Placed:
    """Elements, and their places in a tensor of a file.

    Attributes:
        fqn: The name of that tensor.
        position: Of the first element, in row-major order.
        strides: Positions from one element to the next, by the dims of ``values``. No two elements have one place.
        values: Plain memory of any strides, on any device.
        dtypes: To which elements are cast in turn.
    """

    fqn: str
    position: int
    strides: tuple[int, ...]
    values: torch.Tensor
    dtypes: tuple[torch.dtype, ...] = ()


class PlacesOfRank(Protocol):
    """The places of what one rank writes."""

    @property
    def names(self) -> Iterable[str]:
        """The tensors of the files of which the rank writes something."""
        ...

    def of(self, item: WriteItem, value: Callable[[], Value]) -> Iterator[Placed]:
        """The places of an item, whose value is asked for if it has any."""
        ...


class WeightsMap(Protocol):
    """How the tensors that ranks hold become those of the files. Travels to a child process."""

    def forms(self, metadata: Metadata) -> tuple[TensorForms, bytes]:
        """The tensors of the files, and what the other ranks have to know of all ranks. The coordinator calls it.

        Raises:
            StateRefusedError: All problems.
        """
        ...

    def places(self, items: Sequence[WriteItem], known: bytes) -> PlacesOfRank:
        """The places of one rank's items."""
        ...


class SameTensors:
    """Each tensor becomes the tensor of its name."""

    def forms(self, metadata: Metadata) -> tuple[TensorForms, bytes]:
        forms: TensorForms = {}
        problems = name_problems(metadata.state_dict_metadata)
        for fqn, entry in metadata.state_dict_metadata.items():
            if not isinstance(entry, TensorStorageMetadata):
                problems.append(value_problem(fqn))
                continue
            forms[fqn] = (dtype_name(entry.properties.dtype), tuple(entry.size))
            problems += dtype_problems(fqn, forms[fqn][0])
        if problems:
            raise refusal("save", problems)
        return forms, b""

    def places(self, items: Sequence[WriteItem], known: bytes) -> PlacesOfRank:
        return _SamePlaces(dict.fromkeys(item.index.fqn for item in items))


@dataclass(frozen=True)
class _SamePlaces:
    names: Iterable[str]

    def of(self, item: WriteItem, value: Callable[[], Value]) -> Iterator[Placed]:
        raw = plain_value(item, value())
        assert item.tensor_data is not None
        strides = row_major_strides(tuple(item.tensor_data.size))
        position = row_major_position(item.tensor_data.chunk.offsets, item.tensor_data.size)
        yield Placed(item.index.fqn, position, strides, raw)


def plain_value(item: WriteItem, value: Value) -> torch.Tensor:
    """The plain memory of an item.

    Raises:
        StateRefusedError: It has none.
    """
    raw = None if isinstance(value, io.BytesIO) else raw_memory(value.detach())
    if raw is None or item.tensor_data is None or raw.dtype != item.tensor_data.properties.dtype:
        got = "no tensor" if isinstance(value, io.BytesIO) else f"a {type(value).__name__} of {value.dtype}"
        detail = f"the planner gives {got}, and safetensors files need plain memory of the dtype that was planned"
        raise refusal("save", [Problem("unsupported_tensor", item.index.fqn, detail)])
    return raw


def row_major_strides(sizes: Sequence[int]) -> tuple[int, ...]:
    return torch.empty(tuple(sizes), dtype=torch.uint8, device="meta").stride()
