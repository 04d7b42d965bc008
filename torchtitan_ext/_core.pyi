"""Layouts, cover and plans over plain values, and files (pybind11 over csrc/core and csrc/storage, their definitions).

Sizes and offsets count elements. A step is (axis, dim, split_factor); a box is (offsets, sizes); a chunk is
(offsets, sizes, local_offsets); a shard is (local sizes, chunks). Bad arguments raise ValueError, int64 overflow
raises OverflowError.
"""

import enum
import mmap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar, overload

import numpy as np
import numpy.typing as npt

from torchtitan_ext.errors import ProblemKind

_Sizes = tuple[int, ...]
_Step = tuple[int, int, int]
_Box = tuple[Sequence[int], Sequence[int]]
_Chunk = tuple[_Sizes, _Sizes, _Sizes]
_AnyChunk = tuple[Sequence[int], Sequence[int], Sequence[int]]
_Instance = TypeVar("_Instance")
_Shard = tuple[_Sizes, tuple[_Chunk, ...]]

def read_placements(
    placements: Sequence[tuple[int, int]], mesh_shape: Sequence[int], reading: Literal["left_to_right", "nested"]
) -> tuple[_Step, ...]: ...
def shard_at(
    global_shape: Sequence[int], mesh_shape: Sequence[int], steps: Sequence[_Step], coordinate: Sequence[int]
) -> _Shard: ...
def all_shards(global_shape: Sequence[int], mesh_shape: Sequence[int], steps: Sequence[_Step]) -> list[_Shard]: ...
def candidate_steps(
    placements: Sequence[tuple[int, int]], mesh_shape: Sequence[int], order: Sequence[_Step] | None
) -> list[tuple[_Step, ...]]: ...

class KeyProblem:
    """What is wrong with a key; the sentence does not name the key."""

    @property
    def kind(self) -> ProblemKind: ...
    @property
    def detail(self) -> str: ...

def decide_steps(reports: list[Any]) -> tuple[_Step, ...] | KeyProblem:
    """The true order of sharding, by the ``ShardReport`` of each rank that reports."""

def format_placements(placements: Sequence[tuple[int, int]]) -> str:
    """Placements in DTensor's words."""

def format_mesh(shape: Sequence[int], names: Sequence[str] | None) -> str: ...

class TruePlace:
    """A box of a tensor and who has it: see csrc/core/noted_parts.h."""

    @property
    def offsets(self) -> _Sizes: ...
    @property
    def sizes(self) -> _Sizes: ...
    @property
    def rank(self) -> int: ...
    @property
    def part(self) -> int: ...

class TruePlaces:
    """The boxes of a tensor that was cut in one way; else none."""

    @property
    def num_ways(self) -> int: ...
    @property
    def places(self) -> list[TruePlace]: ...

def find_true_places(
    shape: Sequence[int],
    mesh_shape: Sequence[int],
    choices: Sequence[Sequence[int]],
    parts: Sequence[tuple[int, Sequence[int], Sequence[int], Sequence[int]]],
) -> TruePlaces:
    """Where the parts of a tensor truly are; each has a rank, offsets and sizes as noted, and sizes as written."""

def cover_defect(global_shape: Sequence[int], boxes: Sequence[_Box]) -> str | None:
    """Why boxes do not hold every element of a tensor once, in words that follow "the chunks"; ``None`` if they do."""

def describe_cover_defect(
    global_shape: Sequence[int], boxes: Sequence[_Box], owners: Sequence[int] | None
) -> str | None:
    """The same as a sentence.

    Args:
        owners: The rank of each box; ``None`` for the chunks of a checkpoint.
    """

def why_no_part(offset: int, num_bytes: int, item_bytes: int, sizes: Sequence[int], buffer_bytes: int) -> str:
    """Why a flat buffer has no such part: bytes, from an offset, of elements of these sizes; empty if it has."""

def instances(cls: type[_Instance], **columns: Sequence[Any]) -> list[_Instance]: ...

class OptionGaps:
    """The wanted optimizer keys that a checkpoint of the flat form lacks, sorted; ``missing`` by first keys.

    Attributes:
        fillable: Wanted options that no saved parameter has (newer torch, other optimizer): they may keep their value.
        missing: Wanted keys, by fqn, of parameters without any saved key (frozen or absent at the save).
        incomplete: Other wanted keys that are missing, though the checkpoint knows the parameter.
        dropped: Saved options that no parameter wants.
    """

    @property
    def fillable(self) -> tuple[str, ...]: ...
    @property
    def missing(self) -> dict[str, tuple[str, ...]]: ...
    @property
    def incomplete(self) -> tuple[str, ...]: ...
    @property
    def dropped(self) -> tuple[str, ...]: ...

def find_option_gaps(saved_keys: Iterable[str], wanted_keys: Iterable[str]) -> OptionGaps:
    """Sorts the keys that a flat optimizer state dict wants and a checkpoint lacks.

    The flat form has ``param_groups.<fqn>.<option>`` and ``state.<fqn>.<name>``, maybe behind a prefix such as
    ``optimizer.``: ``flatten_optimizer_state_dict=True`` of torch and torchtitan's ``OptimizersContainer``. Other keys
    are ignored.

    Args:
        saved_keys: All flat keys of the checkpoint.
        wanted_keys: All flat keys of the state dict to be loaded into.

    Example:
        >>> find_option_gaps(["param_groups.w.lr"], ["param_groups.w.lr", "param_groups.w.fused"]).fillable
        ('param_groups.w.fused',)
    """

def may_overlap_itself(sizes: Sequence[int], strides: Sequence[int]) -> bool: ...

_Memory = tuple[int, Sequence[int], Sequence[int], int]
"""Of a tensor: address, sizes, strides, bytes of an element."""

def find_shared_memory(written: Sequence[_Memory], read: Sequence[_Memory]) -> tuple[int, int] | None:
    """A written tensor and another one that share a byte, by position in both lists one after the other."""

