"""Chooses the keys of a checkpoint that a command works on, and gives them their names in the result."""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from torchtitan_ext.errors import Problem, WrongValueError, refusal
from torchtitan_ext.errors.near_names import names_hint, refuse_unmatched
from torchtitan_ext.offline.boxes import BoxReader, chunks_of, records_of
from torchtitan_ext.offline.sources import FileSource
from torchtitan_ext.offline.workers import Shares, divide
from torchtitan_ext.storage.element_types import is_floating_point
from torchtitan_ext.storage.location import Location
from torchtitan_ext.storage.metadata.saved_state import KeyPath, SavedTensor

# Empty dicts in lists have no keys, so that lists may have more members than keys; a larger position is damage.
_MAX_MEMBERS_WITHOUT_KEY = 1 << 20


@dataclass(frozen=True)
class Selection:
    """Chooses keys by globs and by a prefix; by default all keys.

    Attributes:
        only: Globs. A key is chosen if its new name, without the prefix, matches one of them. No globs choose all keys.
        prefix: A component, such as ``model``: only keys below it are chosen, and their new names lack the prefix.
    """

    only: tuple[str, ...] = ()
    prefix: str = ""

    def keys_of(self, source: FileSource) -> dict[str, str]:
        """The chosen keys of a source by their new names, in the order of the source."""
        num_dropped = len(self._begin)
        below = filter(self._is_below, source.state.entries)
        return {key: fqn for fqn in below if self._is_chosen(key := fqn[num_dropped:])}

    def within(self, source: FileSource) -> Selection:
        """Without the prefix if the source has no key below it: such a source may hold the component alone."""
        return self if any(map(self._is_below, source.state.entries)) else replace(self, prefix="")

    def check_finds(self, *sources: FileSource) -> None:
        """Refuses a prefix, and globs, that match no key of any of these sources.

        Raises:
            WrongValueError: Names the nearest keys.
        """
        fqns = {fqn: None for source in sources for fqn in source.state.entries}
        where = " and ".join(dict.fromkeys(str(source.path) for source in sources))
        if fqns and not any(map(self._is_below, fqns)):
            text = f"got {self.prefix!r}, below which there is no key of {where}; {names_hint(self.prefix, fqns)}"
            raise WrongValueError(text, "prefix")
        every = replace(self, only=())
        keys = {key: None for source in sources for key in every.within(source).keys_of(source)}
        refuse_unmatched("only", self.only, keys, where=f"{where} below {self.prefix}" if self.prefix else where)

    def paths_of(self, source: FileSource) -> dict[str, KeyPath]:
        """The path of each chosen key in the nested state dict, by its new name.

        A key without a recorded path stands at the top, as do all keys if the recorded paths contradict each other.
        """
        paths = source.state.paths()
        chosen = {key: _below(key, fqn, paths[fqn]) for key, fqn in self.keys_of(source).items()}
        return chosen if _is_nesting(chosen.values(), len(paths)) else {key: (key,) for key in chosen}

    def num_bytes_of(self, source: FileSource, dtype: str | None = None, *, without: Container[str] = ()) -> int:
        """The size of the chosen tensors in bytes, floating-point ones after a cast to ``dtype``.

        Args:
            without: Keys of the source that do not count.
        """
        fqns = (fqn for fqn in self.keys_of(source).values() if fqn not in without)
        entries = (source.state.entries[fqn] for fqn in fqns)
        return sum(_in_dtype(one, dtype).num_bytes for one in entries if one is not None)

    def _is_below(self, fqn: str) -> bool:
        return fqn.startswith(self._begin)

    @property
    def _begin(self) -> str:
        return f"{self.prefix.rstrip('.')}." if self.prefix else ""

    def _is_chosen(self, key: str) -> bool:
        return not self.only or any(fnmatchcase(key, glob) for glob in self.only)


class SelectedKeys:
    """The keys of a checkpoint that a command copies: tensors of plain memory, and values.

    Attributes:
        reader: Reads boxes of the source.
        fqns: Names in the source, by new name, in the order of the source.
        paths: Paths in the nested state dict, by new name.
        tensors: Metadata of each new tensor, by new name.
        values: The new names of the values that are no tensors.
        cast: The dtype in the source of each tensor that gets another dtype, by new name.

    Args:
        dtype: The dtype that floating-point tensors get; by default they keep theirs.

    Raises:
        WrongValueError: Nothing is selected.
        DamagedCheckpointError: Data files are missing; chunks of a tensor are missing or overlap.
        LayoutError: A tensor is a subclass, quantised or sparse: its bytes are not its elements, one behind the other.
    """

    def __init__(self, source: FileSource, selection: Selection, dtype: str | None = None) -> None:
        selection.check_finds(source)
        self.source = source
        self.reader = BoxReader(source)
        self.fqns = selection.keys_of(source)
        self.paths = selection.paths_of(source)
        source.check_files(self.fqns.values())
        tensors = {key: fqn for key, fqn in self.fqns.items() if source.state.entries[fqn] is not None}
        saved = {key: self.reader.entry(fqn) for key, fqn in tensors.items()}
        self.values = [key for key in self.fqns if key not in saved]
        check_plain(source, {tensors[key]: entry for key, entry in saved.items()})
        self.dtype = dtype
        self.tensors = {key: _in_dtype(entry, dtype) for key, entry in saved.items()}
        self.cast = {key: entry.dtype for key, entry in saved.items() if entry.dtype != self.tensors[key].dtype}

    @property
    def num_bytes(self) -> int:
        """The size of all new tensors in bytes."""
        return sum(entry.num_bytes for entry in self.tensors.values())

    def divide(self, max_bytes: int, num_processes: int | None) -> Shares:
        """Shares the copy between processes that hold at most ``max_bytes`` together. From an object store one process
        reads, whose requests go side by side: what it has opened no fork of it can read."""
        shares = divide(max_bytes, 1 if isinstance(self.source.path, Location) else num_processes)
        self.reader.files.thread_count = shares.num_threads
        return shares


def _in_dtype(entry: SavedTensor, dtype: str | None) -> SavedTensor:
    return entry if dtype is None or not is_floating_point(entry.dtype) else entry._replace(dtype=dtype)


def check_plain(source: FileSource, tensors: Mapping[str, SavedTensor]) -> None:
    """Refuses tensors whose bytes in the files are not their elements, one behind the other.

    Raises:
        LayoutError: A tensor is a subclass, quantised or sparse.
    """
    chunks = chunks_of(tensors)
    records = records_of(source, chunks)
    odd = dict.fromkeys(chunk.fqn for chunk, record in zip(chunks, records, strict=True) if record.tensor is None)
    if odd:
        what = (
            "is a tensor subclass, quantised or sparse, or of a machine with another order of bytes; load and save it "
            "in a job, or leave it out"
        )
        raise refusal("copy", [Problem("unsupported_tensor", fqn, what) for fqn in odd])


def _below(key: str, fqn: str, path: KeyPath) -> KeyPath:
    """The path of a key without the parts that the prefix names; the key alone if the prefix ends inside a part."""
    num_dropped = len(fqn) - len(key)
    while num_dropped > 0:
        num_dropped -= len(str(path[0])) + 1
        path = path[1:]
    return path if num_dropped == 0 else (key,)


def _is_nesting(paths: Collection[KeyPath], num_keys: int) -> bool:
    """Whether some state dict has values at all of these paths; lists may have further members.

    Args:
        num_keys: The number of keys of the whole checkpoint, which bounds the lengths of lists.
    """
    kinds: dict[KeyPath, type] = {(): str}
    ends: dict[KeyPath, int] = {}
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
