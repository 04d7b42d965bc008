"""Which safetensors files of a directory hold a key."""

from __future__ import annotations

import json
from pathlib import Path

# A header is the names, dtypes and places of a file's tensors: 100 MB is the format's own limit.
_MAX_HEADER_BYTES = 100_000_000


def files_with_key(directory: Path, fqn: str) -> list[str]:
    """Names of the ``*.safetensors`` files that hold a tensor of this name, sorted; damaged ones are left out.

    Reads headers only: 8 bytes with the length, little-endian, then that many bytes of JSON, one entry per tensor
    (https://huggingface.co/docs/safetensors).
    """
    found = []
    for path in sorted(directory.glob("*.safetensors")):
        try:
            with path.open("rb") as file:
                num_bytes = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(num_bytes)) if num_bytes <= _MAX_HEADER_BYTES else {}
        except (OSError, ValueError):
            continue
        if isinstance(header, dict) and fqn in header:
            found.append(path.name)
    return found
