"""The policy of a load (what to do with each component) and its source (which keys come from where, by which names)."""

from __future__ import annotations

import fnmatch
import itertools
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from torch.distributed.checkpoint.storage import StorageReader

from torchtitan_ext.errors import WrongValueError, argument_error, check_argument
from torchtitan_ext.transforms.rules import Transform

Action = Literal["keep", "reshard", "reset", "omit", "error"]
Strict = Literal["error", "warn", "ignore"]


class ElasticPolicy:
    """What a load does with each component of a state dict, by top-level key or glob of flat keys.

    ``reshard``
        Carry it into this world: tensors to this mesh, a ``Reshardable`` object by its own rule, anything else as it
        was saved. What cannot cross is refused.
    ``keep``
        Load the saved values as they are; a ``reshard`` method is not asked.
    ``reset``
        Do not load it; it starts anew. A method ``reset()`` is called where there is one.
    ``omit``
        Do not load it, and do not report its keys as missing or unexpected; what is there stays.
    ``error``
        Load it as it was saved, and refuse to where the number of ranks differs.

    Args:
        actions: By component (``"dataloader"``) or by glob of flat keys (``"optimizer.state.*.exp_avg"``). A glob wins
            over a component, an earlier glob over a later one.
        default: For components not named. By default everything is carried over, or refused.
        strict: What to do about keys that the checkpoint lacks, and about keys of the components that are loaded that
            nothing asks for: refuse, log a warning, or neither. Either way they are in the report, and targets of
            missing keys stay as they are.
        unexpected: What to do about the latter, where that is another thing than ``strict`` says: a load without a
            policy has ``"warn"``, so that a part of a checkpoint may be loaded.

    Raises:
        TypeError: ``actions`` is no mapping from names to actions.
        WrongValueError: An action, ``strict`` or ``unexpected`` is none of these.
    """

    def __init__(
        self,
        actions: Mapping[str, Action] | None = None,
        *,
        default: Action = "reshard",
        strict: Strict = "error",
        unexpected: Strict | None = None,
    ) -> None:
        expected = "a mapping such as {'dataloader': 'reset'}, or default= for all"
        check_argument("ElasticPolicy", "actions", actions, (Mapping, type(None)), expected)
        self.actions: dict[str, Action] = dict(actions or {})
        for name in self.actions:
            check_argument("ElasticPolicy", "name", name, str, "the text of a component or of a glob")
        for name, action in {**self.actions, "default": default}.items():
            if action not in get_args(Action):
                raise WrongValueError(f"ElasticPolicy: got {action!r} for {name}, expected one of {_listed(Action)}")
        unexpected = strict if unexpected is None else unexpected
        for name, choice in (("strict", strict), ("unexpected", unexpected)):
            if choice not in get_args(Strict):
                raise WrongValueError(f"ElasticPolicy: got {name}={choice!r}, expected one of {_listed(Strict)}")
        self.default: Action = default
        self.strict: Strict = strict
        self.unexpected: Strict = unexpected

    def with_actions(self, actions: Mapping[str, Action]) -> ElasticPolicy:
        """The same policy with these actions."""
        return ElasticPolicy(actions, default=self.default, strict=self.strict, unexpected=self.unexpected)

    def component_action(self, component: str) -> Action:
        """What to do with a top-level entry of a state dict."""
        return self.actions.get(component, self.default)

    def object_action(self, component: str) -> Action:
        """What to do with an entry that is loaded as a whole; a glob of all its keys counts (``"dataloader.*"``)."""
        for pattern, action in self.actions.items():
            if pattern != component and pattern.endswith("*") and fnmatch.fnmatchcase(f"{component}.", pattern):
                return action
        return self.component_action(component)

    def key_action(self, fqn: str, component: str) -> Action:
        """What to do with one flat key of a component."""
        for pattern, action in self.actions.items():
            if pattern != component and fnmatch.fnmatchcase(fqn, pattern):
                return action
        return self.component_action(component)

    def __repr__(self) -> str:
        """The call that makes an equal policy."""
        arguments = [repr(self.actions)] if self.actions else []
        arguments += [f"default={self.default!r}"] if self.default != "reshard" else []
        arguments += [f"strict={self.strict!r}"] if self.strict != "error" else []
        arguments += [f"unexpected={self.unexpected!r}"] if self.unexpected != self.strict else []
        return f"ElasticPolicy({', '.join(arguments)})"


BY_DEFAULT = ElasticPolicy(unexpected="warn")
"""The policy of ``tte.load`` where none is given."""


