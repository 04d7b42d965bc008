"""The steps of a run in an object store, and what dead and replaced saves left there. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import NamedTuple

from torchtitan_ext import _core, clock
from torchtitan_ext.errors import DamagedCheckpointError
from torchtitan_ext.storage.checkpoint_files import index_path, shown
from torchtitan_ext.storage.commit.branch import HEAD_BYTES
from torchtitan_ext.storage.location import Location
from torchtitan_ext.storage.objects.folder import ObjectFolder
from torchtitan_ext.storage.objects.leftovers import (
    LeftSave,
    left_saves,
    living_lease,
    save_of_metadata,
)
from torchtitan_ext.storage.runs.listing import ListedStep, with_notes
from torchtitan_ext.storage.runs.remote_steps import remote_steps


class LeftInStep(NamedTuple):
    """A save that is no checkpoint any more, in the folder of a step."""

    step: Location
    left: LeftSave


def object_steps(run: Location, pattern: str | None = None) -> dict[int, Location]:
    """The folders of a run's steps, also of those that have not finished."""
    steps = remote_steps(str(run), pattern)
    return {number: Location(url) for number, url in sorted({**steps.unfinished, **steps.finished}.items())}


def list_object_steps(steps: Mapping[int, Location]) -> list[ListedStep]:
    """As ``list_steps``, of ``object_steps``. Lists each folder, and reads ``.metadata`` and the head of its index."""
    listed = [_list_object_step(number, step) for number, step in steps.items()]
    return [step for step in listed if step is not None]


def left_in_steps(steps: Mapping[int, Location], now: datetime) -> list[LeftInStep]:
    """What dead and replaced saves left in ``object_steps``; ``now`` as for ``left_saves``."""
    return [LeftInStep(step, left) for step in steps.values() for left in left_saves(step, now)]


def _list_object_step(number: int, step: Location) -> ListedStep | None:
    """One of ``list_object_steps``; ``None`` where the folder has no objects any more."""
    folder = ObjectFolder(step)
    found = folder.stamps()
    if not found:  # some stores list folders of which all objects were deleted
        return None
    metadata, lease = found.get(".metadata"), living_lease(found, clock.utc_now())
    owner = {} if lease is None else json.loads(folder.read(lease))
    saver = f"process {owner['pid']} on {owner['host']}" if owner else None
    listed = ListedStep(
        number,
        "finished" if metadata is not None else "saving" if saver else "not finished",
        None if metadata is None else "dcp",
        sum(stamp.num_bytes for stamp in found.values()),
        None if metadata is None else metadata.put_at.timestamp(),
        None,
        saver,
    )
    sizes = {name: stamp.num_bytes for name, stamp in found.items()}
    return listed if metadata is None else with_notes(listed, _index_head(folder), sizes)


def _index_head(folder: ObjectFolder) -> _core.Index | None:
    """The head of the index of the checkpoint in a folder; ``None`` where it is one of stock's, or damaged."""
    try:
        save_id = save_of_metadata(folder)
        if save_id is None:
            return None
        path = index_path(folder.location, None, save_id)
        return _core.parse_index_head(bytes(folder.read_range(path.name, 0, HEAD_BYTES)[0]), shown(path))
    except (DamagedCheckpointError, OSError, ValueError):
        return None
