"""Which saves into a folder of an object store are alive, and which of them commits: decided by conditional puts.

    .tte_save.<save id>.lease   put anew every minute as long as the save lives; never again once it is gone

The save notes in it that it commits, before it puts ``.metadata``; a clean-up that has found it expired notes that the
save is abandoned. Each of them replaces only the version that it has read, so one of them goes on, and the other gives
up. It is deleted last: a save that slept through its own clean-up finds no lease. Imports no torch.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import weakref
from functools import partial

from torchtitan_ext import clock
from torchtitan_ext.errors import SaveInProgressError
from torchtitan_ext.storage.objects.folder import ConflictError, ObjectFolder
from torchtitan_ext.threads import BackgroundThread

RENEW_SECONDS = 60.0

LEASE_SECONDS = 900.0
"""A lease that was not renewed for so long has expired. No put of ``.metadata`` is tried for longer after the save has
noted that it commits."""

COMMIT_LEASE_SECONDS = 2 * LEASE_SECONDS
"""The same of a lease in which the save has noted that it commits."""

COMMIT = "commit"
ABANDONED = "abandoned"

_MAX_TRIES = 3


def lease_name(save_id: str) -> str:
    return f".tte_save.{save_id}.lease"


def decision_in(lease: bytes) -> str | None:
    """``COMMIT`` or ``ABANDONED``, if a lease says so."""
    decision = json.loads(lease).get("decision")
    return None if decision is None else str(decision)


def noted(lease: bytes, **notes: str | float) -> bytes:
    """A lease with further notes. Each put of it must have other bytes: tags of stores are hashes."""
    return json.dumps({**json.loads(lease), **notes}).encode()


class Lease:
    """The lease of a save, renewed by a thread as long as the object lives, until ``decide`` or ``release``."""

    def __init__(self, folder: ObjectFolder, save_id: str) -> None:
        self._folder = folder
        self._name = lease_name(save_id)
        self._released = threading.Event()
        owner = {"host": socket.gethostname(), "pid": os.getpid(), "since": clock.wall_seconds()}
        folder.put(self._name, json.dumps(owner).encode())
        renew = partial(_renew, folder, self._name, self._released, weakref.ref(self))
        BackgroundThread("torchtitan_ext.lease", renew, end=self._released.set)

    def decide(self) -> None:
        """Notes that the save commits: from now on no clean-up takes it for dead.

        Raises:
            SaveInProgressError: A clean-up did so already.
        """
        self.stop()
        for _ in range(_MAX_TRIES):
            try:
                found, known = self._folder.read_stamped(self._name)
            except FileNotFoundError:
                break
            decision = decision_in(found)
            if decision is not None:
                if decision == COMMIT:  # by an earlier try, whose answer was lost
                    return
                break
            try:
                self._folder.put_if(self._name, noted(found, decision=COMMIT), known)
                return
            except ConflictError:  # with a clean-up, with the thread, or with an earlier try
                continue
        owner = f"a clean-up, which has seen no sign of life of this save for {LEASE_SECONDS:.0f} seconds"
        raise SaveInProgressError(str(self._folder.location), owner, "")

    def stop(self) -> None:
        """Renews no more; the lease expires."""
        self._released.set()

    def release(self) -> None:
        """Deletes the lease."""
        self.stop()
        self._folder.delete([self._name])


def _renew(folder: ObjectFolder, name: str, released: threading.Event, lease: weakref.ref[Lease]) -> None:
    while not clock.wait(released, RENEW_SECONDS) and lease() is not None:
        try:
            found, known = folder.read_stamped(name)
            if decision_in(found) is not None:
                return
            folder.put_if(name, noted(found, renewed=clock.wall_seconds()), known)
        except FileNotFoundError:  # a clean-up has taken it
            return
        except (ConflictError, OSError):
            continue  # the next one may succeed; the save itself meets the same error
