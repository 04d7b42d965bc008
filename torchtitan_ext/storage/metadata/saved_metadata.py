"""The metadata of a DCP checkpoint as columns, read from ``.metadata`` or from an index that replaces it.

Imports no torch: ``metadata_file`` makes DCP's objects of the columns.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, TypeGuard

from torchtitan_ext import _core
from torchtitan_ext.errors import DamagedCheckpointError, warn
from torchtitan_ext.layout.world import World
from torchtitan_ext.storage.checkpoint_files import index_path, metadata_path, parse_index, shown
from torchtitan_ext.storage.location import Place
from torchtitan_ext.storage.objects.opened import Opened

DCP_VERSION = "1.0.0"
"""The version of DCP's format that is written, and the highest that is read."""

WORLD_KEY = "torchtitan_ext.world"
"""The entry of ``planner_data`` in which a save notes the world that wrote it; left out if the state has such a key."""

_RANK_METADATA = re.compile(r"__(\d+)\.metadata")


@dataclass(frozen=True)
class SavedMetadata:
    """The metadata of a DCP checkpoint.

    Attributes:
        storage_meta: The fields of DCP's ``StorageMeta``; empty if an older torch saved.
        version: The version of DCP's format.
        digest: Equal on ranks that have read the same checkpoint.
        content: The bytes of ``.metadata``; empty if an index replaces it.
        index: ``None`` if there is no index, or only one of another save.
    """

    columns: _core.MetadataColumns
    planner_data: Any
    storage_meta: dict[str, Any]
    version: str | None
    digest: str
    content: bytes
    index: _core.Index | None

    @property
    def save_id(self) -> str | None:
        return _save_id(self.storage_meta)

    @property
    def world(self) -> tuple[int | None, dict[str, int]]:
        """The number of ranks that saved (``None`` if unknown), and the sizes of their named mesh axes."""
        recorded = recorded_world(self.planner_data)
        if recorded is not None:
            return recorded.size, dict(recorded.mesh)
        size = "" if self.index is None else self.index.notes.get("world_size", "")
        return int(size) if size.isdecimal() else None, {}


def recorded_world(planner_data: Any) -> World | None:
    """The number of ranks that saved and their named mesh axes, as our saves note them; ``None`` without a note."""
    record = planner_data.get(WORLD_KEY) if isinstance(planner_data, dict) else None
    size, mesh = (record.get("size"), record.get("mesh")) if isinstance(record, dict) else (None, None)
    if not _is_count(size) or not isinstance(mesh, dict):
        return None
    return World(size, {axis: length for axis, length in mesh.items() if isinstance(axis, str) and _is_count(length)})


def recorded_path(planner_data: Any, fqn: str) -> tuple[str | int, ...] | None:
    """The path of a key in the nested state dict, as its save noted it: keys of dicts, and positions in lists.

    ``None`` unless the noted path, joined by dots, is the key: a damaged file may contain anything.
    """
    path = planner_data.get(fqn) if isinstance(planner_data, dict) else None
    if type(path) is not tuple or not 0 < len(path) <= fqn.count(".") + 1 or not {str, int}.issuperset(map(type, path)):
        return None
    return path if ".".join(map(str, path)) == fqn else None


def recorded_paths(planner_data: Any, fqns: Iterable[str]) -> dict[str, tuple[str | int, ...]]:
    """``recorded_path`` of every key that has one."""
    return {fqn: path for fqn in fqns if (path := recorded_path(planner_data, fqn)) is not None}


def ranks_with_metadata(names: Iterable[str]) -> list[int]:
    """The ranks that have metadata of their own (``use_collectives=False``) among files of a checkpoint, in order."""
    return sorted(int(match[1]) for name in names if (match := _RANK_METADATA.fullmatch(name)))


def read_saved_metadata(files: Opened, rank: int | None, *, verify: str) -> SavedMetadata:
    """Reads metadata and index of a checkpoint.

    Args:
        rank: The rank whose metadata is read, if each rank has its own; else ``None``.
        verify: As for ``FileReader``: with ``"none"`` a damaged index beside a ``.metadata`` is only a warning.

    Raises:
        DamagedCheckpointError: One of the two is damaged, or they do not belong together.
        FileNotFoundError: There is neither ``.metadata`` nor an index that replaces it.
    """
    saved = read_without_index(files, rank, verify=verify)
    return saved if saved.index is not None else replace(saved, index=read_index_beside(files, rank, saved, verify))


