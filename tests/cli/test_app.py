"""The command line as a whole: its help, its exit codes."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from calls import call as call_here
from calls import call_importing, make

import torchtitan_ext as tte
from torchtitan_ext.cli.app import _SUMMARY_OF
from torchtitan_ext.cli.output import FINE, SCHEMA_VERSION, UNREADABLE, WRONG_USAGE, text_of_bytes
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


@pytest.mark.parametrize(
    "command",
    [
        ["verify", "--deep", "a"],
        ["diff", "a", "b"],
        ["reshard", "a", "c", "--mesh", "dp=2"],
        ["convert", "a", "d", "--to", "dcp"],
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


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda run: None, "run has no step: expected directories step-<number> in it"),
        (lambda run: (run / "step-3").mkdir(), "run has no finished step: step 3 is not finished"),
        (lambda run: (run / ".metadata").touch(), "run is a checkpoint itself, expected the directory of a run"),
        (lambda run: run.rmdir(), "run: No such file or directory"),
    ],
)
def test_latest_says_why_there_is_none(tmp_path: Path, make: Callable[[Path], object], words: str) -> None:
    run = tmp_path / "run"
    run.mkdir()
    make(run)
    done = call_here("latest", run, "--json")
    assert done.code == UNREADABLE and words in done.err
    assert words in (done.json["error"]["message"] if "error" in done.json else done.json["reason"])


def test_version_short_help_and_what_was_perhaps_meant() -> None:
    assert call_here("--version").out == f"torchtitan-ext {tte.__version__}\n"
    assert call_here("-h").out == call_here("--help").out and call_here("ls", "-h").out == call_here("ls", "--help").out
    for words, meant in (("inspct", "Did you mean 'inspect'?"), ("verify x --depe", "--deep")):
        done = call_here(*words.split())
        assert done.code == WRONG_USAGE and meant in done.err


@pytest.mark.parametrize(
    ("arguments", "kind", "code"),
    [
        (["inspect", "nothing", "--json"], "FileNotFoundError", UNREADABLE),
        (["plan", ".", "--mesh", "dp=2", "--json"], "UnknownFormatError", UNREADABLE),
        (["verify", "--json", "--depe"], "Usage", WRONG_USAGE),
        (["gc", ".", "--keep", "0", "--json"], "Usage", WRONG_USAGE),
    ],
)
def test_errors_are_json_where_json_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], kind: str, code: int
) -> None:
    monkeypatch.chdir(tmp_path)
    done = call_here(*arguments)
    error = done.json["error"]
    assert (done.code, error["kind"], error["exit_code"], error["problems"]) == (code, kind, code, [])
    assert error["message"] in done.err and done.json["schema_version"] == SCHEMA_VERSION


def test_a_reader_who_has_seen_enough_ends_a_command(tmp_path: Path) -> None:
    tensors = {f"{number:060}": [number] for number in range(3000)}
    header = json.dumps({name: {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]} for name in tensors}).encode()
    (tmp_path / "m.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    command = [sys.executable, "-m", "torchtitan_ext", "inspect", str(tmp_path / "m.safetensors")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode in (FINE, -signal.SIGPIPE)


@pytest.mark.parametrize("command", ["diff", "plan", "reshard", "convert"])
def test_help_needs_no_torch(command: str) -> None:
    done, imported = call_importing({"torch", "numpy"}, command, "--help")
    assert done.code == FINE and "Usage:" in done.out and imported == set()


def test_bytes_have_three_digits_and_a_unit() -> None:
    assert [text_of_bytes(n) for n in (0, 999, 1000, 1_230_000, 999_600, 123_456_789)] == [
        "0 B", "999 B", "1 kB", "1.2 MB", "1 MB", "123 MB",
    ]  # fmt: skip


@pytest.mark.parametrize("command", _SUMMARY_OF)
def test_the_help_of_a_command_fits_a_screen_and_has_an_example(command: str) -> None:
    shown = call_here(command, "--help")
    assert shown.code == FINE
    assert len(shown.out.splitlines()) <= 24, shown.out
    assert re.search(rf"Example: torchtitan-ext {command}( |$)", shown.out, re.MULTILINE)
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
    assert complete("verify", "--") == ["--deep", "--prove", "--step-pattern", "--json", "--help", "False"]
