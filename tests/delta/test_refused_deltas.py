"""Changes that do not fit their target are refused by name on all ranks, and the target stays as it was."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from reference import same_bits
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import torchtitan_ext as tte
from torchtitan_ext.errors import (
    DamagedCheckpointError,
    LayoutError,
    MissingStateError,
    ReplicaMismatchError,
    ReshardError,
    StateRefusedError,
    WrongBaseError,
)


def rows(whole: torch.Tensor, world_size: int) -> DTensor:
    return distribute_tensor(whole.clone(), init_device_mesh("cpu", (world_size,)), [Shard(0)])


def columns(whole: torch.Tensor, world_size: int) -> DTensor:
    return distribute_tensor(whole.clone(), init_device_mesh("cpu", (world_size,)), [Shard(1)])


@contextmanager
def refused(error: type[Exception], match: str, *unchanged: DTensor) -> Iterator[None]:
    before = [tensor.to_local().clone() for tensor in unchanged]
    with pytest.raises(error, match=match):
        yield
    for tensor, bits in zip(unchanged, before, strict=True):
        assert same_bits(tensor.to_local(), bits)


def over_plans(rank: int, world_size: int) -> None:
    whole = torch.arange(48.0).view(6, 8)
    source, target = rows(whole, world_size), columns(whole * 0, world_size)
    base = tte.delta.Snapshot({"w": source}, version=3)
    plan = tte.transfer.plan_reshard({"w": source}, {"w": target})
    source.to_local()[0, 3] = -1
    changes = base.changes(version=5)
    assert (changes.base_version, changes.version, changes.num_changed) == (3, 5, 1)
    with refused(WrongBaseError, "lead from version 3 to 5, and the target holds no known version", target):
        plan.run(changes=changes)
    source.to_local()[0, 3] = 3.0 + 8 * (rank * 3)
    plan.run(version=2)
    with refused(WrongBaseError, r"holds version 2; .*run the plan without changes and with version=5", target):
        plan.run(changes=changes)
    plan.run(version=3)
    with refused(ReplicaMismatchError, r"changes: were not given on rank\(s\) 1, which have a part", target):
        plan.run(changes=changes if rank == 0 else None)
    with refused(ReplicaMismatchError, "changes: lead from version 3 to 5 on rank 0, 3 to 6 on rank 1", target):
        plan.run(changes=changes if rank == 0 else base.changes(version=6))
    source.to_local()[0, 3] = -1
    changes = base.changes(version=5)
    if rank == 1:
        target.to_local()[0, 0] += 1  # nothing that changed: not seen, but by a proof
        target.to_local()[3, 7 - target.to_local().shape[1]] += 0
    plan.run(changes=changes)
    assert plan.version == 5
    base.advance()
    source.to_local()[2, 1] = 7
    changes = base.changes()
    if rank == 0:
        target.to_local()[2, 1] = 12345
    with refused(WrongBaseError, "w: of the target has other bits than the changes replace, on rank 0", target):
        plan.run(changes=changes)
    assert plan.version == 5, "nothing has changed"
    plan.run(version=6, verify=True)
    with pytest.raises(ValueError, match="got version= beside changes="):
        plan.run(changes=changes, version=6)
    with pytest.raises(ValueError, match=r"call changes\(\) first"):
        tte.delta.Snapshot({"w": source}).advance()
    half = {"w": columns(whole.bfloat16(), world_size)}
    casting = tte.transfer.plan_reshard({"w": source}, half, cast="allow")
    casting.run(version=5)
    with refused(StateRefusedError, "w: is cast or mapped on its way, which changes cannot follow", half["w"]):
        casting.run(changes=changes)
    other = tte.transfer.plan_reshard({"w": columns(whole, world_size)}, {"w": rows(whole, world_size)})
    with refused(WrongBaseError, "changes: are of other tensors than the source that was planned"):
        other.run(changes=changes)


def test_over_plans(run_world: Any) -> None:
    run_world(2, over_plans)


def snapshots(rank: int, world_size: int) -> None:
    state: dict[str, Any] = {"w": rows(torch.ones(4, 2), world_size), "step": 3}
    with pytest.raises(StateRefusedError, match="step: is no tensor, and deltas have tensors only"):
        tte.delta.Snapshot(state)
    del state["step"]
    base = tte.delta.Snapshot(state, version=4)
    with pytest.raises(ValueError, match="got version=4, expected more than 4"):
        base.changes(version=4)
    other = {"w": columns(torch.ones(4, 2), world_size)}
    with pytest.raises(ReshardError, match="other tensors or layouts than the snapshot"):
        base.changes(other)
    again = {"w": rows(torch.full((4, 2), 2.0), world_size)}
    assert base.changes(again).num_changed == 4, "the same tensors in other memory"
    replicated = distribute_tensor(torch.ones(4), init_device_mesh("cpu", (world_size,)), [Replicate()])
    base = tte.delta.Snapshot({"r": replicated})
    replicated.to_local()[rank] = 9
    with pytest.raises(ReplicaMismatchError, match="r: has replicas that differ, before or after"):
        tte.delta.save(base.changes(), "/nonexistent/changes.safetensors")


def test_snapshots(run_world: Any) -> None:
    run_world(2, snapshots)


def through_files(rank: int, world_size: int, directory: Path) -> None:
    whole = torch.arange(48.0).view(6, 8)
    source, target = rows(whole, world_size), columns(whole, world_size)
    bias, target_bias = rows(torch.zeros(600), world_size), rows(torch.zeros(600), world_size)
    base = tte.delta.Snapshot({"w": source, "b": bias}, version=1)
    source.to_local()[1, 2:4] = -5
    bias.to_local()[:200] = 4
    path = directory / "delta.safetensors"
    changes = base.changes()
    assert changes.whole_keys == ["b"], "most of it changed"
    tte.delta.save(changes, path)
    saved = tte.delta.load(path)
    assert (saved.base_version, saved.version, saved.num_changed) == (1, 2, 2 * world_size + 300 * world_size)
    state = {"w": target, "b": target_bias}
    with refused(WrongBaseError, "lead from version 1 to 2, and the state is of version 0; apply first what", target):
        tte.delta.apply(state, saved, version=0)
    with refused(MissingStateError, "b: has changed, and no rank has it", target):
        tte.delta.apply({"w": target}, saved)
    with refused(ReshardError, r"b: has shape \(600,\) in the changes, \(599,\) in the state", target):
        tte.delta.apply({"w": target, "b": rows(torch.zeros(599), world_size)}, saved)
    with refused(ReshardError, "b: is float32 in the changes, bfloat16 in the state", target):
        tte.delta.apply({"w": target, "b": target_bias.bfloat16()}, saved)
    with refused(ReplicaMismatchError, "verify: is 'all' on rank 0, 'changed' on rank", target):
        tte.delta.apply(state, saved, verify="all" if rank == 0 else "changed")
    if rank == 1:
        target_bias.to_local()[-1] = 1
    with refused(WrongBaseError, "b: has other bits than the changes were made from", target, target_bias):
        tte.delta.apply(state, saved)
    target_bias.to_local().zero_()
    target.to_local()[0, 0] += 1
    with refused(WrongBaseError, "w: has other bits than the changes were made from", target, target_bias):
        tte.delta.apply(state, saved, verify="all")
    target.to_local()[0, 0] -= 1
    tte.delta.apply(state, saved, version=1, verify="all")
    assert same_bits(target.full_tensor(), source.full_tensor())
    assert same_bits(target_bias.to_local(), bias.to_local())
    with refused(WrongBaseError, "w: has other bits than the changes were made from", target, target_bias):
        tte.delta.apply(state, saved)


def test_through_files(run_world: Any, tmp_path: Path) -> None:
    run_world(2, through_files, tmp_path)


def incomplete(rank: int, world_size: int, directory: Path) -> None:
    """Each rank that has a part gives it, or another rank has the same part; ``silent`` ranks give none."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    state: dict[str, Any] = {"w": distribute_tensor(torch.zeros(6, 8), mesh, [Replicate(), Shard(0)])}
    state["plain"] = torch.zeros(3)
    if rank < 2:
        state["stage 0"] = distribute_tensor(torch.zeros(5), mesh["shards"], [Shard(0)])
    if rank == 3:
        state["stage 1"] = torch.zeros(())
    base = tte.delta.Snapshot(state, version=1)
    for tensor in state.values():
        (tensor.to_local() if isinstance(tensor, DTensor) else tensor).fill_(3)
    changes = base.changes()
    path = directory / "delta.safetensors"

    def save(*silent: int) -> None:
        tte.delta.save(None if rank in silent else changes, path)

    for silent, match in {
        (0,): r"stage 0: rank\(s\) 1 gave changes that leave out \[0\]; rank\(s\) 0 gave None: pass there what",
        (0, 1): r"stage 0: no rank gave changes of it; rank\(s\) 0, 1 gave None",
        (1, 3): r"w: rank\(s\) 0, 2 gave changes that leave out \[3, 0\]; rank\(s\) 1, 3 gave None",
        (3,): r"stage 1: no rank gave changes of it; rank\(s\) 3 gave None",
    }.items():
        with refused(LayoutError, match):
            save(*silent)
        assert not path.exists()
    for members in ([0, 1], [1, 2, 3]):  # groups without some of the ranks
        group = dist.new_group(members)
        if rank in members:
            with refused(LayoutError, r"stage .: .*; save with a group of all ranks that hold it"):
                tte.delta.save(changes, path, group=group)
    target = {name: torch.zeros(tensor.shape) for name, tensor in state.items()}
    for silent in ((2,), ()):
        save(*silent)
        for tensor in target.values():
            tensor.zero_()
        tte.delta.apply(target, tte.delta.load(path), verify="all")
        assert all(bool((tensor == 3).all()) for tensor in target.values())
    if rank == 3:
        tensor = state["w"].to_local()
        tensor[0, 0] = 4
    changes = base.changes()
    with refused(ReplicaMismatchError, "w: has replicas that differ, before or after"):
        save(2)  # rank 3 has the rows of rank 1


