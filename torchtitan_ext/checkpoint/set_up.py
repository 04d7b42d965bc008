"""The first calls of a save or load to planner and storage, as DCP makes them, older interfaces of others included."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlanner as StockLoadPlanner
from torch.distributed.checkpoint.planner import SavePlanner as StockSavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

from torchtitan_ext.errors import Problem, refusal
from torchtitan_ext.storage.formats import how_to_load


def set_up_save(
    values: dict[Any, Any], writer: StorageWriter, planner: StockSavePlanner, *, is_coordinator: bool, rank: int
) -> None:
    """Tells planner and storage what is saved, before they are asked for this rank's plan. Not collective."""
    if _takes(planner.set_up_planner, "storage_meta"):
        planner.set_up_planner(values, storage_meta=writer.storage_meta(), is_coordinator=is_coordinator)
    else:
        planner.set_up_planner(values, is_coordinator)  # type: ignore[arg-type]
    if _takes(writer.set_up_storage_writer, "kwargs"):
        writer.set_up_storage_writer(is_coordinator, rank=rank, use_collectives=True)
    else:
        writer.set_up_storage_writer(is_coordinator)


def read_metadata(reader: StorageReader, name: str, rank: int, path: Path | None = None) -> tuple[Metadata, bool]:
    """The metadata of a checkpoint, and whether it is of this rank's part alone (``use_collectives=False``).

    Args:
        name: Of the checkpoint, for messages.
        path: Of our files, or stock's: where nothing of them is there, that is looked at.

    Raises:
        ReshardError: There is neither.
    """
    try:
        return reader.read_metadata(), False
    except Exception as error:
        whole = error
    if _takes(reader.read_metadata, "kwargs"):
        try:
            return reader.read_metadata(rank=rank), True
        except Exception:
            pass
    other = how_to_load(path) if path is not None else None
    if other is not None:
        raise refusal("load", [Problem("no_checkpoint", name, other)])
    detail = (
        f"has no .metadata that can be read ({type(whole).__name__}: {whole}); give the path of a checkpoint whose "
        "save has finished"
    )
    raise refusal("load", [Problem("broken_checkpoint", name, detail)])


def set_up_load(
    values: dict[Any, Any],
    reader: StorageReader,
    planner: StockLoadPlanner,
    metadata: Metadata,
    *,
    is_coordinator: bool,
    rank: int,
    is_of_one_rank: bool,
) -> None:
    """Tells planner and storage what is loaded from where, before they are asked for this rank's plan."""
    planner.set_up_planner(values, metadata, is_coordinator)
    if _takes(reader.set_up_storage_reader, "kwargs"):
        reader.set_up_storage_reader(metadata, is_coordinator, rank=rank, use_collectives=not is_of_one_rank)
    else:
        reader.set_up_storage_reader(metadata, is_coordinator)


def _takes(function: Callable[..., Any], name: str) -> bool:
    return name in inspect.signature(function).parameters
