"""Rank files of a checkpoint whose index is lost: their own footers tell what the index would. Imports no torch."""

from __future__ import annotations

from pathlib import Path

from torchtitan_ext import _core
from torchtitan_ext.storage.checkpoint_files import RankFile, is_save_id, shown


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

    def find(self, path: Path, descriptor: int) -> RankFile | None:
        """What an index would say of a file, but for its records; ``None`` where the file is another writer's.

        Raises:
            FormatError: The footer is damaged or missing, or of another save than ``.metadata`` or an earlier file.
            OSError: The file cannot be read.
        """
        found = _core.find_footer(shown(path), descriptor)
        if found is None:
            if self.are_expected:
                raise _core.FormatError(
                    f"{shown(path)}: the file does not end with a footer, as all files of this save do: it is cut, or "
                    "of another save"
                )
            return None
        rank, num_bytes, offset, digest, save_id = found
        self.save_id = self.save_id or save_id
        if save_id != self.save_id:
            raise _core.FormatError(f"{shown(path)}: the file belongs to another save")
        return RankFile(path.name, rank, num_bytes, offset, digest, b"")
