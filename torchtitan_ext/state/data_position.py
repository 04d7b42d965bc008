"""Where a data loader stands, read from its state, and what another number of ranks would do. Imports no torch.

The state is that of ``ElasticDataLoader``; in a checkpoint its entries have the keys ``dataloader.loader``,
``dataloader.shard_7_of_16`` and so on. ``ElasticDataLoader.describe`` and the commands ``inspect`` and ``plan`` read it
here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

_COMMON = "loader"
_VERSIONS = (1, 2)
_IN_FLIGHT = re.compile(r"in_flight_\d{1,9}_of_\d{1,9}$")
_SHARD = re.compile(r"shard_(\d{1,9})_of_(\d{1,9})$")


@dataclass(frozen=True)
class ShardPosition:
    """Where a virtual shard stands.

    Attributes:
        served: Samples that it has served in its epoch.
        total: Samples that it has served over all epochs.
        is_finished: Whether its epoch is read to the end.
        in_flight: Samples that were handed out and not acknowledged, or are to be given again: a load gives them again.
        samples_left: Samples still to be given in its epoch, those included, by the length of its last epoch; ``None``
            where that was not read to its end: a stream does not say how long it is.
    """

    shard: int
    epoch: int
    served: int
    total: int
    is_finished: bool
    in_flight: int
    samples_left: int | None


@dataclass(frozen=True)
class RankChange:
    """What a load by another number of data-parallel ranks does, with global batches of the saved size.

    Attributes:
        samples_per_rank: Least and most samples of a rank in a global batch.
        shards_per_rank: Least and most virtual shards of a rank; zeros for map-style data.
        num_moved: Virtual shards that get another owner.
        keeps_batches: Whether the global batches are the sets of samples that the ranks that saved would have had; of
            streams until the first shard ends. Otherwise, too, each sample is served once.
        problem: Why the load would be refused; ``None`` where it would not.
    """

    old_dp_size: int
    dp_size: int
    samples_per_rank: tuple[int, int]
    shards_per_rank: tuple[int, int]
    num_moved: int
    keeps_batches: bool
    problem: str | None

    def __str__(self) -> str:
        ranks = f"data-parallel ranks {self.old_dp_size} -> {self.dp_size}"
        if self.problem is not None:
            return f"{ranks}: {self.problem}"
        least, most = self.samples_per_rank
        option = "" if least == most else " (which takes uneven=True)"
        parts = [f"{ranks}: {_span(self.samples_per_rank, 'sample')} a rank in each global batch{option}"]
        if self.shards_per_rank[1]:
            shards = _span(self.shards_per_rank, "virtual shard")
            parts.append(f"{shards} a rank, {self.num_moved:,} with another owner")
        sets = "the same sets of samples" if self.keeps_batches else "other sets, each sample once"
        return ", ".join([*parts, f"global batches are {sets}"])


@dataclass(frozen=True)
class DataPosition:
    """Where a data loader stands. ``str`` of it is one line.

    Attributes:
        kind: ``"samples"`` of a map-style data set, or ``"streams"``.
        dp_size: Data-parallel ranks that saved it.
        global_batch_size: Samples of all ranks together in a step.
        first_epoch, last_epoch: The epochs that its shards are in; equal unless they are endless streams.
        samples_seen, dropped, padded: Samples of all ranks together, over all epochs; see ``ElasticDataLoader``.
        num_samples, next_sample: Of map-style data, the size of the data set and the place in the epoch's order; else
            ``None``.
        order: How the epoch is ordered: ``"randperm"``, or ``"none"`` in the order of the data; ``None`` for streams.
        seed: Seed of the order; ``None`` for streams.
        in_flight: Samples that were handed out and not acknowledged, as far as the entries of their ranks or shards are
            there: a load gives them again.
        again: Samples of an earlier job that are still to be given again.
        samples_left: Samples still to be given in the epoch, those included; ``None`` where streams do not tell. Those
            that do not fill a last global batch count.
        num_shards: Virtual shards; 0 for map-style data.
        shards: Those whose entries are there, in order: a rank's own state has those that the rank owns.
    """

    kind: str
    dp_size: int
    global_batch_size: int
    first_epoch: int
    last_epoch: int
    samples_seen: int
    dropped: int
    padded: int
    num_samples: int | None = None
    next_sample: int | None = None
    order: str | None = None
    seed: int | None = None
    in_flight: int = 0
    again: int = 0
    samples_left: int | None = None
    num_shards: int = 0
    shards: tuple[ShardPosition, ...] = ()

    def on(self, dp_size: int) -> RankChange:
        """What a load by this number of data-parallel ranks would do.

        Raises:
            ValueError: The number is less than 1.
        """
        if dp_size < 1:
            raise ValueError(f"DataPosition: got dp_size={dp_size}, expected at least 1")
        problem = None
        if self.num_shards and dp_size > self.num_shards:
            problem = f"refused, {self.num_shards} virtual shards cannot feed {dp_size} ranks"
        elif dp_size > self.global_batch_size:
            problem = f"refused, unless the global batch of {self.global_batch_size} becomes larger"
        sizes = (self.num_shards, self.global_batch_size) if self.num_shards else ()
        keeps = not any(size % ranks for size in sizes for ranks in (self.dp_size, dp_size))
        # Shard v stays where v % old == v % new: of each lcm(old, new) shards the first min(old, new).
        periods, rest = divmod(self.num_shards, math.lcm(self.dp_size, dp_size))
        fewer = min(self.dp_size, dp_size)
        moved = self.num_shards - periods * fewer - min(rest, fewer)
        shares = _shares(self.global_batch_size, dp_size), _shares(self.num_shards, dp_size)
        return RankChange(self.dp_size, dp_size, *shares, moved, keeps, problem)

    def to_dict(self) -> dict[str, Any]:
        """The position as plain values."""
        return asdict(self)

    def __str__(self) -> str:
        one = self.first_epoch == self.last_epoch
        parts = [f"epoch {self.first_epoch}" if one else f"epochs {self.first_epoch} to {self.last_epoch}"]
        if self.num_samples is not None:
            parts.append(f"sample {self.next_sample:,} of {self.num_samples:,}")
            parts.append("order of the data" if self.order == "none" else f"order {self.order} of seed {self.seed}")
        if self.num_shards:
            parts.append(f"{self.num_shards:,} virtual shards")
        if self.samples_left is not None:
            parts.append(f"{self.samples_left:,} left")
        if self.in_flight or self.again:
            parts.append(f"{self.in_flight + self.again:,} of them to be given again")
        counts = f"{self.samples_seen:,} seen, {self.dropped:,} dropped, {self.padded:,} padded"
        ranks = f"{self.dp_size} data-parallel rank{'s' if self.dp_size > 1 else ''}"
        return f"{', '.join(parts)}; {counts}; saved by {ranks}, global batches of {self.global_batch_size:,}"


def read_data_position(state: Mapping[str, Any]) -> DataPosition:
    """Reads the state of an ``ElasticDataLoader``: of one rank, or of all ranks merged by key.

    Raises:
        ValueError: It is the state of something else, of a version that is not known, or damaged.
    """
    try:
        (common,) = state[_COMMON]
        if common["version"] not in _VERSIONS or common["kind"] not in ("samples", "streams"):
            raise ValueError(f"its version is {common['version']!r} and its kind {common['kind']!r}")
        position = (_of_samples if common["kind"] == "samples" else _of_streams)(common, state)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"not the state of an ElasticDataLoader that is known ({error!r})") from None
    return position


def loaders_among(fqns: Sequence[str]) -> dict[str, list[str]]:
    """The data loaders that a checkpoint may have: the keys of each one's entries, by what these keys begin with.

    Args:
        fqns: The keys that are no tensors.
    """
    found: dict[str, list[str]] = {
        fqn.removesuffix(_COMMON): [] for fqn in fqns if fqn == _COMMON or fqn.endswith(f".{_COMMON}")
    }
    for fqn in fqns if found else ():
        prefix, dot, _ = fqn.rpartition(".")
        if prefix + dot in found:
            found[prefix + dot].append(fqn)
    return found


def _of_samples(common: Mapping[str, Any], state: Mapping[str, Any]) -> DataPosition:
    num_samples, next_sample = _count(common, "num_samples"), _count(common, "next_sample")
    epoch, again = _count(common, "epoch"), len(common.get("again", ()))
    in_flight = sum(len(state[key][0]) for key in state if _IN_FLIGHT.match(key))
    return replace(
        _of_all(common, epoch, epoch),
        num_samples=num_samples,
        next_sample=next_sample,
        order=str(common.get("order", "randperm")) if common["shuffle"] else "none",
        seed=_count(common, "seed", least=None),
        in_flight=in_flight,
        again=again,
        samples_left=max(0, num_samples - next_sample) + again + in_flight,
    )


def _of_streams(common: Mapping[str, Any], state: Mapping[str, Any]) -> DataPosition:
    num_shards = _count(common, "num_shards", least=1)
    shards = tuple(sorted(_shards_of(state, num_shards), key=lambda one: one.shard))
    epochs = [one.epoch for one in shards] or [0]
    left = [one.samples_left for one in shards]
    known = [count for count in left if count is not None]
    is_known = len(known) == num_shards
    in_flight = sum(one.in_flight for one in shards)
    return replace(
        _of_all(common, min(epochs), max(epochs)),
        in_flight=in_flight,
        samples_left=sum(known) if is_known else None,
        num_shards=num_shards,
        shards=shards,
    )


def _of_all(common: Mapping[str, Any], first_epoch: int, last_epoch: int) -> DataPosition:
    dp_size, batch_size = _count(common, "dp_size", least=1), _count(common, "global_batch_size", least=1)
    seen, dropped, padded = (_count(common, name) for name in ("samples_seen", "dropped", "padded"))
    return DataPosition(common["kind"], dp_size, batch_size, first_epoch, last_epoch, seen, dropped, padded)


def _shards_of(state: Mapping[str, Any], num_shards: int) -> Iterator[ShardPosition]:
    for key, value in state.items():
        match = _SHARD.match(key)
        if match is None or int(match[2]) != num_shards or int(match[1]) >= num_shards:
            continue
        (entry,) = value
        served, last, is_finished = _count(entry, "taken"), entry["last_epoch"], bool(entry["finished"])
        left = 0 if is_finished else None
        if last is not None and last["read_to_end"] and not is_finished:
            left = max(0, _count(last, "served") - served)
        epoch, total, in_flight = _count(entry, "epoch"), _count(entry, "total"), len(entry.get("in_flight", ()))
        left = None if left is None else left + in_flight
        yield ShardPosition(int(match[1]), epoch, served, total, is_finished, in_flight, left)


def _count(fields: Mapping[str, Any], name: str, least: int | None = 0) -> int:
    value = fields[name]
    if type(value) is not int or (least is not None and value < least):
        raise ValueError(f"{name} is {value!r}")
    return value


def _shares(count: int, dp_size: int) -> tuple[int, int]:
    """The least and the most of ``count`` that a rank has."""
    return count // dp_size, -(-count // dp_size)


def _span(least_and_most: tuple[int, int], noun: str) -> str:
    least, most = least_and_most
    return f"{'' if least == most else f'{least:,} to '}{most:,} {noun}{'' if most == 1 else 's'}"
