"""The bytes of a table on its way: what other ranks, perhaps of another release, read."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import torch

from torchtitan_ext.checkpoint.tables.key_table import (
    BoxesEntry,
    EncodedTable,
    KeyEntry,
    KeyTable,
    ObjectEntry,
    TensorEntry,
    encode_table,
    unpack,
)
from torchtitan_ext.layout.layout import MeshLayout, ShardReport

MESH = MeshLayout((2, 2), (0, 1, 2, 3), ("dp", "tp"))
SHUFFLED = MeshLayout((3,), (5, 1, 7), None)
W = TensorEntry(ShardReport((8, 3), MESH, (1, 0), ((0, 2), (0, 1)), (2, 3)), torch.float32, True)
OTHER_SIZES = TensorEntry(ShardReport((8, 3), MESH, (1, 0), ((0, 2), (0, 1)), (3, 3)), torch.float32, True)
ORDERED = TensorEntry(ShardReport((9,), SHUFFLED, (2,), ((0, 1),), (3,), ((0, 0, 1),)), torch.bfloat16, False)
PLAIN = TensorEntry(ShardReport((), local_sizes=()), torch.int64, False)
STATED = BoxesEntry((4,), torch.float32, (((0,), (2,)), ((2,), (2,))))
ENTRIES: dict[str, KeyEntry] = {
    "layers.0.w": W,
    "layers.1.w": OTHER_SIZES,
    "a.b.é": ORDERED,
    "boxes": STATED,
    "step": PLAIN,
    "rank_3.step": PLAIN,
    "lr": ObjectEntry(),
    "dp_rank_0.lr": ObjectEntry(),
    "broken.\udc80": W,
}
PATHS: dict[str, tuple[Any, ...]] = {
    "layers.0.w": ("layers", 0, "w"),
    "layers.1.w": ("layers", 1, "w"),
    "a.b.é": ("a.b", "é"),
    "step": ("elsewhere",),
    "lr": ("lr",),
    "rank_3.step": ("rank_3", "step"),
    "broken.\udc80": ("broken", "\udc80"),
    "empty.0": ("empty", 0),
    "flags.True": ("flags", True),
}


def encoded() -> EncodedTable:
    """The table of a rank with a key of each sort."""
    return encode_table(KeyTable(ENTRIES, digests={"lr": b"r0.1", "layers.0.w": bytes(16)}, stock_paths=PATHS))


def test_the_bytes_of_a_table_do_not_change() -> None:
    message = encoded().message
    sent = b"|".join(map(unpack, (*message.sections, message.part, *message.digests)))
    assert hashlib.sha256(sent).hexdigest() == "75097743885477b3bc79e03a48ec76aebd33dc5c5fffd76b1bd65d8e121a67b3"


def test_keys_are_in_the_sections_of_what_ranks_have_in_common() -> None:
    table = encoded()
    assert table.names == (
        ["layers.0.w", "layers.1.w", "a.b.é", "boxes", "broken.\udc80"],
        ["step", "lr", "empty.0", "flags.True"],
        ["rank_3.step", "dp_rank_0.lr"],
    )
    assert table.kind_of == ([0, 0, 1, 2, 0], [0, 1, 2, 2], [0, 1])


@pytest.mark.parametrize("part", [True, -1, 1 << 32, 2.5, None])
def test_a_path_that_is_no_cut_of_its_key_travels_as_it_is(part: Any) -> None:
    paths = {f"a.{part}": ("a", part), "a.1": ("a", 1), "": ()}
    table = encode_table(KeyTable({}, stock_paths=paths))
    assert table.message.rest.stock_paths == {f"a.{part}": ("a", part)}
    assert encoded().message.rest.stock_paths == {"step": ("elsewhere",), "flags.True": ("flags", True)}
