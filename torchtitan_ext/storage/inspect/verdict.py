"""The result of verifying a checkpoint. Imports no torch."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from torchtitan_ext.storage.formats.detect import Format

DamageKind = Literal[
    "lost", "no_file", "size", "footer", "checksum", "record", "header", "metadata", "chunks", "index", "unreadable"
]
"""What is wrong with a file:

- ``lost``: the file is missing; ``no_file``: it is a directory or a pipe; ``size``: it is cut, or longer than before;
- ``footer``: its end is damaged, or of another save; ``checksum``: bytes differ from those that were written;
- ``record``: a record or an archive of ``torch.save`` is damaged, or holds another tensor;
- ``header``: the header of a safetensors file is damaged;
- ``metadata``, ``index``: it is damaged, or names something that is not there;
- ``chunks``: the chunks of a tensor do not hold every element once;
- ``unreadable``: the system does not let the file be read: it may be whole.
"""


class Damage(NamedTuple):
    """One damage.

    Attributes:
        file: Path relative to the checkpoint; the name if the checkpoint is one file.
        what: A sentence with the path and, if known, the tensors and rows concerned.
    """

    file: str
    what: str
    kind: DamageKind


# Errors that say that there is no such file; after any other error the file may be whole.
_LOST = {errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP}


def damage_of_error(file: str, path: Path, error: OSError) -> Damage:
    """The damage that an error of the system means: the file is missing, or cannot be read."""
    if error.errno in _LOST:
        return Damage(file, f"{path}: {error.strerror}", "lost")
    return Damage(file, f"{path} cannot be read: {error.strerror}", "unreadable")


@dataclass(frozen=True)
class Verdict:
    """Whether a checkpoint is whole.

    Attributes:
        is_deep: Whether all bytes were read; else only sizes, ids and metadata.
        damages: All damages, in the order of the files.
        num_files: How many data files there should be.
        num_bytes: Size of the data files that are there.
        unproved: Files in which some bytes have no checksum; empty unless ``is_deep``.
    """

    path: Path
    format: Format
    is_deep: bool
    damages: Sequence[Damage]
    num_files: int
    num_bytes: int
    unproved: Sequence[str] = ()

    @property
    def is_damaged(self) -> bool:
        """Whether something is surely wrong. A file that cannot be read may be whole."""
        return any(damage.kind != "unreadable" for damage in self.damages)
