"""Which tensors of a new directory of safetensors lie in which file, and where. Imports no torch."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from torchtitan_ext.errors import Problem
from torchtitan_ext.storage.element_types import num_bytes_of
from torchtitan_ext.storage.formats.safetensors_files import (
    INDEX_NAME,
    NAME_OF_DTYPE,
    NewSafetensors,
    SafetensorsEntry,
    index_of,
    is_text,
    lay_out,
    read_header,
    read_weight_map,
)
from torchtitan_ext.storage.formats.sparse_files import make_file

_ONE_FILE = "model.safetensors"


def lay_out_weights(
    tensors: Mapping[str, tuple[str, Sequence[int]]],
    max_file_bytes: int,
    file_numbers: Mapping[str, int] | None = None,
    tied: Mapping[str, str] | None = None,
) -> dict[str, NewSafetensors]:
    """The files for tensors of these dtypes and shapes, by name.

    Args:
        max_file_bytes: The most bytes of tensors in a file; one that is larger gets a file of its own.
        file_numbers: In which file each tensor lies, counted in any way, instead of that.
        tied: Further names of tensors, each with the name under which the tensor is written.
    """
    num_bytes = {fqn: num_bytes_of(*tensor) for fqn, tensor in tensors.items()}
    groups = _grouped(num_bytes, max_file_bytes) if file_numbers is None else _numbered(tensors, file_numbers)
    others: dict[str, dict[str, str]] = {}
    for other, fqn in (tied or {}).items():
        others.setdefault(fqn, {})[other] = fqn
    return {
        name: lay_out({fqn: tensors[fqn] for fqn in group}, dict(ChainMap(*(others.get(fqn, {}) for fqn in group))))
        for name, group in zip(file_names(len(groups)), groups, strict=True)
    }


def file_names(num_files: int) -> list[str]:
    """The names of so many files."""
    if num_files == 1:
        return [_ONE_FILE]
    return [f"model-{number:05}-of-{num_files:05}.safetensors" for number in range(1, num_files + 1)]


def make_weights(files: Mapping[str, NewSafetensors], directory: Path) -> list[Path]:
    """Makes a directory with these files, without their elements, and, last, the index that several of them need.
    Nothing is synced.

    Returns:
        All files.
    """
    directory.mkdir()
    contents = {name: (file.header, file.num_bytes) for name, file in files.items()}
    if len(files) > 1:
        weight_map = {fqn: name for name, file in files.items() for fqn in file.offsets}
        index = index_of(weight_map, sum(file.num_bytes - len(file.header) for file in files.values()))
        contents[INDEX_NAME] = (index, len(index))
    for name, (head, num_bytes) in contents.items():
        make_file(directory / name, head, num_bytes)
    return [directory / name for name in contents]


def find_places(directory: Path, fqns: Iterable[str], *, num_files: int) -> dict[str, tuple[Path, SafetensorsEntry]]:
    """Where tensors lie in the files of ``make_weights``.

    Raises:
        OSError: A file cannot be read.
    """
    weight_map = dict.fromkeys(fqns, _ONE_FILE)
    if num_files > 1:
        all_files = read_weight_map(directory / INDEX_NAME, (directory / INDEX_NAME).read_bytes())
        weight_map = {fqn: all_files[fqn] for fqn in weight_map}
    headers = {name: read_header(directory / name) for name in sorted(set(weight_map.values()))}
    return {fqn: (directory / name, headers[name][fqn]) for fqn, name in weight_map.items()}


def name_problems(fqns: Iterable[str]) -> list[Problem]:
    """Keys that cannot be names in safetensors files."""
    problems = []
    for fqn in fqns:
        detail = ""
        if fqn == "__metadata__":
            detail = "safetensors files keep their notes under this name; give it another one"
        elif not is_text(fqn):
            detail = "its name is no text, as safetensors files need it; give it another one"
        if detail:
            problems.append(Problem("unsupported_tensor", ascii(fqn).strip("'"), detail))
    return problems


def dtype_problems(fqn: str, dtype: str) -> list[Problem]:
    """What is wrong with a dtype that the files have no name for."""
    if dtype in NAME_OF_DTYPE:
        return []
    detail = f"is {dtype}, which safetensors files have no name for; cast it, leave it out, or save it as a checkpoint"
    return [Problem("unsupported_tensor", fqn, detail)]


def value_problem(fqn: str) -> Problem:
    """What is wrong with a value that is no tensor."""
    detail = "is no tensor, and safetensors files have nothing else; leave it out, or save it as a checkpoint"
    return Problem("unsupported_value", fqn, detail)


def _grouped(num_bytes: Mapping[str, int], max_bytes: int) -> list[list[str]]:
    """The tensors of each file: in the order of the state, at most ``max_bytes`` in a file, at least one file."""
    groups: list[list[str]] = [[]]
    total = 0
    for fqn, size in num_bytes.items():
        if groups[-1] and total + size > max_bytes:
            groups.append([])
            total = 0
        groups[-1].append(fqn)
        total += size
    return groups


def _numbered(fqns: Iterable[str], file_numbers: Mapping[str, int]) -> list[list[str]]:
    groups: dict[int, list[str]] = {}
    for fqn in fqns:
        groups.setdefault(file_numbers[fqn], []).append(fqn)
    return [groups[number] for number in sorted(groups)] or [[]]
