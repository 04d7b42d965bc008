"""Which elements of a tensor each rank holds: what tensors say, what users state, and the decision over all ranks."""

from torchtitan_ext.layout.layout import Chunk, LocalShard, ShardOrder, local_shard

__all__ = ["Chunk", "LocalShard", "ShardOrder", "local_shard"]
