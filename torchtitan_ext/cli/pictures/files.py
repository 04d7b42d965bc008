"""Ranks by the names of their files: ``__3_0.distcp`` is of rank 3. Pure, and without torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from torchtitan_ext.cli.pictures.holders import Box, Holder

# No cluster has more ranks: a longer number in the name of a foreign file is none.
_OF_RANK = re.compile(r"__(\d{1,7})_")


def rank_of_file(name: str) -> int | None:
    """The rank that wrote a file of a DCP checkpoint; ``None`` of a file of another name."""
    match = _OF_RANK.match(name.rpartition("/")[2])
    return None if match is None else int(match[1])


def holders_of(boxes: Iterable[tuple[str, Box]]) -> tuple[list[Holder], str]:
    """Who holds what, from boxes with the files that they lie in, and what they are: ``"rank"`` or ``"file"``.

    Files that do not say their rank are counted in the order of their names.
    """
    by_file: dict[str, list[Box]] = {}
    for name, box in boxes:
        by_file.setdefault(name, []).append(box)
    ranks = {name: rank_of_file(name) for name in by_file}
    if None in ranks.values():
        return [Holder(place, tuple(by_file[name])) for place, name in enumerate(sorted(by_file))], "file"
    by_rank: dict[int, list[Box]] = {}
    for name, rank in ranks.items():
        by_rank.setdefault(rank or 0, []).extend(by_file[name])
    return [Holder(rank, tuple(by_rank[rank])) for rank in sorted(by_rank)], "rank"


def bytes_of_ranks(file_bytes: Mapping[str, int]) -> list[int]:
    """How much each rank wrote, 0 for those that wrote nothing; of files that do not say their rank one by one."""
    ranks = {name: rank_of_file(name) for name in file_bytes}
    known = [rank for rank in ranks.values() if rank is not None]
    if len(known) < len(ranks):
        return [file_bytes[name] for name in sorted(file_bytes)]
    totals = [0] * (max(known, default=-1) + 1)
    for name, rank in ranks.items():
        totals[rank or 0] += file_bytes[name]
    return totals