class MetadataColumns:
    """What a checkpoint's metadata says; keys, parts and chunk lists are known by their numbers."""

    def __init__(self) -> None: ...
    def add_records(self, file: RankFile) -> None:
        """Adds where the records of a rank file lie."""
    @property
    def num_keys(self) -> int: ...
    @property
    def num_parts(self) -> int: ...
    @property
    def num_chunks(self) -> int:
        """Of all keys; a value counts as one."""
    def keys_only(self) -> MetadataColumns:
        """The same keys and chunk lists, without the places of parts."""
    def names_of_keys(self) -> list[str]: ...
    def find_key(self, fqn: str, /) -> int | None: ...
    def key(self, number: int, /) -> TensorKey | None:
        """``None`` for a value that is no tensor."""
    def is_tensor(self, fqn: str) -> bool | None:
        """``None`` where there is no such key."""
    def chunk_list(self, number: int, /) -> list[tuple[_Sizes, _Sizes]]: ...
    def add_chunk_list(self, boxes: Sequence[_Box]) -> int:
        """Its number; equal lists have one."""
    def add_tensor(
        self, fqn: str, dtype: str, sizes: Sequence[int], chunk_list: int, like: TensorKey | None = None
    ) -> None:
        """Adds a key.

        Args:
            like: Of any metadata: whose properties, but for dtype and strides, the tensor gets; by default those of a
                plain tensor.
        """
    def add_value(self, fqn: str) -> None: ...
    def describe_keys(self) -> list[KeySummary]: ...
    def describe_chunks(self, fqn: str) -> list[ChunkSummary]:
        """The chunks of a tensor, or the one place of a value."""
    def describe_files(self) -> list[FileSummary]: ...
    def cover_defects(self) -> list[UncoveredKey]:
        """The keys whose chunks do not hold every element of the tensor exactly once."""
    def unplaced_chunks(self, limit: int) -> list[UnplacedPart]:
        """The first chunks and values for which the metadata names no file."""
    def find_part(self, fqn: str, offsets: Sequence[int] | None, /) -> int | None: ...
    def part(self, number: int, /) -> Part: ...
    def to_pickle(self, planner_data: Any, storage_meta: dict[str, Any], version: str) -> bytes | None:
        """The file; ``None`` where a value is not plain."""

class TensorKey:
    """A tensor as the metadata describes it; ``chunk_list`` is a number for ``MetadataColumns.chunk_list``."""

    @property
    def sizes(self) -> _Sizes: ...
    @property
    def dtype(self) -> str: ...
    @property
    def layout(self) -> str: ...
    @property
    def memory_format(self) -> int: ...
    @property
    def requires_grad(self) -> bool: ...
    @property
    def pin_memory(self) -> bool: ...
    @property
    def chunk_list(self) -> int: ...
    @property
    def strides(self) -> _Sizes | None: ...

