"""Proves a load: compares the fingerprints of the loaded tensors with those that the save stored, over all ranks.

Two exchanges, as of ``tte.fingerprint``. Ranks tell which tensors they hold, and so decide the sharding orders; then
each rank sums its tensors, and looks up the stored sums of its share of all keys. Nothing is gathered but sums. Only if
some tensor is wrong a third exchange tells where: each rank reads its part of the tensor's chunks again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from torchtitan_ext import _core
from torchtitan_ext._core import SumTable, add_sums
from torchtitan_ext.checkpoint.operation.component_plans import Components, OpenSource, PlannedSource
from torchtitan_ext.checkpoint.operation.phases import Phases
from torchtitan_ext.checkpoint.rules.report import NO_TENSOR, LoadProof
from torchtitan_ext.checkpoint.tables.agreement import agree
from torchtitan_ext.checkpoint.tables.component import is_stateful
from torchtitan_ext.checkpoint.tables.key_table import BoxesEntry, KeyTable, RankTable, TensorEntry, encode_table
from torchtitan_ext.checkpoint.tables.tensor_sums import TensorSummer, describe_tensors, held_boxes
from torchtitan_ext.errors import ProofFailedError, WrongPart, WrongValueError, first_line, named
from torchtitan_ext.layout.dtensor import local_view
from torchtitan_ext.layout.layout import Box, Steps
from torchtitan_ext.state.value_digest import sum_box
from torchtitan_ext.transforms.reader import MappedReader

_PROVING = "tensors were loaded, and are compared with their fingerprints"

# So many tensors that a transform changes are named.
_MAX_CHANGED = 4

# So many wrong tensors are looked at in detail.
_MAX_DETAILED = 10


@dataclass
class _OwnTensors:
    """The loaded tensors of this rank.

    Attributes:
        values: By flat key.
        unproved: Why other keys, and keys that turn out to be impossible to sum, are not proved.
    """

    values: dict[str, torch.Tensor] = field(default_factory=dict)
    entries: dict[str, TensorEntry | BoxesEntry] = field(default_factory=dict)
    unproved: dict[str, str] = field(default_factory=dict)


class _Summed(NamedTuple):
    """The sums of a rank's tensors, and the stored sums of its share of keys, or why there are none.

    ``failed`` says why some cannot be summed. ``wrong`` has keys of checkpoints of its own that differ, ``reshaped``,
    of this share, the saved shapes of tensors that now have others: a sum does not tell.
    """

    sums: SumTable
    stored: dict[str, int | str]
    failed: dict[str, str]
    wrong: list[str]
    reshaped: dict[str, tuple[int, ...]]


class _PartSums(NamedTuple):
    """What a rank holds of a saved chunk: its sum in memory and, if the file could be read again, in the file.

    ``chunk`` is the chunk with no ranks yet, ``stored`` its stored sum.
    """

    chunk: WrongPart
    stored: int | None
    replica: str
    box: Box
    in_memory: int
    in_file: int | None


def check_has_sums(opened: OpenSource) -> None:
    """Raises WrongValueError unless the checkpoint has fingerprints. Not collective; the reader is set up."""
    if opened.with_sums is None:
        raise WrongValueError(
            f"load: got prove=True, and {opened.name} has no fingerprints; save with tte.save(..., fingerprints=True), "
            "or load without prove"
        )


def check_keeps_tensors(opened: OpenSource) -> None:
    """Raises WrongValueError where a transform does more than give whole tensors other names. Not collective."""
    changed = opened.reader.mapped.changed_tensors() if isinstance(opened.reader, MappedReader) else []
    if changed:
        raise WrongValueError(
            "load: got prove=True and a transform; the fingerprints are those of other tensors than "
            f"{named(changed, _MAX_CHANGED)}"
        )


def prove_load(
    state_dict: Mapping[Any, Any],
    components: Components,
    planned: PlannedSource,
    with_tensors: Collection[str],
    phases: Phases,
) -> LoadProof:
    """Proves what was loaded into a state dict. Collective.

    Args:
        with_tensors: Components of which some rank has loaded tensors: these are asked for their state again.

    Raises:
        ProofFailedError: Tensors are not what was saved; the same on every rank.
    """
    own = _OwnTensors()
    summer = TensorSummer()

    def describe() -> tuple[RankTable, list[str], dict[str, str]]:
        state = _state_after(state_dict, components, with_tensors, phases)
        _collect(own, state, components, planned)
        return encode_table(KeyTable(own.entries)).message, list(own.entries), own.unproved

    tables, keys_of_ranks, reasons = zip(*phases.on_all("prove", describe, doing=_PROVING), strict=True)
    agreement = agree(tables, needs_all_ranks=True)
    unproved = {fqn: reason for of_rank in reasons for fqn, reason in of_rank.items()}
    unproved |= {problem.fqn: problem.detail for problem in agreement.problems}
    source = planned.opened
    keys = [fqn for fqn in dict.fromkeys(chain(*keys_of_ranks)) if fqn not in unproved]
    steps = agreement.joint.steps_of(phases.rank)

    def sum_own() -> _Summed:
        sums, failed = _sum_all(own, keys, steps, summer, phases)
        share = [
            fqn
            for number, fqn in enumerate(keys)
            if (fqn in sums if source.is_of_one_rank else number % phases.size == phases.rank)
        ]
        stored = {fqn: found for fqn in share if (found := _stored_sum(fqn, source)) is not None}
        reshaped = {
            fqn: shape
            for fqn in share
            if fqn in stored
            and (shape := tuple(getattr(source.entries[source.saved_name(fqn)], "size", ()))) != agreement.shape_of(fqn)
        }
        own_sums = {fqn: one for fqn, one in stored.items() if source.is_of_one_rank and isinstance(one, int)}
        return _Summed(sums, stored, failed, sums.differing(own_sums), reshaped)

    summed = phases.on_all("prove", sum_own, doing=_PROVING)
    wrong, proved = _compare(keys, summed, unproved, is_of_one_rank=source.is_of_one_rank)
    if wrong:
        reshaped = {fqn: shape for one in summed for fqn, shape in one.reshaped.items() if fqn in wrong}
        detailed = [fqn for fqn in wrong[:_MAX_DETAILED] if fqn in own.values and fqn not in reshaped]

        def look_again() -> list[_PartSums]:
            return [part for fqn in detailed for part in _part_sums(fqn, own, source, steps.get(fqn), summer)]

        found = phases.on_all("prove", look_again, doing=_PROVING)
        shapes = {fqn: (shape, agreement.shape_of(fqn)) for fqn, shape in reshaped.items()}
        raise ProofFailedError(source.name, tuple(wrong), tuple(_wrong_parts(found)), shapes)
    return LoadProof(tuple(proved), unproved)


def _state_after(
    state_dict: Mapping[Any, Any], components: Components, with_tensors: Collection[str], phases: Phases
) -> dict[Any, Any]:
    """The state dict as it is now: objects are asked for their state, since they may have taken copies."""
    state: dict[Any, Any] = {}
    for key in components.values:
        value = state_dict[key]
        if is_stateful(value):
            if str(key) not in with_tensors:
                continue
            phases.at(str(key))
            value = value.state_dict()
        state[key] = value
    return state


def _collect(own: _OwnTensors, state: dict[Any, Any], components: Components, planned: PlannedSource) -> None:
    for key in (*components.resharded, *components.to_reset):
        own.unproved[str(key)] = "it was loaded by a rule of its own, or not at all"
    source, planner = planned.opened, planned.ours
    loaded, values = planner.wanted.entries, planner.loaded_values(state)
    tensors = {}
    for fqn in loaded:
        reason = planner.why_unproved(fqn) or _why_changed(values.get(fqn), fqn, source)
        if reason is None:
            tensors[fqn] = values[fqn]
        else:
            own.unproved[fqn] = reason
    entries, problems = describe_tensors(tensors, planner.layouts)
    own.unproved |= {problem.fqn: problem.detail for problem in problems}
    own.entries |= entries
    own.values |= {fqn: tensors[fqn] for fqn in entries}
    groups = tuple(f"{key}.param_groups." for key in components.param_groups)
    for fqn in sorted(values.keys() - loaded.keys()):
        own.unproved[fqn] = NO_TENSOR if fqn.startswith(groups) else "it was not loaded"


def _why_changed(value: Any, fqn: str, source: OpenSource) -> str | None:
    """Why what an object gives now cannot be compared with what it was given."""
    if not isinstance(value, torch.Tensor):
        return "its object does not give it back"
    saved = source.entries.get(source.saved_name(fqn))
    if isinstance(saved, TensorStorageMetadata) and value.dtype != saved.properties.dtype:
        return f"it was cast from {saved.properties.dtype} to {value.dtype}"
    return None


def _sum_all(
    own: _OwnTensors, keys: Sequence[str], steps: Mapping[str, Steps], summer: TensorSummer, phases: Phases
) -> tuple[SumTable, dict[str, str]]:
    """Sums the tensors of this rank; why some cannot be summed."""
    failed: dict[str, Exception] = {}
    for fqn in keys:
        if fqn in own.values:
            phases.at(fqn)
            try:
                summer.add(fqn, own.values[fqn], own.entries[fqn], steps.get(fqn))
            except (RuntimeError, ValueError) as error:  # a wrapper that gives no dense values
                failed[fqn] = error
    sums, errors = summer.found()
    return sums, {fqn: f"it cannot be summed ({first_line(error)})" for fqn, error in {**failed, **errors}.items()}


def _stored_sum(fqn: str, source: OpenSource) -> int | str | None:
    """The sum of a key, or why it has none; ``None`` where this rank's metadata does not know the key."""
    if source.with_sums is None or source.saved_name(fqn) not in source.entries:
        return None
    sums = source.with_sums.find_sums([index for index, _ in source.saved_chunks(fqn)])
    known = [one for one in sums if one is not None]
    if len(known) < len(sums):
        few = f" for {len(sums) - len(known)} of its {len(sums)} chunks" if known else ""
        return f"the save stored no fingerprint of it{few}"
    return add_sums(*known)


