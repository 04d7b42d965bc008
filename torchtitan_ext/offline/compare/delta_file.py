"""What turns one checkpoint into another, as a file of changes (``tte.delta``)."""

from __future__ import annotations

import os
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from torchtitan_ext._core import add_sums
from torchtitan_ext.delta.files import parts_of
from torchtitan_ext.delta.saved_changes import NOTE, TensorTotals, encode_note, part_names
from torchtitan_ext.errors import DamagedCheckpointError, Problem, ProblemKind, WrongValueError, refusal
from torchtitan_ext.layout.layout import Box
from torchtitan_ext.offline.compare.diff import DiffReport
from torchtitan_ext.offline.compare.measure import pieces_of
from torchtitan_ext.offline.compare.side import DifferenceKind, Side, kind_by_metadata
from torchtitan_ext.offline.selection import Selection, check_plain
from torchtitan_ext.offline.sources import FileSource
from torchtitan_ext.offline.torch_boxes import held_piece
from torchtitan_ext.storage.commit.staged_target import staged_target, take_place
from torchtitan_ext.storage.commit.steps import step_of
from torchtitan_ext.storage.formats.safetensors_spool import SafetensorsSpool
from torchtitan_ext.storage.raw_tensor import dtype_name
from torchtitan_ext.storage.weights.layout import name_problems
from torchtitan_ext.transfer.changed.kept import find_between

# For each element that differs: its position, its place in a block, and both again while they are put together.
_BYTES_PER_CHANGED = 20

_PROBLEMS: dict[DifferenceKind, tuple[ProblemKind, str]] = {
    "only_in_a": ("unexpected_key", "is a tensor of A only"),
    "only_in_b": ("missing_key", "is a tensor of B only"),
    "type": ("wrong_type", "is a tensor on one side only"),
    "shape": ("wrong_shape", "has another shape in B"),
    "dtype": ("wrong_dtype", "has another dtype in B"),
}


@dataclass(frozen=True)
class DeltaReport:
    """What was written.

    Attributes:
        num_changed: Elements that the file has new bits for.
        num_bytes: The size of the file.
        not_carried: Keys of values that are no tensors and differ: a file of changes has tensors only.
    """

    base_version: int
    version: int
    num_changed: int
    num_bytes: int
    not_carried: tuple[str, ...]


def versions_of(a: FileSource, b: FileSource, given: str | None) -> tuple[int, int]:
    """The versions of two checkpoints: their steps, or as given, ``100:200``.

    Raises:
        WrongValueError: They are not known, or do not grow.
    """
    if given is not None:
        parts = given.split(":")
        if len(parts) != 2 or not all(part.isdecimal() and part.isascii() for part in parts):
            raise WrongValueError(f"got {given!r}, expected two numbers such as 100:200", "versions")
        found: list[int | None] = [int(part) for part in parts]
    else:
        found = [step_of(source.path) for source in (a, b)]
    base_version, version = found
    if base_version is None or version is None:
        nameless = a.path if base_version is None else b.path
        raise WrongValueError(f"{nameless} is not named after a step, expected both versions, as 100:200", "versions")
    if version <= base_version:
        text = f"got the versions {base_version} and {version}, expected that the second is larger"
        raise WrongValueError(text, "versions")
    return base_version, version


def check_carried(a: FileSource, b: FileSource, selection: Selection | None = None) -> None:
    """Refuses tensors that a file of changes cannot turn into those of B. Reads metadata only.

    Raises:
        StateRefusedError: (a subclass) Tensors that one side lacks, or of other shapes or dtypes; tensors that are no
            plain memory, or whose keys are no text.
    """
    chosen = selection or Selection()
    one, other = Side(a, chosen), Side(b, chosen)
    problems = name_problems(key for key in one.fqns if one.has_tensor(key))
    for key in sorted(one.fqns.keys() | other.fqns.keys()):
        kind = kind_by_metadata(key, one, other)
        if kind is not None and (one.has_tensor(key) or other.has_tensor(key)):
            problem, what = _PROBLEMS[kind]
            problems.append(Problem(problem, key, f"{what}, and changes are of tensors that both have; leave it out"))
    if problems:
        raise refusal("delta", problems)
    for side in (one, other):
        tensors = {fqn: entry for key, fqn in side.fqns.items() if (entry := side.entry(key)) is not None}
        check_plain(side.source, tensors)


def write_delta(
    a: FileSource,
    b: FileSource,
    report: DiffReport,
    path: str | os.PathLike[str],
    *,
    versions: tuple[int, int],
    selection: Selection | None = None,
    max_bytes: int = 256 << 20,
) -> DeltaReport:
    """Writes the changes that lead from A to B, by bits, into a file that appears when it is whole.

    An existing file is replaced. Reads the tensors that differ once more, side by side; what has changed waits in a
    file without a name beside ``path``.

    Args:
        report: What ``diff`` gave for both, with the same selection.
        versions: Of A and of B.
        max_bytes: The bytes of tensors and changes that are held at a time.

    Raises:
        StateRefusedError: (a subclass) As ``check_carried``.
        DamagedCheckpointError: A tensor is not what its fingerprint says.
        OSError: A file cannot be read or written.
    """
    check_carried(a, b, selection)
    chosen, target = selection or Selection(), Path(path)
    one, other = Side(a, chosen), Side(b, chosen)
    for source in (a, b):
        if target.exists() and target.samefile(source.path):
            raise WrongValueError(f"{target} is one of the two checkpoints, expected another file", "delta")
    base_version, version = versions
    totals = {}
    with staged_target(target, take_place) as staged, closing(SafetensorsSpool(staged.parent)) as spool:
        for key, (before, after) in report.totals.items():
            totals[key] = _add_tensor(key, one, other, before, after, spool, max_bytes)
        num_bytes = spool.write(staged, {NOTE: encode_note(base_version, version, totals)})
    not_carried = tuple(found.key for found in report.differences if found.key not in totals)
    return DeltaReport(base_version, version, sum(of.count for of in totals.values()), num_bytes, not_carried)


def _add_tensor(
    key: str, one: Side, other: Side, before: int, after: int, spool: SafetensorsSpool, max_bytes: int
) -> TensorTotals:
    """Adds the changes of a tensor of both sides to a file. Returns what is noted of it."""
    boxes: list[Box | None] = []
    tensor = one.tensor(key)
    count, replaced, total, shape = 0, 0, before, tensor.shape
    pieces = pieces_of(key, one, other, max_bytes, _BYTES_PER_CHANGED) if before != after else ()
    for piece, a, b in pieces:
        held = held_piece(key, piece, shape)
        found = find_between([b], [a], [held])
        (old,), (new,) = found.old_sums, found.new_sums
        replaced, total = add_sums(replaced, old), add_sums(total, new, -old)
        for part in parts_of(found, [held], [a.element_size()]):
            names = part_names(key, len(boxes), part.box)
            for name, data in zip(names, part.tensors, strict=True):
                spool.add(name, dtype_name(data.dtype), tuple(data.shape), data)
            boxes.append(part.box)
            count += part.num_changed
    if total != after:
        what = "is not what its fingerprint says; --read compares what is there"
        raise DamagedCheckpointError(f"{one.source.path} or {other.source.path}: {key} {what}")
    return TensorTotals(tensor.dtype, shape, count, before, replaced, after, tuple(boxes))
