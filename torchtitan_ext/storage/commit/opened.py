"""A checkpoint as it was when it was opened: a load during the next save reads the old or the new one, never a mix.

Every file is opened relative to one descriptor of the directory, which stays the same directory when a save puts
another one in its place. A rank opens the files that it needs together, when its plan is known. If a save has removed
one of them before that, every rank raises the same error; no file is taken from the newer checkpoint.

``Footers`` replaces a lost index: the footers of the rank files contain the same. Imports no torch.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

from torchtitan_ext import _core
from torchtitan_ext.errors import DamagedCheckpointError, SavedOverError
from torchtitan_ext.storage.checkpoint_files import data_path, index_path, is_save_id, sharing_save, shown
from torchtitan_ext.storage.commit.leftovers import checkpoint_names
from torchtitan_ext.storage.location import Place

# A rank may need thousands of files of a larger world: those beyond this number are opened when they are read.
_MAX_HELD = 512


_READ_BYTES = 16 << 20


class OpenedCheckpoint:
    """Keeps the directory, and files in it, open as long as the object lives.

    Args:
        may_link: Whether files may be links out of the directory, as in the cache of Hugging Face's hub. Names must be
            those of files in the directory then.

    Attributes:
        copy: Equal on ranks that have read the metadata from one file, also over a network file system; another one
            where hosts have copies of the checkpoint. Empty before the metadata is read.
        read_bytes: Who reads a whole file reads so much of it at a time: a multiple of the blocks with checksums.
    """

    read_bytes = _READ_BYTES

    def __init__(self, directory: Path, *, may_link: bool = False) -> None:
        self.directory = directory
        self._may_link = may_link
        self._files: dict[str, int] = {}
        self._directory = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._metadata_name = ""
        self._metadata = b""
        self._identity: tuple[int, ...] = ()
        self.copy = ""

    def __del__(self) -> None:
        for descriptor in self._files.values():
            os.close(descriptor)
        if hasattr(self, "_directory"):
            os.close(self._directory)

    def __reduce__(self) -> tuple[Callable[..., OpenedCheckpoint], tuple[Path]]:
        return partial(OpenedCheckpoint, may_link=self._may_link), (self.directory,)

    def read_metadata(self, name: str) -> bytes:
        """The bytes of ``.metadata``, or of an index that replaces it. From then on a missing file is recognized as
        removed by another save.
        """
        with os.fdopen(self._open(name), "rb") as stream:
            status = os.fstat(stream.fileno())
            self._identity = identity_of(status)
            # Hosts number the devices of a shared file system differently. A copy gets a time of its own.
            self.copy = f"{status.st_ino} {status.st_size} {status.st_ctime_ns}"
            self._metadata = stream.read()
        self._metadata_name = name
        return self._metadata

    def read_index(self, rank: int | None, save_id: str | None) -> tuple[Path, bytes | None]:
        """Path and bytes of the index of a save, else of any other, stale one; the bytes are ``None`` without any.

        Raises:
            SavedOverError: Another save has replaced the checkpoint.
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
        """Opens files for later reads.

        Raises:
            SavedOverError: Another save has replaced the checkpoint.
        """
        for name in sorted(set(names))[: _max_held()]:
            self.descriptor(name)

    def trim(self) -> None:
        """Closes the files that were opened first, beyond the number that is held."""
        for name in list(self._files)[: -_max_held()]:
            os.close(self._files.pop(name))

    def descriptor(self, name: str) -> int:
        """The descriptor of a file that ``.metadata`` names. The object keeps it open, and closes it.

        Raises:
            DamagedCheckpointError: The file lies outside of the checkpoint's directory.
            FileNotFoundError: There is no such file.
            SavedOverError: Another save has replaced the checkpoint.
        """
        if name not in self._files:
            if not self._may_link:
                data_path(self.directory, name)
            self._files[name] = self._open(name)
        return self._files[name]

    def expect(self, files: Mapping[str, _core.RankFile]) -> None:
        """Nothing: what an index says of the files is not needed to open them."""

    def names(self) -> list[str]:
        """The names of the checkpoint's files that are there now, in no order."""
        return checkpoint_names(self.directory)[0]

    def size(self, name: str) -> int | None:
        """The size of a file; ``None`` if it is not there."""
        try:
            return os.stat(name, dir_fd=self._directory).st_size
        except OSError:
            return None

    def bring(self, name: str, places: Mapping[int, int]) -> None:
        """Nothing: the records at these places, of these lengths, are there to be read."""

    def read(
        self, runs: _core.RunReader, names: Sequence[str], num_threads: int, verify: str
    ) -> list[_core.DamagedBlock]:
        """Reads what was added to a RunReader; ``names`` are those of its files."""
        return runs.read(num_threads, verify)

    def has(self, file: _core.RankFile) -> bool:
        """Whether a rank file is there with the footer that the index describes."""
        try:
            descriptor = self.descriptor(file.name)
        except (DamagedCheckpointError, FileNotFoundError):
            return False
        return _core.has_footer(file, descriptor)

    def _open(self, name: str) -> int:
        try:
            # The open of a pipe would wait for a writer.
            return os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=self._directory)
        except OSError as error:
            self._check_not_saved_over(name)
            raise OSError(error.errno, error.strerror, str(self.directory / name)) from None

    def _read(self, name: str) -> bytes:
        with os.fdopen(self._open(name), "rb") as stream:
            return stream.read()

    def _check_not_saved_over(self, missing: str) -> None:
        if not self._metadata_name or missing == self._metadata_name:
            return
        path = self.directory / self._metadata_name
        try:
            # It has a hundred megabytes at a thousand ranks, and each of their files may be missing.
            same = identity_of(path.stat()) == self._identity or path.read_bytes() == self._metadata
        except OSError:
            same = False
        if not same:
            raise SavedOverError(str(self.directory), f"{missing} of the earlier save is gone")


def _max_held() -> int:
    return max(1, min(_MAX_HELD, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4))


def identity_of(status: os.stat_result) -> tuple[int, ...]:
    """Equal as long as the file is neither replaced nor written to."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


class Footers:
    """The footers of the files of one checkpoint, which all belong to one save, but for those that it shares.

    Every rank file of ``FileWriter`` ends with a footer. Files of other writers have neither footers nor checksums.

    Args:
        save_id: The id in ``.metadata``; its form shows whether ``FileWriter`` saved.

    Attributes:
        are_expected: Whether ``FileWriter`` saved, so that a file without a footer is damaged.
        save_id: The id of the save; empty until the first footer if ``.metadata`` has none of ours.
    """

    def __init__(self, save_id: object) -> None:
        self.are_expected = is_save_id(save_id)
        self.save_id = bytes.fromhex(save_id) if is_save_id(save_id) else b""

    def find(self, path: Place, descriptor: int) -> _core.RankFile | None:
        """A file as an index would describe it, without its records; ``None`` for a file of another writer.

        Raises:
            FormatError: The footer is damaged, missing, or of another save than ``.metadata`` or an earlier file; or of
                another save than the name of a shared file says.
            OSError: The file cannot be read.
        """
        file = _core.find_footer(shown(path), path.name, descriptor)
        if file is None:
            if self.are_expected:
                raise _core.FormatError(
                    f"{shown(path)}: the file does not end with a footer, as all files of this save do: it is cut, or "
                    "of another save"
                )
            return None
        shared = sharing_save(path.name)
        if shared is None:
            self.save_id = self.save_id or file.save_id or b""
        if file.save_id != (self.save_id if shared is None else bytes.fromhex(shared)):
            raise _core.FormatError(f"{shown(path)}: the file belongs to another save")
        return file
