"""Optimizer state after real steps: every form of AdamW, the flattened form of its state, real gradients."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from models import (
    BY_NAME,
    UNEVEN,
    Layout,
    Sizes,
    build_model,
    build_optimizer,
    build_whole,
    differences,
    leaves,
    poison,
    shards_of,
    take_steps,
    trained,
    training_state,
)
from reference import assemble, same_bits
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

import torchtitan_ext as tte

FORMS = {
    "for_loop": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
    "amsgrad": {"amsgrad": True},
}


def save_form(rank: int, world_size: int, layout: Layout, path: Path, options: dict[str, Any]) -> dict[str, Any]:
    state = trained(build_model(layout, UNEVEN), on_dtensors=True, **options)
    dcp.save(state, checkpoint_id=path, planner=tte.SavePlanner())
    return shards_of(state)


def load_form(
    rank: int, world_size: int, layout: Layout, path: Path, options: dict[str, Any], truth: Any, sizes: Sizes = UNEVEN
) -> list[str]:
    model = build_model(layout, sizes, seed=1)
    optimizer = build_optimizer(model, lr=0.5, **options)
    model_state, optimizer_state = get_state_dict(model, optimizer)  # which lets the optimizer make its state
    state = {"model": model_state, "optimizer": optimizer_state}
    poison(state)
    dcp.load(state, checkpoint_id=path, planner=tte.LoadPlanner())
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return differences(tensors_of(training_state(model, optimizer)), truth)


def tensors_of(state: Any) -> dict[str, torch.Tensor]:
    return {name: leaf for name, leaf in leaves(state) if isinstance(leaf, torch.Tensor)}


def assemble_all(answers: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """The unsharded state from what all ranks returned of `shards_of`, by the oracle."""
    truth = {}
    for name, (shape, _, _) in answers[0].items():
        truth[name] = assemble(
            shape,
            {(rank,): answer[name][2] for rank, answer in enumerate(answers)},
            {(rank,): answer[name][1] for rank, answer in enumerate(answers)},
        )
    return truth


# Fused and foreach kernels take no mixture of meshes, so these rows are 1-D, where a parameter has one axis.
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_adamw_crosses_meshes(run_world, tmp_path: Path, form: str) -> None:
    options = FORMS[form]
    truth = assemble_all(run_world(4, save_form, BY_NAME["fsdp4"], tmp_path, options))
    assert any(name.endswith("max_exp_avg_sq") for name in truth) == (form == "amsgrad")
    for target in [BY_NAME["fsdp2"]]:
        for lines in run_world(target.world_size, load_form, target, tmp_path, options, truth):
            assert lines == []


def differing_steps(rank: int, world_size: int, layout: Layout) -> list[str]:
    on_dtensors = shards_of(trained(build_model(layout, UNEVEN), on_dtensors=True))
    on_locals = shards_of(trained(build_model(layout, UNEVEN)))
    assert on_dtensors.keys() == on_locals.keys()
    fresh = shards_of(training_state(model := build_model(layout, UNEVEN), build_optimizer(model, lr=0.01)))
    assert not same_bits(fresh["model.embed.weight"][2], on_locals["model.embed.weight"][2])
    return [name for name in on_locals if not all(map(same_bits, on_dtensors[name][1:], on_locals[name][1:]))]


def test_steps_on_local_tensors_are_those_on_dtensors(run_world) -> None:
    layout = BY_NAME["fsdp2_tp2"]
    assert run_world(layout.world_size, differing_steps, layout) == [[]] * layout.world_size


FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def save_flat(rank: int, world_size: int, layout: Layout, path: Path) -> None:
    model = build_model(layout, UNEVEN)
    optimizer = build_optimizer(model, lr=0.01)
    take_steps(model, optimizer)
    state = {"optimizer": get_optimizer_state_dict(model, optimizer, options=FLAT)}
    dcp.save(state, checkpoint_id=path, planner=tte.SavePlanner())


def load_flat(rank: int, world_size: int, layout: Layout, path: Path) -> list[str]:
    model = build_model(layout, UNEVEN, seed=1) if layout.axes else build_whole(UNEVEN, seed=1)
    optimizer = build_optimizer(model, lr=0.5)
    state = {"optimizer": get_optimizer_state_dict(model, optimizer, options=FLAT)}
    poison(state)
    dcp.load(state, checkpoint_id=path, planner=tte.LoadPlanner())
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=FLAT)
    return differences(get_optimizer_state_dict(model, optimizer), whole_optimizer_truth())


def whole_optimizer_truth() -> dict[str, Any]:
    model = build_whole(UNEVEN)
    optimizer = build_optimizer(model, lr=0.01)
    take_steps(model, optimizer)
    return dict(leaves(get_optimizer_state_dict(model, optimizer)))


def test_flattened_optimizer_state_dict_crosses_meshes(run_world, tmp_path: Path) -> None:
    run_world(4, save_flat, BY_NAME["fsdp2_tp2"], tmp_path)
    for target in [BY_NAME["hsdp2x2"], BY_NAME["tp2"]]:
        for lines in run_world(target.world_size, load_flat, target, tmp_path):
            assert lines == []
    assert run_world(1, load_flat, Layout("whole", (1,), ()), tmp_path, process_group=False) == [[]]


# A row-wise layer takes the column-wise one's local output for an even shard, so this dim must divide by tp.
TRAINABLE = Sizes("uneven_but_trainable", vocab=33, hidden=9, feed_forward=16)


def step_with_real_gradients(rank: int, world_size: int, layout: Layout, path: Path) -> dict[str, Any]:
    model = build_model(layout, TRAINABLE)
    optimizer = build_optimizer(model, lr=0.01)
    torch.manual_seed(rank)
    for _ in range(2):
        tokens = torch.randint(0, TRAINABLE.vocab, (2, 4))
        if "tp" in layout.axes:
            # The ranks of one tensor-parallel group see the same batch.
            torch.distributed.broadcast(tokens, group=model.embed.weight.device_mesh["tp"].get_group(), group_src=0)
        model(tokens).logsumexp(-1).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    state = training_state(model, optimizer)
    dcp.save(state, checkpoint_id=path, planner=tte.SavePlanner())
    return shards_of(state)


@pytest.mark.parametrize("source", ["fsdp4", "fsdp2_tp2"])
def test_state_after_real_forward_and_backward(run_world, tmp_path: Path, source: str) -> None:
    layout = BY_NAME[source]
    truth = assemble_all(run_world(layout.world_size, step_with_real_gradients, layout, tmp_path))
    whole = build_whole(TRAINABLE).state_dict()
    assert not same_bits(truth["model.head.weight"], whole["head.weight"]), "the steps changed nothing"
    for target in [BY_NAME["fsdp2"], BY_NAME["fsdp2_tp2"]]:
        for lines in run_world(target.world_size, load_form, target, tmp_path, {}, truth, TRAINABLE):
            assert lines == []
