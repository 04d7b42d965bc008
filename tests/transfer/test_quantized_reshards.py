"""Tensors that are quantised on their way from rank to rank: random transforms, layouts and blocks against torch."""

import random
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from block_scales import quantized
from extent import SEED, num_cases
from gloo_worlds import on_a_gpu
from models import differences, poison
from random_layouts import SideOfTransfer
from random_transforms import Composition
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import torchtitan_ext as tte
from torchtitan_ext import transforms
from torchtitan_ext.errors import CheckpointFailedError, StateRefusedError, TransferFailedError, TransformError
from torchtitan_ext.offline.mapped_files import MappedFiles
from torchtitan_ext.offline.rewrite.convert import convert
from torchtitan_ext.offline.sources import open_source
from torchtitan_ext.transfer import quantizer
from torchtitan_ext.transforms import Rule, Transform
from torchtitan_ext.transforms.rules import FP8, Scaling

NUM_PLANS = num_cases(13)


def random_values(draw: random.Random, count: int, dtype: torch.dtype) -> Tensor:
    """Of many magnitudes, some zeros: all of them too, or all tiny."""
    generator = torch.Generator().manual_seed(draw.randrange(2**31))
    values = torch.randn(count, generator=generator) * torch.exp2(
        torch.randint(-20, 12, (count,), generator=generator).to(torch.float32)
    )
    values *= draw.choice([0.0, 1.0, 1.0, 1.0, 2.0**-60])
    values[torch.rand(count, generator=generator) < 0.2] = 0
    return values.to(dtype)


class Case:
    """A tensor that is made by random steps and quantised, and what it is on one rank."""

    def __init__(self, draw: random.Random) -> None:
        composition = Composition(draw, pads=False)
        for _ in range(draw.randint(0, 5)):
            composition.step()
        if composition.array.ndim == 0:
            composition.follow([transforms.reshape([1])], composition.array.reshape(1))
        num_dims = composition.array.ndim
        self.block = [draw.choice([1, 2, 3, 4, 7, -1]) for _ in range(draw.randint(1, num_dims))]
        self.fp8, self.scaling = draw.choice(FP8), draw.choice(get_args(Scaling))
        self.held = draw.choice([torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.float64])
        self.rounded = draw.choice([None, torch.bfloat16]) if self.held is torch.float32 else None
        steps = [] if self.rounded is None else [transforms.cast("bfloat16")]
        steps.append(transforms.quantize(self.block, dtype=self.fp8, scaling=self.scaling))
        last = Transform([Rule(composition.name, ["q", "s"], steps), Rule("**", "**", others=True)], drop=["other"])
        self.transform = composition.transform().then(last) if composition.rules else last
        self.values = random_values(draw, composition.num_elements, self.held)
        # Elements are numbered through all sources.
        self.numbers = {name: torch.from_numpy(array.copy()) for name, array in composition.sources.items()}
        self.result = torch.from_numpy(composition.array.copy())

    def sources(self) -> dict[str, Tensor]:
        return {name: self.values[numbers] for name, numbers in self.numbers.items()}

    def truth(self) -> dict[str, Tensor]:
        whole = self.values[self.result]
        sizes = [1] * (whole.dim() - len(self.block)) + [
            max(size, 1) if of == -1 else of
            for of, size in zip(self.block, whole.shape[-len(self.block) :], strict=True)
        ]
        whole = whole if self.rounded is None else whole.to(self.rounded)
        whole = whole.to(torch.float32) if whole.dtype is torch.float64 else whole
        values, scales = quantized(whole, tuple(sizes), getattr(torch, self.fp8), self.scaling)
        return {"q": values, "s": scales}

    def __repr__(self) -> str:
        return f"{self.transform.to_json()} of {self.held}"


def wrong_in(side: SideOfTransfer, truth: dict[str, Tensor]) -> list[str]:
    return [
        line
        for name, tensor in side.tensors.items()
        for line in differences({name: tensor}, {name: truth[name]}, list(side.layouts[name].steps))
    ]


