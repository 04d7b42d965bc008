"""All tensors of Llama 3.1 405B and their placements under FSDP2 x TP, as torchtitan shards them."""

from typing import NamedTuple

NUM_LAYERS, DIM, FFN_DIM, VOCAB = 126, 16_384, 53_248, 128_256
KV_DIM = 8 * 128  # key and value heads x features of one head

Placements = tuple[tuple[int, int], ...]  # per mesh axis (tensor dim or -1 for replicated, split factor)


class ShardedTensor(NamedTuple):
    fqn: str
    shape: tuple[int, ...]
    placements: Placements


def list_tensors(tp: int) -> list[ShardedTensor]:
    """The 1,137 parameters on a mesh (dp, `tp`)."""
    rows = ((0, tp), (0, 1))  # ColwiseParallel, then FSDP2: [_StridedShard(0, split_factor=tp), Shard(0)]
    columns = ((0, 1), (1, 1))  # RowwiseParallel, then FSDP2: [Shard(0), Shard(1)]
    replicated = ((0, 1), (-1, 1))  # SequenceParallel, then FSDP2: [Shard(0), Replicate()]
    tensors = [
        ShardedTensor("tok_embeddings.weight", (VOCAB, DIM), rows),
        ShardedTensor("norm.weight", (DIM,), replicated),
        ShardedTensor("output.weight", (VOCAB, DIM), rows),
    ]
    for layer in range(NUM_LAYERS):
        tensors += [
            ShardedTensor(f"layers.{layer}.{name}.weight", shape, placements)
            for name, shape, placements in [
                ("attention.wq", (DIM, DIM), rows),
                ("attention.wk", (KV_DIM, DIM), rows),
                ("attention.wv", (KV_DIM, DIM), rows),
                ("attention.wo", (DIM, DIM), columns),
                ("feed_forward.w1", (FFN_DIM, DIM), rows),
                ("feed_forward.w2", (DIM, FFN_DIM), columns),
                ("feed_forward.w3", (FFN_DIM, DIM), rows),
                ("attention_norm", (DIM,), replicated),
                ("ffn_norm", (DIM,), replicated),
            ]
        ]
    return tensors
