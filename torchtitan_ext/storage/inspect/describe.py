"""Describes a checkpoint of any format from its metadata alone. Only files of ``torch.save`` need torch."""

from __future__ import annotations

import importlib
import os
from pathlib import Path

from torchtitan_ext.storage.formats.contents import Contents
from torchtitan_ext.storage.formats.detect import format_of
from torchtitan_ext.storage.formats.safetensors_files import describe_safetensors
from torchtitan_ext.storage.inspect.dcp_contents import describe_dcp


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
    place = Path(path)
    found = format_of(place)
    if found == "dcp":
        return describe_dcp(place, rank)
    if found == "safetensors":
        return describe_safetensors(place)
    torch_files = importlib.import_module("torchtitan_ext.storage.formats.torch_files")
    contents: Contents = torch_files.describe_torch(place, unsafe_unpickle=unsafe_unpickle)
    return contents
