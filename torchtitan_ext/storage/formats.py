"""Which kind of checkpoint lies at a path, by the names and the first bytes of what is there. Imports no torch."""

from __future__ import annotations

import os
import re
import zipfile
from pathlib import Path
from typing import Literal

from torchtitan_ext.errors import UnknownFormatError

Format = Literal["dcp", "safetensors", "torch"]
"""``dcp``: a directory of torch.distributed.checkpoint, stock's or ours. ``safetensors``: a file, or a directory of such
files. ``torch``: a file of ``torch.save``."""

_DCP_NAME = re.compile(r"(__\d+)?\.(metadata|tte_index)(\.[0-9a-f]{32})?")

# How torch.save began before it wrote zip archives (torch 1.5): protocol 2, then its magic number as a long integer.
_LEGACY_START = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19"


def format_of(path: str | os.PathLike[str]) -> Format:
    """The format of the checkpoint at a path; reads names, and of a file its first bytes. What is in it may be damaged.

    Raises:
        UnknownFormatError: It is none of these.
        OSError: There is nothing at the path, or it cannot be read.
    """
    place = Path(path)
    if place.is_dir():
        names = os.listdir(place)
        if any(map(_DCP_NAME.fullmatch, names)):
            return "dcp"
        if any(name.endswith(".safetensors") for name in names):
            return "safetensors"
        raise UnknownFormatError(str(place), _missing(names))
    with place.open("rb") as stream:
        head = stream.read(len(_LEGACY_START))
    if head == _LEGACY_START or (head[:4] == b"PK\x03\x04" and _is_torch_archive(place)):
        return "torch"
    if place.suffix == ".safetensors" or head[8:9] == b"{":
        return "safetensors"
    raise UnknownFormatError(str(place), "the file begins as none of safetensors or torch.save does")


def _is_torch_archive(path: Path) -> bool:
    """Whether a zip archive has the pickle of ``torch.save``; a cut one, whose directory is gone, may have had it."""
    try:
        with zipfile.ZipFile(path) as archive:
            return any(name.endswith("/data.pkl") for name in archive.namelist())
    except (zipfile.BadZipFile, NotImplementedError):
        return True


def _missing(names: list[str]) -> str:
    if any(name.endswith(".distcp") for name in names):
        return "it has data files of a save that has not finished: no .metadata, and no .tte_index that stands for it"
    if any(re.fullmatch(r"step-\d+", name) for name in names):
        return "it is the directory of a run: name one of its steps"
    return "the directory has no .metadata, no .tte_index and no *.safetensors"
