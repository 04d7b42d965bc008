"""The operators of blocks: against torch on whole tensors, any dtypes and strides, opcheck, torch.compile, refusals."""

from __future__ import annotations

import random
from math import prod
from typing import Any, get_args

import pytest
import torch
from block_scales import grid_of, quantized
from extent import sampled
from raw_ops import RAW_REFUSAL
from test_ops import DEVICES
from torch import Tensor

from torchtitan_ext import ops
from torchtitan_ext.layout.layout import row_major_strides
from torchtitan_ext.transforms.block_scales import Arithmetic
from torchtitan_ext.transforms.rules import FP8, Scaling


def whole_part(shape: tuple[int, ...], block: tuple[int, ...], start: int = 0) -> ops.BlockPart:
    strides = row_major_strides(grid_of(shape, block))
    return ops.BlockPart(start, block, strides, (0,) * len(shape), [(dim, 1) for dim in range(len(shape))])


def quantised_by_ops(
    tensors: list[Tensor], parts: list[ops.BlockPart], num_blocks: int, arithmetic: Arithmetic
) -> tuple[list[Tensor], Tensor]:
    device = tensors[0].device
    amax = torch.zeros(num_blocks, device=device)
    ops.block_amax_(tensors, parts, amax, rounded=arithmetic.rounded)
    factors, scales = arithmetic.scales(amax)
    out = [torch.empty(one.shape, dtype=getattr(torch, arithmetic.dtype), device=device) for one in tensors]
    ops.quantize_blocks_(tensors, parts, factors, out, rounded=arithmetic.rounded, divides=arithmetic.divides)
    return out, scales


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", sampled(range(30), 0.34))
def test_parts_anywhere_are_quantised_as_the_whole(device: str, seed: int) -> None:
    draw = random.Random(seed)
    shape = tuple(draw.choice([1, 3, 8, 33, 70]) for _ in range(draw.randint(1, 3)))
    block = tuple(draw.choice([1, 2, 5, 32, 64]) for _ in shape)
    held = draw.choice(["float32", "bfloat16", "float16", "float64"])
    arithmetic = Arithmetic(draw.choice(FP8), held, draw.choice(get_args(Scaling)))
    torch.manual_seed(seed)
    whole = (torch.randn(shape) * torch.exp2(torch.randint(-20, 10, shape).float())).to(getattr(torch, held))
    exact = whole.float() if held == "float64" else whole
    values, scales = quantized(exact, block, getattr(torch, arithmetic.dtype), arithmetic.scaling)
    # Every second element of the last dim, turned around, and the others.
    at_front = [(dim, 1) for dim in range(len(shape))]
    steps = [*at_front[:-1], (len(shape) - 1, 2)]
    order = list(range(len(shape)))[::-1]
    parts, held_parts, taken = [], [], []
    for first in range(min(2, shape[-1])):
        view = whole.to(device)[..., first::2]
        stored = torch.empty((*view.shape, 2), dtype=view.dtype, device=device)[..., 0]
        stored.copy_(view)
        held_parts.append(stored.permute(order))
        start = (*(0 for _ in shape[1:]), first)
        part = whole_part(shape, block, 5)
        parts.append(part._replace(first=start, steps=[steps[dim] for dim in order]))
        taken.append(values[..., first::2].permute(order))
    num_blocks = prod(grid_of(shape, block))
    found, grid = quantised_by_ops(held_parts, parts, num_blocks + 5, arithmetic)
    assert torch.equal(grid[5:].cpu().view(scales.shape), scales)
    for one, wanted in zip(found, taken, strict=True):
        assert torch.equal(one.cpu().view(torch.uint8), wanted.contiguous().view(torch.uint8))


def test_a_nan_is_infinite_and_the_largest_stays() -> None:
    amax = torch.tensor([3.0, 3.0, 3.0])
    part = whole_part((3, 2), (1, 2))
    ops.block_amax_([torch.tensor([[1.0, -2.0], [float("nan"), 1.0], [-4.0, 0.0]])], [part], amax)
    assert amax.tolist() == [3.0, float("inf"), 4.0]


def test_a_scalar_and_nothing() -> None:
    amax = torch.zeros(1)
    ops.block_amax_([torch.tensor(-7.0), torch.empty(0, 3)], [whole_part((), ()), whole_part((0, 3), (1, 3))], amax)
    assert amax.tolist() == [7.0]
    ops.block_amax_([], [], amax)
    ops.quantize_blocks_([], [], amax, [])


