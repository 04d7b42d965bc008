"""Who feeds the trainer in the data benchmark: ours, torch's, torchdata's, torchtitan's, over the same documents.

Each contender is a function from ``Feed`` to an iterator of batches without end. A batch of text is what torchtitan's
trainer takes; a batch of map-style data inputs and labels of shape [batch size, SEQ_LEN]. Where a library has no way to
pack documents (DataLoader, StatefulDataLoader, torchdata.nodes), it packs with our stream, so that what differs is who
reads ahead and who merges.
"""

import importlib
import importlib.util
import logging
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, get_worker_info

from torchtitan_ext.elastic import ElasticDataLoader, IndexedStreams, PackedTokens

SEQ_LEN = 2048
NUM_DOCUMENTS, NUM_WORDS = 2000, 20_000
NUM_SHARDS = 16
NUM_SAMPLES = 1_000_000
PREFETCH = 2  # batches of each worker, torch's default

Documents = list[dict[str, str]]


@dataclass(frozen=True)
class Feed:
    """What a rank asks for."""

    rank: int
    world_size: int
    batch_size: int
    num_workers: int

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of torch's ``DataLoader`` and what is made in its likeness."""
        return {"num_workers": self.num_workers, **({"prefetch_factor": PREFETCH} if self.num_workers else {})}


Contender = Callable[[Feed], Iterator[Any]]


# ---- tokenized text ----
@cache
def documents() -> Documents:
    """Texts of 20 to 1,200 words, most of them short."""
    numbers = random.Random(0)
    words = ["".join(numbers.choices("etaoinshrdlu", k=numbers.randint(1, 10))) for _ in range(NUM_WORDS)]
    lengths = [min(1200, 20 + int(numbers.expovariate(1 / 250))) for _ in range(NUM_DOCUMENTS)]
    return [{"text": " ".join(numbers.choices(words, k=length))} for length in lengths]


@cache
def vocabulary() -> dict[str, int]:
    return {
        word: 3 + number for number, word in enumerate(sorted({w for one in documents() for w in split(one["text"])}))
    }


def split(text: str) -> list[str]:
    return re.findall(r" ?[aeiou]+| ?[^aeiou ]+| ", text)


def encode(text: str) -> list[int]:
    """Tokens of a text: as many per second as a BPE in Rust gives on one core, and Python's own work."""
    known = vocabulary()
    return [1, *(known[word] for word in split(text)), 2]


def encode_sample(sample: dict[str, str]) -> list[int]:
    return encode(sample["text"])


@cache
def arrow_documents() -> Any:
    """As a data set of Hugging Face, which torchtitan reads."""
    return importlib.import_module("datasets").Dataset.from_list(documents())


def texts(num_shards: int) -> IndexedStreams:
    data = arrow_documents() if importlib.util.find_spec("datasets") else documents()
    return IndexedStreams(data, num_shards=num_shards)


def packed(num_shards: int) -> PackedTokens:
    return PackedTokens(texts(num_shards), seq_len=SEQ_LEN, encode=encode_sample)


def collate(samples: list[Any]) -> Any:
    return torch.utils.data.default_collate(samples)


def text_of_ours(feed: Feed) -> Iterator[Any]:
    options = feed.options if feed.num_workers else {}
    loader = ElasticDataLoader(
        packed(NUM_SHARDS),
        batch_size=feed.batch_size,
        dp_rank=feed.rank,
        dp_size=feed.world_size,
        endless=True,
        **options,
    )
    return iter(loader)


class PackedShard(IterableDataset):
    """A shard of the packed documents for each worker of each rank, for ever."""

    def __init__(self, feed: Feed) -> None:
        self.feed = feed

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        worker, num_workers = (info.id, info.num_workers) if info else (0, 1)
        source = packed(self.feed.world_size * num_workers)
        stream = source.open_stream(self.feed.rank * num_workers + worker, 0)
        epoch = 0
        while True:
            yield from stream
            epoch += 1
            stream.start_epoch(epoch)


def text_of_torch(feed: Feed) -> Iterator[Any]:
    return iter(DataLoader(PackedShard(feed), batch_size=feed.batch_size, **feed.options))


def text_of_stateful(feed: Feed) -> Iterator[Any]:
    loader = importlib.import_module("torchdata.stateful_dataloader").StatefulDataLoader
    return iter(loader(PackedShard(feed), batch_size=feed.batch_size, **feed.options))


def text_of_nodes(feed: Feed) -> Iterator[Any]:
    """Documents are encoded by workers, and packed in the trainer's process."""
    nodes = importlib.import_module("torchdata.nodes")

    class Texts:
        def __iter__(self) -> Iterator[Any]:
            source, epoch = texts(feed.world_size), 0
            while True:
                yield from source.open_stream(feed.rank, epoch)
                epoch += 1

    class Pack:
        """Our packing over documents that are encoded already."""

        def __init__(self, encoded: Any) -> None:
            self.encoded = encoded

        def open_stream(self, shard: int, epoch: int) -> Any:
            return iter(self.encoded)

        num_shards = 1

    encoded: Any = nodes.IterableWrapper(Texts())
    encoded = nodes.ParallelMapper(encoded, encode_sample, num_workers=feed.num_workers, method="process")
    stream = PackedTokens(Pack(nodes.Loader(encoded)), seq_len=SEQ_LEN).open_stream(0, 0)
    root = nodes.Batcher(nodes.IterableWrapper(stream), feed.batch_size)
    root = nodes.Mapper(root, collate)
    return iter(nodes.Loader(nodes.Prefetcher(root, PREFETCH) if feed.num_workers else root))


