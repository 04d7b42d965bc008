"""verl's checkpoint engine over transfers and deltas: its registry and base class, driven as its manager does it,
without workers of ray."""

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from reference import same_bits

from torchtitan_ext.errors import WrongBaseError

pytest.importorskip(
    "verl.checkpoint_engine.base", reason="verl is in no environment with the other clients", exc_type=ImportError
)

JOBS = {"actor": 3, "rollout": 2}


def weights_of(version: int, *, more: bool = False) -> dict[str, torch.Tensor]:
    """Of version 1 and later, one element of each differs from the version before."""
    shapes = {"a": (40, 5), "b": (7,), "c": (1,), "d": (31, 3), **({"e": (2, 2)} if more else {})}
    drawn = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(shape, generator=drawn).bfloat16() for name, shape in shapes.items()}
    for step in range(1, version + 1):
        for weight in weights.values():
            weight.view(-1)[7 * step % weight.numel()] = step
    return weights


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


class Worker:
    """One process of the actor or the rollout, which builds the topology as ``CheckpointEngineManager`` would."""

    def __init__(self, position: int, address: str, folder: Path) -> None:
        from verl.checkpoint_engine.base import CheckpointEngineRegistry

        import torchtitan_ext.integrations.verl  # noqa: F401, registers itself

        self.job = "actor" if position < JOBS["actor"] else "rollout"
        self.position = position
        self.rank = position if self.job == "actor" else position - JOBS["actor"]
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(str(folder / self.job), JOBS[self.job]),
            rank=self.rank,
            world_size=JOBS[self.job],
        )
        self.all = dist.FileStore(str(folder / "all"), sum(JOBS.values()))
        self.num_syncs = 0
        self.engine: Any = self.new_engine(CheckpointEngineRegistry, address)

    def new_engine(self, registry: Any, address: str) -> Any:
        kinds = {"is_master": self.rank == 0} if self.job == "actor" else {}
        engine = registry.new("torchtitan_ext", bucket_size=1 << 20, timeout_seconds=60, **kinds)
        if kinds.get("is_master"):
            engine._address = address  # ray's nodes know no address without ray
        return engine

    def sync(self, weights: dict[str, torch.Tensor]) -> Any:
        """What the actor's ranks return, or what the rollout's yield."""
        self.num_syncs += 1
        own = self.engine.prepare()
        self.all.set(f"{self.num_syncs}/{self.position}", repr(own))
        metadata = [eval(self.all.get(f"{self.num_syncs}/{other}")) for other in range(sum(JOBS.values()))]
        sides = dict(zip(JOBS, self.engine.build_topology(*JOBS.values(), metadata), strict=True))
        assert all(len(values) == JOBS[job] for job, side in sides.items() for values in side.values())
        self.engine.init_process_group(**{name: values[self.rank] for name, values in sides[self.job].items()})
        try:
            if self.job == "actor":
                return asyncio.run(self.engine.send_weights(iter(weights.items())))["checkpoint_engine/bytes_sent"]
            return asyncio.run(received(self.engine))
        finally:
            self.engine.finalize()


async def received(engine: Any) -> dict[str, torch.Tensor]:
    return {name: weight async for name, weight in engine.receive_weights()}


def actor_and_rollout(position: int, world_size: int, address: str, folder: Path) -> list[float]:
    worker = Worker(position, address, folder)
    bytes_sent = []

    def sync(weights: dict[str, torch.Tensor]) -> None:
        result = worker.sync(weights)
        if worker.job == "actor":
            bytes_sent.append(result)
        else:
            assert result.keys() == weights.keys()
            assert [name for name, weight in weights.items() if not same_bits(result[name], weight)] == []

    for version in range(3):
        sync(weights_of(version))
    group = worker.engine._group
    for weight in worker.engine._state.values() if worker.job == "rollout" else ():
        weight.fill_(9)
    with pytest.raises(WrongBaseError, match="other bits than the changes replace"):
        sync(weights_of(3))
    sync(weights_of(3))
    assert worker.engine._group is not group, "after an error all meet again"
    group = worker.engine._group
    sync(weights_of(4, more=True))
    sync(weights_of(5, more=True))
    assert worker.engine._group is group
    dist.destroy_process_group()
    return bytes_sent


def test_the_rollout_gets_all_weights_and_then_what_changed(run_world: Any, tmp_path: Path) -> None:
    """After an error, and where there are other weights than before, all of them are sent again."""
    results = run_world(5, actor_and_rollout, free_address(), tmp_path, process_group=False)
    first, second, third, after_error, more, last = map(sum, zip(*results[: JOBS["actor"]], strict=True))
    assert first == after_error == 2 * sum(weight.nbytes for weight in weights_of(0).values())
    assert more == first + 2 * 8
    assert 0 < second < first / 2
    assert 0 < third < first / 2
    assert 0 < last < first / 2