def reshard_random(rank: int, world_size: int, device: str, seeds: list[str]) -> list[str]:
    lines = []
    for seed in seeds:
        draw = random.Random(seed)
        case = Case(draw)
        source = SideOfTransfer(draw, world_size, case.numbers, device)
        numbered = {name: tensor.to_local().cpu().clone() for name, tensor in source.tensors.items()}
        sources = {}
        for name, of in source.tensors.items():
            local = case.values[numbered[name]].to(device)
            sources[name] = DTensor.from_local(local, of.device_mesh, of.placements, shape=of.shape, stride=of.stride())
        target = SideOfTransfer(draw, world_size, case.truth(), device)
        keeps = draw.random() < 0.5
        plan = tte.transfer.plan_reshard(
            sources or None,
            target.tensors or None,
            transform=case.transform,
            source_layouts=source.orders,
            target_layouts=target.orders,
            keep_sent=keeps,
            bucket_bytes=draw.choice([64, 1 << 25]),
        )
        poison(target.tensors)
        for version in range(3):
            plan.run(version=version, verify=draw.random() < 0.5, changed_only=keeps and version > 0)
            lines += [f"seed {seed}, version {version}, {line}: {case!r}" for line in wrong_in(target, case.truth())]
            chosen = torch.randperm(len(case.values), generator=torch.Generator().manual_seed(version))
            case.values[chosen[: len(chosen) // 3]] *= draw.choice([0.5, 3, -1])
            for name, tensor in sources.items():
                tensor.to_local().copy_(case.values[numbered[name]])
    return lines


def load_random(rank: int, world_size: int, device: str, path: Path, seeds: list[str]) -> list[str]:
    lines = []
    for seed in seeds:
        draw = random.Random(seed)
        case = Case(draw)
        source = path / seed.replace(" ", "_")
        tte.save(case.sources(), source)
        target = SideOfTransfer(draw, world_size, case.truth(), device)
        poison(target.tensors)
        planner = tte.LoadPlanner(layouts=target.orders)
        tte.load(target.tensors, source, transform=case.transform, planner=planner, share_reads=draw.random() < 0.5)
        lines += [f"seed {seed}, {line}: {case!r}" for line in wrong_in(target, case.truth())]
    return lines


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_random_tensors_are_quantised_as_whole_ones(run_world: Any, world_size: int) -> None:
    seeds = [f"{SEED} {number}" for number in range(NUM_PLANS)]
    assert run_world(world_size, reshard_random, "cpu", seeds) == [[]] * world_size


@pytest.mark.parametrize("world_size", [1, 4])
def test_random_tensors_are_quantised_while_they_are_loaded(run_world: Any, tmp_path: Path, world_size: int) -> None:
    seeds = [f"{SEED} {number}" for number in range(NUM_PLANS)]
    assert run_world(world_size, load_random, "cpu", tmp_path, seeds) == [[]] * world_size


@pytest.mark.needs_cuda
def test_random_tensors_are_quantised_on_a_gpu(run_world: Any, tmp_path: Path) -> None:
    seeds = [f"{SEED} on a GPU {number}" for number in range(num_cases(6))]
    assert run_world(4, on_a_gpu, reshard_random, "cuda", seeds) == [[]] * 4
    assert run_world(2, on_a_gpu, load_random, "cuda", tmp_path, seeds) == [[]] * 2


def test_a_checkpoint_is_converted_to_fp8_and_back(tmp_path: Path) -> None:
    torch.manual_seed(3)
    weights = {f"layers.{number}.w": torch.randn(300, 200, dtype=torch.bfloat16) for number in range(3)}
    tte.save(weights, tmp_path / "bf16")
    step = transforms.quantize([128, 128], scaling="deepseek", was="bfloat16")
    transform = Transform([Rule("layers.*.w", ["layers.*.w", "layers.*.w_scale_inv"], [step])])
    assert Transform.from_json(transform.to_json()) == transform
    source = MappedFiles(open_source(tmp_path / "bf16"), transform)
    convert(source, tmp_path / "fp8", to="safetensors", num_processes=2)
    files = load_file(tmp_path / "fp8" / "model.safetensors")
    for name, weight in weights.items():
        values, scales = quantized(weight, (128, 128), torch.float8_e4m3fn, "deepseek")
        assert torch.equal(files[name].view(torch.uint8), values.view(torch.uint8))
        assert torch.equal(files[f"{name}_scale_inv"], scales)
    loaded = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    tte.weights.load(loaded, tmp_path / "fp8", transform=transform.inverse())
    for name, weight in weights.items():
        assert (loaded[name] - weight).abs().max() < 0.07 * weight.abs().max()
    assert transform.inverse().inverse() == transform


QUANTIZED = Transform([Rule("w", ["q", "s"], [transforms.quantize([2, 2])])])
FULL = {"q": torch.zeros(4, 4, dtype=torch.float8_e4m3fn), "s": torch.zeros(2, 2)}


def moved(steps: list[Any], *, shape: tuple[int, ...] = (4, 4)) -> Transform:
    return Transform([Rule("w", ["q", "s"], [*steps, transforms.quantize([2, 2])])])


@pytest.mark.parametrize(
    ("transform", "source", "target", "words"),
    [
        (QUANTIZED, torch.ones(4, 4), {"q": FULL["q"]}, "together with s, which the target does not have"),
        (QUANTIZED, torch.ones(4, 4), {"s": FULL["s"]}, "together with q, which the target does not have"),
        (QUANTIZED, torch.ones(4, 4), FULL | {"q": torch.zeros(4, 4)}, "torch.float8_e4m3fn by the transform"),
        (QUANTIZED, torch.ones(4, 4), FULL | {"s": torch.zeros(2, 2).double()}, "torch.float32 by the transform"),
        (QUANTIZED, torch.ones(4, 4), FULL | {"s": torch.zeros(4, 4)}, r"has shape \(2, 2\) by the transform"),
        (QUANTIZED, torch.ones(4, 4).int(), FULL, "is quantised from int32"),
        (moved([transforms.cast("bfloat16"), transforms.cast("float16")]), torch.ones(4, 4), FULL, "cast once at most"),
        (moved([transforms.pad(0, 4, value=1)]), torch.ones(3, 4), FULL, "with zeros alone"),
        (QUANTIZED, torch.tensor([[1.0, float("nan")]] * 4).repeat(1, 2), FULL, "NaN or infinite"),
        (QUANTIZED, torch.full((4, 4), -float("inf")), FULL, "NaN or infinite"),
        (
            QUANTIZED.then(Transform([Rule("q", "r", [transforms.transpose(0, 1)]), Rule("s", "s")])),
            torch.ones(4, 4), FULL, "which comes last",
        ),
        (QUANTIZED.then(Transform([Rule("q", "q")], drop=["s"])), torch.ones(4, 4), FULL, "its scales go nowhere"),
        (QUANTIZED.then(Transform([Rule("s", "s")], drop=["q"])), torch.ones(4, 4), FULL, "whose values go nowhere"),
        (Transform([Rule("w", ["q", "s"], [transforms.quantize([0, 2])])]), torch.ones(4, 4), FULL, "expected sizes"),
        (Transform([Rule("w", ["q", "s"], [transforms.quantize([1, 2, 2])])]), torch.ones(4, 4), FULL, "for shape"),
    ],
)  # fmt: skip
def test_what_cannot_be_quantised_is_refused(
    transform: Transform, source: Tensor, target: dict[str, Tensor], words: str
) -> None:
    target = {name: tensor.clone() for name, tensor in target.items()}
    with pytest.raises(StateRefusedError, match=words):
        tte.reshard({"w": source}, target, transform=transform, cast="allow")
    assert all(not tensor.any() for tensor in target.values() if tensor.dtype is not torch.float8_e4m3fn)


def test_zeros_may_be_padded_and_are_zeros() -> None:
    target = {"q": torch.full((4, 4), 7.0).to(torch.float8_e4m3fn), "s": torch.zeros(2, 2)}
    tte.reshard({"w": torch.ones(3, 4)}, target, transform=moved([transforms.pad(0, 4)]), verify=True)
    assert torch.equal(target["q"].float(), torch.tensor([[448.0]] * 3 + [[0.0]]).expand(4, 4))
    assert torch.equal(target["s"], torch.full((2, 2), 1 / 448))


def test_a_load_names_what_has_no_scale(tmp_path: Path) -> None:
    tte.save({"w": torch.tensor([[1.0, float("inf")]] * 4)}, tmp_path / "step")
    target = {"q": torch.zeros(4, 2, dtype=torch.float8_e4m3fn), "s": torch.zeros(2, 1)}
    with pytest.raises(CheckpointFailedError, match="q: has elements that are NaN or infinite"):
        tte.load(target, tmp_path / "step", transform=QUANTIZED)


def test_a_save_says_how_to_get_there(tmp_path: Path) -> None:
    with pytest.raises(TransformError, match=r"tte\.reshard into tensors of fp8"):
        tte.weights.save({"w": torch.ones(4, 4)}, tmp_path / "weights", transform=QUANTIZED)


def fsdp_to_engine(rank: int, world_size: int) -> list[str]:
    """A trainer of FSDP2 in fp32 gives an engine of two ranks bf16-rounded fp8 by columns, each step, in full and then
    by changes: a small step sends less."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(96, 130, bias=False), torch.nn.Linear(130, 64, bias=False))
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    mesh = init_device_mesh("cpu", (world_size,))
    steps = [transforms.cast("bfloat16"), transforms.quantize([32, 32], scaling="deepseek")]
    transform = Transform([Rule("*.weight", ["*.weight", "*.weight_scale_inv"], steps)])
    target: dict[str, Any] = {}
    for name, param in model.named_parameters():
        values, scales = quantized(torch.zeros(param.shape), (32, 32), torch.float8_e4m3fn, "deepseek")
        target[name] = distribute_tensor(values.float(), mesh, [Shard(1)]).to(torch.float8_e4m3fn)
        target[f"{name}_scale_inv"] = distribute_tensor(scales, mesh, [Shard(1)])
    plan = tte.transfer.plan_reshard(model, target, transform=transform, keep_sent=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-7)
    lines, sent = [], []
    for step in range(4):
        result = plan.run(version=step, verify=True, changed_only=step > 0)
        sent.append(result.bytes_sent)
        for name, param in model.named_parameters():
            whole = param.full_tensor().to(torch.bfloat16)
            values, scales = quantized(whole, (32, 32), torch.float8_e4m3fn, "deepseek")
            lines += [f"step {step}, {line}" for line in differences({name: target[name]}, {name: values})]
            name = f"{name}_scale_inv"
            lines += [f"step {step}, {line}" for line in differences({name: target[name]}, {name: scales})]
        model(torch.ones(1, 96)).sum().backward()
        optimizer.step()
    if not all(few < sent[0] / 2 for few in sent[1:]):
        lines.append(f"bytes sent: {sent}")
    return lines


def test_a_trainer_fills_an_engine_in_fp8_step_by_step(run_world: Any) -> None:
    assert run_world(2, fsdp_to_engine) == [[], []]


def fails_on_one(rank: int, world_size: int, op: str) -> str:
    """What this rank is told, and whether its target is as it was, where an operator fails on rank 1 alone."""
    mesh = init_device_mesh("cpu", (world_size,))
    source = {"w": distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])}
    target = {name: tensor.clone() for name, tensor in FULL.items()}
    plan = tte.transfer.plan_reshard(source, target, transform=QUANTIZED)

    def fail(*_: Any, **__: Any) -> None:
        raise MemoryError(f"no memory for {op}")

    with pytest.MonkeyPatch.context() as patch, pytest.raises(TransferFailedError) as raised:
        if rank == 1:
            patch.setattr(quantizer.ops, op, fail)
        plan.run()
    assert not target["s"].any() and not target["q"].float().any()
    return str(raised.value)


@pytest.mark.parametrize("op", ["block_amax_", "quantize_blocks_"])
def test_all_ranks_hear_of_one_that_cannot_quantise(run_world: Any, op: str) -> None:
    first, second = run_world(2, fails_on_one, op)
    assert first == second and f"rank 1: MemoryError: no memory for {op}" in first
