"""What a look at a checkpoint has found. Imports no torch."""

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

- ``lost``: it is not there; ``no_file``: a directory or a pipe is; ``size``: it is cut, or longer than it was;
- ``footer``: its end is damaged, or of another save; ``checksum``: bytes of it are not what was written;
- ``record``: a record, or the archive of ``torch.save``, is damaged, or of another tensor; ``header``: of safetensors;
- ``metadata``, ``index``: it is damaged, or names what is not there; ``chunks``: those of a tensor do not make it up;
- ``unreadable``: the system does not let it be read, so that nobody knows.
"""


class Damage(NamedTuple):
    """One thing that is wrong.

    Attributes:
        file: Relative to the checkpoint; of a checkpoint that is one file, its name.
        what: A sentence with the path and, where that can be told, the tensors and rows concerned.
    """

    file: str
    what: str
    kind: DamageKind


# Whatever the name is of, there can be no file of it; what else the system says does not tell whether one is damaged.
_LOST = {errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP}


def damage_of_error(file: str, path: Path, error: OSError) -> Damage:
    """What an error of the system says of a file: that it is not there, or cannot be read."""
    if error.errno in _LOST:
        return Damage(file, f"{path}: {error.strerror}", "lost")
    return Damage(file, f"{path} cannot be read: {error.strerror}", "unreadable")


@dataclass(frozen=True)
class Verdict:
    """Whether a checkpoint is whole.

    Attributes:
        is_deep: Whether its bytes were read; else only sizes, ids and what the metadata says.
        damages: Everything that was found, in the order of the files.
        num_files: How many data files there should be.
        num_bytes: Of those that are there.
        unproved: Files of which some bytes have no checksum, so that nobody can say whether they are as they were
            written; known after a deep look only.
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
        """Whether something is surely wrong. What cannot be read may be as it was."""
        return any(damage.kind != "unreadable" for damage in self.damages)
