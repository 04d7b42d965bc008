"""Every command on every kind of checkpoint: the exit code, a sentence and no traceback, nothing run, nothing touched.

`doctor` takes no checkpoint: test_doctor.py has it. Huge ones are in test_huge.py.
"""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from calls import Done, call
from kinds import (
    FORMATS,
    TERMINAL,
    Maker,
    Runs,
    a_pipe,
    archive_of,
    chunk_files,
    compressed,
    cut,
    deep_pickle,
    good,
    index_names,
    lost,
    move,
    named,
    nested,
    other_files,
    own_metadata,
    patched,
    plan_data,
    resize,
    safetensors,
    save_id,
    saved,
    with_pickle,
    with_value,
    world,
)

from torchtitan_ext.cli.output import DIFFERS, FINE, UNREADABLE, WRONG_USAGE
from torchtitan_ext.storage.commit.opened import OpenedCheckpoint

COMMANDS = ["inspect", "verify", "deep", "diff", "plan", "reshard", "dcp", "safetensors", "ls", "latest", "gc"]
WRITING = ["reshard", "dcp", "safetensors"]
HF = "safetensors directory"
SECOND = "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"


def arguments(command: str, path: Path, target: Path) -> tuple[object, ...]:
    """What the command is given for a checkpoint; those of runs are given the directory that it lies in."""
    write = ("--overwrite", "--processes", 1)
    known: dict[str, tuple[object, ...]] = {
        "inspect": ("inspect", path, "--shards"),
        "verify": ("verify", path),
        "deep": ("verify", path, "--deep"),
        "diff": ("diff", path, path),
        "plan": ("plan", path, "--mesh", "tp=2"),
        "reshard": ("reshard", path, target, "--mesh", "tp=2", *write),
        "ls": ("ls", path.parent),
        "latest": ("latest", path.parent),
        "gc": ("gc", path.parent, "--keep", 1),
    }
    return known.get(command, ("convert", path, target, "--to", command, *write))


