"""Calls of ops that fail: one sentence, whatever the dispatcher says."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from raw_ops import RAW_REFUSAL
from torch import Tensor

from torchtitan_ext import ops
from torchtitan_ext.layout.layout import Chunk, LocalShard
from torchtitan_ext.op_library import kernels

SHARD = LocalShard((2,), (Chunk((0,), (2,), (0,)),))
FLAT = torch.zeros(256, dtype=torch.uint8)
CALLS: dict[str, Callable[[Tensor], Any]] = {
    "pack_shard": lambda nested: ops.pack_shard(nested, SHARD),
    "pack_shards": lambda nested: ops.pack_shards([nested], [SHARD]),
    "unpack_shard_": lambda nested: ops.unpack_shard_(nested, torch.zeros(2), SHARD),
    "unpack_shard_ of a nested shard": lambda nested: ops.unpack_shard_(torch.zeros(2), nested, SHARD),
    "unpack_shard": lambda nested: ops.unpack_shard(nested, torch.zeros(2), SHARD),
    "flatten_tensors": lambda nested: ops.flatten_tensors([nested]),
    "flatten_into_": lambda nested: ops.flatten_into_([nested], FLAT),
    "unflatten_tensors_": lambda nested: ops.unflatten_tensors_([nested], FLAT),
    "fingerprint_shard": lambda nested: ops.fingerprint_shard(nested, SHARD, (2,)),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_a_nested_tensor_is_one_sentence(name: str, layout: torch.layout) -> None:
    nested = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=layout)
    with pytest.raises(ValueError, match="nested.*; pass the tensor of its values") as caught:
        CALLS[name](nested)
    assert len(str(caught.value)) < 150


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_past_the_wrapper_is_one_sentence() -> None:
    nested = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])
    with pytest.raises(RAW_REFUSAL, match=r"tensors\[0\] is nested; pass the tensor of its values") as caught:
        kernels.flatten_tensors([nested], 64, torch.uint8)
    assert len(str(caught.value)) < 150
