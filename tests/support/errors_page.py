"""The table of exceptions of docs/reference/errors.md, from the classes."""

import inspect
import re
from pathlib import Path

from torchtitan_ext import elastic, errors
from torchtitan_ext.errors.refusals import REFUSALS, StateRefusedError

PATH = Path(__file__).parents[2] / "docs" / "reference" / "errors.md"
_HEAD = "| exception | base classes | meaning | what to do |\n|---|---|---|---|\n"
_ATTRIBUTE = re.compile(r"^    (\w+(?:, \w+)*): (.*?)(?=^    \w+(?:, \w+)*: |\Z)", re.S | re.M)


def classes() -> list[type[Exception]]:
    """All that callers may catch, in the order of the source."""
    found = [
        member
        for module in (errors, elastic)
        for name in module.__all__
        if inspect.isclass(member := getattr(module, name)) and issubclass(member, errors.TorchtitanExtError)
    ]
    order = {name: number for number, name in enumerate(dict.fromkeys(one.__module__ for one in found))}
    return sorted(dict.fromkeys(found), key=lambda one: (order[one.__module__], inspect.getsourcelines(one)[1]))


def row_of(kind: type[Exception]) -> str:
    paragraphs = inspect.cleandoc(kind.__doc__ or "").split("\n\n")
    meaning = _joined(paragraphs[0])
    told = (_joined(one).removeprefix("What to do: ") for one in paragraphs if one.startswith("What to do: "))
    to_do = "".join(told).removesuffix(".")
    for one in paragraphs:
        if one.startswith("Attributes:\n"):
            listed = [f"{_in_code(names)}: {_joined(text)}" for names, text in _ATTRIBUTE.findall(one)]
            meaning += f" {' '.join(listed)}"
    kinds = ", ".join(f"`{name}`" for name, (of_kind, _) in REFUSALS.items() if of_kind is kind)
    if issubclass(kind, StateRefusedError) and not to_do:
        to_do = f"see its kinds above{kinds and f': {kinds}'}"
    bases = ", ".join(f"`{base.__name__}`" for base in kind.__bases__ if base is not errors.TorchtitanExtError)
    of_elastic = ", of `tte.elastic`" if kind.__module__.startswith(elastic.__name__) else ""
    return (
        f"| `{kind.__name__}`{of_elastic} | {bases.replace('`_PathError`', '`RuntimeError`')} | {meaning} | {to_do} |\n"
    )


def page_of_classes() -> str:
    """The page with the table as the classes are now."""
    before, table, after = re.split(r"(?<=\n## Exceptions\n)(.*?\n)(?=\n)", PATH.read_text(), maxsplit=1, flags=re.S)
    assert table.startswith(_HEAD)
    return f"{before}{_HEAD}{''.join(map(row_of, classes()))}{after}"


def _joined(text: str) -> str:
    return " ".join(text.split()).replace("``", "`").replace("|", "\\|")


def _in_code(names: str) -> str:
    return ", ".join(f"`{name}`" for name in names.split(", "))
