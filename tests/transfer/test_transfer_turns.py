"""A transfer beside a save that is under way: on its group they take turns, on another group it does not wait."""

import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemWriter

import torchtitan_ext as tte
from torchtitan_ext.ranks import turns


class SlowWriter(FileSystemWriter):
    """Writes when it may."""

    def __init__(self, path: Path, may_write: threading.Event) -> None:
        super().__init__(path)
        self.may_write = may_write

    def write_data(self, plan: Any, planner: Any) -> Any:
        self.may_write.wait()
        return super().write_data(plan, planner)


def run_beside_a_save(rank: int, world_size: int, path: Path) -> None:
    source, target, other = {"w": torch.ones(3)}, {"w": torch.zeros(3)}, {"w": torch.zeros(3)}
    plan = tte.transfer.plan_reshard(source, target)
    plan_beside = tte.transfer.plan_reshard(source, other, dist.new_group())
    may_write = threading.Event()
    saved = tte.async_save(source, path, storage_writer=SlowWriter(path, may_write))
    assert plan_beside.run(version=1).version == 1 and other["w"].sum() == 3
    assert not saved.done()
    turn = turns._last[dist.group.WORLD]
    check = turn.check

    def let_it_write() -> None:
        """Who waits for the turn asks whether it is lost."""
        may_write.set()
        check()

    turn.check = let_it_write
    assert plan.run(version=2).version == 2 and target["w"].sum() == 3
    assert may_write.is_set(), "the run has waited for the save"
    saved.result()
    target["w"].zero_()
    tte.load(target, path)
    assert target["w"].sum() == 3


def test_a_run_beside_a_save(run_world: Any, tmp_path: Path) -> None:
    run_world(2, run_beside_a_save, tmp_path / "step")
