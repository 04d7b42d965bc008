"""Which keys of a checkpoint an operation is for, and what they are called there."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

from torchtitan_ext.offline.sources import Source, paths_of
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
        """Raises ValueError where nothing is selected in any of these, though there are keys."""
        if not any(map(self.keys_of, sources)) and any(map(paths_of, sources)):
            below = f" below {self.prefix}" if self.prefix else ""
            matches = f" that matches {' or '.join(self.only)}" if self.only else ""
            raise ValueError(f"{' and '.join(str(source.path) for source in sources)}: got no key{below}{matches}")

    def paths_of(self, source: Source) -> dict[str, Path]:
        """Where each key stands in the nested state dict, by the name that it gets."""
        paths = paths_of(source)
        return {key: _below(key, fqn, paths[fqn]) for key, fqn in self.keys_of(source).items()}

    def has_prefix_in(self, source: Source) -> bool:
        """Whether there is a key below the prefix."""
        return any(fqn.startswith(self._begin) for fqn in paths_of(source))

    @property
    def _begin(self) -> str:
        return f"{self.prefix.rstrip('.')}." if self.prefix else ""

    def _is_in(self, fqn: str) -> bool:
        return fqn.startswith(self._begin) and (not self.only or any(fnmatchcase(fqn, glob) for glob in self.only))


def _below(key: str, fqn: str, path: Path) -> Path:
    """Where a key stands, when the names of what it is in are cut off."""
    num_dropped = len(fqn) - len(key)
    while num_dropped > 0:
        num_dropped -= len(str(path[0])) + 1
        path = path[1:]
    return path if num_dropped == 0 else (key,)
