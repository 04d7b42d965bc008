"""What a rank reads or writes, as one list in C++ between the planner and the files.

DCP's items are made of it where somebody asks for them: a planner that extends ours, or another storage.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar, overload

from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem, SavePlan, WriteItem

from torchtitan_ext import _core

_Item = TypeVar("_Item", bound=ReadItem | WriteItem)
_List = TypeVar("_List", bound=_core.Reads | _core.Writes)


class _Listed(Sequence[_Item], Generic[_Item, _List]):
    """The items of a list, which are made when one is asked for: values that are no tensors, then tensors, both in the
    order of keys.

    Args:
        in_core: The list.
        make: Makes its items.
    """

    def __init__(self, in_core: _List, make: Callable[[_List], list[_Item]]) -> None:
        self.in_core = in_core
        self._make = make

    @overload
    def __getitem__(self, position: int) -> _Item: ...
    @overload
    def __getitem__(self, position: slice) -> list[_Item]: ...
    def __getitem__(self, position: int | slice) -> _Item | list[_Item]:
        return self._items[position]

    def __len__(self) -> int:
        return self.in_core.num_items

    def as_planned(self) -> list[_Item]:
        """The items as a plan has them."""
        return list(self._items)

    @functools.cached_property
    def _items(self) -> list[_Item]:
        return self._make(self.in_core)


class ListedReads(_Listed[ReadItem, _core.Reads]):
    """What a rank reads.

    Args:
        reads: The list.
        columns: The metadata by which it was made.
        make: Makes its items.
    """

    def __init__(
        self, reads: _core.Reads, columns: _core.MetadataColumns, make: Callable[[_core.Reads], list[ReadItem]]
    ) -> None:
        super().__init__(reads, make)
        self.columns = columns

    def with_records(self) -> _core.ReadList:
        """The same with the records that hold it, in the order of files."""
        return _core.ReadList(self.in_core, self.columns)

    def as_planned(self) -> list[ReadItem]:
        """The items as they lie in the files."""
        return [self._items[position] for position in self.with_records().in_file_order()]

    def split(self) -> tuple[ListedReads, ListedReads]:
        """Values that are no tensors, and parts of tensors."""
        values, tensors = self.in_core.values_alone(), self.in_core.tensors_alone()
        return ListedReads(values, self.columns, self._make), ListedReads(tensors, self.columns, self._make)


class ListedWrites(_Listed[WriteItem, _core.Writes]):
    """What a rank writes."""


class _MadeWhenAsked(Generic[_Item, _List]):
    """A plan whose items are made when somebody asks for them. Who has them may change them: from then on they count.

    Attributes:
        listed: What they are made of, until then.
    """

    listed: _Listed[_Item, _List] | None = None
    _items: list[_Item]

    @property
    def items(self) -> list[_Item]:
        if self.listed is not None:
            self._items, self.listed = self.listed.as_planned(), None
        return self._items

    @items.setter
    def items(self, items: list[_Item]) -> None:
        self._items, self.listed = items, None


class PlannedReads(_MadeWhenAsked[ReadItem, _core.Reads], LoadPlan):
    """A load plan whose items, in the order of files, are made when somebody asks for them."""

    def __init__(
        self,
        items: list[ReadItem] | None = None,
        storage_data: Any = None,
        planner_data: Any = None,
        *,
        listed: ListedReads | None = None,
    ) -> None:
        super().__init__([] if items is None else items, storage_data, planner_data)
        self.listed = listed

    def __reduce__(self) -> tuple[Any, ...]:
        return LoadPlan, (self.items, self.storage_data, self.planner_data)


class PlannedWrites(_MadeWhenAsked[WriteItem, _core.Writes], SavePlan):
    """A save plan whose items are made when somebody asks for them."""

    def __init__(
        self,
        items: list[WriteItem] | None = None,
        storage_data: Any = None,
        planner_data: Any = None,
        usable: bool = True,
        *,
        listed: ListedWrites | None = None,
    ) -> None:
        super().__init__([] if items is None else items, storage_data, planner_data, usable)
        self.listed = listed

    def __reduce__(self) -> tuple[Any, ...]:
        return SavePlan, (self.items, self.storage_data, self.planner_data, self.usable)


class ForeseenPlan(LoadPlan):
    """A local plan without items that says what its rank will probably read, where the coordinator decides the items.

    It travels without that.
    """

    foresee: Callable[[], Sequence[ReadItem]] = list

    def __reduce__(self) -> tuple[Any, ...]:
        return LoadPlan, (self.items, self.storage_data, self.planner_data)


def reads_of(plan: LoadPlan) -> Sequence[ReadItem]:
    """The items of a plan, in any order, without making those that nobody has asked for."""
    listed = plan.listed if isinstance(plan, PlannedReads) else None
    return plan.items if listed is None else listed


def writes_of(plan: SavePlan) -> Sequence[WriteItem]:
    """The same of what a rank writes."""
    listed = plan.listed if isinstance(plan, PlannedWrites) else None
    return plan.items if listed is None else listed


def split_plan(plan: LoadPlan) -> tuple[list[ReadItem], LoadPlan]:
    """The items of values that are no tensors, and the plan of the others."""
    reads = reads_of(plan)
    if isinstance(reads, ListedReads):
        values, tensors = reads.split()
        return values.as_planned(), PlannedReads(None, plan.storage_data, plan.planner_data, listed=tensors)
    items_of_values = [item for item in reads if item.type == LoadItemType.BYTE_IO]
    others = [item for item in reads if item.type != LoadItemType.BYTE_IO]
    return items_of_values, dataclasses.replace(plan, items=others)