# Exit codes of the commands, in their order. Of metadata that says the impossible verify finds what it shows by itself,
# and with --deep what the records do not agree with.
GOOD = {
    "stock": (good("stock"), "0 0 0 0 0 0 0 0 0 0 0"),
    "ours": (good("ours"), "0 0 0 0 0 0 0 0 0 0 0"),
    "ours without .metadata": (good("ours without .metadata"), "0 0 0 0 0 0 0 0 0 0 0"),
    "safetensors directory": (good(HF), "0 0 0 0 0 0 0 0 0 3 0"),
    "safetensors": (good("safetensors"), "0 0 0 0 0 0 0 0 0 3 0"),
    "torch": (good("torch"), "0 0 0 0 1 0 0 0 0 3 0"),
}
EMPTY: dict[str, tuple[Maker, str]] = {
    "nothing there": (lambda path: None, "3 3 3 3 3 3 3 3 0 3 0"),
    "empty directory": (lambda path: path.mkdir(), "3 3 3 3 3 3 3 3 0 3 0"),
    "empty file": (lambda path: path.touch(), "3 3 3 3 3 3 3 3 0 3 0"),
}
TORN = {
    "stock, data cut": (cut("stock", "__0_0.distcp"), "0 1 1 3 0 3 3 3 0 0 0"),
    "stock, data lost": (lost("stock", "__0_0.distcp"), "0 1 1 3 0 3 3 3 0 0 0"),
    "ours, data cut": (cut("ours", "__0_0.distcp"), "0 1 1 3 0 3 3 3 0 0 0"),
    "ours, data lost": (lost("ours", "__0_0.distcp"), "0 1 1 3 0 3 3 3 0 0 0"),
    "index alone, data cut": (cut("ours without .metadata", "__0_0.distcp"), "0 1 1 3 0 3 3 3 0 0 0"),
    "stock, .metadata cut": (cut("stock", ".metadata"), "3 1 1 3 3 3 3 3 0 0 0"),
    "stock, .metadata empty": (cut("stock", ".metadata", 0), "3 1 1 3 3 3 3 3 0 0 0"),
    "stock, .metadata lost": (lost("stock", ".metadata"), "3 3 3 3 3 3 3 3 0 3 0"),
    "ours, .metadata cut": (cut("ours", ".metadata"), "3 1 1 3 3 3 3 3 0 0 0"),
    "ours, index cut": (cut("ours", ".tte_index"), "0 1 1 3 0 3 3 3 0 0 0"),
    "index alone, cut": (cut("ours without .metadata", ".tte_index"), "3 1 1 3 3 3 3 3 0 0 0"),
    "safetensors, one file cut": (cut(HF, SECOND, 0.9), "3 1 1 3 3 3 3 3 0 3 0"),
    "safetensors, header cut": (cut("safetensors", "", 0.05), "3 1 1 3 3 3 3 3 0 3 0"),
    "safetensors, one file lost": (lost(HF, SECOND), "0 1 1 3 3 3 3 3 0 3 0"),
    "safetensors, index cut": (cut(HF, INDEX), "0 1 1 3 3 3 3 3 0 3 0"),
    "torch, cut": (cut("torch", ""), "3 1 1 3 3 3 3 3 0 3 0"),
    "torch, end cut": (cut("torch", "", 0.97), "3 1 1 3 3 3 3 3 0 3 0"),
}
FOREIGN = {
    "a directory of other files": (other_files, "3 3 3 3 3 3 3 3 0 3 0"),
    "a text": (lambda path: path.write_text("hello\n"), "3 3 3 3 3 3 3 3 0 3 0"),
    "a pipe": (a_pipe, "3 3 3 3 3 3 3 3 0 3 0"),
    "a device": (lambda path: path.symlink_to("/dev/zero"), "3 3 3 3 3 3 3 3 0 3 0"),
    "a circle of links": (lambda path: path.symlink_to(path), "3 3 3 3 3 3 3 3 0 3 0"),
    "torch.save of a list": (saved([torch.ones(2)]), "0 0 0 3 3 3 3 3 0 3 0"),
    "an archive compressed": (compressed, "3 1 1 3 3 3 3 3 0 3 0"),
    "each rank with metadata": (own_metadata, "3 0 0 3 3 3 3 3 0 3 0"),
    "a newer format": (patched(lambda metadata: setattr(metadata, "version", "9.0")), "0 0 0 3 1 3 3 3 0 0 0"),
    "a dtype that torch lacks": (
        safetensors(b'{"w": {"dtype": "F4", "shape": [8], "data_offsets": [0, 4]}}'),
        "0 0 0 3 3 3 3 3 0 3 0",
    ),
}
HOSTILE = {
    "metadata that runs": (with_pickle, "3 1 1 3 3 3 3 3 0 0 0"),
    "a value that runs": (with_value, "0 0 0 0 0 0 0 0 0 0 0"),
    "a file of torch.save that runs": (saved({"w": torch.ones(2), "x": Runs()}), "3 0 0 3 3 3 3 3 0 3 0"),
    "a box outside": (resize((1, 0), (8, 6)), "0 1 1 3 1 3 3 3 0 0 0"),
    "a box too small": (resize((0, 0), (4, 6)), "0 1 1 3 1 3 3 3 0 0 0"),
    "a negative shape": (resize((0, 0), (8, 6), (-8, 6)), "3 1 1 3 3 3 3 3 0 0 0"),
    "a negative box": (resize((0, 0), (-8, 6)), "3 1 1 3 3 3 3 3 0 0 0"),
    "more than is in the record": (resize((0, 0), (800, 6), (800, 6)), "0 0 1 3 0 3 3 3 0 0 0"),
    "terabytes": (resize((0, 0), (1 << 40, 6), (1 << 40, 6)), "0 0 1 3 0 3 3 3 0 0 0"),
    "more than 64 bits count": (resize((0, 0), (1 << 62, 6), (1 << 62, 6)), "3 1 1 3 3 3 3 3 0 0 0"),
    "other dims than the record": (resize((0,), (48,), (48,)), "0 0 1 3 0 3 3 3 0 0 0"),
    "boxes of other dims": (resize((0,), (48,)), "3 1 1 3 3 3 3 3 0 0 0"),
    "a record far behind the end": (move(offset=1 << 40), "0 1 1 3 0 3 3 3 0 0 0"),
    "a record at no byte": (move(offset=-1), "3 1 1 3 3 3 3 3 0 0 0"),
    "records without end": (move(offset=1, length=(1 << 63) - 2), "3 1 1 3 0 3 3 3 0 0 0"),
    "a file above": (move(relative_path="../secret"), "3 1 1 3 3 3 3 3 0 0 0"),
    "a file elsewhere": (move(relative_path="/etc/passwd"), "3 1 1 3 3 3 3 3 0 0 0"),
    "a file with a zero byte": (move(relative_path="a\0b"), "3 1 1 3 3 3 3 3 0 0 0"),
    "a file that is no text": (move(relative_path="\ud800"), "3 1 1 3 3 3 3 3 0 0 0"),
    "a file of a long name": (move(relative_path="x" * 5000), "0 1 1 3 0 3 3 3 0 0 0"),
    "a directory for a file": (move(relative_path="."), "0 1 1 3 0 3 3 3 0 0 0"),
    "a save id that is a path": (save_id("x/../../../etc/passwd"), "0 0 0 0 0 0 0 0 0 0 0"),
    "a save id with a zero byte": (save_id("a\0b"), "0 0 0 0 0 0 0 0 0 0 0"),
    "a save id that is no text": (save_id("\ud800"), "0 0 0 0 0 0 0 0 0 0 0"),
    "a world of texts": (world({"size": "x", "mesh": {"tp": "y"}}), "0 0 0 0 0 0 0 0 0 0 0"),
    "a world too large": (world({"size": 10**18, "mesh": {"tp": 10**15, "cp": 10**15}}), "0 0 0 0 0 0 0 0 0 0 0"),
    "nested places": (plan_data(**{"layers.0.wq": nested(300)}), "3 1 1 3 3 3 3 3 0 0 0"),
    "places that are none": (plan_data(**{"layers.0.wq": 3, "step": ("w", -1)}), "0 0 0 0 0 0 0 0 0 0 0"),
    "places in a huge list": (plan_data(**{"layers.0.wq": ("w", 10**10)}), "0 0 0 0 0 0 0 0 0 0 0"),
    "a header of brackets": (
        safetensors(b'{"w":' + b"[[]," * 100_000 + b"0" + b"]" * 100_000 + b"}"),
        "3 1 1 3 3 3 3 3 0 3 0",
    ),
    "a header of digits": (
        safetensors(b'{"w": {"dtype": "F32", "shape": [' + b"9" * 99_999 + b'], "data_offsets": [0, 4]}}'),
        "3 1 1 3 3 3 3 3 0 3 0",
    ),
    "a header without end": (lambda path: path.write_bytes(b"\xff" * 7 + b"\x7f{"), "3 1 1 3 3 3 3 3 0 3 0"),
    "an index of files above": (index_names("../x.safetensors"), "0 1 1 3 3 3 3 3 0 3 0"),
    "an index with a zero byte": (index_names("x\0y.safetensors"), "0 1 1 3 3 3 3 3 0 3 0"),
    "safetensors in two files": (chunk_files(([2, 3], [0, 0]), ([2, 3], [0, 0])), "0 1 1 3 3 3 3 3 0 3 0"),
    "chunks with a gap": (chunk_files(([2, 3], [0, 0]), ([2, 3], [4, 0])), "0 1 1 3 1 3 3 3 0 3 0"),
    "chunks of other dims": (chunk_files(([2, 3], [0, 0]), ([6], [0])), "3 1 1 3 3 3 3 3 0 3 0"),
    "a chunk far out": (chunk_files(([2, 3], [(1 << 63) - 1, 0])), "3 1 1 3 3 3 3 3 0 3 0"),
    "deep nesting": (saved(nested(200)), "0 0 0 0 1 0 0 0 0 3 0"),
    "a pickle of lists": (archive_of(deep_pickle(100_000)), "0 0 0 3 3 3 3 3 0 3 0"),
    "an archive of nonsense": (archive_of(b"garbage"), "3 1 1 3 3 3 3 3 0 3 0"),
    "two values of one name": (saved({"a.b": torch.ones(1), "a": {"b": torch.ones(2)}}), "3 0 0 3 3 3 3 3 0 3 0"),
    "a key that is no text": (saved({"\ud800": torch.ones(1)}), "3 0 0 3 3 3 3 3 0 3 0"),
}
ALL = GOOD | EMPTY | TORN | FOREIGN | HOSTILE


