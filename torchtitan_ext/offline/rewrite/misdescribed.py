"""Checkpoints in which stock describes tensors wrongly: FSDP2 over tensor parallelism, sizes that they share unevenly.

``csrc/core/noted_parts.h`` says what stock writes then, and finds the true places. What a save dropped as the double of
another part is lost.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from torchtitan_ext import _core
from torchtitan_ext.errors import Problem, WrongValueError, named, refusal
from torchtitan_ext.layout.layout import patterns_for
from torchtitan_ext.layout.mesh_axes import is_data_parallel, replicates
from torchtitan_ext.offline.placement_rules import DimOf
from torchtitan_ext.offline.sources import DcpSource
from torchtitan_ext.storage.metadata.saved_state import ChunkKey, SavedState, SavedTensor
from torchtitan_ext.storage.native.open_files import Chunk

_RANK_OF_FILE = re.compile(r"__(\d+)_\d+\.distcp")
_REPLICATED = -1

_Part = tuple[int, tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""A rank, offsets and sizes as stock noted them, and the sizes of the record."""


class RescuedFiles(DcpSource):
    """A checkpoint of stock, with the true boxes of its tensors.

    Args:
        mesh: Size of each axis of the mesh that saved, leftmost first, by names that say what they do: see
            ``PlacementRules``.
        rules: The dims that axes cut, by fqn or glob, where files leave several open.

    Attributes:
        rescued: The tensors that were described wrongly.

    Raises:
        WrongValueError: Every tensor is described rightly.
        DamagedCheckpointError: The metadata is damaged, or a file of records is missing.
    """

    def __init__(self, path: Path, mesh: Mapping[str, int], rules: Mapping[str, DimOf] | None = None) -> None:
        super().__init__(path)
        self._mesh = dict(mesh)
        self._rules = rules or {}
        self._noted_at: dict[tuple[str, tuple[int, ...]], tuple[int, ...]] = {}
        self._problems: dict[str, Problem] = {}
        self.rescued: list[str] = []
        entries = dict(self.state.entries)
        for fqn, entry in self.state.tensors.items():
            records = self.find_records(entry.chunk_keys(fqn))
            parts: list[_Part] = []
            for (offsets, sizes), record in zip(entry.chunks.boxes(), records, strict=True):
                match = _RANK_OF_FILE.fullmatch(record.file)
                written = sizes if record.tensor is None else record.tensor.sizes
                parts.append((-1 if match is None else int(match[1]), tuple(offsets), tuple(sizes), tuple(written)))
            if not entry.chunks.covers(entry.shape) or any(sizes != written for *_, sizes, written in parts):
                self.rescued.append(fqn)
                entries[fqn] = self._rescue(fqn, entry, parts)
        if not self.rescued:
            what = f"{path} describes all tensors rightly: there is nothing to rescue"
            raise WrongValueError(what, "path", "; load it, or reshard it")
        self.state = SavedState(entries, self.state.planner_data)

    def check_files(self, fqns: Iterable[str]) -> None:
        """Raises ReshardError for tensors of which elements are lost or in doubt, and what DcpSource raises."""
        chosen = list(fqns)
        problems = [self._problems[fqn] for fqn in chosen if fqn in self._problems]
        if problems:
            raise refusal("rescue", problems)
        super().check_files(chosen)

    def _place_of(self, key: Chunk) -> tuple[str, int, int]:
        noted = None if key.offset is None else self._noted_at.get((key.fqn, tuple(key.offset)))
        return super()._place_of(key if noted is None else ChunkKey(key.fqn, noted))

    def _rescue(self, fqn: str, entry: SavedTensor, parts: list[_Part]) -> SavedTensor:
        """The tensor with its true boxes, whose noted offsets it keeps; or with a problem."""
        pattern = patterns_for(fqn, self._rules)[:1]
        stated = self._rules[pattern[0]] if pattern else {}
        choices = [self._dims_of(axis, len(entry.shape), stated) for axis in self._mesh]
        found = _core.find_true_places(entry.shape, tuple(self._mesh.values()), choices, parts)
        lost = [f"{list(one.sizes)} at {list(one.offsets)} of rank {one.rank}" for one in found.places if one.part < 0]
        if found.num_ways != 1:
            mesh = ",".join(f"{axis}={size}" for axis, size in self._mesh.items())
            ways = (
                f"{found.num_ways} ways to cut it on {mesh} explain"
                if found.num_ways
                else f"no way to cut it on {mesh} explains"
            )
            detail = f"{ways} what its ranks wrote; give the mesh that saved, or --shard"
        elif lost:
            detail = f"elements {named(lost)} are in no file: stock took them for a double; leave it out with --only"
        else:
            self._noted_at |= {(fqn, one.offsets): parts[one.part][1] for one in found.places}
            boxes = [(one.offsets, one.sizes) for one in found.places]
            return entry._replace(chunks=_core.ChunkIndex.of_boxes(boxes))
        self._problems[fqn] = Problem("broken_checkpoint", fqn, detail)
        return entry

    def _dims_of(self, axis: str, num_dims: int, stated: DimOf) -> list[int]:
        """The dims that an axis may cut. A rule is ignored for a tensor that lacks its dim."""
        dim = stated.get(axis)
        if axis in stated and (dim is None or -num_dims <= dim < num_dims):
            return [_REPLICATED if dim is None else dim % num_dims]
        if is_data_parallel(axis):
            return [_REPLICATED if replicates(axis) or not num_dims else 0]
        return [_REPLICATED, *range(num_dims)]
