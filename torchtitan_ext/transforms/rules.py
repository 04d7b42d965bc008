"""Transforms as plain data: rules over patterns of names, and steps that tensors pass on their way. Imports no torch.

``csrc/core/transform.h`` says what rules mean and follows them; here they are written, checked, and turned around.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torchtitan_ext import _core
from torchtitan_ext.errors import Problem, WrongValueError, check_argument, described, refusal
from torchtitan_ext.storage.element_types import ITEM_BYTES

# Behind one star, and of a sign and at most 18 digits: see csrc/core/name_pattern.h.
_SHIFT_MISSPELT = re.compile(r"\*\*\{|\*\{(?![+-](?:0|[1-9]\d{0,17})\})")

_StepArguments = tuple[str, int, Sequence[int], Sequence[Sequence[int]], str, float]


@dataclass(frozen=True)
class Step:
    """One step of a rule, made by the functions below.

    Attributes:
        op: Its name.
        arguments: By name, as in JSON.
    """

    op: str
    arguments: Mapping[str, Any]

    def __post_init__(self) -> None:
        kinds = _ARGUMENTS.get(self.op)
        if kinds is None:
            raise WrongValueError(f"got the step {self.op!r}, expected one of {', '.join(_ARGUMENTS)}", "transform")
        given = {name: value for name, value in self.arguments.items() if value is not None}
        missing = [name for name, (_, is_needed) in kinds.items() if is_needed and name not in given]
        unknown = [name for name in given if name not in kinds]
        if missing or unknown:
            what = f"lacks {', '.join(missing)}" if missing else f"knows no {', '.join(unknown)}"
            raise WrongValueError(f"the step {self.op} {what}; its arguments are {', '.join(kinds)}", "transform")
        if self.op == "split" and ("sizes" in given) == ("parts" in given):
            raise WrongValueError("the step split needs either sizes or parts", "transform")
        for name, value in given.items():
            check_kind, _ = kinds[name]
            given[name] = check_kind(f"{name} of the step {self.op}", value)
        object.__setattr__(self, "arguments", given)

    def inverse(self) -> Step:
        """The step back.

        Raises:
            WrongValueError: There is none, or the step does not say enough for it.
        """
        given = self.arguments
        if self.op == "permute":
            num_dims = len(given["dims"])
            dims = [dim % num_dims for dim in given["dims"]]
            if len(set(dims)) == num_dims:
                return permute([dims.index(dim) for dim in range(num_dims)])
        if self.op == "transpose":
            return self
        if self.op in ("stack", "unstack"):
            return Step("unstack" if self.op == "stack" else "stack", given)
        if self.op in ("concat", "split") and len(given) > 1:
            return Step("split" if self.op == "concat" else "concat", given)
        if self.op == "reshape" and "was" in given:
            return reshape(given["was"], was=given["shape"])
        if self.op == "cast" and "was" in given:
            return cast(given["was"], was=given["dtype"])
        if self.op in ("pad", "crop") and "was" in given:
            return (crop if self.op == "pad" else pad)(given["dim"], given["was"], was=given["to"])
        advice = dict.fromkeys(("reshape", "cast", "pad", "crop"), "; give it was=")
        advice["concat"] = "; give it sizes= or parts="
        raise WrongValueError(f"the step {self.op} has no inverse{advice.get(self.op, '')}", "transform")

    def encoded(self) -> _StepArguments:
        """For ``_core.resolve_transform``."""
        given = self.arguments
        sizes = next((given[name] for name in ("sizes", "dims", "shape", "block") if name in given), ())
        op, dim = self.op, given.get("dim", 0)
        if "parts" in given:
            sizes = (given["parts"],)
            op = f"{op}_even"
        if op == "slice":
            sizes = (given["begin"], given["end"])
        if op in ("pad", "crop"):
            sizes = (given["to"],)
        return op, dim, sizes, given.get("offsets", ()), given.get("dtype", ""), given.get("value", 0.0)


def concat(dim: int, *, sizes: Sequence[int] | None = None, parts: int | None = None) -> Step:
    """Joins the members along a dim; of series, each one. ``sizes``, or ``parts`` equal ones, are for the inverse."""
    return Step("concat", {"dim": dim, "sizes": sizes, "parts": parts})


def split(dim: int, *, sizes: Sequence[int] | None = None, parts: int | None = None) -> Step:
    """Cuts each member along a dim into members of these sizes, or into equal parts."""
    return Step("split", {"dim": dim, "sizes": sizes, "parts": parts})


def stack(dim: int = 0) -> Step:
    """Joins the members, or each series, along a new dim."""
    return Step("stack", {"dim": dim})


def unstack(dim: int = 0) -> Step:
    """Cuts along a dim that goes: into a series where the rule's targets have a ``#``, else into members."""
    return Step("unstack", {"dim": dim})


