"""States that are easy to get wrong: tied and shared memory, replaced memory, values without a place, odd groups and
arguments that differ between ranks."""

import types
from typing import Any

import pytest
import torch
import torch.distributed as dist
from reference import same_bits
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

import torchtitan_ext as tte
from torchtitan_ext.errors import LayoutError, ReplicaMismatchError, ReshardError, StateRefusedError


def tied_model() -> nn.Sequential:
    model = nn.Sequential(nn.Embedding(6, 2), nn.Linear(2, 6, bias=False))
    model[1].weight = model[0].weight
    return model


def tied(rank: int, world_size: int) -> None:
    source, target = tied_model(), tied_model()
    tte.reshard(source if rank == 0 else None, target, verify=True)
    dist.broadcast(source[0].weight.data, 0)
    assert same_bits(target[1].weight, source[0].weight)
    mesh = init_device_mesh("cpu", (world_size,))
    sharded = distribute_tensor(torch.zeros(1, 2), mesh, [Shard(0)])  # empty on all ranks but the first
    result = tte.reshard({"a": torch.ones(1, 2)}, {"a": sharded, "b": sharded}, verify=True)
    assert bool((sharded.to_local() == 1).all()), "a source that has one of the names is enough"
    assert (result.bytes_received, result.bytes_kept) == (0, 8 if rank == 0 else 0)
    untied = {"a": torch.zeros(1, 2), "b": torch.zeros(1, 2)}
    tte.reshard({"a": sharded, "b": sharded}, untied, verify=True)
    assert untied["a"].sum() == untied["b"].sum() == 2
    # Tied on one rank alone: each rank has what it asks for.
    own = {"a": torch.zeros(1, 2)}
    own["b"] = own["a"] if rank == 0 else torch.zeros(1, 2)
    tte.reshard({"a": sharded, "b": sharded}, own, verify=True)
    assert own["a"].sum() == own["b"].sum() == 2


def test_tied_tensors_are_filled_once(run_world: Any) -> None:
    run_world(3, tied)


def shared(rank: int, world_size: int) -> None:
    memory = torch.arange(8.0)
    with pytest.raises(StateRefusedError, match="w: cannot be filled: it shares memory with w of the source; pass a c"):
        tte.transfer.plan_reshard({"w": memory}, {"w": memory} if rank == 1 else None)
    with pytest.raises(StateRefusedError, match="w: cannot be filled: it shares memory with w of the source"):
        tte.transfer.plan_reshard({"w": memory[:4]}, {"w": memory[3:7]})
    source = {"v": torch.ones(4), "w": torch.ones(4)}
    with pytest.raises(StateRefusedError, match="v: cannot be filled: it shares memory with w of the target"):
        tte.transfer.plan_reshard(source, {"v": memory[:4], "w": memory[1:5]})
    assert same_bits(memory, torch.arange(8.0))
    tte.reshard({"w": memory[0::2]}, {"w": memory[1::2]}, verify=True)
    assert memory.tolist() == [0, 0, 2, 2, 4, 4, 6, 6]


def test_memory_that_is_shared_is_refused(run_world: Any) -> None:
    run_world(2, shared)


# In the memory of four floats, row by row: arguments of the method, and what the message says.
VIEWS: dict[str, tuple[tuple[Any, ...], str]] = {
    "view": ((torch.int32,), r"torch.int32 of shape \(2, 2\)"),
    "t": ((), r"torch.float32 of shape \(2, 2\) and strides \(1, 2\)"),
    "flatten": ((), r"torch.float32 of shape \(4,\)"),
}