def everything_in(directory: Path) -> dict[str, bytes | None]:
    return {
        str(path): path.read_bytes() if path.is_file() and not path.is_symlink() else None
        for path in directory.rglob("*")
    }


def check(command: str, done: Done) -> None:
    """What holds whatever the checkpoint: a failure is said, and nothing is printed that a terminal obeys."""
    assert done.out.replace("\n", "").isprintable() and done.err.replace("\n", "").isprintable()
    if done.code == UNREADABLE and command != "latest":
        first, *more = done.err.splitlines()
        assert first.startswith("torchtitan-ext: ") and done.out == ""
        assert more == [] or "refused, nothing was changed" in first
    elif done.code == DIFFERS:
        assert done.out != ""


@pytest.mark.parametrize("name", ALL)
def test_exit_codes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    make, expected = ALL[name]
    path = tmp_path / "run" / "step-7"
    path.parent.mkdir()
    make(path)
    codes = []
    before = everything_in(tmp_path)
    for command in COMMANDS:
        done = call(*arguments(command, path, tmp_path / "new"))
        check(command, done)
        codes.append(str(done.code))
        if done.code == FINE and command in WRITING:
            new = tmp_path / "new"
            shutil.rmtree(new) if new.is_dir() else new.unlink()
        assert everything_in(tmp_path) == before, command  # nothing was run, nothing touched, nothing left
    assert dict(zip(COMMANDS, codes, strict=True)) == dict(zip(COMMANDS, expected.split(), strict=True))


