"""Components that cross a change of world size: policies, data loader, LR scheduler, RNG."""

from torchtitan_ext._core import OptionGaps, find_option_gaps
from torchtitan_ext.checkpoint.rules.param_groups import GroupNote, merge_param_groups
from torchtitan_ext.checkpoint.rules.policy import ElasticPolicy, Source
from torchtitan_ext.checkpoint.tables.component import Reshardable, Resharded, World, reshard_state
from torchtitan_ext.elastic.data.dataloader import ElasticDataLoader
from torchtitan_ext.elastic.data.indexed import IndexedStreams
from torchtitan_ext.elastic.data.packing import PackedTokens
from torchtitan_ext.elastic.data.sampler import ElasticBatchSampler
from torchtitan_ext.elastic.data.streams import HuggingFaceStreams, Streams, StreamSource
from torchtitan_ext.elastic.data.torchtitan_data import TorchtitanTextStreams
from torchtitan_ext.elastic.data.virtual_shards import TooFewShardsError
from torchtitan_ext.elastic.data.workers import StreamWorkerError
from torchtitan_ext.elastic.rng import RngState
from torchtitan_ext.elastic.schedule.lr_scheduler import ElasticLRScheduler
from torchtitan_ext.elastic.train_state import TrainState, read_torchtitan_train_state
from torchtitan_ext.state.data_position import DataPosition, ShardPosition

__all__ = [
    "DataPosition",
    "ElasticBatchSampler",
    "ElasticDataLoader",
    "ElasticLRScheduler",
    "ElasticPolicy",
    "GroupNote",
    "HuggingFaceStreams",
    "IndexedStreams",
    "OptionGaps",
    "PackedTokens",
    "Reshardable",
    "Resharded",
    "RngState",
    "ShardPosition",
    "Source",
    "StreamSource",
    "StreamWorkerError",
    "Streams",
    "TooFewShardsError",
    "TorchtitanTextStreams",
    "TrainState",
    "World",
    "find_option_gaps",
    "merge_param_groups",
    "read_torchtitan_train_state",
    "reshard_state",
]
