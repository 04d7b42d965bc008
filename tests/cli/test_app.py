"""The command line as a whole: its help, its exit codes."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from calls import call as call_here
from calls import call_process as call
from calls import make

from torchtitan_ext.cli.app import _SUMMARY_OF
from torchtitan_ext.cli.output import FINE, UNREADABLE, WRONG_USAGE, text_of_bytes
from torchtitan_ext.storage import progress


def test_help_lists_the_commands_without_importing_them() -> None:
    code = (
        "import sys; sys.argv = ['torchtitan-ext', '--help']\n"
        "from torchtitan_ext.cli.app import main\n"
        "try: main()\n"
        "except SystemExit: print('torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "latest" in result.stdout
    assert result.stdout.endswith("False\n")


def test_exit_codes(tmp_path: Path) -> None:
    assert call("latest", tmp_path).code == UNREADABLE
    assert call("no-such-command").code == WRONG_USAGE
    (tmp_path / "step-3").mkdir()
    (tmp_path / "step-3" / ".metadata").write_bytes(b"")
    result = call("latest", tmp_path)
    assert result.code == FINE
    assert result.out == f"{tmp_path / 'step-3'}\n"


@pytest.mark.parametrize(
    "command",
    [
        ["verify", "--deep", "a"],
        ["diff", "a", "b"],
        ["reshard", "a", "c", "--mesh", "dp=2"],
        ["convert", "a", "d.pt", "--to", "torch"],
    ],
    ids=lambda words: words[0],
)
def test_a_long_command_is_not_silent_in_a_log(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path / "a", "ours")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(progress, "_DELAY_SECONDS", 0.0)
    done = call_here(*command)
    assert re.search(rf"^{command[0].replace('verify', 'a')}: \d+ of (8|16) MB in \d+ s$", done.err, re.M), done


def test_bytes_have_three_digits_and_a_unit() -> None:
    assert [text_of_bytes(n) for n in (0, 999, 1000, 1_230_000, 999_600, 123_456_789)] == [
        "0 B", "999 B", "1 kB", "1.2 MB", "1 MB", "123 MB",
    ]  # fmt: skip


@pytest.mark.parametrize("command", _SUMMARY_OF)
def test_the_help_of_a_command_fits_a_screen_and_has_an_example(command: str) -> None:
    shown = call_here(command, "--help")
    assert shown.code == FINE
    assert len(shown.out.splitlines()) <= 24, shown.out
    assert f"Example: torchtitan-ext {command} " in shown.out
    assert _SUMMARY_OF[command].split(":")[0].rstrip(".") in shown.out


def complete(*words: str) -> list[str]:
    """What the shell is offered for the last word; and, last, whether torch was imported for it."""
    code = (
        "import sys; sys.argv = ['torchtitan-ext']\n"
        "from torchtitan_ext.cli.app import main\n"
        "try: main()\n"
        "finally: print('torch' in sys.modules)"
    )
    asked = {"COMP_WORDS": " ".join(("torchtitan-ext", *words)), "COMP_CWORD": str(len(words))}
    environment = {**os.environ, "_TORCHTITAN_EXT_COMPLETE": "complete_bash", **asked}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    return done.stdout.split()


def test_the_shell_completes_commands_without_importing_them_and_their_options() -> None:
    assert complete("") == [*_SUMMARY_OF, "False"]
    assert complete("insp") == ["inspect", "False"]
    assert complete("verify", "--") == ["--deep", "--json", "--help", "False"]
