"""``torchtitan-ext watch`` of a run in an object store: by listings and the heads of ``.metadata``."""

import json
import subprocess
import sys

import pytest
import torch

import torchtitan_ext as tte
from torchtitan_ext.storage.location import Location
from torchtitan_ext.storage.objects.folder import ObjectFolder
from torchtitan_ext.storage.objects.lease import Lease
from torchtitan_ext.storage.objects.leftovers import remove_object_step
from torchtitan_ext.storage.runs.changes import RunWatch

pytestmark = pytest.mark.usefixtures("faulty")


def save(run: str, step: int) -> None:
    tte.save({"w": torch.full((9,), float(step))}, f"{run}/step-{step}", no_dist=True)


def changes(watch: RunWatch) -> list[tuple[str, int]]:
    return [(change.kind, change.step.step) for change in watch.look()]


def test_steps_land_fail_are_replaced_and_go(url: str) -> None:
    watch = RunWatch(Location(url))
    assert changes(watch) == []
    save(url, 1)
    (landed,) = watch.look()
    assert (landed.kind, landed.step.world_size) == ("landed", 1)
    assert list(landed.step.seconds) == ["prepare", "plan", "write"] and landed.step.reused_bytes == 0
    with pytest.warns(UserWarning, match="is overwritten"):
        save(url, 1)
    save(url, 2)
    assert changes(watch) == [("replaced", 1), ("landed", 2)]
    lease = Lease(ObjectFolder(Location(f"{url}/step-3")), "a" * 32)
    assert changes(watch) == []
    save(url, 3)
    assert changes(watch) == [("landed", 3)]
    lease.release()
    lease = Lease(ObjectFolder(Location(f"{url}/step-4")), "b" * 32)
    assert changes(watch) == []
    lease.release()
    remove_object_step(Location(f"{url}/step-1"))
    assert changes(watch) == [("removed", 1), ("failed", 4)]
    assert changes(watch) == []
    done = subprocess.run(
        [sys.executable, "-m", "torchtitan_ext", "watch", url, "--steps", "0", "--json"], capture_output=True, text=True
    )
    told = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(line["kind"], line["step"]) for line in told] == [("found", 2), ("found", 3)], done.stderr
