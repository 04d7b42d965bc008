"""A checkpoint as a transform shows it: what it holds then, and which parts of which files a box of them needs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from torchtitan_ext import _core
from torchtitan_ext.errors import Problem, refusal
from torchtitan_ext.layout.dtensor import View
from torchtitan_ext.storage.metadata.saved_metadata import WORLD_KEY, recorded_paths
from torchtitan_ext.storage.metadata.saved_state import SavedState, SavedTensor
from torchtitan_ext.storage.raw_tensor import DTYPES
from torchtitan_ext.transforms.rules import Transform


class MappedState:
    """What a checkpoint holds, through a transform.

    Attributes:
        state: Has the targets in place of what the checkpoint has, each tensor as one chunk.

    Raises:
        TransformError: The transform does not fit; all problems. Nothing has been read but metadata.
        ReshardError: The saved chunks of a tensor do not hold every element once.
    """

    def __init__(self, transform: Transform, saved: SavedState, *, operation: str = "load") -> None:
        self._names = list(saved.entries)
        self._entries = list(saved.entries.values())
        sources = [(fqn, "", ()) if one is None else (fqn, one.dtype, one.shape) for fqn, one in saved.entries.items()]
        self._targets = {target.name: target for target in transform.resolve(sources, operation)}
        self._check_sources(operation)
        self._sources = _core.MapSources(
            [((), None) if one is None else (one.shape, one.chunks) for one in self._entries]
        )
        self.state = self._state(saved.planner_data)

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
        return self._names[source] if entry is None or entry.shape == target.values.shape else None

    def changed_tensors(self) -> list[str]:
        """The targets with elements that are not whole tensors of the checkpoint under another name."""
        return [fqn for fqn, one in self._targets.items() if self.kept_name(fqn) is None and 0 not in one.values.shape]

    def padded_tensors(self) -> list[str]:
        """The targets with elements that come from nowhere."""
        return [fqn for fqn, target in self._targets.items() if target.values.has_fills]

    def source_indices(self, fqn: str) -> Iterator[MetadataIndex]:
        """The saved chunks of the keys of ``source_names``, or the saved value."""
        for source in self._sources_of(fqn):
            name, entry = self._names[source], self._entries[source]
            if entry is None:
                yield MetadataIndex(name)
                continue
            for number in range(len(entry.chunks)):
                yield MetadataIndex(name, torch.Size(entry.chunks.box(number)[0]))

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

    def fills(self, fqn: str, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Sequence[tuple[float, View]]:
        """What the transform fills with values of its own in a box of a target: the value, and a view of the box."""
        return self._targets[fqn].values.find_fills(offsets, sizes)

    def chunk_of(self, part: _core.MapPart) -> tuple[MetadataIndex, tuple[int, ...]]:
        """The saved chunk of which a part is read, and its sizes."""
        offsets, sizes = self._tensor(part.source).chunks.box(part.chunk)
        return MetadataIndex(self._names[part.source], torch.Size(offsets)), sizes

    def _tensor(self, source: int) -> SavedTensor:
        entry = self._entries[source]
        assert entry is not None, f"{self._names[source]} is no tensor, please report"
        return entry

    def _dtype_of(self, tensor_map: _core.TensorMap, of_none: torch.dtype) -> torch.dtype:
        sources = tensor_map.sources
        return DTYPES[self._tensor(sources[0]).dtype] if sources else of_none

    def _check_sources(self, operation: str) -> None:
        problems: list[Problem] = []
        used = {source for fqn in self._targets for source in self._sources_of(fqn)}
        for source, entry in enumerate(self._entries):
            if source not in used or entry is None:
                continue
            name = self._names[source]
            if not entry.chunks.covers(entry.shape):
                defect = _core.describe_cover_defect(entry.shape, entry.chunks.boxes(), None)
                problems.append(Problem("broken_checkpoint", name, str(defect)))
            if entry.dtype not in DTYPES:
                detail = f"is of torch.{entry.dtype}, which is no plain memory; name it in drop"
                problems.append(Problem("wrong_transform", name, detail))
        if problems:
            raise refusal(operation, problems)

    def _state(self, saved_data: Any) -> SavedState:
        entries: dict[str, SavedTensor | None] = {}
        whole: dict[tuple[int, ...], _core.ChunkIndex] = {}
        for fqn, target in self._targets.items():
            if not target.dtypes:
                entries[fqn] = None
                continue
            shape = target.values.shape
            if shape not in whole:
                whole[shape] = _core.ChunkIndex.of_boxes([((0,) * len(shape), shape)])
            entries[fqn] = SavedTensor(target.dtypes[-1], shape, whole[shape])
        planner_data: dict[str, Any] = {**recorded_paths(saved_data, entries)}
        if isinstance(saved_data, dict) and WORLD_KEY in saved_data:
            planner_data[WORLD_KEY] = saved_data[WORLD_KEY]
        return SavedState(entries, planner_data)
