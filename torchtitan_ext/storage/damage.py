"""Names the tensors and rows to which damaged bytes belong."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from torchtitan_ext import _core
from torchtitan_ext.errors import named

_MAX_NAMED = 4


def describe_damage(
    directory: Path,
    blocks: Sequence[tuple[str, int, int]],
    parts: Iterable[_core.Part],
    index: _core.Index | None,
) -> str:
    """One sentence about blocks (file, first byte, one past the last byte) that do not match their checksums."""
    names: list[str] = []
    for part in parts:
        for name, begin, end in blocks:
            if part.path == name and part.offset < end and part.offset + part.num_bytes > begin:
                names.append(_rows(part, begin, end, index))
                break
    lie = named(names, _MAX_NAMED) or "no tensor, only padding"
    name, begin, end = blocks[0]
    others = f" and {len(blocks) - 1} more blocks" if len(blocks) > 1 else ""
    return f"{directory / name}: bytes {begin} to {end}{others} do not match their checksum; in them lie {lie}"


def shape_defect(stored: _core.StoredTensor, dtype: str, sizes: Sequence[int]) -> str | None:
    """How the tensor in a file differs from the dtype and sizes in the metadata; ``None`` if it does not."""
    if (stored.dtype, tuple(stored.sizes)) == (dtype, tuple(sizes)):
        return None
    return f"is {stored.dtype} {list(stored.sizes)}, the metadata says {dtype} {list(sizes)}"


def cover_defect(sizes: Sequence[int], chunks: Sequence[tuple[Sequence[int], Sequence[int]]]) -> str | None:
    """Why chunks (offsets, sizes) do not hold every element of a tensor once; ``None`` if they do."""
    found = _core.find_cover_defect(sizes, chunks)
    return None if found is None else defect_text(found.kind, found.element)


def defect_text(kind: str, where: Sequence[int]) -> str:
    """A kind of defect in words, for an element or chunk."""
    text = {"gap": "leave out", "overlap": "hold twice", "out_of_bounds": "lie outside of it, at"}[kind]
    return f"{text} {list(where)}"


def _rows(part: _core.Part, begin: int, end: int, index: _core.Index | None) -> str:
    """``w[128:160]``: the rows of a key between two bytes of its file."""
    is_indexed = index is not None and part.path in index.files
    stored = index.tensors(part.path).get(part.offset) if index is not None and is_indexed else None
    if stored is None or not stored.sizes or 0 in stored.sizes:
        return part.fqn
    row_bytes = stored.strides[0] * stored.item_bytes
    first = max(0, (begin - stored.data_offset) // row_bytes)
    last = min(stored.sizes[0], -(-(end - stored.data_offset) // row_bytes))
    start = part.offsets[0] if part.offsets else 0
    return f"{part.fqn}[{start + first}:{start + max(last, first)}]"
