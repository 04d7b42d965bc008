"""A safetensors file whose header is known when the last of its tensors is: they wait beside it meanwhile."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch

from torchtitan_ext.layout.dtensor import as_bytes
from torchtitan_ext.storage.element_types import num_bytes_of
from torchtitan_ext.storage.formats.safetensors_files import lay_out


class SafetensorsSpool:
    """Takes tensors one by one and keeps them in a file without a name, which no kill leaves behind.

    Args:
        directory: Where that file lies; it needs as much room as the tensors.
    """

    def __init__(self, directory: Path) -> None:
        self._file = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115
        self._begins: dict[str, int] = {}
        self._tensors: dict[str, tuple[str, tuple[int, ...]]] = {}

    def close(self) -> None:
        self._file.close()

    def add(self, name: str, dtype: str, sizes: tuple[int, ...], data: torch.Tensor) -> None:
        """Keeps a contiguous tensor of the CPU, as ``sizes`` elements of ``dtype``."""
        self._begins[name] = self._file.tell()
        self._tensors[name] = dtype, sizes
        self._file.write(as_bytes(data).numpy().data)

    def write(self, path: Path, notes: Mapping[str, str]) -> int:
        """Writes the new file, synced, and returns its size in bytes."""
        self._file.flush()
        layout = lay_out(self._tensors, notes)
        with path.open("xb") as file:
            file.write(layout.header)
            file.flush()
            for name in layout.offsets:  # in the order of their bytes
                source, num_bytes = self._begins[name], num_bytes_of(*self._tensors[name])
                while num_bytes > 0:
                    num_sent = os.sendfile(file.fileno(), self._file.fileno(), source, num_bytes)
                    source, num_bytes = source + num_sent, num_bytes - num_sent
            os.fsync(file.fileno())
        return layout.num_bytes
