"""Items of plans from columns: thousands of calls of their constructors cost more than all else of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from torchtitan_ext import _core


def items_of(cls: type, **columns: Sequence[Any]) -> list[Any]:
    """An instance of a frozen dataclass of DCP per row of the columns, which have equal lengths.

    Args:
        columns: By field, all of them, with what the constructor would store.
    """
    if {field.name for field in fields(cls)} == columns.keys() and not hasattr(cls, "__post_init__"):
        return _core.instances(cls, **columns)
    # Of a torch that has other fields: its constructor knows what to do with them.
    return [cls(**dict(zip(columns, row, strict=True))) for row in zip(*columns.values(), strict=True)]
