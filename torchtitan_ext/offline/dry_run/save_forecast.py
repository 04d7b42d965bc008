"""Forecasts what each rank would write, by the planner of saves and the encoders of ``FileWriter``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan

from torchtitan_ext import _core
from torchtitan_ext.checkpoint.planners.save_planner import SavePlanner
from torchtitan_ext.checkpoint.tables.key_table import EncodedTable, ObjectEntry, TensorEntry
from torchtitan_ext.errors import Problem, StateRefusedError
from torchtitan_ext.layout.layout import num_elements
from torchtitan_ext.offline.dry_run.alike_ranks import AlikeRanks
from torchtitan_ext.offline.dry_run.host_memory import Device, committing_bytes, saving_bytes
from torchtitan_ext.offline.dry_run.job import Job, Stage
from torchtitan_ext.storage.checkpoint_files import BLOCK_BYTES, DATA_SUFFIX
from torchtitan_ext.storage.commit.commit import notes_of_save
from torchtitan_ext.storage.metadata.metadata_file import columns_of, storage_meta_fields
from torchtitan_ext.storage.metadata.saved_metadata import DCP_VERSION
from torchtitan_ext.storage.raw_tensor import ELEMENT_TYPES, NAMES


@dataclass(frozen=True)
class RankSave:
    """What one rank would write.

    Attributes:
        state_bytes: The size of all tensors that the rank holds, whoever writes them.
        num_records: The number of tensor chunks and values that it writes.
        num_bytes: The size of all records, without the frames around them.
        file_bytes: The size of its file, with frames and checksums; 0 if it writes none.
        buffer_bytes: The most host memory beside the state (``host_memory``).
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
        ranks: One entry per rank; if the save is refused, they write nothing.
        num_bytes: The bytes that all ranks write together.
        num_files: The number of files of ranks, without metadata and index.
        num_parts: The number of entries of the metadata: chunks of tensors, and values.
        metadata_bytes: The size of ``.metadata``, without the checkpoint's path, which stands in it.
        index_bytes: The size of ``.tte_index``.
        seconds: The time until the slowest rank has written its file, at the given bandwidth.
        metadata_seconds: The time until rank 0 has written ``.metadata`` and index, after that.
        problems: Why the save would be refused; empty if it would not.
    """

    ranks: tuple[RankSave, ...]
    num_bytes: int
    num_files: int
    num_parts: int
    metadata_bytes: int
    index_bytes: int
    seconds: float | None
    metadata_seconds: float | None
    problems: tuple[Problem, ...]


def forecast_save(job: Job) -> SaveForecast:
    """What a save of all ranks of a job would do."""
    groups = [stage.ranks for stage in job.stages]
    encoded = {rank: group.encoded(rank) for group in groups for rank in group.ranks}
    plans = [SavePlan([], planner_data=encoded[rank].message) for rank in sorted(encoded)]
    problems = [problem for group in groups for problem in group.problems]
    planner = SavePlanner(layouts=job.layouts)
    planner.is_coordinator = True
    try:
        answers, metadata = planner.create_global_plan(plans)
    except StateRefusedError as error:
        return _refused(groups, (*problems, *error.problems))
    decisions = [answer.planner_data.writes for answer in answers]
    written = [one for stage in job.stages for one in _ranks_save(stage, decisions, encoded, job.device)]
    written.sort(key=lambda one: one[0].rank)
    ranks = [one for one, _ in written]
    files = [(one.rank, file) for one, file in written if file is not None]
    metadata_bytes, index_bytes = _metadata_bytes(metadata, files), _index_bytes(files, len(ranks))
    committing = committing_bytes(ranks[0].num_records, metadata_bytes, index_bytes)
    ranks[0] = replace(ranks[0], buffer_bytes=max(ranks[0].buffer_bytes, committing))
    saved = metadata.state_dict_metadata.values()
    return SaveForecast(
        tuple(ranks),
        sum(one.num_bytes for one in ranks),
        len(files),
        sum(len(one.chunks) if isinstance(one, TensorStorageMetadata) else 1 for one in saved),
        metadata_bytes,
        index_bytes,
        job.bandwidth.seconds([one.file_bytes for one in ranks]),
        job.bandwidth.seconds([metadata_bytes + index_bytes]),
        tuple(dict.fromkeys(problems)),
    )


def _refused(groups: Sequence[AlikeRanks], problems: Sequence[Problem]) -> SaveForecast:
    held = {rank: size for group in groups for rank, size in zip(group.ranks, group.state_bytes(), strict=True)}
    ranks = tuple(RankSave(rank, held[rank], 0, 0, 0, 0) for rank in sorted(held))
    return SaveForecast(ranks, 0, 0, 0, 0, 0, None, None, tuple(dict.fromkeys(problems)))


@dataclass(frozen=True)
class _Records:
    """Records of one form that a rank writes: a chunk of each of several tensors, or a value.

    The files of ranks with equal records have one size, and add equally much to the metadata.

    Attributes:
        section, keys: Section and positions of the keys in the rank's table.
        own_lengths: The lengths of the keys that are names of the rank's own; other ranks have others in their places.
        dtype: ``None`` for a value.
        sizes: The sizes of the chunk; empty for a value.
        num_bytes: The size of one record.
        offsets: The offsets of the chunk, on which no size depends; ``None`` for a value.
    """

    section: int
    keys: tuple[int, ...]
    own_lengths: tuple[int, ...]
    dtype: torch.dtype | None
    sizes: tuple[int, ...]
    num_bytes: int
    offsets: tuple[int, ...] | None = field(default=None, compare=False)

    @property
    def is_plain(self) -> bool:
        """Whether the records are tensors whose elements are written as they are."""
        return self.dtype in ELEMENT_TYPES


def _ranks_save(
    stage: Stage, decisions: Sequence[bytes], encoded: Mapping[int, EncodedTable], device: Device
) -> Iterator[tuple[RankSave, _core.RankFile | None]]:
    """What each rank of a stage writes, and its file. Files are worked out once for ranks that write alike."""
    known: dict[Any, _core.RankFile] = {}
    for rank, state_bytes in zip(stage.ranks.ranks, stage.ranks.state_bytes(), strict=True):
        records = tuple(_records_of(decisions[rank], stage, rank, encoded[rank]))
        if records and records not in known:
            known[records] = _file_of(records, encoded[rank].names)
        file = known.get(records)
        num_records = sum(len(one.keys) for one in records)
        num_bytes = sum(len(one.keys) * one.num_bytes for one in records)
        buffer_bytes = saving_bytes(
            num_records=num_records,
            num_bytes=num_bytes,
            value_bytes=[one.num_bytes for one in records for _ in one.keys if not one.is_plain],
            is_packed=stage.one.is_packed,
            is_staged=device != "cpu" and any(one.is_plain for one in records),
        )
        file_bytes = file.num_bytes if file is not None else 0
        yield RankSave(rank, state_bytes, num_records, num_bytes, file_bytes, buffer_bytes), file


def _records_of(decision: bytes, stage: Stage, rank: int, encoded: EncodedTable) -> Iterator[_Records]:
    entries, own_of = stage.ranks.table.entries, {name: fqn for fqn, name in stage.ranks.own_names(rank).items()}
    for one in _core.read_decision(decision, encoded.kind_of):
        fqns = encoded.names[one.section]
        first = fqns[one.keys[0]]
        base = entries[first] if first in entries else stage.ranks.own[own_of[first]]
        if isinstance(base, ObjectEntry):
            for key in one.keys:
                own_length = (len(fqns[key]),) if fqns[key] in own_of else ()
                num_bytes = stage.one.value_bytes[own_of.get(fqns[key], fqns[key])]
                yield _Records(one.section, (key,), own_length, None, (), num_bytes)
            continue
        entry = stage.ranks.entry(rank, base)
        assert isinstance(entry, TensorEntry)
        keys = tuple(one.keys)
        own_lengths = tuple(len(fqns[key]) for key in keys if fqns[key] in own_of) if own_of else ()
        pieces = [box for _, box in one.boxes]
        for offsets, sizes in pieces or _core.written_boxes(entry, one.steps):
            num_bytes = num_elements(sizes) * entry.dtype.itemsize
            yield _Records(one.section, keys, own_lengths, entry.dtype, sizes, num_bytes, offsets)


def _file_of(records: Sequence[_Records], names: Sequence[Sequence[str]]) -> _core.RankFile:
    """The file of one rank: values first, then tensors, each in the order of keys.

    Args:
        names: The keys of each section of the rank's table.
    """
    kinds: dict[Any, int] = {}
    ordered: list[tuple[bool, int, int, int]] = []
    for one in records:
        form: tuple[Any, ...] = (None, "", one.offsets, (0,) * len(one.sizes), one.num_bytes)
        if one.dtype is not None and one.is_plain:
            form = (ELEMENT_TYPES[one.dtype], NAMES[one.dtype], one.offsets, one.sizes, 0)
        kind = kinds.setdefault(form, len(kinds))
        ordered += [(one.is_plain, one.section, key, kind) for key in one.keys]
    ordered.sort(key=itemgetter(0, 1, 2))
    fqns = [names[section][key] for _, section, key, _ in ordered]
    file_kinds = [_core.FileKind(*form) for form in kinds]
    return _core.foresee_file(file_kinds, fqns, [kind for *_, kind in ordered], BLOCK_BYTES)


def _index_bytes(files: Sequence[tuple[int, _core.RankFile]], num_ranks: int) -> int:
    """The size of ``.tte_index``. Ranks that write alike share one file: it is encoded once, and counted for each.

    Args:
        files: Rank and content of each file.
    """

    notes = notes_of_save(num_ranks, {"prepare": 0.0, "plan": 0.0, "write": 0.0})

    def encoded(*files: _core.RankFile) -> int:
        return len(_core.encode_index(bytes(16), 0, 0, notes, files))

    empty = total = encoded()
    known: dict[tuple[int, int], int] = {}
    for rank, file in files:
        name = _name_of(rank)
        form = (id(file), len(name))
        if form not in known:
            known[form] = encoded(_core.RankFile(name, rank, 0, file.footer_offset, 0, file.records)) - empty
        total += known[form]
    return total


def _metadata_bytes(metadata: Metadata, files: Sequence[tuple[int, _core.RankFile]]) -> int:
    """The size of ``.metadata``, without the length of the checkpoint's path, which stands in it."""
    columns = columns_of(metadata.state_dict_metadata)
    assert columns is not None, "our planner's metadata has other classes than DCP's, please report"
    parts: dict[int, tuple[int, int]] = {}
    rows = []
    for rank, file in files:
        if id(file) not in parts:
            first = columns.num_parts
            columns.add_records(file)
            parts[id(file)] = first, columns.num_parts - first
        rows.append((_name_of(rank), *parts[id(file)]))
    storage_meta = StorageMeta(Path("/"), "0" * 32)  # held meanwhile: what others hold too has a number in the pickle
    fields = storage_meta_fields(storage_meta)
    return columns.pickle_bytes(metadata.planner_data, fields, DCP_VERSION, rows) - len("/")


def _name_of(rank: int) -> str:
    return f"__{rank}_0{DATA_SUFFIX}"
