"""The data files of a DCP checkpoint, of ours or of stock: where records lie, and reads that compare checksums.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Literal

from torchtitan_ext import _core
from torchtitan_ext.errors import DamagedCheckpointError
from torchtitan_ext.storage.checkpoint_files import (
    Record,
    describe_damage,
    find_stock_tensors,
    shown,
    thread_count_of,
)
from torchtitan_ext.storage.commit.opened import Footers
from torchtitan_ext.storage.location import Place
from torchtitan_ext.storage.native.open_files import Chunk
from torchtitan_ext.storage.objects.opened import Opened, open_checkpoint

Verify = Literal["auto", "all", "none"]


class VerifiedFiles:
    """The base of what reads them; a subclass has read the metadata.

    Attributes:
        leaves_blocks: Whether blocks of which little is read are left to ``verify_blocks``: the ranks of the load share
            them.
    """

    _opened: Opened | None
    _index: _core.Index | None
    _footers: Footers
    _stock_tensors: dict[tuple[str, int], _core.StoredTensor | None]
    _blocks: _core.BlockLedger

    def __init__(self, path: Place, verify: Verify, thread_count: int | None = None) -> None:
        self.path = path
        self.verify = verify
        self.thread_count = thread_count
        thread_count_of(thread_count)
        self.leaves_blocks = False
        self._forget()

    def _forget(self) -> None:
        self._opened = None
        self._index = None
        self._footers = Footers(None)
        self._stock_tensors = {}
        self._blocks = _core.BlockLedger()

    def _place_of(self, key: Chunk) -> tuple[str, int, int]:
        """The file of a record, its first byte and its size; raises KeyError or DamagedCheckpointError where the
        metadata names none."""
        raise NotImplementedError

    @staticmethod
    def _refuse_extension(fqn: str, transforms: Sequence[str] | None) -> None:
        """Raises ValueError for a record that an extension of DCP has changed."""
        if transforms:
            raise ValueError(f"{fqn} was saved through an extension ({transforms}); load it with FileSystemReader")

    def _parts(self) -> Iterable[_core.Part]:
        """All chunks and values and their places."""
        raise NotImplementedError

    @property
    def files(self) -> Opened:
        """The files of the checkpoint that was opened first; later saves do not change them."""
        if self._opened is None:
            self._opened = open_checkpoint(self.path)
        return self._opened

    def find_records(self, keys: Sequence[Chunk]) -> list[Record]:
        """Where chunks of tensors lie, for reads without a plan."""
        found = [self._place_of(key) for key in keys]
        places: dict[str, dict[int, int]] = {}
        for name, offset, num_bytes in found:
            places.setdefault(name, {})[offset] = num_bytes
        tensors = {name: self._tensors_of(name, of_file) for name, of_file in places.items()}
        return [Record(*place, tensors[place[0]].get(place[1])) for place in found]

    @property
    def has_sums(self) -> bool:
        """Whether the save took sums of its records."""
        return self._index is not None and self._index.has_sums

    def find_sums(self, keys: Sequence[Chunk]) -> list[int | None]:
        """The stored sums of chunks of tensors; ``None`` of those that have none."""
        places = [self._place_of(key) for key in keys]
        if self._index is None:
            return [None] * len(places)
        sum_of = self._index.sum_of
        return [sum_of(name, offset, key.fqn) for key, (name, offset, _) in zip(keys, places, strict=True)]

    def open_file(self, runs: _core.RunReader, name: str) -> int:
        """Adds a file with its checksums to a RunReader, and returns its number there.

        Raises:
            FormatError: The file is not the one that the index names, or its footer is damaged. Without an index: the
                file is ours and has no footer, or belongs to another save.
            OSError: The file cannot be read.
        """
        path, descriptor = shown(self.path / name), self.files.descriptor(name)
        indexed = None if self._index is None else self._index.files.get(name)
        if self.verify == "none":
            return runs.add_file(path, -1 if indexed is None else indexed.num_bytes, descriptor)
        file = indexed or self._footers.find(self.path / name, descriptor)
        if file is None:
            return runs.add_file(path, -1, descriptor)
        save_id = b"" if self._index is None else self._index.save_id
        return runs.add_checked_file(path, file, save_id, descriptor, self._blocks)

    def read_runs(self, runs: _core.RunReader, names: list[str]) -> None:
        """Reads all that was added to a RunReader.

        Args:
            names: Names of the files, by their numbers.

        Raises:
            DamagedCheckpointError: Blocks do not match their checksums.
        """
        auto = "mostly" if self.leaves_blocks else "once"
        verify = auto if self.verify == "auto" else self.verify
        damaged = self.files.read(runs, names, thread_count_of(self.thread_count), verify)
        if damaged:
            blocks = [(names[block.file], block.begin, block.end) for block in damaged]
            text = describe_damage(self.path, blocks, self._parts(), self._index)
            raise DamagedCheckpointError(
                text, "; storage_reader=FileReader(path, verify='none') takes the bytes as they are"
            )

    @property
    def has_unverified_blocks(self) -> bool:
        """Whether this reader has left blocks: touched, not verified."""
        return self.verify == "auto" and bool(self._blocks.unverified())

    def describe_blocks(self) -> bytes:
        """What this reader did with the blocks of the files, for ``_core.deal_blocks`` over all ranks."""
        return self._blocks.message(self.files.copy)

    def verify_blocks(self, ranges: Sequence[_core.BlockRange]) -> None:
        """Reads blocks, and compares them with their checksums.

        Raises:
            DamagedCheckpointError: Blocks do not match their checksums.
            OSError: A file cannot be read.
        """
        for name, of_file in groupby(ranges, key=lambda one: one.file):
            runs = _core.RunReader()
            file = self.open_file(runs, name)
            for one in of_file:
                runs.add_blocks(file, one.first, one.last)
            self.read_runs(runs, [name])

    def _tensors_of(self, name: str, places: Mapping[int, int]) -> dict[int, _core.StoredTensor]:
        """The plain tensors among some records of a file, by the records' offsets; ``places`` has their lengths."""
        if self._index is not None and name in self._index.files:
            return self._index.tensors(name)
        new = {offset: length for offset, length in places.items() if (name, offset) not in self._stock_tensors}
        num_threads, descriptor = thread_count_of(self.thread_count), self.files.descriptor(name)
        self.files.bring(name, new)
        for offset, tensor in find_stock_tensors(self.path / name, new, num_threads, descriptor).items():
            self._stock_tensors[name, offset] = tensor
        known = {offset: self._stock_tensors[name, offset] for offset in places}
        return {offset: tensor for offset, tensor in known.items() if tensor is not None}