@pytest.mark.parametrize("kind", FORMATS)
def test_json_is_one_document_and_its_keys_are_of_one_kind(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "run" / "step-7"
    path.parent.mkdir()
    good(kind)(path)
    for command in COMMANDS:
        done = call(*arguments(command, path, tmp_path / f"new-{command}"), "--json")
        if done.code == FINE:
            found = json.loads(done.out)
            assert len(done.out.splitlines()) == 1 and done.err == "", command
            check_keys(found)


def check_keys(value: object) -> None:
    """Amounts of bytes say so, and what is true or false is a question."""
    if isinstance(value, dict):
        for key, member in value.items():
            assert key != "bytes" and (not isinstance(member, bool) or key.startswith(("is_", "has_"))), key
            check_keys(member)
    elif isinstance(value, list):
        for member in value:
            check_keys(member)


@pytest.mark.parametrize("command", WRITING)
@pytest.mark.parametrize("name", ["stock, data cut", "stock, data lost", "a value that runs", "terabytes"])
def test_what_was_at_the_target_stays(tmp_path: Path, name: str, command: str) -> None:
    path, target = tmp_path / "a", tmp_path / "b"
    make, expected = ALL[name]
    make(path)
    good(HF if command == "safetensors" else "ours")(target)
    before = everything_in(tmp_path)
    done = call(*arguments(command, path, target))
    assert str(done.code) == expected.split()[COMMANDS.index(command)]
    assert (everything_in(tmp_path) == before) == (done.code != FINE)


@pytest.mark.parametrize("kind", FORMATS)
def test_names_are_printed_without_what_a_terminal_obeys(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "c"
    named(kind, TERMINAL)(path)
    other = tmp_path / "other"
    good(kind)(other)
    for command in (("inspect", path), ("inspect", path, "--shards"), ("diff", path, other), ("verify", path)):
        done = call(*command)
        check(command[0], done)
        assert r"\x1b[2J" in done.out or command[0] == "verify"
    assert TERMINAL in [key["name"] for key in call("inspect", path, "--json").json["keys"]]


def test_names_of_files_need_not_be_text(tmp_path: Path) -> None:
    run = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff\x1b"))
    run.mkdir()
    good("ours")(run / "step-7")
    for arguments_ in (("inspect", run / "step-7"), ("verify", run), ("ls", run), ("gc", run, "--keep", 1)):
        done = call(*arguments_)
        assert done.code == FINE
        check(str(arguments_[0]), done)
    assert r"\udcff\x1b/step-7: whole" in call("verify", run).out


def test_wrong_values_of_arguments_are_wrong_usage(tmp_path: Path) -> None:
    path = tmp_path / "c"
    good("ours")(path)
    wrong = [
        ("inspect", path, "no such tensor", "--plot", tmp_path / "layout.svg"),
        ("diff", path, path, "--max-memory", "much"),
        ("diff", path, path, "--only", "nothing*"),
        ("plan", path, "--mesh", "dp"),
        ("plan", path, "--mesh", "dp=2", "--policy", "rng=rest"),
        ("reshard", path, tmp_path / "new", "--mesh", "ring=2"),
        ("reshard", path, path, "--mesh", "dp=2"),
        ("convert", path, tmp_path / "new", "--to", "safetensors", "--max-file-size", "1kB"),
        ("gc", tmp_path, "--keep", 0),
    ]
    for arguments_ in wrong:
        done = call(*arguments_)
        assert done.code == WRONG_USAGE and "Traceback" not in done.err, done


def test_a_lost_file_costs_no_look_at_the_metadata(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At a thousand ranks metadata has 140 MB: it was read again for each file that was missing."""
    lost("ours", "__0_0.distcp")(tmp_path / "c")
    opened = OpenedCheckpoint(tmp_path / "c")
    opened.read_metadata(".metadata")
    monkeypatch.setattr(Path, "read_bytes", lambda path: pytest.fail(f"{path} is read again"))
    with pytest.raises(FileNotFoundError):
        opened.descriptor("__0_0.distcp")
