"""Which memory of a vLLM model holds which part of which tensor of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)

# Their load_weights turns tensors before a layer gets them.
_TURNING_MODELS = ("GPT2Model",)


class Wanted(NamedTuple):
    """A tensor of the checkpoint."""

    dtype: torch.dtype
    shape: tuple[int, ...]


def live_targets(model: nn.Module, wanted: Mapping[str, Wanted]) -> dict[str, Any]:
    """Views of parameters that hold a part of a tensor of the checkpoint as it is; each states its box.

    Known are vLLM's own unquantized linear layers, fused ones by the model's ``packed_modules_mapping``, and its
    embeddings. A layer is given whole or not at all: vLLM loads what is left layer by layer.
    """
    found: dict[str, Any] = {}
    if any(type(module).__name__ in _TURNING_MODELS for module in model.modules()):
        return found
    fused: Mapping[str, Sequence[str]] = getattr(model, "packed_modules_mapping", {})
    for prefix, layer in model.named_modules():
        parts = list(_parts_of(layer))
        outer, _, own_name = prefix.rpartition(".")
        names = [f"{outer}.{name}".lstrip(".") for name in fused.get(own_name, [own_name])]
        if not parts or len(names) != len(parts):
            continue
        of_layer: dict[str, Any] = {}
        params = dict(layer.named_parameters(recurse=False))
        for param_name, param in params.items():
            for name, part in zip(names, parts, strict=True):
                key = f"{name}.{param_name}"
                if key in wanted and (view := part.view_of(param.data, wanted[key])) is not None:
                    of_layer[key] = view
        if len(of_layer) == len(params) * len(parts):
            found.update(of_layer)
    return found


class _WeightRange(NamedTuple):
    """A range along a dim of a layer's weight, and where that begins in the tensor of the checkpoint."""

    dim: int
    local_begin: int
    begin: int
    size: int

    def view_of(self, local: Tensor, whole: Wanted) -> Any:
        """The range of a parameter with the box that it is; ``None`` where that is not a part of such a tensor."""
        if local.dtype != whole.dtype or local.dim() != len(whole.shape):
            return None
        offsets = [0] * local.dim()
        view: Any = local.view_as(local)
        if self.dim < local.dim():  # the bias of a layer that is split by columns is not split
            if self.local_begin + self.size > local.shape[self.dim]:
                return None
            offsets[self.dim] = self.begin
            view = local.narrow(self.dim, self.local_begin, self.size)
        ends = [offset + size for offset, size in zip(offsets, view.shape, strict=True)]
        is_split = [dim == self.dim for dim in range(local.dim())]
        for end, size, split in zip(ends, whole.shape, is_split, strict=True):
            if end > size or (end < size and not split):
                return None
        view.global_shape = whole.shape
        view.global_offsets = (tuple(offsets),)
        view.local_offsets = ((0,) * local.dim(),)
        view.local_sizes = (tuple(view.shape),)
        return view


def _parts_of(layer: Any) -> Iterator[_WeightRange]:
    """Of a layer that is known, and none of a subclass, which may load in its own way."""
    kind = type(layer)
    if not isinstance(getattr(layer, "quant_method", None), UnquantizedLinearMethod | UnquantizedEmbeddingMethod):
        return
    if kind is ReplicatedLinear:
        yield _WeightRange(0, 0, 0, layer.output_size)
    elif kind is ColumnParallelLinear:
        yield _WeightRange(0, 0, layer.tp_rank * layer.output_size_per_partition, layer.output_size_per_partition)
    elif kind is RowParallelLinear:
        yield _WeightRange(1, 0, layer.tp_rank * layer.input_size_per_partition, layer.input_size_per_partition)
    elif kind is MergedColumnParallelLinear:
        yield from _stacked([(layer.tp_rank, size // layer.tp_size) for size in layer.output_sizes])
    elif kind is QKVParallelLinear:
        of_pair = layer.tp_rank // layer.num_kv_head_replicas
        query, key = layer.num_heads * layer.head_size, layer.num_kv_heads * layer.head_size
        value = layer.num_kv_heads * layer.v_head_size
        yield from _stacked([(layer.tp_rank, query), (of_pair, key), (of_pair, value)])
    elif kind in (VocabParallelEmbedding, ParallelLMHead):
        held = layer.shard_indices
        yield _WeightRange(0, 0, held.org_vocab_start_index, held.org_vocab_end_index - held.org_vocab_start_index)


def _stacked(shards: Sequence[tuple[int, int]]) -> Iterator[_WeightRange]:
    """Ranges that lie one behind the other, each by its number among the shards of its tensor, and its size."""
    local_begin = 0
    for number, size in shards:
        yield _WeightRange(0, local_begin, number * size, size)
        local_begin += size
