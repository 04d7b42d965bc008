"""Functions that are not traced."""

import inspect

import torch

from torchtitan_ext.sync import broadcast_tensors, sync_module_states, sync_state_dict
from torchtitan_ext.sync.check import check_replicas
from torchtitan_ext.sync.outside_graphs import outside_graphs

PUBLIC = [broadcast_tensors, sync_module_states, sync_state_dict, check_replicas]


def test_signatures_and_docstrings_are_kept() -> None:
    for function in PUBLIC:
        assert "bucket_bytes" in inspect.signature(function).parameters or function is check_replicas
        assert function.__doc__


def test_the_body_is_not_traced() -> None:
    traced = []

    @outside_graphs
    def look(tensor: torch.Tensor) -> torch.Tensor:
        traced.append(torch.compiler.is_compiling())
        return tensor

    compiled = torch.compile(lambda tensor: look(tensor) + 1, backend="eager")
    assert compiled(torch.zeros(1)).item() == 1.0 and traced == [False]
