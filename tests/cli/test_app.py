"""The command line as a whole: its help, its exit codes."""

import subprocess
import sys
from pathlib import Path

from torchtitan_ext.cli.output import FINE, UNREADABLE, WRONG_USAGE, text_of_bytes


def call(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torchtitan_ext", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


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
    assert call("latest", tmp_path).returncode == UNREADABLE
    assert call("no-such-command").returncode == WRONG_USAGE
    (tmp_path / "step-3").mkdir()
    (tmp_path / "step-3" / ".metadata").write_bytes(b"")
    result = call("latest", tmp_path)
    assert result.returncode == FINE
    assert result.stdout == f"{tmp_path / 'step-3'}\n"


def test_bytes_have_three_digits_and_a_unit() -> None:
    assert [text_of_bytes(n) for n in (0, 999, 1000, 1_230_000, 999_600, 123_456_789)] == [
        "0 B", "999 B", "1 kB", "1.2 MB", "1 MB", "123 MB",
    ]  # fmt: skip
