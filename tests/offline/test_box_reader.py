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


def test_a_read_that_failed_leaves_nothing_to_the_next(tmp_path: Path) -> None:
    saved = {name: torch.full((8,), number) for number, name in enumerate("abc", 1)}
    for name, value in saved.items():
        save_file({name: value.float()}, tmp_path / f"{name}.safetensors")
    reader = BoxReader(open_source(tmp_path))
    wanted = SavedTensor("float64", (8,), _core.ChunkIndex.of_boxes([((0,), (8,))]))
    reader.read([whole("c", wanted)], [np.zeros(64, dtype=np.uint8)])  # its buffer is not empty now
    (tmp_path / "b.safetensors").unlink()
    places = {name: np.zeros(64, dtype=np.uint8) for name in saved}
    pieces = {name: whole(name, wanted) for name in saved}
    with pytest.raises(FileNotFoundError):
        reader.read([pieces["a"], pieces["b"]], [places["a"], places["b"]])
    reader.read([pieces["c"]], [places["c"]])
    assert places["c"].tobytes() == saved["c"].double().numpy().tobytes()
    assert not places["a"].any() and not places["b"].any()
