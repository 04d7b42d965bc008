"""Transforms in the memory of the ranks: random ones, against numpy on whole tensors; a trainer and its generator."""

import random
from typing import Any

import late
import pytest
import torch
import torch.distributed as dist
from boxed_tensors import cut, parts
from models import BY_NAME, UNEVEN, build_model, build_optimizer, differences, poison, random_whole, take_steps
from random_layouts import ALL_DTYPES, SideOfTransfer
from random_transforms import Composition
from tier import SEED, TIER, num_cases
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from wrapped_tensors import BlockInt8

import torchtitan_ext as tte
from torchtitan_ext import ops, transforms
from torchtitan_ext.errors import StateRefusedError, TransferFailedError, TransformError
from torchtitan_ext.transforms import Rule, Transform

NUM_PLANS = num_cases(13)


def composed(draw: random.Random) -> tuple[Composition, Transform, str, torch.dtype]:
    """A transform, how casts are allowed, and the dtype of its result."""
    composition = Composition(draw)
    for _ in range(draw.randint(1, 6)):
        composition.step()
    transform = composition.transform()
    kind = draw.choice(["moved", "cast to the target", "cast by a step"])
    if kind == "moved":
        return composition, transform, "forbid", torch.int64
    if kind == "cast to the target":
        return composition, transform, "allow", torch.float32
    by_step = Transform(
        [Rule(composition.name, composition.name, [transforms.cast("int32")]), Rule("**", "**", others=True)]
    )
    return composition, transform.then(by_step), "forbid", torch.int32


def reshard_random(rank: int, world_size: int, seeds: list[str]) -> list[str]:
    lines = []
    for seed in seeds:
        draw = random.Random(seed)
        composition, transform, cast, dtype = composed(draw)
        # Elements are numbered through all sources, so that a table of values gives those of both sides.
        numbers = {name: torch.from_numpy(array.copy()) for name, array in composition.sources.items()}
        result = torch.from_numpy(composition.array.copy())
        source = SideOfTransfer(draw, world_size, numbers)
        target = SideOfTransfer(draw, world_size, {composition.name: result.to(dtype)})
        numbered = {name: tensor.to_local().clone() for name, tensor in source.tensors.items()}
        plan = tte.transfer.plan_reshard(
            source.tensors or None,
            target.tensors or None,
            cast=cast,
            transform=transform,
            source_layouts=source.orders,
            target_layouts=target.orders,
            bucket_bytes=draw.choice([64, 256, 1 << 25]),
        )
        poison(target.tensors)
        values = torch.arange(composition.num_elements)
        for version in range(3):
            plan.run(version=version, verify=draw.random() < 0.5)
            for name, tensor in target.tensors.items():
                layout = target.layouts[name]
                truth = {name: torch.where(result < 0, result, values[result.clamp(min=0)]).to(dtype)}
                found = differences({name: tensor}, truth, list(layout.steps))
                lines += [
                    f"seed {seed}, version {version}, {line}: {transform.to_json()} to {layout}" for line in found
                ]
            poison(target.tensors)
            # Some, all or none of the elements change.
            share = draw.choice([0, 0.01, 0.1, 1])
            chosen = torch.rand(values.shape, generator=torch.Generator().manual_seed(draw.randrange(2**31))) < share
            values[chosen] += 10_000
            for name, tensor in source.tensors.items():
                tensor.to_local().copy_(values[numbered[name]])
    return lines


@pytest.mark.parametrize("world_size", [1, 2, 4] if TIER == "commit" else [1, 2, 4, 8])
def test_random_transforms_between_random_layouts(run_world: Any, world_size: int) -> None:
    seeds = [f"{SEED} {number}" for number in range(NUM_PLANS)]
    assert run_world(world_size, reshard_random, seeds) == [[]] * world_size


# The two matrices of a feed-forward block in one, the second one turned; all else under other names.
FUSED = Transform(
    [Rule("block.down.weight", "down", [transforms.transpose(0, 1)]), Rule("**", "**", others=True)]
).then(
    Transform(
        [
            Rule(["block.up.weight", "down"], "layers.0.fused", [transforms.concat(0)]),
            Rule(["embed.weight", "head.weight"], "ends", [transforms.stack(0)]),
            Rule("block.norm.*", "layers.0.norm.*"),
            Rule("block.up.bias", "layers.0.bias"),
        ],
        drop=["num_batches", "running_mean", "mask"],
    )
)
SHAPES = {
    "layers.0.fused": (2 * UNEVEN.feed_forward, UNEVEN.hidden),
    "ends": (2, UNEVEN.vocab, UNEVEN.hidden),
    "layers.0.norm.weight": (UNEVEN.hidden,),
    "layers.0.bias": (UNEVEN.feed_forward,),
}


