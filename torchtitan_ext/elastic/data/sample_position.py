"""Where in map-style data a job is: what a state keeps of it, and the global batches that come next.

The samples still to come are ``again``, ids that an earlier job handed out and nobody trained, followed by the order
of the epoch from ``next_sample`` on; global batches are cut from that line. What is given again is never dropped: at
the end of an epoch it goes before the next one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from torchtitan_ext.elastic.data.frontier import NO_IDS, Ids
from torchtitan_ext.elastic.data.order import ORDERS
from torchtitan_ext.errors import CannotReshardError

STATE_KEY = "loader"
KIND = "samples"

# Version 2 has what a package that knows only version 1 would go on from wrongly.
VERSIONS = (1, 2)


@dataclass(frozen=True)
class SamplePosition:
    """Where in the data a job is: equal on all ranks, since all counts are of all ranks together.

    Attributes:
        num_samples: Samples of the data set.
        shuffle: Whether the order of an epoch is shuffled, by ``seed`` and the epoch.
        next_sample: Position in this epoch's order of the first sample that was not served.
        samples_seen: Samples served so far, over all epochs, without padding.
        dropped: Samples left out so far because they did not fill a global batch at the end of an epoch.
        padded: Samples served twice so far to fill one.
        order: The name of the random order; see ``order``.
        again: Ids of samples that come before the rest of the epoch. ``samples_seen`` does not count them.
    """

    num_samples: int
    shuffle: bool
    seed: int
    epoch: int = 0
    next_sample: int = 0
    samples_seen: int = 0
    dropped: int = 0
    padded: int = 0
    order: str = "randperm"
    again: Ids = field(default_factory=lambda: NO_IDS, compare=False)

    @property
    def num_left(self) -> int:
        """Samples still to come until the end of the epoch."""
        return len(self.again) + self.num_samples - self.next_sample

    def next_ids(self, places: Ids) -> Ids:
        """The ids of these places of the line; from ``num_left`` on they are padding, the beginning of the epoch."""
        ids: Ids = places + (self.next_sample - len(self.again))
        is_padding = ids >= self.num_samples
        if is_padding.any():
            ids[is_padding] %= self.num_samples
        ids += self.epoch * self.num_samples
        is_again = places < len(self.again)
        if is_again.any():
            ids[is_again] = self.again[places[is_again]]
        return ids

    def after(self, global_batch_size: int) -> SamplePosition:
        """The position when the next global batch was served."""
        num_again = min(len(self.again), global_batch_size)
        end = min(self.next_sample + global_batch_size - num_again, self.num_samples)
        served = num_again + end - self.next_sample
        return replace(
            self,
            next_sample=end,
            samples_seen=self.samples_seen + served,
            padded=self.padded + global_batch_size - served,
            again=self.again[num_again:],
        )

    def next_epoch(self) -> SamplePosition:
        """The position when what is left of the epoch's order was dropped."""
        left = self.num_samples - self.next_sample
        return replace(self, epoch=self.epoch + 1, next_sample=0, dropped=self.dropped + left)


def in_flight_key(dp_rank: int, dp_size: int) -> str:
    """The key of the entry with the samples that a rank has in flight: ``in_flight_3_of_8``."""
    return f"in_flight_{dp_rank}_of_{dp_size}"


def to_common(position: SamplePosition, *, global_batch_size: int, dp_size: int, has_in_flight: bool) -> dict[str, Any]:
    """The entry that is equal on all ranks. ``has_in_flight``: whether each rank has an entry of its own beside it."""
    known = {field_.name: getattr(position, field_.name) for field_ in fields(SamplePosition)}
    common = {"version": 1, "kind": KIND, "global_batch_size": global_batch_size, **known, "dp_size": dp_size}
    common["again"] = position.again.tolist()
    if has_in_flight:
        common["in_flight_of"] = dp_size
    old_fields = {"order": "randperm", "again": []}
    if has_in_flight or any(common[name] != value for name, value in old_fields.items()):
        common["version"] = VERSIONS[-1]
    return common


def from_entries(saved: Mapping[str, Any]) -> tuple[SamplePosition, Mapping[str, Any]]:
    """The position that goes on from the entries of all ranks, and the common entry.

    What was in flight was not trained: it is to be given again, and no longer counted as seen.

    Raises:
        CannotReshardError: Entries are missing, or do not fit each other.
    """
    common = common_entry(saved, KIND)
    known = {field_.name: common[field_.name] for field_ in fields(SamplePosition) if field_.name in common}
    if known.get("order", "randperm") not in ORDERS:
        raise CannotReshardError(
            f"the checkpoint's epochs are in the order {known['order']!r}, this package knows {', '.join(ORDERS)}",
            "load it with the version of torchtitan_ext that saved it, or a later one",
        )
    parts = [known.pop("again", []), *_in_flight(saved, common)]
    again = np.concatenate([np.array(part, np.int64) for part in parts])
    again.sort()
    position = SamplePosition(**known, again=again)
    if (again[1:] == again[:-1]).any() or (again.size and not 0 <= again[0] <= again[-1] < _next_id(position)):
        raise CannotReshardError(
            "the checkpoint's data loader entries do not fit each other: samples are in flight twice, or before they "
            "were handed out",
            "load all data loader entries of one checkpoint, or reset the data loader",
        )
    return replace(position, samples_seen=position.samples_seen - sum(map(len, parts[1:]))), common


def _next_id(position: SamplePosition) -> int:
    return position.epoch * position.num_samples + position.next_sample


def _in_flight(saved: Mapping[str, Any], common: Mapping[str, Any]) -> list[list[int]]:
    """What each of the ranks that saved had in flight."""
    keys = [in_flight_key(rank, common["in_flight_of"]) for rank in range(common.get("in_flight_of", 0))]
    missing = [key for key in keys if key not in saved]
    if missing:
        raise CannotReshardError(
            f"samples were in flight on {len(keys)} data-parallel ranks, and all ranks give them again together, but "
            f"this state has no {missing[0]}",
            "load with tte.load(..., policy=ElasticPolicy()), which gives the loader the entries of all ranks",
        )
    return [saved[key][0] for key in keys]


def common_entry(saved: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    """The entry that is equal on all ranks. Refuses a missing one, one of another kind of loader or version."""
    entry = saved.get(STATE_KEY)
    if not isinstance(entry, tuple) or not entry or not isinstance(entry[0], Mapping):
        keys = ", ".join(sorted(map(str, saved))[:3]) or "nothing"
        adopt = "read the data with tte.elastic.TorchtitanTextStreams, which adopts torchtitan's states, or "
        raise CannotReshardError(
            f"the checkpoint's data loader state is none of ElasticDataLoader's (it has {keys}, but no {STATE_KEY!r})",
            (adopt if "dp_rank_0" in saved else "") + "reset the data loader",
        )
    common: Mapping[str, Any] = entry[0]
    if common.get("kind") != kind:
        raise CannotReshardError(
            f"the checkpoint was saved over {common.get('kind')}, this loader reads {kind}",
            "use the same kind of data as the job that saved it, or reset the data loader",
        )
    if common.get("version") not in VERSIONS:
        raise CannotReshardError(
            f"the checkpoint's data loader state has version {common.get('version')}, this package reads up to "
            f"{VERSIONS[-1]}",
            "load it with the version of torchtitan_ext that saved it, or a later one",
        )
    return common
