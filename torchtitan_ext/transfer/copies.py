"""Which copies of a shard are taken, where several ranks hold it: plain decisions over fingerprints.

Copies that are equal are taken. Where they differ, the fingerprints of a checkpoint of the same step tell which are
right, for a single copy too; without one the majority of three or more counts, and two that differ are refused.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from torchtitan_ext import _core
from torchtitan_ext.checkpoint.tables.agreement import Agreement
from torchtitan_ext.errors import Problem, named
from torchtitan_ext.layout.layout import Box
from torchtitan_ext.state.nested import Path
from torchtitan_ext.storage import FileReader

Replicas = Literal["equal", "first"]
"""What is asked of copies, where nothing tells the right one: that they are equal, or nothing: the first counts."""

Value = TypeVar("Value", bound=Hashable)
Boxes = tuple[Box, ...]


@dataclass(frozen=True)
class HeldCopies:
    """What the copies of one survivor are compared by.

    Attributes:
        sums: Over the rank's shard of each tensor, or over each box of one that states its boxes.
        digests: By key the digest of a value that is no tensor.
        components: By flat key the state of components with a rule of their own.
    """

    sums: _core.SumTable = field(default_factory=_core.SumTable)
    digests: Mapping[str, bytes] = field(default_factory=dict)
    components: Mapping[str, tuple[Path, Any]] = field(default_factory=dict)


@dataclass
class ComparedCopies:
    """What comes of the comparison.

    Attributes:
        distrusted: By the number of a key the ranks whose copies are not taken, in increasing order.
        problems: Copies that differ, of which nothing tells the right one.
        num_proved: How many copies a checkpoint has told to be right.
    """

    distrusted: dict[int, list[int]] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    num_proved: int = 0


class SavedSums:
    """The fingerprints that a checkpoint has, of boxes that its chunks make up."""

    def __init__(self, reader: FileReader, saved: Mapping[str, Any]) -> None:
        self._reader = reader
        self._saved = saved
        self._chunks = _core.SavedChunks({}, TensorStorageMetadata)
        self._known: dict[Any, list[int] | None] = {}

    def find(self, fqn: str, boxes: Boxes, dtype: str, shape: Sequence[int]) -> int | None:
        """The sum over boxes of a tensor; ``None`` where the save took none, or cut the tensor in other places."""
        saved = self._saved.get(fqn)
        if not isinstance(saved, TensorStorageMetadata):
            return None
        if (str(saved.properties.dtype), tuple(saved.size)) != (dtype, tuple(shape)):
            return None
        index = self._chunks.of(saved.chunks)
        place = id(index), boxes
        if place not in self._known:
            self._known[place] = index.find_whole(boxes)
        positions = self._known[place]
        if positions is None:
            return None
        indices = [MetadataIndex(fqn, saved.chunks[position].offsets, position) for position in positions]
        sums = self._reader.find_sums(indices)
        known = [one for one in sums if one is not None]
        return _core.add_sums(*known) if len(known) == len(sums) else None


def compare_copies(
    source: Agreement,
    wanted: Collection[str],
    copies: Sequence[HeldCopies],
    saved: SavedSums | None,
    replicas: Replicas,
    name_of: Callable[[int], str],
) -> ComparedCopies:
    """Which copies of wanted keys are not taken. ``copies`` are in the order of ranks, ``name_of`` names one."""
    verdict = ComparedCopies()
    held: dict[int, list[tuple[Boxes, list[int]]]] = {}
    for key, of_class in source.agreed_keys.items():
        fqn, kind = source.names[key], source.kinds[of_class]
        odd: set[int] = set()
        if fqn not in wanted:
            continue
        if kind.is_object:
            digests = {rank: copies[rank].digests[fqn] for rank in source.joint.ranks(of_class)}
            odd.update(_judge(fqn, "", digests, None, replicas, verdict, name_of))
        else:
            if of_class not in held:
                held[of_class] = _held_alike(source.joint.replicas(of_class))
            states_boxes = kind.type == _core.EntryType.BOXES
            for boxes, ranks in held[of_class]:
                expected = None if saved is None else saved.find(fqn, boxes, kind.dtype, kind.global_shape)
                if len(ranks) < 2 and expected is None:
                    continue
                part = boxes[0] if states_boxes else None
                sums = {rank: copies[rank].sums[fqn].sums.get(part, 0) for rank in ranks}
                where = "" if kind.is_plain else box_text(boxes[0])
                odd.update(_judge(fqn, where, sums, expected, replicas, verdict, name_of))
        if odd:
            verdict.distrusted[key] = sorted(odd)
    return verdict


def later_copies(source: Agreement) -> dict[int, list[int]]:
    """By the number of a tensor the ranks whose boxes of it a rank before them holds too."""
    of_class = {
        number: sorted(rank for _, ranks in _held_alike(source.joint.replicas(number)) for rank in ranks[1:])
        for number in set(source.agreed_keys.values())
        if not source.kinds[number].is_object
    }
    return {key: of_class[number] for key, number in source.agreed_keys.items() if of_class.get(number)}


def box_text(box: Box) -> str:
    """A box as messages show it: ``[8:16, 0:4]``."""
    return f"[{', '.join(f'{first}:{first + size}' for first, size in zip(*box, strict=True))}]"


def _held_alike(replicas: Sequence[_core.Replica]) -> list[tuple[Boxes, list[int]]]:
    """Each set of boxes, and the ranks that hold it."""
    ranks: dict[Boxes, set[int]] = defaultdict(set)
    for replica in replicas:
        for shard in replica.shards:
            ranks[tuple(shard.boxes)].update(shard.ranks)
    return [(boxes, sorted(of_boxes)) for boxes, of_boxes in ranks.items()]


def _judge(
    fqn: str,
    where: str,
    values: Mapping[int, Value],
    expected: Value | None,
    replicas: Replicas,
    verdict: ComparedCopies,
    name_of: Callable[[int], str],
) -> list[int]:
    """The ranks whose copies are not taken."""
    if expected is not None:
        wrong = [rank for rank, value in values.items() if value != expected]
        verdict.num_proved += len(values) - len(wrong)
        return wrong
    right = majority(values)
    if right is None and replicas == "first":
        right = values[min(values)]
    if right is not None:
        return [rank for rank, value in values.items() if value != right]
    groups: dict[Value, list[int]] = {}
    for rank, value in values.items():
        groups.setdefault(value, []).append(rank)
    sides = " and ".join(f"on {named([name_of(rank) for rank in ranks], 4)}" for ranks in groups.values())
    what = f"its copies differ {sides}{where and f', in {where}'}, and nothing tells which is right"
    advice = (
        "; give path= of a run with a checkpoint of this step that has fingerprints, or load the last checkpoint, or "
        'pass replicas="first"'
    )
    verdict.problems.append(Problem("replicas_differ", fqn, what, advice))
    return []


def majority(values: Mapping[int, Value]) -> Value | None:
    """The value of all ranks, or of more than half of three or more; ``None`` where there is none."""
    counts: dict[Value, int] = {}
    for value in values.values():
        counts[value] = counts.get(value, 0) + 1
    best = max(counts, key=counts.__getitem__)
    if len(counts) == 1 or (len(values) > 2 and 2 * counts[best] > len(values)):
        return best
    return None