class Part:
    """A chunk of a tensor, or a value (``offsets`` is ``None``), and the bytes of the file that hold its record."""

    @property
    def fqn(self) -> str: ...
    @property
    def offsets(self) -> _Sizes | None: ...
    @property
    def index(self) -> int | None: ...
    @property
    def path(self) -> str: ...
    @property
    def offset(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def transforms(self) -> list[str] | None: ...
    def __init__(self, fqn: str, offsets: Sequence[int] | None, path: str, offset: int, num_bytes: int) -> None: ...

class SavedParts:
    """The parts of a metadata, grouped by file once, at the first use: at a thousand ranks there are millions."""

    def __init__(self, columns: MetadataColumns) -> None: ...
    def of_file(self, path: str) -> list[Part]: ...
    def chunk_of(self, part: Part) -> tuple[str, _Sizes] | None:
        """Dtype and sizes of a part's chunk, as the metadata describes it; ``None`` if it describes no such chunk."""

class KeySummary:
    """One key of a checkpoint.

    Attributes:
        dtype: The name in torch, without the module; ``None`` for a value that is no tensor.
        sizes: Global sizes; ``None`` for a value that is no tensor.
        num_bytes: Size of the elements, or of the records of a value or a dtype that is no plain memory; 0 for a value
            without a record of its own.
        num_chunks: Number of records that hold the key.
    """

    @property
    def fqn(self) -> str: ...
    @property
    def dtype(self) -> str | None: ...
    @property
    def sizes(self) -> _Sizes | None: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def num_chunks(self) -> int: ...
    def __init__(self, fqn: str, dtype: str | None, sizes: _Sizes | None, num_bytes: int, num_chunks: int) -> None: ...

class ChunkSummary:
    """Where one chunk of a key lies.

    Attributes:
        offsets: Offsets of the first element in the tensor; like ``sizes`` ``None`` for a value that is no tensor.
        file: Path relative to the checkpoint; ``None`` if the metadata names no file.
        offset: Byte of the file at which the record begins; ``None`` if unknown.
    """

    @property
    def offsets(self) -> _Sizes | None: ...
    @property
    def sizes(self) -> _Sizes | None: ...
    @property
    def file(self) -> str | None: ...
    @property
    def offset(self) -> int | None: ...
    @property
    def num_bytes(self) -> int | None: ...
    def __init__(
        self,
        offsets: _Sizes | None,
        sizes: _Sizes | None,
        file: str | None,
        offset: int | None,
        num_bytes: int | None,
    ) -> None: ...

class FileSummary:
    """A data file: its records, their bytes, and the byte at which the last one ends."""

    @property
    def path(self) -> str: ...
    @property
    def num_parts(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def end(self) -> int: ...

class UnplacedPart:
    @property
    def fqn(self) -> str: ...
    @property
    def offsets(self) -> _Sizes | None: ...

class UncoveredKey:
    """A key whose chunks do not hold every element of its tensor once, with its ``cover_defect``."""

    @property
    def fqn(self) -> str: ...
    @property
    def sizes(self) -> _Sizes: ...
    @property
    def defect(self) -> str: ...

class ParsedMetadata:
    """``storage_meta`` are the fields of DCP's ``StorageMeta``, or ``None``; ``num_unknown_properties`` counts
    fields of ``TensorProperties`` that a newer torch added and left at their defaults."""

    @property
    def columns(self) -> MetadataColumns: ...
    @property
    def planner_data(self) -> Any: ...
    @property
    def storage_meta(self) -> Any: ...
    @property
    def version(self) -> str | None: ...
    @property
    def num_unknown_properties(self) -> int: ...

def columns_of(
    entries: Mapping[str, Any],
    *,
    bytes_class: type,
    tensor_class: type,
    properties_class: type,
    chunk_class: type,
    size_class: type,
    memory_formats: dict[Any, int],
) -> MetadataColumns | None:
    """The entries of a metadata; ``None`` where one is of another class than these, which are DCP's and ``torch.Size``.

    Args:
        memory_formats: DCP's number of each memory format.
    """

NUM_PROPERTIES: int
"""So many fields of DCP's ``TensorProperties`` are known."""

def read_metadata_pickle(data: bytes) -> ParsedMetadata: ...
def read_metadata_tables(data: bytes, where: str) -> ParsedMetadata:
    """The metadata that stands in the tables of an index."""

def leads_outside(path: str) -> bool:
    """Whether a file's path, relative to its checkpoint, is none."""

# Digests of values: see csrc/core/value_graph.h.

class ValueNode:
    """What tells an object apart, and the objects that it holds."""

    def __init__(self, label: bytes, members: Sequence[Any] = ()) -> None: ...

def digest_value(value: Any, describe: Callable[[Any], ValueNode]) -> bytes:
    """The digest of a value. ``describe`` gives the node of an object that is no container; where it raises, only the
    object's class counts."""

def hash_parts(*parts: bytes) -> bytes:
    """The digest of the parts and their lengths."""

def qualified_name(value: Any) -> bytes:
    """The name of a class or function; for another callable the name of its class."""

# Pickles of torch.save. Nothing that they name is looked up or run.

def find_storages(data: bytes) -> list[tuple[str, int]]:
    """The name of each storage in the archive, and how many bytes a pickle needs of it; 0 of unknown dtypes.

    Raises ValueError if the pickle is damaged or its keys take too long to hash."""

def check_pickle_keys(data: bytes | memoryview | mmap.mmap, num_pickles: int) -> None:
    """Raises ValueError if keys of dicts, or members of sets, are tuples that take too long to hash: tuples in tuples,
    each of which holds the one before twice. Reads pickles that stand behind each other, and stops without an error at
    what else is wrong with them.
    """

# Files. Addresses are those of tensors' memory (data_ptr), which the caller keeps alive. System calls that fail raise
# OSError with the path; damaged bytes raise FormatError.

_Key = tuple[str, Sequence[int] | None, int | None]

class FormatError(ValueError): ...

class ElementType:
    @property
    def item_bytes(self) -> int: ...
    def __init__(self, storage_class: str, dtype: str, item_bytes: int) -> None: ...

def element_types() -> dict[str, ElementType]:
    """The dtypes whose elements are plain memory, by their names in torch."""

class RankFile:
    """The file that one rank wrote: all that the coordinator needs to know of it.

    ``records`` and ``sums`` are the rank's part of the index, encoded. ``save_id`` is that of the save that wrote the
    file, where that is another one than that of the index.
    """

    @property
    def name(self) -> str: ...
    @property
    def rank(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def footer_offset(self) -> int: ...
    @property
    def footer_digest(self) -> int: ...
    @property
    def records(self) -> bytes: ...
    @property
    def sums(self) -> bytes: ...
    @property
    def save_id(self) -> bytes | None: ...
    def __init__(
        self,
        name: str,
        rank: int,
        num_bytes: int,
        footer_offset: int,
        footer_digest: int,
        records: bytes,
        sums: bytes = b"",
        save_id: bytes | None = None,
    ) -> None: ...

class SavedRecord:
    """An entry of a rank file; the dtype is empty where the record is no plain tensor.

    ``sum`` is what ``ops.fingerprint_shard`` gives of the chunk; ``None`` if the save took none.
    """

    @property
    def fqn(self) -> str: ...
    @property
    def offsets(self) -> _Sizes | None: ...
    @property
    def index(self) -> int | None: ...
    @property
    def dtype(self) -> str: ...
    @property
    def sizes(self) -> _Sizes: ...
    @property
    def offset(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def data_offset(self) -> int: ...
    @property
    def sum(self) -> int | None: ...

class Index:
    """The index of one save.

    Attributes:
        metadata_bytes: Size of the ``.metadata`` that belongs to it; -1 where ``tables`` stand for that file.
        notes: The ``world_size`` of the save, the versions of ``torch`` and ``torchtitan_ext``, its place in the run.
        files: The rank files by name.
        tables: The encoded metadata; empty where there is a ``.metadata``.
        has_sums: Whether the save took sums of its records.
    """

    @property
    def save_id(self) -> bytes: ...
    @property
    def metadata_bytes(self) -> int: ...
    @property
    def metadata_digest(self) -> int: ...
    @property
    def notes(self) -> dict[str, str]: ...
    @property
    def files(self) -> dict[str, RankFile]: ...
    @property
    def tables(self) -> bytes: ...
    @property
    def has_sums(self) -> bool: ...
    def tensors(self, name: str) -> dict[int, StoredTensor]:
        """The plain tensors of known dtypes in a file, by the offset of their records."""
    def sum_of(self, name: str, offset: int, fqn: str) -> int | None:
        """The sum of the record of this key at this offset of a file; ``None`` if the save took none. For a record of
        another key it is an unrelated number."""

class RecordWriter:
    def __init__(self, path: bytes, block_bytes: int, num_threads: int, sync: bool, to_memory: bool = False) -> None:
        """``to_memory``: there is no file, the path is for messages; ``write_part`` takes the place of
        ``write_queued``."""
    def add_tensor(
        self,
        key: _Key,
        dtype: str,
        sizes: Sequence[int],
        type: ElementType,
        address: int,
        strides: Sequence[int],
        global_sizes: Sequence[int] | None = None,
    ) -> None:
        """With global sizes the record gets a sum: it is a chunk of a tensor of these sizes."""
    def begin_tensor(
        self,
        key: _Key,
        dtype: str,
        sizes: Sequence[int],
        type: ElementType,
        global_sizes: Sequence[int] | None = None,
    ) -> None: ...
    def add_bytes(self, address: int, num_bytes: int, /) -> None: ...
    def end_tensor(self) -> None: ...
    def add_record(self, key: _Key, dtype: str, sizes: Sequence[int], address: int, num_bytes: int, /) -> None: ...
    @property
    def queued_bytes(self) -> int: ...
    def write_queued(self) -> None: ...
    def write_part(self, address: int, max_bytes: int, /) -> int:
        """Writes whole blocks of what is queued, at most so many bytes, to an address, and returns their number; 0 when
        none is left."""
    @property
    def rest(self) -> bytes:
        """After ``finish``: the last bytes of the file, which no part has."""
    def finish(self, name: str, save_id: bytes, rank: int, /) -> RankFile:
        """Writes the rest and the footer. The name is the file's in the index."""

class DamagedBlock:
    """Bytes ``begin`` to ``end`` of a file that do not match their checksum."""

    @property
    def file(self) -> int: ...
    @property
    def begin(self) -> int: ...
    @property
    def end(self) -> int: ...

class BlockRange:
    """Blocks ``first`` to ``last`` of a file; the last is not among them."""

    @property
    def file(self) -> str: ...
    @property
    def first(self) -> int: ...
    @property
    def last(self) -> int: ...

class BlockLedger:
    """Which blocks of files were touched and verified, over several reads (``csrc/core/block_ledger.h``)."""

    def unverified(self) -> list[BlockRange]: ...
    def take_part(self, part: Sequence[BlockRange], /) -> None:
        """Notes which of the touched blocks this rank verifies; the others are verified by other ranks."""
    def message(self, copy: str, /) -> bytes:
        """For ``deal_blocks``; ranks that read the same copy of a checkpoint give the same ``copy``."""

def deal_blocks(messages: Sequence[bytes], /) -> list[list[BlockRange]]:
    """What each rank has to verify: each block that some rank touched and none verified, once per copy."""

class RunReader:
    def add_file(self, path: str, num_bytes: int, descriptor: int = -1) -> int:
        """A file without checksums; its size is checked where ``num_bytes`` is not negative.

        Here and below a descriptor that is not negative is what is read, and the path is for messages."""
    def add_checked_file(
        self, path: str, file: RankFile, save_id: bytes, descriptor: int = -1, ledger: BlockLedger | None = None
    ) -> int:
        """A file that ends with a footer; ``save_id`` is that of the index, for a file that has none of its own. The
        ledger has what earlier reads of the file did, and gets what this one does."""

    def add_box(
        self,
        file: int,
        stored: StoredTensor,
        offsets: Sequence[int],
        sizes: Sequence[int],
        address: int,
        strides: Sequence[int],
        dtype: str = "",
    ) -> int:
        """A box of a tensor, and the memory that it goes to. Where ``dtype`` is not the stored one, elements are cast.
        Returns its number, from 0 on since the last ``read``."""
    def add_bytes(self, file: int, offset: int, num_bytes: int, address: int, /) -> None: ...
    def check_bytes(self, file: int, offset: int, num_bytes: int) -> None: ...
    def add_blocks(self, file: int, first: int, last: int, /) -> None:
        """Blocks that ``read`` verifies, whether anything of them is wanted or not."""
    def touch(self) -> None:
        """Notes in the ledger what a ``read`` of all that was added would touch, and forgets what was added."""
    def read(self, num_threads: int, verify: str, /) -> list[DamagedBlock]:
        """``verify``: ``"none"`` of the touched blocks, those that are ``"mostly"`` read, each ``"once"`` over all
        reads of the ledger, or ``"all"``."""
    def requests(self, verify: str, max_gap: int, max_bytes: int, /) -> list[tuple[int, int, int]]:
        """Begins a read whose bytes come from elsewhere: the parts (file, first byte, one past the last byte) that it
        needs. Parts closer than ``max_gap`` bytes are one, of at most ``max_bytes`` or one block."""
    def take(self, request: int, content: Any, /) -> None:
        """Verifies and copies the bytes of one of the parts; from several threads at a time."""
    def finish(self) -> list[DamagedBlock]:
        """Ends such a read, also after an error; returns what ``read`` does."""
    def lost(self) -> list[tuple[int, float]]:
        """The boxes of the last ``read`` of which a finite number has become infinite by its cast, with one such number
        of each."""

class AddedRows:
    """What ``ReadList.add`` did.

    Attributes:
        end: One past the last row.
        num_bytes: That were added.
        left: What was not: the position of each item, and its record.
    """

    @property
    def end(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def left(self) -> list[tuple[int, int, int, StoredTensor | None]]: ...

class ReadList:
    """What a rank reads, with its records, by files: ``Reads`` as they lie in the files, or the items of any planner in
    the order of their first items. ``byte_io`` is the type of items that are values and no tensors.

    Attributes:
        files: Their names.
        fqns: The keys of the state dict of which parts of tensors are read.
        lost: The position of the first item that has no record, or one that an extension of DCP has changed.
        num_bytes: That the items want, without gaps.
    """

    @overload
    def __init__(self, reads: Reads, columns: MetadataColumns) -> None: ...
    @overload
    def __init__(self, items: list[Any], byte_io: object, columns: MetadataColumns) -> None: ...
    @overload
    def __init__(self, items: list[Any], byte_io: object, records: list[Any]) -> None: ...
    @property
    def files(self) -> list[str]: ...
    @property
    def fqns(self) -> set[str]: ...
    @property
    def lost(self) -> int | None: ...
    @property
    def num_bytes(self) -> int: ...
    def records(self, file: int) -> dict[int, int]:
        """The records of tensors in a file: their sizes by their offsets."""
    def set_tensors(self, file: int, tensors: dict[int, StoredTensor]) -> None:
        """The plain tensors in a file's records, by the offsets of these."""
    def num_rows(self, file: int) -> int: ...
    def in_file_order(self) -> list[int]:
        """Positions of items as their records lie in the files, by name; those without a record come first."""
    def touch(self, runs: RunReader, number: int, file: int) -> None:
        """Adds what the items want of a file, for ``RunReader.touch`` alone: no memory is named."""
    def add(
        self, runs: RunReader, number: int, file: int, first: int, max_bytes: int, targets: dict[str, Any]
    ) -> AddedRows:
        """Adds rows of a file, of about ``max_bytes``. By key ``targets`` has tensors of the CPU in plain memory: items
        fill boxes of them; others are left, as are elements that the reader cannot cast."""

def has_cast(stored_dtype: str, dtype: str) -> bool:
    """Whether ``add_box`` casts elements of a dtype to another one."""

class PackedRuns:
    """What a rank sends to those that write the files. Its arrays keep it.

    Attributes:
        counts: Runs and bytes for each rank.
        runs: Of each run its file, first byte and number of bytes, int64; those for rank 0 first.
        data: The bytes of the runs.
    """

    @property
    def counts(self) -> list[tuple[int, int]]: ...
    @property
    def runs(self) -> npt.NDArray[np.int64]: ...
    @property
    def data(self) -> npt.NDArray[np.uint8]: ...

class RunWriter:
    def add_file(self, path: bytes, num_bytes: int, is_written: bool = True) -> int:
        """A file that exists already, of so many bytes in the end. It is opened where this rank writes it."""
    def pack(self, rank_of_file: Sequence[int], num_ranks: int) -> PackedRuns:
        """Takes out the boxes that were added, for the ranks that write the files."""
    def add_packed(self, runs: int, num_runs: int, data: int, num_bytes: int, /) -> None:
        """Adds what other ranks have packed, at these addresses. Raises ValueError where the runs are not those of so
        many bytes."""
    def add_box(
        self,
        file: int,
        item_bytes: int,
        sizes: Sequence[int],
        address: int,
        strides: Sequence[int],
        offset_bytes: int,
        file_strides: Sequence[int],
        /,
    ) -> None:
        """A box of memory, and where it goes: its first element, and the strides of the others, in elements."""
    @property
    def queued_bytes(self) -> int: ...
    def write(self, num_threads: int, starts_write_back: bool) -> None:
        """Writes the boxes that were added, whose memory must be there until then."""
    def finish(self, num_threads: int, sync: bool) -> None: ...

def frame_tensor(type: ElementType, sizes: Sequence[int], record_offset: int, alignment: int, /) -> tuple[bytes, bytes]:
    """What stands before and behind a tensor's bytes in its record."""

def digest(bytes: bytes | npt.NDArray[np.uint8], /) -> int:
    """XXH3, 64 bits, of contiguous memory."""

def exchange_paths(first: bytes, second: bytes, /) -> None:
    """Two paths of one file system change places at once; an OSError where the file system cannot."""

def is_on_fuse(path: bytes, /) -> bool: ...
def is_on_network(path: bytes, /) -> bool: ...
def encode_index(
    save_id: bytes,
    metadata_bytes: int,
    metadata_digest: int,
    notes: Sequence[tuple[str, str]],
    files: Sequence[RankFile],
    has_sums: bool = False,
) -> bytes: ...
def parse_index(bytes: bytes, where: str) -> Index: ...
def parse_index_head(bytes: bytes, where: str) -> Index:
    """The save of an index from its first bytes: id, ``.metadata``, notes; no files, and its digest is not compared."""

def parse_records(file: RankFile) -> list[SavedRecord]: ...
def find_footer(path: str, name: str, descriptor: int) -> RankFile | None:
    """The file as an index would name it, without its records, and with the save id of its footer; ``None`` where the
    file does not end with a footer."""

def has_footer(file: RankFile, descriptor: int) -> bool:
    """Whether an opened file has the size and the footer that an index describes."""

class StoredTensor:
    """Where the elements of a tensor lie in a file; without strides row-major. ``data_offset`` is the byte of the file
    at which element 0 begins, ``dtype`` the name in torch, without the module."""

    @property
    def dtype(self) -> str: ...
    @property
    def sizes(self) -> _Sizes: ...
    @property
    def strides(self) -> _Sizes: ...
    @property
    def data_offset(self) -> int: ...
    @property
    def item_bytes(self) -> int: ...
    def __init__(self, dtype: str, sizes: Sequence[int], strides: Sequence[int] | None, data_offset: int) -> None: ...
    def shape_defect(self, dtype: str, sizes: Sequence[int]) -> str | None:
        """How it differs from the dtype and sizes in the metadata; ``None`` if it does not."""

def shortest(value: float, dtype: str) -> float:
    """The number with the fewest digits that is this element of a tensor: 0.1 for 0.10000000149011612 of float32."""

def number_of(element: bytes, dtype: str) -> bool | int | float | complex | None:
    """The number in an element's bytes, in its shortest form; ``None`` for an unknown dtype."""

def elements_needed(sizes: Sequence[int], strides: Sequence[int], storage_offset: int, /) -> int:
    """How many elements of its storage a tensor needs. An empty one needs none, and may begin behind the end."""

def find_tensors(
    path: str, places: Sequence[tuple[int, int]], num_threads: int, descriptor: int = -1
) -> list[StoredTensor | None]:
    """The plain tensor in each record (offset, bytes); ``None`` for a record of something else."""

# Plans over all ranks: numbers of keys, classes and ranks are positions.

_HeldBox = tuple[_Sizes, _Sizes]

class EncodedColumns:
    """A key table as bytes, and the order of its keys."""

    @property
    def sections(self) -> list[bytes]: ...
    @property
    def part(self) -> bytes: ...
    @property
    def names(self) -> list[list[str]]: ...
    @property
    def kind_of(self) -> list[list[int]]: ...
    @property
    def odd_paths(self) -> list[str]:
        """Keys whose path is no cut of the key at dots."""

def encode_columns(entries: dict[str, Any], paths: dict[str, tuple[Any, ...]], own: set[str]) -> EncodedColumns:
    """The table of a rank.

    Args:
        entries: ``KeyEntry`` by flat key.
        paths: Where keys, those without entry too, stand in the nested state dict.
        own: The keys of values that each rank keeps under a name of its own.
    """

def encode_digests(names: list[str], kind_of: Sequence[int], digests: dict[str, bytes]) -> bytes: ...

class ClassWrites:
    """What a rank writes of keys of one class.

    Attributes:
        keys: Positions in the section.
        boxes: Those of a tensor that describes itself, and of a divided shard, with their places in the metadata.
    """

    @property
    def section(self) -> int: ...
    @property
    def steps(self) -> tuple[_Step, ...]: ...
    @property
    def keys(self) -> list[int]: ...
    @property
    def boxes(self) -> list[tuple[int, _HeldBox]]: ...

def read_decision(decision: bytes, kind_of: Sequence[Sequence[int]]) -> list[ClassWrites]: ...

class Overlap:
    """A part of a saved chunk that a wanted chunk needs: positions of both; where it begins in the global tensor, the
    saved chunk and the local tensor (of a wanted chunk without local offsets: in this); and its sizes."""

    @property
    def wanted(self) -> int: ...
    @property
    def saved(self) -> int: ...
    @property
    def offsets(self) -> _Sizes: ...
    @property
    def saved_offsets(self) -> _Sizes: ...
    @property
    def local_offsets(self) -> _Sizes: ...
    @property
    def sizes(self) -> _Sizes: ...

class ChunkIndex:
    """A list of saved chunks, sorted once."""

    def __init__(self, chunks: list[Any]) -> None: ...
    @staticmethod
    def of_boxes(boxes: Sequence[_Box]) -> ChunkIndex: ...
    def __len__(self) -> int: ...
    def box(self, chunk: int) -> _HeldBox: ...
    def boxes(self) -> tuple[_HeldBox, ...]: ...
    def covers(self, shape: Sequence[int]) -> bool:
        """Whether the chunks hold every element of a tensor of this shape exactly once."""
    def find_overlaps(self, wanted: Sequence[_AnyChunk]) -> list[Overlap]: ...

def find_overlaps(wanted: Sequence[_AnyChunk], saved: Sequence[_Box]) -> list[Overlap]: ...

class SavedChunks:
    """The chunk list of each tensor of a checkpoint, sorted once, and the same object for equal lists.

    Thousands of keys may share a list. Our saves share the lists themselves, which pickle keeps; those of stock are
    compared by content.

    Args:
        columns: The metadata; or ``entries``, by key objects of ``tensor_class``, which have ``chunks``, and others.
    """

    @overload
    def __init__(self, columns: MetadataColumns) -> None: ...
    @overload
    def __init__(self, entries: dict[str, Any], tensor_class: type) -> None: ...
    def find(self, fqn: str) -> ChunkIndex | None:
        """``None`` for a key that is no tensor, or is not there."""
    def of(self, chunks: list[Any]) -> ChunkIndex:
        """That of a list like DCP's, of ``ChunkStorageMetadata``."""

def find_uncovered(joint: JointTable, wanted: dict[str, str], saved: SavedChunks) -> list[tuple[int, int, ChunkIndex]]:
    """The keys that ranks agree on whose saved chunks do not hold every element of the tensor exactly once.

    Args:
        wanted: By key the name in the checkpoint.

    Returns:
        Of each the number, the class, and the chunks.
    """

class BoxParts:
    """A box in parts of at most so many elements, in row-major order: whole rows of an outer dim, or parts of one row
    each. A box without elements is one part."""

    def __init__(self, offsets: Sequence[int], sizes: Sequence[int], most_elements: int) -> None: ...
    def __iter__(self) -> Iterator[_HeldBox]: ...
    def __next__(self) -> _HeldBox: ...

class BoxPart:
    """A part of one of several boxes: elements that are neighbours in the row-major order of the box.

    Attributes:
        box: Which of the boxes.
        offsets: In the tensor, as those of the box.
        first_byte: Where the part begins in the box.
        begin: Where it lies in the buffer of its batch, in bytes.
        is_last: Whether the box ends with it.
    """

    @property
    def box(self) -> int: ...
    @property
    def offsets(self) -> _Sizes: ...
    @property
    def sizes(self) -> _Sizes: ...
    @property
    def first_byte(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def begin(self) -> int: ...
    @property
    def is_last(self) -> bool: ...

class BoxBatches:
    """Boxes (offsets, sizes, bytes of an element) in parts of at most ``max_bytes``, or one element, and these in
    batches that fit into a buffer of that size. A box without elements is one part."""

    def __init__(
        self, boxes: Sequence[tuple[Sequence[int], Sequence[int], int]], max_bytes: int, max_parts: int
    ) -> None: ...
    def __iter__(self) -> Iterator[list[BoxPart]]: ...
    def __next__(self) -> list[BoxPart]: ...

# Items of a rank's plan, by its ``KeyEntry`` by flat key; ``names`` are the keys of ``EncodedColumns``.

class WritePart:
    """What an item writes of a key. Keys that are held alike share it.

    Attributes:
        entry: The ``KeyEntry``.
        position: The place in the metadata's list of chunks; ``None`` of an object.
    """

    @property
    def entry(self) -> Any: ...
    @property
    def offsets(self) -> _Sizes: ...
    @property
    def sizes(self) -> _Sizes: ...
    @property
    def position(self) -> int | None: ...

class Writes:
    """What a rank writes: per item its key and the number of its part. Values that are no tensors, then tensors, both
    in the order of keys.

    Attributes:
        num_bytes: Of all tensors, without the frames of records.
    """

    @property
    def num_items(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def parts(self) -> list[WritePart]: ...
    @property
    def fqns(self) -> list[str]: ...
    @property
    def part_of(self) -> list[int]: ...
    def local_boxes(self) -> dict[tuple[str, _Sizes], _HeldBox]:
        """Where each written box lies in the rank's local tensor, and its sizes, by key and offsets."""
    def queue(
        self, records: RecordWriter, first: int, max_bytes: int, tensors: dict[str, Any], takes_sums: bool
    ) -> int:
        """Queues the records of items from ``first`` on, up to about ``max_bytes``, or to the first item whose tensor
        is not at hand: by key ``tensors`` has tensors of the CPU in plain memory, of which items write boxes.

        Returns:
            The position behind the last item that was queued.
        """

def read_writes(
    decision: bytes, names: Sequence[list[str]], kind_of: Sequence[Sequence[int]], entries: dict[str, Any]
) -> Writes:
    """What a decision of the coordinator means for the rank that sent the table of these entries."""

def held_writes(names: Sequence[list[str]], entries: dict[str, Any]) -> Writes:
    """All that a rank holds, as it would write it by its own reading of the layouts and without other ranks."""

def written_boxes(entry: Any, steps: Sequence[_Step]) -> tuple[_HeldBox, ...]:
    """What a rank writes of a tensor that is its part; a tensor without elements is one box."""

def planned_columns(joint: JointTable, plan: WritePlan) -> MetadataColumns:
    """The metadata that a plan writes, without places: of all keys that some rank holds, in their order."""

def find_saved_alike(entries: dict[str, Any], columns: MetadataColumns) -> set[str]:
    """The keys of tensors that are saved with the shape and the dtype of their ``KeyEntry``."""

class Unfilled:
    """A tensor of which the saved chunks do not hold, once, all that the rank wants; counts elements."""

    @property
    def fqn(self) -> str: ...
    @property
    def num_wanted(self) -> int: ...
    @property
    def num_read(self) -> int: ...

class Reads:
    """What a rank reads: values that are no tensors, then parts of saved chunks, both in the order of keys. An item is
    one of these.

    Attributes:
        values: By key the name in the checkpoint.
        num_items: Of both kinds.
    """

    @property
    def values(self) -> dict[str, str]: ...
    @property
    def num_items(self) -> int: ...
    def values_alone(self) -> Reads: ...
    def tensors_alone(self) -> Reads: ...
    def columns(self, size_class: type) -> dict[str, list[Any]]:
        """The tensors' parts, one list for each: ``fqns``, ``saved_names``; ``offsets`` and ``positions`` of the wanted
        chunk, ``local_offsets`` of the part in the local tensor; ``chunk_offsets`` and ``chunk_positions`` of the saved
        chunk, ``saved_offsets`` of the part in it; ``sizes``.
        """
    def unfilled(self) -> list[Unfilled]: ...

def find_reads(
    names: Sequence[list[str]],
    entries: dict[str, Any],
    saved_names: dict[str, str],
    saved: SavedChunks,
    decided: dict[str, tuple[_Step, ...]],
) -> Reads:
    """Which parts of saved chunks fill what a rank holds.

    Args:
        saved_names: What keys are called in the checkpoint, where that differs.
        decided: Sharding orders that are not the first of the rank's candidates.
    """

class EntryType(enum.Enum):
    NONE = 0
    OBJECT = 1
    TENSOR = 2
    BOXES = 3

class KeyKind:
    """What keys of one class have in common; the dtype is empty of objects."""

    @property
    def type(self) -> EntryType: ...
    @property
    def dtype(self) -> str: ...
    @property
    def global_shape(self) -> _Sizes: ...
    @property
    def requires_grad(self) -> bool: ...
    @property
    def is_plain(self) -> bool:
        """Whether every rank holds all of the tensor."""
    @property
    def is_object(self) -> bool: ...

class HeldShard:
    """A shard and the ranks (positions in the list of tables) that hold it alike, in increasing order."""

    @property
    def ranks(self) -> _Sizes: ...
    @property
    def boxes(self) -> tuple[_HeldBox, ...]: ...
    def __init__(self, ranks: Sequence[int], boxes: Sequence[_Box]) -> None: ...

class Replica:
    """One complete tensor, as the shards that make it up."""

    @property
    def steps(self) -> tuple[_Step, ...]: ...
    @property
    def ranks(self) -> list[int]: ...
    @property
    def shards(self) -> tuple[HeldShard, ...]: ...

def axes_of(meshes: Sequence[tuple[Sequence[int], Sequence[str] | None]], held: Sequence[int] = ...) -> dict[str, int]:
    """Size of each named axis of meshes (shape and names), with an axis ``pp`` for the stages of a pipeline.

    Args:
        held: Per rank what stands for the keys that it holds on meshes, equal for equal keys; none for no stages.
    """

class JointTable:
    """The key tables of all ranks that save or load, put together."""

    @property
    def num_ranks(self) -> int: ...
    def add_section(self, bytes: bytes) -> int: ...
    def add_rank(self, sections: Sequence[int], part: bytes) -> None: ...
    def agree(self, needs_all_ranks: bool) -> None: ...
    def names(self) -> list[str]: ...
    def paths(self) -> dict[str, tuple[str | int, ...]]:
        """Of the keys that have one."""
    @property
    def has_meshes(self) -> bool: ...
    def axes(self) -> dict[str, int]:
        """See ``axes_of``."""
    def held_names(self) -> list[str]:
        """The keys that some rank holds."""
    def agreed_keys(self) -> dict[int, int]:
        """The class of each key that some rank holds and that has no problem, in increasing order of keys."""
    def kinds(self) -> list[KeyKind]: ...
    def kind_of(self, key: int) -> KeyKind:
        """Of the class of a key that some rank holds."""
    def problems(self) -> dict[int, KeyProblem]:
        """By key, in increasing order."""
    def ranks(self, of_class: int) -> list[int]: ...
    def replicas(self, of_class: int) -> list[Replica]: ...
    def describe_replicas(self, key: int) -> str:
        """Of a tensor on several meshes: says on which ranks, as the beginning of a sentence about the key."""
    def steps_of(self, rank: int) -> dict[str, tuple[_Step, ...]]:
        """The true sharding order of each tensor that a rank holds and that has no problem, by key; those that describe
        themselves have none."""
    def unforeseen_steps(self) -> list[dict[str, tuple[_Step, ...]]]:
        """Per rank and key the orders of sharding that are not the first of the rank's candidates."""
    def is_filled(self, of_class: int, saved: ChunkIndex) -> bool:
        """Whether saved chunks hold, once, all that ranks hold of each key of a class."""
    def written_boxes(self, of_class: int) -> list[_HeldBox]: ...

class DigestOfRank:
    """What stands for the value of a rank, and whether it is the beginning of a digest only."""

    @property
    def rank(self) -> int: ...
    @property
    def digest(self) -> bytes: ...
    @property
    def is_cut(self) -> bool: ...

class ReplicaDifference:
    @property
    def key(self) -> int: ...
    @property
    def first(self) -> DigestOfRank: ...
    @property
    def second(self) -> DigestOfRank: ...
    @property
    def is_presumed(self) -> bool:
        """Whether the ranks are on different meshes, and replicas by presumption only."""

class DigestComparison:
    """Keys of tensors on several meshes are ``equal``, or ``uncompared`` where layouts differ or a digest lacks."""

    @property
    def differing(self) -> list[ReplicaDifference]: ...
    @property
    def equal(self) -> list[int]: ...
    @property
    def uncompared(self) -> list[int]: ...

class ReplicaDigests:
    def __init__(self, joint: JointTable) -> None: ...
    def add_message(self, section: int, bytes: bytes) -> int: ...
    def add_rank(self, messages: Sequence[int]) -> None: ...
    def compare(self) -> DigestComparison: ...

class WritePlan:
    @property
    def load_bytes(self) -> list[int]: ...
    def __init__(
        self,
        joint: JointTable,
        lowest_only: bool,
        lowest_keys: Sequence[int],
        hosts: Sequence[int],
        equal_keys: Sequence[int] = ...,
        may_divide: bool = ...,
    ) -> None: ...
    def decision(self, rank: int) -> bytes: ...
    def written_boxes(self, of_class: int) -> tuple[_HeldBox, ...]:
        """The chunks of each key of a class in the metadata."""
    def keys_of_several_boxes(self) -> list[int]: ...

NO_KEY: int

class TransferPair:
    @property
    def source_classes(self) -> list[int]:
        """One, or per source of a map its class."""
    @property
    def is_mapped(self) -> bool: ...
    @property
    def target_class(self) -> int: ...
    cast_to: int
    @property
    def source_keys(self) -> list[int]: ...
    @property
    def target_keys(self) -> list[int]: ...

def pair_keys(
    source: JointTable,
    target: JointTable,
    source_of: Sequence[int],
    mapped: Sequence[tuple[int, TensorMap, int]] = ...,
    distrusted: Mapping[int, Sequence[int]] = ...,
) -> list[TransferPair]: ...

class TransferPlan:
    @property
    def bytes_between(self) -> dict[tuple[int, int], int]: ...
    def __init__(
        self,
        source: JointTable,
        target: JointTable,
        pairs: Sequence[TransferPair],
        hosts: Sequence[int],
    ) -> None: ...
    def sends(self, rank: int) -> bytes: ...
    def receives(self, rank: int) -> bytes: ...
    def fills(self, rank: int) -> bytes: ...

_View = tuple[_Sizes, _Sizes, list[tuple[int, int]]]
"""Of a tensor: offsets, sizes, and per dim of the view the dim of the tensor and its step."""

class BoxTable:
    @property
    def entries(self) -> bytes: ...
    @property
    def views(self) -> list[tuple[int, _View]]: ...
    @property
    def changed(self) -> list[int]:
        """The numbers of boxes that a map or a cast changes."""
    @property
    def bytes_of_peer(self) -> dict[int, int]: ...

def expand_fills(fills: bytes, first_tensor: Sequence[int]) -> list[tuple[int, _View, float]]: ...
def expand_transfers(transfers: bytes, first_tensor: Sequence[int], num_tensors: int) -> BoxTable: ...

# Transforms: csrc/core/transform.h, csrc/core/tensor_map.h.

class MapPart:
    """What is read of one chunk of a source; ``chunk`` is its position in the chunk list. Memory counts elements."""

    @property
    def source(self) -> int: ...
    @property
    def chunk(self) -> int: ...
    @property
    def memory_offset(self) -> int: ...
    @property
    def memory_strides(self) -> _Sizes: ...
    def stored(self, chunk: StoredTensor) -> StoredTensor:
        """The elements that are read as a tensor of their own, given where those of the chunk lie."""

class MapSources:
    """Shape and chunks of each source, by its number; ``None`` for one that is not used."""
    def __init__(self, sources: Sequence[tuple[Sequence[int], ChunkIndex | None]]) -> None: ...

class TensorMap:
    @property
    def shape(self) -> _Sizes: ...
    @property
    def num_pieces(self) -> int: ...
    @property
    def sources(self) -> list[int]: ...
    @property
    def has_fills(self) -> bool: ...
    def find_fills(self, offsets: Sequence[int], sizes: Sequence[int]) -> list[tuple[float, _View]]: ...
    def source_in_place(self) -> int | None:
        """The only source, where each element is the one at the same row-major position of it."""
    def enumerate(self) -> list[tuple[int, int]]:
        """Source and row-major position of each element, row by row. For tests and small tensors."""
    def find_parts(
        self, offsets: Sequence[int], sizes: Sequence[int], memory_strides: Sequence[int], sources: MapSources
    ) -> list[MapPart]: ...

class MappedTensor:
    """A tensor that a transform gives out; without ``dtypes`` it is a value that is no tensor, of source ``value``."""

    @property
    def name(self) -> str: ...
    @property
    def dtypes(self) -> list[str]: ...
    @property
    def values(self) -> TensorMap: ...
    @property
    def scales(self) -> TensorMap | None: ...
    @property
    def value(self) -> int: ...

class ResolvedTransform:
    @property
    def targets(self) -> list[MappedTensor]: ...
    @property
    def problems(self) -> list[tuple[str, str]]: ...

_StepArguments = tuple[str, int, Sequence[int], Sequence[Sequence[int]], str, float]

def resolve_transform(
    stages: Sequence[
        tuple[Sequence[tuple[Sequence[str], Sequence[str], Sequence[_StepArguments], bool]], Sequence[str]]
    ],
    sources: Sequence[tuple[str, str, Sequence[int]]],
) -> ResolvedTransform:
    """Sources are names, dtypes (empty for values that are no tensors) and shapes."""

class StoreAction:
    """What a rank does next with the store: see csrc/core/roll_call.h."""

    @property
    def kind(self) -> Literal["set", "compare_set", "add", "has_all", "read", "wait", "raise", "end"]: ...
    @property
    def keys(self) -> list[str]: ...
    @property
    def value(self) -> bytes: ...
    @property
    def number(self) -> int: ...
    @property
    def seconds(self) -> float: ...

class Verdict:
    @property
    def operation(self) -> str: ...
    @property
    def path(self) -> str: ...
    @property
    def phase(self) -> str: ...
    @property
    def doing(self) -> str: ...
    @property
    def why(self) -> str: ...
    @property
    def silent(self) -> tuple[int, ...]: ...
    @property
    def late(self) -> dict[int, str]: ...

class RollCall:
    """One rank in one operation: see csrc/core/roll_call.h."""

    ANSWER_POLL_SECONDS: float
    TAKE_OVER_SECONDS: float
    LINGER_SECONDS: float
    def __init__(
        self,
        operation: str,
        path: str,
        rank: int,
        ranks: Sequence[int],
        timeout_seconds: float,
        now: float,
        answer_seconds: float,
    ) -> None: ...
    @property
    def patience_seconds(self) -> float: ...
    def begin(self, now: float, phase: str, doing: str) -> None: ...
    def at(self, key: str) -> None: ...
    def wait(self, now: float) -> None: ...
    def seconds_left(self, now: float) -> float: ...
    @property
    def phase(self) -> str: ...
    @property
    def doing(self) -> str: ...
    def call(self, why: str, is_late: bool) -> None: ...
    def close(self) -> None: ...
    def enter_exchange(self, name: str) -> None: ...
    def leave_exchange(self, error: bytes | None) -> bool: ...
    @property
    def failure(self) -> tuple[int, bytes] | None: ...
    @property
    def all_are_out(self) -> bool: ...
    def next(self, now: float, seen: bool | int | Mapping[str, bytes] | None) -> list[StoreAction]: ...
    def has_work(self) -> bool: ...
    def is_fresh(self, now: float) -> bool: ...
    @property
    def has_answered(self) -> bool: ...
    @property
    def verdict(self) -> Verdict | None: ...

def poll_seconds(rank: int) -> float: ...

class SharePlan:
    @property
    def wanted_bytes(self) -> int: ...
    @property
    def repeated_bytes(self) -> int: ...
    @property
    def shared_bytes(self) -> int: ...
    @property
    def devices(self) -> list[str]: ...
    @property
    def bytes_between(self) -> dict[tuple[int, int], int]: ...
    def __init__(self, wanted: Sequence[bytes], own_bytes: Sequence[int], hosts: Sequence[int]) -> None: ...
    def assign(self, most_rounds: int) -> None: ...
    def part_message(self, rank: int) -> bytes: ...

class ItemsToRead:
    @property
    def items(self) -> list[Any]: ...
    @property
    def num_bytes(self) -> int: ...

class SharedExchange:
    @property
    def sources(self) -> list[Any]: ...
    @property
    def targets(self) -> list[Any]: ...
    @property
    def sends(self) -> npt.NDArray[np.int64]: ...
    @property
    def receives(self) -> npt.NDArray[np.int64]: ...

class RankReads:
    """What one rank reads of the tensors of a checkpoint; see csrc/bindings/shared_reads.cpp."""

    @property
    def items(self) -> list[Any]: ...
    @property
    def own_bytes(self) -> int: ...
    @property
    def num_rounds(self) -> int: ...
    @property
    def shared_items(self) -> list[int]: ...
    def __init__(self, items: list[Any], metadata: Mapping[str, Any]) -> None: ...
    def wanted(self, tag_of: Sequence[tuple[str, str, int, bool, bool] | None]) -> bytes: ...
    def share(self, message: bytes) -> None: ...
    def reads(self, round: int) -> ItemsToRead: ...
    def exchange(self, round: int, device: int) -> SharedExchange: ...

class IndexOrder:
    def __init__(self, num_samples: int, seed: int, epoch: int) -> None: ...
    def indices_at(self, places: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]: ...

class HeldSums:
    """What one rank holds of a tensor; ``replica`` is equal on all ranks that hold parts of one, empty of a whole one.

    ``sums`` has that of the rank's shard under ``None``, or that of each box (offsets and sizes).
    """

    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> _Sizes: ...
    @property
    def replica(self) -> str: ...
    @property
    def sums(self) -> dict[_HeldBox | None, int]: ...

class SumTable:
    """Sums of what one rank, or each of several, holds of tensors, modulo 2^64; see csrc/core/sums.h."""

    def __init__(self) -> None: ...
    def __contains__(self, key: object) -> bool: ...
    def __getitem__(self, key: str) -> HeldSums: ...
    def __iter__(self) -> Iterator[str]: ...
    def add_key(
        self,
        key: str,
        sums: Mapping[_HeldBox | None, int],
        *,
        dtype: str = "",
        shape: Sequence[int] = (),
        replica: str = "",
    ) -> None: ...
    def add(self, key: str, sum: int, box: _HeldBox | None = None) -> None: ...
    @staticmethod
    def merge(of_ranks: Sequence[SumTable]) -> SumTable:
        """Of ranks in their order, each with a table of its own."""
    def replicas(self, key: str) -> list[HeldSums]:
        """Each replica of a tensor as one part with all of it, in the order of their first ranks."""
    def differing(self, expected: Mapping[str, int]) -> list[str]:
        """Keys of which some replica has another sum; those that are not expected are passed over."""

def add_sums(*sums: int) -> int:
    """Modulo 2^64."""

def sum_box(
    address: int, item_bytes: int, offsets: Sequence[int], sizes: Sequence[int], global_sizes: Sequence[int]
) -> int:
    """The sum that ``ops.fingerprint_shard`` gives for a box of a tensor, whose elements lie row by row at an address
    of the host. In the calling thread."""
