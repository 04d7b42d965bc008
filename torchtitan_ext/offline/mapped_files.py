"""A source as a transform shows it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from torchtitan_ext import _core
from torchtitan_ext.offline.sources import DcpSource
from torchtitan_ext.storage.checkpoint_files import Record
from torchtitan_ext.storage.formats.plain_files import PlainFiles
from torchtitan_ext.storage.native.open_files import Chunk
from torchtitan_ext.transforms.mapped import MappedState
from torchtitan_ext.transforms.rules import Transform


class MappedFiles:
    """Another source as a transform shows it. Reads go by ``mapped``; every tensor is one chunk.

    Raises:
        TransformError: The transform does not fit the source.
    """

    def __init__(self, source: DcpSource | PlainFiles, transform: Transform) -> None:
        self.source = source
        self.path = source.path
        self.mapped = MappedState(transform, source.state, operation="transform")
        self.state = self.mapped.state

    def check_files(self, fqns: Iterable[str]) -> None:
        self.source.check_files(dict.fromkeys(name for fqn in fqns for name in self.mapped.source_names(fqn)))

    def find_records(self, keys: Sequence[Chunk]) -> list[Record]:
        """A record for each tensor, of no file; without elements where a tensor that it is made of has none."""
        found = []
        for key in keys:
            entry = self.state.tensors[key.fqn]
            records = self.source.find_records(list(self.mapped.source_indices(key.fqn)))
            is_plain = all(record.tensor is not None for record in records)
            tensor = _core.StoredTensor(entry.dtype, entry.shape, None, 0) if is_plain else None
            found.append(Record(self.path.name, 0, 0, tensor))
        return found

    def read_value(self, fqn: str) -> Any:
        return self.source.read_value(self.mapped.value_name(fqn))

    def value_record(self, fqn: str) -> npt.NDArray[np.uint8]:
        return self.source.value_record(self.mapped.value_name(fqn))
