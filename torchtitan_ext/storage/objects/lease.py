"""Which saves into a folder of an object store are alive, and which of them commits: decided by conditional puts.

    .tte_save.<save id>.lease   put anew every minute as long as the save lives; never again once it is gone
    .tte_save.<save id>.fate    created once: "commit" by the save, before it puts .metadata, or "abandoned" by a
                                clean-up that has found the lease expired; who creates it goes on, the other gives up

Both are deleted when their save is over, the fate last: a save that slept through its own clean-up finds no lease.
Imports no torch.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import weakref
from functools import partial

from torchtitan_ext.errors import SaveInProgressError
from torchtitan_ext.storage.objects.folder import ConflictError, ObjectFolder
from torchtitan_ext.threads import BackgroundThread

RENEW_SECONDS = 60.0

LEASE_SECONDS = 900.0
"""A lease that was not renewed for so long has expired. No put of ``.metadata`` is tried for longer after a fate was
created."""

FATE_SECONDS = 2 * LEASE_SECONDS
"""The save of a fate that is older is gone, whatever it decided."""

COMMIT = b"commit"
ABANDONED = b"abandoned"


def lease_name(save_id: str) -> str:
    return f".tte_save.{save_id}.lease"


def fate_name(save_id: str) -> str:
    return f".tte_save.{save_id}.fate"


class Lease:
    """The lease of a save, renewed by a thread as long as the object lives, until ``release``."""

    def __init__(self, folder: ObjectFolder, save_id: str) -> None:
        self._folder = folder
        self._save_id = save_id
        self._released = threading.Event()
        owner = {"host": socket.gethostname(), "pid": os.getpid(), "since": time.time()}
        content = json.dumps(owner).encode()
        folder.put(lease_name(save_id), content)
        renew = partial(_renew, folder, lease_name(save_id), content, self._released, weakref.ref(self))
        BackgroundThread("torchtitan_ext.lease", renew, end=self._released.set)

    def decide(self) -> None:
        """Creates the fate: from now on no clean-up takes the save for dead.

        Raises:
            SaveInProgressError: A clean-up did so already.
        """
        fate = fate_name(self._save_id)
        try:
            self._folder.put_if(fate, COMMIT, None)
            is_alive = True
        except ConflictError:
            # The answer to an earlier try may have been lost.
            is_alive = self._folder.content(fate) == COMMIT
        if is_alive and self._folder.stamp(lease_name(self._save_id)) is None:
            self._folder.delete([fate])
            is_alive = False
        if not is_alive:
            owner = f"a clean-up, which has seen no sign of life of this save for {LEASE_SECONDS:.0f} seconds"
            raise SaveInProgressError(str(self._folder.location), owner, "")

    def stop(self) -> None:
        """Renews no more; the lease expires."""
        self._released.set()

    def release(self) -> None:
        """Deletes lease and fate."""
        self.stop()
        self._folder.delete([lease_name(self._save_id), fate_name(self._save_id)])


def _renew(
    folder: ObjectFolder, name: str, content: bytes, released: threading.Event, lease: weakref.ref[Lease]
) -> None:
    while not released.wait(RENEW_SECONDS) and lease() is not None:
        try:
            known = folder.stamp(name)
            if known is None:  # a clean-up has taken it
                return
            folder.put_if(name, content, known)
        except (ConflictError, OSError):
            continue  # the next one may succeed; the save itself meets the same error
