"""Safetensors files: headers, contents, where tensors lie in existing files and in new ones. Imports no torch.

A file is 8 bytes with the length of the header, little-endian, that many bytes of JSON (dtype, shape and bytes of each
tensor), and the bytes of all tensors without gaps (https://huggingface.co/docs/safetensors). Several files of one model
have a ``*.safetensors.index.json`` beside them, which names the file of each key. DCP's writer for Hugging Face notes
in ``__metadata__`` which chunk of a tensor a file holds.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torchtitan_ext import _core
from torchtitan_ext._core import ChunkSummary, KeySummary
from torchtitan_ext.errors import DamagedCheckpointError
from torchtitan_ext.storage.checkpoint_files import Record, safetensors_paths
from torchtitan_ext.storage.commit.steps import step_of
from torchtitan_ext.storage.element_types import ITEM_BYTES, num_bytes_of
from torchtitan_ext.storage.formats.contents import ContentFile, Contents, Scalar, bytes_of
from torchtitan_ext.storage.formats.scalars import read_number
from torchtitan_ext.storage.location import Place

# The format's own limit.
MAX_HEADER_BYTES = 100_000_000

INDEX_SUFFIX = ".safetensors.index.json"
INDEX_NAME = "model.safetensors.index.json"
"""The file that names the file of each tensor of a directory."""
# Numbers of bytes and elements are 64 bits wide.
_TOO_LARGE = 1 << 63
_MAX_ITEM_BYTES = 16

OWN_NOTES = ("format", "DCP_SHARDING_INFO")
"""Names in ``__metadata__`` that have a meaning of their own. Others may be further names of tensors of the file, each
with the tensor's name, as ``safetensors.torch.save_model`` notes them."""

_DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
    "I16": "int16", "I8": "int8", "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu", "C64": "complex64",
}  # fmt: skip
NAME_OF_DTYPE = {dtype: name for name, dtype in _DTYPES.items()}
"""The names of torch's dtypes in the files."""

ChunkRecord = tuple[tuple[int, ...], Record]
"""The offsets of a chunk in its tensor, and its record."""


class SafetensorsEntry(NamedTuple):
    """One tensor of a file.

    Attributes:
        dtype: The name in torch; the name in the file if torch has no such dtype.
        sizes: Sizes of the chunk in this file.
        offsets: Offsets of the chunk in the tensor, from DCP's note; zeros without one.
        begin: First byte of the chunk in the file.
    """

    dtype: str
    sizes: tuple[int, ...]
    offsets: tuple[int, ...]
    begin: int
    num_bytes: int


def files_with_key(directory: Path, fqn: str) -> list[str]:
    """Names of the ``*.safetensors`` files that hold a tensor of this name, sorted; damaged ones are left out."""
    found = []
    for path in safetensors_paths(directory):
        try:
            if fqn in read_header(path):
                found.append(path.name)
        except (OSError, DamagedCheckpointError):
            continue
    return found


def read_header(path: Path) -> dict[str, SafetensorsEntry]:
    """The tensors of a file, by name, in the order of their bytes.

    Raises:
        DamagedCheckpointError: The header is damaged, or does not describe every byte of the file once.
    """
    return read_header_and_notes(path)[0]


