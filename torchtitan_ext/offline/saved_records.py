"""Where the saved chunks of tensors lie, compared with what the metadata says of them before anything is read."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from torchtitan_ext.errors import DamagedCheckpointError
from torchtitan_ext.offline.boxes import Piece
from torchtitan_ext.offline.sources import Source
from torchtitan_ext.storage.checkpoint_files import Record
from torchtitan_ext.storage.damage import shape_defect
from torchtitan_ext.storage.raw_tensor import NAMES


def records_of(source: Source, chunks: Sequence[Piece]) -> list[Record]:
    """Where whole chunks lie, as they were saved.

    Raises:
        DamagedCheckpointError: What lies there is of another dtype or shape than the metadata says.
    """
    records = source.find_records([MetadataIndex(chunk.fqn, torch.Size(chunk.offsets)) for chunk in chunks])
    for chunk, record in zip(chunks, records, strict=True):
        dtype = NAMES.get(chunk.dtype, str(chunk.dtype))
        defect = None if record.tensor is None else shape_defect(record.tensor, dtype, chunk.sizes)
        if defect is not None:
            raise DamagedCheckpointError(f"{source.path}: {chunk.fqn} in {record.file} {defect}")
    return records
