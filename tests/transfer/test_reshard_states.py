"""Transfers of whole states between two sides of one job: what is carried and refused, what a kept plan promises."""

from pathlib import Path
from typing import Any

import late
import pytest
import torch
import torch.distributed as dist
from boxed_tensors import boxed, states_of
from boxed_tensors import parts as boxes_of
from models import (
    EVEN,
    LAYOUTS,
    UNEVEN,
    Sizes,
    build_model,
    build_optimizer,
    differences,
    poison,
    refused_by_fsdp,
    trained,
    training_state,
    training_truth,
)
from reference import same_bits
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from wrapped_tensors import BlockInt8

import torchtitan_ext as tte
from torchtitan_ext.errors import (
    MissingStateError,
    ReplicaMismatchError,
    ReshardError,
    StateRefusedError,
    TransferFailedError,
    WrongArgumentError,
)


def mesh_of(ranks: Any) -> DeviceMesh:
    """A mesh without process groups: a transfer needs only the group of all ranks."""
    return DeviceMesh("cpu", torch.tensor(ranks), _init_backend=False)


FOUR_RANKS = [layout for layout in LAYOUTS if layout.world_size == 4]


def reshard_models(rank: int, world_size: int, sizes: Sizes) -> list[str]:
    lines = []
    truth = training_truth(sizes)
    layouts = [layout for layout in FOUR_RANKS if not refused_by_fsdp(layout, sizes)]
    sources = {layout.name: trained(build_model(layout, sizes)) for layout in layouts}
    for layout in layouts:
        model = build_model(layout, sizes, seed=1)
        target = training_state(model, build_optimizer(model, lr=0.5))
        for name, source in sources.items():
            poison(target)
            tte.reshard(source, target, verify=True)
            lines += [f"{name} to {layout.name}: {line}" for line in differences(target, truth)]
    return lines


@pytest.mark.parametrize("sizes", [EVEN, UNEVEN], ids=lambda sizes: sizes.name)
def test_models_with_their_optimizers_from_every_mesh_to_every_other(run_world: Any, sizes: Sizes) -> None:
    assert run_world(4, reshard_models, sizes) == [[]] * 4


def equal_to_save_and_load(rank: int, world_size: int, path: Path) -> bool:
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(13, 6, generator=generator)
    source = {"w": distribute_tensor(whole, init_device_mesh("cpu", (4,)), [Shard(0)])}
    wanted, loaded = (
        {"w": distribute_tensor(torch.zeros(13, 6), init_device_mesh("cpu", (2, 2)), [Shard(1), Shard(0)])}
        for _ in range(2)
    )
    tte.save(source, path)
    tte.load(loaded, path)
    tte.reshard(source, wanted)
    return same_bits(wanted["w"].to_local(), loaded["w"].to_local())


def test_equal_to_a_save_and_a_load(run_world: Any, tmp_path: Path) -> None:
    assert run_world(4, equal_to_save_and_load, tmp_path) == [True] * 4


