"""Files of ``torch.save`` as sources, also those that lie otherwise than in memory."""

import argparse
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoints import save_as
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from torchtitan_ext.errors import DamagedCheckpointError, LayoutError
from torchtitan_ext.offline.compare.diff import DiffReport, diff
from torchtitan_ext.offline.rewrite.convert import convert
from torchtitan_ext.offline.sources import open_source
from torchtitan_ext.storage import FileReader
from torchtitan_ext.storage.formats.torch_files import read_torch_file
from torchtitan_ext.storage.inspect.describe import describe


def packed_anew(
    source: Path, target: Path, change: Callable[[str, bytes], bytes], compression: int = zipfile.ZIP_STORED
) -> Path:
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", compression) as new:
        for entry in old.infolist():
            new.writestr(entry.filename, change(entry.filename, old.read(entry)))
    return target


def test_the_ordered_dict_of_a_module_is_read(tmp_path: Path) -> None:
    module = torch.nn.Linear(3, 2)
    torch.save({"model": module.state_dict()}, tmp_path / "nested.pt")
    torch.save(module.state_dict(), tmp_path / "a.pt")
    assert diff(open_source(tmp_path / "a.pt"), open_source(tmp_path / "a.pt")) == DiffReport((), 2)
    convert(open_source(tmp_path / "nested.pt"), tmp_path / "b", to="dcp", num_processes=1)
    dcp_to_torch_save(tmp_path / "b", tmp_path / "b.pt")
    assert torch.equal(torch.load(tmp_path / "b.pt")["model"]["weight"], module.weight)


@pytest.mark.parametrize("kind", ["stock", "ours", "torch"])
def test_tensors_within_values_are_written(tmp_path: Path, kind: str) -> None:
    state: dict[str, Any] = {
        "w": torch.ones(2),
        "pair": (torch.arange(5.0), 1),
        "args": argparse.Namespace(mean=torch.arange(4.0), k=3),
        "ordered": OrderedDict(a=torch.arange(3.0)),
    }
    source = save_as(kind, tmp_path / "a", state)
    convert(open_source(source), tmp_path / "b", to="dcp", num_processes=1)
    assert diff(open_source(source), open_source(tmp_path / "b")) == DiffReport((), 4)
    dcp_to_torch_save(tmp_path / "b", tmp_path / "b.pt")
    loaded = torch.load(tmp_path / "b.pt", weights_only=False)
    assert torch.equal(loaded["pair"][0], torch.arange(5.0))
    assert torch.equal(loaded["args"].mean, torch.arange(4.0))


def test_bytes_that_do_not_lie_as_in_memory_are_refused(tmp_path: Path) -> None:
    torch.save({"w": torch.arange(6.0)}, tmp_path / "a.pt")
    others = {
        "compressed": packed_anew(tmp_path / "a.pt", tmp_path / "b.pt", lambda _, data: data, zipfile.ZIP_DEFLATED),
        "big-endian": packed_anew(
            tmp_path / "a.pt", tmp_path / "c.pt", lambda name, data: b"big" if name.endswith("byteorder") else data
        ),
        "needs 24 bytes": packed_anew(
            tmp_path / "a.pt", tmp_path / "d.pt", lambda name, data: data[:4] if "/data/" in name else data
        ),
    }
    for reason, path in others.items():
        with pytest.raises(DamagedCheckpointError, match=reason):
            open_source(path)
    for path in (others["compressed"], others["big-endian"]):
        with pytest.raises(DamagedCheckpointError):
            describe(path)


def test_numbers_of_another_order_of_bytes_in_stock_checkpoints_are_turned_around(tmp_path: Path) -> None:
    """As torch.load does it; of copies they are refused."""
    values = torch.arange(5.0)
    dcp.save({"w": values}, checkpoint_id=tmp_path / "a", no_dist=True)
    torch.save(values, tmp_path / "little")
    turned = {"byteorder": b"big", "0": values.numpy().byteswap().tobytes()}
    record = packed_anew(
        tmp_path / "little", tmp_path / "big", lambda name, data: turned.get(name.rpartition("/")[2], data)
    ).read_bytes()
    (tmp_path / "a" / "__0_0.distcp").write_bytes(record)
    metadata = dcp.FileSystemReader(tmp_path / "a").read_metadata()
    for place in metadata.storage_data.values():
        place.offset, place.length = 0, len(record)
    (tmp_path / "a" / ".metadata").write_bytes(pickle.dumps(metadata))
    loaded = {"w": torch.zeros(5)}
    dcp.load(loaded, storage_reader=FileReader(tmp_path / "a"), no_dist=True)
    assert torch.equal(loaded["w"], values)
    source = open_source(tmp_path / "a")
    assert diff(source, open_source(save_as("ours", tmp_path / "b", {"w": values}))) == DiffReport((), 1)
    with pytest.raises(LayoutError, match="w: is .* of a machine with another order of bytes"):
        convert(source, tmp_path / "c", to="dcp", num_processes=1)


def test_states_without_a_flat_form_are_refused(tmp_path: Path) -> None:
    ring: dict[str, Any] = {"w": torch.ones(1)}
    ring["self"] = ring
    states: list[dict[Any, Any]] = [
        ring,
        {"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)},
        {1: torch.ones(1), "1": 2},
        {"\ud800": torch.ones(1)},
    ]
    for number, state in enumerate(states):
        torch.save(state, tmp_path / f"{number}.pt")
        for read in (open_source, describe):
            with pytest.raises(DamagedCheckpointError):
                read(tmp_path / f"{number}.pt")


def test_sparse_tensors_are_described(tmp_path: Path) -> None:
    torch.save({"s": torch.eye(3).to_sparse()}, tmp_path / "a.pt")
    (key,) = describe(tmp_path / "a.pt").keys
    assert (key.dtype, key.sizes, key.num_bytes) == ("float32", (3, 3), 36)


def test_sparse_tensors_have_no_place(tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(2), "s": torch.eye(3).to_sparse()}, tmp_path / "a.pt")
    with pytest.raises(DamagedCheckpointError, match="is no plain memory, which is all that can be read of such files"):
        read_torch_file(tmp_path / "a.pt", weights_only=True)
