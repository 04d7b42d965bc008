"""Checkpoints of every format as one thing: metadata as DCP's, and where the bytes of each chunk lie.

Tensors are read by boxes, straight from the files: nothing is gathered, and no more is read than is asked for.
"""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

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
from torchtitan_ext.checkpoint.planners.saved_metadata import storage_problems
from torchtitan_ext.errors import CheckpointReadError, DamagedCheckpointError, Remedy, refusal
from torchtitan_ext.state.plain_value import NotPlainError, read_value
from torchtitan_ext.storage.checkpoint_files import Record, thread_count_of
from torchtitan_ext.storage.formats.contents import size_of
from torchtitan_ext.storage.formats.detect import format_of
from torchtitan_ext.storage.formats.safetensors_files import sizes_of_tensor
from torchtitan_ext.storage.formats.safetensors_places import Place, find_safetensors
from torchtitan_ext.storage.formats.torch_places import read_torch_file
from torchtitan_ext.storage.metadata.saved_metadata import recorded_paths
from torchtitan_ext.storage.native.file_reader import FileReader
from torchtitan_ext.storage.raw_tensor import DTYPES


class Source(Protocol):
    """A checkpoint that is read.

    Attributes:
        metadata: As DCP's; its ``state_dict_metadata`` has an entry for each flat key.
        thread_count: Threads that read; by default one per core, at most 8.
    """

    path: Path
    metadata: Metadata
    thread_count: int | None

    def check_files(self, fqns: Iterable[str]) -> None:
        """Raises DamagedCheckpointError where a data file of one of these keys is not there, or is cut."""
        ...

    def find_records(self, indices: Sequence[MetadataIndex]) -> list[Record]:
        """Where chunks of tensors lie."""
        ...

    def open_file(self, runs: _core.RunReader, name: str) -> int:
        """Adds a file to those that a reader of runs has; its number there."""
        ...

    def read_runs(self, runs: _core.RunReader, names: list[str]) -> None:
        """Reads what was added, and compares checksums where the files have any."""
        ...

    def read_value(self, fqn: str) -> Any:
        """What is no tensor.

        Raises:
            CheckpointReadError: It is more than plain data, or damaged.
        """
        ...

    def value_record(self, fqn: str) -> torch.Tensor:
        """The same as ``torch.save`` writes it, 1-D uint8; what is in a file already is not looked at."""
        ...


def open_source(path: str | os.PathLike[str], *, weights_only: bool = True) -> Source:
    """Opens a checkpoint of DCP, of ours, of Hugging Face's safetensors (a file or a directory), or of ``torch.save``.

    Args:
        weights_only: Refuse values that are more than plain data. Without it they are unpickled, which runs what they
            name.

    Raises:
        UnknownFormatError: It is none of these.
        DamagedCheckpointError: Its metadata, headers or archive are damaged.
        OSError: There is nothing, or it cannot be read.
    """
    place = Path(path)
    kind = format_of(place)
    if kind == "dcp":
        return DcpSource(place, weights_only=weights_only)
    return safetensors_source(place) if kind == "safetensors" else torch_source(place, weights_only=weights_only)


class DcpSource:
    """A directory of DCP, of ours or stock's."""

    def __init__(self, path: Path, *, weights_only: bool = True) -> None:
        self.path = path
        self._weights_only = weights_only
        # A copy of damaged bytes would get checksums that match them.
        self._reader = FileReader(path, "all")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of checksums that stock's checkpoints do not have
            self.metadata = self._reader.read_metadata()
            self._reader.set_up_storage_reader(self.metadata, is_coordinator=False)
        self._num_files, self._lost_files = _data_files(path, self.metadata)
        problems = storage_problems(self.metadata, self.metadata.state_dict_metadata)
        if problems:
            raise refusal("load", problems)

    @property
    def thread_count(self) -> int | None:
        return self._reader.thread_count

    @thread_count.setter
    def thread_count(self, count: int | None) -> None:
        self._reader.thread_count = count

    def check_files(self, fqns: Iterable[str]) -> None:
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
        try:
            return self._reader.find_records(indices)
        except KeyError as error:
            raise DamagedCheckpointError(f"{self.path}: .metadata does not say where {error.args[0]} lies") from None

    def open_file(self, runs: _core.RunReader, name: str) -> int:
        return self._reader.open_file(runs, name)

    def read_runs(self, runs: _core.RunReader, names: list[str]) -> None:
        self._reader.read_runs(runs, names)

    def read_value(self, fqn: str) -> Any:
        try:
            return read_value(io.BytesIO(self.value_record(fqn).numpy().data), weights_only=self._weights_only)
        except NotPlainError as error:
            advice = "; weights_only=False unpickles it, if you trust the checkpoint"
            raise CheckpointReadError(fqn, str(error), advice, Remedy("weights_only", False)) from None
        except ValueError as error:
            raise CheckpointReadError(fqn, str(error)) from None

    def value_record(self, fqn: str) -> torch.Tensor:
        return read_record(self, MetadataIndex(fqn))


