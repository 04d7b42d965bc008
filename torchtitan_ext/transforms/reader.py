"""The storage reader of a load through a transform: planners see the targets, the files have the sources.

The files are those of a checkpoint of DCP, or safetensors.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

from torchtitan_ext.layout.layout import aligned
from torchtitan_ext.storage.metadata.dcp_objects import metadata_of_state, state_of
from torchtitan_ext.storage.native.device_buckets import bucket_bytes_of
from torchtitan_ext.storage.native.file_reader import FileReader
from torchtitan_ext.storage.native.read_batch import ReadBatch
from torchtitan_ext.storage.weights.safetensors_reader import reader_at
from torchtitan_ext.transforms.mapped import MappedState
from torchtitan_ext.transforms.mapped_reads import mapped_elements
from torchtitan_ext.transforms.rules import Transform


class MappedReader(FileReader):
    """A ``FileReader`` whose plans are of a transform's targets. ``map_metadata`` comes behind ``read_metadata``.

    Attributes:
        files_metadata: The checkpoint's, without the transform.
    """

    _mapped: MappedState

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)
        self._source = reader_at(path)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        self._forget()
        metadata = self._source.read_metadata(*args, **kwargs)
        self.metadata_digest = self._source.metadata_digest
        return metadata

    def map_metadata(self, metadata: Metadata, transform: Transform) -> Metadata:
        """The metadata to plan with.

        Raises:
            TransformError: The transform does not fit the checkpoint.
        """
        self.files_metadata = metadata
        self._mapped = MappedState(transform, state_of(metadata))
        shown = metadata_of_state(self._mapped.state)
        entries, data = shown.state_dict_metadata, shown.planner_data
        places = {}
        for fqn, entry in entries.items():
            offsets = entry.chunks[0].offsets if isinstance(entry, TensorStorageMetadata) else None
            # Readers go forward in the files by the places of first chunks.
            first = next(self._mapped.source_indices(fqn), None)
            places[MetadataIndex(fqn, offsets)] = (metadata.storage_data or {}).get(first)
        return dataclasses.replace(metadata, state_dict_metadata=entries, planner_data=data, storage_data=places)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._source.set_up_storage_reader(self.files_metadata, is_coordinator, *args, **kwargs)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        fqns = dict.fromkeys(item.storage_index.fqn for item in plan.items)
        sources = dict.fromkeys(index for fqn in fqns for index in self._mapped.source_indices(fqn))
        read = self._source.prepare_local_plan(LoadPlan([_whole(index) for index in sources]))
        return plan if read.storage_data is None else dataclasses.replace(plan, storage_data=read.storage_data)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return self._source.prepare_global_plan(plans)

    def are_plain(self, indices: Sequence[MetadataIndex]) -> list[bool]:
        """Whether parts can be read alone: of all chunks of the tensors that these are made of."""
        of_sources = [list(self._mapped.source_indices(index.fqn)) for index in indices]
        unique = list(dict.fromkeys(one for several in of_sources for one in several))
        are_plain = dict(zip(unique, self._source.are_plain(unique), strict=True))
        return [all(are_plain[one] for one in several) for several in of_sources]

    @property
    def has_sums(self) -> bool:
        """A target has none of its own: see ``files_reader``."""
        return False

    @property
    def files_reader(self) -> FileReader:
        """The reader of the checkpoint without the transform."""
        return self._source

    @property
    def mapped(self) -> MappedState:
        """What the transform makes of the checkpoint."""
        return self._mapped

    def _read(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        values = [self._renamed(item) for item in plan.items if item.type == LoadItemType.BYTE_IO]
        if values:
            self._source._read(dataclasses.replace(plan, items=values), planner)
        tensors = [item for item in plan.items if item.type != LoadItemType.BYTE_IO]

        batch = ReadBatch(planner, self._source, self._count, lambda: self._bucket_bytes(tensors))
        for item in tensors:
            fqn = item.storage_index.fqn
            batch.add_box(item, mapped_elements(self._mapped, batch.files, fqn, item.storage_offsets))
        batch.finish()

    def _bucket_bytes(self, items: Sequence[ReadItem]) -> int:
        num_bytes = 0
        for item in items:
            fqn, num_elements = item.storage_index.fqn, item.lengths.numel()
            parts = (max(self._mapped.dtypes(fqn), key=attrgetter("itemsize")), self._mapped.scale_dtype(fqn))
            num_bytes += sum(aligned(num_elements * dtype.itemsize) for dtype in parts if dtype is not None)
        return bucket_bytes_of(num_bytes)

    def _count(self, num_bytes: int) -> None:
        self.num_bytes_read += num_bytes

    def _renamed(self, item: ReadItem) -> ReadItem:
        name = self._mapped.value_name(item.storage_index.fqn)
        return dataclasses.replace(item, storage_index=MetadataIndex(name))


def _whole(index: MetadataIndex) -> ReadItem:
    """For the reader of the files, which wants to know what will be read."""
    none = torch.Size(())
    return ReadItem(LoadItemType.TENSOR, index, none, index, none, none)
