"""Detects the format of the checkpoint at a path by names and first bytes. Imports no torch."""

from __future__ import annotations

import difflib
import os
import re
import shlex
import stat
from pathlib import Path
from typing import Literal

from torchtitan_ext.errors import UnknownFormatError, named
from torchtitan_ext.storage.commit.branch import latest_path
from torchtitan_ext.storage.commit.steps import find_steps, step_of
from torchtitan_ext.storage.location import Location, place_at
from torchtitan_ext.storage.objects.folder import ObjectFolder

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

_MAX_NAMED = 8


def format_of(path: str | os.PathLike[str]) -> Format:
    """The format of the checkpoint at a path, which may be damaged. Reads only names, or the first bytes of a file.

    Raises:
        UnknownFormatError: There is no checkpoint of these formats.
        OSError: There is nothing at the path, or it cannot be read.
    """
    place = place_at(path)
    if isinstance(place, Location):
        folder = ObjectFolder(place)
        if folder.stamp(".metadata") is not None:
            return "dcp"
        if place.name.endswith(".safetensors") or any(name.endswith(".safetensors") for name in folder.stamps()):
            return "safetensors"
        raise UnknownFormatError(str(place), "the folder has no .metadata and no *.safetensors")
    if place.is_dir():
        names = os.listdir(place)
        if any(map(_DCP_NAME.fullmatch, names)):
            return "dcp"
        if any(name.endswith(".safetensors") for name in names):
            return "safetensors"
        raise UnknownFormatError(str(place), _missing(place, names))
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
    """Whether a zip archive begins with ``data.pkl``, as archives of ``torch.save`` do."""
    name_bytes = int.from_bytes(head[26:28], "little")
    return head.startswith(ZIP_START) and head[_NAME_OFFSET : _NAME_OFFSET + name_bytes].endswith(b"/data.pkl")


def checkpoints_in(path: Path) -> list[str]:
    """The names of the checkpoints in a directory: some trainers have one each for model and optimizer."""
    names = []
    for name in sorted(os.listdir(path)) if path.is_dir() else []:
        try:
            if not name.startswith(".") and (path / name).is_dir():
                format_of(path / name)
                names.append(name)
        except (UnknownFormatError, OSError):
            continue
    return names


def how_to_load(path: Path) -> str | None:
    """What lies at a path instead of a DCP checkpoint, and what to call; ``None`` if there is a DCP checkpoint."""
    try:
        found = format_of(path)
    except FileNotFoundError:
        return _not_there(path)
    except UnknownFormatError as error:
        steps = sorted(number for number, is_finished in find_steps(path).items() if is_finished)
        if (latest := latest_path(path)) is not None:
            return (
                f"is the directory of a run, not a checkpoint; pass step='latest', or step={step_of(latest)}: it has "
                f"steps {', '.join(map(str, steps[-_MAX_NAMED:]))}"
            )
        return f"is no checkpoint: {error.detail}"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    if found == "dcp":
        return None
    if found == "torch":
        return f"is a file of torch.save, which no load of a job reads; {_convert(path)}"
    what = "holds safetensors files" if path.is_dir() else "is one safetensors file"
    return f"{what}; leave storage_reader out, tte.load reads them; or {_convert(path)}"


def _convert(path: Path) -> str:
    return f"write it as DCP first: torchtitan-ext convert {shlex.quote(str(path))} <directory> --to dcp"


def _not_there(path: Path) -> str:
    if not path.parent.is_dir():
        return f"is not there, nor is {path.parent}; give the path of a checkpoint"
    near = difflib.get_close_matches(path.name, os.listdir(path.parent), n=_MAX_NAMED)
    return f"is not there; {f'near it are {named(near)}' if near else 'give the path of a checkpoint'}"


def _missing(path: Path, names: list[str]) -> str:
    if any(name.endswith(".distcp") for name in names):
        return "it has data files of a save that has not finished: no .metadata, and no .tte_index that stands for it"
    if find_steps(path):
        return "it is the directory of a run, name one of its steps"
    held = checkpoints_in(path)
    if held:
        return f"it holds {'checkpoints' if len(held) > 1 else 'a checkpoint'}, name one: {named(held, _MAX_NAMED)}"
    return "the directory has no .metadata, no .tte_index and no *.safetensors"
