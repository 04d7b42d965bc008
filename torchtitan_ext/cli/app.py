"""``torchtitan-ext``: which commands there are. A command's module is imported when it is asked for, so that those that
need no torch start without it.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from torchtitan_ext.cli.output import UNREADABLE
from torchtitan_ext.errors import TorchtitanExtError

_SUMMARY_OF = {
    "latest": "The newest finished checkpoint of a run.",
}
"""The commands, in the order of the help, and a line on each. ``torchtitan_ext.cli.<name>.run`` is the command."""


class _Commands(TyperGroup):
    """Imports the module of a command when it is asked for."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(_SUMMARY_OF)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in _SUMMARY_OF:
            return None
        command = typer.Typer(rich_markup_mode=None, add_completion=False)
        command.command(cmd_name)(importlib.import_module(f"torchtitan_ext.cli.{cmd_name}").run)
        return get_command(command)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_SUMMARY_OF.items()))


app = typer.Typer(cls=_Commands, rich_markup_mode=None, pretty_exceptions_enable=False, no_args_is_help=True)


@app.callback()
def _about() -> None:
    """Look into, prove, compare, plan and convert checkpoints.

    Exit codes: 0 fine, 1 differs or damaged, 2 wrong usage, 3 unreadable.
    """


def main() -> None:
    """Runs the command that the arguments of this process name, and exits with its code."""
    try:
        app(prog_name="torchtitan-ext")
    except (TorchtitanExtError, OSError) as error:
        print(f"torchtitan-ext: {error}", file=sys.stderr)
        sys.exit(UNREADABLE)
