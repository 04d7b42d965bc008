"""Which stores can be asked, and what is said of one that is lost."""

from pathlib import Path

import pytest
import torch.distributed as dist

from torchtitan_ext.ranks.stores import can_be_asked, give_back_clone, take_clone, where_the_store_was


class Relay(dist.Store):
    """One that is written in Python, without ``clone``."""


def test_where_a_store_was(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    path = str(tmp_path / "store")
    file = dist.PrefixStore("default", dist.FileStore(path, 1))
    assert where_the_store_was(file) == (f"the store of the process groups, the file {path}, is lost", ())
    hosted = dist.HashStore()
    assert where_the_store_was(hosted) == ("the store of the process groups, which rank 0 hosts, is lost", (0,))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    by_agent = "the store of the process groups, which the launcher's agent on the first node hosts, is lost"
    assert where_the_store_was(hosted) == (by_agent, ())


def test_which_can_be_asked() -> None:
    assert can_be_asked(dist.HashStore()) and can_be_asked(dist.PrefixStore("default", dist.HashStore()))
    assert not can_be_asked(None) and not can_be_asked(Relay())


def test_clones_are_kept_for_the_next_thread(tmp_path: Path) -> None:
    group, store = dist.ProcessGroup(0, 1), dist.FileStore(str(tmp_path / "store"), 1)
    first, second = take_clone(group, store), take_clone(group, store)
    give_back_clone(group, first)
    assert take_clone(group, store) is first
    give_back_clone(group, second)
    assert take_clone(dist.ProcessGroup(0, 1), store) is not second
