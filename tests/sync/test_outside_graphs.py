"""Functions that are not traced keep their types."""

import inspect
from pathlib import Path

import pytest
import torch

import torchtitan_ext
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


def test_mypy_sees_the_types(monkeypatch: pytest.MonkeyPatch) -> None:
    api = pytest.importorskip("mypy.api", reason="mypy is in the environment of `make lint`")
    monkeypatch.chdir(Path(torchtitan_ext.__file__).resolve().parent.parent)
    code = "from torchtitan_ext.sync.check import check_replicas; reveal_type(check_replicas({}))"
    output, _, _ = api.run(["--no-incremental", "--follow-imports=silent", "-c", code])
    assert "tuple[torchtitan_ext.sync.check.ReplicaDifference, ...]" in output
