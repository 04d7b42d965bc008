"""Real jobs that acknowledge samples in any order and are killed at any moment, over ``tte.save`` and ``tte.load``."""

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from extent import SOAK
from torch.distributed.device_mesh import init_device_mesh

import torchtitan_ext as tte
from torchtitan_ext.elastic import ElasticDataLoader, ElasticPolicy, TooManyInFlightError, TrainState
from torchtitan_ext.errors import StateRefusedError

NUM_SAMPLES = 61


def run_job(
    rank: int, world_size: int, path: Path, step: int, seed: int, num_actions: int, options: dict[str, Any]
) -> tuple[list[tuple[int, int]], int, dict[str, Any]]:
    """Goes on from a step, acts at random and is gone: without actions, trains until the end of the epoch.

    Returns (id, sample) of all that this rank trained up to its last checkpoint, its step, and the common entry.
    """
    common, own = random.Random(seed), random.Random(f"{seed} {rank}")
    global_batch_size = common.randint(world_size, 2 * world_size)
    loader = ElasticDataLoader(
        range(NUM_SAMPLES),
        global_batch_size=global_batch_size,
        dp_rank=rank,
        dp_size=world_size,
        uneven=True,
        max_in_flight=common.randint(2, 12),
        collate_fn=list,
        seed=3,
        **options,
    )
    train_state = TrainState()
    state = {"dataloader": loader, "train_state": train_state}
    if step:
        report = tte.load(state, path / str(step), policy=ElasticPolicy())
        assert loader.samples_seen == train_state.samples_seen, report
    samples: dict[int, int] = {}
    trained: list[tuple[int, int]] = []
    safe: list[tuple[int, int]] = []
    num_counted = 0

    def open_ids() -> list[int]:
        return sorted(samples.keys() - dict(trained).keys())

    def acknowledge(ids: list[int]) -> None:
        loader.acknowledge(ids)
        trained.extend((id_, samples[id_]) for id_ in ids)

    def save() -> None:
        nonlocal num_counted, step
        count = torch.tensor([len(trained)])
        dist.all_reduce(count)
        train_state.advance(samples=int(count) - num_counted)
        num_counted = int(count)
        step += 1
        tte.save(state, path / str(step))
        safe[:] = trained

    def take() -> Any:
        try:
            return next(batches, None)
        except TooManyInFlightError:
            # Ranks step together, so this one makes room: the iterator goes on.
            acknowledge(open_ids())
            return next(batches, None)

    batches = iter(loader)
    for _ in range(num_actions or 10_000):
        action = common.choice(["step", "step", "acknowledge", "save"]) if num_actions else "step"
        if action == "save":
            save()
        elif action == "step":
            batch = take()
            if batch is None and not num_actions:
                break
            if batch is None:
                batches = iter(loader)
                continue
            samples.update(zip(loader.sample_ids.tolist(), batch[: len(batch) - loader.num_padding], strict=True))
        else:
            ids = open_ids()
            acknowledge(own.sample(ids, own.randint(0, len(ids))))
    if not num_actions:
        acknowledge(open_ids())
        save()
    return safe, step, loader.state_dict()["loader"][0]


def check_chain(run_world: Any, path: Path, worlds: list[int], seed: int, **options: Any) -> None:
    trained: Counter[int] = Counter()
    samples: dict[int, int] = {}
    step, position = 0, {}
    for job, world_size in enumerate([*worlds, 1]):
        num_actions = random.Random(f"{seed} {job}").randint(1, 12) if job < len(worlds) else 0
        ranks = run_world(world_size, run_job, path, step, 1000 * seed + job, num_actions, options)
        _, step, position = ranks[0]
        assert all(saved == step and common == position for _, saved, common in ranks)
        for safe, _, _ in ranks:
            trained.update(id_ for id_, _ in safe)
            assert all(samples.setdefault(id_, sample) == sample for id_, sample in safe)
    assert set(trained.values()) == {1}, "a sample was trained twice"
    # The last job ended its epoch: all samples of all epochs were trained, but for those that "drop" has dropped.
    assert len(trained) + position["dropped"] == position["epoch"] * NUM_SAMPLES
    assert position["samples_seen"] == len(trained)
    assert options.get("last") != "pad" or position["dropped"] == 0


@pytest.mark.sampled(0.34)
@pytest.mark.parametrize(("num_workers", "worlds"), [(0, [2, 4, 8, 4, 2, 3, 1]), (1, [2, 1]), (2, [1, 2])])
def test_the_chain_of_worlds(run_world: Any, tmp_path: Path, num_workers: int, worlds: list[int]) -> None:
    check_chain(run_world, tmp_path, worlds, seed=1, num_workers=num_workers, last="pad")


@pytest.mark.parametrize("seed", range(2 * SOAK))
def test_killed_at_random_moments(run_world: Any, tmp_path: Path, seed: int) -> None:
    options = [{"last": "drop"}, {"last": "pad"}][seed % 2]
    worlds = random.Random(seed).choices([1, 2, 3, 4, 5], k=10)
    check_chain(run_world, tmp_path, worlds, seed, **options)


def tensor_ranks(rank: int, world_size: int, path: Path, load: bool) -> list[int]:
    """Two data-parallel ranks times two tensor-parallel ones; stock's planner refuses other ranks' open samples."""
    mesh = init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("dp", "tp"))
    dp_rank = mesh.get_local_rank("dp")
    loader = ElasticDataLoader(
        range(20),
        global_batch_size=4,
        dp_rank=dp_rank,
        dp_size=world_size // 2,
        uneven=True,
        max_in_flight=20,
        shuffle=False,
        collate_fn=list,
    )
    if not load:
        batches = iter(loader)
        next(batches), next(batches)
        loader.acknowledge([dp_rank])
        tte.save({"dataloader": loader}, path)
        with pytest.raises((StateRefusedError, RuntimeError), match="all ranks give them again together"):
            dcp.load({"dataloader": loader}, checkpoint_id=path)
        tte.load({"dataloader": loader}, path)  # reads the entries of all ranks, without a policy too
        return []
    report = tte.load({"dataloader": loader}, path, policy=ElasticPolicy())
    assert "gives 6 samples again that were in flight" in str(report)
    return [sample for _, batch in zip(range(2), loader, strict=False) for sample in batch]


def test_tensor_parallel_ranks_hold_the_same(run_world: Any, tmp_path: Path) -> None:
    run_world(4, tensor_ranks, tmp_path / "step", False)
    for world_size in (4, 6):
        ranks = run_world(world_size, tensor_ranks, tmp_path / "step", True)
        assert ranks[::2] == ranks[1::2]
        assert sorted(sample for served in ranks[::2] for sample in served) == list(range(2, 10))
