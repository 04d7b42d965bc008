"""What the child process of a save gets: tensors as places in shared memory, all else as it was."""

import io
import pickle
from typing import Any

import pytest
import torch
from simulated_ranks import mesh_at
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.two_tensor import TwoTensor

from torchtitan_ext.checkpoint import CpuStager
from torchtitan_ext.checkpoint.operation.child_save import _SharingPickler, _SharingUnpickler
from torchtitan_ext.checkpoint.staging.copies import StateMemory
from torchtitan_ext.layout.dtensor import local_tensor


def shard(local: torch.Tensor) -> DTensor:
    return DTensor.from_local(local, mesh_at(0, (2,)), [Shard(0)], run_check=False)


def a_state() -> dict[str, Any]:
    local = torch.arange(6.0).view(2, 3)
    weight = torch.nn.Parameter(shard(local))
    return {
        "weight": weight,
        "tied": weight,
        "frozen": shard(torch.ones(2, 3)),
        "alias": shard(local),
        "empty": shard(torch.zeros(0, 3)),
        "wrapped": shard(TwoTensor(torch.ones(2), torch.zeros(2))),
        "plain": torch.ones(3, requires_grad=True),
        "value": {"step": 3, "name": "x"},
    }


def test_a_child_gets_what_was_staged() -> None:
    state = a_state()
    memory = StateMemory(state)
    copies, _ = CpuStager().copy(memory.tensors)
    staged = memory.around(copies)
    staged["frozen"].note = staged["plain"].note = "kept"
    stream = io.BytesIO()
    _SharingPickler(stream, copies).dump(staged)
    content = stream.getvalue()
    got = _SharingUnpickler(io.BytesIO(content), copies).load()
    assert got["value"] == state["value"] and got["tied"] is got["weight"]
    assert got["frozen"].note == got["plain"].note == "kept"
    for name in ("weight", "frozen", "alias", "empty", "plain"):
        made, tensor = got[name], state[name]
        assert (type(made), made.requires_grad) == (type(tensor) if name == "plain" else DTensor, tensor.requires_grad)
        assert torch.equal(local_tensor(made), local_tensor(tensor)), name
        if isinstance(tensor, DTensor):
            assert (made.placements, made.shape, made.stride()) == (tensor.placements, tensor.shape, tensor.stride())
    addresses = {copied.data_ptr() for copied in copies if copied.numel() > 0}
    assert {local_tensor(got[name]).data_ptr() for name in ("weight", "frozen", "plain")} <= addresses
    assert local_tensor(got["alias"]).data_ptr() == local_tensor(got["weight"]).data_ptr()
    wrapped = local_tensor(got["wrapped"])
    assert isinstance(wrapped, TwoTensor) and {wrapped.a.data_ptr(), wrapped.b.data_ptr()} <= addresses
    with pytest.raises(pickle.UnpicklingError, match="not shared here"):
        pickle.loads(content)
