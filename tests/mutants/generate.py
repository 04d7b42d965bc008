"""Wrong changes made by a fixed seed: operators swapped, conditions negated, constants off by one, statements left out.

Python is changed by its syntax tree, C++ by regular expressions outside of comments and strings. Left alone are
annotations, messages of errors, constants of modules and ``constexpr``, most of which set a speed; and files whose
tests need a server.
"""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from mutants.judges import ROOT

SEED = 59
NUM_EACH = 75
KINDS = ("operator", "condition", "constant", "deletion")


class Edit(NamedTuple):
    """A change of the characters ``[begin, end)`` of a file."""

    file: str
    begin: int
    end: int
    new: str
    kind: str


def drawn(language: str, number: int) -> Iterator[Edit]:
    """The edits for a place in the list of ``NUM_EACH``, of which the first that compiles counts.

    No edit is drawn for two places, so a part of the list can be drawn alone.
    """
    every = _all_edits(language)
    of_kind = [edit for edit in every if edit.kind == KINDS[number % len(KINDS)]]
    random.Random(f"{SEED} {language} {KINDS[number % len(KINDS)]}").shuffle(of_kind)
    yield from of_kind[number // len(KINDS) :: -(-NUM_EACH // len(KINDS))]


@cache
def _all_edits(language: str) -> tuple[Edit, ...]:
    if language == "python":
        sources = [path for path in sorted((ROOT / "torchtitan_ext").rglob("*.py")) if "objects" not in path.parts]
        return tuple(edit for path in sources for edit in _python_edits(path))
    sources = [path for path in sorted((ROOT / "csrc").rglob("*.cpp")) if "third_party" not in path.parts]
    return tuple(edit for path in sources for edit in _cpp_edits(path))


def changed(edit: Edit) -> str:
    """The text of the file with the edit."""
    text = (ROOT / edit.file).read_text()
    return text[: edit.begin] + edit.new + text[edit.end :]


# ---- Python ----

_SWAPS = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "+": "-", "-": "+"}
_OF_PYTHON = {
    **{
        ast.Lt: "<",
        ast.LtE: "<=",
        ast.Gt: ">",
        ast.GtE: ">=",
        ast.Eq: "==",
        ast.NotEq: "!=",
        ast.Add: "+",
        ast.Sub: "-",
    },
    **{ast.And: "and", ast.Or: "or", ast.Mult: "*", ast.FloorDiv: "//", ast.In: "in", ast.NotIn: "not in"},
}
_SWAPS_OF_PYTHON = {**_SWAPS, "and": "or", "or": "and", "*": "//", "//": "*", "in": "not in", "not in": "in"}


def _python_edits(path: Path) -> Iterator[Edit]:
    text, file = path.read_text(), str(path.relative_to(ROOT))
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    if not text.isascii():  # the tree counts bytes
        return

    def span(node: ast.AST) -> tuple[int, int]:
        return starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset

    def swapped(left: ast.AST, operator: ast.AST, right: ast.AST) -> Iterator[Edit]:
        word = _OF_PYTHON.get(type(operator))
        begin = -1 if word is None else text.find(word, span(left)[1], span(right)[0])
        if word is not None and begin >= 0:
            yield Edit(file, begin, begin + len(word), _SWAPS_OF_PYTHON[word], "operator")

    for node in _nodes(ast.parse(text)):
        if isinstance(node, ast.BinOp):
            yield from swapped(node.left, node.op, node.right)
        elif isinstance(node, ast.Compare):
            yield from swapped(node.left, node.ops[0], node.comparators[0])
        elif isinstance(node, ast.BoolOp):
            yield from swapped(node.values[0], node.op, node.values[1])
        elif isinstance(node, ast.Constant) and type(node.value) is int:
            for value in (node.value + 1, node.value - 1):
                yield Edit(file, *span(node), str(value), "constant")
        conditions = [node.test] if isinstance(node, (ast.If, ast.While, ast.IfExp)) else getattr(node, "ifs", [])
        for condition in conditions:
            begin, end = span(condition)
            yield Edit(file, begin, end, f"not ({text[begin:end]})", "condition")
        is_call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
        targets = node.targets if isinstance(node, ast.Assign) else []
        is_stored = any(isinstance(target, (ast.Attribute, ast.Subscript)) for target in targets)
        if is_call or is_stored or isinstance(node, (ast.AugAssign, ast.Raise, ast.Continue)):
            yield Edit(file, *span(node), "pass", "deletion")


def _nodes(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes below one that do something; places in f-strings are wrong before Python 3.12."""
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            is_constant = isinstance(node, ast.Module) and isinstance(child, (ast.Assign, ast.AnnAssign))
            if not isinstance(child, ast.AST) or name in ("annotation", "returns", "decorator_list") or is_constant:
                continue
            if isinstance(child, ast.JoinedStr):
                continue
            yield child
            if not isinstance(child, ast.Raise):
                yield from _nodes(child)


# ---- C++ ----

_NO_CODE = re.compile(
    r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])'|^#(?:\\\n|[^\n])*", re.DOTALL | re.MULTILINE
)
_OPERATOR = re.compile(r"(?<= )(<=|>=|==|!=|&&|\|\||<|>|\+|-)(?= )")
_CONDITION = re.compile(r"\b(?:if|while) \(")
_CONSTANT = re.compile(r"(?<![\w.'])\d+(?![\w.'])")
_STATEMENT = re.compile(r"^ +(?:[\w:.>\[\]()*-]+ [+-]?= [^;{}]*;|[\w:.>\[\]-]+\([^;{}]*\);|continue;)$", re.MULTILINE)
_SWAPS_OF_CPP = {**_SWAPS, "&&": "||", "||": "&&"}


def _cpp_edits(path: Path) -> Iterator[Edit]:
    file = str(path.relative_to(ROOT))
    code = _NO_CODE.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), path.read_text())
    for found in _OPERATOR.finditer(code):
        yield Edit(file, *found.span(), _SWAPS_OF_CPP[found[0]], "operator")
    for found in _CONDITION.finditer(code):
        end = depth = 0
        for end in range(found.end() - 1, len(code)):
            depth += {"(": 1, ")": -1}.get(code[end], 0)
            if depth == 0:
                break
        condition = path.read_text()[found.end() : end]
        if ";" not in condition and " = " not in condition and "constexpr" not in found[0]:
            yield Edit(file, found.end(), end, f"!({condition})", "condition")
    for found in _CONSTANT.finditer(code):
        if "constexpr" in code[code.rfind("\n", 0, found.start()) + 1 : found.start()]:
            continue
        for value in (int(found[0]) + 1, int(found[0]) - 1):
            yield Edit(file, *found.span(), str(value), "constant")
    for found in _STATEMENT.finditer(code):
        begin = found.start() + len(found[0]) - len(found[0].lstrip())
        yield Edit(file, begin, found.end(), ";", "deletion")
