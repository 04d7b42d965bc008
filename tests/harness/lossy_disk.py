"""A file system that loses what was not synced: from the log of a save (``file_faults.c``), what a disk may hold after
the power failed at any point of it.

A file keeps the bytes of its last ``fsync``; of later ones any number of leading ones, or none. A directory keeps
the names of its last ``fsync``, and any number of the changes after that, in their order. So a rename that is not
synced may be there or not, and a file whose name is there may be empty. A file that is made without a name is in no
directory until it is linked there.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class File:
    content: bytearray = field(default_factory=bytearray)
    synced: bytes = b""


@dataclass
class Directory:
    names: dict[str, Node] = field(default_factory=dict)
    synced: dict[str, Node] = field(default_factory=dict)
    changes: list[dict[str, Node | None]] = field(default_factory=list)  # since then; None: the name is gone

    def change(self, **names: Node | None) -> None:
        self.changes.append(names)
        _apply(self.names, names)


Node = File | Directory

# What Linux shows of the descriptor of such a file, also after it has a name.
_HAS_NO_NAME = re.compile(r"#\d+ \(deleted\)")


@dataclass(frozen=True)
class Operation:
    name: str
    first: Path
    second: Path
    offset: int
    content: bytes


def read_log(path: Path) -> list[Operation]:
    data = path.read_bytes()
    operations = []
    position = 0
    while position < len(data):
        end = data.index(b"\n", position)
        name, first, second, offset, size = data[position:end].decode().split("\t")
        position = end + 1 + int(size)
        operations.append(Operation(name, Path(first), Path(second), int(offset), data[end + 1 : position]))
    return operations


class LossyDisk:
    """A tree of files below ``root``, as it is on the disk."""

    def __init__(self, root: Path, content: Path) -> None:
        """Begins with what lies in ``content``, all of it synced."""
        self._root = root
        self._top = _read_tree(content)
        self._made_without_name: dict[Path, File] = {}

    def apply(self, operation: Operation) -> None:
        one = operation.first
        match operation.name:
            case "mkdir":
                self._parent(one).change(**{one.name: Directory()})
            case "create" if _HAS_NO_NAME.fullmatch(one.name):
                self._made_without_name[one] = File()
            case "create":
                if one.name not in self._parent(one).names:
                    self._parent(one).change(**{one.name: File()})
                else:
                    self._file(one).content.clear()
            case "append" | "write":
                file = self._made_without_name.get(one)
                if file is None and one.name in self._parent(one).names:  # else it has lost its name meanwhile
                    file = self._file(one)
                if file is not None:
                    begin = len(file.content) if operation.name == "append" else operation.offset
                    file.content.extend(bytes(max(0, begin + len(operation.content) - len(file.content))))
                    file.content[begin : begin + len(operation.content)] = operation.content
            case "fsync":
                node = self._node(one)
                if isinstance(node, File):
                    node.synced = bytes(node.content)
                else:
                    node.synced, node.changes = dict(node.names), []
            case "rename" | "exchange":
                self._rename(one, operation.second, operation.name == "exchange")
            case "link":
                linked = self._made_without_name.get(one) or self._node(one)
                self._parent(operation.second).change(**{operation.second.name: linked})
            case "unlink" | "rmdir":
                self._parent(one).change(**{one.name: None})

    def write_what_may_be_left(self, target: Path, choose: Callable[[int], int]) -> None:
        """Makes the tree at ``target``; ``choose(n)`` says how many of n changes that were not synced are kept."""
        _write_tree(self._top, target, choose)

    def _rename(self, one: Path, other: Path, is_exchange: bool) -> None:
        assert one.parent == other.parent, "one change of one directory, so that it is there or not"
        parent = self._parent(one)
        parent.change(
            **{one.name: parent.names[other.name] if is_exchange else None, other.name: parent.names[one.name]}
        )

    def _node(self, path: Path) -> Node:
        node: Node = self._top
        for name in path.relative_to(self._root).parts:
            assert isinstance(node, Directory)
            node = node.names[name]
        return node

    def _parent(self, path: Path) -> Directory:
        node = self._node(path.parent)
        assert isinstance(node, Directory)
        return node

    def _file(self, path: Path) -> File:
        node = self._node(path)
        assert isinstance(node, File)
        return node


def choices(seed: int) -> Iterator[tuple[str, Callable[[int], int]]]:
    """Ways in which a disk keeps what was not synced: none of it, all of it, and by chance."""
    yield "none", lambda _: 0
    yield "all", lambda most: most
    for number in itertools.count(seed):
        chance = random.Random(number)
        yield f"chance {number}", lambda most, chance=chance: chance.choice([0, most, chance.randint(0, most)])


def _apply(names: dict[str, Node], change: dict[str, Node | None]) -> None:
    for name, node in change.items():
        if node is None:
            names.pop(name, None)
        else:
            names[name] = node


def _read_tree(path: Path) -> Directory:
    directory = Directory()
    for entry in path.iterdir():
        if entry.is_dir():
            directory.names[entry.name] = _read_tree(entry)
        else:
            content = entry.read_bytes()
            directory.names[entry.name] = File(bytearray(content), content)
    directory.synced = dict(directory.names)
    return directory


def _write_tree(directory: Directory, path: Path, choose: Callable[[int], int]) -> None:
    path.mkdir()
    names = dict(directory.synced)
    for change in directory.changes[: choose(len(directory.changes))]:
        _apply(names, change)
    for name, node in names.items():
        if isinstance(node, Directory):
            _write_tree(node, path / name, choose)
            continue
        # What was synced stays; of what was not, a part from the front.
        kept = choose(max(0, len(node.content) - len(node.synced)))
        content = node.synced if not kept else bytes(node.content[: len(node.synced) + kept])
        (path / name).write_bytes(content)