def replaced(rank: int, world_size: int) -> None:
    source, target = nn.Linear(2, 2), nn.Linear(2, 2)
    plan = tte.transfer.plan_reshard(source, target)
    plan.run()
    if rank == 1:
        target.weight.data = torch.zeros(2, 2)
    with pytest.raises(ReshardError, match="target: its tensors have other memory"):
        plan.run()
    assert rank == 0 or not target.weight.any()
    mesh = init_device_mesh("cpu", (world_size,))
    sharded = distribute_tensor(torch.zeros(4), mesh, [Shard(0)])
    plan = tte.transfer.plan_reshard({"w": torch.ones(4)}, {"w": sharded})
    sharded._local_tensor = torch.zeros(2)
    with pytest.raises(ReshardError, match="target: its tensors have other memory"):
        plan.run()
    for view, what in VIEWS.items():
        source, filled = torch.arange(4.0).view(2, 2), {"w": torch.zeros(2, 2)}
        plan = tte.transfer.plan_reshard({"w": source}, filled)
        plan.run()
        if rank == 1:
            source.data = getattr(source, view)(*what[0])
        with pytest.raises(
            ReshardError, match=r"source: its tensors .* planned: w was torch.float32 of .*, is " + what[1]
        ):
            plan.run(version=1)
        assert same_bits(filled["w"], torch.arange(4.0).view(2, 2)) and plan.version is None
        if rank == 1:
            source.data = source.data.view(torch.float32).as_strided((2, 2), (2, 1))
        plan.run(version=2)


def test_memory_that_was_replaced_is_refused(run_world: Any) -> None:
    run_world(2, replaced)


class Counting(nn.Linear):
    count = 0

    def get_extra_state(self) -> int:
        return self.count

    def set_extra_state(self, state: int) -> None:
        self.count = state


def values_that_are_no_tensors(rank: int, world_size: int) -> None:
    with pytest.raises(StateRefusedError, match="_extra_state: is no tensor, and cannot be put into a module"):
        tte.reshard(Counting(2, 2), Counting(2, 2))
    frozen = types.MappingProxyType({"w": torch.zeros(1), "n": 0})
    with pytest.raises(StateRefusedError, match="n: is no tensor, and cannot be put into a mappingproxy"):
        tte.reshard({"w": torch.ones(1), "n": 1}, frozen)
    plan = tte.transfer.plan_reshard({"w": torch.ones(1), "n": lambda: 1}, {"w": torch.zeros(1), "n": 0})
    with pytest.raises(StateRefusedError, match="n: is no tensor, and cannot be sent: "):
        plan.run()
    target = {"w": [torch.zeros(1), (torch.zeros(1), 2)], "n": {"deep": (1, 2)}}
    tte.reshard({"w": [torch.ones(1), (torch.ones(1), 3)], "n": {"deep": (3, 4)}, "f": lambda: 1}, target, verify=True)
    assert target == {"w": [torch.ones(1), (torch.ones(1), 3)], "n": {"deep": (3, 4)}}
    model = nn.BatchNorm1d(3)
    model(torch.randn(4, 3))
    copy = nn.BatchNorm1d(3)
    tte.reshard(model if rank == 0 else None, copy, verify=True)
    assert copy.num_batches_tracked == 1


def test_values_that_are_no_tensors(run_world: Any) -> None:
    run_world(2, values_that_are_no_tensors)


