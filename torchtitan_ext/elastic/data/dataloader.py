"""A data loader whose position crosses a change of the number of data-parallel ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, fields
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader, IterableDataset, default_collate

from torchtitan_ext.checkpoint.tables.component import Resharded, World
from torchtitan_ext.elastic.data.order import OrderName
from torchtitan_ext.elastic.data.sample_position import SamplePosition
from torchtitan_ext.elastic.data.sampler import ElasticBatchSampler, Last, LocalBatch, Share
from torchtitan_ext.elastic.data.stream_batches import StreamBatches
from torchtitan_ext.elastic.data.streams import StreamSource
from torchtitan_ext.elastic.data.workers import WorkerOptions
from torchtitan_ext.elastic.own_share import data_rank
from torchtitan_ext.errors import WrongValueError, argument_error, check_counts
from torchtitan_ext.errors.near_names import nearest_name
from torchtitan_ext.ranks.signal_inbox import keeping_worker
from torchtitan_ext.state.data_position import DataPosition, read_data_position

# Of torch.utils.data.DataLoader, beside those that this loader has itself.
_LOADER_OPTIONS = (
    "in_order",
    "generator",
    "multiprocessing_context",
    "num_workers",
    "persistent_workers",
    "pin_memory",
    "pin_memory_device",
    "prefetch_factor",
    "timeout",
    "worker_init_fn",
)
_OWN_OPTIONS = ("batch_size", "collate_fn", "dp_rank", "dp_size", "endless", "global_batch_size")
_INSTEAD = {
    "drop_last": "pass last='drop' or last='pad' for drop_last",
    "sampler": "the loader has an order of its own: order=, shuffle= and seed=",
    "batch_sampler": "under a DataLoader of your own use ElasticBatchSampler",
}


class ElasticDataLoader:
    """Local batches of this data-parallel rank, and a state that any other number of ranks can go on from.

    ``iter`` goes on from the loader's position: after an epoch with the next one, after a ``break`` with the next
    batch. Whatever restarts happen in an epoch, none of its samples is lost or served twice, except as ``last`` says;
    the state counts those (``dropped``, ``padded``).

    * Over a map-style data set (``__len__`` and ``__getitem__``; Hugging Face's too) global batch b of an epoch is the
      next samples of the epoch's order: the same set for any number of ranks. No communication.
    * Over a ``StreamSource`` the ranks own its virtual shards and take samples from them in turn (see ``ShardReader``).
      The set of samples of each global batch is the same for every ``dp_size`` that divides ``num_shards`` and the
      global batch size: until the first shard ends, or for ever with ``endless``. With ``endless`` there is no
      communication; otherwise the ranks agree on the end of the epoch by one all-reduce of a number per step, so that
      all call ``next`` equally often.

    The state has an entry for each virtual shard, ``shard_7_of_16``, and one that is equal on all ranks, ``loader``.
    Each data-parallel rank saves the entries of its shards; tensor-parallel ranks save the same, which a checkpoint
    writes once.

    Args:
        data: A map-style data set or a ``StreamSource``.
        batch_size: Samples of this rank in a step. Give either this or ``global_batch_size``; both may differ from
            those of the job that saved.
        global_batch_size: Samples of all ranks together in a step: a multiple of ``dp_size``, unless ``uneven``.
        dp_rank: This process's data-parallel rank, with ``dp_size``. Without both and without ``mesh``: that of
            ``group``, else the rank of the process, where no process group says that some ranks get the same samples.
        dp_size: Number of data-parallel ranks.
        mesh: The mesh of the data-parallel ranks, such as ``mesh["dp"]``, instead of rank, size and group.
        shuffle: Map-style data: whether each epoch has its own random order. Streams order themselves.
        seed: Seed of the random order. A loaded state brings its own.
        order: Map-style data: which random order, see ``ElasticBatchSampler``. A loaded state brings its own.
        last: What becomes of samples at the end of an epoch that do not fill a global batch. ``"drop"`` leaves them
            out: over streams the epoch ends when the first rank cannot fill its batch. ``"pad"`` serves all of them: a
            short batch is filled with repeats, at its end, and ``num_padding`` counts these; over streams, ranks
            without samples get padding until all are through.
        endless: Whether iteration goes on with the next epoch by itself, over streams each shard on its own.
        group: The data-parallel process group, such as ``mesh["dp"].get_group()``, for streams that are not endless.
            The default group is wrong where there is tensor or pipeline parallelism too. A ``mesh`` of one axis has it.
        collate_fn: From a list of samples to a batch; by default torch's ``default_collate``.
        uneven: Whether low ranks may get one sample more than the others. An average over ranks of their means then
            weighs samples unequally: weigh each mean by the rank's samples.
        loader_options: More arguments of ``torch.utils.data.DataLoader``, such as ``num_workers``. Over streams:
            ``num_workers``, ``prefetch_factor``, ``persistent_workers``, ``pin_memory``, ``multiprocessing_context``,
            ``timeout``. Workers then read and tokenize the rank's shards ahead of training, each some of them; batches
            and states are those of a loader without workers.

    Raises:
        TypeError: A size is no whole number, or ``data`` is a class.
        ValueError: Arguments do not fit each other, ``group`` and ``dp_size`` among them; ranks would get unequally
            many samples; nothing says which data-parallel rank this is; an option is unknown; or ``data`` is an
            ``IterableDataset``.
        TooFewShardsError: There are more ranks than virtual shards.
        StreamWorkerError: While batches are read: a worker raised an error or was killed.
    """

    def __init__(
        self,
        data: Any,
        *,
        batch_size: int | None = None,
        global_batch_size: int | None = None,
        dp_rank: int | None = None,
        dp_size: int | None = None,
        mesh: DeviceMesh | None = None,
        shuffle: bool = True,
        seed: int = 0,
        last: Last = "drop",
        endless: bool = False,
        group: dist.ProcessGroup | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        order: OrderName = "feistel-1",
        uneven: bool = False,
        **loader_options: Any,
    ) -> None:
        if (batch_size is None) == (global_batch_size is None):
            raise ValueError("ElasticDataLoader: give exactly one of batch_size (per rank) and global_batch_size")
        check_counts("ElasticDataLoader", batch_size=batch_size)
        dp_rank, dp_size, group = data_rank("ElasticDataLoader", dp_rank, dp_size, mesh, group)
        size = global_batch_size if global_batch_size is not None else (batch_size or 0) * dp_size
        share = Share(size, dp_rank, dp_size, last, endless, uneven)
        collate_fn = collate_fn or default_collate
        self.dp_rank = dp_rank
        self.dp_size = dp_size
        self.global_batch_size = size
        self.batch_size = share.batch_size
        self._batches: _Batches
        if isinstance(data, type):
            raise argument_error("ElasticDataLoader", "data", data, "an instance: a data set or a source of streams")
        if isinstance(data, StreamSource):
            _check_options(loader_options, [field.name for field in fields(WorkerOptions)], "streams")
            workers = WorkerOptions(**loader_options)
            self._batches = StreamBatches(data, share, group, collate_fn, workers)
        elif isinstance(data, IterableDataset):
            raise ValueError(
                f"ElasticDataLoader: {type(data).__name__} is an IterableDataset, which torch reads from its beginning "
                "by iteration alone, also where it has __getitem__; wrap what opens its shards in Streams of "
                "tte.elastic, or pass a map-style view of it: a torch.utils.data.Dataset whose __getitem__ asks it"
            )
        elif hasattr(data, "__len__") and hasattr(data, "__getitem__"):
            if not loader_options.get("in_order", True):
                raise ValueError("ElasticDataLoader: in_order=False has no position to resume from; leave it out")
            sampler = ElasticBatchSampler(data, **asdict(share), shuffle=shuffle, seed=seed, order=order)
            options = {"collate_fn": collate_fn, **loader_options}
            _check_options(loader_options, _LOADER_OPTIONS, "map-style data")
            DataLoader(data, batch_sampler=[], **options)  # refuses values here, not at the first batch
            if options.get("num_workers"):  # the trainer alone ends them, as those of streams
                options["worker_init_fn"] = keeping_worker(options.get("worker_init_fn"))
            self._batches = _SampleBatches(data, sampler, options)
        else:
            raise ValueError(
                f"ElasticDataLoader: {type(data).__name__} is neither a map-style data set (__len__ and __getitem__) "
                "nor a source of streams; wrap what opens your streams in Streams or HuggingFaceStreams of tte.elastic"
            )
        self._start = self.state_dict()

    def __iter__(self) -> Iterator[Any]:
        return iter(self._batches)

    @property
    def samples_seen(self) -> int:
        """Samples that all ranks together have served so far, over all epochs, padding not counted."""
        return self._batches.counts.samples_seen

    @property
    def dropped(self) -> int:
        """Samples that all ranks together have left out at the ends of epochs.

        Over streams these are samples that were read for a last batch that could not be filled. Samples that shards of
        other ranks had left then are not read; each shard's entry in the state says where it was cut (``last_epoch``).
        """
        return self._batches.counts.dropped

    @property
    def padded(self) -> int:
        """Samples that all ranks together have served twice to fill batches at the ends of epochs."""
        return self._batches.counts.padded

    @property
    def num_padding(self) -> int:
        """How many samples at the end of this rank's latest batch are padding."""
        return self._batches.num_padding

    @property
    def epoch(self) -> int:
        """The epoch of the next sample; over streams the latest that a shard of this rank is in."""
        return self._batches.epoch

    def state_dict(self) -> dict[str, Any]:
        """The position after the latest batch. Call it on all ranks after the same step."""
        return self._batches.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on from the position of any number of ranks, from the entries of all ranks or those of this one.

        Raises:
            CannotReshardError: The state is of other data or another number of shards; the loader is unchanged.
        """
        self._batches.load_state_dict(state_dict)

    def describe(self) -> DataPosition:
        """Where the loader stands after the latest batch; of streams with this rank's shards. Not collective."""
        return read_data_position(self.state_dict())

    def reset(self) -> None:
        """Goes back to the beginning of the first epoch, with the seed of the constructor."""
        self.load_state_dict(self._start)

    def reshard(self, saved: Mapping[str, Any], old: World, new: World) -> Resharded:
        """See ``Reshardable``. Also adopts torchtitan's states where ``data`` can: see ``TorchtitanTextStreams``."""
        return self._batches.reshard(saved, old, new)


def _check_options(given: Mapping[str, object], known: Sequence[str], data: str) -> None:
    """Raises WrongValueError for options that a loader of such data does not have; says what was perhaps meant."""
    unknown = sorted(given.keys() - set(known))
    if unknown:
        near = ((name, nearest_name(name, [*known, *_OWN_OPTIONS])) for name in unknown)
        hints = [_INSTEAD.get(name) or f"perhaps {meant} is meant" for name, meant in near if meant or name in _INSTEAD]
        raise WrongValueError(
            f"ElasticDataLoader: {', '.join(unknown)} cannot be applied to {data}, which take "
            f"{', '.join(known)}{''.join(f'; {hint}' for hint in hints)}"
        )


class _SampleBatches:
    """Batches of a map-style data set, read by PyTorch's own ``DataLoader``."""

    def __init__(self, data: Any, sampler: ElasticBatchSampler, options: dict[str, Any]) -> None:
        self._data = data
        self._sampler = sampler
        self._options = options
        self.num_padding = 0
        self._newest: object = None  # the iterator that may serve

    @property
    def counts(self) -> SamplePosition:
        return self._sampler.position

    @property
    def epoch(self) -> int:
        return self._sampler.position.epoch

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._sampler.load_state_dict(state_dict)
        self._newest = None
        self.num_padding = 0

    def state_dict(self) -> dict[str, Any]:
        return self._sampler.state_dict()

    def reshard(self, saved: Mapping[str, Any], old: World, new: World) -> Resharded:
        return self._sampler.reshard(saved, old, new)

    def _read(self, indices: list[int]) -> Any:
        """A batch, as the workers of a ``DataLoader`` read it."""
        read_all = getattr(self._data, "__getitems__", None)
        samples = [self._data[index] for index in indices] if read_all is None else read_all(indices)
        return self._options["collate_fn"](samples)

    def __iter__(self) -> Iterator[Any]:
        self._newest = this = object()
        # Workers ask for batches ahead of the training loop: the position moves when a batch is served.
        ahead: deque[LocalBatch] = deque()

        def indices() -> Iterator[list[int]]:
            for batch in self._sampler.batches():
                ahead.append(batch)
                yield batch.indices

        # With the global generator each new iterator would draw from it, and a resumed run would differ.
        options = {"generator": torch.Generator(), **self._options}
        loader = DataLoader(self._data, batch_sampler=indices(), **options)
        # The loader draws a seed on the default device, with a generator that may be of another device.
        is_elsewhere = loader.generator is not None and loader.generator.device != torch.get_default_device()
        with loader.generator.device if is_elsewhere else nullcontext():
            # Its iterator without workers does the same and takes longer: per batch as long as ten cheap samples.
            served = iter(loader) if loader.num_workers or loader.pin_memory else map(self._read, indices())
        for samples in served:
            self._check_newest(this)
            batch = ahead.popleft()
            self._sampler.serve(batch.reached)
            self.num_padding = batch.num_padding
            yield samples
        self._check_newest(this)
        if ahead:  # Python takes this for the end of the data: the rest of the epoch would be dropped
            raise RuntimeError(
                "ElasticDataLoader: the data set raised StopIteration for a sample, which is no end of it"
            )
        self._sampler.end_epoch()

    def _check_newest(self, iterator: object) -> None:
        """An older iterator does not know what was served since: it would serve it again, or skip the next epoch."""
        if self._newest is None:
            raise RuntimeError("ElasticDataLoader: a state was loaded under this iterator; make a new one")
        if self._newest is not iterator:
            raise RuntimeError("ElasticDataLoader: a newer iterator goes on from here; use that one, or make a new one")


_Batches = _SampleBatches | StreamBatches
"""Local batches of one kind of data, with a position; ``num_padding`` repeats stand at the latest batch's end."""
