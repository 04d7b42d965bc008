"""What dead and replaced saves left in a step's folder of an object store, and the removal of steps.

No list shows which saves are alive, so each object says to which save it belongs. Of a save whose id ``.metadata`` does
not have,

- a lease that was renewed lately says that it is alive: its objects stay;
- with a lease that has expired, whoever notes a decision in it first goes on (``objects/lease.py``);
- without a lease it was replaced or has failed: its objects go when they, and the ``.metadata`` that replaced them, are
  older than ``grace_seconds``, so that readers of the replaced checkpoint can end.

Parts of uploads that were never completed are no objects, and no listing of ``obstore`` has them: a rule of the bucket
removes them (docs/use/object_stores.md). Imports no torch.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping
from datetime import datetime
from typing import NamedTuple

from torchtitan_ext import _core
from torchtitan_ext.errors import DamagedCheckpointError
from torchtitan_ext.storage.checkpoint_files import is_save_id
from torchtitan_ext.storage.commit.leftovers import is_checkpoint_name, save_id_of
from torchtitan_ext.storage.location import Location
from torchtitan_ext.storage.objects.folder import ConflictError, ObjectFolder, ObjectStamp
from torchtitan_ext.storage.objects.lease import (
    ABANDONED,
    COMMIT,
    COMMIT_LEASE_SECONDS,
    LEASE_SECONDS,
    decision_in,
    lease_name,
    noted,
)

GRACE_SECONDS = 3600.0
"""How long the objects of a replaced checkpoint stay for those that read it."""

# Saves of version 0.2 have a second object beside the lease.
_OF_SAVE = re.compile(r"\.tte_save\.([0-9a-f]{32})\.(?:lease|fate)")


class LeftSave(NamedTuple):
    """The objects of a save that is no checkpoint and not alive."""

    save_id: str
    names: tuple[str, ...]
    num_bytes: int


def left_saves(step: Location, now: datetime, grace_seconds: float = GRACE_SECONDS) -> list[LeftSave]:
    """The dead and replaced saves of which objects lie in the folder of a step; none where ``.metadata`` is damaged,
    since it does not say then which of them is the checkpoint. Deletes nothing.

    Args:
        now: The ``store_time``; for a listing the time of this machine will do.

    Raises:
        OSError: The store cannot be listed.
    """
    folder = ObjectFolder(step)
    found = folder.stamps()
    try:
        current = save_of_metadata(folder)
    except DamagedCheckpointError:
        return []
    by_save: dict[str, dict[str, ObjectStamp]] = {}
    for name, stamp in found.items():
        save_id = _owner_of(name)
        if save_id is not None and save_id != current:
            by_save.setdefault(save_id, {})[name] = stamp
    committed_at = found[".metadata"].put_at if ".metadata" in found else None
    return [
        LeftSave(save_id, tuple(sorted(objects)), sum(stamp.num_bytes for stamp in objects.values()))
        for save_id, objects in by_save.items()
        if _is_dead(save_id, objects, committed_at, now, grace_seconds)
    ]


def remove_left_save(step: Location, left: LeftSave) -> bool:
    """Deletes the objects of a save that ``left_saves`` has found; returns false if it lives after all."""
    folder, lease = ObjectFolder(step), lease_name(left.save_id)
    if lease in left.names and not _abandon(folder, lease, store_time(step)):
        return False
    # The save may have committed, and deleted its lease, since the folder was listed.
    if save_of_metadata(folder) == left.save_id:
        folder.delete([lease])
        return False
    folder.delete([name for name in left.names if name != lease])
    folder.delete([lease])  # last: a save that wakes up meanwhile finds in it that it is abandoned
    return True


def _abandon(folder: ObjectFolder, lease: str, now: datetime) -> bool:
    """Notes in an expired lease that its save is abandoned, or finds that it is over; false if the save lives."""
    try:
        found, stamp = folder.read_stamped(lease)
    except FileNotFoundError:
        return True
    seconds = COMMIT_LEASE_SECONDS if decision_in(found) == COMMIT else LEASE_SECONDS
    if _seconds(stamp.put_at, now) <= seconds:
        return False
    try:
        folder.put_if(lease, noted(found, decision=ABANDONED, at=now.timestamp()), stamp)
    except ConflictError:
        return False
    return True


def remove_object_step(step: Location) -> None:
    """Deletes a checkpoint; first what makes it one. Foreign objects stay."""
    folder, names = ObjectFolder(step), remaining(step)
    folder.delete([name for name in names if name == ".metadata"])
    folder.delete([name for name in names if name != ".metadata"])


def remaining(step: Location) -> list[str]:
    """The names of a checkpoint's objects that are there."""
    return [name for name in ObjectFolder(step).stamps() if is_checkpoint_name(name)]


def _owner_of(name: str) -> str | None:
    match = _OF_SAVE.fullmatch(name)
    return save_id_of(name) if match is None else match[1]


def save_of_metadata(folder: ObjectFolder) -> str | None:
    """The save that is the checkpoint; ``None`` without one, or one of stock's.

    Raises:
        DamagedCheckpointError: ``.metadata`` cannot be read.
    """
    content = folder.content(".metadata")
    if content is None:
        return None
    try:
        meta = _core.read_metadata_pickle(content).storage_meta
    except (ValueError, OverflowError) as error:
        raise DamagedCheckpointError(f"{folder.location / '.metadata'}: {error}") from None
    save_id = meta.get("save_id") if isinstance(meta, dict) else None
    return save_id if is_save_id(save_id) else None


def living_lease(found: Mapping[str, ObjectStamp], now: datetime) -> str | None:
    """The name of a lease among the objects of a folder that has not expired."""
    leases = [name for name in found if name.endswith(".lease") and _OF_SAVE.fullmatch(name)]
    return next((name for name in leases if _seconds(found[name].put_at, now) <= LEASE_SECONDS), None)


def _is_dead(
    save_id: str, objects: Mapping[str, ObjectStamp], committed_at: datetime | None, now: datetime, grace: float
) -> bool:
    lease = objects.get(lease_name(save_id))
    if lease is not None:
        return _seconds(lease.put_at, now) > LEASE_SECONDS
    newest = max(stamp.put_at for stamp in objects.values())
    since = newest if committed_at is None else max(newest, committed_at)
    return _seconds(since, now) > grace


def store_time(place: Location) -> datetime:
    """The time of the store's clock, by which its objects are dated: that of an object which is put, and deleted."""
    folder, name = ObjectFolder(place), f".tte_clock.{uuid.uuid4().hex}"
    folder.put(name, b"")
    stamp = folder.stamp(name)
    folder.delete([name])
    assert stamp is not None, f"{folder.location / name} is gone, please report"
    return stamp.put_at


def _seconds(begin: datetime, end: datetime) -> float:
    return (end - begin).total_seconds()
