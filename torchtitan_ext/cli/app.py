"""``torchtitan-ext`` and its commands. The module of a command is imported when the command is called, so that a
command that needs no torch starts without it.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from torchtitan_ext import __version__, errors
from torchtitan_ext.cli.lazy import without_collector
from torchtitan_ext.cli.output import DIFFERS, FINE, UNREADABLE, print_json_error, print_line, print_problem
from torchtitan_ext.errors.near_names import nearest_name
from torchtitan_ext.storage.location import is_in_object_store

_SUMMARY_OF = {
    "inspect": "What a checkpoint holds: keys, dtypes, shapes, files.",
    "verify": "Whether a checkpoint, or each of a run, is whole.",
    "ls": "The steps of a run, who saves there, and what dead saves left.",
    "latest": "The newest finished checkpoint of a run.",
    "gc": "Removes old steps of a run, and what dead saves left.",
    "plan": "What a load on another mesh would read, and what would be refused.",
    "diff": "What two checkpoints differ in.",
    "reshard": "Write a checkpoint as another mesh would save it.",
    "convert": "Write a checkpoint in another format.",
    "rescue": "Write anew what stock has described wrongly.",
    "doctor": "What to put into a bug report: versions, and whether libraries load.",
}
"""The commands in the order of the help. Each is ``run`` in the module of its name in ``cli.commands``."""


_OF_OBJECT_STORES = ("inspect", "verify", "ls", "gc", "diff", "reshard", "convert")
"""The commands that read also URLs of object stores; they write to disks alone."""

_SETTINGS = {"help_option_names": ["-h", "--help"]}

# The base class of all wrong usages: click's, whose module typer renames from version to version.
_USAGE_ERROR: Any = typer.BadParameter.__base__

_TRUST = "inspect, diff and convert read it with --unsafe-unpickle: only where you trust it"


class _Commands(TyperGroup):
    """Imports the module of a command when the command is called."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(_SUMMARY_OF)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in _SUMMARY_OF:
            return None
        # The shell's completion asks every command for its summary.
        return TyperCommand(cmd_name, help=_SUMMARY_OF[cmd_name]) if ctx.resilient_parsing else _load(cmd_name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] in _SUMMARY_OF:
            url = next((argument for argument in args[1:] if "://" in argument), None)
            if url is not None and not _takes(args[0], url):
                ctx.fail(
                    f"{args[0]}: got {url}, expected a directory. Copy the checkpoint to a disk first; "
                    f"{', '.join(_OF_OBJECT_STORES)} read URLs of object stores, with torchtitan-ext[remote]; latest, "
                    "and tte.load and tte.latest in Python, any URL."
                )
            return args[0], _load(args[0]), args[1:]
        near = nearest_name(args[0], _SUMMARY_OF)
        ctx.fail(f"No such command {args[0]!r}.{f' Did you mean {near!r}?' if near else ''}")

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_SUMMARY_OF.items()))


def _takes(command: str, url: str) -> bool:
    """``latest`` takes any URL. The others' paths would lose one of two slashes, and so name another place."""
    return command == "latest" or (command in _OF_OBJECT_STORES and is_in_object_store(url))


def _load(name: str) -> Any:
    command = typer.Typer(rich_markup_mode=None, add_completion=False, context_settings=_SETTINGS)
    with without_collector():
        module = importlib.import_module(f"torchtitan_ext.cli.commands.{name}")
    command.command(name)(module.run)
    return get_command(command)


app = typer.Typer(
    cls=_Commands,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    context_settings=_SETTINGS,
)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        print_line(f"torchtitan-ext {__version__}")
        raise typer.Exit(FINE)


@app.callback()
def _about(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Look into, prove, compare, plan and convert checkpoints.

    Exit codes: 0 fine, 1 differs or damaged, 2 wrong usage, 3 unreadable.
    """


def main() -> None:
    """Runs the command that the arguments of this process name, and exits with its code."""
    warnings.showwarning = _print_warning
    with _ending_with_the_reader():
        code = _run()
        sys.stdout.flush()
    sys.exit(code)


def _run() -> int:
    try:
        return int(app(prog_name="torchtitan-ext", standalone_mode=False) or FINE)
    except _USAGE_ERROR as error:
        error.show()
        return _failed("Usage", error.format_message(), error.exit_code)
    except typer.Abort:
        print_problem("aborted")
        return _failed("Abort", "aborted", DIFFERS)
    except errors.StateRefusedError as error:
        print_problem(*str(error).split("\n"))
        return _failed(type(error).__name__, str(error), UNREADABLE, error.problems)
    except (errors.TorchtitanExtError, OSError) as error:
        text = _sentence(error)
        print_problem(text)
        return _failed(type(error).__name__, text, UNREADABLE)


def _failed(kind: str, message: str, code: int, problems: Sequence[errors.Problem] = ()) -> int:
    if "--json" in sys.argv:  # a wrong usage may be found before this option is parsed
        print_json_error(kind, message, code, problems)
    return code


def _sentence(error: errors.TorchtitanExtError | OSError) -> str:
    """The text of an error, with advice in options of the command."""
    if isinstance(error, errors.DamagedCheckpointError):
        return error.reason
    if isinstance(error, errors.CheckpointReadError):
        advice = error.advice if error.remedy is None else f"; {_TRUST}"
        return f"cannot read {error.fqn}: {error.reason}{advice}"
    if isinstance(error, errors.UnsafePickleError):
        return f"{error}; {_TRUST}"
    if isinstance(error, OSError) and error.filename is not None:
        return f"{os.fsdecode(error.filename)}: {error.strerror}"
    return str(error)


@contextmanager
def _ending_with_the_reader() -> Iterator[None]:
    """Ends a command by SIGPIPE if nobody reads its output any more: ``inspect ... | head -1``."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGPIPE, before)


def _print_warning(message: Warning | str, *where: object, **options: object) -> None:
    """Prints a warning without the source line that raised it."""
    print_problem(f"warning: {message}")
