"""Ready transforms, which are data: ``ready_models/*.json``. Imports no torch.

A file has the stages of a transform, as ``Transform.from_json`` reads them, and parameters with their defaults;
``null`` is the default of one that must be given. ``$name`` stands for a parameter; what says ``"if"`` or ``"unless"``
is there or not by one. ``"each": name`` repeats an entry for the numbers of a list, for which ``$each`` and ``$index``
stand then.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from string import Template
from typing import Any

from torchtitan_ext.errors import WrongValueError
from torchtitan_ext.transforms.rules import Transform

_FOLDER = Path(__file__).parent / "ready_models"


def ready_models() -> list[str]:
    """The names that ``ready`` takes."""
    return sorted(path.stem for path in _FOLDER.glob("*.json"))


def ready(model: str, **parameters: Any) -> Transform:
    """A transform of the package, made for the sizes of a model. docs/use/transforms.md has all with their parameters.

    ``inverse()`` goes back. Tied weights are in the state twice and in the checkpoint once: then there is no way back.

    Args:
        model: One of ``ready_models()``: whose names and shapes the targets have. The sources have those of Hugging
            Face's hub.

    Raises:
        WrongValueError: There is no such model, or a parameter is missing or unknown.
    """
    if model not in ready_models():
        raise WrongValueError(f"ready: got {model!r}, expected one of {', '.join(ready_models())}", "model")
    content = json.loads((_FOLDER / f"{model}.json").read_text())
    known: dict[str, Any] = content["parameters"]
    missing = [name for name, default in known.items() if default is None and parameters.get(name) is None]
    unknown = [name for name in parameters if name not in known]
    if missing or unknown:
        what = f"lacks {', '.join(missing)}" if missing else f"knows no {', '.join(unknown)}"
        names = ", ".join(known) or "none"
        raise WrongValueError(f"ready: {model} {what}; its parameters are: {names}", "parameters")
    given = {**known, **{name: value for name, value in parameters.items() if value is not None}}
    given = {name: _filled(value, given) for name, value in given.items()}
    stages = [{**stage, "rules": list(_entries(stage["rules"], given))} for stage in _chosen(content["stages"], given)]
    return Transform.from_json(json.dumps({"stages": [_filled(stage, given) for stage in stages]}))


def _entries(rules: list[Any], given: Mapping[str, Any]) -> Iterator[Any]:
    for rule in _chosen(rules, given):
        each = rule.pop("each", None)
        if each is None:
            yield rule
            continue
        for index, value in enumerate(given[each]):
            yield _filled(rule, {**given, "each": value, "index": index})


def _chosen(entries: list[Any], given: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for entry in entries:
        rest = {name: value for name, value in entry.items() if name not in ("if", "unless")}
        if ("if" not in entry or given[entry["if"]]) and ("unless" not in entry or not given[entry["unless"]]):
            yield rest


def _filled(part: Any, given: Mapping[str, Any]) -> Any:
    """With the parameters in the places of their names."""
    if isinstance(part, Mapping):
        return {_filled(name, given): _filled(value, given) for name, value in part.items()}
    if isinstance(part, list):
        return [_filled(value, given) for value in part]
    if not isinstance(part, str):
        return part
    alone = part[1:] if part.startswith("$") else ""
    return given[alone] if alone in given else Template(part).substitute(given)
