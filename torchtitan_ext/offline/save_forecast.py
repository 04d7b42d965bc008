"""What each rank would write: by the planner that saves, and the sizes of the files that ``FileWriter`` makes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan

from torchtitan_ext import _core
from torchtitan_ext.checkpoint.key_table import ObjectEntry, TensorEntry
from torchtitan_ext.checkpoint.save_planner import SavePlanner
from torchtitan_ext.checkpoint.write_items import written_chunks
from torchtitan_ext.errors import Problem, StateRefusedError
from torchtitan_ext.layout.layout import num_elements
from torchtitan_ext.offline.alike_ranks import AlikeRanks
from torchtitan_ext.offline.amounts import Bandwidth
from torchtitan_ext.storage.file_writer import BATCH_BYTES, BLOCK_BYTES
from torchtitan_ext.storage.raw_tensor import ELEMENT_TYPES, STAGING_BYTES
from torchtitan_ext.storage.threads import MAX_THREADS


@dataclass(frozen=True)
class RankSave:
    """What one rank would write.

    Attributes:
        state_bytes: Of its tensors: what it holds, whoever writes it.
        num_records: Tensor chunks and values that it writes.
        num_bytes: Of these, without what stands around them.
        file_bytes: Of its file, which has frames and checksums beside; 0 where it writes none.
        buffer_bytes: At most, in the memory of the host, beside the state: what is copied off a GPU, or pickled.
    """

    rank: int
    state_bytes: int
    num_records: int
    num_bytes: int
    file_bytes: int
    buffer_bytes: int


@dataclass(frozen=True)
class SaveForecast:
    """What a save would do.

    Attributes:
        ranks: One each; where the save is refused, with nothing written.
        num_bytes: All ranks together.
        num_files: Of ranks; the metadata and the index come on top.
        num_parts: Entries of the metadata: chunks of tensors, and values.
        seconds: Until the slowest rank has written its file, at the given bandwidth.
        problems: Why it would be refused; none where it would not.
    """

    ranks: tuple[RankSave, ...]
    num_bytes: int
    num_files: int
    num_parts: int
    seconds: float | None
    problems: tuple[Problem, ...]


@dataclass(frozen=True)
class SavingRanks:
    """Ranks that hold alike, and the sizes of their values as they are written."""

    ranks: AlikeRanks
    value_bytes: Mapping[str, int]


def forecast_save(groups: Sequence[SavingRanks], planner: SavePlanner, bandwidth: Bandwidth) -> SaveForecast:
    """What a save of all ranks would do.

    Args:
        groups: Together ranks 0, 1, ... of the job.
        planner: With the options of the save.
    """
    encoded = {rank: group.ranks.encoded(rank) for group in groups for rank in group.ranks.ranks}
    plans = [SavePlan([], planner_data=encoded[rank].message) for rank in sorted(encoded)]
    problems = [problem for group in groups for problem in group.ranks.problems]
    decisions: list[bytes] = []
    num_parts = 0
    planner.is_coordinator = True
    try:
        answers, metadata = planner.create_global_plan(plans)
    except StateRefusedError as error:
        problems += error.problems
    else:
        decisions = [answer.planner_data.writes for answer in answers]
        saved = metadata.state_dict_metadata.values()
        num_parts = sum(len(one.chunks) if isinstance(one, TensorStorageMetadata) else 1 for one in saved)
    file_bytes: dict[Any, int] = {}
    ranks: list[RankSave] = []
    for group in groups:
        for rank, state_bytes in zip(group.ranks.ranks, group.ranks.state_bytes(), strict=True):
            writes = _writes_of(decisions[rank], group, rank, encoded[rank]) if decisions else []
            ranks.append(_rank_save(rank, state_bytes, writes, file_bytes))
    ranks.sort(key=lambda one: one.rank)
    return SaveForecast(
        tuple(ranks),
        sum(one.num_bytes for one in ranks),
        sum(one.file_bytes > 0 for one in ranks),
        num_parts,
        bandwidth.seconds([one.file_bytes for one in ranks]),
        tuple(dict.fromkeys(problems)),
    )


@dataclass(frozen=True)
class _Writes:
    """Keys that a rank writes alike.

    Attributes:
        places: Section and positions of the keys in the rank's table.
        dtype: None of values.
        sizes: Of each chunk; of values none.
        num_bytes: Of all chunks of one key, or of a value.
    """

    places: tuple[int, tuple[int, ...]]
    dtype: Any
    sizes: tuple[tuple[int, ...], ...]
    num_bytes: int


def _writes_of(decision: bytes, group: SavingRanks, rank: int, encoded: Any) -> list[_Writes]:
    writes = []
    own_of = {name: fqn for fqn, name in group.ranks.own_names(rank).items()}
    for section, steps, _, keys, _ in _core.read_decision(decision, encoded.kind_of):
        fqns = encoded.names[section]
        base = group.ranks.entry_for(rank, fqns[keys[0]])
        if isinstance(base, ObjectEntry):
            for key in keys:
                num_bytes = group.value_bytes[own_of.get(fqns[key], fqns[key])]
                writes.append(_Writes((section, (key,)), None, (), num_bytes))
            continue
        entry = group.ranks.entry(rank, base)
        assert isinstance(entry, TensorEntry)
        sizes = tuple(chunk.sizes for chunk in written_chunks(entry, steps))
        num_bytes = sum(map(num_elements, sizes)) * entry.dtype.itemsize
        writes.append(_Writes((section, tuple(keys)), entry.dtype, sizes, num_bytes))
    return writes


def _rank_save(rank: int, state_bytes: int, writes: Sequence[_Writes], known: dict[Any, int]) -> RankSave:
    """Sizes of files are worked out once for ranks that write alike."""
    num_records = sum(len(one.places[1]) * max(1, len(one.sizes)) for one in writes)
    num_bytes = sum(len(one.places[1]) * one.num_bytes for one in writes)
    alike = tuple((one.places, one.dtype, one.sizes, one.num_bytes) for one in writes)
    if alike not in known:
        known[alike] = _file_bytes(writes) if writes else 0
    return RankSave(rank, state_bytes, num_records, num_bytes, known[alike], _buffer_bytes(writes, num_bytes))


def _file_bytes(writes: Sequence[_Writes]) -> int:
    """Of the file: values first, then tensors, each in the order of keys."""
    values = [one.num_bytes for one in writes for _ in one.places[1] if one.dtype not in ELEMENT_TYPES]
    kinds: dict[Any, int] = {}
    tensors: list[tuple[int, int, int]] = []
    for one in writes:
        section, keys = one.places
        for sizes in one.sizes if one.dtype in ELEMENT_TYPES else ():
            kind = kinds.setdefault((ELEMENT_TYPES[one.dtype], sizes), len(kinds))
            tensors += [(section, key, kind) for key in keys]
    tensors.sort(key=itemgetter(0, 1))
    return _core.rank_file_bytes(values, list(kinds), [kind for _, _, kind in tensors], BLOCK_BYTES)


def _buffer_bytes(writes: Sequence[_Writes], num_bytes: int) -> int:
    """A block per thread; and a part of a tensor on its way from a GPU, or values until a batch of them is written."""
    values = sum(len(one.places[1]) * one.num_bytes for one in writes if one.dtype not in ELEMENT_TYPES)
    return min(num_bytes, STAGING_BYTES + MAX_THREADS * BLOCK_BYTES) + min(values, BATCH_BYTES)
