"""The text data of torchtitan, and its data loader states taken over by any number of ranks.

torchtitan 0.3.0 saves, for each data-parallel rank r, ``dp_rank_r``: the pickled state of a ``StatefulDataLoader`` over
its ``HuggingFaceTextDataset``; and ``world_size``. Loading them into another number of ranks it refuses
(https://github.com/pytorch/torchtitan/blob/v0.3.0/torchtitan/components/dataloader.py). Here old rank r becomes virtual
shard r of ``world_size``: the same run of the data set, the same place in it, the same leftover tokens. A loader with
more shards then deals each in equal parts (see ``IndexedPart``); rank 3 of 8 had read 5 of its 13 documents:

    num_shards = 8     shard 3:  documents 5 6 7 8 9 10 11 12 of the run, after the leftover tokens
    num_shards = 16    shard 3:  documents 5 7 9 11, after the leftover tokens      shard 11:  documents 6 8 10 12
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from operator import itemgetter
from typing import Any, NoReturn

from torchtitan_ext.elastic.data.indexed import TORCHTITAN_SEED, IndexedPart, IndexedStream, IndexedStreams, run_of
from torchtitan_ext.elastic.data.packing import PackedTokens, packed_state
from torchtitan_ext.elastic.data.streams import HuggingFaceStreams
from torchtitan_ext.elastic.data.virtual_shards import ShardState, shard_key, stream_state, to_entry
from torchtitan_ext.errors import CannotReshardError, DamagedCheckpointError, argument_error
from torchtitan_ext.state.plain_value import DamagedBytesError, read_pickle

_RANK_KEY = "dp_rank_"
_BUFFERS = ("inputs_buffer", "labels_buffer", "positions_buffer")
_LISTS = ("inputs", "labels", "positions")  # of a PackedStream, in the same order
# HuggingFaceTextDataset.state_dict returns its own lists, and a worker's queue pickles them in another thread: by then
# tokens of the next documents may have been appended, so that the tokens do not fit the document's number.
_RACE = "torchtitan's workers save these tokens while they change"
_REMEDY = "reset the data loader, or go on with torchtitan and {ranks} data-parallel ranks"


class TorchtitanTextStreams(PackedTokens):
    """torchtitan 0.3.0's ``HuggingFaceTextDataset`` as a source: the same sequences in the same order, for any ranks.

    With ``num_shards`` equal to torchtitan's data-parallel size, shard r gives what its rank r gives: bit for bit, from
    the beginning or after a checkpoint of torchtitan was adopted. Use an endless loader where torchtitan's data set is
    ``infinite``. Each sample is ``({"input": ..., "positions": ...}, labels)``, as torchtitan's trainer takes it.

    Its checkpoints are adopted by ``ElasticDataLoader.reshard`` where ``num_shards`` is a multiple of their
    data-parallel size; those of streaming data sets where it is equal.

    Args:
        data: A map-style data set (of Hugging Face, or any other), or a streaming one of Hugging Face.
        encode: From a text to its tokens, with begin and end: ``partial(tokenizer.encode, add_bos=True,
            add_eos=True)``.
        seq_len: Tokens of a sequence.
        num_shards: Number of virtual shards.
        text: From a sample of the data set to its text.
    """

    def __init__(
        self,
        data: Any,
        encode: Callable[[str], Sequence[int]],
        *,
        seq_len: int,
        num_shards: int,
        text: Callable[[Any], str] = itemgetter("text"),
    ) -> None:
        for argument, function in (("encode", encode), ("text", text)):
            if not callable(function):
                raise argument_error("TorchtitanTextStreams", argument, function, "a function")
        is_indexed = hasattr(data, "__len__") and hasattr(data, "__getitem__")
        documents = IndexedStreams(data, num_shards=num_shards) if is_indexed else None
        super().__init__(
            documents or HuggingFaceStreams(data, num_shards=num_shards),
            seq_len=seq_len,
            encode=partial(_encode_text, encode, text),
        )
        self._data = data
        self._num_documents = len(data) if is_indexed else None

    def adopt(self, saved: Mapping[str, Any]) -> dict[str, Any] | None:
        """See ``AdoptsStates``."""
        if "loader" in saved:  # ours, with torchtitan's beside them
            return None
        keys = {key.removeprefix(_RANK_KEY): value for key, value in saved.items() if key.startswith(_RANK_KEY)}
        ranks = {int(rank): value for rank, value in keys.items() if rank.isdecimal()}
        if not ranks:
            return None
        if "dp_world_size" in saved:
            _refuse(
                f"the states dp_rank_0 to dp_rank_{max(ranks)} are of torchtitan's Grain loader (version "
                f"{saved.get('version')}), whose graph of data sets this source does not read",
                saved["dp_world_size"],
            )
        world_size = saved.get("world_size", len(ranks))
        missing = sorted(set(range(world_size)) - set(ranks))
        if missing or len(ranks) > world_size:
            raise CannotReshardError(
                f"the checkpoint's data loader was saved by {world_size} data-parallel ranks, but has states of "
                f"{len(ranks)}"
                + (f"; without {', '.join(f'dp_rank_{rank}' for rank in missing[:4])}" if missing else ""),
                "load all data loader entries of one checkpoint, or reset the data loader",
            )
        adopted: dict[str, Any] = {}
        samples_seen = 0
        for rank in range(world_size):
            try:
                samples_served, data_state, by_worker = _read_rank(ranks[rank])
                shard = self._shard_state(data_state, rank, world_size, by_worker=by_worker)
            except DamagedBytesError as error:
                raise DamagedCheckpointError(f"torchtitan's state {_RANK_KEY}{rank}: {error}") from None
            except ValueError as error:
                _refuse(f"torchtitan's state {_RANK_KEY}{rank} cannot be taken over: {error}", world_size)
            except (KeyError, TypeError, AttributeError) as error:
                _refuse(
                    f"torchtitan's state {_RANK_KEY}{rank} is not as version 0.3.0 writes it ({error!r})", world_size
                )
            adopted[shard_key(rank, world_size)] = to_entry(shard)
            samples_seen += samples_served
        common = {
            "version": 1,
            "kind": "streams",
            "num_shards": world_size,
            "dp_size": world_size,
            "global_batch_size": None,
            "samples_seen": samples_seen,
            "dropped": 0,
            "padded": 0,
            "adopted_from": "torchtitan",
        }
        return {"loader": (common,), **adopted}

    def as_torchtitan(self, shard: int, state: ShardState, *, samples_served: int, batch_size: int) -> bytes | None:
        """The state that torchtitan saves for the rank of a shard's number, on as many ranks as shards.

        ``None`` where torchtitan has no such state: for a part of a dealt shard, or at the end of a finite data set.
        ``samples_served`` and ``batch_size`` are that rank's.
        """
        stream = stream_state(self, shard, state) or packed_state()
        documents = stream["documents"]
        data_state: dict[str, Any] = {theirs: stream[ours] for ours, theirs in zip(_LISTS, _BUFFERS, strict=True)}
        if self._num_documents is not None:
            part = IndexedPart(self._num_documents, shard, self.num_shards)
            place = 0 if documents is None else documents["next_place"]
            whole = {**asdict(replace(part, next_place=place)), "seed": TORCHTITAN_SEED}
            if state.finished or (documents is not None and {"seed": TORCHTITAN_SEED, **documents} != whole):
                return None
            data_state |= {"sample_idx": place, "epoch": state.epoch}
        elif documents is None or state.finished:
            return None
        else:
            data_state["data"] = documents
        num_batches = samples_served // batch_size
        return pickle.dumps(
            {
                "_index_sampler_state": None,
                "_sampler_iter_state": {"samples_yielded": samples_served},
                "_sampler_iter_yielded": num_batches,
                "_num_yielded": num_batches,
                "_IterableDataset_len_called": None,
                "_shared_seed": None,
                "fetcher_state": {"dataset_iter_state": None, "fetcher_ended": False},
                "dataset_state": data_state,
                "_iterator_finished": False,
            }
        )

    def _shard_state(self, data_state: Mapping[str, Any], rank: int, world_size: int, *, by_worker: bool) -> ShardState:
        """An old rank's state as a shard's; raises ValueError where the shard cannot go on from it."""
        if "data" in data_state:
            if self._num_documents is not None:
                raise ValueError("it is of a streaming data set, and this source reads a map-style one")
            if by_worker:
                raise ValueError("it is of a streaming data set that was read by a loader worker: " + _RACE)
            documents = data_state["data"]
            return ShardState(epoch=documents.get("epoch", 0), stream=_leftover(data_state, documents))
        if self._num_documents is None:
            raise ValueError("it is of a map-style data set, and this source reads a streaming one")
        next_place = data_state["sample_idx"]
        part = IndexedPart(self._num_documents, rank, world_size, next_place=next_place)
        if next_place > len(run_of(part)):
            raise ValueError(
                f"it had read {next_place} documents of its part of the data, which has {len(run_of(part))} here: this "
                "is not the data set it was saved with"
            )
        if by_worker and not self._ends_before(part, data_state):
            raise ValueError(f"its leftover tokens are not those before document {next_place} of its part: " + _RACE)
        return ShardState(epoch=data_state["epoch"], stream=_leftover(data_state, asdict(part)))

    def _ends_before(self, part: IndexedPart, data_state: Mapping[str, Any]) -> bool:
        """Whether the leftover tokens are the last ones before the next document, as far as this epoch goes back."""
        leftover = list(data_state["inputs_buffer"])
        for place in reversed(range(part.next_place)):
            before = IndexedStream(self._data, replace(part, next_place=place), data_state["epoch"])
            tokens = list(self._encode(next(iter(before)))[:-1])
            if len(leftover) <= len(tokens):
                return not leftover or tokens[-len(leftover) :] == leftover
            if tokens and leftover[-len(tokens) :] != tokens:
                return False
            leftover = leftover[: len(leftover) - len(tokens)]
        return not leftover or data_state["epoch"] > 0


def _encode_text(encode: Callable[[str], Sequence[int]], text: Callable[[Any], str], sample: Any) -> Sequence[int]:
    return encode(text(sample))


def _leftover(data_state: Mapping[str, Any], documents: Any) -> dict[str, Any]:
    inputs, labels, positions = (data_state[name] for name in _BUFFERS)
    return packed_state(inputs, labels, positions, documents)


def _read_rank(value: Any) -> tuple[int, Mapping[str, Any], bool]:
    """Reads an old rank's state; raises ValueError where its place in the data is not exact.

    torchdata 0.11, ``stateful_dataloader.py``: without workers the state is that of the moment; with workers each has a
    snapshot that may be some batches old.

    Returns:
        The samples that were served, the state of the data set, and whether a loader worker took that.
    """
    if not isinstance(value, bytes):
        raise ValueError(f"it is a {type(value).__name__}, not the pickle that torchtitan 0.3.0 writes")
    state = read_pickle(value)
    if not isinstance(state, dict) or not {"_snapshot", "dataset_state"} & state.keys():
        raise ValueError("it is not the state of a StatefulDataLoader")
    main = state
    if "_snapshot" in state:
        workers = list(state["_snapshot"]["_worker_snapshots"].values())
        main = state["_snapshot"]["_main_snapshot"]
        if len(workers) != 1:
            raise ValueError(
                f"it was saved with {len(workers)} loader workers, each at its own place in the same documents"
            )
        if state["_steps_since_snapshot"]:
            raise ValueError(
                f"its worker's snapshot is {state['_steps_since_snapshot']} batches older than the checkpoint "
                "(snapshot_every_n_steps)"
            )
        state = workers[0]
    sampler = main["_sampler_iter_state"]
    if sampler is None or "samples_yielded" not in sampler:
        raise ValueError("its loader had no batch size of its own")
    data_state = state["dataset_state"]
    _check_data_set(data_state)
    return sampler["samples_yielded"], data_state, main is not state


def _check_data_set(data_state: Any) -> None:
    if not isinstance(data_state, dict):
        raise ValueError("its data set has no state")
    keys = data_state.keys()
    if {"rng_state", "sources"} <= keys:
        raise ValueError("it mixes several data sets by a random state (InterleavedDataset), which cannot be divided")
    if "pending_input_ids" in keys:
        raise ValueError("it is of ChatDataset, which packs whole conversations and not a line of tokens")
    known = [{*_BUFFERS, "sample_idx", "epoch"}, {*_BUFFERS, "data"}]
    if keys not in known:
        raise ValueError(f"its data set is none that is known (its state has {', '.join(sorted(map(str, keys)))})")


def _refuse(reason: str, world_size: int) -> NoReturn:
    raise CannotReshardError(reason, _REMEDY.format(ranks=world_size))
