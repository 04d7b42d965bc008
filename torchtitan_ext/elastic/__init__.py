"""Components that cross a change of world size: policies, data loader, LR scheduler, RNG."""

from torchtitan_ext.elastic.component import Reshardable, Resharded, World, reshard_state
from torchtitan_ext.elastic.dataloader import ElasticDataLoader
from torchtitan_ext.elastic.lr_scheduler import ElasticLRScheduler
from torchtitan_ext.elastic.policy import ElasticPolicy, Source
from torchtitan_ext.elastic.sampler import ElasticBatchSampler
from torchtitan_ext.elastic.shards import TooFewShardsError
from torchtitan_ext.elastic.streams import HuggingFaceStreams, Streams, StreamSource

__all__ = [
    "ElasticBatchSampler",
    "ElasticDataLoader",
    "ElasticLRScheduler",
    "ElasticPolicy",
    "HuggingFaceStreams",
    "Reshardable",
    "Resharded",
    "Source",
    "StreamSource",
    "Streams",
    "TooFewShardsError",
    "World",
    "reshard_state",
]
