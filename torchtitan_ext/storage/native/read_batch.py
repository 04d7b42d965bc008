"""Reads items of a load plan together, and gives them to the planner in stock's order."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner, ReadItem

from torchtitan_ext import _core
from torchtitan_ext.errors import CheckpointReadError
from torchtitan_ext.layout.dtensor import box_of, is_wrapper, local_view
from torchtitan_ext.layout.wrapper import dense_values
from torchtitan_ext.storage.checkpoint_files import Record
from torchtitan_ext.storage.native.fills import Elements, Fills, copy_values
from torchtitan_ext.storage.native.open_files import OpenFiles, RecordFiles
from torchtitan_ext.storage.progress import OnBytes
from torchtitan_ext.storage.raw_tensor import DTYPES

# Values and temporary targets that planners make for a load are freed after so many bytes.
BATCH_BYTES = 256 << 20


@runtime_checkable
class HasLocalTargets(Protocol):
    """A planner that wants no call for each item where storage can fill its target straight."""

    def local_targets(self, fqns: Iterable[str]) -> dict[str, torch.Tensor]:
        """Tensors of the CPU in plain memory by their keys: items fill boxes of them at their ``dest_offsets``.

        Lacks keys for whose items the planner is to be asked.
        """
        ...


class ReadBatch:
    """Items that are read together and given to the planner in stock's order: ``add_list`` or ``add_box``, at last
    ``finish``.

    Args:
        files: Reads the files of the checkpoint.
        on_bytes: Called with each number of bytes that were read.
        bucket_bytes: Called once if there are targets of an accelerator, for the size of their buckets.

    Attributes:
        files: To which ``Elements`` add their reads.
    """

    def __init__(
        self, planner: LoadPlanner, files: RecordFiles, on_bytes: OnBytes, bucket_bytes: Callable[[], int]
    ) -> None:
        self._planner = planner
        self.files = OpenFiles(files)
        self._fills = Fills(self.files, on_bytes=on_bytes, bucket_bytes=bucket_bytes)
        self._targets: list[tuple[ReadItem, torch.Tensor]] = []
        self._values: list[tuple[ReadItem, npt.NDArray[np.uint8], torch.Tensor | None]] = []
        self._value_bytes = 0
        self._on_bytes = on_bytes

    def add_list(self, items: Sequence[ReadItem], reads: _core.ReadList) -> None:
        """Adds items, and where they lie."""
        targets: dict[str, torch.Tensor] = {}
        if isinstance(self._planner, HasLocalTargets):
            targets = self._planner.local_targets(reads.fqns)
            # Autograd does not see that they are filled; inference tensors count no versions.
            torch.autograd.graph.increment_version([one for one in targets.values() if not one.is_inference()])
        for file, name in enumerate(reads.files):
            end = 0
            while end < reads.num_rows(file):
                added = self.files.add_list(name, reads, file, end, BATCH_BYTES, targets)
                end = added.end
                self._fills.num_bytes += added.num_bytes
                for position, offset, num_bytes, tensor in added.left:
                    self._add(items[position], Record(name, offset, num_bytes, tensor))
                self._read_if_full()

    def _add(self, item: ReadItem, record: Record) -> None:
        if item.type != LoadItemType.BYTE_IO and record.tensor is not None:
            read_into = functools.partial(self.files.add_part, record.file, record.tensor, item.storage_offsets)
            self.add_box(item, Elements((DTYPES[record.tensor.dtype],), read_into))
            return
        target = None if item.type == LoadItemType.BYTE_IO else self._target(item)
        content = self.files.add_bytes(record.file, record.offset, record.num_bytes)
        self._values.append((item, content, target))
        self._value_bytes += record.num_bytes
        self._read_if_full()

    def add_box(self, item: ReadItem, elements: Elements) -> None:
        """Adds an item of a tensor, and the elements that its target gets."""
        target = self._target(item)
        self._fills.add(item.dest_index.fqn, target, elements)
        self._targets.append((item, target))
        self._read_if_full()

    def finish(self) -> None:
        """Reads what is left, and waits until all targets are filled.

        Raises:
            CheckpointReadError: (also of ``add_list`` and ``add_box``) A record of a subclass does not fit its target.
        """
        self._read()
        self._fills.finish()

    def _read_if_full(self) -> None:
        if self._fills.num_bytes + self._value_bytes >= BATCH_BYTES:
            self._read()

    def _read(self) -> None:
        """Reads all added items, and gives them to the planner."""
        self._fills.read()
        self._on_bytes(self._value_bytes)
        for item, content, target in self._values:
            stream = io.BytesIO(content.data)
            if target is None:
                self._planner.load_bytes(item, stream)
                continue
            self._targets.append((item, target))
            with torch.no_grad():
                copy_values(item.dest_index.fqn, target, _loaded_box(item, stream, target))
        for item, tensor in self._targets:
            self._planner.commit_tensor(item, tensor)
        self._targets, self._values, self._value_bytes = [], [], 0

    def _target(self, item: ReadItem) -> torch.Tensor:
        target = self._planner.resolve_tensor(item).detach()
        if target.shape != item.lengths:
            raise ValueError(
                f"req {item.storage_index} mismatch sizes {target.size()} vs {item.lengths}: the planner resolved a "
                "target of another size than its item"
            )
        return target


def _loaded_box(item: ReadItem, content: io.BytesIO, target: torch.Tensor) -> torch.Tensor:
    """The box that an item wants from a whole record of ``torch.save``.

    If the box cuts a block of a quantised tensor, a plain target gets dequantised values.
    """
    tensor = torch.load(content, map_location="cpu", weights_only=True)
    box = box_of(tensor, item.storage_offsets, item.lengths)
    if not isinstance(box, str):
        return box
    if is_wrapper(target):
        raise CheckpointReadError(item.dest_index.fqn, f"as it was saved, {box}")
    return local_view(dense_values(tensor), item.storage_offsets, item.lengths)
