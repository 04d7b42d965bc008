"""Opens checkpoints of any format: what they hold, and the place of each chunk in the files. Imports torch only for
files of ``torch.save`` and for values.
"""

from __future__ import annotations

import importlib
import io
import os
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from torchtitan_ext import _core
from torchtitan_ext.errors import CheckpointReadError, DamagedCheckpointError, Remedy, refusal
from torchtitan_ext.storage.checkpoint_files import Record
from torchtitan_ext.storage.commit.opened import Footers
from torchtitan_ext.storage.formats.detect import format_of
from torchtitan_ext.storage.formats.plain_files import PlainFiles
from torchtitan_ext.storage.formats.safetensors_files import find_safetensors
from torchtitan_ext.storage.location import Location, Place, place_at
from torchtitan_ext.storage.metadata.saved_metadata import read_saved_metadata
from torchtitan_ext.storage.metadata.saved_state import ChunkKey, SavedState, lost_problems, state_in, version_problems
from torchtitan_ext.storage.native.open_files import Chunk, read_record
from torchtitan_ext.storage.native.verified_files import VerifiedFiles
from torchtitan_ext.storage.objects.opened import Opened


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
    place = place_at(path)
    kind = format_of(place)
    if kind == "dcp" or isinstance(place, Location):
        return DcpSource(place, weights_only=weights_only)
    if kind == "safetensors":
        places = find_safetensors(place)
        return PlainFiles(place, places, {}, {fqn: (fqn,) for fqn in places})
    torch_files = importlib.import_module("torchtitan_ext.storage.formats.torch_files")
    found: PlainFiles = torch_files.read_torch_file(place, weights_only=weights_only)
    return found


class DcpSource(VerifiedFiles):
    """A checkpoint of DCP, of this package or of stock; every block that is read is verified.

    Attributes:
        saved: Its metadata.
        state: What it holds.
    """

    def __init__(self, path: Place, *, weights_only: bool = True) -> None:
        # Without this check, a copy of damaged bytes would get matching checksums.
        super().__init__(path, "all")
        self._weights_only = weights_only
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # stock's checkpoints have no checksums
            self.saved = read_saved_metadata(self.files, None, verify="all")
        self._index = self.saved.index
        self._footers = Footers(self.saved.save_id)
        self.columns = self.saved.columns
        self.state = state_in(self.columns, self.saved.planner_data)
        self._num_files, self._lost_files = _data_files(self.files, self.columns)
        problems = [*version_problems(self.saved.version), *lost_problems(self.columns, self.state)]
        if problems:
            raise refusal("load", problems)

    def check_files(self, fqns: Iterable[str]) -> None:
        """Raises DamagedCheckpointError if a data file of one of these keys is missing or cut."""
        if not self._lost_files:
            return
        for fqn in fqns:
            entry = self.state.entries[fqn]
            for key in [ChunkKey(fqn)] if entry is None else entry.chunk_keys(fqn):
                name = self.file_of(key)
                if name in self._lost_files:
                    raise DamagedCheckpointError(
                        f"{self.path}: {len(self._lost_files):,} of its {self._num_files:,} data files are not there, "
                        f"or are cut: {fqn} lies in {name}"
                    )

    def file_of(self, key: Chunk) -> str:
        """The name of the file in which a chunk lies."""
        return self._place_of(key)[0]

    def read_value(self, fqn: str) -> Any:
        """Reads a value that is no tensor.

        Raises:
            CheckpointReadError: The value is more than plain data, or damaged.
        """
        plain_value = importlib.import_module("torchtitan_ext.state.plain_value")
        try:
            return plain_value.read_value(io.BytesIO(self.value_record(fqn).data), weights_only=self._weights_only)
        except plain_value.NotPlainError as error:
            advice = "; weights_only=False unpickles it, if you trust the checkpoint"
            raise CheckpointReadError(fqn, str(error), advice, Remedy("weights_only", False)) from None
        except ValueError as error:
            raise CheckpointReadError(fqn, str(error)) from None

    def value_record(self, fqn: str) -> npt.NDArray[np.uint8]:
        """A value as ``torch.save`` writes it. The bytes of a saved record are copied without a look."""
        return read_record(self, ChunkKey(fqn))

    def _place_of(self, key: Chunk) -> tuple[str, int, int]:
        number = self.columns.find_part(key.fqn, key.offset)
        if number is None:
            where = key.fqn if key.offset is None else f"{key.fqn} at {tuple(key.offset)}"
            raise DamagedCheckpointError(f"{self.path}: .metadata does not say where {where} lies")
        part = self.columns.part(number)
        self._refuse_extension(key.fqn, part.transforms)
        return part.path, part.offset, part.num_bytes

    def _parts(self) -> Iterator[_core.Part]:
        return map(self.columns.part, range(self.columns.num_parts))


class MappedSource(Protocol):
    """Another source as a transform shows it: see ``mapped_files``."""

    path: Place
    source: DcpSource | PlainFiles
    state: SavedState

    def check_files(self, fqns: Iterable[str]) -> None: ...

    def find_records(self, keys: Sequence[Chunk]) -> list[Record]: ...

    def read_value(self, fqn: str) -> Any: ...

    def value_record(self, fqn: str) -> npt.NDArray[np.uint8]: ...


FileSource: TypeAlias = DcpSource | PlainFiles | MappedSource
"""A checkpoint of any format whose files are read directly."""


def _data_files(files: Opened, columns: _core.MetadataColumns) -> tuple[int, set[str]]:
    """The number of data files that the metadata names, and the names of those that are missing or too short."""
    try:
        ends = {file.path: file.end for file in columns.describe_files()}
    except OverflowError as error:
        raise DamagedCheckpointError(f"{files.directory}: its records have no end ({error})") from None
    sizes = {name: files.size(name) for name in ends}
    return len(ends), {name for name, size in sizes.items() if size is None or size < ends[name]}
