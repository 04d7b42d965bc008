"""Which keys of a checkpoint an operation is for, and what they are called there."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from torchtitan_ext.errors import Problem, WrongValueError, refusal
from torchtitan_ext.errors.near_names import names_hint, refuse_unmatched
from torchtitan_ext.offline.boxes import BoxReader, chunks_of, records_of
from torchtitan_ext.offline.sources import Source, paths_of, tensor_bytes
from torchtitan_ext.state.nested import Path

# Empty dicts in lists have no keys. Positions that are said to be further on are none.
_MAX_MEMBERS_WITHOUT_KEY = 1 << 20


@dataclass(frozen=True)
class Selection:
    """Chooses keys by globs and by a prefix; by default all.

    Attributes:
        only: Globs; a key is chosen that matches one of them, by the name that it gets. Without globs every key is.
        prefix: A component, such as ``model``: only keys below it are chosen, and their names lose it.
    """

    only: tuple[str, ...] = ()
    prefix: str = ""

    def keys_of(self, source: Source) -> dict[str, str]:
        """Keys of a source by the names that they get, in its order."""
        num_dropped = len(self._begin)
        below = filter(self._is_below, source.metadata.state_dict_metadata)
        return {key: fqn for fqn in below if self._is_chosen(key := fqn[num_dropped:])}

    def within(self, source: Source) -> Selection:
        """For a source that may have been cut off at the prefix: there all keys are taken as they are."""
        return self if any(map(self._is_below, source.metadata.state_dict_metadata)) else replace(self, prefix="")

    def check_finds(self, *sources: Source) -> None:
        """Refuses a prefix, and globs, that match no key of any of these, where there are keys.

        Raises:
            WrongValueError: Names the nearest keys.
        """
        fqns = {fqn: None for source in sources for fqn in source.metadata.state_dict_metadata}
        where = " and ".join(dict.fromkeys(str(source.path) for source in sources))
        if fqns and not any(map(self._is_below, fqns)):
            text = f"got {self.prefix!r}, below which there is no key of {where}; {names_hint(self.prefix, fqns)}"
            raise WrongValueError(text, "prefix")
        every = replace(self, only=())
        keys = {key: None for source in sources for key in every.within(source).keys_of(source)}
        refuse_unmatched("only", self.only, keys, where=f"{where} below {self.prefix}" if self.prefix else where)

    def paths_of(self, source: Source) -> dict[str, Path]:
        """Where each key stands in the nested state dict, by the name that it gets; all at its top where what
        the checkpoint says of them is no nesting."""
        paths = paths_of(source)
        chosen = {key: _below(key, fqn, paths[fqn]) for key, fqn in self.keys_of(source).items()}
        return chosen if _is_nesting(chosen.values(), len(paths)) else {key: (key,) for key in chosen}

    def num_bytes_of(self, source: Source, dtype: torch.dtype | None = None) -> int:
        """Of the tensors that are chosen, those of floating-point numbers in a dtype."""
        entries = (source.metadata.state_dict_metadata[fqn] for fqn in self.keys_of(source).values())
        return sum(tensor_bytes(_in_dtype(one, dtype)) for one in entries if isinstance(one, TensorStorageMetadata))

    def _is_below(self, fqn: str) -> bool:
        return fqn.startswith(self._begin)

    @property
    def _begin(self) -> str:
        return f"{self.prefix.rstrip('.')}." if self.prefix else ""

    def _is_chosen(self, key: str) -> bool:
        return not self.only or any(fnmatchcase(key, glob) for glob in self.only)


class SelectedKeys:
    """The keys of a checkpoint that are copied: tensors of plain memory, and values.

    Attributes:
        reader: Of the source; it knows the chunks of all tensors.
        fqns: Names in the source by the names that keys get, in the source's order.
        paths: Where each key stands in the nested state dict, by the name that it gets.
        tensors: What the metadata says of each tensor, by the name that it gets.
        values: The names of what is no tensor.
        cast: The dtypes in the source of tensors that are to be of another dtype.

    Args:
        dtype: Of the floating-point tensors that are copied; by default as in the source.

    Raises:
        WrongValueError: Nothing is selected.
        DamagedCheckpointError: Data files are not there; chunks of a tensor are missing, or overlap.
        LayoutError: The bytes of a tensor are not its elements, one behind the other: it is a subclass, quantised or
            sparse.
    """

    def __init__(self, source: Source, selection: Selection, dtype: torch.dtype | None = None) -> None:
        selection.check_finds(source)
        self.source = source
        self.reader = BoxReader(source)
        self.fqns = selection.keys_of(source)
        self.paths = selection.paths_of(source)
        source.check_files(self.fqns.values())
        entries = source.metadata.state_dict_metadata
        self.tensors = {
            key: self.reader.entry(fqn)
            for key, fqn in self.fqns.items()
            if isinstance(entries[fqn], TensorStorageMetadata)
        }
        self.values = [key for key in self.fqns if key not in self.tensors]
        _check_plain(source, {self.fqns[key]: entry for key, entry in self.tensors.items()})
        self.cast: dict[str, torch.dtype] = {}
        if dtype is not None:
            saved = self.tensors
            self.tensors = {key: _in_dtype(entry, dtype) for key, entry in saved.items()}
            kinds = {key: entry.properties.dtype for key, entry in saved.items()}
            self.cast = {key: kind for key, kind in kinds.items() if kind != self.tensors[key].properties.dtype}

    @property
    def num_bytes(self) -> int:
        """Of all tensors."""
        return sum(map(tensor_bytes, self.tensors.values()))


def _in_dtype(entry: TensorStorageMetadata, dtype: torch.dtype | None) -> TensorStorageMetadata:
    if dtype is None or not entry.properties.dtype.is_floating_point:
        return entry
    return replace(entry, properties=replace(entry.properties, dtype=dtype))


def _check_plain(source: Source, tensors: Mapping[str, TensorStorageMetadata]) -> None:
    chunks = chunks_of(tensors)
    records = records_of(source, chunks)
    odd = dict.fromkeys(chunk.fqn for chunk, record in zip(chunks, records, strict=True) if record.tensor is None)
    if odd:
        what = (
            "is a tensor subclass, quantised or sparse, or of a machine with another order of bytes; load and save it "
            "in a job, or leave it out"
        )
        raise refusal("copy", [Problem("unsupported_tensor", fqn, what) for fqn in odd])


def _below(key: str, fqn: str, path: Path) -> Path:
    """Where a key stands, when the names of what it is in are cut off."""
    num_dropped = len(fqn) - len(key)
    while num_dropped > 0:
        num_dropped -= len(str(path[0])) + 1
        path = path[1:]
    return path if num_dropped == 0 else (key,)


def _is_nesting(paths: Collection[Path], num_keys: int) -> bool:
    """Whether there is a state dict in which values stand at these paths; a list has what may be left out of it.

    Args:
        num_keys: Of the whole checkpoint, by which the lengths of lists are bounded.
    """
    kinds: dict[Path, type] = {(): str}
    ends: dict[Path, int] = {}
    for path in paths:
        for depth, key in enumerate(path):
            holder = path[:depth]
            if kinds.setdefault(holder, type(key)) is not type(key):
                return False
            if isinstance(key, int):
                if key < 0:
                    return False
                ends[holder] = max(ends.get(holder, 0), key)
    return kinds.keys().isdisjoint(paths) and sum(ends.values()) <= num_keys + _MAX_MEMBERS_WITHOUT_KEY
