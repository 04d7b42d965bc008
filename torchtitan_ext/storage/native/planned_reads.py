"""What a rank reads, as one list in C++ from the planner to the files."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, overload

from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from torchtitan_ext import _core


class ListedReads(Sequence[ReadItem]):
    """Read items in the order of keys, which are made when one is asked for.

    Args:
        reads: The list.
        columns: The metadata by which it was made.
        make: Makes the items of a list.
    """

    def __init__(
        self, reads: _core.Reads, columns: _core.MetadataColumns, make: Callable[[_core.Reads], list[ReadItem]]
    ) -> None:
        self._reads = reads
        self.columns = columns
        self._make = make

    @overload
    def __getitem__(self, position: int) -> ReadItem: ...
    @overload
    def __getitem__(self, position: slice) -> list[ReadItem]: ...
    def __getitem__(self, position: int | slice) -> ReadItem | list[ReadItem]:
        return self._items[position]

    def __len__(self) -> int:
        return self._reads.num_items

    @property
    def num_bytes(self) -> int | None:
        """Of the tensors, as they were saved; ``None`` where one has a dtype that only torch knows."""
        return self._reads.num_bytes(self.columns)

    def with_records(self) -> _core.ReadList:
        """The same with the records that hold it, in the order of files."""
        return _core.ReadList(self._reads, self.columns)

    def in_file_order(self) -> list[ReadItem]:
        """The items as they lie in the files."""
        return [self._items[position] for position in self.with_records().in_file_order()]

    def split(self) -> tuple[ListedReads, ListedReads]:
        """Values that are no tensors, and parts of tensors."""
        values, tensors = self._reads.values_alone(), self._reads.tensors_alone()
        return ListedReads(values, self.columns, self._make), ListedReads(tensors, self.columns, self._make)

    @functools.cached_property
    def _items(self) -> list[ReadItem]:
        return self._make(self._reads)


class PlannedReads(LoadPlan):
    """A plan whose items, in the order of files, are made when somebody asks for them. Who has them may change them:
    from then on they count.

    Attributes:
        listed: What they are made of, until then.
    """

    listed: ListedReads | None = None

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

    @property
    def items(self) -> list[ReadItem]:
        if self.listed is not None:
            self.items = self.listed.in_file_order()
        return self._items

    @items.setter
    def items(self, items: list[ReadItem]) -> None:
        self._items, self.listed = items, None

    def __reduce__(self) -> tuple[Any, ...]:
        return LoadPlan, (self.items, self.storage_data, self.planner_data)


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


def split_plan(plan: LoadPlan) -> tuple[list[ReadItem], LoadPlan]:
    """The items of values that are no tensors, and the plan of the others."""
    reads = reads_of(plan)
    if isinstance(reads, ListedReads):
        values, tensors = reads.split()
        return values.in_file_order(), PlannedReads(None, plan.storage_data, plan.planner_data, listed=tensors)
    items_of_values = [item for item in reads if item.type == LoadItemType.BYTE_IO]
    others = [item for item in reads if item.type != LoadItemType.BYTE_IO]
    return items_of_values, dataclasses.replace(plan, items=others)
