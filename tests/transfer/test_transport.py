"""Transfers over a transport of the caller's, here torch.distributed's messages from Python."""

import time
from typing import Any

import late
import pytest
import torch
import torch.distributed as dist
from gloo_worlds import LONGEST_SECONDS
from messages import Messages, MessagesOfHosts
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import torchtitan_ext as tte
from torchtitan_ext import ops
from torchtitan_ext.errors import LostRankError, ReshardError, TransferFailedError
from torchtitan_ext.transfer import boxes_of


def both_transports(rank: int, world_size: int) -> None:
    mesh = DeviceMesh("cpu", torch.tensor([0, 1]), _init_backend=False)
    whole = torch.arange(60.0).view(10, 6)
    source = target = None
    if rank < 2:
        local = whole.chunk(2)[rank].clone()
        source = {"w": DTensor.from_local(local, mesh, [Shard(0)], run_check=False), "s": torch.tensor(7), "n": 3}
        source["empty"] = torch.zeros(0, 2)
    if rank > 0:
        target = {
            "w": torch.zeros(6, 10, dtype=torch.float64).T,
            "s": torch.tensor(0),
            "n": 0,
            "empty": torch.ones(0, 2),
        }
    plan = tte.transfer.plan_reshard(source, target, cast="exact", transport=Messages())
    for step in (1, 2):
        if source is not None:
            local.add_(step)
        plan.run(version=step, verify=True)
        assert plan.version == step
        if target is not None:
            assert torch.equal(target["w"], whole.double() + step * (step + 1) / 2)
            assert (target["s"].item(), target["n"]) == (7, 3)


def test_a_transport_written_in_python(run_world: Any) -> None:
    run_world(3, both_transports)


class Broken:
    def exchange(self, *arguments: Any, **options: Any) -> None:
        if dist.get_rank() == 1:
            raise OSError("no link")


def broken(rank: int, world_size: int) -> None:
    plan = tte.transfer.plan_reshard({"w": torch.ones(3)}, {"w": torch.zeros(3)}, transport=Broken())
    with pytest.raises(TransferFailedError, match=r"in phase exchange: rank 1: OSError: no link.*part-written.*: w"):
        plan.run(version=1)
    assert plan.version is None


def test_what_a_transport_raises_is_raised_on_all_ranks(run_world: Any) -> None:
    run_world(2, broken)


def fail_before_sending(rank: int, world_size: int, is_apart: bool, culprit: int) -> list[str]:
    """One rank raises, all others wait for what it does not send."""
    mesh = DeviceMesh("cpu", torch.arange(world_size), _init_backend=False)
    rows, columns = torch.full((5, world_size), rank + 1.0), torch.zeros(5 * world_size, 1)
    source = {"w": DTensor.from_local(rows, mesh, [Shard(0)], run_check=False)}
    target = {"w": DTensor.from_local(columns, mesh, [Shard(1)], run_check=False)}
    transport, group = Messages(), dist.new_group()
    transport.group = dist.new_group() if is_apart else group
    transport.culprit = culprit
    plan = tte.transfer.plan_reshard(source, target, group, transport=transport, timeout_seconds=1.5)
    start, texts = time.monotonic(), []
    with pytest.raises(TransferFailedError) as caught:
        plan.run(version=1)
    assert time.monotonic() - start < LONGEST_SECONDS and plan.version is None
    texts.append(str(caught.value))
    # Of a transport with connections of its own only these are lost.
    transport.group, transport.culprit = dist.new_group(), -1
    if is_apart:
        plan.run(version=2)
        assert plan.version == 2 and torch.equal(columns, torch.arange(5.0 * world_size).div(5).floor().view(-1, 1) + 1)
    else:
        with pytest.raises(LostRankError) as lost:
            plan.run(version=2)
        texts.append(str(lost.value))
    return texts


@pytest.mark.parametrize(
    ("world_size", "is_apart", "culprit"), [(2, True, 1), (2, False, 0), (4, True, 3), (4, False, 1)]
)
def test_who_fails_before_it_sends_is_the_error_of_all(
    run_world: Any, world_size: int, is_apart: bool, culprit: int
) -> None:
    results = run_world(world_size, fail_before_sending, is_apart, culprit)
    assert all(texts == results[0] for texts in results)
    lost = (
        ""
        if is_apart
        else "; this process group can serve no further transfer: make a new one and plan again, or restart"
    )
    assert results[0][0] == (
        f"reshard failed on 1 rank(s) in phase exchange: rank {culprit}: OSError: no link{lost}. The target may be "
        "part-written, run it again or fill it anew: w"
    )
    assert is_apart or "the backend of rank" in results[0][1]


