"""All tensors of Llama 3.1 and their placements under FSDP2 x TP, as torchtitan shards them."""

from typing import NamedTuple


class Size(NamedTuple):
    num_layers: int
    dim: int
    ffn_dim: int


SIZES = {"8B": Size(32, 4_096, 14_336), "70B": Size(80, 8_192, 28_672), "405B": Size(126, 16_384, 53_248)}
DIM, VOCAB = SIZES["405B"].dim, 128_256
KV_DIM = 8 * 128  # key and value heads x features of one head

Placements = tuple[tuple[int, int], ...]  # per mesh axis (tensor dim or -1 for replicated, split factor)


class ShardedTensor(NamedTuple):
    fqn: str
    shape: tuple[int, ...]
    placements: Placements


def list_tensors(tp: int, model: str = "405B") -> list[ShardedTensor]:
    """The parameters on a mesh (dp, `tp`); 1,137 of 405B."""
    num_layers, dim, ffn_dim = SIZES[model]
    rows = ((0, tp), (0, 1))  # ColwiseParallel, then FSDP2: [_StridedShard(0, split_factor=tp), Shard(0)]
    columns = ((0, 1), (1, 1))  # RowwiseParallel, then FSDP2: [Shard(0), Shard(1)]
    replicated = ((0, 1), (-1, 1))  # SequenceParallel, then FSDP2: [Shard(0), Replicate()]
    tensors = [
        ShardedTensor("tok_embeddings.weight", (VOCAB, dim), rows),
        ShardedTensor("norm.weight", (dim,), replicated),
        ShardedTensor("output.weight", (VOCAB, dim), rows),
    ]
    for layer in range(num_layers):
        tensors += [
            ShardedTensor(f"layers.{layer}.{name}.weight", shape, placements)
            for name, shape, placements in [
                ("attention.wq", (dim, dim), rows),
                ("attention.wk", (KV_DIM, dim), rows),
                ("attention.wv", (KV_DIM, dim), rows),
                ("attention.wo", (dim, dim), columns),
                ("feed_forward.w1", (ffn_dim, dim), rows),
                ("feed_forward.w2", (dim, ffn_dim), columns),
                ("feed_forward.w3", (ffn_dim, dim), rows),
                ("attention_norm", (dim,), replicated),
                ("ffn_norm", (dim,), replicated),
            ]
        ]
    return tensors
