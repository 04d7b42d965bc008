"""Describes whatever checkpoint lies at a path, by its metadata alone. Only files of ``torch.save`` need torch."""

from __future__ import annotations

import importlib
import os
from pathlib import Path

from torchtitan_ext.storage.formats.contents import Contents
from torchtitan_ext.storage.formats.detect import format_of
from torchtitan_ext.storage.formats.safetensors_files import describe_safetensors
from torchtitan_ext.storage.inspect.dcp_contents import describe_dcp


def describe(path: str | os.PathLike[str], *, rank: int | None = None, unsafe_unpickle: bool = False) -> Contents:
    """What a checkpoint holds: DCP (stock's or ours), safetensors, or a file of ``torch.save``.

    Args:
        rank: Whose part, of a DCP checkpoint in which each rank has metadata of its own.
        unsafe_unpickle: Of a file of ``torch.save``: run whatever its pickle names.

    Raises:
        DamagedCheckpointError: Its metadata is.
        UnknownFormatError: There is no checkpoint of these formats.
        UnsafePickleError: A file of ``torch.save`` names what is not on the list of what may be unpickled.
    """
    place = Path(path)
    found = format_of(place)
    if found == "dcp":
        return describe_dcp(place, rank)
    if found == "safetensors":
        return describe_safetensors(place)
    torch_files = importlib.import_module("torchtitan_ext.storage.formats.torch_files")
    contents: Contents = torch_files.describe_torch(place, unsafe_unpickle=unsafe_unpickle)
    return contents
