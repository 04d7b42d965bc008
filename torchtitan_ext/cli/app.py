"""``torchtitan-ext``: which commands there are. A command's module is imported when it is asked for, so that those that
need no torch start without it.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from torchtitan_ext.cli.collector import without_collector
from torchtitan_ext.cli.output import UNREADABLE, print_problem
from torchtitan_ext.errors import DamagedCheckpointError, StateRefusedError, TorchtitanExtError

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
    "doctor": "What to put into a bug report: versions, libraries, CUDA, gloo, disk, a save.",
}
"""The commands, in the order of the help, and a line on each. ``torchtitan_ext.cli.<name>.run`` is the command."""


class _Commands(TyperGroup):
    """Imports the module of a command when it is asked for."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(_SUMMARY_OF)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in _SUMMARY_OF:
            return None
        # The shell's completion asks every command for its summary.
        return TyperCommand(cmd_name, help=_SUMMARY_OF[cmd_name]) if ctx.resilient_parsing else _load(cmd_name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] in _SUMMARY_OF:
            return args[0], _load(args[0]), args[1:]
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_SUMMARY_OF.items()))


def _load(name: str) -> Any:
    command = typer.Typer(rich_markup_mode=None, add_completion=False)
    with without_collector():
        module = importlib.import_module(f"torchtitan_ext.cli.{name}")
    command.command(name)(module.run)
    return get_command(command)


app = typer.Typer(cls=_Commands, rich_markup_mode=None, pretty_exceptions_enable=False, no_args_is_help=True)


@app.callback()
def _about() -> None:
    """Look into, prove, compare, plan and convert checkpoints.

    Exit codes: 0 fine, 1 differs or damaged, 2 wrong usage, 3 unreadable.
    """


def main() -> None:
    """Runs the command that the arguments of this process name, and exits with its code."""
    warnings.showwarning = _print_warning
    try:
        app(prog_name="torchtitan-ext")
    except DamagedCheckpointError as error:
        print_problem(error.reason)
        sys.exit(UNREADABLE)
    except StateRefusedError as error:
        print_problem(*str(error).split("\n"))
        sys.exit(UNREADABLE)
    except (TorchtitanExtError, OSError) as error:
        print_problem(str(error))
        sys.exit(UNREADABLE)


def _print_warning(message: Warning | str, *where: object, **options: object) -> None:
    """Without the line of our source that warns."""
    print_problem(f"warning: {message}")
