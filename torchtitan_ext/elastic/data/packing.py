"""Documents packed into sequences of one length; the tokens left over are part of a shard's state.

The tokens of all documents of a shard are one line, cut into sequences of ``seq_len``; nothing is padded. Inputs and
labels are shifted within a document, so that no label is a token of the next one, and positions begin at 0 with each
document and with each sequence. Documents a (5 tokens) and b (6 tokens), seq_len 4:

    inputs      a0 a1 a2 a3 | b0 b1 b2 b3 | b4 ...
    labels      a1 a2 a3 a4 | b1 b2 b3 b4 | b5 ...
    positions    0  1  2  3 |  0  1  2  3 |  0 ...

As torchtitan packs: https://github.com/pytorch/torchtitan/blob/v0.3.0/torchtitan/hf_datasets/text_datasets.py
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from torchtitan_ext.elastic.data.streams import ChecksStates, SplitsStates, Stream, StreamSource, snapshot, start_epoch
from torchtitan_ext.errors import argument_error, check_argument

# A packed sequence: {"input": tokens, "positions": positions}, labels; each an int64 tensor of shape [seq_len].
PackedSequence = tuple[dict[str, torch.Tensor], torch.Tensor]

# Copying as many leftover tokens costs some microseconds: little beside making a sequence.
_SMALL_LEFTOVER = 4096


class PackedTokens:
    """A source whose streams are the packed documents of another source's streams.

    A sample is ``({"input": int64[seq_len], "positions": int64[seq_len]}, labels int64[seq_len])``. Tokens left over at
    the end of an epoch begin the shard's next one.

    Args:
        documents: A source whose streams give documents. A document counts as read when its first sequence is served;
            the state has the tokens of its other sequences.
        seq_len: Tokens of a sequence.
        encode: From a document to its tokens, with begin and end tokens. By default documents are tokens.
    """

    def __init__(
        self, documents: StreamSource, *, seq_len: int, encode: Callable[[Any], Sequence[int]] | None = None
    ) -> None:
        expected = "a source of streams, such as Streams(...)"
        check_argument("PackedTokens", "documents", documents, StreamSource, expected)
        check_argument("PackedTokens", "seq_len", seq_len, int, "a whole number")
        if encode is not None and not callable(encode):
            raise argument_error("PackedTokens", "encode", encode, "a function from a document to its tokens")
        if seq_len < 1:
            raise ValueError(f"PackedTokens: seq_len is {seq_len}, expected at least 1")
        self._documents = documents
        self._seq_len = seq_len
        self._encode = encode or list
        # A source has these methods or it has not: this one has them where the packed source has.
        if isinstance(documents, SplitsStates):
            self.split_state = self._split_state
        if isinstance(documents, ChecksStates):
            self.check_state = self._check_state

    @property
    def num_shards(self) -> int:
        return self._documents.num_shards

    def open_stream(self, shard: int, epoch: int) -> PackedStream:
        return PackedStream(lambda epoch: self._documents.open_stream(shard, epoch), epoch, self._seq_len, self._encode)

    def _check_state(self, state: Any) -> None:
        assert isinstance(self._documents, ChecksStates)
        if state["documents"] is not None:
            self._documents.check_state(state["documents"])

    def _split_state(self, state: Any, *, shard: int, num_shards: int, num_parts: int) -> list[Any]:
        """The first part gets the leftover tokens; see ``SplitsStates``."""
        assert isinstance(self._documents, SplitsStates)
        packed = state or packed_state()
        parts = self._documents.split_state(
            packed["documents"], shard=shard, num_shards=num_shards, num_parts=num_parts
        )
        return [{**(packed if part == 0 else packed_state()), "documents": parts[part]} for part in range(num_parts)]


class PackedStream:
    """The packed documents of one shard; see ``PackedTokens``."""

    def __init__(
        self,
        open_documents: Callable[[int], Iterable[Any]],
        epoch: int,
        seq_len: int,
        encode: Callable[[Any], Sequence[int]],
    ) -> None:
        self._open_documents = open_documents
        self._documents = open_documents(epoch)
        self._num_documents = 0
        self._skip = 0
        self._seq_len = seq_len
        self._encode = encode
        # What is left over: inputs, labels and positions.
        self._lines: tuple[list[int], ...] = ([], [], [])

    def __iter__(self) -> Iterator[PackedSequence]:
        yield from self._full_sequences()
        for document in itertools.islice(self._documents, self._skip, None):
            self._num_documents += 1
            tokens = self._encode(document)
            for line, more in zip(self._lines, (tokens[:-1], tokens[1:], range(len(tokens) - 1)), strict=True):
                line.extend(more)
            yield from self._full_sequences()

    def start_epoch(self, epoch: int) -> None:
        self._num_documents = self._skip = 0
        if not start_epoch(self._documents, epoch):
            self._documents = self._open_documents(epoch)

    def state_dict(self) -> dict[str, Any]:
        inputs, labels, positions = self._lines
        return packed_state(inputs, labels, positions, snapshot(self._documents), self._num_documents)

    @property
    def state_is_small(self) -> bool:
        """See ``Stream``. What is left of a book would be copied again for each sequence of it."""
        return len(self._lines[0]) <= max(self._seq_len, _SMALL_LEFTOVER)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._lines = tuple(list(state_dict[name]) for name in ("inputs", "labels", "positions"))
        self._num_documents = state_dict["num_documents"]
        if not isinstance(self._documents, Stream):
            self._skip = self._num_documents
        elif state_dict["documents"] is not None:
            self._documents.load_state_dict(state_dict["documents"])

    def _full_sequences(self) -> Iterator[PackedSequence]:
        size = self._seq_len
        while len(self._lines[0]) >= size:
            inputs, labels, positions = (line[:size] for line in self._lines)
            self._lines = tuple(line[size:] for line in self._lines)
            yield {"input": _tokens(inputs), "positions": _tokens(_from_zero(positions))}, _tokens(labels)


def packed_state(
    inputs: Sequence[int] = (),
    labels: Sequence[int] = (),
    positions: Sequence[int] = (),
    documents: Any = None,
    num_documents: int = 0,
) -> dict[str, Any]:
    """The state of a ``PackedStream`` with these leftover tokens; ``documents`` is the state of its documents."""
    return {
        "inputs": list(inputs),
        "labels": list(labels),
        "positions": list(positions),
        "documents": documents,
        "num_documents": num_documents,
    }


def _tokens(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64, device="cpu")


def _from_zero(positions: list[int]) -> list[int]:
    """Positions of a sequence, counted from its beginning up to the first new document."""
    first_new = next((i for i, position in enumerate(positions) if position == 0), len(positions))
    return list(range(first_new)) + positions[first_new:]