def transpose(first: int, second: int) -> Step:
    """Exchanges two dims of each tensor."""
    return Step("transpose", {"dims": [first, second]})


def permute(dims: Sequence[int]) -> Step:
    """Dim i of the result is dim ``dims[i]``."""
    return Step("permute", {"dims": dims})


def reshape(shape: Sequence[int], *, was: Sequence[int] | None = None) -> Step:
    """Another shape of the same elements; one size may be -1. ``was``, the shape before, is for the inverse."""
    return Step("reshape", {"shape": shape, "was": was})


def slice_dim(dim: int, begin: int, end: int) -> Step:
    """The elements ``begin`` up to ``end`` of a dim. The source must be named in ``drop`` for the others."""
    return Step("slice", {"dim": dim, "begin": begin, "end": end})


def place(shape: Sequence[int], offsets: Sequence[Sequence[int]]) -> Step:
    """Puts each member at its offsets into a new tensor, which they must fill once."""
    return Step("place", {"shape": shape, "offsets": offsets})


def pad(dim: int, to: int, *, value: float = 0.0, was: int | None = None) -> Step:
    """Elements of one value behind the others of a dim, which has ``to`` then. ``was``, before, is for the inverse."""
    return Step("pad", {"dim": dim, "to": to, "value": value, "was": was})


def crop(dim: int, to: int, *, was: int | None = None) -> Step:
    """The first ``to`` elements of a dim; the others go nowhere. The inverse, by ``was``, pads with zeros."""
    return Step("crop", {"dim": dim, "to": to, "was": was})


def cast(dtype: str, *, was: str | None = None) -> Step:
    """Converts elements to a dtype, named as torch does (``"bfloat16"``). ``was`` is for the inverse."""
    return Step("cast", {"dtype": dtype, "was": was})


def dequantize(block: Sequence[int], *, dtype: str) -> Step:
    """Multiplies each member by its scales, which are the member behind it: one scale per block. In float32."""
    return Step("dequantize", {"block": block, "dtype": dtype})


@dataclass(frozen=True)
class Rule:
    """Which tensors become which ones. Patterns: see ``csrc/core/name_pattern.h``.

    Attributes:
        sources: Patterns of names of the checkpoint.
        targets: Patterns of names of the state, one for each member that the steps leave.
        steps: What happens on the way; without any, tensors (and values that are none) get other names.
        others: Takes only what no rule of the transform has taken and nothing that it drops: such rules come last, in
            their order. ``Rule("**", "**", others=True)`` leaves all others as they are.
    """

    sources: Sequence[str]
    targets: Sequence[str]
    steps: Sequence[Step] = ()
    others: bool = False

    def __post_init__(self) -> None:
        for name in ("sources", "targets"):
            texts = getattr(self, name)
            texts = [texts] if isinstance(texts, str) else texts
            object.__setattr__(self, name, tuple(_texts(f"{name} of a rule", texts)))
        check_argument("Rule", "steps", self.steps, (list, tuple), "a list of steps")
        for step in self.steps:
            check_argument("Rule", "steps", step, Step, "a step, such as transforms.concat(0)")
        object.__setattr__(self, "steps", tuple(self.steps))
        patterns = (*self.sources, *self.targets)
        if len({_num_stars(pattern) for pattern in patterns}) != 1:
            raise WrongValueError(
                f"the patterns {', '.join(patterns)} of a rule have several numbers of stars", "rules"
            )
        if any(_SHIFT_MISSPELT.search(pattern) for pattern in patterns):
            raise WrongValueError(
                f"one of the patterns {', '.join(patterns)} has braces behind a star that add nothing to a number, "
                "expected '*{+10}' or '*{-10}'",
                "rules",
            )
        check_argument("Rule", "others", self.others, bool, "True or False")
        if any(pattern.count("#") > 1 for pattern in patterns):
            raise WrongValueError(f"one of the patterns {', '.join(patterns)} has more than one '#'", "rules")
        if not self.steps and (len(self.sources), len(self.targets)) != (1, 1):
            raise WrongValueError(f"the rule from {', '.join(self.sources)} has no steps that join or split", "rules")

    def inverse(self) -> Rule:
        """From the targets to the sources."""
        return Rule(self.targets, self.sources, [step.inverse() for step in reversed(self.steps)], self.others)


