"""Says whose bytes are damaged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torchtitan_ext.storage.checkpoint_files import CheckpointIndex
from torchtitan_ext.storage.element_types import ITEM_BYTES

_MAX_NAMED = 4


def describe_damage(
    directory: Path,
    blocks: Sequence[tuple[str, int, int]],
    storage_data: Mapping[Any, Any],
    index: CheckpointIndex | None,
) -> str:
    """One sentence about blocks (file, first byte, one past the last byte) that do not match their checksums."""
    names: list[str] = []
    for position, info in storage_data.items():
        for name, begin, end in blocks:
            if info.relative_path == name and info.offset < end and info.offset + info.length > begin:
                names.append(_rows(position, info, begin, end, index))
                break
    shown = ", ".join(names[:_MAX_NAMED]) or "no tensor, only padding"
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    name, begin, end = blocks[0]
    others = f" and {len(blocks) - 1} more blocks" if len(blocks) > 1 else ""
    return (
        f"{directory / name}: bytes {begin} to {end}{others} do not match their checksum; in them lie {shown}{more}. "
        "Load another checkpoint, or verify='none' to take the bytes as they are"
    )


def _rows(position: Any, info: Any, begin: int, end: int, index: CheckpointIndex | None) -> str:
    """``w[128:160]`` for the rows of a key that lie between two bytes of a file."""
    stored = None if index is None else index.files[info.relative_path].tensors.get(info.offset)
    if stored is None or not stored.sizes or 0 in stored.sizes:
        return str(position.fqn)
    row_bytes = stored.strides[0] * ITEM_BYTES[stored.dtype]
    first = max(0, (begin - stored.data_offset) // row_bytes)
    last = min(stored.sizes[0], -(-(end - stored.data_offset) // row_bytes))
    start = position.offset[0] if position.offset else 0
    return f"{position.fqn}[{start + first}:{start + max(last, first)}]"
