"""What all ranks' key tables say together, worked out on the coordinator as a pure function.

Used alike by save, load and full tensors: ranks must agree on kind, dtype and shape of each key; layouts are decided
over all ranks; the shards are checked to cover every element exactly once per replica. The work is done per class of
keys (``csrc/core/agreement.h``); here its answers become values, in ``agreement_problems`` sentences.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch

from torchtitan_ext import _core
from torchtitan_ext.checkpoint.tables.agreement_problems import class_problem, cover_problem
from torchtitan_ext.checkpoint.tables.component import World, world_of
from torchtitan_ext.checkpoint.tables.key_table import BOXES, OBJECT, Box, KeyTable, RankTable, encode_table, unpack
from torchtitan_ext.errors import Problem, refusal
from torchtitan_ext.layout.layout import Steps, unused_problem


@dataclass(frozen=True)
class HeldShard:
    """A shard and the ranks (positions in the list of tables) that hold it alike, in increasing order."""

    ranks: tuple[int, ...]
    boxes: tuple[Box, ...]


@dataclass(frozen=True)
class TensorAgreement:
    """What ranks agree on for one tensor.

    Attributes:
        steps: Per reporting rank the order of its shard; empty for tensors that describe themselves.
        replicas: Each entry is one complete tensor, as the shards that make it up.
        is_plain: Whether every rank holds it as a plain tensor.
    """

    global_shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    is_plain: bool
    steps: Mapping[int, Steps]
    replicas: tuple[tuple[HeldShard, ...], ...]


@dataclass(frozen=True)
class ObjectAgreement:
    """A key that is no tensor, and the ranks that have it."""

    ranks: tuple[int, ...]


@dataclass(frozen=True)
class KeyKind:
    """What keys of one class have in common, as far as it costs nothing to say."""

    is_object: bool
    is_plain: bool
    global_shape: tuple[int, ...]
    dtype: torch.dtype | None
    requires_grad: bool


class Agreement:
    """What the tables say together.

    Attributes:
        keys: What was agreed on each key; lacks those with a problem.
        world: The tables in C++.
        sections: Per rank the numbers of its sections in the world.
        names: All keys of all ranks; their numbers in the world are their positions.
        class_of: Per key the number of its class, or None where no rank holds it.
        problems: Of ranks alone first, then of keys, in the order of keys.
    """

    def __init__(self, world: _core.World, sections: list[list[int]], own_problems: Sequence[Problem]) -> None:
        self.world = world
        self.sections = sections
        self.names: list[str] = world.names()
        self.class_of: list[int | None] = [None] * len(self.names)
        for number in range(world.num_classes):
            for key in world.keys(number):
                self.class_of[key] = number
        found = [
            (key, class_problem(world, number, self.names[key]))
            for number in range(world.num_classes)
            if world.trouble(number) is not None
            for key in world.keys(number)
        ]
        self._troubled = {key for key, _ in found}
        self.problems = (*own_problems, *(problem for _, problem in sorted(found, key=lambda one: one[0])))
        self.keys: Mapping[str, TensorAgreement | ObjectAgreement] = _AgreedKeys(self)
        self._kinds: dict[int, KeyKind] = {}
        self._agreed: dict[int, TensorAgreement | ObjectAgreement] = {}

    @cached_property
    def number_of(self) -> dict[str, int]:
        """The number of each key in the world."""
        return {fqn: number for number, fqn in enumerate(self.names)}

    def ranks_and_meshes(self) -> World:
        """The ranks whose tables these are, and the axes of their meshes."""
        return world_of(self.world.meshes(), [numbers[0] for numbers in self.sections])

    def has(self, key: int) -> bool:
        """Whether a rank holds the key of this number, and there is no problem with it."""
        return self.class_of[key] is not None and key not in self._troubled

    def numbers(self) -> Iterator[tuple[int, int]]:
        """The numbers of keys without problem, and of their classes."""
        for key, of_class in enumerate(self.class_of):
            if of_class is not None and key not in self._troubled:
                yield key, of_class

    def kind(self, of_class: int) -> KeyKind:
        """What the keys of a class have in common."""
        if of_class not in self._kinds:
            kind, dtype, shape, requires_grad, is_plain = self.world.kind(of_class)
            is_object = kind == OBJECT
            self._kinds[of_class] = KeyKind(
                is_object, is_plain, shape, None if is_object else _dtype(dtype), requires_grad
            )
        return self._kinds[of_class]

    def kind_of(self, fqn: str) -> KeyKind:
        """The same of a key that some rank holds."""
        of_class = self.class_of[self.number_of[fqn]]
        assert of_class is not None
        return self.kind(of_class)

    def agreed(self, of_class: int) -> TensorAgreement | ObjectAgreement:
        """What was agreed on the keys of a class."""
        if of_class not in self._agreed:
            self._agreed[of_class] = self._agreement(of_class)
        return self._agreed[of_class]

    def _agreement(self, of_class: int) -> TensorAgreement | ObjectAgreement:
        kind = self.kind(of_class)
        if kind.is_object:
            return ObjectAgreement(tuple(self.world.ranks(of_class)))
        assert kind.dtype is not None
        steps: dict[int, Steps] = {}
        replicas: list[tuple[HeldShard, ...]] = []
        describes_itself = self.world.kind(of_class)[0] == BOXES
        for order, ranks, shards in self.world.replicas(of_class):
            if not describes_itself:
                steps.update(dict.fromkeys(ranks, order))
            held = tuple(HeldShard(*shard) for shard in shards)
            if kind.is_plain:  # one stands for all
                replicas += [(HeldShard((rank,), held[0].boxes),) for rank in ranks]
            else:
                replicas.append(held)
        return TensorAgreement(kind.global_shape, kind.dtype, kind.requires_grad, kind.is_plain, steps, tuple(replicas))


class _AgreedKeys(Mapping[str, TensorAgreement | ObjectAgreement]):
    """Made when asked for, once per class."""

    def __init__(self, agreement: Agreement) -> None:
        self._agreement = agreement

    def __getitem__(self, fqn: str) -> TensorAgreement | ObjectAgreement:
        key = self._agreement.number_of[fqn]
        of_class = self._agreement.class_of[key]
        if of_class is None or not self._agreement.has(key):
            raise KeyError(fqn)
        return self._agreement.agreed(of_class)

    def __iter__(self) -> Iterator[str]:
        return (self._agreement.names[key] for key, _ in self._agreement.numbers())

    def __len__(self) -> int:
        return sum(1 for _ in self._agreement.numbers())


def agree(tables: Sequence[KeyTable | RankTable], *, every_rank_reports: bool) -> Agreement:
    """Puts the tables of all ranks together.

    Args:
        tables: One per rank of the save or load, in rank order.
        every_rank_reports: Whether every rank of a tensor's mesh must be among the tables (a save writes the tensor
            from them), or only what is reported is looked at.

    Raises:
        ReplicaMismatchError: A table cannot be read.
    """
    world = _core.World()
    number_of: dict[tuple[int, bytes], int] = {}
    sections: list[list[int]] = []
    problems: list[Problem] = []
    for rank, table in enumerate(map(as_rank_table, tables)):
        with ReadingFrom(rank):
            numbers = []
            for one in enumerate(table.sections):
                if one not in number_of:
                    number_of[one] = world.add_section(unpack(one[1]))
                numbers.append(number_of[one])
            world.add_rank(numbers, unpack(table.part))
        sections.append(numbers)
        problems += table.problems
    with ReadingFrom(None):
        world.agree(every_rank_reports)
        return Agreement(world, sections, problems)


def as_rank_table(table: KeyTable | RankTable) -> RankTable:
    """The table as it travels."""
    return encode_table(table).message if isinstance(table, KeyTable) else table


def unforeseen_steps(tables: Sequence[object], agreement: Agreement) -> list[dict[str, Steps]]:
    """Per rank the sharding orders that it cannot work out itself: those that are not its first candidate."""
    found: list[dict[str, Steps]] = [{} for _ in tables]
    for of_class, steps, ranks in agreement.world.unforeseen():
        fqns = [agreement.names[key] for key in agreement.world.keys(of_class)]
        for rank in ranks:
            found[rank].update(dict.fromkeys(fqns, steps))
    return found


def unused_layouts(tables: Iterable[RankTable], agreement: Agreement, fqns: Collection[str]) -> list[Problem]:
    """One problem for each pattern of ``layouts=`` that applies to no key on any rank.

    None where no tensor is on a mesh: patterns have nothing to say there.

    Args:
        tables: Of all ranks.
        fqns: The keys there are, of which the problem proposes one.
    """
    used: dict[str, bool] = {}
    for table in tables:
        for pattern, is_used in table.layouts.items():
            used[pattern] = used.get(pattern, False) or is_used
    is_any_on_mesh = bool(used) and bool(agreement.world.meshes())
    return [unused_problem(pattern, fqns) for pattern, is_used in used.items() if is_any_on_mesh and not is_used]


def check_cover(
    fqn: str,
    global_shape: tuple[int, ...],
    shards: Sequence[HeldShard],
    kind: Literal["incomplete_cover", "broken_checkpoint"],
) -> Problem | None:
    """Whether shards hold every element of a tensor exactly once; else the first gap or overlap and who holds it."""
    boxes = [box for shard in shards for box in shard.boxes]
    owners = [shard.ranks for shard in shards for _ in shard.boxes]
    defect = _core.find_cover_defect(global_shape, boxes)
    if defect is None:
        return None
    what, element, chunks = defect
    holders = [(boxes[chunk], owners[chunk][0] if owners[chunk] else None) for chunk in chunks]
    return cover_problem(fqn, global_shape, kind, what, element, holders)


class ReadingFrom:
    """What cannot be read is a refusal that names the rank that sent it."""

    def __init__(self, rank: int | None) -> None:
        self._sender = "the ranks" if rank is None else f"rank {rank}"

    def __enter__(self) -> None:
        pass

    def __exit__(self, error_class: Any, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, (ValueError, IndexError)):
            detail = f"what {self._sender} sent cannot be read: {error}"
            raise refusal("plan", [Problem("ranks_disagree", "key tables", detail)]) from None


_DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


def _dtype(name: str) -> torch.dtype:
    if name not in _DTYPES:
        raise ValueError(f"the dtype {name} is unknown here")
    return _DTYPES[name]