def generator_state(ranks: list[int]) -> dict[str, Tensor] | None:
    """In bf16 over some ranks, its matrices by rows; ``None`` on others."""
    mesh = DeviceMesh("cpu", ranks, _init_backend=False)
    if dist.get_rank() not in ranks:
        return None
    zeros = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in SHAPES.items()}
    return {
        name: DTensor.from_local(
            torch.chunk(zero, len(ranks), dim=max(0, zero.dim() - 2))[ranks.index(dist.get_rank())].clone(),
            mesh,
            [Shard(max(0, zero.dim() - 2))],
            shape=zero.shape,
            stride=zero.stride(),
        )
        for name, zero in zeros.items()
    }


def expected_state(model: nn.Module) -> dict[str, Tensor]:
    whole = {name: param.full_tensor() for name, param in model.named_parameters()}
    made = {
        "layers.0.fused": torch.cat([whole["block.up.weight"], whole["block.down.weight"].T]),
        "ends": torch.stack([whole["embed.weight"], whole["head.weight"]]),
        "layers.0.norm.weight": whole["block.norm.weight"],
        "layers.0.bias": whole["block.up.bias"],
    }
    return {name: tensor.detach().bfloat16() for name, tensor in made.items()}


def train_and_send(rank: int, world_size: int) -> None:
    model = build_model(BY_NAME["fsdp2_tp2"], UNEVEN)
    optimizer = build_optimizer(model, lr=1e-5)
    state = generator_state([1, 2])
    plan = tte.transfer.plan_reshard(model, state, transform=FUSED, cast="allow")
    plan.run(version=0, verify=True)
    for version in range(1, 11):
        take_steps(model, optimizer, 1)
        plan.run(version=version, verify=True)
        expected = expected_state(model)
        assert state is None or differences(state, expected) == []


def test_ten_steps_of_an_fp32_trainer_reach_a_fused_bf16_generator(run_world: Any) -> None:
    run_world(4, train_and_send)


def refused(rank: int, world_size: int) -> None:
    source = {"w": torch.zeros(4, 6), "scale": torch.zeros(2, 3), "step": 3}

    def why(rules: list[Rule], target: dict[str, Any], text: str, **options: Any) -> None:
        with pytest.raises(StateRefusedError, match=text):
            tte.reshard(source, target, transform=Transform(rules, drop=["**"]), **options)

    halves = Rule("w", ["left", "right"], [transforms.split(1, parts=2)])
    why([halves], {"lefd": torch.zeros(4, 3)}, "lefd: the transform does not make it.*perhaps left is meant")
    why([halves], {"left": torch.zeros(3, 4)}, r"left: has shape \(4, 3\) by the transform, \(3, 4\) in the")
    why([halves], {"left": 7}, "left: is a tensor by the transform, a value that is no tensor in the target")
    low = {"left": torch.zeros(4, 3, dtype=torch.bfloat16)}
    why([halves], low, "left: the transform gives torch.float32, the target is torch.bfloat16")
    fp8 = {"left": torch.zeros(4, 3, dtype=torch.float8_e4m3fn)}
    why([halves], fp8, r"left: .*need scales.*transforms.cast\('float8_e4m3fn'\)", cast="allow")
    why([Rule("w", "w")], {"w": fp8["left"].new_zeros(4, 6)}, "need scales", cast="allow")
    rounded = Rule("w", "v", [transforms.transpose(0, 1), transforms.cast("bfloat16")])
    why([rounded], {"v": torch.zeros(6, 4)}, "v: is rounded to torch.bfloat16 on its way to torch.float32")
    scaled = Rule(["w", "scale"], "v", [transforms.dequantize([2, 2], dtype="bfloat16")])
    why([scaled], {"v": torch.zeros(4, 6, dtype=torch.bfloat16)}, "v: is made by dequantize")
    with pytest.raises(TransformError, match="scale: no rule takes it"):
        tte.reshard(source, {"left": torch.zeros(4, 3)}, transform=Transform([halves], drop=["right"]))
    other = Transform([halves], drop=["**"] if rank == 0 else ["*"])
    with pytest.raises(StateRefusedError, match="transform: is"):
        tte.reshard(source, {"left": torch.zeros(4, 3)}, transform=other)
    with pytest.raises(TypeError, match="transform"):
        tte.reshard(source, {"left": torch.zeros(4, 3)}, transform=[halves])
    why(
        [Rule("w", "v", [transforms.pad(0, 3)])],
        {"v": torch.zeros(3, 6)},
        "step 1, pad, .*to: got 3 for dim 0 of shape",
    )
    why([Rule("w", "v", [transforms.crop(0, 5)])], {"v": torch.zeros(5, 6)}, "step 1, crop, .*to: got 5 for dim 0 of")
    # By name it is converted, and values that are no tensors go under new names.
    named = Rule("w", "v", [transforms.transpose(0, 1), transforms.cast("float8_e4m3fn")])
    target = {"v": torch.ones(6, 4, dtype=torch.float8_e4m3fn), "at": 0}
    tte.reshard(source, target, transform=Transform([named, Rule("step", "at")], drop=["scale"]), verify=True)
    assert not target["v"].float().any() and target["at"] == 3


