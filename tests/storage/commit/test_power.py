"""What a machine that loses power may lose: nothing that was committed. And the order of the calls that make it so."""

import itertools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from fault_field import SCENARIOS, Field, Scenario
from file_faults import FaultServer, loaded_value
from lossy_disk import LossyDisk, choices, read_log
from missing_tools import skip_or_fail
from tier import SOAK

import torchtitan_ext as tte
from torchtitan_ext import _core
from torchtitan_ext.offline.rewrite.convert import convert
from torchtitan_ext.offline.sources import open_source
from torchtitan_ext.storage import FileWriter

NUM_WAYS = 4 if SOAK == 1 else 2 + 2 * SOAK


def values_after_power_loss(field: Field, fast_path: Path, **options: object) -> list[tuple[int, str, int | str]]:
    """(operations done, way of losing, value that is loaded) for every point of a save, and for its end."""
    log = fast_path / "log"
    assert field.save(log=str(log), **options).has_saved
    operations = read_log(log)
    disk = LossyDisk(field.run, field.template)
    found = []
    for done in range(len(operations) + 1):
        for way, choose in itertools.islice(choices(done * 1000), NUM_WAYS):
            left = fast_path / "left"
            disk.write_what_may_be_left(left, choose)
            value = loaded_value(left, 1, "last-good")
            if field.scenario.is_over and value != "none":
                assert loaded_value(left / "step-1", 1) == value
            found.append((done, way, value))
            shutil.rmtree(left)
        if done < len(operations):
            disk.apply(operations[done])
    return found


@pytest.mark.sampled(0.34)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_what_was_committed_is_never_lost(fault_server: FaultServer, fast_path: Path, scenario: Scenario) -> None:
    field = Field(fault_server, fast_path, scenario, 1)
    found = values_after_power_loss(field, fast_path)
    end = max(done for done, _, _ in found)
    assert end >= 20
    assert [one for one in found if one[2] not in (1, 2)] == []
    assert [one for one in found if one[0] == end and one[2] != 2] == []
    print(f"{scenario.name}: power lost at {end + 1} points in {NUM_WAYS} ways: {len(found)} states, all whole")


def test_without_sync_it_may_be_lost(fault_server: FaultServer, fast_path: Path) -> None:
    """The same disk finds what is missing: the check above can fail."""
    field = Field(fault_server, fast_path, SCENARIOS[2], 1)
    values = [value for _, _, value in values_after_power_loss(field, fast_path, sync=False)]
    assert "none" in values


# ---- the order of the calls, as the system saw them ----

SAVES = """
import sys, torch, torchtitan_ext as tte
import torchtitan_ext as tte
from torchtitan_ext.storage import FileWriter
state = {"w": torch.ones(600, 1000), "step": 1}
tte.save(state, storage_writer=FileWriter(sys.argv[1], thread_count=1), no_dist=True)
"""
CALL = re.compile(r"^(?:\[pid +)?\d*\]? *(\w+)\((.*)\) += +(-?\d+)")


def traced(target: Path, log: Path) -> list[tuple[str, list[str]]]:
    """The calls of a save on files beside its target: name, and paths below the target's parent."""
    calls = "trace=openat,write,pwritev,fsync,rename,renameat2,unlink,mkdir,rmdir"
    command = ["strace", "-f", "-y", "-qq", "-s", "0", "-e", calls, "-o", str(log)]
    try:
        subprocess.run([*command, sys.executable, "-W", "ignore", "-c", SAVES, str(target)], check=True)
    except subprocess.CalledProcessError as error:
        skip_or_fail(f"strace cannot trace here ({error})")
    found = []
    for line in log.read_text().splitlines():
        match = CALL.match(line)
        if match is None or int(match[3]) < 0 or str(target.parent) not in match[2]:
            continue
        paths = re.findall(rf"{re.escape(str(target.parent))}(?:/([^\">,]*))?[\">]", match[2])
        found.append((match[1], [re.sub("[0-9a-f]{32}", "ID", path) for path in paths]))
    return found


