"""What a look at a checkpoint has found. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from torchtitan_ext.storage.formats import Format


class Damage(NamedTuple):
    """One thing that is wrong.

    Attributes:
        file: Relative to the checkpoint; of a checkpoint that is one file, its name.
        what: A sentence with the path and, where that can be told, the tensors and rows concerned.
    """

    file: str
    what: str


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
