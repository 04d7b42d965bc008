"""A checkpoint as it was when it was opened: a load during the next save reads the old or the new one, never a mix.

Every file is opened relative to one descriptor of the directory, which keeps meaning the same directory when a save
puts another in its place. The files that a rank needs are opened together, when its plan is known. A file that a save
has removed before that is an error, the same on every rank; it is never taken from the newer checkpoint.

``Footers`` stands in for an index that is lost: the rank files' own footers say the same. Imports no torch.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterable
from pathlib import Path

from torchtitan_ext import _core
from torchtitan_ext.errors import DamagedCheckpointError, SavedOverError
from torchtitan_ext.storage.checkpoint_files import data_path, index_path, is_save_id, metadata_path, shown
from torchtitan_ext.storage.commit.leftovers import checkpoint_names

# A rank of a much smaller world than the one that saved may need thousands of files: the rest is opened late.
_MAX_HELD = 512


class OpenedCheckpoint:
    """Holds the directory, and files of it, open until it is forgotten."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._files: dict[str, int] = {}
        self._directory = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._metadata_name = ""
        self._metadata = b""
        self._identity: tuple[int, ...] = ()

    def __del__(self) -> None:
        for descriptor in self._files.values():
            os.close(descriptor)
        if hasattr(self, "_directory"):
            os.close(self._directory)

    def __reduce__(self) -> tuple[type[OpenedCheckpoint], tuple[Path]]:
        return OpenedCheckpoint, (self.directory,)

    def read_metadata(self, rank: int | None) -> bytes:
        """The bytes of ``.metadata``, by which it is known from then on whether another save has taken the place."""
        name = metadata_path(self.directory, rank).name
        return self._read_as_metadata(name)

    def read_index_alone(self, name: str) -> bytes:
        """The bytes of an index that stands for ``.metadata``; it is known by them then."""
        return self._read_as_metadata(name)

    def read_index(self, rank: int | None, save_id: str | None) -> tuple[Path, bytes | None]:
        """The index of a save, and its place; where there is none of this save any other, which is stale; or ``None``.

        Raises:
            SavedOverError: The index is gone, with its checkpoint.
        """
        path = index_path(self.directory, rank)
        prefix = f"{path.name}."
        named = [f"{prefix}{save_id}"] if is_save_id(save_id) else []
        for name in [*named, path.name]:
            try:
                return self.directory / name, self._read(name)
            except FileNotFoundError:
                pass
        self._check_not_saved_over(path.name)
        others = sorted(name for name in checkpoint_names(self.directory)[0] if name.startswith(prefix))
        return (self.directory / others[0], self._read(others[0])) if others else (path, None)

    def hold(self, names: Iterable[str]) -> None:
        """Opens files that are to be read.

        Raises:
            SavedOverError: One is gone, with its checkpoint.
        """
        limit = min(_MAX_HELD, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)
        for name in sorted(set(names))[:limit]:
            self.descriptor(name)

    def descriptor(self, name: str) -> int:
        """An open file, by its name in ``.metadata``. It stays this object's.

        Raises:
            DamagedCheckpointError: The file lies outside of the checkpoint's directory.
            FileNotFoundError: There is none.
            SavedOverError: It is gone, with its checkpoint.
        """
        if name not in self._files:
            data_path(self.directory, name)
            self._files[name] = self._open(name)
        return self._files[name]

    def has(self, file: _core.RankFile) -> bool:
        """Whether a rank file is there with the footer that its index knows."""
        try:
            descriptor = self.descriptor(file.name)
        except (DamagedCheckpointError, FileNotFoundError):
            return False
        footer = os.pread(descriptor, file.num_bytes - file.footer_offset + 1, file.footer_offset)
        return len(footer) == file.num_bytes - file.footer_offset and _core.digest(footer) == file.footer_digest

    def _open(self, name: str) -> int:
        try:
            # Nobody may ever write into a pipe that lies there.
            return os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=self._directory)
        except OSError as error:
            self._check_not_saved_over(name)
            raise OSError(error.errno, error.strerror, str(self.directory / name)) from None

    def _read_as_metadata(self, name: str) -> bytes:
        with os.fdopen(self._open(name), "rb") as stream:
            self._identity = _identity(os.fstat(stream.fileno()))
            self._metadata = stream.read()
        self._metadata_name = name
        return self._metadata

    def _read(self, name: str) -> bytes:
        with os.fdopen(self._open(name), "rb") as stream:
            return stream.read()

    def _check_not_saved_over(self, missing: str) -> None:
        if not self._metadata_name or missing == self._metadata_name:
            return
        path = self.directory / self._metadata_name
        try:
            # It has a hundred megabytes at a thousand ranks, and each of their files may be missing.
            same = _identity(path.stat()) == self._identity or path.read_bytes() == self._metadata
        except OSError:
            same = False
        if not same:
            raise SavedOverError(str(self.directory), f"{missing} of the earlier save is gone")


def _identity(status: os.stat_result) -> tuple[int, ...]:
    """Equal for a file that nobody has replaced or written to."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


class Footers:
    """The footers of the files of one checkpoint, which are all of one save.

    Every rank file of ``FileWriter`` ends with a footer. Its saves have ids of their own form, by which ``.metadata``
    says whether its files are such ones. Files of other writers have no footers, and nothing to be checked by.

    Args:
        save_id: That ``.metadata`` names.

    Attributes:
        are_expected: Whether ``.metadata`` is ours, so that a file without a footer is damaged.
        save_id: Of the footers; empty before the first where ``.metadata`` does not say it.
    """

    def __init__(self, save_id: object) -> None:
        self.are_expected = is_save_id(save_id)
        self.save_id = bytes.fromhex(save_id) if is_save_id(save_id) else b""

    def find(self, path: Path, descriptor: int) -> _core.RankFile | None:
        """What an index would say of a file, but for its records; ``None`` where the file is another writer's.

        Raises:
            FormatError: The footer is damaged or missing, or of another save than ``.metadata`` or an earlier file.
            OSError: The file cannot be read.
        """
        found = _core.find_footer(shown(path), path.name, descriptor)
        if found is None:
            if self.are_expected:
                raise _core.FormatError(
                    f"{shown(path)}: the file does not end with a footer, as all files of this save do: it is cut, or "
                    "of another save"
                )
            return None
        file, save_id = found
        self.save_id = self.save_id or save_id
        if save_id != self.save_id:
            raise _core.FormatError(f"{shown(path)}: the file belongs to another save")
        return file