@pytest.mark.nightly("kills")
@pytest.mark.parametrize("is_in_place", [False, True])
def test_the_order_of_syncs_and_renames(tmp_path: Path, is_in_place: bool) -> None:
    if shutil.which("strace") is None:
        skip_or_fail("no strace (a package of that name), which shows the order of system calls")
    run = tmp_path / "run"
    target = run / "step-1"
    target.mkdir(parents=True)
    if is_in_place:
        (target / "config.json").touch()
    subprocess.run([sys.executable, "-W", "ignore", "-c", SAVES, str(target)], check=True)
    old = set(os.listdir(target))
    calls = traced(target, tmp_path / "log")
    place = "step-1" if is_in_place else ".tte-ID"
    data, index = (
        ("step-1/__0_ID.distcp", "step-1/.tte_index.ID")
        if is_in_place
        else (
            ".tte-ID/__0_0.distcp",
            ".tte-ID/.tte_index",
        )
    )
    metadata = f"{place}/.metadata.tmp" if is_in_place else f"{place}/.metadata"
    commit = ("rename", [metadata, "step-1/.metadata"]) if is_in_place else ("renameat2", [place, "step-1"])
    written = [calls.index(("fsync", [path])) for path in (data, index, metadata)]
    last_writes = [
        max(number for number, (name, paths) in enumerate(calls) if name in ("write", "pwritev") and paths == [path])
        for path in (data, index, metadata)
    ]
    committed = calls.index(commit)
    place_synced = max(number for number in range(committed) if calls[number] == ("fsync", [place]))
    parent_synced = calls.index(("fsync", ["step-1" if is_in_place else ""]), committed)
    removed = [number for number, (name, _) in enumerate(calls) if name == "unlink" and number > committed]
    # Each file after its last byte; the metadata last; all files, then their names, then the rename, then its name.
    assert all(last < synced for last, synced in zip(last_writes, written, strict=True))
    assert written == sorted(written) and written[-1] < place_synced < committed < parent_synced
    assert len(removed) >= len(old) - is_in_place and min(removed) > parent_synced


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths that Python syncs, in their order."""
    paths: list[str] = []
    original = os.fsync
    monkeypatch.setattr(os, "fsync", lambda one: (paths.append(os.readlink(f"/proc/self/fd/{one}")), original(one)))
    return paths


def test_a_save_over_itself_syncs_each_file_once(tmp_path: Path, synced: list[str]) -> None:
    for _ in range(2):
        synced.clear()
        tte.save({"w": torch.ones(3)}, storage_writer=FileWriter(tmp_path / "step-1"), no_dist=True)
    names = [Path(path).name for path in synced]
    assert [re.sub("[0-9a-f]{32}", "ID", name) for name in names] == [
        ".tte_index",
        ".metadata",
        ".tte-ID",
        tmp_path.name,
    ]


def test_the_names_of_new_directories_are_synced(tmp_path: Path, synced: list[str]) -> None:
    run = tmp_path / "runs" / "first"
    tte.save({"w": torch.ones(3)}, storage_writer=FileWriter(run / "step-1"), no_dist=True)
    assert sorted(synced[-3:]) == [str(path) for path in (tmp_path, tmp_path / "runs", run)]


def test_the_name_of_a_new_target_is_synced_where_it_is_filled_in_place(
    tmp_path: Path, synced: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No rename gives it a name: a mounted file system cannot exchange directories."""
    monkeypatch.setattr(_core, "is_on_fuse", lambda path: True)
    run = tmp_path / "run"
    dcp.save({"w": torch.ones(3)}, storage_writer=FileWriter(run / "step-1"), no_dist=True)
    assert {str(tmp_path), str(run), str(run / "step-1")} <= set(synced)


def test_weights_and_converted_files_are_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: set[int] = set()
    original = os.fsync
    monkeypatch.setattr(os, "fsync", lambda one: (synced.add(os.fstat(one).st_ino), original(one)))
    weights = tmp_path / "weights"
    tte.weights.save({"w": torch.ones(3)}, weights, no_dist=True)
    convert(open_source(weights), tmp_path / "converted", to="safetensors", num_processes=1)
    assert [path for path in tmp_path.rglob("*") if path.stat().st_ino not in synced] == []