def test_what_does_not_fit_is_refused_on_all_ranks(run_world: Any) -> None:
    run_world(2, refused)


class FlipsABit(ops.PlannedExchange):
    """Changes a received element behind the exchange."""

    def __init__(self, sources: list[Tensor], targets: list[Tensor], *tables: Tensor, **options: Any) -> None:
        super().__init__(sources, targets, *tables, **options)
        self.targets = targets

    def run(self, **options: Any) -> None:
        super().run(**options)
        for target in self.targets:
            if target.dtype == torch.bfloat16 and target.numel() > 0 and dist.get_rank() == 1:
                target.view(torch.int16)[(0,) * target.dim()] ^= 1
                return


def flipped(rank: int, world_size: int) -> None:
    model = build_model(BY_NAME["fsdp2_tp2"], UNEVEN)
    state = generator_state([1, 2])
    plan = tte.transfer.plan_reshard(model, state, transform=FUSED, cast="allow")
    with (
        pytest.MonkeyPatch.context() as patch,
        pytest.raises(TransferFailedError, match="are not what the source holds") as caught,
    ):
        patch.setattr(ops, "PlannedExchange", FlipsABit)
        plan.run(verify=True)
    assert len(caught.value.part_written) == 1 and caught.value.part_written[0] in SHAPES
    plan.run()


def test_a_flipped_bit_is_found_through_maps_and_casts(run_world: Any) -> None:
    run_world(4, flipped)


