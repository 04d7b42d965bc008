"""Changes in a file: its format, and what is read from one.

A file is one of safetensors, so that others can open it. Its ``__metadata__`` has a note, ``torchtitan_ext.delta``: a
digest, and JSON with the versions and, per tensor, its dtype, its shape, the number of its new elements, three sums and
the number of its parts. Ranks write parts of their own. Part 0 of a tensor ``w`` is either

    w/0/blocks   I32 [n, 2]   a block of 65,536 positions, and how many positions in it have changed; -m where these are
                              m positions in a row, of which ``offsets`` has the first
    w/0/offsets  U16          the positions, counted from the first one of their block
    w/0/values                the new elements, as U8 bytes

or, where most of a box changed, ``w/0/box/128,0``: all its elements as U8 bytes, and where it begins; its sizes are in
the note. Positions count the elements of the global tensor in row-major order.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torchtitan_ext._core import add_sums
from torchtitan_ext.layout.layout import Box
from torchtitan_ext.storage.formats.opened_safetensors import OpenedSafetensors
from torchtitan_ext.storage.formats.safetensors_files import SafetensorsEntry
from torchtitan_ext.storage.raw_tensor import DTYPES

NOTE = "torchtitan_ext.delta"
_FORMAT = 1
_SUMS = ("before", "replaced", "after")
BLOCK_POSITIONS = 65_536
# Positions have 47 bits; torch has not more dims.
_MAX_ELEMENTS = 1 << 47
_MAX_DIMS = 64


@dataclass(frozen=True)
class TensorTotals:
    """Of one tensor, over all ranks.

    Attributes:
        dtype: Its name, without ``torch.``.
        shape: Of the global tensor.
        count: Elements that the file has new bits for.
        before, after: Sums of the whole tensor (``ops.fingerprint_shard``) before and after.
        replaced: Sum of the hashes of the old bits of these elements.
        boxes: Per part offsets and sizes of the box that it gives whole, or ``None``.
    """

    dtype: str
    shape: tuple[int, ...]
    count: int
    before: int
    replaced: int
    after: int
    boxes: tuple[Box | None, ...]

    @property
    def new(self) -> int:
        """Sum of the hashes of the new bits of these elements."""
        return add_sums(self.after, -self.before, self.replaced)


@dataclass(frozen=True)
class SavedPart:
    """Where new elements of a tensor lie in the file: those of a box, or at positions where ``box`` is ``None``."""

    box: Box | None
    blocks: SafetensorsEntry
    offsets: SafetensorsEntry
    values: SafetensorsEntry


@dataclass(frozen=True)
class SavedChanges:
    """The changes of a file, of all ranks, for ``delta.apply``. Their elements stay in the file until they are applied.

    Attributes:
        path: The file.
        file: The same, which stays open.
        base_version, version: Of the state before and after.
        totals: Per key, also of tensors that have not changed.
        parts: Per key.
        digest: Of the file's note: equal on ranks that read one file.
    """

    path: str
    file: OpenedSafetensors
    base_version: int
    version: int
    totals: Mapping[str, TensorTotals]
    parts: Mapping[str, Sequence[SavedPart]]
    digest: str

    @property
    def changed_keys(self) -> tuple[str, ...]:
        """The tensors that have changed."""
        return tuple(fqn for fqn, total in self.totals.items() if total.count > 0)

    @property
    def num_changed(self) -> int:
        """Elements that have new bits."""
        return sum(total.count for total in self.totals.values())


def part_names(fqn: str, part: int, box: tuple[Sequence[int], Sequence[int]] | None) -> list[str]:
    """The names of the tensors of a part."""
    if box is not None:
        return [f"{fqn}/{part}/box/{','.join(map(str, box[0]))}"]
    return [f"{fqn}/{part}/{name}" for name in ("blocks", "offsets", "values")]


def encode_note(base_version: int, version: int, totals: Mapping[str, TensorTotals]) -> str:
    """The text of the note."""
    tensors = {
        fqn: {**asdict(total), **{name: f"{getattr(total, name):016x}" for name in _SUMS}}
        for fqn, total in totals.items()
    }
    text = json.dumps({"format": _FORMAT, "base_version": base_version, "version": version, "tensors": tensors})
    return f"{_digest_of(text)} {text}"


def decode_note(note: str) -> tuple[int, int, dict[str, TensorTotals], str]:
    """Versions, totals and digest. Raises ValueError where the text is not as it was written."""
    digest, _, text = note.partition(" ")
    if digest != _digest_of(text):
        raise ValueError("its note of the changes is damaged")
    found = json.loads(text)
    if found["format"] != _FORMAT:
        raise ValueError(f"it is of format {found['format']}, and this version of the package reads {_FORMAT}")
    base_version, version = found["base_version"], found["version"]
    if type(base_version) is not int or type(version) is not int or version <= base_version:
        raise ValueError("its versions are no numbers that grow")
    "".join(found["tensors"]).encode()  # JSON can spell what is no text
    return base_version, version, {fqn: _totals(fqn, of) for fqn, of in found["tensors"].items()}, digest


def _totals(fqn: str, entry: Mapping[str, Any]) -> TensorTotals:
    before, replaced, after = (int(entry[name], 16) for name in _SUMS)
    shape, count = tuple(entry["shape"]), entry["count"]
    boxes = tuple(None if box is None else (tuple(box[0]), tuple(box[1])) for box in entry["boxes"])
    lines = [(0, size, size) for size in shape]
    for box in boxes:
        lines += [] if box is None else zip(*box, shape, strict=True)
    numbers = (count, *(number for line in lines for number in line))
    is_possible = (
        entry["dtype"] in DTYPES
        and all(type(number) is int and 0 <= number <= _MAX_ELEMENTS for number in numbers)
        and all(first + size <= end for first, size, end in lines)
        and all(0 <= total < 1 << 64 for total in (before, replaced, after))
        and len(shape) <= _MAX_DIMS
        and math.prod(size or 1 for size in shape) <= _MAX_ELEMENTS
        and count <= math.prod(shape)
    )
    if not is_possible:
        raise ValueError(f"it has impossible numbers of {fqn}")
    return TensorTotals(entry["dtype"], shape, count, before, replaced, after, boxes)


def _digest_of(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
