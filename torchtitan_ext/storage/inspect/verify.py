"""Whether a checkpoint of any format is whole. Imports no torch."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torchtitan_ext import _core
from torchtitan_ext.errors import DamagedCheckpointError, TorchtitanExtError
from torchtitan_ext.storage.checkpoint_files import metadata_path, parse_index, safetensors_paths
from torchtitan_ext.storage.commit.opened import OpenedCheckpoint
from torchtitan_ext.storage.formats.archives import archive_damage
from torchtitan_ext.storage.formats.detect import ZIP_START, Format, format_of
from torchtitan_ext.storage.formats.safetensors_files import (
    SafetensorsEntry,
    find_weight_map,
    read_header,
    read_weight_map,
    sizes_of_tensor,
)
from torchtitan_ext.storage.inspect.dcp_damage import Damage, DcpLook, Verdict, damage_of_error, verify_dcp
from torchtitan_ext.storage.location import Location, Place
from torchtitan_ext.storage.objects.opened import open_checkpoint
from torchtitan_ext.storage.progress import OnBytes


def verify(path: Place, *, is_deep: bool = False, on_bytes: OnBytes = lambda num_bytes: None) -> Verdict:
    """Finds all damages of a checkpoint.

    Args:
        is_deep: Read all bytes and compare them with their checksums, if there are any; else check names, sizes, ids,
            and whether the metadata is complete.

    Raises:
        UnknownFormatError: There is no checkpoint.
    """
    verifiers: dict[Format, Callable[..., Verdict]] = {
        "dcp": verify_dcp,
        "safetensors": _verify_safetensors,
        "torch": _verify_torch,
    }
    return verifiers[format_of(path)](path, is_deep=is_deep, on_bytes=on_bytes)


def find_damage(path: Place, *, part: int = 0, num_parts: int = 1, is_deep: bool = True) -> str | None:
    """The first damage of a DCP checkpoint, in its metadata or in the files of one of several parts; ``None`` without.

    For files of stock DCP, which have no checksums, only sizes are checked. A lost index is no damage: files have
    footers of their own.

    Args:
        is_deep: Whether to read all bytes of these files.
    """
    try:
        look = DcpLook(open_checkpoint(path), None, is_deep=is_deep, with_crcs=False, on_bytes=lambda num_bytes: None)
        damage = next(look.damages(part, num_parts), None)
    except (TorchtitanExtError, OSError, ValueError) as error:
        return str(error)
    return None if damage is None else damage.what


def is_whole(path: Place) -> bool:
    """Whether all files of a checkpoint are there with their sizes and belong together; reads no data."""
    if isinstance(path, Location):
        return find_damage(path, is_deep=False) is None
    try:
        opened = OpenedCheckpoint(path)
        try:
            metadata: bytes | None = opened.read_metadata(metadata_path(path, None).name)
        except FileNotFoundError:
            metadata = None
        # parse_index refuses an index of another save, which read_index may return without an id.
        place, content = opened.read_index(None, None)
        index = None if content is None else parse_index(place, content, metadata, verify="all")
        if index is None:
            return find_damage(path, is_deep=False) is None
        return all(os.fstat(opened.descriptor(name)).st_size == file.num_bytes for name, file in index.files.items())
    except (TorchtitanExtError, OSError, ValueError):
        return False


def _verify_safetensors(path: Path, *, is_deep: bool, on_bytes: OnBytes) -> Verdict:
    """Checks that headers describe all bytes of their files, and that the index fits; there are no checksums."""
    damages: list[Damage] = []
    headers: dict[str, dict[str, SafetensorsEntry]] = {}
    files = safetensors_paths(path)
    for file in files:
        try:
            headers[file.name] = read_header(file)
        except DamagedCheckpointError as error:
            headers[file.name] = {}
            damages.append(Damage(file.name, error.reason, "header"))
        except OSError as error:
            headers[file.name] = {}
            damages.append(damage_of_error(file.name, file, error))
        on_bytes(file.stat().st_size)
    weight_map: dict[str, str] = {}
    index = find_weight_map(path)
    if index is not None:
        try:
            weight_map = read_weight_map(index, index.read_bytes())
        except DamagedCheckpointError as error:
            damages.append(Damage(index.name, error.reason, "index"))
    damages += _index_damages(path, weight_map, headers, {damage.file for damage in damages})
    if not damages:
        damages += _chunk_damages(path, weight_map, headers)
    num_bytes = sum(file.stat().st_size for file in files)
    num_files = len(set(headers) | set(weight_map.values()))
    return Verdict(path, "safetensors", is_deep, damages, num_files, num_bytes, list(headers) if is_deep else [])


def _index_damages(
    path: Path, weight_map: Mapping[str, str], headers: Mapping[str, Mapping[str, Any]], damaged: set[str]
) -> Iterator[Damage]:
    """Files and tensors that the index names and that are missing."""
    for name, num_keys in sorted(Counter(weight_map.values()).items()):
        if name not in headers:
            what = f"{path / name}: the index names it for {num_keys} keys, and it is not there"
            yield Damage(name, what, "lost")
    for fqn, name in weight_map.items():
        if name in headers and name not in damaged and fqn not in headers[name]:
            yield Damage(name, f"{path / name}: the index names it for {fqn}, which it does not hold", "index")


def _chunk_damages(
    path: Path, weight_map: Mapping[str, str], headers: Mapping[str, Mapping[str, SafetensorsEntry]]
) -> Iterator[Damage]:
    """Tensors whose chunks do not hold every element once, in the files that the index names for them."""
    chunks: dict[str, list[tuple[str, SafetensorsEntry]]] = {}
    for name, entries in headers.items():
        for fqn, entry in entries.items():
            if weight_map.get(fqn, name) == name:
                chunks.setdefault(fqn, []).append((name, entry))
    for fqn, places in chunks.items():
        if len(places) == 1 and not any(places[0][1].offsets):
            continue
        boxes = [(entry.offsets, entry.sizes) for _, entry in places]
        try:
            sizes = sizes_of_tensor(f"{path}: {fqn}", boxes)
        except DamagedCheckpointError as error:
            yield Damage(places[0][0], error.reason, "chunks")
            continue
        defect = _core.cover_defect(sizes, boxes)
        if defect is not None:
            what = f"{path}: the chunks of {fqn} {list(sizes)} {defect}: it cannot be loaded"
            yield Damage(places[0][0], what, "chunks")


def _verify_torch(path: Path, *, is_deep: bool, on_bytes: OnBytes) -> Verdict:
    damages: list[Damage] = []
    is_proved = False
    with path.open("rb") as stream:
        is_zip = stream.read(len(ZIP_START)) == ZIP_START
        stream.seek(0)
        if is_zip:
            problem, is_proved = archive_damage(stream, is_deep=is_deep, on_bytes=on_bytes)
            damages += [] if problem is None else [Damage(path.name, f"{path}: {problem}", "record")]
    unproved = [] if is_proved or not is_deep else [path.name]
    return Verdict(path, "torch", is_deep, damages, 1, path.stat().st_size, unproved)
