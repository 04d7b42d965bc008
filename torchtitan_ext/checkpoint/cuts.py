"""Whether the boxes of a plan can be cut out of wrapper subclasses, asked before anything is written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torchtitan_ext.checkpoint.key_table import KeyTable, TensorEntry
from torchtitan_ext.checkpoint.read_items import wanted_chunks
from torchtitan_ext.checkpoint.saved_chunks import ChunkList
from torchtitan_ext.errors import Problem
from torchtitan_ext.layout.dtensor import local_tensor
from torchtitan_ext.layout.layout import Steps, candidate_steps, shard_of
from torchtitan_ext.layout.wrapper import Box, why_not_cut


def unwritable_cuts(values: Mapping[str, Any], table: KeyTable) -> list[Problem]:
    """Wrappers of which this rank would save boxes that the subclass cannot cut."""

    def saved(fqn: str, entry: TensorEntry, steps: Steps) -> list[Box]:
        return [(chunk.local_offsets, chunk.sizes) for chunk in shard_of(entry.report, steps).chunks]

    return _cut_problems(values, table, saved, is_written=False)


def unfillable_cuts(values: Mapping[str, Any], table: KeyTable, chunks_of: Callable[[str], ChunkList]) -> list[Problem]:
    """Wrappers of which saved chunks fill boxes that the subclass cannot cut.

    Args:
        values: The flat state dict.
        chunks_of: What is saved of a key.
    """

    def filled(fqn: str, entry: TensorEntry, steps: Steps) -> list[Box]:
        parts = chunks_of(fqn).find_parts(wanted_chunks(entry, steps))
        return [(local_offsets, sizes) for _, _, local_offsets, _, _, _, sizes in parts]

    return _cut_problems(values, table, filled, is_written=True)


def _cut_problems(
    values: Mapping[str, Any],
    table: KeyTable,
    boxes: Callable[[str, TensorEntry, Steps], list[Box]],
    *,
    is_written: bool,
) -> list[Problem]:
    """Wrappers whose boxes cannot be cut in any order of sharding that this rank's local sizes leave open."""
    problems = []
    for fqn in table.wrappers:
        entry = table.entries.get(fqn)
        if not isinstance(entry, TensorEntry):
            continue
        local = local_tensor(values[fqn])
        possible = [
            steps
            for steps in candidate_steps(entry.report)
            if entry.report.mesh is None or tuple(shard_of(entry.report, steps).sizes) == entry.report.local_sizes
        ]
        reasons = [why_not_cut(local, boxes(fqn, entry, steps), is_written=is_written) for steps in possible]
        refused = [reason for reason in reasons if reason is not None]
        if refused and len(refused) == len(possible):
            problems.append(Problem("unsupported_tensor", fqn, refused[0]))
    return problems
