"""A checkpoint of any format, as a load by a job would have it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from torchtitan_ext.checkpoint.operation.component_plans import OpenSource
from torchtitan_ext.checkpoint.operation.load_phases import open_source
from torchtitan_ext.checkpoint.planners.load_planner import LoadPlanner
from torchtitan_ext.checkpoint.rules.policy import Source
from torchtitan_ext.dcp_private import StorageInfo
from torchtitan_ext.errors import Problem, refusal
from torchtitan_ext.offline.sources import FileSource
from torchtitan_ext.offline.sources import open_source as open_files
from torchtitan_ext.storage import FileReader
from torchtitan_ext.storage.checkpoint_files import data_file_bytes, is_local, metadata_file_bytes
from torchtitan_ext.storage.formats.detect import Format, format_of, how_to_load


@dataclasses.dataclass(frozen=True)
class LoadSource:
    """A checkpoint that is loaded.

    Attributes:
        opened: Its metadata, and what a job reads it by.
        file_bytes: Of its data files, by name, as far as they are in a local directory.
        metadata_bytes: Of ``.metadata``, and of the index beside it; 0 where there is none, or that is not known.
        problems: Why a job cannot load it as it is; nothing of it can be read by ``opened.reader`` then.
        notes: How a job loads it.
    """

    opened: OpenSource
    file_bytes: Mapping[str, int]
    metadata_bytes: tuple[int, int] = (0, 0)
    problems: tuple[Problem, ...] = ()
    notes: tuple[str, ...] = ()


def open_load_source(source: Source) -> LoadSource:
    """Opens a checkpoint of DCP, safetensors or ``torch.save``; reads no tensors.

    Raises:
        StateRefusedError: It has no metadata that can be read, or each rank has its own.
        UnknownFormatError: It is none of these.
        DamagedCheckpointError: Headers or the archive are damaged.
        OSError: There is nothing at the path, or it cannot be read.
    """
    assert source.path is not None, "a dry run names a path, please report"
    path = Path(source.path)
    kind: Format = format_of(path) if is_local(source.path) else "dcp"
    if kind != "dcp":
        return _with_files(open_files(path), kind, source)
    opened = open_source(source, LoadPlanner(), 0)
    if opened.is_of_one_rank:
        detail = (
            "each rank has metadata of its own part alone (use_collectives=False): it loads on the ranks of its save"
        )
        raise refusal("dry run", [Problem("broken_checkpoint", opened.name, detail)])
    if not is_local(source.path):
        return LoadSource(opened, {})
    save_id = getattr(opened.metadata.storage_meta, "save_id", None)
    return LoadSource(opened, data_file_bytes(path), metadata_file_bytes(path, save_id))


def _with_files(files: FileSource, kind: Format, source: Source) -> LoadSource:
    """Files of whole tensors. DCP reads a directory of safetensors files by a reader of its own."""
    path = files.path
    file_bytes = data_file_bytes(path) if path.is_dir() else {path.name: path.stat().st_size}
    metadata = dataclasses.replace(files.metadata, storage_data=_places(files))
    name = str(source.path)
    if kind == "safetensors" and path.is_dir():
        note = f"a job loads safetensors files with storage_reader=HuggingFaceStorageReader({name!r})"
        reader = HuggingFaceStorageReader(name)
        return LoadSource(OpenSource(name, source, reader, metadata), file_bytes, notes=(note,))
    problem = Problem("broken_checkpoint", name, how_to_load(path) or "is no checkpoint that a job reads")
    note = "what a load reads is told as if the checkpoint had been converted, by one rank"
    opened = OpenSource(name, source, FileReader(path), metadata)
    return LoadSource(opened, file_bytes, problems=(problem,), notes=(note,))


def _places(files: FileSource) -> dict[MetadataIndex, StorageInfo]:
    """Where each chunk of a tensor, and each value, lies; of values as large as they would be as records of DCP."""
    entries = files.metadata.state_dict_metadata
    indices = [
        MetadataIndex(fqn, chunk.offsets)
        for fqn, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
        for chunk in entry.chunks
    ]
    records = files.find_records(indices)
    places = {
        index: StorageInfo(record.file, record.offset, record.num_bytes)
        for index, record in zip(indices, records, strict=True)
    }
    for fqn, entry in entries.items():
        if not isinstance(entry, TensorStorageMetadata):
            places[MetadataIndex(fqn)] = StorageInfo(files.path.name, 0, files.value_record(fqn).numel())
    return places
