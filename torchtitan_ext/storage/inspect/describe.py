"""Describes a checkpoint of any format from its metadata alone. Only files of ``torch.save`` need torch."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence

from torchtitan_ext.errors import DamagedCheckpointError, UnknownFormatError
from torchtitan_ext.storage.checkpoint_files import sharing_save
from torchtitan_ext.storage.commit.steps import step_of
from torchtitan_ext.storage.formats.contents import ContentFile, Contents
from torchtitan_ext.storage.formats.detect import format_of
from torchtitan_ext.storage.formats.plain_records import read_records
from torchtitan_ext.storage.formats.safetensors_files import describe_safetensors
from torchtitan_ext.storage.formats.scalars import read_scalars
from torchtitan_ext.storage.location import Location, Place, place_at
from torchtitan_ext.storage.metadata.saved_metadata import SavedMetadata, ranks_with_metadata, read_saved_metadata
from torchtitan_ext.storage.objects.opened import open_checkpoint


def describe(path: str | os.PathLike[str], *, rank: int | None = None, unsafe_unpickle: bool = False) -> Contents:
    """The contents of a checkpoint: DCP (stock's or ours), safetensors, or a file of ``torch.save``.

    Args:
        rank: The rank to describe, if each rank of a DCP checkpoint has metadata of its own.
        unsafe_unpickle: Run whatever the pickle of a ``torch.save`` file names.

    Raises:
        DamagedCheckpointError: The metadata is damaged.
        UnknownFormatError: There is no checkpoint of these formats.
        UnsafePickleError: The pickle of a ``torch.save`` file names something that is not allowed.
    """
    place = place_at(path)
    found = format_of(place)
    if found == "dcp" or isinstance(place, Location):
        return _describe_dcp(place, rank)
    if found == "safetensors":
        return describe_safetensors(place)
    torch_files = importlib.import_module("torchtitan_ext.storage.formats.torch_files")
    contents: Contents = torch_files.describe_torch(place, unsafe_unpickle=unsafe_unpickle)
    return contents


def _describe_dcp(path: Place, rank: int | None) -> Contents:
    """The contents of a DCP checkpoint; arguments and errors as in ``describe``.

    Raises:
        UnknownFormatError: Each rank has metadata of its own, and ``rank`` names none of them.
    """
    try:
        opened = open_checkpoint(path)
        saved = read_saved_metadata(opened, rank, verify="none")
    except FileNotFoundError:
        ranks = ranks_with_metadata(opened.names())
        if not ranks or rank in ranks:
            raise
        text = f"each rank has metadata of its own ({_listed(ranks)}) and rank {rank} has none: name one of these"
        raise UnknownFormatError(str(path), text) from None
    try:
        keys = saved.columns.describe_keys()
        files = [
            ContentFile(file.path, opened.size(file.path), file.num_parts, _earlier_save(saved, file.path))
            for file in saved.columns.describe_files()
        ]
    except OverflowError as error:
        raise DamagedCheckpointError(f"{path}: its records have no end ({error})") from None
    notes = {} if saved.index is None else saved.index.notes
    versions = {name: notes[name] for name in ("torchtitan_ext", "torch") if name in notes}
    world_size, mesh = saved.world
    return Contents(
        path,
        "dcp",
        keys,
        files,
        saved.columns.describe_chunks,
        lambda keys: read_scalars(path, saved, ((key.fqn, key.dtype is not None) for key in keys)),
        saved.planner_data if isinstance(saved.planner_data, dict) else {},
        lambda fqns: read_records(path, saved, fqns),
        has_checksums=saved.index is not None,
        save_id=saved.save_id,
        step=step_of(path),
        world_size=world_size,
        mesh=mesh,
        versions=versions | ({} if saved.version is None else {"dcp": saved.version}),
    )


def _earlier_save(saved: SavedMetadata, name: str) -> str | None:
    """The id in the name of a shared file, unless it is that of this save."""
    save_id = sharing_save(name)
    return None if save_id == saved.save_id else save_id


def _listed(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
