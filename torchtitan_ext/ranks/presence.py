"""Who of a group over jobs is alive, whatever it does: a busy rank and a lost one are different findings.

The ranks of one job come to an operation together. Those of two jobs need not: a trainer may train for minutes while a
generator waits for it. So each process of such a group has a thread, as long as the group lives, that answers in the
store of the group whenever somebody asks.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from functools import partial

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from torchtitan_ext.ranks.groups import is_meeting, own_rank, ranks_of, store_of
from torchtitan_ext.threads import BackgroundThread

# Between two questions of a thread to the store: well below the seconds of a roll call.
_POLL_SECONDS = 0.5

_ASKED = "presence/asked"


def answer_for(group: dist.ProcessGroup) -> None:
    """From now on a thread of this process answers whoever asks, as long as the group lives. Not collective."""
    # A store of its own: another thread may wait in the shared one, and blocks it meanwhile.
    store = store_of(group).clone()  # type: ignore[attr-defined]
    ended = threading.Event()
    answer = partial(_answer, weakref.ref(group), store, own_rank(group), ended)
    BackgroundThread("torchtitan_ext.presence", answer, end=ended.set)


def _answer(group: weakref.ref[dist.ProcessGroup], store: Store, rank: int, ended: threading.Event) -> None:
    answered = 0
    try:
        while group() is not None:
            asked = store.add(_ASKED, 0)
            if asked != answered:
                store.set(_answer_of(rank), str(asked))
                answered = asked
            if ended.wait(_POLL_SECONDS):
                return
    except RuntimeError:  # the store is gone, and nobody can ask any more
        pass


def ask_who_is_here(group: object, store: Store) -> int:
    """Asks all ranks of a group over jobs; 0 for other groups. ``who_is_here`` has the answers a little later."""
    return store.add(_ASKED, 1) if is_meeting(group) else 0


def who_is_here(group: object, store: Store, asked: int) -> Sequence[int]:
    """The ranks that have answered this question, or a later one."""
    if asked == 0 or not is_meeting(group):
        return ()
    return [
        rank
        for rank in ranks_of(group)
        if store.check([_answer_of(rank)]) and int(store.get(_answer_of(rank))) >= asked
    ]


def _answer_of(rank: int) -> str:
    return f"presence/{rank}"
