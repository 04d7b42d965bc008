"""Dry runs of loads from files of other formats than DCP's."""

from pathlib import Path

import pytest
import torch

import torchtitan_ext as tte
from torchtitan_ext.errors import ReshardError, UnknownFormatError

STATE = {"model": {"w": torch.zeros(32, 8), "b": torch.ones(5)}, "step": 3}


def test_a_file_of_torch_save_is_read_as_its_conversion_would_be(tmp_path: Path) -> None:
    torch.save(STATE, tmp_path / "state.pt")
    tte.save(STATE, tmp_path / "dcp", no_dist=True)
    found, converted = (tte.dry_run(tmp_path / name, mesh={"dp": 4}).load for name in ("state.pt", "dcp"))
    assert found.ranks[0].num_bytes == pytest.approx(converted.ranks[0].num_bytes, abs=64)  # names in pickles differ
    assert [problem.kind for problem in found.problems] == ["broken_checkpoint"]
    assert f"convert {tmp_path / 'state.pt'} <directory> --to dcp" in found.problems[0].detail
    with pytest.raises(ReshardError, match="is a file of torch.save, which no load of a job reads"):
        tte.dry_run(STATE, mesh={"dp": 4}, checkpoint=tmp_path / "state.pt")


def test_what_is_none(tmp_path: Path) -> None:
    (tmp_path / "__0_0.distcp").write_bytes(b"")
    with pytest.raises(UnknownFormatError, match="a save that has not finished"):
        tte.dry_run(tmp_path, mesh={"dp": 2})
    with pytest.raises(FileNotFoundError, match="No such file or directory"):
        tte.dry_run(tmp_path / "none", mesh={"dp": 2})
