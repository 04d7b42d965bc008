"""One of two checkpoints that are compared."""

from __future__ import annotations

from typing import Any, Literal

from torchtitan_ext.errors import CheckpointReadError
from torchtitan_ext.offline.boxes import BoxReader
from torchtitan_ext.offline.selection import Selection
from torchtitan_ext.offline.sources import FileSource
from torchtitan_ext.storage.metadata.saved_state import SavedTensor

DifferenceKind = Literal["only_in_a", "only_in_b", "type", "dtype", "shape", "values", "unreadable"]


class Side:
    """One of the two checkpoints, and its names for the keys that are compared."""

    def __init__(self, source: FileSource, selection: Selection) -> None:
        self.source = source
        self.fqns = selection.within(source).keys_of(source)
        self.reader = BoxReader(source)

    def entry(self, key: str) -> SavedTensor | None:
        return self.source.state.entries[self.fqns[key]]

    def tensor(self, key: str) -> SavedTensor:
        """What the side says of a tensor, whose chunks hold every element once."""
        return self.reader.entry(self.fqns[key])

    def has_tensor(self, key: str) -> bool:
        """Whether the side has the key, and a tensor under it."""
        return key in self.fqns and self.entry(key) is not None

    def value(self, key: str) -> Any:
        return self.source.read_value(self.fqns[key])

    def text(self, key: str) -> str:
        entry = self.entry(key)
        if entry is not None:
            return f"{entry.dtype} {list(entry.shape)}"
        try:
            return repr(self.value(key))
        except CheckpointReadError:
            return "a value that is more than plain data"


def kind_by_metadata(key: str, a: Side, b: Side) -> DifferenceKind | None:
    """How a key differs by being there, in type, shape or dtype; ``None`` if it does not."""
    if key not in a.fqns or key not in b.fqns:
        return "only_in_a" if key in a.fqns else "only_in_b"
    one, other = a.entry(key), b.entry(key)
    if one is None or other is None:
        return None if one is other else "type"
    if one.shape != other.shape:
        return "shape"
    return "dtype" if one.dtype != other.dtype else None
