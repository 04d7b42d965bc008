"""Saves through a transform: planners see what the ranks hold, the files get the targets."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from torchtitan_ext import _core
from torchtitan_ext.errors import Problem, refusal
from torchtitan_ext.layout.layout import row_major_strides
from torchtitan_ext.storage.raw_tensor import DTYPES, NAMES, dtype_name
from torchtitan_ext.storage.weights.layout import dtype_problems, name_problems, value_problem
from torchtitan_ext.storage.weights.placed import FilePart, TensorForms
from torchtitan_ext.transforms.rules import Transform

SourceTensor = tuple[str, str, tuple[int, ...]]
"""Name, dtype and shape of what a transform takes; no dtype of a value that is no tensor."""


@dataclass(frozen=True)
class TransformedTensors:
    """The tensors of the files are the targets of a transform."""

    transform: Transform

    def forms(self, metadata: Metadata) -> tuple[TensorForms, bytes]:
        """The targets, and all sources.

        Raises:
            TransformError: The transform does not fit what the ranks hold, or has no way into files; all problems.
        """
        sources: list[SourceTensor] = [
            (fqn, dtype_name(entry.properties.dtype), tuple(entry.size))
            if isinstance(entry, TensorStorageMetadata)
            else (fqn, "", ())
            for fqn, entry in metadata.state_dict_metadata.items()
        ]
        resolved = _core.resolve_transform(self.transform.encoded(), sources)
        problems = [Problem("wrong_transform", key, detail) for key, detail in resolved.problems]
        problems += name_problems(target.name for target in resolved.targets)
        for target in resolved.targets:
            problems += _problems_of(target)
        used = {sources[source][0] for target in resolved.targets if target.dtypes for source in target.values.sources}
        for fqn, dtype, _ in sources:
            if fqn in used and DTYPES.get(dtype) not in NAMES:
                problems.append(
                    Problem("wrong_transform", fqn, f"is {dtype}, which is no plain memory; name it in drop")
                )
        if problems:
            raise refusal("save", problems)
        forms = {target.name: (target.dtypes[-1], tuple(target.values.shape)) for target in resolved.targets}
        return forms, zlib.compress(json.dumps(sources).encode())

    def places(self, items: Sequence[WriteItem], known: bytes) -> Mapping[MetadataIndex, Sequence[FilePart]]:
        """Follows the transform again, with this rank's chunks as all that there is of the sources."""
        sources: list[SourceTensor] = [
            (fqn, dtype, tuple(sizes)) for fqn, dtype, sizes in json.loads(zlib.decompress(known))
        ]
        number_of = {fqn: number for number, (fqn, _, _) in enumerate(sources)}
        held: dict[int, list[WriteItem]] = {}
        for item in items:
            if item.type != WriteItemType.BYTE_IO:
                held.setdefault(number_of[item.index.fqn], []).append(item)
        nothing = _core.ChunkIndex([])
        chunks = {number: _core.ChunkIndex([_chunk(item) for item in of_source]) for number, of_source in held.items()}
        all_chunks = _core.MapSources([(one[2], chunks.get(number, nothing)) for number, one in enumerate(sources)])
        found: dict[MetadataIndex, list[FilePart]] = {}
        for target in _core.resolve_transform(self.transform.encoded(), sources).targets:
            if held.keys().isdisjoint(target.values.sources):
                continue
            shape = tuple(target.values.shape)
            dtypes = tuple(DTYPES[name] for name in target.dtypes[1:])
            for part in target.values.find_parts((0,) * len(shape), shape, row_major_strides(shape), all_chunks):
                one = FilePart(target.name, part.memory_offset, part.memory_strides, dtypes, part)
                found.setdefault(held[part.source][part.chunk].index, []).append(one)
        return found


def _chunk(item: WriteItem) -> ChunkStorageMetadata:
    assert item.tensor_data is not None
    return item.tensor_data.chunk


def _problems_of(target: _core.MappedTensor) -> list[Problem]:
    """Why a target cannot be written."""
    if not target.dtypes:
        return [value_problem(target.name)]
    if target.values.has_fills:
        detail = "is padded, which a save does not; save it without, and pad it in the load"
        return [Problem("wrong_transform", target.name, detail)]
    if target.scales is not None:
        detail = "is made by dequantize, which a save does not; leave the values and their scales as they are"
        return [Problem("wrong_transform", target.name, detail)]
    return dtype_problems(target.name, target.dtypes[-1])