def trainer_to_generator(rank: int, world_size: int) -> list[Any]:
    """Ranks 0 to 3 train on 2 x 2, ranks 4 and 5 generate: each has one side only."""
    trainer, generator = mesh_of([[0, 1], [2, 3]]), mesh_of([4, 5])
    whole = torch.arange(30.0).view(10, 3)
    source = target = None
    if rank < 4:
        local = whole.chunk(2)[rank // 2].chunk(2)[rank % 2]
        w = DTensor.from_local(local, trainer, [Shard(0), Shard(0)], run_check=False, shape=(10, 3), stride=(3, 1))
        source = {"w": w, "extra": torch.ones(2), "step": 7, "note": {"lr": 0.5}}
    else:
        local = torch.zeros(10, [2, 1][rank - 4])
        w = DTensor.from_local(local, generator, [Shard(1)], run_check=False, shape=(10, 3), stride=(3, 1))
        target = {"w": w, "step": 0, "note": {"lr": 0.0}}
    plan = tte.transfer.plan_reshard(source, target)
    kept = None if target is None else w.to_local().data_ptr()
    results = []
    for version in (3, 4):
        if rank < 4:
            local.add_(100 * (version - 3))
        results.append(plan.run(version=version if rank < 4 else None))
        assert plan.version == version
    assert sum(plan.run().seconds.values()) > 0
    assert plan.version is None, "no version was given"
    if target is None:
        return [results[0].bytes_sent]
    assert w.to_local().data_ptr() == kept
    assert same_bits(w.to_local(), (whole + 100).chunk(2, 1)[rank - 4])
    assert (target["step"], target["note"]) == (7, {"lr": 0.5})
    return [results[0].bytes_received]


def test_ranks_may_have_one_side_only(run_world: Any) -> None:
    answers = run_world(6, trainer_to_generator)
    assert answers == [[36], [24], [36], [24], [80], [40]]


def boxes_both_ways(rank: int, world_size: int, case: str) -> None:
    whole, states = states_of(case)
    sharded = {"w": distribute_tensor(torch.zeros_like(whole), init_device_mesh("cpu", (world_size,)), [Replicate()])}
    own = states[rank] if rank < len(states) else None
    tte.reshard(own, sharded)
    assert same_bits(sharded["w"].to_local(), whole)
    if own is not None:
        for part in boxes_of(own["w"]):
            part.zero_()
    tte.reshard(sharded, own, verify=True)
    if own is not None:
        expected = states_of(case)[1][rank]
        assert same_bits(own["w"].detach(), expected["w"].detach()), "padding is no part of a box"


@pytest.mark.parametrize("case", ["several boxes", "a rank without boxes", "replicas", "one box twice", "no dims"])
def test_tensors_that_describe_their_own_boxes(run_world: Any, case: str) -> None:
    run_world(3, boxes_both_ways, case)


def fused_generator(rank: int, world_size: int) -> None:
    """A generator without DTensors: q, k, v are views of one fused parameter; its last rows are padding."""
    heads = {name: torch.arange(24.0).view(8, 3) + 100 * index for index, name in enumerate("qkv")}
    source = {
        name: distribute_tensor(whole, init_device_mesh("cpu", (2,)), [Shard(0)]) for name, whole in heads.items()
    }
    fused = torch.full((14, 3), -1.0)
    target = {}
    for index, name in enumerate("qkv"):
        view = fused[4 * index : 4 * index + 4]
        target[name] = boxed(view, (8, 3), [((4 * rank, 0), (0, 0), (4, 3))])
    result = tte.reshard(source, target, verify=True)
    assert result.unproved == ()
    expected = torch.cat([heads[name].chunk(2)[rank] for name in "qkv"])
    assert same_bits(fused[:12], expected) and bool((fused[12:] == -1).all())


def test_parts_of_a_fused_parameter(run_world: Any) -> None:
    run_world(2, fused_generator)


def cast_and_rename(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.randn(9, 4, generator=torch.Generator().manual_seed(1))
    source = {"model": {"a": distribute_tensor(whole, mesh, [Shard(0)]), "tied": whole.clone()}}
    wide = distribute_tensor(torch.zeros(9, 4, dtype=torch.float64), mesh, [Shard(1)])
    low = distribute_tensor(torch.zeros(9, 4, dtype=torch.bfloat16), mesh, [Shard(1)])
    target = {"module": {"a": wide}, "other": low}
    rename = {"module.*": "model.*", "other": "model.a"}
    with pytest.raises(ReshardError, match="other: the source is torch.float32, the target is torch.bfloat16"):
        tte.reshard(source, target, rename=rename)
    assert not wide.to_local().any()
    result = tte.reshard(source, target, rename=rename, cast="allow", verify=True)
    assert result.unproved == ()
    assert same_bits(wide.to_local(), whole.double().chunk(2, 1)[rank])
    assert same_bits(low.to_local(), whole.bfloat16().chunk(2, 1)[rank])


def test_casts_on_the_sender_and_names_of_the_source(run_world: Any) -> None:
    run_world(2, cast_and_rename)


def wrappers_and_views(rank: int, world_size: int) -> None:
    torch.serialization.add_safe_globals([BlockInt8])
    mesh = init_device_mesh("cpu", (2,))
    dense = torch.randn(8, 4, generator=torch.Generator().manual_seed(2))
    blocks = BlockInt8.of(dense.chunk(2)[rank], 2)
    lazy = torch.randn(4, dtype=torch.complex64, generator=torch.Generator().manual_seed(3)).conj()
    source = {"q": DTensor.from_local(blocks, mesh, [Shard(0)], run_check=False), "lazy": lazy}
    plain = torch.zeros(8, 4)
    into_blocks = DTensor.from_local(BlockInt8.of(torch.ones(4, 4), 2), mesh, [Shard(0)], run_check=False)
    conj = torch.zeros(4, dtype=torch.complex64).conj()
    tte.reshard(source, {"q": plain, "lazy": conj})
    expected = torch.cat([BlockInt8.of(part, 2).dense() for part in dense.chunk(2)])
    assert same_bits(plain, expected) and same_bits(conj, lazy)
    tte.reshard({"q": plain}, {"q": into_blocks})
    assert torch.allclose(into_blocks._local_tensor.dense(), expected.chunk(2)[rank], atol=1e-6)


def test_wrapper_subclasses_and_lazy_views(run_world: Any) -> None:
    run_world(2, wrappers_and_views)


def modules_and_frozen_tensors(rank: int, world_size: int) -> None:
    torch.manual_seed(rank)
    source, target = nn.Linear(3, 2), nn.Linear(3, 2)
    before = [param._version for param in target.parameters()]
    tte.reshard(source if rank == 1 else None, target)
    torch.manual_seed(1)
    assert same_bits(target.weight, nn.Linear(3, 2).weight)
    assert [param._version for param in target.parameters()] != before
    assert target.weight.requires_grad


def test_modules(run_world: Any) -> None:
    run_world(2, modules_and_frozen_tensors)


def refusals(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    source = {"w": distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)]), "step": 1}
    filled = {"w": torch.zeros(4, 3), "step": 0}

    def refused(error: type[StateRefusedError], text: str, target: Any, src: Any = source, **options: Any) -> None:
        with pytest.raises(error, match=text):
            tte.reshard(src, target, **options)
        assert not filled["w"].any() and filled["step"] == 0

    refused(MissingStateError, r"wt: the source does not have it; perhaps w is meant", {**filled, "wt": torch.ones(1)})
    refused(
        ReshardError, r"w: has shape \(4, 3\) in the source, \(3, 4\) in the target", {**filled, "w": torch.ones(3, 4)}
    )
    refused(
        ReshardError, "step: is a value that is no tensor in the source, a tensor in", {**filled, "step": torch.ones(1)}
    )
    refused(StateRefusedError, "m: is on the meta device", {**filled, "m": torch.ones(1, device="meta")})
    refused(StateRefusedError, "several of its elements share memory", {**filled, "w": torch.ones(1, 3).expand(4, 3)})
    refused(WrongArgumentError, "source: got a list", filled, ["w"])
    refused(ReplicaMismatchError, "rename: is {'a': 'b'} on rank 0", filled, rename={"a": "b"} if rank == 0 else {})
    # One rank alone is wrong: all get it, and its own sentence.
    other = {**filled, "w": torch.ones(3, 4)} if rank == 1 else filled
    refused(StateRefusedError, "w: ", other)
    refused(WrongArgumentError, "target: got a set", {"w"} if rank == 1 else filled)
    plan = tte.transfer.plan_reshard(source, filled)
    with pytest.raises(ReplicaMismatchError, match="version: is 1 on rank 0, 2 on rank 1; give one number"):
        plan.run(version=1 + rank)
    assert not filled["w"].any()


