"""What version 0.2 saved still loads, to the bit, or is refused with the reason and the way out."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from data.saved_by_0_2.generate import loader_of, open_stream, sharded_state, trained_objects, whole_tensors
from reference import same_bits

import torchtitan_ext as tte
from torchtitan_ext.errors import CannotReshardError
from torchtitan_ext.storage.inspect.verify import verify

SAVED = Path(__file__).parents[1] / "data" / "saved_by_0_2"
WHOLE = whole_tensors()
VALUES = {"step": 7, "names": ["a", "b"]}


def blank(**values: Any) -> dict[str, Any]:
    return {name: torch.zeros_like(tensor) for name, tensor in WHOLE.items()} | values


def assert_loaded(state: dict[str, Any], **values: Any) -> None:
    assert all(same_bits(state[name], tensor) for name, tensor in WHOLE.items())
    assert {name: state[name] for name in values} == values


@pytest.mark.parametrize(
    ("folder", "step"), [("native", 7), ("linked/step-1", 7), ("linked/step-2", 8), ("in_a_store", 7)]
)
def test_checkpoints_load(folder: str, step: int) -> None:
    assert verify(SAVED / folder, is_deep=True).damages == []
    state = blank(step=0, names=[])
    tte.load(state, SAVED / folder, no_dist=True)
    assert_loaded(state, **VALUES | {"step": step})


def load_own_part(rank: int, world_size: int) -> list[bool]:
    state = sharded_state()
    for name in WHOLE:
        state[name].zero_()
    state["step"] = 0
    dcp.load(state, storage_reader=tte.FileReader(SAVED / "metadata_per_rank"), planner=tte.LoadPlanner())
    loaded = [tte.full_tensor(state[name]) if name != "plain" else state[name] for name in WHOLE]
    return [state["step"] == 7, *map(same_bits, loaded, WHOLE.values())]


def test_each_rank_loads_by_its_own_metadata(run_world: Any) -> None:
    assert run_world(2, load_own_part) == [[True] * 4] * 2


@pytest.mark.parametrize("folder", ["native", "linked/step-2"])
def test_their_fingerprints_prove_them(folder: str) -> None:
    state = blank(step=0, names=[])
    report = tte.load(state, SAVED / folder, prove=True, no_dist=True)
    assert report.proof is not None and set(report.proof.proved) == set(WHOLE)


@pytest.mark.parametrize("folder", ["native", "linked/step-2"])
def test_stock_loads_them(folder: str) -> None:
    state = blank(step=0, names=[])
    dcp.load(state, checkpoint_id=SAVED / folder, no_dist=True)
    assert_loaded(state)


def test_safetensors_load() -> None:
    state = blank()
    tte.weights.load(state, SAVED / "safetensors")
    assert_loaded(state)


# How many samples of a global batch of 4 each rank of a world gets.
RANK_SAMPLES = {1: 4, 2: 2, 4: 1}


def resume(rank: int, world_size: int) -> tuple[int, dict[str, Any], int, list[int]]:
    objects = trained_objects(0)
    with tte.CheckpointManager(SAVED / "run", **objects) as manager:
        step = manager.resume()
    model = {name: tte.full_tensor(tensor) for name, tensor in objects["model"].state_dict().items()}
    moments = next(iter(objects["optimizer"].state.values()))
    loader, scheduler = objects["dataloader"], objects["lr_scheduler"].schedulers[0]
    return step, model, int(moments["step"]), [scheduler.last_epoch, *next(iter(loader)).tolist()]


def test_a_run_goes_on_with_another_number_of_ranks(run_world: Any) -> None:
    whole = [run_world(size, resume) for size in RANK_SAMPLES]
    (_, model, _, _), *_ = whole[0]
    for size, ranks in zip(RANK_SAMPLES, whole, strict=True):
        for step, same, num_steps, (last_epoch, *ids) in ranks:
            assert (step, num_steps, last_epoch, len(ids)) == (2, 3, 3, RANK_SAMPLES[size])
            assert all(same_bits(same[name], tensor) for name, tensor in model.items())
    served = [sorted(sample for *_, (_, *ids) in ranks for sample in ids) for ranks in whole]
    assert served[0] == served[1] == served[2]


def position(name: str) -> Any:
    """Values that a checkpoint keeps whole are in tuples, which JSON does not know."""
    state = json.loads((SAVED / f"position_{name}.json").read_text())
    return {key: tuple(value) for key, value in state.items()}


DATA = {"samples": list(range(24)), "streams": tte.elastic.Streams(open_stream, 4)}


@pytest.mark.parametrize("kind", DATA)
def test_a_loader_goes_on(kind: str) -> None:
    undisturbed = loader_of(DATA[kind])
    expected = [batch.tolist() for batch in undisturbed][2:]
    resumed = loader_of(DATA[kind])
    resumed.load_state_dict(position(kind))
    assert [batch.tolist() for batch in resumed] == expected


@pytest.mark.parametrize("kind", DATA)
def test_samples_in_flight_are_refused_with_the_way_out(kind: str) -> None:
    """Since 0.3 a loader has no samples in flight."""
    loader = loader_of(DATA[kind])
    before = loader.state_dict()
    with pytest.raises(CannotReshardError, match="in flight.*0\\.2"):
        loader.load_state_dict(position(f"{kind}_in_flight"))
    assert loader.state_dict() == before