def odd_states(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    turn = Rule("w", "v", [transforms.transpose(0, 1)])
    for dtype in ALL_DTYPES:
        whole = random_whole((5, 6), dtype, 3)
        target = {"v": tte.full.distribute_tensor(torch.zeros_like(whole.T.contiguous()), mesh, [Shard(1)])}
        rows = {"w": tte.full.distribute_tensor(whole, mesh, [Shard(0)])}
        plan = tte.transfer.plan_reshard(rows, target, transform=Transform([turn]))
        plan.run(version=0, verify=True)
        assert differences(target, {"v": whole.T}) == [], dtype
        rows["w"].to_local().copy_(random_whole((5, 6), dtype, 4).tensor_split([3])[rank])
        plan.run(version=1, verify=True)
        assert differences(target, {"v": random_whole((5, 6), dtype, 4).T}) == [], dtype

    # Scalars of a series; the optimizer's steps, which are no shards, to one tensor.
    steps = {f"steps.{number}": torch.tensor(float(number)) for number in range(3)}
    joined = {"steps": tte.full.distribute_tensor(torch.zeros(3), mesh, [Shard(0)])}
    tte.reshard(steps, joined, transform=Transform([Rule("steps.#", "steps", [transforms.stack(0)])]), verify=True)
    assert differences(joined, {"steps": torch.arange(3.0)}) == []
    back = {name: torch.full((), -1.0) for name in steps}
    tte.reshard(joined, back, transform=Transform([Rule("steps", "steps.#", [transforms.unstack(0)])]), verify=True)
    assert differences(back, steps) == []

    # Views that torch computes when they are read; a module with parameters that want gradients; tied targets.
    lazy = {"w": torch.randn(3, 4, dtype=torch.complex64, generator=torch.Generator().manual_seed(1)).conj()}
    filled = {"v": torch.zeros(4, 3, dtype=torch.complex64)}
    tte.reshard(lazy, filled, transform=Transform([turn]), verify=True)
    assert torch.equal(filled["v"], lazy["w"].T.resolve_conj())
    linear = nn.Linear(3, 4)
    before = linear.weight._version
    to_linear = Transform([Rule("w", "weight", [transforms.reshape([4, 3])]), Rule("b", "bias")])
    tte.reshard({"w": torch.arange(12.0), "b": torch.ones(4)}, linear, transform=to_linear, verify=True)
    assert torch.equal(linear.weight, torch.arange(12.0).view(4, 3)) and linear.weight._version > before
    memory = torch.zeros(12)
    both = Transform([Rule("w", "a", [transforms.reshape([3, 4])]), Rule("w", "b", [transforms.reshape([4, 3])])])
    with pytest.raises(StateRefusedError, match="a: cannot be filled: it shares memory with b of the target"):
        tte.reshard({"w": torch.arange(12.0)}, {"a": memory.view(3, 4), "b": memory.view(4, 3)}, transform=both)

    # Tensors that state their boxes on both sides; and one that consists of others, of which its values are taken.
    source_boxes = [[((0, 0), (2, 5)), ((6, 0), (3, 2))], [((6, 2), (3, 3)), ((2, 0), (4, 5))]][rank]
    whole = torch.arange(45.0).view(9, 5)
    state = {"w": cut(whole, source_boxes)}
    target = {"v": cut(torch.zeros(5, 9), [((0, 0), (5, 4))] if rank == 0 else [((0, 4), (5, 5))])}
    tte.reshard(state, target, transform=Transform([turn]), verify=True)
    assert torch.equal(parts(target["v"])[0], whole.T[:, :4] if rank == 0 else whole.T[:, 4:])
    quantised = {"w": BlockInt8.of(torch.arange(32.0).view(8, 4), 2)} if rank == 0 else None
    dense = {"v": torch.zeros(4, 8)}
    with torch.serialization.safe_globals([BlockInt8]):  # others go by their parts
        tte.reshard(quantised, dense, transform=Transform([turn]), verify=True)
    assert torch.equal(dense["v"], BlockInt8.of(torch.arange(32.0).view(8, 4), 2).dense().T)


def test_odd_states(run_world: Any) -> None:
    run_world(2, odd_states)


def of_stages(rank: int, world_size: int) -> None:
    """Each pipeline stage has some layers, and two stages have each layer but the first and the last one."""

    def matrix(layer: int, name: str) -> Tensor:
        return torch.full((4, 2), 10.0 * layer + (name == "up"))

    own = {f"{layer}.{name}": matrix(layer, name) for layer in (rank, rank + 1) for name in ("gate", "up")}
    fused = Transform([Rule(["*.gate", "*.up"], "*.gate_up", [transforms.concat(0)])])
    mesh = init_device_mesh("cpu", (3,))
    whole = {f"{layer}.gate_up": torch.cat([matrix(layer, "gate"), matrix(layer, "up")]) for layer in range(4)}
    target = {
        name: tte.full.distribute_tensor(torch.zeros_like(tensor), mesh, [Shard(1)]) for name, tensor in whole.items()
    }
    result = tte.reshard(own, target, transform=fused, verify=True)
    assert differences(target, whole) == []
    assert result.bytes_received + result.bytes_kept == sum(tensor.to_local().nbytes for tensor in target.values())
    if rank == 1:
        own["1.up"] += 1
    with pytest.raises(StateRefusedError, match="1.up: has replicas that differ in the source"):
        tte.reshard(own, target, transform=fused, verify=True)
    tte.reshard(own, target, transform=fused, replicas="first", verify=True)
    assert differences(target, whole) == [], "rank 0 is the first"


def test_stages_and_replicas(run_world: Any) -> None:
    run_world(3, of_stages)


@late.exchanging_over_hosts
def on_two_devices(rank: int, world_size: int) -> None:
    """Some tensors of a side lie on an accelerator, and others in host memory: these travel by way of copies there."""
    mesh = DeviceMesh("late", [0, 1], _init_backend=False)
    whole = torch.arange(24.0).view(6, 4)
    rows = DTensor.from_local(whole.chunk(2)[rank].to("late"), mesh, [Shard(0)])
    source = {"w": rows, "step": torch.full((2,), 3.0)}
    target = {"v": torch.zeros(4, 6, dtype=torch.bfloat16, device="late"), "at": torch.zeros(2, 1)}
    rules = [Rule("w", "v", [transforms.transpose(0, 1)]), Rule("step", "at", [transforms.reshape([2, 1])])]
    plan = tte.transfer.plan_reshard(
        source,
        target if rank == 1 else None,
        transform=Transform(rules),
        cast="allow",
    )
    plan.run(version=0, verify=True)
    if rank == 1:
        assert torch.equal(target["v"].cpu(), whole.T.bfloat16()) and target["at"].tolist() == [[3.0], [3.0]]
    rows.to_local()[0, 0] = 99
    source["step"] += 1
    plan.run(version=1, verify=True)
    if rank == 1:
        assert target["v"][0].tolist() == [99, 4, 8, 99, 16, 20] and target["at"].tolist() == [[4.0], [4.0]]


def test_tensors_on_two_devices(run_late_world: Any) -> None:
    run_late_world(2, on_two_devices)
