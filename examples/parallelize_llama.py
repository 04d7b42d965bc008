"""FSDP2 or HSDP over TP for `TinyLlama`, as torchtitan does it for the large ones."""

from tiny_llama import TinyLlama
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

MODEL_PLAN = {
    "embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "norm": SequenceParallel(),
    "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
}
LAYER_PLAN = {
    "attention_norm": SequenceParallel(),
    "attention": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
    "attention.wq": ColwiseParallel(),
    "attention.wk": ColwiseParallel(),
    "attention.wv": ColwiseParallel(),
    "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
    "ffn_norm": SequenceParallel(),
    "ffn": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
    # DTensors between the two: a local tensor would hide that the FFN rows are uneven over TP.
    "ffn.w1": ColwiseParallel(use_local_output=False),
    "ffn.w3": ColwiseParallel(use_local_output=False),
    "ffn.w2": RowwiseParallel(output_layouts=Shard(1)),
}


def parallelize(model: TinyLlama, mesh: DeviceMesh) -> None:
    """Shards in place: TP over the mesh axis "tp", then FSDP2 (one other axis) or HSDP (two) over the rest."""
    parallelize_module(model, mesh["tp"], MODEL_PLAN)
    data_mesh = mesh[tuple(name for name in mesh.mesh_dim_names or () if name != "tp")]
    for layer in model.layers:
        parallelize_module(layer, mesh["tp"], LAYER_PLAN)
        fully_shard(layer, mesh=data_mesh)
    fully_shard(model, mesh=data_mesh)
