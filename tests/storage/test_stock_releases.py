"""What stock `dcp.save` of several releases of torch wrote is read by any torch, and what we write by each of them."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp
from calls import call
from data.stock.generate import RELEASES, stock_state
from states import blank, differences
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

import torchtitan_ext as tte
from torchtitan_ext.cli.output import FINE
from torchtitan_ext.storage import FileReader, FileWriter
from torchtitan_ext.storage.metadata.lazy_metadata import PROPERTIES

STOCK = Path(__file__).parents[1] / "data" / "stock"
STRIDES = {
    # Of a tensor that ranks share, that of the rank that saved its first chunk: columns of 4, two on each rank.
    "model.rows": (3, 1),
    "model.columns": (2, 1),
    "model.transposed": (1, 3),
    "model.channels_last": (8, 1, 4, 2),
    "model.scalar": (),
    "model.empty": (3, 1),
    "optimizer.state.0.step": (),
}


def target() -> dict[str, Any]:
    """Of the structure of the state, with other values."""
    state = blank(stock_state())
    state["optimizer"]["param_groups"] = [{"lr": None, "betas": None}]
    return state


class FiveFields:
    """``TensorProperties`` as torch before 2.15 unpickles it."""

    def __setstate__(self, state: Any) -> None:
        self.dtype, self.layout, self.requires_grad, self.memory_format, self.pin_memory = state


class OldTorch(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return FiveFields if name == "TensorProperties" else super().find_class(module, name)


def properties_for_old_torch(path: Path) -> list[FiveFields]:
    with (path / ".metadata").open("rb") as stream:
        entries = OldTorch(stream).load().state_dict_metadata.values()
    return [entry.properties for entry in entries if isinstance(entry, TensorStorageMetadata)]


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("verify", ["auto", "none"])
def test_they_load(release: str, verify: Any) -> None:
    state = target()
    tte.load(state, storage_reader=FileReader(STOCK / release, verify), no_dist=True)
    assert differences(state, stock_state()) == []


@pytest.mark.parametrize("release", RELEASES)
def test_their_metadata(release: str) -> None:
    metadata = FileReader(STOCK / release).read_metadata()
    tensors = {key: one for key, one in metadata.state_dict_metadata.items() if isinstance(one, TensorStorageMetadata)}
    assert tensors.keys() == STRIDES.keys()
    if "strides" in PROPERTIES:
        expected = STRIDES if release == "2.15" else dict.fromkeys(STRIDES)
        assert {key: one.properties.strides for key, one in tensors.items()} == expected  # type: ignore[attr-defined]
        assert tensors == {
            key: one
            for key, one in pickle.loads((STOCK / release / ".metadata").read_bytes()).state_dict_metadata.items()
            if key in tensors
        }


@pytest.mark.parametrize("release", RELEASES)
def test_commands_read_them(release: str) -> None:
    path = STOCK / release
    shown = call("inspect", path, "--json")
    assert (shown.code, shown.err) == (FINE, "")
    assert {key["name"] for key in shown.json["keys"] if key["dtype"]} == STRIDES.keys()
    for options in [(), ("--deep",)]:
        verified = call("verify", path, *options, "--json")
        assert (verified.code, verified.err, verified.json["damages"]) == (FINE, "", [])
    other = STOCK / RELEASES[0]
    assert call("diff", path, other).code == FINE


@pytest.mark.parametrize("release", RELEASES)
def test_convert_is_the_bridge_to_older_torch(tmp_path: Path, release: str) -> None:
    assert call("convert", STOCK / release, tmp_path / "dcp", "--to", "dcp", "--processes", "1").code == FINE
    assert len(properties_for_old_torch(tmp_path / "dcp")) == len(STRIDES)
    state = target()
    dcp.load(state, storage_reader=dcp.FileSystemReader(tmp_path / "dcp"), no_dist=True)
    assert differences(state, stock_state()) == []
    again = target()
    tte.load(again, tmp_path / "dcp", no_dist=True)
    assert differences(again, stock_state()) == []


class Odd:
    """A value of a planner that only Python's pickle can write."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Odd)


class OddPlanner(tte.SavePlanner):
    def create_global_plan(self, all_plans: Any) -> Any:
        plans, metadata = super().create_global_plan(all_plans)
        metadata.planner_data["odd"] = Odd()
        return plans, metadata


@pytest.mark.parametrize("planner", [tte.SavePlanner, dcp.DefaultSavePlanner, OddPlanner])
def test_older_torch_reads_what_we_write(tmp_path: Path, planner: Any) -> None:
    dcp.save(stock_state(), storage_writer=FileWriter(tmp_path, sync=False), planner=planner(), no_dist=True)
    assert len(properties_for_old_torch(tmp_path)) == len(STRIDES)
    state = target()
    dcp.load(state, storage_reader=dcp.FileSystemReader(tmp_path), no_dist=True)
    assert differences(state, stock_state()) == []
