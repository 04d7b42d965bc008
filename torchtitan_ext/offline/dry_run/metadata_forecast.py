"""How large ``.metadata`` and the index of a save become: what ``FileWriter.finish`` would write, without the files.

Keys, chunk lists and the planner's data are encoded as the writer does. What comes from the files, an entry per record,
is counted: in the index all numbers have a fixed width (``csrc/storage/index.cpp``), in the pickle small ones take less
(``csrc/core/metadata_pickle_writer.cpp``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from torchtitan_ext import _core
from torchtitan_ext.storage.checkpoint_files import DATA_SUFFIX
from torchtitan_ext.storage.metadata.metadata_file import columns_of, storage_meta_fields
from torchtitan_ext.storage.native.file_writer import notes_of_save

# In the index, beside its name and 16 bytes per dim: flags, number of dims, dtype, hint, three places.
_RECORD_BYTES = 40
_DIM_BYTES = 16
# A section has a header and is filled up to a multiple of 8; a file's has length of name, rank and three sizes.
_SECTION_BYTES = 16
_FILE_BYTES = 4 + 4 + 3 * 8

# In `.metadata`: an entry but for its numbers; a chunk has position and offsets, a value says that it has no position.
_ENTRY_BYTES = 36
_OFFSETS_BYTES = 7
_NO_POSITION_BYTES = 1
# Names of classes and fields, the first time that they stand there.
_FIRST_ENTRY_BYTES = 129
# So many entries stand between two marks.
_BATCH_ENTRIES = 1000
_MARKS_BYTES = 2
# A frame of the pickle, and its header.
_FRAME_BYTES = 64 << 10
_FRAME_HEADER_BYTES = 9


@dataclass(frozen=True)
class FileRecords:
    """What the file of one rank adds.

    Attributes:
        rank: The file's.
        index_bytes: Of its records in the index.
        pickled_place_bytes: Of the offsets and lengths of its records in ``.metadata``.
    """

    rank: int
    index_bytes: int
    pickled_place_bytes: int


def index_bytes_of(dtypes: Iterable[str], num_records: int, name_bytes: int, num_dims: int) -> int:
    """What a file's records take in the index.

    Args:
        dtypes: Those in the file, each once; of values the empty name.
        name_bytes: Of the keys of all records.
        num_dims: Of the chunks of all records.
    """
    names = 4 + sum(4 + len(dtype) for dtype in dtypes)
    return names + 8 + num_records * _RECORD_BYTES + name_bytes + num_dims * _DIM_BYTES


def foresee_index(files: Sequence[FileRecords], num_ranks: int) -> int:
    """Bytes of ``.tte_index``."""
    empty = len(_core.encode_index(bytes(16), 0, 0, notes_of_save(num_ranks), []))
    sections = (_FILE_BYTES + len(_name_of(file)) + file.index_bytes for file in files)
    return empty + sum(_SECTION_BYTES + -(-num_bytes // 8) * 8 for num_bytes in sections)


def foresee_metadata(metadata: Metadata, files: Sequence[FileRecords]) -> int:
    """Bytes of ``.metadata``, but for the length of the checkpoint's path, which stands in it."""
    columns = columns_of(metadata.state_dict_metadata)
    assert columns is not None, "our planner's metadata has other classes than DCP's, please report"
    storage_meta = StorageMeta(Path("/"), "0" * 32)  # held meanwhile: what others hold too has a number in the pickle
    fields = storage_meta_fields(storage_meta)
    content = columns.to_pickle(metadata.planner_data, fields, CURRENT_DCP_VERSION)
    assert content is not None, "our planner's data has more than plain values, please report"
    without_entries = len(content) - len("/")
    entries = metadata.state_dict_metadata.values()
    num_chunks = [len(entry.chunks) for entry in entries if isinstance(entry, TensorStorageMetadata)]
    num_values = len(entries) - len(num_chunks)
    num_entries = num_values + sum(num_chunks)
    if not num_entries:
        return without_entries
    num_bytes = num_entries * _ENTRY_BYTES + num_values * _NO_POSITION_BYTES + _FIRST_ENTRY_BYTES
    num_bytes += sum(count * _OFFSETS_BYTES + _positions_bytes(count) for count in num_chunks)
    num_bytes += sum(2 + len(_name_of(file)) + file.pickled_place_bytes for file in files)
    num_bytes += -(-num_entries // _BATCH_ENTRIES) * _MARKS_BYTES
    # A frame ends behind the entry that fills it, so that there may be one less.
    num_frames = (without_entries + num_bytes) // _FRAME_BYTES - without_entries // _FRAME_BYTES
    return without_entries + num_bytes + num_frames * _FRAME_HEADER_BYTES


def _name_of(file: FileRecords) -> str:
    return f"__{file.rank}_0{DATA_SUFFIX}"


def _positions_bytes(count: int) -> int:
    """Of the numbers 0, 1, ... of a list of chunks."""
    ends = [min(count, end) for end in (0, 1 << 8, 1 << 16, 1 << 31)]
    return sum((end - begin) * width for begin, end, width in zip(ends, ends[1:], (2, 3, 5), strict=False))