TABLE = [2, 0, 2, 2, 2, 1, 0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize("device", DEVICES)
def test_opcheck_and_compile(device: str) -> None:
    values = torch.randn(4, 4, device=device)
    amax, out = torch.zeros(4, device=device), torch.empty(4, 4, dtype=torch.float8_e4m3fn, device=device)
    raw: Any = torch.ops.torchtitan_ext
    torch.library.opcheck(raw.block_amax_.default, ([values], TABLE, torch.bfloat16, amax))

    def both(values: Tensor, amax: Tensor, out: Tensor) -> Tensor:
        part = whole_part((4, 4), (2, 2))
        ops.block_amax_([values], [part], amax)
        ops.quantize_blocks_([values], [part], 448 / amax, [out])
        return amax * 2

    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")(values, amax, out)
    wanted, _ = quantized(values.cpu(), (2, 2), torch.float8_e4m3fn, "transformers")
    assert torch.equal(out.cpu().view(torch.uint8), wanted.view(torch.uint8))
    assert torch.equal(compiled, amax * 2)


def test_versions_are_counted_and_gradients_refused() -> None:
    amax, values = torch.zeros(4), torch.randn(4, 4)
    before = amax._version
    ops.block_amax_([values], [whole_part((4, 4), (2, 2))], amax)
    assert amax._version == before + 1
    with pytest.raises(RuntimeError, match="requires grad"):
        ops.block_amax_([values.requires_grad_()], [whole_part((4, 4), (2, 2))], amax)


@pytest.mark.parametrize(
    ("values", "table", "amax", "words"),
    [
        (torch.ones(4, 4).int(), TABLE, torch.zeros(4), "float32, float64, bfloat16 or float16"),
        (torch.ones(4, 4), TABLE[:-1], torch.zeros(4), "tables end too early"),
        (torch.ones(4, 4), [*TABLE, 1], torch.zeros(4), "tables have more"),
        (torch.ones(4, 4), TABLE, torch.zeros(3), "block 3 of 3"),
        (torch.ones(4, 4), TABLE, torch.zeros(4).double(), "1-d, contiguous float32"),
        (torch.ones(4, 4), TABLE, torch.zeros(8)[::2], "1-d, contiguous float32"),
        (torch.ones(4, 4), [2, 0, 0, *TABLE[3:]], torch.zeros(4), r"tables\[2\] is 0"),
        (torch.ones(4, 4), [*TABLE[:8], 2, *TABLE[9:]], torch.zeros(4), r"tables\[8\] is 2"),
        (torch.ones(4, 4), [2, 2**62, *TABLE[2:]], torch.zeros(4), "name block"),
    ],
)
def test_bad_arguments_are_refused(values: Tensor, table: list[int], amax: Tensor, words: str) -> None:
    with pytest.raises(RAW_REFUSAL, match=words):
        torch.ops.torchtitan_ext.block_amax_([values], table, torch.float32, amax)
    assert not amax.any()


def test_bad_outputs_are_refused() -> None:
    part, factors, values = whole_part((4, 4), (2, 2)), torch.ones(4), torch.ones(4, 4)
    fp8 = torch.zeros(4, 4, dtype=torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="must be float8_e4m3fn or float8_e5m2"):
        ops.quantize_blocks_([values], [part], factors, [torch.zeros(4, 4)])
    with pytest.raises(ValueError, match="must be contiguous and have the sizes"):
        ops.quantize_blocks_([values], [part], factors, [fp8.T])
    with pytest.raises(ValueError, match="got 1 tensors and 0 in out"):
        ops.quantize_blocks_([values], [part], factors, [])
    with pytest.raises(ValueError, match="rounded must be"):
        ops.quantize_blocks_([values], [part], factors, [fp8], rounded=torch.float64)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fp8", FP8)
def test_each_float_becomes_the_fp8_that_torch_makes(device: str, fp8: str) -> None:
    """All numbers of bfloat16 and float16, and those beside the middles between two of fp8."""
    dtype = getattr(torch, fp8)
    patterns = torch.arange(-(2**15), 2**15).to(torch.int16)
    every = torch.cat([patterns.view(torch.bfloat16).float(), patterns.view(torch.float16).float()])
    middles = torch.arange(256).to(torch.uint8).view(dtype).float()
    middles = (middles[:-1] + middles[1:]) / 2
    beside = (middles.view(torch.int32) + torch.arange(-2, 3).to(torch.int32).view(5, 1)).view(torch.float32)
    values = torch.cat([every, middles, beside.flatten()])
    values = values[values.isfinite()].to(device)
    most = torch.finfo(dtype).max
    out = torch.empty(values.shape, dtype=dtype, device=device)
    ops.quantize_blocks_([values], [whole_part(tuple(values.shape), (1 << 20,))], torch.ones(1, device=device), [out])
    assert torch.equal(out.view(torch.uint8), values.clamp(-most, most).to(dtype).view(torch.uint8))