def test_changes_that_a_rank_keeps_back(run_world: Any, tmp_path: Path) -> None:
    run_world(4, incomplete, tmp_path)


def every_byte(rank: int, world_size: int, directory: Path) -> list[int]:
    """The bytes of a file of which a flipped bit is not seen."""
    state = {"w": torch.arange(64, dtype=torch.bfloat16), "b": torch.zeros(8)}
    base = tte.delta.Snapshot(state)
    state["w"][[3, 9, 40]] = 7
    state["b"].fill_(2)
    path, damaged = directory / "whole.safetensors", directory / "damaged.safetensors"
    tte.delta.save(base.changes(), path)
    content = path.read_bytes()
    unseen = []
    for byte in range(len(content)):
        flipped = bytearray(content)
        flipped[byte] ^= 1 << byte % 8
        damaged.write_bytes(flipped)
        try:
            tte.delta.load(damaged)
        except DamagedCheckpointError:
            continue
        unseen.append(byte)
    for length in range(len(content)):
        damaged.write_bytes(content[:length])
        with pytest.raises(DamagedCheckpointError):
            tte.delta.load(damaged)
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    harmless = content.index(b'"format"')
    assert "format" in header["__metadata__"]
    return [byte for byte in unseen if not harmless <= byte < harmless + len('"format":"pt"')]


def test_flipped_bits_and_cut_files(run_world: Any, tmp_path: Path) -> None:
    assert run_world(1, every_byte, tmp_path) == [[]]


def one_rank_sees_damage(rank: int, world_size: int, directory: Path) -> None:
    weight = rows(torch.zeros(8, 8), world_size)
    base = tte.delta.Snapshot({"w": weight})
    weight.to_local()[0, :2] = 1
    tte.delta.save(base.changes(), directory / "0.safetensors")
    if rank == 1:
        content = bytearray((directory / "0.safetensors").read_bytes())
        content[-1] ^= 1
        (directory / "1.safetensors").write_bytes(content)
    with pytest.raises(DamagedCheckpointError, match="1.safetensors: the new elements of w are not those that were w"):
        tte.delta.load(directory / ("1.safetensors" if rank else "0.safetensors"))
    # A copy on the disk of each host is fine.
    shutil.copy(directory / "0.safetensors", directory / f"copy_{rank}.safetensors")
    assert tte.delta.load(directory / f"copy_{rank}.safetensors").num_changed == 2 * world_size


def test_one_rank_sees_damage(run_world: Any, tmp_path: Path) -> None:
    run_world(2, one_rank_sees_damage, tmp_path)