def odd_tensors(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    partial = DTensor.from_local(torch.ones(4), mesh, [Partial()], run_check=False)
    for sides in (({"w": partial}, {"w": torch.ones(4)}), ({"w": torch.ones(4)}, {"w": partial})):
        with pytest.raises(LayoutError, match=r"w: mesh axis 0 holds Partial\('sum'\)"):
            tte.reshard(*sides)
    target = {
        "scalar": torch.zeros(()),
        "none": torch.ones(0, 3),
        "one": distribute_tensor(torch.zeros(1), mesh, [Shard(0)]),
    }
    source = {"scalar": torch.tensor(3.0), "none": torch.ones(0, 3), "one": torch.ones(1)}
    tte.reshard(source, target, verify=True)
    assert target["scalar"] == 3 and target["one"].full_tensor() == 1
    tte.reshard(None, None, version=1, verify=True)
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    tte.reshard(dict(first.named_parameters()) if rank == 0 else None, dict(second.named_parameters()), verify=True)
    moments = torch.optim.AdamW(second.parameters()).state_dict()
    moments["param_groups"][0]["lr"] = 3.0
    tte.reshard(torch.optim.AdamW(first.parameters()).state_dict(), moments, verify=True)
    assert moments["param_groups"][0]["lr"] == 0.001
    # What no rank's target has may differ between replicas.
    tte.reshard({"w": torch.ones(1), "rng": torch.full((1,), float(rank))}, {"w": torch.zeros(1)}, verify=True)


def test_odd_tensors(run_world: Any) -> None:
    run_world(3, odd_tensors)


def stated_order(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    rows = torch.arange(8.0)
    local = torch.cat([rows[2 * rank : 2 * rank + 2], rows[2 * rank + 4 : 2 * rank + 6]])
    source = {"w": DTensor.from_local(local, mesh, [Shard(0)], run_check=False)}
    target = {"w": torch.zeros(8)}
    result = tte.reshard(source, target, source_layouts={"w": tte.layout.ShardOrder(((0, 0, 2),))}, verify=True)
    assert same_bits(target["w"], rows) and result.unproved == ()


def test_a_stated_order_is_that_of_the_proof_too(run_world: Any) -> None:
    run_world(2, stated_order)


def groups(rank: int, world_size: int) -> None:
    group = dist.new_group([3, 1])
    if rank not in (1, 3):
        return
    position = dist.get_rank(group)
    mesh = DeviceMesh("cpu", torch.tensor([3, 1]), _init_backend=False)
    local = torch.full((1, 2), float(rank))
    source = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
    target = torch.zeros(2, 2)
    plan = tte.transfer.plan_reshard({"w": source}, {"w": target} if rank == 3 else None, group)
    plan.run(verify=True)
    assert rank == 1 or target[:, 0].tolist() == [3, 1]
    own = dist.get_process_group_ranks(group).index(3)
    assert plan.describe().splitlines()[1:] == sorted(
        [f"rank {1 - own} -> rank {own}: 8 bytes", f"rank {own} keeps 8 bytes"]
    )
    assert position == dist.get_process_group_ranks(group).index(rank)


def test_ranks_are_positions_in_the_group(run_world: Any) -> None:
    run_world(4, groups)


def arguments_that_differ(rank: int, world_size: int) -> None:
    source, target = {"w": torch.ones(2)}, {"w": torch.zeros(2)}
    with pytest.raises(ReplicaMismatchError, match="bucket_bytes: is 64 on rank 0, 128 on rank 1"):
        tte.transfer.plan_reshard(source, target, bucket_bytes=64 * (rank + 1))
    plan, other = tte.transfer.plan_reshard(source, target), tte.transfer.plan_reshard(source, target)
    with pytest.raises(ReplicaMismatchError, match="verify: is True on rank 0, False on rank 1"):
        plan.run(verify=rank == 0)
    with pytest.raises(
        ReplicaMismatchError, match="plan: is not the same on rank 0 and on rank 1; run plans in one order"
    ):
        (plan if rank == 0 else other).run()
    assert not target["w"].any()
    for step in range(3):
        plan.run(version=step)
        other.run(version=-step)
    assert (plan.version, other.version) == (2, -2)
    for options, error, text in (
        ({"cast": "maybe"}, ValueError, "got cast='maybe', expected 'exact', 'allow' or 'forbid'"),
        ({"replicas": "last"}, ValueError, "got replicas='last', expected 'equal' or 'first'"),
        ({"timeout_seconds": 0}, ValueError, "got timeout_seconds=0, expected more than 0"),
        ({"group": 3}, TypeError, "got group=3, expected a process group or None"),
        ({"bucket_bytes": 1.5}, TypeError, "got bucket_bytes=1.5, expected a whole number"),
    ):
        with pytest.raises(error, match=text):
            tte.transfer.plan_reshard(source, target, **options)
    with pytest.raises(TypeError, match="got version='1', expected a whole number"):
        plan.run(version="1")  # type: ignore[arg-type]


def test_arguments_that_differ_between_ranks_are_refused(run_world: Any) -> None:
    run_world(2, arguments_that_differ)
