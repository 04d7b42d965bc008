"""Opens checkpoints of any format: metadata as DCP has it, and the place of each chunk in the files."""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from torchtitan_ext import _core
from torchtitan_ext.checkpoint.planners.saved_chunks import storage_problems
from torchtitan_ext.errors import CheckpointReadError, DamagedCheckpointError, Remedy, refusal
from torchtitan_ext.state.plain_value import NotPlainError, read_value
from torchtitan_ext.storage.checkpoint_files import Record
from torchtitan_ext.storage.formats.contents import size_of
from torchtitan_ext.storage.formats.detect import format_of
from torchtitan_ext.storage.formats.plain_files import PlainFiles
from torchtitan_ext.storage.formats.safetensors_files import find_safetensors
from torchtitan_ext.storage.formats.torch_files import read_torch_file
from torchtitan_ext.storage.native.file_reader import FileReader
from torchtitan_ext.storage.native.fills import OpenFiles, RecordFiles
from torchtitan_ext.storage.raw_tensor import NAMES
from torchtitan_ext.transforms.mapped import MappedMetadata
from torchtitan_ext.transforms.rules import Transform


def open_source(path: str | os.PathLike[str], *, weights_only: bool = True) -> DcpSource | PlainFiles:
    """Opens a checkpoint of DCP, of ours, of Hugging Face's safetensors (a file or a directory), or of ``torch.save``.

    Args:
        weights_only: Refuse values that are more than plain data. If false, they are unpickled, which runs the code
            that they name.

    Raises:
        UnknownFormatError: The path holds none of these formats.
        DamagedCheckpointError: The metadata, headers or archive are damaged.
        OSError: The path does not exist or cannot be read.
    """
    place = Path(path)
    kind = format_of(place)
    if kind == "dcp":
        return DcpSource(place, weights_only=weights_only)
    if kind == "safetensors":
        places = find_safetensors(place)
        return PlainFiles(place, places, {}, {fqn: (fqn,) for fqn in places})
    return read_torch_file(place, weights_only=weights_only)


class DcpSource(FileReader):
    """A directory of DCP, written by this package or by stock; every block that is read is verified.

    Attributes:
        metadata: As DCP has it; ``state_dict_metadata`` has an entry for each flat key.
    """

    def __init__(self, path: Path, *, weights_only: bool = True) -> None:
        # Without this check, a copy of damaged bytes would get matching checksums.
        super().__init__(path, "all")
        self._weights_only = weights_only
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # stock's checkpoints have no checksums
            self.metadata = self.read_metadata()
            self.set_up_storage_reader(self.metadata, is_coordinator=False)
        self._num_files, self._lost_files = _data_files(path, self.metadata)
        problems = storage_problems(self.metadata, self.metadata.state_dict_metadata)
        if problems:
            raise refusal("load", problems)

    def check_files(self, fqns: Iterable[str]) -> None:
        """Raises DamagedCheckpointError if a data file of one of these keys is missing or cut."""
        if not self._lost_files:
            return
        for fqn in fqns:
            entry = self.metadata.state_dict_metadata[fqn]
            chunks = entry.chunks if isinstance(entry, TensorStorageMetadata) else ()
            for index in [MetadataIndex(fqn, chunk.offsets) for chunk in chunks] or [MetadataIndex(fqn)]:
                place = self.metadata.storage_data.get(index)
                if place is not None and place.relative_path in self._lost_files:
                    raise DamagedCheckpointError(
                        f"{self.path}: {len(self._lost_files):,} of its {self._num_files:,} data files are not there, "
                        f"or are cut: {fqn} lies in {place.relative_path}"
                    )

    def find_records(self, indices: Sequence[MetadataIndex]) -> list[Record]:
        """The record of each chunk."""
        try:
            return super().find_records(indices)
        except KeyError as error:
            raise DamagedCheckpointError(f"{self.path}: .metadata does not say where {error.args[0]} lies") from None

    def read_value(self, fqn: str) -> Any:
        """Reads a value that is no tensor.

        Raises:
            CheckpointReadError: The value is more than plain data, or damaged.
        """
        try:
            return read_value(io.BytesIO(self.value_record(fqn).numpy().data), weights_only=self._weights_only)
        except NotPlainError as error:
            advice = "; weights_only=False unpickles it, if you trust the checkpoint"
            raise CheckpointReadError(fqn, str(error), advice, Remedy("weights_only", False)) from None
        except ValueError as error:
            raise CheckpointReadError(fqn, str(error)) from None

    def value_record(self, fqn: str) -> torch.Tensor:
        """A value as ``torch.save`` writes it, 1-D uint8. The bytes of a saved record are copied without a look."""
        return read_record(self, MetadataIndex(fqn))


class MappedFiles:
    """Another source as a transform shows it. Reads go by ``mapped``; every tensor is one chunk.

    Raises:
        TransformError: The transform does not fit the source.
    """

    def __init__(self, source: DcpSource | PlainFiles, transform: Transform) -> None:
        self.source = source
        self.path = source.path
        self.mapped = MappedMetadata(transform, source.metadata, operation="transform")
        self.metadata = self.mapped.metadata

    def check_files(self, fqns: Iterable[str]) -> None:
        self.source.check_files(dict.fromkeys(name for fqn in fqns for name in self.mapped.source_names(fqn)))

    def find_records(self, indices: Sequence[MetadataIndex]) -> list[Record]:
        """A record for each tensor, of no file; without elements where a tensor that it is made of has none."""
        found = []
        for index in indices:
            entry = self.metadata.state_dict_metadata[index.fqn]
            assert isinstance(entry, TensorStorageMetadata), f"{index.fqn} is no tensor, please report"
            records = self.source.find_records(self.mapped.source_indices(index.fqn))
            is_plain = all(record.tensor is not None for record in records)
            tensor = _core.StoredTensor(NAMES[entry.properties.dtype], entry.size, None, 0) if is_plain else None
            found.append(Record(self.path.name, 0, 0, tensor))
        return found

    def read_value(self, fqn: str) -> Any:
        return self.source.read_value(self.mapped.value_name(fqn))

    def value_record(self, fqn: str) -> torch.Tensor:
        return self.source.value_record(self.mapped.value_name(fqn))


FileSource = DcpSource | PlainFiles | MappedFiles
"""A checkpoint of any format whose files are read directly."""


def read_record(source: RecordFiles, index: MetadataIndex) -> torch.Tensor:
    """The bytes of a whole record, as ``torch.save`` wrote it; 1-D uint8."""
    (record,) = source.find_records([index])
    files = OpenFiles(source)
    with files.forgotten_on_error():
        content = files.add_bytes(record.file, record.offset, record.num_bytes)
        files.read()
    return content


def _data_files(path: Path, metadata: Metadata) -> tuple[int, set[str]]:
    """The number of data files that the metadata names, and the names of those that are missing or too short."""
    try:
        ends = {file.path: file.end for file in metadata.storage_data.columns.describe_files()}
    except OverflowError as error:
        raise DamagedCheckpointError(f"{path}: its records have no end ({error})") from None
    sizes = {name: size_of(path / name) for name in ends}
    return len(ends), {name for name, size in sizes.items() if size is None or size < ends[name]}
