"""Ranks that load together verify each block of the files once: blocks that none of them verified are dealt out."""

from __future__ import annotations

from collections.abc import Sequence

from torchtitan_ext import _core
from torchtitan_ext.checkpoint.operation.phases import Phases
from torchtitan_ext.storage import FileReader


def verify_blocks(readers: Sequence[FileReader], phases: Phases) -> None:
    """Verifies the blocks that ranks have touched and none has verified; each is read by one rank. Collective.

    Args:
        readers: One per checkpoint, in the same order on all ranks.

    Raises:
        CheckpointFailedError: Blocks do not match their checksums, or cannot be read; names rank, file and tensors.
    """

    def deal(ledgers: list[list[bytes]]) -> list[list[list[_core.BlockRange]]]:
        of_readers = [_core.deal_blocks(of_ranks) for of_ranks in zip(*ledgers, strict=True)]
        return [list(of_rank) for of_rank in zip(*of_readers, strict=True)]

    def verify() -> None:
        for reader, blocks in zip(readers, parts, strict=True):
            reader.verify_blocks(blocks)

    parts = phases.through_coordinator("verify", lambda: [reader.describe_blocks() for reader in readers], deal)
    phases.on_all("verify", verify)
