"""Files without checksums whose tensors lie row by row, as a source of boxes. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from torchtitan_ext import _core
from torchtitan_ext.storage.checkpoint_files import Record, thread_count_of
from torchtitan_ext.storage.formats.safetensors_files import ChunkRecord, sizes_of_tensor
from torchtitan_ext.storage.location import Place
from torchtitan_ext.storage.metadata.saved_state import SavedState, SavedTensor
from torchtitan_ext.storage.native.open_files import Chunk


def _no_value(value: object) -> npt.NDArray[np.uint8]:
    raise AssertionError("a value of a file that has none, please report")


class PlainFiles:
    """Files without checksums whose tensors lie row by row: safetensors, or a file of ``torch.save``.

    Args:
        places: Offsets and record of each chunk, by the flat key of its tensor.
        values: The values that are no tensors, by flat key.
        paths: The path of each key in the nested state dict.
        saved: A value as ``torch.save`` writes it.

    Attributes:
        records: By key and offsets of the chunk.
    """

    def __init__(
        self,
        path: Place,
        places: Mapping[str, list[ChunkRecord]],
        values: Mapping[str, Any],
        paths: Mapping[str, tuple[Any, ...]],
        saved: Callable[[Any], npt.NDArray[np.uint8]] = _no_value,
    ) -> None:
        self.path = path
        self.thread_count: int | None = None
        self.values = values
        self.records = {(fqn, offsets): record for fqn, chunks in places.items() for offsets, record in chunks}
        self._directory = path.parent if isinstance(path, Path) and not path.is_dir() else path
        self._saved = saved
        whole: dict[tuple[int, ...], _core.ChunkIndex] = {}
        entries = {fqn: _entry_of(path, fqn, places[fqn], whole) if fqn in places else None for fqn in paths}
        self.state = SavedState(entries, dict(paths))

    def check_files(self, fqns: Iterable[str]) -> None:
        """The headers were read, so the files exist."""

    def find_records(self, keys: Sequence[Chunk]) -> list[Record]:
        return [self.records[key.fqn, tuple(key.offset or ())] for key in keys]

    def open_file(self, runs: _core.RunReader, name: str) -> int:
        return runs.add_file(str(self._directory / name), -1)

    def read_runs(self, runs: _core.RunReader, names: list[str]) -> None:
        runs.read(thread_count_of(self.thread_count), "none")

    def read_value(self, fqn: str) -> Any:
        return self.values[fqn]

    def value_record(self, fqn: str) -> npt.NDArray[np.uint8]:
        return self._saved(self.values[fqn])


def _entry_of(
    path: Place, fqn: str, places: list[ChunkRecord], whole: dict[tuple[int, ...], _core.ChunkIndex]
) -> SavedTensor:
    """``whole`` has the chunk list of each shape, which tensors of one chunk share."""
    tensors = [(offsets, record.tensor) for offsets, record in places if record.tensor is not None]
    boxes = [(offsets, tensor.sizes) for offsets, tensor in tensors]
    dtype = min({tensor.dtype for _, tensor in tensors})
    if len(boxes) == 1 and not any(boxes[0][0]):
        sizes = tuple(boxes[0][1])
        if sizes not in whole:
            whole[sizes] = _core.ChunkIndex.of_boxes(boxes)
        return SavedTensor(dtype, sizes, whole[sizes])
    return SavedTensor(dtype, sizes_of_tensor(f"{path}: {fqn}", boxes), _core.ChunkIndex.of_boxes(boxes))
