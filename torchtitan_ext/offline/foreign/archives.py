"""The files of ``torch.save`` of which a foreign checkpoint consists, read without running what they name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from torchtitan_ext import _core
from torchtitan_ext.errors import DamagedCheckpointError, Problem, refusal
from torchtitan_ext.layout.layout import num_elements
from torchtitan_ext.state.nested import flat_keys
from torchtitan_ext.storage.checkpoint_files import Record
from torchtitan_ext.storage.formats.archives import find_entries
from torchtitan_ext.storage.formats.plain_files import PlainFiles
from torchtitan_ext.storage.formats.safetensors_files import ChunkRecord
from torchtitan_ext.storage.formats.torch_files import load_file, record_of, saved_value


class Inert:
    """Stands for an object of a library that wrote a file: it keeps its arguments and attributes, and does nothing."""

    def __init__(self, *arguments: object) -> None:
        self.arguments = arguments


# Allowed under the names of these classes, torch.load makes an ``Inert`` of each object; nothing is imported.
INERT_CLASSES: Any = [
    (Inert, name)
    for name in (
        "deepspeed.checkpoint.universal_checkpoint.SubparamShape",
        "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
        "deepspeed.runtime.fp16.loss_scaler.LossScaler",
        "deepspeed.runtime.zero.config.ZeroStageEnum",
        "deepspeed.utils.tensor_fragment.fragment_address",
    )
]


class Archive:
    """One file of ``torch.save``.

    Args:
        name: Below the directory of the checkpoint.
        weights_only: Refuse values that are more than plain data.

    Attributes:
        value: What it holds, tensors without their bytes, on the meta device.

    Raises:
        DamagedCheckpointError: The file is cut or damaged.
        UnsafePickleError: It names a class or function that may not be unpickled.
        OSError: It cannot be read.
    """

    def __init__(self, directory: Path, name: str, *, weights_only: bool) -> None:
        self.name = name
        self._path = directory / name
        self._weights_only = weights_only
        self._entries = find_entries(self._path)
        self._sizes = dict(self._entries.values())
        self.value = self._load("meta")

    def load(self) -> Any:
        """The value with its tensors, which are read when somebody touches them."""
        return self._load("cpu")

    def record(self, tensor: torch.Tensor) -> Record:
        """Where a tensor of ``value``, or a view of one, lies.

        Raises:
            DamagedCheckpointError: The tensor is no plain memory, or ends behind its storage.
        """
        found = record_of(tensor.detach(), self._path, self._sizes)
        return Record(self.name, found.offset, found.num_bytes, found.tensor)

    def _load(self, device: str) -> Any:
        return load_file(self._path, weights_only=self._weights_only, map_location=device, allow_classes=INERT_CLASSES)


def open_archives(directory: Path, names: Iterable[str], *, weights_only: bool) -> dict[str, Archive]:
    """Files by name.

    Raises:
        ReshardError: Names all files that are missing, cut or damaged.
        UnsafePickleError: A file names a class or function that may not be unpickled.
    """
    opened, problems = {}, []
    for name in names:
        try:
            opened[name] = Archive(directory, name, weights_only=weights_only)
        except (DamagedCheckpointError, OSError) as error:
            problems.append(Problem("broken_checkpoint", name, f"cannot be read ({error}); copy it once more"))
    if problems:
        raise refusal("open", problems)
    return opened


def flat_chunks(partitions: Sequence[Record | None], boxes: Sequence[_core.FlatBox]) -> list[ChunkRecord] | None:
    """The chunks of a tensor whose boxes lie in the partitions of ranks; ``None`` if some of them do not."""
    chunks = []
    for box in boxes:
        record, sizes, position = partitions[box.partition], box.sizes, box.position
        held = None if record is None else record.tensor
        count = num_elements(sizes)
        if (
            record is None
            or held is None
            or len(held.sizes) != 1
            or not held.is_row_major
            or position + count > held.sizes[0]
        ):
            return None
        offset = record.offset + position * held.item_bytes
        stored = _core.StoredTensor(held.dtype, sizes, None, offset)
        chunks.append((box.offsets, Record(record.file, offset, count * held.item_bytes, stored)))
    return chunks


class ForeignFiles(PlainFiles):
    """The tensors and values of a foreign checkpoint, found by a reader that adds them one by one.

    Keys that cannot be known are named, all at once, when somebody wants them: what does not want them goes on.
    """

    def __init__(self, directory: Path) -> None:
        self._places: dict[str, list[ChunkRecord]] = {}
        self._values: dict[str, Any] = {}
        self._paths: dict[str, tuple[Any, ...]] = {}
        self._problems: dict[str, Problem] = {}
        self._target = directory

    def add_tensor(self, path: Sequence[str], chunks: list[ChunkRecord]) -> None:
        """Adds a tensor: offsets and record of each of its chunks."""
        self._places[self._key(path)] = chunks

    def add_value(self, path: Sequence[Any], value: Any) -> None:
        """Adds a value that is no tensor."""
        self._values[self._key(path)] = value

    def add_state(self, archive: Archive, state: Mapping[str, Any], with_data: Mapping[str, Any]) -> None:
        """Adds nested dicts of a file; ``with_data`` is the same with the bytes of its tensors."""
        flat, loaded = flat_keys(state, tuples="as_stock"), flat_keys(with_data, tuples="as_stock").values
        for fqn, value in flat.values.items():
            if isinstance(value, torch.Tensor):
                self.add_tensor(flat.stock_paths[fqn], [((0,) * value.dim(), archive.record(value))])
            else:
                self.add_value(flat.stock_paths[fqn], loaded[fqn])

    def add_problem(self, path: Sequence[str], detail: str) -> None:
        """Adds a key that cannot be known: why, and what to do."""
        key = self._key(path)
        self._problems[key] = Problem("broken_checkpoint", key, detail)
        self._values[key] = None

    def close(self) -> ForeignFiles:
        """Ends the adding."""
        super().__init__(self._target, self._places, self._values, self._paths, saved_value)
        return self

    def check_files(self, fqns: Iterable[str]) -> None:
        """Raises ReshardError if some of these keys cannot be known."""
        problems = [self._problems[fqn] for fqn in fqns if fqn in self._problems]
        if problems:
            raise refusal("open", problems)

    def _key(self, path: Sequence[Any]) -> str:
        key = ".".join(map(str, path))
        self._paths[key] = tuple(path)
        return key
