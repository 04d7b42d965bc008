"""What a save that goes on while training does has copied."""

from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
from reference import same_bits
from simulated_ranks import mesh_at
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.two_tensor import TwoTensor

from torchtitan_ext.checkpoint.operation.staging import CpuStager

Pair = namedtuple("Pair", "weight step")

VIEWS = {
    "offset": torch.arange(40.0)[8:20].view(3, 4),
    "transposed": torch.arange(12.0).view(3, 4).t(),
    "gaps": torch.arange(24.0).view(4, 6)[:, 1:4],
    "expanded": torch.arange(4.0).expand(3, 4),
    "conjugated": (torch.arange(4) * (1 + 2j)).conj(),
    "negated": torch._neg_view(torch.arange(4.0)),
    "scalar": torch.arange(4)[3],
    "empty": torch.empty(0, 3, dtype=torch.bfloat16),
    "float8": torch.arange(4.0).to(torch.float8_e5m2)[1:],
}


def shard(local: torch.Tensor) -> DTensor:
    return DTensor.from_local(local, mesh_at(0, (2,)), [Shard(0)], run_check=False)


def stage(value: Any) -> Any:
    return CpuStager().stage({"value": value})["value"]


@pytest.mark.parametrize("name", VIEWS)
def test_views_are_copied_as_they_read(name: str) -> None:
    view = VIEWS[name].clone() if name == "expanded" else VIEWS[name]
    copied = stage(view)
    assert same_bits(copied, view.resolve_conj().resolve_neg())
    assert copied.untyped_storage().nbytes() == view.numel() * view.element_size()


@pytest.mark.parametrize("name", sorted(VIEWS.keys() - {"scalar"}))
def test_shards_that_are_views(name: str) -> None:
    tensor = shard(VIEWS[name])
    copied = stage(tensor)
    assert isinstance(copied, DTensor)
    assert (copied.placements, copied.shape) == (tensor.placements, tensor.shape)
    assert same_bits(copied.to_local(), VIEWS[name].resolve_conj().resolve_neg())


def test_later_changes_do_not_reach_the_copy() -> None:
    state = {"nested": [torch.ones(2), OrderedDict(weight=shard(torch.ones(2)))], "pair": Pair(torch.ones(2), [1])}
    copied = CpuStager().stage(state)
    state["nested"][0].zero_()
    state["nested"][1]["weight"].zero_()
    state["pair"].weight.zero_()
    state["pair"].step.append(2)
    assert torch.equal(copied["nested"][0], torch.ones(2))
    assert torch.equal(copied["nested"][1]["weight"].to_local(), torch.ones(2))
    assert type(copied["nested"][1]) is OrderedDict
    assert copied["pair"].weight.tolist() == [1, 1] and copied["pair"].step == [1] and type(copied["pair"]) is Pair


def test_tied_tensors_are_copied_once() -> None:
    memory = torch.ones(4)
    copied = CpuStager().stage({"a": memory.detach(), "b": shard(memory.detach()), "other": memory[:2]})
    assert copied["a"].data_ptr() == copied["b"].to_local().data_ptr() != memory.data_ptr()
    assert copied["other"].data_ptr() != copied["a"].data_ptr()


def test_what_a_checkpoint_records_of_a_tensor_is_kept() -> None:
    weight = torch.nn.Parameter(shard(torch.ones(2)))
    assert stage(weight).requires_grad and stage(torch.nn.Parameter(torch.ones(2))).requires_grad
    assert stage(torch.ones(2, requires_grad=True) * 2).requires_grad
    assert not stage(weight.detach()).requires_grad
    assert stage(torch.empty(3, device="meta")).is_meta


def test_subclasses_made_of_tensors() -> None:
    copied = stage(TwoTensor(torch.arange(4.0), torch.ones(4)))
    assert isinstance(copied, TwoTensor)
    assert copied.a.tolist() == [0, 1, 2, 3] and copied.b.tolist() == [1, 1, 1, 1]


@pytest.mark.timeout(60)
def test_containers_that_hold_each_other_are_copied_once() -> None:
    cycle: dict[str, Any] = {"w": torch.ones(2)}
    cycle["self"] = cycle
    copied = CpuStager().stage({"a": cycle})["a"]
    assert copied["self"] is copied and torch.equal(copied["w"], cycle["w"]) and copied["w"] is not cycle["w"]
    shared: list[Any] = [torch.ones(1)]
    for _ in range(200):
        shared = [shared, shared]
    assert CpuStager().stage({"a": shared})["a"][0] is not shared[0]
