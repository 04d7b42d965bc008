"""Sends what ranks write of a file to one rank, where many small writes of several ranks are slow or unsafe.

Ranks go through rounds together. In each of them a rank gives what it has queued: a table of runs (file, first byte,
bytes) and the bytes, for each other rank; ranks tell each other how much comes, exchange it, and write what they got.
The rounds end when no rank has more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import torch

from torchtitan_ext import _core, ops
from torchtitan_ext.ops.exchange import REFUSED

# What a rank queues per round, for all ranks together: with one writer at work it gets all of that.
ROUND_BYTES = 64 << 20

# With many ranks too: shorter rounds would only wait for each other.
_LEAST_BYTES = 1 << 20


class OtherRankFailedError(OSError):
    """Another rank failed, and says why itself."""


@dataclass(frozen=True)
class WriterRanks:
    """The ranks of a save, and how bytes get from one to the other.

    Attributes:
        group_name: Of a process group of these ranks, which no other thread uses, and which sends from host memory.
    """

    group_name: str
    rank: int
    size: int
    timeout_seconds: float


class OneWriterPerFile:
    """The rounds of one rank. Every rank makes one for the same number of files."""

    def __init__(self, ranks: WriterRanks, num_files: int) -> None:
        self._ranks = ranks
        # In equal distances, so that few files have writers on several hosts.
        self._rank_of_file = [number * ranks.size // num_files for number in range(num_files)]
        if num_files > ranks.size:
            self._rank_of_file = [number % ranks.size for number in range(num_files)]
        self.max_queued_bytes = max(_LEAST_BYTES, ROUND_BYTES // ranks.size)
        """How much a rank may queue before it calls ``round``."""
        self._is_over = False

    def writes(self, file: int) -> bool:
        """Whether this rank writes a file."""
        return self._rank_of_file[file] == self._ranks.rank

    def round(self, runs: _core.RunWriter, num_threads: int, *, starts_write_back: bool, is_last: bool) -> bool:
        """Sends what is queued, and writes what comes. Collective.

        Args:
            is_last: Whether this rank will queue nothing more.

        Returns:
            Whether all ranks are done.

        Raises:
            OtherRankFailedError: Another rank has called ``refuse``.
            OSError: A file cannot be written.
        """
        size = self._ranks.size
        packed = runs.pack(self._rank_of_file, size)
        sent_counts = torch.tensor([[*row, is_last] for row in packed.counts], dtype=torch.int64, device="cpu")
        counts = torch.empty_like(sent_counts)
        rows = [(peer, 0, 3 * peer, 3) for peer in range(size)]
        self._exchange([sent_counts.view(-1)], [counts.view(-1)], rows, rows)
        sent = [_memory(packed.runs, torch.int64), _memory(packed.data, torch.uint8)]
        num_runs, num_bytes = int(counts[:, 0].sum()), int(counts[:, 1].sum())
        received = [
            torch.empty(3 * num_runs, dtype=torch.int64, device="cpu"),
            torch.empty(num_bytes, dtype=torch.uint8, device="cpu"),
        ]
        self._exchange(sent, received, _rows_of(sent_counts), _rows_of(counts))
        self._is_over = bool(counts[:, 2].all())  # now: if the write fails nobody waits for this rank any more
        runs.add_packed(received[0].data_ptr(), num_runs, received[1].data_ptr(), num_bytes)
        runs.write(num_threads, starts_write_back)
        return self._is_over

    def refuse(self) -> None:
        """Lets the round fail on the other ranks, because this one has failed. Not after an error of an exchange."""
        if not self._is_over:
            self._is_over = True
            try:
                self._exchange([], [], [], [], digest=REFUSED)
            except OSError:
                pass

    def _exchange(
        self,
        sources: list[torch.Tensor],
        targets: list[torch.Tensor],
        sends: list[tuple[int, int, int, int]],
        receives: list[tuple[int, int, int, int]],
        *,
        digest: int = 0,
    ) -> None:
        try:
            ops.exchange_runs_(
                sources,
                targets,
                _table(sends),
                _table(receives),
                group_name=self._ranks.group_name,
                digest=digest,
                timeout_seconds=self._ranks.timeout_seconds,
            )
        except ValueError as error:
            self._is_over = True
            raise OtherRankFailedError(f"another rank failed: {error}") from None
        except BaseException:
            self._is_over = True
            raise


def _rows_of(counts: torch.Tensor) -> list[tuple[int, int, int, int]]:
    """Boxes (peer, tensor, first element, elements) of a table of runs and of their bytes, by the counts per peer."""
    rows = []
    first_run = first_byte = 0
    for peer, (num_runs, num_bytes, *_) in enumerate(counts.tolist()):
        if num_runs > 0:
            rows += [(peer, 0, 3 * first_run, 3 * num_runs), (peer, 1, first_byte, num_bytes)]
        first_run += num_runs
        first_byte += num_bytes
    return rows


def _table(rows: list[tuple[int, int, int, int]]) -> torch.Tensor:
    entries = [entry for peer, tensor, first, count in rows for entry in (peer, tensor, -1, 1, first, count)]
    return torch.tensor(entries, dtype=torch.int64, device="cpu")


def _memory(content: npt.NDArray[Any], dtype: torch.dtype) -> torch.Tensor:
    return torch.frombuffer(content, dtype=dtype) if len(content) else torch.empty(0, dtype=dtype, device="cpu")
