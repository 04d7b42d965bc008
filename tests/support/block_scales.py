"""Quantisation with a scale per block on whole tensors, by torch: what `transforms.quantize` must give to the bit."""

import torch


def grid_of(shape: tuple[int, ...], block: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(-(-size // of) for size, of in zip(shape, block, strict=True))


def quantized(
    whole: torch.Tensor, block: tuple[int, ...], dtype: torch.dtype, scaling: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """The values and the scales of a tensor of any float dtype. `block` has a size for each dim."""
    most = torch.finfo(dtype).max
    padded = torch.zeros([-(-size // of) * of for size, of in zip(whole.shape, block, strict=True)], dtype=whole.dtype)
    padded[tuple(slice(size) for size in whole.shape)] = whole
    tiles = [(size // of, of) for size, of in zip(padded.shape, block, strict=True)]
    split = padded.view([size for pair in tiles for size in pair])
    amax = split.abs().amax(dim=tuple(range(1, split.dim(), 2)), keepdim=True)
    exact = split.to(torch.float32)
    if scaling == "torchao":
        scales = (amax / most).to(torch.float32)
        scaled = exact / torch.where(scales > 0, scales, 1.0)
    elif scaling == "deepseek":
        amax = amax.to(torch.float32).clamp(1e-4)
        scales, scaled = amax / most, exact * (most / amax)
    else:
        amax = amax.to(torch.float32)
        factors = torch.where(amax > 0, most / torch.where(amax > 0, amax, 1.0), 1.0)
        scales, scaled = 1.0 / factors, exact * factors
    values = scaled.clamp(-most, most).to(dtype).view(padded.shape)[tuple(slice(size) for size in whole.shape)]
    return values.contiguous(), scales.view([count for count, _ in tiles])
