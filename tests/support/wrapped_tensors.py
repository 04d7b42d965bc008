"""Wrapper subclasses as quantisation libraries have them: tensors that consist of others, with slices of their own."""

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

aten = torch.ops.aten


class BlockInt8(Tensor):
    """Rows of int8, and one float scale per block of rows, as 8-bit optimizer states are held.

    It can be cut between blocks only; looks like float32.
    """

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor, block_rows: int) -> "BlockInt8":
        return Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32, device=codes.device)

    def __init__(self, codes: Tensor, scale: Tensor, block_rows: int) -> None:
        self.codes, self.scale, self.block_rows = codes, scale, block_rows

    @classmethod
    def of(cls, dense: Tensor, block_rows: int) -> "BlockInt8":
        scale = dense.unflatten(0, (-1, block_rows)).abs().amax(dim=(1, 2)).clamp(min=1e-6) / 127
        codes = (dense / scale.repeat_interleave(block_rows)[:, None]).round().to(torch.int8)
        return cls(codes, scale, block_rows)

    def dense(self) -> Tensor:
        return self.codes.float() * self.scale.repeat_interleave(self.block_rows)[:, None]

    def __tensor_flatten__(self) -> tuple[list[str], int]:
        return ["codes", "scale"], self.block_rows

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], block_rows: int, size: Any, stride: Any) -> "BlockInt8":
        return cls(inner["codes"], inner["scale"], block_rows)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (aten.detach.default, aten.view.default):  # DTensor.from_local views it as what it is
            assert func is aten.detach.default or tuple(args[1]) == tuple(args[0].shape)
            return cls(args[0].codes, args[0].scale, args[0].block_rows)
        if func is aten.slice.Tensor:
            held, dim, start, end = args
            if dim or start % held.block_rows or end % held.block_rows:
                raise ValueError(f"rows {start} to {end} do not end on blocks of {held.block_rows}")
            scale = held.scale[start // held.block_rows : end // held.block_rows]
            return cls(held.codes[start:end], scale, held.block_rows)
        if func is aten.copy_.default:
            return copy_blocks(*args[:2])
        if func is aten.is_pinned.default:  # stock DCP asks when it saves
            return False
        raise NotImplementedError(str(func))


def copy_blocks(target: Tensor, source: Tensor) -> Tensor:
    if not isinstance(target, BlockInt8):
        assert isinstance(source, BlockInt8)
        return target.copy_(source.dense())
    source = source if isinstance(source, BlockInt8) else BlockInt8.of(source, target.block_rows)
    assert source.block_rows == target.block_rows, "blocks differ"
    target.codes.copy_(source.codes)
    target.scale.copy_(source.scale)
    return target


class CastOnGather(Tensor):
    """A weight that is cast when it is gathered, as FSDP2's fp8 all-gather has it; its slices are the weight's."""

    KEPT = (aten.detach, aten.slice, aten.copy_, aten.empty_like, aten.clone, aten._to_copy, aten.view)

    @staticmethod
    def __new__(cls, weight: Tensor, target: torch.dtype) -> "CastOnGather":
        return Tensor._make_wrapper_subclass(
            cls, weight.shape, strides=weight.stride(), dtype=weight.dtype, device=weight.device
        )

    def __init__(self, weight: Tensor, target: torch.dtype) -> None:
        self.weight, self.target = weight, target

    def __tensor_flatten__(self) -> tuple[list[str], torch.dtype]:
        return ["weight"], self.target

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], target: Any, size: Any, stride: Any) -> "CastOnGather":
        return cls(inner["weight"], target)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        targets = [value.target for value in pytree.tree_leaves(args) if isinstance(value, cls)]
        plain, named = pytree.tree_map_only(cls, lambda held: held.weight, (args, kwargs or {}))
        made = func(*plain, **named)
        if func is aten.copy_.default:
            return args[0]
        return cls(made, targets[0]) if func.overloadpacket in cls.KEPT else made


class CopiedSlices(CastOnGather):
    """One whose slices are copies: what is written to them is lost."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = super().__torch_dispatch__(func, types, args, kwargs)
        return cls(made.weight.clone(), made.target) if func is aten.slice.Tensor else made


ALLOWED = [BlockInt8, CastOnGather, CopiedSlices]
"""For ``torch.serialization.add_safe_globals``, which libraries call where they are imported."""
