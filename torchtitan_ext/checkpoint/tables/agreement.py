"""What all ranks' key tables say together, worked out on the coordinator as a pure function.

Used alike by save, load and full tensors: ranks must agree on kind, dtype and shape of each key; layouts are decided
over all ranks; the shards are checked to cover every element exactly once per replica. The work is done per class of
keys (``csrc/core/agreement.h``), and so are its sentences (``csrc/core/problems.h``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, cached_property

import torch

from torchtitan_ext import _core
from torchtitan_ext.checkpoint.tables.component import World
from torchtitan_ext.checkpoint.tables.key_table import RankTable, unpack
from torchtitan_ext.errors import Problem, refusal
from torchtitan_ext.layout.layout import key_problem, unused_problem


class Agreement:
    """What the tables say together.

    Attributes:
        joint: The tables in C++, put together.
        sections: Per rank the numbers of its sections in it.
        names: All keys of all ranks; their numbers in it are their positions.
        agreed_keys: By number the class of each key that a rank holds and that has no problem.
        kinds: What the keys of each class have in common.
        problems: Of ranks alone first, then of keys, in the order of keys.
    """

    def __init__(self, joint: _core.JointTable, sections: list[list[int]], own_problems: Sequence[Problem]) -> None:
        self.joint = joint
        self.sections = sections
        self.names = joint.names()
        self.kinds = joint.kinds()
        of_keys = (key_problem(self.names[key], found) for key, found in joint.problems().items())
        self.problems = (*own_problems, *of_keys)
        self.agreed_keys = joint.agreed_keys()

    @cached_property
    def number_of(self) -> dict[str, int]:
        """The number of each key in the joint table."""
        return {fqn: number for number, fqn in enumerate(self.names)}

    def shape_of(self, fqn: str) -> tuple[int, ...]:
        """The global shape of a tensor."""
        return tuple(self.joint.kind_of(self.number_of[fqn]).global_shape)

    def ranks_and_meshes(self) -> World:
        """The ranks whose tables these are, and the axes of their meshes."""
        return World(self.joint.num_ranks, self.joint.axes())


def agree(tables: Sequence[RankTable], *, needs_all_ranks: bool) -> Agreement:
    """Puts the tables of all ranks together, given in rank order.

    With ``needs_all_ranks`` each rank of a tensor's mesh must be among the tables, as a save writes the tensor from
    them; else only what is reported is looked at.

    Raises:
        ReplicaMismatchError: A table cannot be read.
    """
    joint = _core.JointTable()
    # Ranks that hold alike send equal bytes, which are read once.
    number_of = cache(lambda place, packed: joint.add_section(unpack(packed)))
    sections: list[list[int]] = []
    problems: list[Problem] = []
    for rank, table in enumerate(tables):
        with reading_from(rank):
            numbers = [number_of(place, packed) for place, packed in enumerate(table.sections)]
            joint.add_rank(numbers, unpack(table.part))
        sections.append(numbers)
        problems += table.rest.problems
    with reading_from(None):
        joint.agree(needs_all_ranks)
        return Agreement(joint, sections, problems)


def unused_layouts(tables: Iterable[RankTable], agreement: Agreement, fqns: Collection[str]) -> list[Problem]:
    """One problem for each pattern of ``layouts=`` that applies to no key on any rank.

    None where no tensor is on a mesh: patterns have nothing to say there. A problem proposes the nearest of ``fqns``.
    """
    used: dict[str, bool] = {}
    for table in tables:
        for pattern, is_used in table.rest.layouts.items():
            used[pattern] = used.get(pattern, False) or is_used
    is_any_on_mesh = bool(used) and agreement.joint.has_meshes
    return [unused_problem(pattern, fqns) for pattern, is_used in used.items() if is_any_on_mesh and not is_used]


@contextmanager
def reading_from(rank: int | None) -> Iterator[None]:
    """What cannot be read is a refusal that names the rank that sent it."""
    try:
        yield
    except (ValueError, IndexError) as error:
        detail = f"what {'the ranks' if rank is None else f'rank {rank}'} sent cannot be read: {error}"
        raise refusal("plan", [Problem("ranks_disagree", "key tables", detail)]) from None


def dtype_named(name: str) -> torch.dtype | None:
    """The dtype of a ``KeyKind``; ``None`` of objects. Raises ValueError for one that this torch does not have."""
    if name not in _DTYPES:
        raise ValueError(f"the dtype {name} is unknown here")
    return _DTYPES[name]


_DTYPES = {"": None} | {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