@dataclass(frozen=True, repr=False)
class Transform:
    """How the tensors of a checkpoint become those of a state: rules, which ``then`` chains.

    Args:
        rules: Each takes tensors by name. A tensor that no rule takes, or of which an element goes nowhere, is refused.
        drop: Patterns of names that may be left behind, as a whole or in part.

    Raises:
        WrongValueError: A rule contradicts itself.
        TypeError: An argument is of another type.
    """

    rules: Sequence[Rule]
    drop: Sequence[str] = ()
    _before: tuple[Transform, ...] = field(default=(), kw_only=True)

    def __post_init__(self) -> None:
        check_argument("Transform", "rules", self.rules, (list, tuple), "a list of rules")
        for rule in self.rules:
            check_argument("Transform", "rules", rule, Rule, "a Rule(sources, targets, steps)")
        object.__setattr__(self, "rules", tuple(self.rules))
        object.__setattr__(self, "drop", tuple(_texts("drop", self.drop)))

    @property
    def stages(self) -> tuple[Transform, ...]:
        """Transforms of one stage, which are followed one after the other."""
        return (*self._before, Transform(self.rules, self.drop))

    def then(self, other: Transform) -> Transform:
        """This one, and then the other one, as one transform: nothing lies in between."""
        check_argument("then", "other", other, Transform, "a Transform")
        return _of_stages([*self.stages, *other.stages])

    def inverse(self) -> Transform:
        """The way back. What is dropped does not come back; ``drop`` of the result is empty.

        Raises:
            WrongValueError: A step has no inverse; names it.
        """
        return _of_stages([Transform([rule.inverse() for rule in stage.rules]) for stage in reversed(self.stages)])

    def below(self, *, source: str = "", target: str = "") -> Transform:
        """The same for names below a key of the checkpoint, of the state, or of both: ``below(target="model")``."""
        source, target = (f"{name}." if name else "" for name in (source, target))
        stages = list(self.stages)
        first, last = stages[0], len(stages) - 1
        renamed = [replace(rule, sources=[source + name for name in rule.sources]) for rule in first.rules]
        stages[0] = Transform(renamed, [source + name for name in first.drop])
        rules = [replace(rule, targets=[target + name for name in rule.targets]) for rule in stages[last].rules]
        stages[last] = Transform(rules, stages[last].drop)
        return _of_stages(stages)

    def resolve(self, sources: Sequence[tuple[str, str, Sequence[int]]], operation: str) -> list[_core.MappedTensor]:
        """What it makes of tensors: their names, dtypes (``"bfloat16"``; empty for values) and shapes are given.

        Raises:
            TransformError: It does not fit them; all problems.
        """
        resolved = _core.resolve_transform(self.encoded(), sources)
        if resolved.problems:
            raise refusal(operation, [Problem("wrong_transform", key, detail) for key, detail in resolved.problems])
        return resolved.targets

    def to_json(self) -> str:
        """The transform as text, which ``from_json`` reads."""
        stages = [
            {
                "rules": [
                    {
                        "from": list(rule.sources),
                        "to": list(rule.targets),
                        "steps": [{"op": step.op, **step.arguments} for step in rule.steps],
                        **({"others": True} if rule.others else {}),
                    }
                    for rule in stage.rules
                ],
                "drop": list(stage.drop),
            }
            for stage in self.stages
        ]
        return json.dumps({"stages": stages}, indent=2)

    @staticmethod
    def from_json(text: str) -> Transform:
        """A transform from the text of ``to_json``.

        One stage may stand without ``stages``, and ``{"rename": {"a.*": "b.*"}}`` for a rule per name.

        Raises:
            WrongValueError: The text is no transform; says where.
        """
        try:
            content = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise WrongValueError(f"is no JSON ({error})", "transform") from None
        try:
            stages = content.get("stages", [content])
            if "stages" in content:
                _refuse_unknown(content, ("stages",))
            if not stages:
                raise WrongValueError('has no stage; a transform without rules is {"rules": []}', "transform")
            return _of_stages([_stage_of(stage) for stage in stages])
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            text = f'{{"rules": [{{"from": ..., "to": ..., "steps": [...]}}], "drop": [...]}} ({error})'
            raise WrongValueError(f"is no transform: expected {text}", "transform") from None

    def encoded(self) -> list[Any]:
        """For ``_core.resolve_transform``."""
        return [
            (
                [
                    (rule.sources, rule.targets, [step.encoded() for step in rule.steps], rule.others)
                    for rule in stage.rules
                ],
                stage.drop,
            )
            for stage in self.stages
        ]

    def __repr__(self) -> str:
        """Equal for equal transforms, which ranks compare."""
        num_rules = sum(len(stage.rules) for stage in self.stages)
        return f"Transform({num_rules} rules, {hashlib.sha256(self.to_json().encode()).hexdigest()[:16]})"


