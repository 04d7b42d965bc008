"""What a reader of boxes does after an error."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from torchtitan_ext.offline.boxes import BoxReader, whole
from torchtitan_ext.offline.sources import open_source


def test_a_read_that_failed_leaves_nothing_to_the_next(tmp_path: Path) -> None:
    saved = {name: torch.full((8,), number) for number, name in enumerate("abc", 1)}
    for name, value in saved.items():
        save_file({name: value.float()}, tmp_path / f"{name}.safetensors")
    reader = BoxReader(open_source(tmp_path))
    reader.read([whole("c", torch.float64, (8,))], [torch.zeros(8, dtype=torch.float64)])  # its buffer is not empty now
    (tmp_path / "b.safetensors").unlink()
    places = {name: torch.zeros(8, dtype=torch.float64) for name in saved}
    pieces = {name: whole(name, torch.float64, (8,)) for name in saved}
    with pytest.raises(FileNotFoundError):
        reader.read([pieces["a"], pieces["b"]], [places["a"], places["b"]])
    reader.read([pieces["c"]], [places["c"]])
    assert torch.equal(places["c"], saved["c"].double())
    assert not places["a"].any() and not places["b"].any()