def _compare(
    keys: Sequence[str], summed: Sequence[_Summed], unproved: dict[str, str], *, is_of_one_rank: bool
) -> tuple[list[str], list[str]]:
    """The keys that are wrong and those that are right; adds to ``unproved``."""
    for of_rank in summed:
        unproved |= of_rank.failed
    found = [(fqn, one) for of_rank in summed for fqn, one in of_rank.stored.items()]
    stored = {fqn: one for fqn, one in found if isinstance(one, int)}
    reasons = {fqn: one for fqn, one in reversed(found) if isinstance(one, str)}
    for fqn in keys:
        if fqn not in unproved and (fqn in reasons or fqn not in stored):
            unproved[fqn] = reasons.get(fqn, "no rank could look its fingerprint up")
    of_all = {} if is_of_one_rank else stored
    differing = set(SumTable.merge([one.sums for one in summed]).differing(of_all))
    differing.update(fqn for one in summed for fqn in (*one.wrong, *one.reshaped))
    compared = [fqn for fqn in keys if fqn not in unproved]
    return [fqn for fqn in compared if fqn in differing], [fqn for fqn in compared if fqn not in differing]


def _part_sums(
    fqn: str, own: _OwnTensors, source: OpenSource, steps: Steps | None, summer: TensorSummer
) -> Iterator[_PartSums]:
    """The sums of this rank's part of each saved chunk of a key, in memory and in the file."""
    entry, reader = own.entries[fqn], source.with_sums
    assert reader is not None, "a key of a checkpoint without fingerprints was compared, please report"
    held = list(held_boxes(own.values[fqn], entry, steps))
    replica = "" if source.is_of_one_rank else summer.replica_of(entry)
    chunks = list(source.saved_chunks(fqn))
    wanted = [(index.offset or (), sizes, ()) for index, sizes in chunks]
    for found in _core.find_overlaps(wanted, [(offsets, elements.shape) for offsets, elements in held]):
        (index, sizes), (_, of_box) = chunks[found.wanted], held[found.saved]
        (stored,) = reader.find_sums([index])
        path = reader.storage_data[index].relative_path
        chunk = WrongPart(fqn, path, tuple(index.offset or ()), sizes, (), None)
        elements = local_view(of_box, found.saved_offsets, found.sizes)
        place = torch.empty(found.sizes, dtype=elements.dtype, device="cpu")
        try:
            reader.read_box(index, found.local_offsets, place)
            in_file = int(sum_box(place, found.offsets, entry.global_shape))
        except Exception:  # whatever it is, the loaded tensor is wrong: that is to be said
            in_file = None
        in_memory = int(sum_box(elements, found.offsets, entry.global_shape))
        yield _PartSums(chunk, stored, replica, (found.offsets, found.sizes), in_memory, in_file)


def _wrong_parts(found: Sequence[list[_PartSums]]) -> Iterator[WrongPart]:
    """The chunks that some rank holds wrong, with these ranks."""
    of_chunk: dict[WrongPart, dict[Any, list[tuple[int, _PartSums]]]] = defaultdict(lambda: defaultdict(list))
    for rank, parts in enumerate(found):
        for part in parts:
            of_chunk[part.chunk][part.replica or rank].append((rank, part))
    for chunk, replicas in of_chunk.items():
        wrong: set[int] = set()
        is_in_file: bool | None = False
        for members in replicas.values():
            boxes = {part.box: part for _, part in members}.values()
            stored = members[0][1].stored
            in_file = [part.in_file for part in boxes if part.in_file is not None]
            if len(in_file) == len(boxes) and add_sums(*in_file) == stored:
                wrong |= {rank for rank, part in members if part.in_memory != part.in_file}
            elif add_sums(*(part.in_memory for part in boxes)) != stored:
                wrong |= {rank for rank, _ in members}
                is_in_file = True if len(in_file) == len(boxes) else None
        if wrong:
            yield replace(chunk, ranks=tuple(sorted(wrong)), is_in_file=is_in_file)
