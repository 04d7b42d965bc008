"""Where a data loader stands, read from its state. Imports no torch.

The state is that of ``ElasticDataLoader``; in a checkpoint its entries have the keys ``dataloader.loader``,
``dataloader.shard_7_of_16`` and so on. ``ElasticDataLoader.describe`` and the command ``inspect`` read it here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

_COMMON = "loader"
_VERSIONS = (1, 2)
_SHARD = re.compile(r"shard_(\d{1,9})_of_(\d{1,9})$")


@dataclass(frozen=True)
class ShardPosition:
    """Where a virtual shard stands.

    Attributes:
        served: Samples that it has served in its epoch.
        total: Samples that it has served over all epochs.
        is_finished: Whether its epoch is read to the end.
        samples_left: Samples still to be given in its epoch, by the length of its last epoch; ``None`` where that was
            not read to its end: a stream does not say how long it is.
    """

    shard: int
    epoch: int
    served: int
    total: int
    is_finished: bool
    samples_left: int | None


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
        order: The name of the random order, or ``"none"`` in the order of the data; ``None`` for streams.
        seed: Seed of the order; ``None`` for streams.
        samples_left: Samples still to be given in the epoch; ``None`` where streams do not tell. Those that do not fill
            a last global batch count.
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
    samples_left: int | None = None
    num_shards: int = 0
    shards: tuple[ShardPosition, ...] = ()

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
        return _of_samples(common) if common["kind"] == "samples" else _of_streams(common, state)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"not the state of an ElasticDataLoader that is known ({error!r})") from None


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


def _of_samples(common: Mapping[str, Any]) -> DataPosition:
    num_samples, next_sample = _count(common, "num_samples"), _count(common, "next_sample")
    epoch = _count(common, "epoch")
    return replace(
        _of_all(common, epoch, epoch),
        num_samples=num_samples,
        next_sample=next_sample,
        order=str(common.get("order", "randperm")) if common["shuffle"] else "none",
        seed=_count(common, "seed", least=None),
        samples_left=max(0, num_samples - next_sample),
    )


def _of_streams(common: Mapping[str, Any], state: Mapping[str, Any]) -> DataPosition:
    num_shards = _count(common, "num_shards", least=1)
    shards = tuple(sorted(_shards_of(state, num_shards), key=lambda one: one.shard))
    epochs = [one.epoch for one in shards] or [0]
    known = [one.samples_left for one in shards if one.samples_left is not None]
    return replace(
        _of_all(common, min(epochs), max(epochs)),
        samples_left=sum(known) if len(known) == num_shards else None,
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
        epoch, total = _count(entry, "epoch"), _count(entry, "total")
        yield ShardPosition(int(match[1]), epoch, served, total, is_finished, left)


def _count(fields: Mapping[str, Any], name: str, least: int | None = 0) -> int:
    value = fields[name]
    if type(value) is not int or (least is not None and value < least):
        raise ValueError(f"{name} is {value!r}")
    return value