def read_header_and_notes(
    path: Place, descriptor: int | None = None
) -> tuple[dict[str, SafetensorsEntry], dict[str, str]]:
    """``read_header``, and the file's ``__metadata__``. Of an opened file if there is a descriptor."""
    status = Path(path).stat() if descriptor is None else os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise DamagedCheckpointError(f"{path} is no file")
    file_bytes = status.st_size
    with Path(path).open("rb") if descriptor is None else os.fdopen(descriptor, "rb", closefd=False) as file:
        header_bytes = header_end(file.fileno()) - 8
        file.seek(8)
        if header_bytes > min(MAX_HEADER_BYTES, file_bytes - 8):
            text = f"a header of {header_bytes} bytes is announced, and {max(0, file_bytes - 8)} follow"
            raise DamagedCheckpointError(f"{path}: {text}")
        text_bytes = file.read(header_bytes)
    try:
        # UTF-8 alone: json takes bytes of UTF-16 too, which no other reader of the format does.
        header = json.loads(text_bytes.decode(), object_pairs_hook=_with_unique_names)
        notes = dict(header.pop("__metadata__", None) or {})
        boxes = json.loads(notes["DCP_SHARDING_INFO"]) if "DCP_SHARDING_INFO" in notes else {}
        "".join(header).encode()  # JSON can spell what is no text
        entries = {str(fqn): _entry(entry, boxes.get(fqn), 8 + header_bytes) for fqn, entry in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedCheckpointError(f"{path}: its header is none of safetensors ({error})") from None
    # A tensor without elements may begin where the one behind it does.
    entries = dict(sorted(entries.items(), key=lambda item: (item[1].begin, item[1].num_bytes)))
    _check_places(path, entries, 8 + header_bytes, file_bytes)
    return entries, notes


def header_end(descriptor: int) -> int:
    """Where the header of an opened file ends, as its first 8 bytes say: it may say more than there is."""
    return 8 + int.from_bytes(os.pread(descriptor, 8, 0), "little")


def _with_unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON. Raises ValueError for a name that is there twice, of which each reader might take another."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"it has {next(name for name in found if names.count(name) > 1)!r} twice")
    return found


def sizes_of_tensor(where: str, chunks: Sequence[tuple[Sequence[int], Sequence[int]]]) -> tuple[int, ...]:
    """The sizes of the tensor that consists of chunks (offsets, sizes); no file contains them.

    Args:
        where: The checkpoint and the tensor, for messages.

    Raises:
        DamagedCheckpointError: The chunks do not belong to one tensor.
    """
    if len({len(offsets) for offsets, _ in chunks}) > 1:
        raise DamagedCheckpointError(f"{where}: its chunks have several numbers of dims")
    ends = [map(sum, zip(offsets, sizes, strict=True)) for offsets, sizes in chunks]
    found = tuple(map(max, zip(*ends, strict=True)))
    if not _can_be(found):
        raise DamagedCheckpointError(f"{where}: its chunks lie in a tensor of {list(found)}, which is too large to be")
    return found


def find_weight_map(directory: Path) -> Path | None:
    """The index of a directory, which names the file of each tensor; ``None`` without one.

    Of several ones that which Hugging Face's libraries read: some models have their weights under other names as well.
    """
    if not directory.is_dir():
        return None
    name = index_among(path.name for path in directory.glob(f"*{INDEX_SUFFIX}"))
    return None if name is None else directory / name


def index_among(names: Iterable[str]) -> str | None:
    """The index among the names of a directory's files, by the rule of ``find_weight_map``."""
    indexes = [name for name in names if name.endswith(INDEX_SUFFIX)]
    return min(indexes, key=lambda name: (name != INDEX_NAME, name), default=None)


def read_weight_map(index: Place, content: bytes) -> dict[str, str]:
    """The file of each key, from the content of an index.

    Raises:
        DamagedCheckpointError: The index is damaged.
    """
    try:
        files = dict(json.loads(content)["weight_map"])
        for name in set(files.values()):
            if os.path.basename(name) != name or "\0" in name or not name.encode():
                raise ValueError(f"it names the file {name!r}, expected one beside it")
        return files
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedCheckpointError(f"{index}: is no index of safetensors files ({error})") from None


def describe_safetensors(path: Path) -> Contents:
    """The contents of a file or a directory of files.

    Raises:
        DamagedCheckpointError: A header is damaged.
    """
    entries: dict[str, list[tuple[str, SafetensorsEntry]]] = {}
    files = []
    for file in safetensors_paths(path):
        of_file = read_header(file)
        files.append(ContentFile(file.name, file.stat().st_size, len(of_file)))
        for fqn, entry in of_file.items():
            entries.setdefault(fqn, []).append((file.name, entry))
    keys = [_key(path, fqn, [entry for _, entry in places]) for fqn, places in entries.items()]
    directory = path if path.is_dir() else path.parent
    return Contents(
        path,
        "safetensors",
        keys,
        files,
        lambda fqn: list(map(_chunk, entries[fqn])),
        lambda wanted: _numbers(directory, {key.fqn: entries[key.fqn][0] for key in wanted}),
        step=step_of(path),
    )


def find_safetensors(
    path: Path, descriptor_of: Callable[[str], int | None] = lambda name: None
) -> dict[str, list[ChunkRecord]]:
    """The chunks of each tensor of a file or a directory, under all its names; reads headers only.

    Reads the files that the index of a directory names, or all files without an index.

    Args:
        descriptor_of: Opens a file by its name, for a caller that keeps it open.

    Raises:
        DamagedCheckpointError: A header is damaged; files lack tensors of the index, or it names files elsewhere.
        OSError: A file cannot be read.
    """
    index = find_weight_map(path)
    weight_map = None if index is None else read_weight_map(index, index.read_bytes())
    directory = path if path.is_dir() else path.parent
    return tensors_in_files(directory, [file.name for file in safetensors_paths(path)], weight_map, descriptor_of)


def tensors_in_files(
    directory: Place,
    names: Sequence[str],
    weight_map: Mapping[str, str] | None,
    descriptor_of: Callable[[str], int | None],
) -> dict[str, list[ChunkRecord]]:
    """``find_safetensors`` of these files, or of those that the map names, if there is one."""
    found: dict[str, list[ChunkRecord]] = {}
    tied: dict[str, str] = {}
    for name in sorted(set(names if weight_map is None else weight_map.values())):
        entries, notes = read_header_and_notes(directory / name, descriptor_of(name))
        tied |= {fqn: first for fqn, first in _other_names(notes) if first in entries}
        for fqn, entry in entries.items():
            if entry.dtype not in ITEM_BYTES:
                raise DamagedCheckpointError(
                    f"{directory / name}: {fqn} is {entry.dtype}, which torch has no dtype for"
                )
            if weight_map is None or weight_map.get(fqn) == name:
                stored = _core.StoredTensor(entry.dtype, entry.sizes, None, entry.begin)
                record = Record(name, entry.begin, entry.num_bytes, stored)
                found.setdefault(fqn, []).append((entry.offsets, record))
    for fqn, places in found.items():
        kinds = {(record.tensor.dtype, len(offsets)) for offsets, record in places if record.tensor is not None}
        if len(kinds) > 1:
            raise DamagedCheckpointError(f"{directory}: the chunks of {fqn} are of several dtypes, or of other dims")
    lost = sorted((weight_map or {}).keys() - found.keys())
    if lost:
        raise DamagedCheckpointError(
            f"{directory}: {len(lost)} tensor(s) of its index are not in their files, for example {lost[0]}"
        )
    return found | {fqn: found[first] for fqn, first in tied.items() if first in found and fqn not in found}


def _other_names(notes: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The notes that may be another name of a tensor, each with the tensor's name."""
    for fqn, first in notes.items():
        if fqn not in OWN_NOTES and is_text(fqn) and isinstance(first, str):
            yield fqn, first


def is_text(fqn: str) -> bool:
    """Whether a name is Unicode text, as the format needs it: without surrogates, which Python and JSON can spell."""
    return not any("\ud800" <= letter <= "\udfff" for letter in fqn)


def index_of(weight_map: Mapping[str, str], num_bytes: int) -> bytes:
    """The index of a directory, from the file of each tensor and the bytes of all."""
    index = {"metadata": {"total_size": num_bytes}, "weight_map": dict(sorted(weight_map.items()))}
    return json.dumps(index, indent=2).encode()


@dataclass(frozen=True)
class NewSafetensors:
    """A file that is to be written.

    Attributes:
        header: The first bytes of the file.
        offsets: First byte of each tensor in the file; tensors lie in this order, without gaps.
    """

    header: bytes
    offsets: dict[str, int]
    num_bytes: int


def lay_out(tensors: Mapping[str, tuple[str, Sequence[int]]], notes: Mapping[str, str] | None = None) -> NewSafetensors:
    """A file for tensors of these dtypes and shapes. Larger elements come first, so that all are aligned.

    ``notes`` stand beside the format in the file's ``__metadata__``.
    """
    by_size = sorted(tensors, key=lambda fqn: (-ITEM_BYTES[tensors[fqn][0]], fqn))
    entries: dict[str, Any] = {"__metadata__": {"format": "pt", **(notes or {})}}
    begins: dict[str, int] = {}
    end = 0
    for fqn in by_size:
        dtype, sizes = tensors[fqn]
        begins[fqn], end = end, end + num_bytes_of(dtype, sizes)
        entries[fqn] = {"dtype": NAME_OF_DTYPE[dtype], "shape": list(sizes), "data_offsets": [begins[fqn], end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    header = len(text).to_bytes(8, "little") + text
    return NewSafetensors(header, {fqn: start + begin for fqn, begin in begins.items()}, start + end)


def _numbers(directory: Path, places: Mapping[str, tuple[str, SafetensorsEntry]]) -> dict[str, Scalar]:
    """The elements of tensors without dims."""
    numbers: dict[str, Scalar] = {}
    for fqn, (name, entry) in places.items():
        if entry.sizes == () and entry.dtype in ITEM_BYTES:
            with (directory / name).open("rb") as file:
                numbers |= read_number(file.fileno(), fqn, _core.StoredTensor(entry.dtype, (), (), entry.begin))
    return numbers


def _key(path: Path, fqn: str, entries: Sequence[SafetensorsEntry]) -> KeySummary:
    first = entries[0]
    if len(entries) == 1 and not any(first.offsets):
        return KeySummary(fqn, first.dtype, first.sizes, first.num_bytes, 1)
    sizes = sizes_of_tensor(f"{path}: {fqn}", [(entry.offsets, entry.sizes) for entry in entries])
    num_bytes = bytes_of(first.dtype, sizes, sum(entry.num_bytes for entry in entries))
    return KeySummary(fqn, first.dtype, sizes, num_bytes, len(entries))


def _chunk(place: tuple[str, SafetensorsEntry]) -> ChunkSummary:
    name, entry = place
    return ChunkSummary(entry.offsets, entry.sizes, name, entry.begin, entry.num_bytes)


def _entry(entry: Any, box: Any, data_begin: int) -> SafetensorsEntry:
    sizes = tuple(entry["shape"])
    begin, end = entry["data_offsets"]
    offsets = (0,) * len(sizes) if box is None else tuple(box["saved_offsets"])
    for value in (*sizes, *offsets, begin, end):
        if type(value) is not int or not 0 <= value < _TOO_LARGE:
            raise ValueError(f"got {value!r}, expected a number of bytes or elements")
    if len(offsets) != len(sizes):
        raise ValueError("a chunk has other dims than its tensor")
    dtype = _DTYPES.get(entry["dtype"]) or str(entry["dtype"])
    num_bytes = num_bytes_of(dtype, sizes) if dtype in ITEM_BYTES else end - begin
    if end - begin != num_bytes:
        raise ValueError(f"{num_bytes} bytes are needed where {end - begin} are given")
    if 0 in sizes and not _can_be(sizes):
        raise ValueError(f"got the shape {list(sizes)}, which is too large to be")
    return SafetensorsEntry(dtype, sizes, offsets, data_begin + begin, num_bytes)


def _can_be(sizes: Sequence[int]) -> bool:
    """Whether torch can count the elements of such a tensor; it multiplies sizes even where one is zero."""
    return math.prod(size or 1 for size in sizes) < _TOO_LARGE // _MAX_ITEM_BYTES


def _check_places(path: Place, entries: dict[str, SafetensorsEntry], data_begin: int, file_bytes: int) -> None:
    at = data_begin
    for fqn, entry in entries.items():
        if entry.begin != at:
            text = f"{fqn} begins at byte {entry.begin}, the tensor before it ends at byte {at}"
            raise DamagedCheckpointError(f"{path}: {text}")
        at += entry.num_bytes
    if at != file_bytes:
        raise DamagedCheckpointError(f"{path}: the tensors end at byte {at}, the file at byte {file_bytes}")