def test_what_does_not_fit_is_refused_on_all_ranks_before_anything_moves(run_world: Any) -> None:
    run_world(2, refusals)


def changed_and_differing(rank: int, world_size: int) -> None:
    source = {"w": torch.full((5,), float(rank))}
    target = {"w": torch.zeros(5)}
    plan = tte.transfer.plan_reshard(source if rank < 2 else None, target if rank == 2 else None)
    with pytest.raises(ReplicaMismatchError, match="w: has replicas that differ"):
        plan.run(version=1, verify=True)
    assert not target["w"].any() and plan.version is None
    plan.run(version=2)
    assert plan.version == 2
    if rank == 2:
        assert bool((target["w"] == 0).all())
        target["w"].set_(torch.zeros(7)[:5].clone())
    with pytest.raises(ReshardError, match="target: its tensors have other memory"):
        plan.run(version=3)
    assert plan.version == 2  # nothing was sent


def test_a_kept_plan_refuses_other_memory_and_replicas_that_differ(run_world: Any) -> None:
    run_world(3, changed_and_differing)


def first_replicas(rank: int, world_size: int) -> list[str]:
    """Where replicas differ all of it comes from the first one, also on ranks of others."""
    hsdp, flat = init_device_mesh("cpu", (2, 2)), init_device_mesh("cpu", (4,))
    truth = torch.arange(24.0).view(8, 3)
    of_mesh = distribute_tensor(truth, hsdp, [Replicate(), Shard(0)])
    of_mesh.to_local().add_(rank // 2)
    boxes = boxed(truth + rank, truth.shape, [((0, 0), (0, 0), (8, 3))])
    source, wrong = {"w": of_mesh, "plain": truth + rank, "boxes": boxes, "step": rank}, []
    for placement in (Replicate(), Shard(0), Shard(1)):
        target: dict[str, Any] = {key: distribute_tensor(torch.zeros(8, 3), flat, [placement]) for key in source}
        target["step"] = -1
        with pytest.raises(ReplicaMismatchError, match='plan it with replicas="first"'):
            tte.reshard(source, target, verify=True)
        plan = tte.transfer.plan_reshard(source, target, replicas="first")
        plan.run(verify=True)
        whole = {key: tte.full_tensor(target[key]) for key in ("w", "plain", "boxes")}
        wrong += [f"{key} {placement}" for key, value in whole.items() if not torch.equal(value, truth)]
        wrong += [] if target["step"] == 0 else ["step"]
    return wrong


def test_the_first_of_replicas_that_differ(run_world: Any) -> None:
    assert run_world(4, first_replicas) == [[]] * 4


class Counting(nn.Module):
    """A module with a value that is no tensor."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def get_extra_state(self) -> int:
        return self.count

    def set_extra_state(self, state: Any) -> None:
        self.count = state


def present_values(rank: int, world_size: int) -> None:
    source, module = {"w": torch.ones(2), "step": 1, "nested": {"name": "a"}}, Counting(1)
    target: dict[str, Any] = {"w": torch.zeros(2), "step": 0, "nested": {"name": ""}}
    counts = {"_extra_state": 0}
    plan = tte.transfer.plan_reshard(source if rank == 0 else None, target)
    plan_of_module = tte.transfer.plan_reshard(module if rank == 0 else None, counts)
    for step, name in (1, "a"), (2, "b"):
        source["step"], source["nested"]["name"], module.count = step, name, step
        source["w"].fill_(step)
        plan.run(verify=True)
        plan_of_module.run()
        assert (target["w"].tolist(), target["step"], target["nested"]) == ([step, step], step, {"name": name})
        assert counts == {"_extra_state": step}
    del source["step"]
    with pytest.raises(TransferFailedError, match="rank 0: ValueError: step is not in the source any more; plan"):
        plan.run()


def test_a_kept_plan_sends_the_values_of_now_that_are_no_tensors(run_world: Any) -> None:
    run_world(2, present_values)


def damaged_on_the_way(rank: int, world_size: int) -> None:
    """A bit that flips between the exchange and the proof."""
    source, target = {"w": torch.arange(6.0)}, {"w": torch.zeros(6)}
    plan = tte.transfer.plan_reshard(source if rank == 0 else None, target if rank == 1 else None)
    exchange = plan._exchange

    def flip(prepared: Any) -> None:
        exchange(prepared)
        target["w"][3] += 0.5

    plan._exchange = flip  # type: ignore[method-assign]
    with pytest.raises(TransferFailedError, match="1 key.s. are not what the source holds") as caught:
        plan.run(version=1, verify=True)
    assert caught.value.part_written == ("w",) and plan.version is None


def test_a_proof_finds_what_was_damaged(run_world: Any) -> None:
    run_world(2, damaged_on_the_way)


def failing_rank(rank: int, world_size: int) -> None:
    source, target = {"w": torch.arange(6.0)}, {"w": torch.zeros(6)}
    plan = tte.transfer.plan_reshard(source, target, timeout_seconds=60)

    def fail(*arguments: Any) -> None:
        raise MemoryError("no memory")

    if rank == 1:
        plan._target.memory_to_fill = fail  # type: ignore[method-assign]
    with pytest.raises(TransferFailedError, match=r"in phase agree: rank 1: MemoryError: no memory$") as caught:
        plan.run(version=1)
    assert caught.value.part_written == () and not target["w"].any()
    plan = tte.transfer.plan_reshard(source, target, timeout_seconds=60)
    exchange = plan._exchange

    def fail_later(prepared: Any) -> None:
        exchange(prepared)
        fail()

    if rank == 1:
        plan._exchange = fail_later  # type: ignore[method-assign]
    with pytest.raises(TransferFailedError, match=r"rank 1: MemoryError: no memory.*part-written.*: w") as caught:
        plan.run(version=1)
    assert caught.value.part_written == ("w",) and plan.version is None


def test_a_rank_that_fails_is_an_error_on_all(run_world: Any) -> None:
    run_world(2, failing_rank)


def test_without_a_process_group() -> None:
    source = {"w": torch.arange(6.0).view(2, 3), "step": 3}
    target = {"w": torch.zeros(2, 3, dtype=torch.float64), "step": 0}
    result = tte.reshard(source, target, version=1, verify=True)
    assert same_bits(target["w"], source["w"].double()) and target["step"] == 3
    assert (result.bytes_sent, result.bytes_received, result.bytes_kept) == (0, 0, 48)


def describe(rank: int, world_size: int) -> str:
    mesh = init_device_mesh("cpu", (2,))
    source = {"w": distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])}
    return tte.transfer.plan_reshard(source, {"w": distribute_tensor(torch.ones(4, 2), mesh, [Shard(1)])}).describe()


def test_describe_says_who_sends_how_much_to_whom(run_world: Any) -> None:
    between = ["rank 0 keeps 8 bytes", "rank 0 -> rank 1: 8 bytes", "rank 1 -> rank 0: 8 bytes", "rank 1 keeps 8 bytes"]
    assert run_world(2, describe) == ["\n".join(["32 bytes in all", *between])] * 2


def test_a_refused_run_leaves_the_version() -> None:
    source, target = {"w": torch.arange(6.0)}, {"w": torch.zeros(6)}
    plan = tte.transfer.plan_reshard(source, target)
    plan.run(version=7)
    source["w"].set_(torch.ones(6))
    with pytest.raises(ReshardError, match="source: its tensors have other memory"):
        plan.run(version=8)
    assert plan.version == 7 and torch.equal(target["w"], torch.arange(6.0))


def trained_on(device: str) -> tuple[torch.nn.Linear, dict[str, Any]]:
    """AdamW keeps its steps in host memory, wherever the parameters are."""
    model = torch.nn.Linear(5, 3).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    model.weight.grad, model.bias.grad = torch.ones_like(model.weight), torch.ones_like(model.bias)
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": dict(enumerate(optimizer.state.values()))}
    assert {state["optimizer"][0][name].device.type for name in ("step", "exp_avg")} == {"cpu", device}
    return model, state


@late.exchanging_over_hosts
def one_state_on_two_devices(rank: int, world_size: int) -> None:
    late.set_delay(0.0005)
    (model, source), (_, target) = trained_on("late"), trained_on("late")
    source["optimizer"][0]["step"].fill_(17.0)
    plan = tte.transfer.plan_reshard(source if rank == 0 else None, target if rank == 1 else None, cast="exact")
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


def test_steps_in_host_memory_travel_with_the_tensors_of_an_accelerator(run_late_world: Any) -> None:
    run_late_world(2, one_state_on_two_devices)
