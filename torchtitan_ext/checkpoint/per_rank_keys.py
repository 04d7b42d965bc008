"""Entries that each rank keeps for itself, such as ``dataloader.dp_rank_7``: they have no place in another world."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Collection, Sequence

from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from torchtitan_ext.errors import Problem, Remedy

# A component such as dp_rank_7 or rank_7: an entry that each rank keeps for itself. Not layers.7.
PER_RANK = re.compile(r"((?:^|\.)(?:[^.]*_)?rank_?)\d+(?=\.|$)")


def unclaimed_problems(
    wanted: Collection[str], num_ranks: int, metadata: Metadata, allowed: Sequence[str]
) -> list[Problem]:
    """Entries that each rank keeps for itself, of which this load would silently drop some.

    Args:
        wanted: Entries that some of the ranks ask for.
    """
    families: dict[str, list[str]] = {}
    for fqn, saved in metadata.state_dict_metadata.items():
        if isinstance(saved, BytesStorageMetadata) and (family := family_of(fqn)) != fqn:
            families.setdefault(family, []).append(fqn)
    problems = []
    for family, members in families.items():
        unclaimed = [fqn for fqn in members if fqn not in wanted]
        unclaimed = [fqn for fqn in unclaimed if not any(fnmatch.fnmatchcase(fqn, glob) for glob in allowed)]
        if unclaimed and len(unclaimed) < len(members) and any(fqn in wanted for fqn in members):
            problems.append(
                Problem(
                    "unclaimed_keys",
                    family,
                    f"the checkpoint has {len(members)} of these, the {num_ranks} rank(s) of this load ask for "
                    f"{sum(fqn in wanted for fqn in members)}; {unclaimed[0]} would be dropped; load on as many "
                    "ranks as saved",
                    f", {how_to_divide(family)}, or pass LoadPlanner(allow_unclaimed=[{family!r}])",
                    Remedy("reshard", len(members)),
                )
            )
    return problems


def how_to_divide(family: str) -> str:
    """What carries entries of old ranks to other ranks; torchtitan's data loader has them as ``dp_rank_*``."""
    known = ", or read torchtitan's text data with ElasticDataLoader and TorchtitanTextStreams"
    return "give the component a method reshard" + (known if "dp_rank_*" in family else "")


def family_of(fqn: str) -> str:
    """The key with ``*`` for each rank: equal for what all ranks keep under one name, itself for other keys."""
    return PER_RANK.sub(r"\1*", fqn) if "rank" in fqn else fqn
