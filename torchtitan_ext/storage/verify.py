"""Whether a checkpoint of any format is whole. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from torchtitan_ext.errors import DamagedCheckpointError, TorchtitanExtError
from torchtitan_ext.storage.archives import archive_damage
from torchtitan_ext.storage.checkpoint_files import parse_index
from torchtitan_ext.storage.dcp_damage import DcpLook, verify_dcp
from torchtitan_ext.storage.formats import ZIP_START, Format, format_of
from torchtitan_ext.storage.opened import OpenedCheckpoint
from torchtitan_ext.storage.progress import OnBytes
from torchtitan_ext.storage.safetensors_files import find_weight_map, read_header, read_weight_map, safetensors_paths
from torchtitan_ext.storage.verdict import Damage, Verdict


def verify(path: Path, *, is_deep: bool = False, on_bytes: OnBytes = lambda num_bytes: None) -> Verdict:
    """Looks for everything that is wrong with a checkpoint.

    Args:
        is_deep: Read every byte and compare it with its checksum, where it has one; else look at names, sizes, ids, and
            whether the metadata is complete.

    Raises:
        UnknownFormatError: There is no checkpoint.
    """
    verifiers: dict[Format, Callable[..., Verdict]] = {
        "dcp": verify_dcp,
        "safetensors": _verify_safetensors,
        "torch": _verify_torch,
    }
    return verifiers[format_of(path)](path, is_deep=is_deep, on_bytes=on_bytes)


def find_damage(path: Path, *, part: int = 0, num_parts: int = 1) -> str | None:
    """What is wrong with a DCP checkpoint: reads all bytes of the files that fall to one of several parts.

    Returns:
        ``None`` where nothing is; files of stock DCP have no checksums: their sizes are looked at.
    """
    try:
        look = DcpLook(OpenedCheckpoint(path), None, is_deep=True, with_crcs=False, on_bytes=lambda num_bytes: None)
        damage = next(look.damages(part, num_parts), None)
    except (TorchtitanExtError, OSError, ValueError) as error:
        return str(error)
    return None if damage is None else damage.what


def is_whole(path: Path) -> bool:
    """Whether all files of a checkpoint are there, of their sizes, and belong together; reads none of the data."""
    try:
        opened = OpenedCheckpoint(path)
        try:
            metadata: bytes | None = opened.read_metadata(None)
        except FileNotFoundError:
            metadata = None
        # The name of an index in place needs the id in the metadata; one of another save does not match it.
        place, content = opened.read_index(None, None)
        index = None if content is None else parse_index(place, content, metadata, verify="all")
        if index is None:
            return find_damage(path) is None
        return all(
            os.fstat(opened.descriptor(name)).st_size == file.file.num_bytes for name, file in index.files.items()
        )
    except (TorchtitanExtError, OSError, ValueError):
        return False


def _verify_safetensors(path: Path, *, is_deep: bool, on_bytes: OnBytes) -> Verdict:
    """The headers describe all bytes of their files, and the index names what is there; there are no checksums."""
    damages: list[Damage] = []
    keys_of: dict[str, set[str]] = {}
    files = safetensors_paths(path)
    for file in files:
        try:
            keys_of[file.name] = set(read_header(file))
        except (DamagedCheckpointError, OSError) as error:
            keys_of[file.name] = set()
            damages.append(Damage(file.name, _reason(error)))
        on_bytes(file.stat().st_size)
    weight_map: dict[str, str] = {}
    index = find_weight_map(path)
    if index is not None:
        try:
            weight_map = read_weight_map(index)
        except DamagedCheckpointError as error:
            damages.append(Damage(index.name, error.reason))
    damaged = {damage.file for damage in damages}
    for name in sorted(set(weight_map.values()) - set(keys_of)):
        num_keys = sum(file == name for file in weight_map.values())
        damages.append(Damage(name, f"{path / name}: the index names it for {num_keys} keys, and it is not there"))
    for fqn, name in weight_map.items():
        if name in keys_of and name not in damaged and fqn not in keys_of[name]:
            damages.append(Damage(name, f"{path / name}: the index names it for {fqn}, which it does not hold"))
    num_bytes = sum(file.stat().st_size for file in files)
    num_files = len(set(keys_of) | set(weight_map.values()))
    return Verdict(path, "safetensors", is_deep, damages, num_files, num_bytes, list(keys_of) if is_deep else [])


def _verify_torch(path: Path, *, is_deep: bool, on_bytes: OnBytes) -> Verdict:
    damages: list[Damage] = []
    is_proved = False
    with path.open("rb") as stream:
        is_zip = stream.read(len(ZIP_START)) == ZIP_START
        stream.seek(0)
        if is_zip:
            problem, is_proved = archive_damage(stream, is_deep=is_deep, on_bytes=on_bytes)
            damages += [] if problem is None else [Damage(path.name, f"{path}: {problem}")]
    unproved = [] if is_proved or not is_deep else [path.name]
    return Verdict(path, "torch", is_deep, damages, 1, path.stat().st_size, unproved)


def _reason(error: DamagedCheckpointError | OSError) -> str:
    return error.reason if isinstance(error, DamagedCheckpointError) else str(error)