class _Tokenizer:
    eos_id = 2

    def encode(self, text: str, **options: bool) -> list[int]:
        return encode(text)


def text_of_torchtitan(feed: Feed) -> Iterator[Any]:
    """torchtitan 0.3.0's own loader; each of its workers reads the same documents."""
    logging.getLogger().setLevel(logging.ERROR)
    text = importlib.import_module("torchtitan.hf_datasets.text_datasets")
    config = importlib.import_module("torchtitan.hf_datasets").DatasetConfig
    text.DATASETS["bench"] = config(
        path="-", loader=lambda path: arrow_documents(), sample_processor=lambda one: one["text"]
    )
    made = text.HuggingFaceTextDataLoader(
        text.HuggingFaceTextDataLoader.Config(
            dataset="bench", num_workers=feed.num_workers, prefetch_factor=PREFETCH if feed.num_workers else None
        ),
        dp_world_size=feed.world_size,
        dp_rank=feed.rank,
        tokenizer=_Tokenizer(),
        seq_len=SEQ_LEN,
        local_batch_size=feed.batch_size,
    )
    return iter(made)


# ---- map-style data ----
class Rows:
    """Inputs and labels of SEQ_LEN tokens each, which lie in memory as 16-bit numbers, as in a file of tokens."""

    def __init__(self, num_samples: int = NUM_SAMPLES) -> None:
        self.num_samples = num_samples
        self.tokens = np.arange(64 * SEQ_LEN, dtype=np.uint16)

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        begin = index % 63 * SEQ_LEN
        tokens = torch.from_numpy(self.tokens[begin : begin + SEQ_LEN + 1].astype(np.int64))
        return tokens[:-1], tokens[1:]


def rows_of_ours(feed: Feed) -> Iterator[Any]:
    loader = ElasticDataLoader(
        Rows(), batch_size=feed.batch_size, dp_rank=feed.rank, dp_size=feed.world_size, **feed.options
    )
    return iter(loader)


def sampler_of(feed: Feed, data: Rows) -> Any:
    return DistributedSampler(data, feed.world_size, feed.rank, shuffle=True, drop_last=True)  # type: ignore[arg-type]


def rows_of_torch(feed: Feed) -> Iterator[Any]:
    data = Rows()
    return iter(DataLoader(data, batch_size=feed.batch_size, sampler=sampler_of(feed, data), **feed.options))  # type: ignore[arg-type]


def rows_of_stateful(feed: Feed) -> Iterator[Any]:
    data, stateful = Rows(), importlib.import_module("torchdata.stateful_dataloader")
    sampler = importlib.import_module("torchdata.stateful_dataloader.sampler").StatefulDistributedSampler(
        data, feed.world_size, feed.rank, shuffle=True, drop_last=True
    )
    return iter(stateful.StatefulDataLoader(data, batch_size=feed.batch_size, sampler=sampler, **feed.options))


class Fetch:
    def __init__(self, data: Rows) -> None:
        self.data = data

    def __call__(self, indices: list[int]) -> Any:
        return collate([self.data[index] for index in indices])


def rows_of_nodes(feed: Feed) -> Iterator[Any]:
    """Batches of indices, fetched by workers: the way of torchdata's own examples."""
    data, nodes = Rows(), importlib.import_module("torchdata.nodes")
    indices = nodes.SamplerWrapper(BatchSampler(sampler_of(feed, data), feed.batch_size, drop_last=True))
    root = nodes.ParallelMapper(indices, Fetch(data), num_workers=feed.num_workers, method="process")
    return iter(nodes.Loader(nodes.Prefetcher(root, PREFETCH) if feed.num_workers else root))


OURS, BEST_OF = "ours", 0.9

# By kind of data and name: what it needs, and how it is made.
CONTENDERS: dict[str, dict[str, tuple[str, Contender]]] = {
    "text": {
        OURS: ("torch", text_of_ours),
        "DataLoader": ("torch", text_of_torch),
        "StatefulDataLoader": ("torchdata", text_of_stateful),
        "torchdata.nodes": ("torchdata", text_of_nodes),
        "torchtitan": ("torchtitan", text_of_torchtitan),
    },
    "map-style": {
        OURS: ("torch", rows_of_ours),
        "DataLoader": ("torch", rows_of_torch),
        "StatefulDataLoader": ("torchdata", rows_of_stateful),
        "torchdata.nodes": ("torchdata", rows_of_nodes),
    },
}


def installed(kind: str) -> dict[str, Contender]:
    """The contenders whose library is there."""
    return {name: make for name, (package, make) in CONTENDERS[kind].items() if importlib.util.find_spec(package)}


def installed_versions() -> dict[str, str]:
    packages = ("torchdata", "torchtitan", "datasets")
    return {package: version(package) for package in packages if importlib.util.find_spec(package)}
