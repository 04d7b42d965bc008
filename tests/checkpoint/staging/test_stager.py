"""What a save that goes on while training does has copied."""

import gc
import threading
from collections import OrderedDict, namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from eventually import eventually
from reference import same_bits
from simulated_ranks import mesh_at
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.two_tensor import TwoTensor

import torchtitan_ext as tte
from torchtitan_ext.checkpoint.staging import host_buffers
from torchtitan_ext.checkpoint.staging.stager import CpuStager
from torchtitan_ext.errors import CheckpointFailedError, WrongValueError
from torchtitan_ext.layout.dtensor import local_tensor

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


def test_shards_of_a_model_and_its_optimizer_are_copied_with_their_flags() -> None:
    """Some of them empty, as on the last rank of an uneven dim."""
    state = {
        "weight": torch.nn.Parameter(shard(torch.arange(6.0).view(2, 3))),
        "frozen": torch.nn.Parameter(shard(torch.ones(2, 3)), requires_grad=False),
        "empty": torch.nn.Parameter(shard(torch.zeros(0, 3))),
        "other_empty": shard(torch.zeros(0, 2)),
        "moment": shard(torch.full((2, 3), 2.0)),
        "step": torch.tensor(3.0),
        "plain": torch.nn.Parameter(torch.ones(2)),
    }
    copied = CpuStager().stage(state)
    for name, tensor in state.items():
        made, local, of_made = copied[name], local_tensor(tensor), local_tensor(copied[name])
        assert (made.requires_grad, made.shape, made.dtype) == (tensor.requires_grad, tensor.shape, tensor.dtype), name
        assert torch.equal(of_made, local) and (local.numel() == 0 or of_made.data_ptr() != local.data_ptr()), name
        if isinstance(tensor, DTensor):
            assert type(made) is DTensor and made._spec == tensor._spec, name
            with torch.no_grad():
                assert torch.equal(local_tensor(made + made), local + local), "it is a DTensor to operators too"


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


def test_lazy_views_of_one_memory_are_copied_apart() -> None:
    number = torch.tensor([1 + 2j])
    views = {"plain": number, "conjugated": number.conj(), "negated": torch._neg_view(number)}
    assert {name: copied.item() for name, copied in stage(views).items()} == {
        "plain": 1 + 2j,
        "conjugated": 1 - 2j,
        "negated": -1 - 2j,
    }


def test_what_a_checkpoint_records_of_a_tensor_is_kept() -> None:
    weight = torch.nn.Parameter(shard(torch.ones(2)))
    assert stage(weight).requires_grad and stage(torch.nn.Parameter(torch.ones(2))).requires_grad
    assert stage(torch.ones(2, requires_grad=True) * 2).requires_grad
    assert not stage(weight.detach()).requires_grad
    assert stage(torch.empty(3, device="meta")).is_meta
    state = {"plain": torch.ones(2), "parameter": torch.nn.Parameter(torch.ones(2))}
    copied = CpuStager().stage(state)
    assert [(value.requires_grad, value.is_leaf) for value in copied.values()] == [(False, True), (True, True)]


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


def test_memory_is_kept_between_saves() -> None:
    stager = CpuStager()
    addresses = set()
    for step in range(3):
        copied = stager.stage({"w": torch.full((1000,), step), "b": torch.tensor(step)})
        addresses.add(copied["w"].data_ptr())
        assert copied["w"].tolist() == [step] * 1000 and copied["b"] == step
        del copied
    assert len(addresses) == 1


def test_a_save_waits_until_no_copy_lives() -> None:
    stager = CpuStager()
    first = stager.stage({"w": torch.ones(4)})
    part = first["w"][2:]
    staged: list[Any] = []
    waits, free = threading.Event(), stager._buffers._free

    class Noted:
        """Says when somebody begins to wait for a buffer."""

        get_nowait, put = free.get_nowait, free.put

        def get(self, timeout: float) -> Any:
            waits.set()
            return free.get(timeout=timeout)

    stager._buffers._free = Noted()  # type: ignore[assignment]
    thread = threading.Thread(target=lambda: staged.append(stager.stage({"w": torch.zeros(4)})))
    thread.start()
    first.clear()
    assert waits.wait(60) and free.empty() and part.tolist() == [1, 1]
    del part
    thread.join()
    assert staged[0]["w"].tolist() == [0] * 4


def test_memory_made_in_inference_mode_serves_later_saves() -> None:
    stager = CpuStager()
    with torch.inference_mode():
        assert stager.stage({"w": torch.ones(4), "p": torch.nn.Parameter(torch.ones(2))})["w"].sum() == 4
        state = {"w": torch.full((4,), 2.0)[::2]}
    assert stager.stage(state)["w"].tolist() == [2, 2]


def test_as_many_saves_as_buffers_are_under_way() -> None:
    stager = CpuStager(num_buffers=2)
    first, second = stager.stage({"w": torch.ones(4)}), stager.stage({"w": torch.zeros(4)})
    assert first["w"].tolist() == [1] * 4 and second["w"].tolist() == [0] * 4


def test_a_failed_copy_leaves_its_memory_free() -> None:
    stager = CpuStager()
    freed = torch.ones(4)
    freed.untyped_storage().resize_(0)
    for _ in range(2):
        with pytest.raises(ValueError, match="was it freed or resized"):
            stager.stage({"w": freed})
    assert stager.stage({"w": torch.ones(2)})["w"].tolist() == [1, 1]


def test_a_closed_stager_keeps_nothing_and_can_be_used_again() -> None:
    stager = CpuStager()
    copied = stager.stage({"w": torch.ones(4)})
    stager.close()
    again = stager.stage({"w": torch.zeros(4)})
    assert copied["w"].tolist() == [1] * 4 and again["w"].tolist() == [0] * 4


def save_without_room(rank: int, world_size: int, path: Path) -> str:
    with pytest.MonkeyPatch.context() as monkeypatch:
        if rank == 1:
            monkeypatch.setattr(host_buffers, "_available_bytes", lambda: 1000)
        with pytest.raises(CheckpointFailedError) as refused:
            tte.async_save({"w": torch.ones(1000)}, path, stager=CpuStager())
    tte.async_save({"w": torch.ones(1000)}, path.with_name("later")).result()
    return str(refused.value)


def test_a_host_without_memory_for_the_copy_is_told_on_every_rank(run_world: Any, tmp_path: Path) -> None:
    first, second = run_world(2, save_without_room, tmp_path / "step")
    assert first == second and "rank 1: MemoryError: a copy of this rank's state takes 40" in first
    assert "and 1000 are left; run fewer ranks per host, or save without a copy: tte.save" in first
    assert [path.name for path in tmp_path.iterdir()] == ["later"]


@pytest.mark.parametrize("arguments", [{"pin_memory": "yes"}, {"num_buffers": 0}])
def test_arguments_that_make_no_sense(arguments: dict[str, Any]) -> None:
    with pytest.raises(WrongValueError, match=next(reversed(arguments))):
        CpuStager(**arguments)


def test_a_save_that_has_ended_holds_nothing(tmp_path: Path) -> None:
    """Without a garbage collection, which would take longer than all else of the next call."""
    stager = CpuStager()
    gc.collect()
    gc.disable()
    try:
        saved = tte.async_save({"w": torch.ones(9), "n": {"b": [torch.ones(2)]}}, tmp_path / "step", stager=stager)
        saved.result()
        del saved
        eventually(lambda: not stager._buffers._free.empty())  # at the end of its thread
    finally:
        gc.enable()
