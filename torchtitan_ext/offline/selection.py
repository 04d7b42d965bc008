"""Which keys of a checkpoint an operation is for, and what they are called there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from torchtitan_ext.errors import Problem, WrongValueError, refusal
from torchtitan_ext.offline.boxes import BoxReader
from torchtitan_ext.offline.sources import Source, paths_of, tensor_bytes
from torchtitan_ext.state.nested import Path


@dataclass(frozen=True)
class Selection:
    """Chooses keys by globs and by a prefix; by default all.

    Attributes:
        only: Globs; a key is chosen that matches one of them. Without globs every key is.
        prefix: A component, such as ``model``: only keys below it are chosen, and their names lose it.
    """

    only: tuple[str, ...] = ()
    prefix: str = ""

    def keys_of(self, source: Source) -> dict[str, str]:
        """Keys of a source by the names that they get, in its order."""
        return {fqn[len(self._begin) :]: fqn for fqn in paths_of(source) if self._is_in(fqn)}

    def check_finds(self, *sources: Source) -> None:
        """Raises WrongValueError where nothing is selected in any of these, though there are keys."""
        if not any(map(self.keys_of, sources)) and any(map(paths_of, sources)):
            below = f" below {self.prefix}" if self.prefix else ""
            matches = f" that matches {' or '.join(self.only)}" if self.only else ""
            raise WrongValueError(f"{' and '.join(str(source.path) for source in sources)}: got no key{below}{matches}")

    def paths_of(self, source: Source) -> dict[str, Path]:
        """Where each key stands in the nested state dict, by the name that it gets."""
        paths = paths_of(source)
        return {key: _below(key, fqn, paths[fqn]) for key, fqn in self.keys_of(source).items()}

    def num_bytes_of(self, source: Source) -> int:
        """Of the tensors that are chosen."""
        entries = (source.metadata.state_dict_metadata[fqn] for fqn in self.keys_of(source).values())
        return sum(tensor_bytes(entry) for entry in entries if isinstance(entry, TensorStorageMetadata))

    def has_prefix_in(self, source: Source) -> bool:
        """Whether there is a key below the prefix."""
        return any(fqn.startswith(self._begin) for fqn in paths_of(source))

    @property
    def _begin(self) -> str:
        return f"{self.prefix.rstrip('.')}." if self.prefix else ""

    def _is_in(self, fqn: str) -> bool:
        return fqn.startswith(self._begin) and (not self.only or any(fnmatchcase(fqn, glob) for glob in self.only))


class SelectedKeys:
    """The keys of a checkpoint that are copied: tensors of plain memory, and values.

    Attributes:
        fqns: Names in the source by the names that keys get, in the source's order.
        paths: Where each key stands in the nested state dict, by the name that it gets.
        tensors: What the metadata says of each tensor, by the name that it gets.
        values: The names of what is no tensor.

    Raises:
        WrongValueError: Nothing is selected.
        DamagedCheckpointError: Chunks of a tensor are missing, or overlap.
        LayoutError: The bytes of a tensor are not its elements, one behind the other: it is a subclass, quantised or
            sparse.
    """

    def __init__(self, source: Source, selection: Selection) -> None:
        selection.check_finds(source)
        self.source = source
        self.fqns = selection.keys_of(source)
        self.paths = selection.paths_of(source)
        entries = source.metadata.state_dict_metadata
        reader = BoxReader(source)
        self.tensors = {
            key: reader.entry(fqn) for key, fqn in self.fqns.items() if isinstance(entries[fqn], TensorStorageMetadata)
        }
        self.values = [key for key in self.fqns if key not in self.tensors]
        _check_plain(source, {self.fqns[key]: entry for key, entry in self.tensors.items()})

    @property
    def num_bytes(self) -> int:
        """Of all tensors."""
        return sum(map(tensor_bytes, self.tensors.values()))


def _check_plain(source: Source, tensors: Mapping[str, TensorStorageMetadata]) -> None:
    indices = [MetadataIndex(fqn, chunk.offsets) for fqn, entry in tensors.items() for chunk in entry.chunks]
    records = source.find_records(indices)
    odd = dict.fromkeys(index.fqn for index, record in zip(indices, records, strict=True) if record.tensor is None)
    if odd:
        what = "is a tensor subclass, quantised or sparse; load and save it in a job, or leave it out"
        raise refusal("copy", [Problem("unsupported_tensor", fqn, what) for fqn in odd])


def _below(key: str, fqn: str, path: Path) -> Path:
    """Where a key stands, when the names of what it is in are cut off."""
    num_dropped = len(fqn) - len(key)
    while num_dropped > 0:
        num_dropped -= len(str(path[0])) + 1
        path = path[1:]
    return path if num_dropped == 0 else (key,)