@dataclass(frozen=True)
class Source:
    """A checkpoint, and which keys of the state dict are loaded from it under which names.

    Attributes:
        path: Its directory (``checkpoint_id``).
        include: Components and globs of flat keys of the state dict that come from here. Tensors at the top of a state
            dict are the component ``model``.
        exclude: Components and globs that do not come from here, though ``include`` selects them.
        rename: Flat keys of the state dict to keys of the checkpoint, for example ``{"model.*": "module.*"}``. A ``*``
            on the right stands for what the ``*`` on the left stands for, in order. The first match counts.
        storage_reader: A DCP storage reader instead of ``FileReader``.
        transform: How the checkpoint's tensors become those of the state dict. ``rename`` and the filters see its
            targets.

    Raises:
        TypeError: An argument is of another type; a text alone is no list of globs.
        WrongValueError: The two sides of a rename have different numbers of ``*``; or there are a transform and a
            reader.
    """

    path: str | os.PathLike[str] | None = None
    include: Sequence[str] = ("*",)
    exclude: Sequence[str] = ()
    rename: Mapping[str, str] = field(default_factory=dict)
    storage_reader: StorageReader | None = field(default=None, repr=False)
    transform: Transform | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        check_argument("Source", "path", self.path, (str, os.PathLike, type(None)), "a directory")
        for name, globs in (("include", self.include), ("exclude", self.exclude)):
            if isinstance(globs, str) or not isinstance(globs, Collection) or not _are_texts(globs):
                raise argument_error("Source", name, globs, "a list of globs")
        if not isinstance(self.rename, Mapping) or not _are_texts((*self.rename, *self.rename.values())):
            raise argument_error("Source", "rename", self.rename, "a mapping such as {'model.*': 'module.*'}")
        check_argument(
            "Source", "storage_reader", self.storage_reader, (StorageReader, type(None)), "a DCP storage reader"
        )
        check_argument("Source", "transform", self.transform, (Transform, type(None)), "a tte.transforms.Transform")
        if self.transform is not None and self.storage_reader is not None:
            raise WrongValueError("Source: got a transform and a storage_reader; transforms read by a path alone")
        for wanted, saved in self.rename.items():
            if wanted.count("*") != saved.count("*"):
                raise WrongValueError(f"Source: rename of {wanted!r} to {saved!r}: both need the same number of '*'")

    def selects(self, fqn: str, component: str = "") -> bool:
        """Whether a flat key of the state dict comes from here.

        Args:
            component: The key's component, where the key does not begin with it: ``model`` for tensors at the top.
        """
        return self.includes(fqn, component) and not _matches(fqn, component, self.exclude)

    def includes(self, fqn: str, component: str = "") -> bool:
        """Whether ``include`` selects a flat key, whatever ``exclude`` says."""
        return _matches(fqn, component, self.include)

    def unused_filters(self, names: Collection[str], components: Collection[str]) -> list[str]:
        """Entries of ``include`` and ``exclude`` that name no component and match no flat key."""
        return [
            glob
            for glob in (*self.include, *self.exclude)
            if glob not in ("*", *components) and not any(fnmatch.filter(names, text) for text in (glob, f"{glob}.*"))
        ]

    def saved_name(self, fqn: str) -> str:
        """The checkpoint's name of a flat key of the state dict."""
        return _renamed(fqn, self.rename.items())

    def own_name(self, saved_fqn: str) -> str:
        """The state dict's name of a flat key of the checkpoint."""
        return _renamed(saved_fqn, ((saved, wanted) for wanted, saved in self.rename.items()))

    def saved_prefix(self, component: str) -> str:
        """The checkpoint's name of a top-level key."""
        return self.saved_name(f"{component}.x").removesuffix(".x")


def check_rules(where: str, policy: object) -> None:
    """Raises TypeError unless it is a policy, or ``None``."""
    expected = "an ElasticPolicy, such as ElasticPolicy({'dataloader': 'reset'})"
    check_argument(where, "policy", policy, (ElasticPolicy, type(None)), expected)


def _are_texts(values: Iterable[object]) -> bool:
    return all(isinstance(value, str) for value in values)


def _renamed(fqn: str, patterns: Iterable[tuple[str, str]]) -> str:
    for old, new in patterns:
        found = re.fullmatch("(.*)".join(map(re.escape, old.split("*"))), fqn)
        if found is not None:
            pieces = new.split("*")
            return "".join(itertools.chain(*zip(pieces, (*found.groups(), ""), strict=True)))
    return fqn


def _matches(fqn: str, component: str, patterns: Sequence[str]) -> bool:
    if "*" in patterns or component in patterns:
        return True
    return any(fnmatch.fnmatchcase(fqn, glob) for pattern in patterns for glob in (pattern, f"{pattern}.*"))


def _listed(choices: object) -> str:
    return ", ".join(map(repr, get_args(choices)))
