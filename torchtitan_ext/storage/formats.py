"""Which kind of checkpoint lies at a path, by the names and the first bytes of what is there. Imports no torch."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from typing import Literal

from torchtitan_ext.errors import UnknownFormatError

Format = Literal["dcp", "safetensors", "torch"]
"""``dcp``: a directory of torch.distributed.checkpoint, stock's or ours. ``safetensors``: a file, or a directory with
some. ``torch``: a file of ``torch.save``."""

_DCP_NAME = re.compile(r"(__\d+)?\.(metadata|tte_index)(\.[0-9a-f]{32})?")

# How torch.save began before it wrote zip archives (torch 1.5): protocol 2, then its magic number as a long integer.
_LEGACY_START = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19"

ZIP_START = b"PK\x03\x04"
"""The first bytes of a zip archive, which torch.save writes since torch 1.6."""

# Where the name of an archive's first entry begins.
_NAME_OFFSET = 30
_HEAD_BYTES = 4096


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
    if not stat.S_ISREG(place.stat().st_mode):
        raise UnknownFormatError(str(place), "it is neither a file nor a directory")
    with place.open("rb") as stream:
        head = stream.read(_HEAD_BYTES)
    if head.startswith(_LEGACY_START) or _is_torch_archive(head):
        return "torch"
    if place.suffix == ".safetensors" or head[8:9] == b"{":
        return "safetensors"
    raise UnknownFormatError(str(place), "the file begins as none of safetensors or torch.save does")


def _is_torch_archive(head: bytes) -> bool:
    """Whether a zip archive begins with the pickle of ``torch.save``, as those do; others begin with other entries."""
    name_bytes = int.from_bytes(head[26:28], "little")
    return head.startswith(ZIP_START) and head[_NAME_OFFSET : _NAME_OFFSET + name_bytes].endswith(b"/data.pkl")


def _missing(names: list[str]) -> str:
    if any(name.endswith(".distcp") for name in names):
        return "it has data files of a save that has not finished: no .metadata, and no .tte_index that stands for it"
    if any(re.fullmatch(r"step-\d+", name) for name in names):
        return "it is the directory of a run, name one of its steps"
    return "the directory has no .metadata, no .tte_index and no *.safetensors"
