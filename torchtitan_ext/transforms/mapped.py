"""A checkpoint as a transform shows it: metadata of the targets, and which parts of which files a box of them needs."""

from __future__ import annotations

from dataclasses import replace

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
from torchtitan_ext.errors import Problem, refusal
from torchtitan_ext.storage.metadata.saved_metadata import WORLD_KEY, recorded_path
from torchtitan_ext.storage.raw_tensor import DTYPES, NAMES, dtype_name
from torchtitan_ext.transforms.rules import Transform

Source = tuple[str, str, tuple[int, ...]]
"""Name, dtype and shape of what a transform takes; no dtype of a value that is no tensor."""


def sources_in(metadata: Metadata) -> list[Source]:
    """The keys of a metadata as sources of a transform."""
    return [
        (fqn, dtype_name(entry.properties.dtype), tuple(entry.size))
        if isinstance(entry, TensorStorageMetadata)
        else (fqn, "", ())
        for fqn, entry in metadata.state_dict_metadata.items()
    ]


class MappedMetadata:
    """The metadata of a checkpoint through a transform.

    Attributes:
        metadata: Has the targets in place of what the checkpoint has, each tensor as one chunk.
        saved: As the checkpoint has it.

    Raises:
        TransformError: The transform does not fit; all problems. Nothing has been read but metadata.
        ReshardError: The saved chunks of a tensor do not hold every element once.
    """

    def __init__(self, transform: Transform, saved: Metadata, *, operation: str = "load") -> None:
        self.saved = saved
        self._names = list(saved.state_dict_metadata)
        self._entries = [saved.state_dict_metadata[name] for name in self._names]
        resolved = _core.resolve_transform(transform.encoded(), sources_in(saved))
        if resolved.problems:
            raise refusal(operation, [Problem("wrong_transform", key, detail) for key, detail in resolved.problems])
        self._targets = {target.name: target for target in resolved.targets}
        self._index_chunks(operation)
        self.metadata = self._metadata()

    def value_name(self, fqn: str) -> str:
        """The checkpoint's name of a target that is no tensor."""
        return self._names[self._targets[fqn].value]

    def source_names(self, fqn: str) -> list[str]:
        """The keys of the checkpoint of which a target is made."""
        return [self._names[source] for source in self._sources_of(fqn)]

    def kept_name(self, fqn: str) -> str | None:
        """The checkpoint's name of a target that is a whole tensor of it, each element where it was; else ``None``."""
        target = self._targets[fqn]
        source = target.values.source_in_place() if target.dtypes else target.value
        if source is None or len(target.dtypes) > 1 or target.scales is not None:
            return None
        entry = self._entries[source]
        is_kept = isinstance(entry, BytesStorageMetadata) or tuple(entry.size) == tuple(target.values.shape)
        return self._names[source] if is_kept else None

    def changed_tensors(self) -> list[str]:
        """The targets with elements that are not whole tensors of the checkpoint under another name."""
        return [
            fqn for fqn, target in self._targets.items() if self.kept_name(fqn) is None and 0 not in target.values.shape
        ]

    def source_indices(self, fqn: str) -> list[MetadataIndex]:
        """The saved chunks of the keys of ``source_names``, or the saved value."""
        indices = []
        for source in self._sources_of(fqn):
            chunks = self._chunks[source]
            offsets = [None] if chunks is None else [torch.Size(offsets) for offsets, _ in chunks.boxes()]
            indices += [MetadataIndex(self._names[source], offset) for offset in offsets]
        return indices

    def _sources_of(self, fqn: str) -> list[int]:
        target = self._targets[fqn]
        if not target.dtypes:
            return [target.value]
        maps = (target.values, *([] if target.scales is None else [target.scales]))
        return list(dict.fromkeys(source for one in maps for source in one.sources))

    def dtypes(self, fqn: str) -> list[torch.dtype]:
        """The dtypes that elements of a target have in turn, from the checkpoint's to the target's."""
        target = self._targets[fqn]
        saved = self._dtype_of(target.values, DTYPES[target.dtypes[-1]])
        return [saved, *(DTYPES[name] for name in target.dtypes[1:])]

    def scale_dtype(self, fqn: str) -> torch.dtype | None:
        """The dtype of the scales by which the elements of a target are multiplied; ``None`` without scales."""
        scales = self._targets[fqn].scales
        return None if scales is None else self._dtype_of(scales, torch.float32)

    def parts(
        self,
        fqn: str,
        offsets: tuple[int, ...],
        sizes: tuple[int, ...],
        strides: tuple[int, ...],
        *,
        scales: bool = False,
    ) -> list[_core.MapPart]:
        """What is read for a box of a target that lies in memory with these strides (in elements).

        Args:
            scales: The scales of these elements instead of the elements.
        """
        target = self._targets[fqn]
        tensor_map = target.scales if scales else target.values
        assert tensor_map is not None, f"{fqn} has no scales, please report"
        return tensor_map.find_parts(offsets, sizes, strides, self._sources)

    def chunk_of(self, part: _core.MapPart) -> tuple[MetadataIndex, tuple[int, ...]]:
        """The saved chunk of which a part is read, and its sizes."""
        chunks = self._chunks[part.source]
        assert chunks is not None, f"{self._names[part.source]} is no tensor, please report"
        offsets, sizes = chunks.box(part.chunk)
        return MetadataIndex(self._names[part.source], torch.Size(offsets)), sizes

    def _dtype_of(self, tensor_map: _core.TensorMap, of_none: torch.dtype) -> torch.dtype:
        for source in tensor_map.sources:
            entry = self._entries[source]
            assert isinstance(entry, TensorStorageMetadata)
            return entry.properties.dtype
        return of_none

    def _index_chunks(self, operation: str) -> None:
        """Indexes the chunk lists of the tensors that are used, each different list once."""
        used = {name for fqn in self._targets for name in self.source_names(fqn)}
        lists: dict[int, _core.ChunkIndex] = {}
        self._chunks: list[_core.ChunkIndex | None] = []
        problems = []
        for name, entry in zip(self._names, self._entries, strict=True):
            if name not in used or not isinstance(entry, TensorStorageMetadata):
                self._chunks.append(None)
                continue
            known = lists.get(id(entry.chunks))
            if known is None:
                known = lists[id(entry.chunks)] = _core.ChunkIndex(entry.chunks)
            self._chunks.append(known)
            if not known.covers(tuple(entry.size)):
                defect = _core.describe_cover_defect(tuple(entry.size), known.boxes(), None)
                problems.append(Problem("broken_checkpoint", name, str(defect)))
            if entry.properties.dtype not in NAMES:
                detail = f"is of {entry.properties.dtype}, which is no plain memory; name it in drop"
                problems.append(Problem("wrong_transform", name, detail))
        if problems:
            raise refusal(operation, problems)
        shapes = [tuple(one.size) if isinstance(one, TensorStorageMetadata) else () for one in self._entries]
        self._sources = _core.MapSources(list(zip(shapes, self._chunks, strict=True)))

    def _metadata(self) -> Metadata:
        entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        places: dict[MetadataIndex, object] = {}
        planner_data = {}
        chunk_lists: dict[tuple[int, ...], list[ChunkStorageMetadata]] = {}
        stored = self.saved.storage_data or {}
        for fqn, target in self._targets.items():
            path = recorded_path(self.saved.planner_data, fqn)
            if path is not None:
                planner_data[fqn] = path
            if not target.dtypes:
                entries[fqn] = BytesStorageMetadata()
                places[MetadataIndex(fqn)] = stored.get(MetadataIndex(self.value_name(fqn)))
                continue
            shape = tuple(target.values.shape)
            if shape not in chunk_lists:
                zeros = torch.Size((0,) * len(shape))
                chunk_lists[shape] = [ChunkStorageMetadata(zeros, torch.Size(shape))]
            properties = TensorProperties(dtype=DTYPES[target.dtypes[-1]])
            entries[fqn] = TensorStorageMetadata(properties, torch.Size(shape), chunk_lists[shape])
            places[MetadataIndex(fqn, chunk_lists[shape][0].offsets)] = self._first_place(target)
        if isinstance(self.saved.planner_data, dict) and WORLD_KEY in self.saved.planner_data:
            planner_data[WORLD_KEY] = self.saved.planner_data[WORLD_KEY]
        return replace(self.saved, state_dict_metadata=entries, planner_data=planner_data, storage_data=places)

    def _first_place(self, target: _core.MappedTensor) -> object:
        """Where the first chunk of the first source lies, by which readers go forward in the files."""
        for source in target.values.sources:
            chunks = self._chunks[source]
            if chunks is not None:
                index = MetadataIndex(self._names[source], torch.Size(chunks.box(0)[0]))
                return (self.saved.storage_data or {}).get(index)
        return None