def _of_stages(stages: Sequence[Transform]) -> Transform:
    *before, last = stages
    return replace(last, _before=tuple(before))


def _stage_of(content: Mapping[str, Any]) -> Transform:
    rules = []
    for rule in content["rules"]:
        if "rename" in rule:
            rules += [Rule(source, target) for source, target in rule["rename"].items()]
            _refuse_unknown(rule, ("rename",))
            continue
        steps = [
            Step(step["op"], {name: step[name] for name in step if name != "op"}) for step in rule.get("steps", ())
        ]
        rules.append(Rule(rule["from"], rule["to"], steps, rule.get("others", False)))
        _refuse_unknown(rule, ("from", "to", "steps", "others"))
    _refuse_unknown(content, ("rules", "drop"))
    return Transform(rules, content.get("drop", ()))


def _refuse_unknown(content: Mapping[str, Any], known: Sequence[str]) -> None:
    unknown = [name for name in content if name not in known]
    if unknown:
        raise WrongValueError(f"got {', '.join(unknown)}, expected {', '.join(known)}", "transform")


def _num_stars(pattern: str) -> int:
    return pattern.replace("**", "*").count("*")


def _texts(where: str, values: Any) -> Sequence[str]:
    if isinstance(values, str) or not isinstance(values, (list, tuple)):
        raise WrongValueError(f"got {described(values)} for {where}, expected a list of names", "transform")
    for value in values:
        if not isinstance(value, str) or not value:
            raise WrongValueError(f"got {described(value)} in {where}, expected names", "transform")
    return values


def _whole(where: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not -(2**63) <= value < 2**63:
        raise WrongValueError(f"got {described(value)} for {where}, expected a whole number", "transform")
    return value


def _number(where: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise WrongValueError(f"got {described(value)} for {where}, expected a number", "transform")
    return float(value)


def _wholes(where: str, values: Any) -> tuple[int, ...]:
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise WrongValueError(f"got {described(values)} for {where}, expected a list of whole numbers", "transform")
    return tuple(_whole(where, value) for value in values)


def _boxes(where: str, values: Any) -> tuple[tuple[int, ...], ...]:
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise WrongValueError(f"got {described(values)} for {where}, expected lists of whole numbers", "transform")
    return tuple(_wholes(where, value) for value in values)


def _dtype(where: str, value: Any) -> str:
    if not isinstance(value, str) or value not in ITEM_BYTES:
        raise WrongValueError(f"got {described(value)} for {where}, expected a dtype such as 'bfloat16'", "transform")
    return value


_Check = Callable[[str, Any], Any]

_ARGUMENTS: dict[str, dict[str, tuple[_Check, bool]]] = {
    "concat": {"dim": (_whole, True), "sizes": (_wholes, False), "parts": (_whole, False)},
    "split": {"dim": (_whole, True), "sizes": (_wholes, False), "parts": (_whole, False)},
    "stack": {"dim": (_whole, True)},
    "unstack": {"dim": (_whole, True)},
    "transpose": {"dims": (_wholes, True)},
    "permute": {"dims": (_wholes, True)},
    "reshape": {"shape": (_wholes, True), "was": (_wholes, False)},
    "slice": {"dim": (_whole, True), "begin": (_whole, True), "end": (_whole, True)},
    "place": {"shape": (_wholes, True), "offsets": (_boxes, True)},
    "pad": {"dim": (_whole, True), "to": (_whole, True), "value": (_number, False), "was": (_whole, False)},
    "crop": {"dim": (_whole, True), "to": (_whole, True), "was": (_whole, False)},
    "cast": {"dtype": (_dtype, True), "was": (_dtype, False)},
    "dequantize": {"block": (_wholes, True), "dtype": (_dtype, True)},
}
"""Per step its arguments: how a value is checked, and whether it must be given."""
