"""What a reader of boxes does after an error."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from torchtitan_ext import _core
from torchtitan_ext.offline.boxes import BoxReader, whole
from torchtitan_ext.offline.sources import open_source
from torchtitan_ext.storage.metadata.saved_state import SavedTensor


@pytest.mark.parametrize("dtype", ["float32", "float64", "float8_e5m2"])  # as saved, cast by the reader, by torch
def test_a_read_that_failed_leaves_nothing_to_the_next(tmp_path: Path, dtype: str) -> None:
    saved = {name: torch.full((8,), number) for number, name in enumerate("abc", 1)}
    for name, value in saved.items():
        save_file({name: value.float()}, tmp_path / f"{name}.safetensors")
    reader = BoxReader(open_source(tmp_path))
    wanted = SavedTensor(dtype, (8,), _core.ChunkIndex.of_boxes([((0,), (8,))]))
    reader.read([whole("c", wanted)], [np.zeros(wanted.num_bytes, dtype=np.uint8)])  # a buffer is not empty now
    (tmp_path / "b.safetensors").unlink()
    places = {name: np.zeros(wanted.num_bytes, dtype=np.uint8) for name in saved}
    pieces = {name: whole(name, wanted) for name in saved}
    with pytest.raises(FileNotFoundError):
        reader.read([pieces["a"], pieces["b"]], [places["a"], places["b"]])
    reader.read([pieces["c"]], [places["c"]])
    assert torch.equal(torch.from_numpy(places["c"]).view(getattr(torch, dtype)).double(), saved["c"].double())
    assert not places["a"].any() and not places["b"].any()
