"""Commits a save into a folder of an object store by one conditional put of ``.metadata``.

    __<rank>_<save id>.distcp    the file of a rank: no other save has this key
    .tte_index.<save id>
    .metadata                    names all of them; put last, if it is still the version that was there at the begin

These are the names of a save in place on a disk (``commit/commit.py``), so a copy of the folder is a checkpoint too. A
reader sees the old or the new ``.metadata``, and the files of each are there: replaced ones stay until a clean-up finds
that they were replaced long enough ago. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torchtitan_ext import clock
from torchtitan_ext.errors import CheckpointFailedError, SaveInProgressError, UnknownOutcomeError, only_printed, warn
from torchtitan_ext.storage.checkpoint_files import index_path, metadata_path
from torchtitan_ext.storage.commit.commit import refuse_old_weights
from torchtitan_ext.storage.commit.leftovers import save_id_of
from torchtitan_ext.storage.location import Location
from torchtitan_ext.storage.objects.folder import ConflictError, ObjectFolder, ObjectStamp
from torchtitan_ext.storage.objects.lease import LEASE_SECONDS, Lease

# How long the put of `.metadata` is tried again where the store does not say what became of it.
COMMIT_SECONDS = 300.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.2, 10.0


class RunningObjectSave:
    """A save that has a lease in its folder. Only the coordinator has one; not collective.

    Args:
        replaced: The version of ``.metadata`` that the save replaces; ``None`` if there was none.
    """

    def __init__(self, target: Location, save_id: str, replaced: ObjectStamp | None) -> None:
        self._target = target
        self._save_id = save_id
        self._replaced = replaced
        self._folder = ObjectFolder(target)
        self._may_be_committed = False
        self.replaces = replaced is not None
        self._lease = Lease(self._folder, save_id)

    def check_names(self, names: Sequence[str]) -> None:
        """Raises CheckpointFailedError if a rank wrote under the names of another save."""
        marks = {name for name in names if save_id_of(name) != self._save_id}
        if marks:
            raise CheckpointFailedError("save", {0: f"{', '.join(sorted(marks))} belong to another save"})

    def commit(self, index: bytes, metadata: bytes, *, sync: bool, confirm: Callable[[], None]) -> Location:
        """Makes the files of all ranks the checkpoint; the arguments are those of ``RunningSave.commit``.

        Returns:
            The place of ``.metadata``.

        Raises:
            SaveInProgressError: Another save of this checkpoint committed first, or a clean-up took this one for dead.
            UnknownOutcomeError: The store does not say whether it has the new ``.metadata``. Nothing was deleted.
            OSError: The store refuses the requests. The checkpoint is as it was.
        """
        self._folder.put(index_path(self._target, None, self._save_id).name, index)
        confirm()
        self._lease.decide()
        self.put(metadata)
        with only_printed():
            self._lease.release()
        return metadata_path(self._target, None)

    def put(self, metadata: bytes) -> None:
        """Puts ``.metadata`` until the store says that it has it, or another one.

        A request that seems to have failed may still arrive, so only the same one may follow it: whichever of them
        arrives first commits, and the others conflict with it.
        """
        name = metadata_path(self._target, None).name
        deadline = clock.now() + min(COMMIT_SECONDS, LEASE_SECONDS)
        pause, reason = _FIRST_PAUSE, ""
        self._may_be_committed = True
        while True:
            try:
                self._folder.put_if(name, metadata, self._replaced)
                return
            except (ConflictError, OSError) as error:
                if isinstance(error, PermissionError) and not reason:
                    self._may_be_committed = False
                    raise
                reason = str(error)
            try:
                found, is_ours = self._read_back(name, metadata)
            except OSError as error:
                reason = f"{reason}; {error}"
            else:
                if is_ours:
                    return
                if not _is_same(found, self._replaced):
                    self._may_be_committed = False
                    raise SaveInProgressError(str(self._target), "another save, which has committed first", "")
            if clock.now() > deadline:
                raise UnknownOutcomeError(str(self._target), self._save_id, reason)
            clock.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _read_back(self, name: str, metadata: bytes) -> tuple[ObjectStamp | None, bool]:
        """The version that is there now, and whether it is this save's."""
        try:
            found, stamp = self._folder.read_stamped(name)
        except FileNotFoundError:
            return None, False
        return stamp, found == metadata

    def abandon(self) -> None:
        """Deletes the files of a save that has failed on all ranks; none where ``.metadata`` may name them. What the
        store does not let go stays, with a warning, for a clean-up."""
        self._lease.stop()
        if self._may_be_committed:
            return
        try:
            self._folder.delete([name for name in self._folder.stamps() if save_id_of(name) == self._save_id])
            self._lease.release()
        except OSError as error:
            with only_printed():
                warn(f"{self._target}: files of the failed save {self._save_id} stay for gc ({error})")


def _is_same(found: ObjectStamp | None, expected: ObjectStamp | None) -> bool:
    return found is None if expected is None else expected.is_version(found)


def begin_object_save(target: Location, save_id: str) -> RunningObjectSave:
    """Notes what is at the target, and takes a lease for a save.

    Raises:
        FileExistsError: The target holds safetensors.
    """
    folder = ObjectFolder(target)
    refuse_old_weights(target, folder.stamps())
    return RunningObjectSave(target, save_id, folder.stamp(metadata_path(target, None).name))
