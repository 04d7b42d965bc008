"""The runs of a rank in safetensors files, by system calls alone: the limit for weights that ranks write together.

All ranks write into one file, each the runs of its parts; a run is what is contiguous in the file. Runs that are short
are read in two ways: a call each, or all rows at once, of which the wanted part is copied.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from raw_files import MAX_PIECES, PAGE_BYTES, Bytes, transfer
from storage_states import COLUMNS, ROWS

HEADER_BYTES = PAGE_BYTES
# A call per run costs what so many bytes more of reading do: below it, whole rows win.
WINDOW_BYTES = 4 << 20


class Runs:
    """Where the parts of a rank lie in one file.

    Args:
        parts: This rank's part of each tensor, whole rows or the same columns of each row.
        begins: The byte of the file at which each tensor begins; by default one after the other.
    """

    def __init__(
        self, parts: dict[str, torch.Tensor], dim: int, rank: int, world_size: int, begins: dict[str, int] | None = None
    ) -> None:
        self.dim = dim
        self.rank = rank
        self.world_size = world_size
        self.parts = {name: part.view(torch.uint8).numpy() for name, part in parts.items()}
        self.num_bytes = sum(part.nbytes for part in self.parts.values()) * world_size
        ends = np.cumsum([part.nbytes * world_size for part in self.parts.values()])
        after = dict(zip(self.parts, (HEADER_BYTES + ends).tolist(), strict=True))
        self.begins = begins or {name: end - self.parts[name].nbytes * world_size for name, end in after.items()}

    def make_file(self, path: Path) -> None:
        with path.open("wb") as file:
            file.truncate(HEADER_BYTES + self.num_bytes)

    def runs(self) -> Iterator[tuple[int, list[Bytes]]]:
        """The byte of the file, and the pieces of memory that follow each other there."""
        for name, part in self.parts.items():
            begin = self.begins[name]
            if self.dim == ROWS:
                yield begin + self.rank * part.nbytes, [part.reshape(-1)]
                continue
            run_bytes = part.shape[1]
            for row in range(part.shape[0]):
                yield begin + (row * self.world_size + self.rank) * run_bytes, [part[row]]

    def write(self, path: Path, *, sync: bool) -> None:
        descriptor = os.open(path, os.O_WRONLY)
        for offset, pieces in self.joined():
            transfer(os.pwritev, descriptor, pieces, offset)
        if sync:
            os.fsync(descriptor)
        os.close(descriptor)

    def read(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY)
        for offset, pieces in self.joined():
            transfer(os.preadv, descriptor, pieces, offset)
        os.close(descriptor)

    def read_windows(self, path: Path) -> None:
        """Columns from whole rows, so many at once that they fit into the cache of a processor."""
        assert self.dim == COLUMNS
        descriptor = os.open(path, os.O_RDONLY)
        for name, part in self.parts.items():
            num_rows, run_bytes = part.shape
            row_bytes = run_bytes * self.world_size
            step = max(1, WINDOW_BYTES // row_bytes)
            window = np.empty((step, self.world_size, run_bytes), np.uint8)
            for row in range(0, num_rows, step):
                count = min(step, num_rows - row)
                rows = window[:count]
                transfer(os.preadv, descriptor, [rows.reshape(-1)], self.begins[name] + row * row_bytes)
                part[row : row + count] = rows[:, self.rank]
        os.close(descriptor)

    def joined(self) -> Iterator[tuple[int, list[Bytes]]]:
        """Runs that follow each other in the file, by one call."""
        offset, pieces, end = 0, list[Bytes](), -1
        for begin, more in self.runs():
            if begin != end or len(pieces) + len(more) > MAX_PIECES:
                if pieces:
                    yield offset, pieces
                offset, pieces = begin, []
            pieces += more
            end = begin + sum(piece.nbytes for piece in more)
        if pieces:
            yield offset, pieces


def begins_in(path: Path) -> dict[str, int]:
    """The byte of a safetensors file at which each tensor begins."""
    with path.open("rb") as file:
        num_bytes = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(num_bytes))
    return {name: 8 + num_bytes + one["data_offsets"][0] for name, one in header.items() if name != "__metadata__"}
