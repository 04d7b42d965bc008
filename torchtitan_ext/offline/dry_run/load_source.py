"""Opens a checkpoint of any format as a job that loads it would."""

from __future__ import annotations

import dataclasses
from functools import cached_property
from pathlib import Path

from torch.distributed.checkpoint.metadata import MetadataIndex

from torchtitan_ext import _core
from torchtitan_ext.checkpoint.operation.component_plans import OpenSource
from torchtitan_ext.checkpoint.operation.load_phases import open_source
from torchtitan_ext.checkpoint.planners.load_planner import LoadPlanner
from torchtitan_ext.checkpoint.rules.policy import Source
from torchtitan_ext.dcp_private import StorageInfo
from torchtitan_ext.errors import Problem, refusal
from torchtitan_ext.offline.sources import open_source as open_files
from torchtitan_ext.storage import FileReader
from torchtitan_ext.storage.formats.detect import Format, format_of, how_to_load
from torchtitan_ext.storage.formats.plain_files import PlainFiles
from torchtitan_ext.storage.location import is_local
from torchtitan_ext.storage.metadata.dcp_objects import metadata_of_state, places_of, state_of
from torchtitan_ext.storage.metadata.saved_state import SavedState


@dataclasses.dataclass(frozen=True)
class LoadSource:
    """A checkpoint that a job loads.

    Attributes:
        opened: The metadata, and the reader that a job uses.
        problems: Why a job cannot load the checkpoint as it is; ``opened.reader`` can read nothing then.
        notes: How a job loads the checkpoint.
    """

    opened: OpenSource
    problems: tuple[Problem, ...] = ()
    notes: tuple[str, ...] = ()

    @cached_property
    def state(self) -> SavedState:
        """What the checkpoint holds."""
        return state_of(self.opened.metadata)

    @cached_property
    def chunks(self) -> dict[str, _core.ChunkIndex]:
        """The chunks in which each tensor was saved, by key; equal lists are one object."""
        return {fqn: tensor.chunks for fqn, tensor in self.state.tensors.items()}


def open_load_source(source: Source) -> LoadSource:
    """Opens a checkpoint of DCP, safetensors or ``torch.save``; reads no tensors.

    Raises:
        StateRefusedError: The metadata cannot be read, or each rank has metadata of its own.
        UnknownFormatError: The path holds none of these formats.
        DamagedCheckpointError: Headers or the archive are damaged.
        OSError: The path does not exist or cannot be read.
    """
    assert source.path is not None, "a dry run names a path, please report"
    path = Path(source.path)
    kind: Format = format_of(path) if is_local(source.path) else "dcp"
    if kind == "torch":
        return _of_torch(path, source)
    opened = open_source(source, LoadPlanner(), 0)
    if opened.is_of_one_rank:
        detail = (
            "each rank has metadata of its own part alone (use_collectives=False): it loads on the ranks of its save"
        )
        raise refusal("dry run", [Problem("broken_checkpoint", opened.name, detail)])
    return LoadSource(opened)


def _of_torch(path: Path, source: Source) -> LoadSource:
    """Opens a file of ``torch.save``, which a job does not read."""
    files = open_files(path)
    assert isinstance(files, PlainFiles), "only DCP has another source, please report"
    values = {MetadataIndex(fqn): StorageInfo(path.name, 0, files.value_record(fqn).nbytes) for fqn in files.values}
    metadata = dataclasses.replace(metadata_of_state(files.state), storage_data={**places_of(files.records), **values})
    name = str(source.path)
    problem = Problem("broken_checkpoint", name, how_to_load(path) or "is no checkpoint that a job reads")
    note = "the reads are those that a job would make after one rank has converted the checkpoint"
    opened = OpenSource(name, source, FileReader(path), metadata)
    return LoadSource(opened, problems=(problem,), notes=(note,))
