"""Arguments that a call cannot take, arguments that ranks must agree on, and calls under torch.compile."""

import inspect
from typing import Any

import pytest
import torch

from torchtitan_ext.sync import broadcast_tensors, sync_module_states, sync_state_dict
from torchtitan_ext.sync.calls import BroadcastCall, CheckCall, SyncCall, outside_graphs
from torchtitan_ext.sync.check import check_replicas

PUBLIC = [broadcast_tensors, sync_module_states, sync_state_dict, check_replicas]


def test_defaults_are_good() -> None:
    assert [call("sync", None).problems() for call in (BroadcastCall, CheckCall, SyncCall)] == [[], [], []]


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"buffers": "some"}, 'arguments: buffers is \'some\', expected "all", "persistent" or "none"'),
        ({"ignore": "head"}, "arguments: ignore is 'head', expected a list of names or globs"),
        ({"ignore": [3]}, "arguments: ignore is [3], expected a list of names or globs"),
        ({"src": "0"}, "arguments: src is '0', expected a coordinate"),
        ({"bucket_bytes": 0}, "bucket_bytes: got 0, expected a positive int64"),
        ({"bucket_bytes": 2**63}, f"bucket_bytes: got {2**63}, expected a positive int64"),
    ],
)
def test_what_is_wrong_is_named(wrong: dict[str, Any], text: str) -> None:
    assert [str(problem) for problem in SyncCall("sync", None, **wrong).problems()] == [text]


def test_each_call_agrees_on_its_own_arguments() -> None:
    common = ["operation", "mesh"]
    assert list(BroadcastCall("sync", None).agreed_texts()) == [*common, "src", "bucket_bytes"]
    assert list(CheckCall("sync", None).agreed_texts()) == [*common, "params", "buffers", "ignore"]
    call = SyncCall("sync", None, ignore={"b", "a"})
    assert call.agreed_texts() == {
        **{"operation": "sync", "mesh": "left out", "src": "0", "bucket_bytes": str(32 << 20), "params": "True"},
        **{"buffers": "'all'", "ignore": "[\"'a'\", \"'b'\"]", "verify": "False"},
    }


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
