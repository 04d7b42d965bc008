"""``inspect`` of data loaders: from a checkpoint alone, without torch, and hostile states."""

import io
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from calls import call, call_importing, make
from kinds import TERMINAL, Runs

from torchtitan_ext.cli.output import FINE
from torchtitan_ext.elastic import ElasticDataLoader, Streams
from torchtitan_ext.storage.formats.plain_records import Unread, _value_of, containers_of


def merged(source: Any, dp_size: int, num_batches: int, **options: Any) -> dict[str, Any]:
    """The state of all ranks after some batches."""
    state: dict[str, Any] = {}
    for rank in range(dp_size):
        loader = ElasticDataLoader(source, dp_rank=rank, dp_size=dp_size, uneven=True, **options)
        batches = iter(loader)
        for _ in range(num_batches):
            next(batches)
        state |= loader.state_dict()
    return state


class WithGenerator:
    """A stream whose state is more than plain values."""

    def __iter__(self) -> Any:
        return iter(range(9))

    def state_dict(self) -> dict[str, Any]:
        return {"generator": torch.Generator().get_state(), "big": 2**200, "seen": {1, 2}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


STATE: dict[str, Any] = {
    "w": torch.zeros(4),
    "validation": merged(range(100), 2, 3, global_batch_size=8),
    "train": {"data": merged(Streams(lambda *_: WithGenerator(), 4), 2, 1, global_batch_size=4, endless=True)},
}


@pytest.mark.parametrize("kind", ["stock", "ours", "ours without .metadata"])
def test_positions_from_a_checkpoint_alone(tmp_path: Path, kind: str) -> None:
    path = make(tmp_path / "c", kind, STATE)
    done, imported = call_importing({"torch"}, "inspect", path)
    assert done.code == FINE and not imported
    assert "validation: epoch 0, sample 24 of 100, order " in done.out and "76 left; 24 seen" in done.out
    assert "train.data: epoch 0, 4 virtual shards; 4 seen" in done.out
    loaders = {one["name"]: one for one in call("inspect", path, "--json").json["data_loaders"]}
    assert loaders["validation"]["samples_left"] == 76 and loaders["validation"]["dp_size"] == 2
    assert [one["served"] for one in loaders["train.data"]["shards"]] == [1, 1, 1, 1]
    assert call("inspect", path, "--data").out.splitlines()[-1].split() == ["3", "0", "1", "-", "1"]
    assert call("inspect", make(tmp_path / "d", kind, {"w": torch.zeros(4)}), "--data").out.startswith("no data loader")


def pickled(stream: bytes) -> bytes:
    """A record of ``torch.save`` with this pickle in it."""
    record = io.BytesIO()
    with zipfile.ZipFile(record, "w") as archive:
        archive.writestr("archive/data.pkl", stream)
    return record.getvalue()


def test_objects_are_not_made() -> None:
    record = pickled(pickle.dumps(({"run": Runs(), "n": 5, "sizes": {torch.float32: [1]}},)))
    value = _value_of("a", record, containers_of)["a"][0]
    assert isinstance(value["run"], Unread) and value["n"] == 5 and not Path("was-run").exists()


HOSTILE = {
    "cut": pickle.dumps({"a": 1})[:-1],
    "a number that would make a long array": b"\x80\x02K\x01r\xff\xff\xff\xff.",
    "a key that takes for ever to hash": b"\x80\x02}" + b")" + b"q\x01h\x01h\x01\x86" * 60 + b"K\x01s.",
    "nothing on the stack": b"\x80\x02a.",
    "no mark": b"\x80\x02u.",
    "calls a number": b"\x80\x02K\x01)R.",
    "an extension": b"\x80\x02\x82\x01.",
    "bytes": bytes(range(128, 256)),
}


@pytest.mark.parametrize("stream", HOSTILE.values(), ids=HOSTILE)
def test_hostile_pickles_are_left_out(stream: bytes) -> None:
    assert _value_of("a", pickled(stream), containers_of) in ({}, {"a": 1})


@pytest.mark.parametrize("entry", [Runs(), 7, (Runs(),), ({"version": TERMINAL},), ({"version": 1, "kind": TERMINAL},)])
def test_other_values_of_that_name_are_no_loaders(tmp_path: Path, entry: Any) -> None:
    path = make(tmp_path / "c", "stock", {"w": torch.zeros(4), "x": {"loader": entry, "shard_0_of_2": entry}})
    done = call("inspect", path, "--data")
    assert (done.code, done.out) == (FINE, "no data loader of this package\n") and not Path("was-run").exists()
    assert call("plan", path, "--mesh", "dp=2").code == FINE
