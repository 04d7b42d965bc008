"""Which elements of what a rank holds go where in the tensors of files."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import WriteItem

from torchtitan_ext import _core
from torchtitan_ext.errors import Problem, refusal
from torchtitan_ext.layout.layout import row_major_position, row_major_strides
from torchtitan_ext.storage.raw_tensor import NAMES, dtype_name, raw_memory
from torchtitan_ext.storage.weights.layout import dtype_problems, name_problems, value_problem

TensorForms = dict[str, tuple[str, tuple[int, ...]]]
"""Dtype and shape of each tensor, by name."""


class FilePart(NamedTuple):
    """Elements of an item that belong to one tensor of the files.

    Attributes:
        fqn: The name of that tensor.
        position: Of the first element in it, in row-major order.
        strides: Positions from one element to the next, by the dims of ``values``. No two elements have one place.
        dtypes: To which elements are cast in turn.
        part: Which elements of the item; ``None``: all of them.
    """

    fqn: str
    position: int
    strides: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...] = ()
    part: _core.MapPart | None = None

    def values(self, raw: torch.Tensor) -> torch.Tensor:
        """These elements of the plain memory of the item: plain memory of any strides, on any device."""
        if self.part is None:
            return raw
        item_bytes = raw.element_size()
        first = int(raw.storage_offset()) * item_bytes
        view = self.part.stored(_core.StoredTensor(NAMES[raw.dtype], raw.shape, raw.stride(), first))
        return raw.as_strided(view.sizes, view.strides, view.data_offset // item_bytes)


class WeightsMap(Protocol):
    """How the tensors that ranks hold become those of the files."""

    def forms(self, metadata: Metadata) -> tuple[TensorForms, bytes]:
        """The tensors of the files, and what the other ranks have to know of all ranks. The coordinator calls it.

        Raises:
            StateRefusedError: All problems.
        """
        ...

    def places(self, items: Sequence[WriteItem], known: bytes) -> Mapping[MetadataIndex, Sequence[FilePart]]:
        """The parts of one rank's items; an item of which nothing is written has none."""
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

    def places(self, items: Sequence[WriteItem], known: bytes) -> Mapping[MetadataIndex, Sequence[FilePart]]:
        return {item.index: [_whole(item)] for item in items}


def _whole(item: WriteItem) -> FilePart:
    assert item.tensor_data is not None, f"{item.index.fqn} is no tensor, please report"
    sizes = item.tensor_data.size
    position = row_major_position(item.tensor_data.chunk.offsets, sizes)
    return FilePart(item.index.fqn, position, row_major_strides(tuple(sizes)))


def plain_value(item: WriteItem, value: torch.Tensor | io.BytesIO) -> torch.Tensor:
    """The plain memory of an item, from what a planner gives for it.

    Raises:
        StateRefusedError: It has none.
    """
    raw = None if isinstance(value, io.BytesIO) else raw_memory(value.detach())
    if raw is None or item.tensor_data is None or raw.dtype != item.tensor_data.properties.dtype:
        got = "no tensor" if isinstance(value, io.BytesIO) else f"a {type(value).__name__} of {value.dtype}"
        detail = f"the planner gives {got}, and safetensors files need plain memory of the dtype that was planned"
        raise refusal("save", [Problem("unsupported_tensor", item.index.fqn, detail)])
    return raw
