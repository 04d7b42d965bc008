"""How large ``.metadata`` and the index of a save become, by the encoders of ``FileWriter``.

Ranks that write alike share one foreseen file: it is encoded once and counted for each of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from torchtitan_ext import _core
from torchtitan_ext.storage.checkpoint_files import DATA_SUFFIX
from torchtitan_ext.storage.metadata.metadata_file import columns_of, storage_meta_fields
from torchtitan_ext.storage.native.file_writer import notes_of_save


def foresee_index(files: Sequence[tuple[int, _core.RankFile]], num_ranks: int) -> int:
    """Bytes of ``.tte_index``.

    Args:
        files: Rank and content of each file.
    """

    def encoded(*files: _core.RankFile) -> int:
        return len(_core.encode_index(bytes(16), 0, 0, notes_of_save(num_ranks), files))

    empty = total = encoded()
    known: dict[tuple[int, int], int] = {}
    for rank, file in files:
        name = _name_of(rank)
        form = (id(file), len(name))
        if form not in known:
            known[form] = encoded(_core.RankFile(name, rank, 0, file.footer_offset, 0, file.records)) - empty
        total += known[form]
    return total


def foresee_metadata(metadata: Metadata, files: Sequence[tuple[int, _core.RankFile]]) -> int:
    """Bytes of ``.metadata``, but for the length of the checkpoint's path, which stands in it.

    Args:
        files: Rank and content of each file.
    """
    columns = columns_of(metadata.state_dict_metadata)
    assert columns is not None, "our planner's metadata has other classes than DCP's, please report"
    parts: dict[int, tuple[int, int]] = {}
    rows = []
    for rank, file in files:
        if id(file) not in parts:
            first = columns.num_parts
            columns.add_records(file)
            parts[id(file)] = first, columns.num_parts - first
        rows.append((_name_of(rank), *parts[id(file)]))
    storage_meta = StorageMeta(Path("/"), "0" * 32)  # held meanwhile: what others hold too has a number in the pickle
    fields = storage_meta_fields(storage_meta)
    return columns.pickle_bytes(metadata.planner_data, fields, CURRENT_DCP_VERSION, rows) - len("/")


def _name_of(rank: int) -> str:
    return f"__{rank}_0{DATA_SUFFIX}"
