"""Where in map-style data a job is, and what a state keeps of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

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

    @property
    def num_left(self) -> int:
        """Samples still to come until the end of the epoch."""
        return self.num_samples - self.next_sample

    def after(self, global_batch_size: int) -> SamplePosition:
        """The position when the next global batch was served."""
        end = min(self.next_sample + global_batch_size, self.num_samples)
        served = end - self.next_sample
        return replace(
            self,
            next_sample=end,
            samples_seen=self.samples_seen + served,
            padded=self.padded + global_batch_size - served,
        )

    def next_epoch(self) -> SamplePosition:
        """The position when what is left of the epoch's order was dropped."""
        return replace(self, epoch=self.epoch + 1, next_sample=0, dropped=self.dropped + self.num_left)


def to_common(position: SamplePosition, *, global_batch_size: int, dp_size: int) -> dict[str, Any]:
    """The entry that is equal on all ranks."""
    version = 1 if position.order == "randperm" else 2
    common = {"version": version, "kind": KIND, "global_batch_size": global_batch_size}
    return {**common, **asdict(position), "dp_size": dp_size}


def from_entries(saved: Mapping[str, Any]) -> tuple[SamplePosition, Mapping[str, Any]]:
    """The position, and the common entry.

    Raises:
        CannotReshardError: The entry is missing or of another kind, or samples were in flight.
    """
    common = common_entry(saved, KIND)
    known = {field.name: common[field.name] for field in fields(SamplePosition) if field.name in common}
    if known.get("order", "randperm") not in ORDERS:
        raise CannotReshardError(
            f"the checkpoint's epochs are in the order {known['order']!r}, this package knows {', '.join(ORDERS)}",
            "load it with the version of torchtitan_ext that saved it, or a later one",
        )
    return SamplePosition(**known), common


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
    _refuse_in_flight(saved, common)
    return common


def _refuse_in_flight(saved: Mapping[str, Any], common: Mapping[str, Any]) -> None:
    """States of version 2 may have samples that were handed out and not trained, which were to be given again."""
    ranks = range(common.get("in_flight_of", 0))
    keys = [f"in_flight_{rank}_of_{len(ranks)}" for rank in ranks]
    entries = [value[0] for value in saved.values() if isinstance(value, tuple) and value]
    in_flight = [common.get("again", ()), *(saved[key][0] for key in keys if key in saved)]
    in_flight += [entry.get("in_flight", ()) for entry in entries if isinstance(entry, Mapping)]
    missing = [key for key in keys if key not in saved]
    if missing:
        raise CannotReshardError(
            f"samples may be in flight on {len(keys)} data-parallel ranks, and this state has no {missing[0]}",
            "load with tte.load(..., policy=ElasticPolicy()), which gives the loader the entries of all ranks",
        )
    if any(in_flight):
        raise CannotReshardError(
            f"the checkpoint's data loader has {sum(map(len, in_flight))} samples in flight, handed out and not yet "
            "trained, and this package gives no sample again: they would be lost",
            "load it with torchtitan_ext 0.2, acknowledge all samples and save again, or reset the data loader",
        )