class PlainFiles:
    """Files of tensors that lie row by row; they have no checksums.

    Args:
        places: Of the chunks of each tensor, by flat key.
        values: What is no tensor, by flat key.
        paths: Where each key stands in the nested state dict.
    """

    def __init__(
        self,
        path: Path,
        places: Mapping[str, list[Place]],
        values: Mapping[str, Any],
        paths: Mapping[str, tuple[Any, ...]],
    ) -> None:
        self.path = path
        self.thread_count: int | None = None
        self._directory = path if path.is_dir() else path.parent
        self._records = {(fqn, offsets): record for fqn, chunks in places.items() for offsets, record in chunks}
        self._values = values
        entries = {fqn: _entry_of(path, fqn, places[fqn]) if fqn in places else BytesStorageMetadata() for fqn in paths}
        self.metadata = Metadata(entries, planner_data=dict(paths))

    def check_files(self, fqns: Iterable[str]) -> None:
        """The files are there: their headers were read."""

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


def safetensors_source(path: Path) -> PlainFiles:
    """A safetensors file, or a directory of such files."""
    places = find_safetensors(path)
    return PlainFiles(path, places, {}, {fqn: (fqn,) for fqn in places})


def torch_source(path: Path, *, weights_only: bool) -> PlainFiles:
    """A file of ``torch.save``."""
    file = read_torch_file(path, weights_only=weights_only)
    places = {
        fqn: [((0,) * len(record.tensor.sizes), record)]
        for fqn, record in file.tensors.items()
        if record.tensor is not None
    }
    return PlainFiles(path, places, file.values, file.paths)


def paths_of(source: Source) -> dict[str, tuple[str | int, ...]]:
    """Where each key of a checkpoint stands in the nested state dict; at its top where the checkpoint does not say.

    A recorded path counts where it gives the key: keys of dicts, and positions in lists, joined by dots.
    """
    fqns = source.metadata.state_dict_metadata
    return {fqn: (fqn,) for fqn in fqns} | recorded_paths(source.metadata.planner_data, fqns)


def tensor_bytes(entry: TensorStorageMetadata) -> int:
    """The bytes of a tensor's elements."""
    return entry.size.numel() * entry.properties.dtype.itemsize


def read_record(source: Source, index: MetadataIndex) -> torch.Tensor:
    """The bytes of a whole record, as ``torch.save`` wrote them; 1-D uint8."""
    (record,) = source.find_records([index])
    runs = _core.RunReader()
    try:
        file = source.open_file(runs, record.file)
        runs.check_bytes(file, record.offset, record.num_bytes)
        content = torch.empty(record.num_bytes, dtype=torch.uint8, device="cpu")
        runs.add_bytes(file, record.offset, record.num_bytes, content.data_ptr())
        source.read_runs(runs, [record.file])
    except (_core.FormatError, UnicodeDecodeError) as error:
        raise DamagedCheckpointError(str(error)) from None
    return content


def _data_files(path: Path, metadata: Metadata) -> tuple[int, set[str]]:
    """How many files metadata names that our reader has read, and those that are not there or end before a record."""
    try:
        ends = {name: end for name, _, _, end in metadata.storage_data.columns.describe_files()}
    except OverflowError as error:
        raise DamagedCheckpointError(f"{path}: its records have no end ({error})") from None
    sizes = {name: size_of(path / name) for name in ends}
    return len(ends), {name for name, size in sizes.items() if size is None or size < ends[name]}


def _entry_of(path: Path, fqn: str, places: list[Place]) -> TensorStorageMetadata:
    tensors = [(offsets, record.tensor) for offsets, record in places if record.tensor is not None]
    chunks = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(tensor.sizes)) for offsets, tensor in tensors]
    dtype = DTYPES[min({tensor.dtype for _, tensor in tensors})]
    sizes = sizes_of_tensor(f"{path}: {fqn}", [(offsets, tensor.sizes) for offsets, tensor in tensors])
    return TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(sizes), chunks)
