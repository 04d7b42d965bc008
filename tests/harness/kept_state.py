"""What a test may leave behind in its process, so that a later one behaves otherwise: found, put back, and an error."""

import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch

# The handler of SIGALRM is pytest-timeout's, that of SIGCHLD is set for ever by torch's loaders with workers.
SIGNALS = sorted(set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP, signal.SIGALRM, signal.SIGCHLD})
LIMITS = {name: getattr(resource, name) for name in ("RLIMIT_AS", "RLIMIT_CPU", "RLIMIT_FSIZE", "RLIMIT_NOFILE")}

# Of the environment: pytest and torch write these while they work.
IGNORED = (
    "PYTEST_CURRENT_TEST",
    "TORCHINDUCTOR_",
    "_TORCHINDUCTOR_",
    "TRITON_",
    "KINETO_",
    "TORCH_NCCL_",
    "HYPOTHESIS_",
)


class LeftBehindError(AssertionError):
    """A test has left something that it had changed in its process."""


@contextmanager
def kept_state(what: str) -> Iterator[None]:
    """Puts back what the ``with`` has changed, and raises ``LeftBehindError`` if it was something, but no other error.

    Looks at the environment, the working directory, handlers of signals, limits, torch's defaults, and the functions
    and constants of the package's modules.
    """
    before, patched = _state(), _changed_names()  # these by fixtures that outlive a test
    try:
        yield
    finally:
        left = _put_back(before) + _put_names_back(patched)
    if left:
        raise LeftBehindError(f"{what} left behind: {', '.join(left)}")


def _state() -> dict[str, tuple[Any, Callable[[Any], object]]]:
    """Of each thing its name, its value, and how it is set."""
    state: dict[str, tuple[Any, Callable[[Any], object]]] = {
        "the environment": (_environment(), _set_environment),
        "the working directory": (_directory(), os.chdir),
        "torch's default dtype": (torch.get_default_dtype(), torch.set_default_dtype),
        "torch's default device": (torch.get_default_device(), _set_default_device),
        "torch's number of threads": (torch.get_num_threads(), torch.set_num_threads),
        "torch's deterministic algorithms": (
            torch.are_deterministic_algorithms_enabled(),
            torch.use_deterministic_algorithms,
        ),
    }
    for number in SIGNALS:
        state[f"the handler of {number.name}"] = (signal.getsignal(number), _handler_of(number))
    for name, limit in LIMITS.items():
        state[f"the limit {name}"] = (resource.getrlimit(limit), _limit_of(limit))
    return state


def _put_back(before: dict[str, tuple[Any, Callable[[Any], object]]]) -> list[str]:
    """The names of what was changed."""
    now = _state()
    changed = []
    for name, (value, put) in before.items():
        left = now[name][0]
        if left is not value and left != value:
            put(value)
            if isinstance(value, dict):
                changed += [f"the variable {key}" for key in {*value, *left} if value.get(key) != left.get(key)]
            else:
                changed.append(f"{name} ({value!r:.80} -> {left!r:.80})")
    return changed


_CONSTANTS = (int, float, str, bytes, tuple, frozenset, type(None))

# Of each module of the package its functions and constants as they were when it was seen first.
_kept_names: dict[str, dict[str, Any]] = {}


def _changed_names() -> set[tuple[str, str]]:
    """The modules and names of what is not as it was."""
    changed = set()
    for name in [name for name in sys.modules if name.startswith("torchtitan_ext")]:
        now = vars(sys.modules[name])
        kept = _kept_names.get(name)
        if kept is None:
            _kept_names[name] = {
                key: value
                for key, value in now.items()
                if isinstance(value, FunctionType) or (key.isupper() and isinstance(value, _CONSTANTS))
            }
        else:
            changed |= {(name, key) for key, value in kept.items() if now.get(key, value) is not value}
    return changed


def _put_names_back(before: set[tuple[str, str]]) -> list[str]:
    changed = sorted(_changed_names() - before)
    for name, key in changed:
        setattr(sys.modules[name], key, _kept_names[name][key])
    return [f"{name}.{key}" for name, key in changed]


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(IGNORED)}


def _set_environment(values: dict[str, str]) -> None:
    for name in set(_environment()) - set(values):
        del os.environ[name]
    os.environ.update(values)


def _directory() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        return "/"


def _set_default_device(device: torch.device) -> None:
    torch.set_default_device(None if device.type == "cpu" else device)


def _handler_of(number: signal.Signals) -> Callable[[Any], object]:
    return lambda handler: signal.signal(number, handler if handler is not None else signal.SIG_DFL)


def _limit_of(limit: int) -> Callable[[Any], object]:
    return lambda values: resource.setrlimit(limit, values)
