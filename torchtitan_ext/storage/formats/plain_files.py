"""Files without checksums whose tensors lie row by row, as a source of boxes with the metadata that DCP would have."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from torchtitan_ext import _core
from torchtitan_ext.dcp_private import StorageInfo
from torchtitan_ext.storage.checkpoint_files import Record, thread_count_of
from torchtitan_ext.storage.formats.safetensors_files import ChunkRecord, sizes_of_tensor
from torchtitan_ext.storage.raw_tensor import DTYPES


class PlainFiles:
    """Files without checksums whose tensors lie row by row: safetensors, or a file of ``torch.save``.

    Args:
        places: Offsets and record of each chunk, by the flat key of its tensor.
        values: The values that are no tensors, by flat key.
        paths: The path of each key in the nested state dict.
    """

    def __init__(
        self,
        path: Path,
        places: Mapping[str, list[ChunkRecord]],
        values: Mapping[str, Any],
        paths: Mapping[str, tuple[Any, ...]],
    ) -> None:
        self.path = path
        self.thread_count: int | None = None
        self._directory = path if path.is_dir() else path.parent
        self._records = {(fqn, offsets): record for fqn, chunks in places.items() for offsets, record in chunks}
        self._values = values
        whole: dict[tuple[int, ...], list[ChunkStorageMetadata]] = {}
        entries = {
            fqn: _entry_of(path, fqn, places[fqn], whole) if fqn in places else BytesStorageMetadata() for fqn in paths
        }
        self.metadata = Metadata(entries, planner_data=dict(paths))

    def check_files(self, fqns: Iterable[str]) -> None:
        """The headers were read, so the files exist."""

    def find_records(self, indices: Sequence[MetadataIndex]) -> list[Record]:
        return [self._records[index.fqn, tuple(index.offset or ())] for index in indices]

    def open_file(self, runs: _core.RunReader, name: str) -> int:
        return runs.add_file(str(self._directory / name), -1)

    def read_runs(self, runs: _core.RunReader, names: list[str]) -> None:
        runs.read(thread_count_of(self.thread_count), "none")

    def read_value(self, fqn: str) -> Any:
        return self._values[fqn]

    def value_record(self, fqn: str) -> torch.Tensor:
        stream = io.BytesIO()
        torch.save(self._values[fqn], stream)
        return torch.frombuffer(stream.getbuffer(), dtype=torch.uint8)

    def places(self) -> dict[MetadataIndex, StorageInfo]:
        """The place of each chunk and of each value; values have the size that their DCP records would have."""
        found = {
            MetadataIndex(fqn, torch.Size(offsets)): StorageInfo(record.file, record.offset, record.num_bytes)
            for (fqn, offsets), record in self._records.items()
        }
        for fqn in self._values:
            found[MetadataIndex(fqn)] = StorageInfo(self.path.name, 0, self.value_record(fqn).numel())
        return found


def _entry_of(
    path: Path, fqn: str, places: list[ChunkRecord], whole: dict[tuple[int, ...], list[ChunkStorageMetadata]]
) -> TensorStorageMetadata:
    """``whole`` has the chunk list of each shape, which tensors of one chunk share."""
    offsets, tensor = places[0][0], places[0][1].tensor
    if len(places) == 1 and tensor is not None and not any(offsets):
        sizes = tuple(tensor.sizes)
        if sizes not in whole:
            whole[sizes] = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))]
        return TensorStorageMetadata(TensorProperties(dtype=DTYPES[tensor.dtype]), torch.Size(sizes), whole[sizes])
    tensors = [(offsets, record.tensor) for offsets, record in places if record.tensor is not None]
    chunks = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(tensor.sizes)) for offsets, tensor in tensors]
    dtype = DTYPES[min({tensor.dtype for _, tensor in tensors})]
    sizes = sizes_of_tensor(f"{path}: {fqn}", [(offsets, tensor.sizes) for offsets, tensor in tensors])
    return TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(sizes), chunks)