def read_without_index(
    files: Opened, rank: int | None, *, verify: str, properties: Sequence[str] = ()
) -> SavedMetadata:
    """``read_saved_metadata`` without the index beside a ``.metadata``; ``properties`` as for ``parse_pickle``."""
    path = metadata_path(files.directory, rank)
    try:
        data = files.read_metadata(path.name)
    except FileNotFoundError as error:
        return _of_index_alone(files, rank, verify, error)
    try:
        parsed = parse_pickle(data, properties)
    except (ValueError, OverflowError) as error:
        raise DamagedCheckpointError(f"{path}: {error}") from None
    return _saved(parsed, f"{_core.digest(data):016x}", data, None)


def read_index_beside(files: Opened, rank: int | None, saved: SavedMetadata, verify: str) -> _core.Index | None:
    """The index beside the ``.metadata`` that ``read_without_index`` has read."""
    path, content = files.read_index(rank, saved.save_id)
    if content is None:
        return None
    named = cache(lambda: {file.path for file in saved.columns.describe_files()})
    try:
        index = parse_index(
            path, content, saved.content, verify=verify, has_file=lambda file: file.name in named() and files.has(file)
        )
    except OverflowError as error:
        raise DamagedCheckpointError(f"{files.directory}: its records have no end ({error})") from None
    files.expect({} if index is None else index.files)
    return index


def parse_pickle(data: bytes, properties: Sequence[str] = ()) -> _core.ParsedMetadata:
    """The metadata in the bytes of a ``.metadata`` file. Warns of fields that a newer torch added to it.

    Args:
        properties: The names of the fields of DCP's ``TensorProperties``, as far as they are known: the file has none.

    Raises:
        ValueError: The bytes are damaged, name something that is not part of a checkpoint's metadata, or have a value
            in a field that is not known.
    """
    parsed = _core.read_metadata_pickle(data)
    for number in range(_core.NUM_PROPERTIES, _core.NUM_PROPERTIES + parsed.num_unknown_properties):
        name = f" ({properties[number]})" if number < len(properties) else ""
        warn(
            f".metadata: a newer torch has written field {number + 1}{name} of TensorProperties, of which this "
            f"version knows {_core.NUM_PROPERTIES}: it is ignored, because it has its default everywhere; upgrade "
            "torchtitan_ext"
        )
    return parsed


def parse_tables(tables: bytes, files: Iterable[_core.RankFile], path: Place) -> _core.ParsedMetadata:
    """The metadata in the tables of an index that replaces ``.metadata``.

    Raises:
        FormatError: The index is damaged, or belongs to a checkpoint with a ``.metadata``.
    """
    parsed = _core.read_metadata_tables(tables, shown(path))
    for file in files:
        parsed.columns.add_records(file)
    return parsed


def _of_index_alone(files: Opened, rank: int | None, verify: str, missing: FileNotFoundError) -> SavedMetadata:
    """Of a checkpoint without a ``.metadata``; raises ``missing`` without an index that replaces it."""
    path = index_path(files.directory, rank)
    try:
        content = files.read_metadata(path.name)
    except FileNotFoundError:
        raise missing from None
    index = parse_index(path, content, None, verify=verify)
    if index is None:
        raise missing
    try:
        parsed = parse_tables(index.tables, index.files.values(), path)
    except (ValueError, OverflowError) as error:
        raise DamagedCheckpointError(str(error)) from None
    return _saved(parsed, index.save_id.hex(), b"", index)


def _saved(parsed: _core.ParsedMetadata, digest: str, content: bytes, index: _core.Index | None) -> SavedMetadata:
    fields = parsed.storage_meta if isinstance(parsed.storage_meta, dict) else {}
    return SavedMetadata(parsed.columns, parsed.planner_data, fields, parsed.version, digest, content, index)


def _is_count(value: object) -> TypeGuard[int]:
    return type(value) is int and value > 0


def _save_id(fields: dict[str, Any]) -> str | None:
    save_id = fields.get("save_id")
    return save_id if isinstance(save_id, str) and save_id else None