class Registering:
    """Of one process. Registers the memory of a number when it is first seen."""

    def __init__(self) -> None:
        self.registered: dict[int, Any] = {}
        self.numbers: list[int] = []

    def exchange(self, sources: Any, targets: Any, sends: Tensor, receives: Tensor, *, number: int, **_: Any) -> None:
        memory = [[tensor.data_ptr() for tensor in side] for side in (sources, targets)]
        tables = sends.tolist(), receives.tolist()
        if number != 0:
            assert self.registered.setdefault(number, (memory, tables)) == (memory, tables)
        self.numbers.append(number)
        for source, target in zip(boxes_of(sends, sources), boxes_of(receives, targets), strict=True):
            target.unpack(source.packed())


def test_what_is_registered_for_a_number_stays() -> None:
    source, target, transport = {"w": torch.arange(6.0)}, {"w": torch.zeros(6)}, Registering()
    plan = tte.transfer.plan_reshard(source, target, transport=transport)
    plan.run(version=0)
    plan.run(version=1)
    snapshot = tte.delta.Snapshot(source, version=1)
    source["w"][2:4] = 9
    plan.run(changes=snapshot.changes())
    assert plan.version == 2 and torch.equal(target["w"], source["w"])
    plan.run(version=3)
    first = transport.numbers[0]
    assert first != 0 and transport.numbers == [first, first, 0, 0, 0, first]
    lazy = torch.zeros(2, dtype=torch.complex64).conj()  # read as a new copy in each run
    plan = tte.transfer.plan_reshard({"c": lazy}, {"c": torch.ones(2, dtype=torch.complex64)}, transport=transport)
    plan.run()
    assert transport.numbers[-1] == 0


def test_a_refused_run_leaves_the_version() -> None:
    source, target = {"w": torch.arange(6.0)}, {"w": torch.zeros(6)}
    plan = tte.transfer.plan_reshard(source, target)
    plan.run(version=7)
    source["w"].set_(torch.ones(6))
    with pytest.raises(ReshardError, match="source: its tensors have other memory"):
        plan.run(version=8)
    assert plan.version == 7 and torch.equal(target["w"], torch.arange(6.0))


def test_boxes_are_views_of_the_tensors() -> None:
    tensors = [torch.zeros(4, 5), torch.tensor(1.0)]
    number = ops.dtype_number(torch.float64)
    table = torch.tensor([0, 1, -1, 0, 2, 0, number, 2, 1, 2, 3, 2])
    scalar, part = boxes_of(table, tensors)
    assert (scalar.peer, scalar.part.shape, scalar.packed().numel()) == (0, (), 4)
    assert (part.peer, part.part.shape) == (2, (3, 2))
    part.part.fill_(1)
    assert tensors[0][1:4, 2:4].sum() == tensors[0].sum() == 6
    assert part.packed().view(torch.float64).tolist() == [1.0] * 6
    part.unpack(torch.arange(6.0, dtype=torch.float64).view(torch.uint8))
    assert tensors[0][1:4, 2:4].tolist() == [[0, 1], [2, 3], [4, 5]]


def trained_on(device: str) -> tuple[torch.nn.Linear, dict[str, Any]]:
    """AdamW keeps its steps in host memory, wherever the parameters are."""
    model = torch.nn.Linear(5, 3).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    model.weight.grad, model.bias.grad = torch.ones_like(model.weight), torch.ones_like(model.bias)
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": dict(enumerate(optimizer.state.values()))}
    assert {state["optimizer"][0][name].device.type for name in ("step", "exp_avg")} == {"cpu", device}
    return model, state


def one_state_on_two_devices(rank: int, world_size: int) -> None:
    late.set_delay(0.0005)
    (model, source), (_, target) = trained_on("late"), trained_on("late")
    source["optimizer"][0]["step"].fill_(17.0)
    plan = tte.transfer.plan_reshard(
        source if rank == 0 else None, target if rank == 1 else None, transport=MessagesOfHosts(), cast="exact"
    )
    for step in (17.0, 18.0):
        source["optimizer"][0]["step"].fill_(step)
        with torch.no_grad():
            model.weight += 1
        plan.run(verify=True)
        if rank == 1:
            assert float(target["optimizer"][0]["step"]) == step and target["optimizer"][0]["step"].is_cpu
            for got, want in zip(target["model"].values(), source["model"].values(), strict=True):
                assert got.shape == want.shape and got.device.type == "late"
    everywhere: list[Any] = [None] * world_size
    dist.all_gather_object(everywhere, [tensor.cpu() for tensor in (source, target)[rank]["model"].values()])
    assert all(torch.equal(*pair) for pair in zip(*everywhere, strict=True))
    snapshot = tte.delta.Snapshot(source)
    source["optimizer"][1]["step"].fill_(21.0)
    assert snapshot.changes().num_changed == 1


def test_steps_in_host_memory_travel_with_the_tensors_of_an_accelerator(run_late_world: Any) -> None:
    run_late_world(2, one_state_on_two_devices)
