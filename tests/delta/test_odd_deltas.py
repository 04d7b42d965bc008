"""Deltas of states that are odd, of states that are put together anew, and of files that somebody has made up."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from boxed_tensors import cut, parts
from reference import as_bytes, same_bits
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import torchtitan_ext as tte
from torchtitan_ext.delta import kept
from torchtitan_ext.delta.saved_changes import NOTE, _digest_of
from torchtitan_ext.errors import DamagedCheckpointError, LayoutError, ReshardError, TransferFailedError


def saved(base: tte.delta.Snapshot, path: Path) -> tte.delta.SavedChanges:
    tte.delta.save(base.changes(), path)
    return tte.delta.load(path)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "delta.safetensors"


@pytest.mark.parametrize("count", [1, 100])
def test_states_of_inference_mode(path: Path, count: int) -> None:
    source = torch.zeros(100)
    with torch.inference_mode():
        base = tte.delta.Snapshot({"w": source})
        targets = [torch.zeros(100), torch.zeros(100)]
    plan = tte.plan_reshard({"w": source}, {"w": targets[0]})
    plan.run(version=0)
    source[:count] = 1
    changes = base.changes()
    plan.run(changes=changes)
    tte.delta.apply({"w": targets[1]}, saved(base, path))
    assert all(same_bits(target.clone(), source) for target in targets)
    base.advance()
    assert base.changes().num_changed == 0


def test_changes_can_be_sent_after_the_snapshot_went_on() -> None:
    source, target = torch.zeros(100), torch.zeros(100)
    base, plan = tte.delta.Snapshot({"w": source}), tte.plan_reshard({"w": source}, {"w": target})
    plan.run(version=0)
    source[3] = 1
    first = base.changes()
    base.advance()
    source[3] = 2
    second = base.changes()
    plan.run(changes=first)
    assert target[3] == 1
    plan.run(changes=second)
    assert target[3] == 2
    with pytest.raises(TypeError, match=r"got changes='second', expected what Snapshot.changes\(\) gives"):
        plan.run(changes="second")  # type: ignore[arg-type]


def test_tied_tensors_take_one_change(path: Path) -> None:
    head = torch.zeros(100)
    base = tte.delta.Snapshot({"head": head})
    head[0] = 1
    of_head = saved(base, path)
    tied = torch.zeros(100)
    with pytest.raises(ReshardError, match="head: has the memory of embedding in the state, and not its values in"):
        tte.delta.apply({"embedding": tied, "head": tied}, of_head)
    assert not tied.any()
    tte.delta.apply({"other": tied, "head": torch.zeros(100)}, of_head)
    apart = {"embedding": torch.zeros(100), "head": torch.zeros(100)}
    base = tte.delta.Snapshot(apart)
    apart["head"][0] = 1
    with pytest.raises(ReshardError, match="head: has the memory of embedding"):
        tte.delta.apply({"embedding": tied, "head": tied}, saved(base, path), verify="all")
    apart["embedding"][0] = 1
    assert tte.delta.apply({"embedding": tied, "head": tied}, saved(base, path)).num_changed == 1
    assert same_bits(tied, apart["head"])


def test_targets_that_share_memory_are_refused(path: Path) -> None:
    state = {"a": torch.zeros(100), "b": torch.zeros(50)}
    base = tte.delta.Snapshot(state)
    state["a"][60] = 1
    memory = torch.zeros(100)
    with pytest.raises(LayoutError, match="a: cannot be filled: it shares memory with b of the target"):
        tte.delta.apply({"a": memory, "b": memory[50:]}, saved(base, path))
    assert not memory.any()


def test_states_that_were_put_together_anew() -> None:
    state = {"w": torch.zeros(100)}
    base = tte.delta.Snapshot(state)
    state["w"] = torch.ones(100)
    assert base.changes().num_changed == 100
    module = torch.nn.Linear(3, 3)
    base = tte.delta.Snapshot(module)
    assert base.changes(module.state_dict()).num_changed == 0, "tensors that require no grad"
    module.weight = torch.nn.Parameter(module.weight + 1)
    assert base.changes().num_changed == base.changes(module).num_changed == 9


def test_a_box_that_a_rank_holds_twice(path: Path) -> None:
    whole = torch.arange(12.0).view(6, 2)
    boxes = [((0, 0), (3, 2)), ((0, 0), (3, 2)), ((3, 0), (3, 2))]
    for shape, count in ((1, 1), (6, 2)):
        source, target = {"w": cut(whole, boxes)}, {"w": cut(whole, boxes)}
        base = tte.delta.Snapshot(source)
        for part in parts(source["w"]):
            part.view(-1)[:shape] = 7
        tte.delta.apply(target, saved(base, path), verify="all")
        assert same_bits(target["w"], source["w"]), count


def test_bools_with_odd_bits(path: Path) -> None:
    source, target = torch.zeros(300, 4, dtype=torch.bool).t(), torch.zeros(4, 300, dtype=torch.bool)
    base = tte.delta.Snapshot({"w": source})
    as_bytes(source.t()).fill_(2)
    tte.delta.apply({"w": target}, saved(base, path), verify="all")
    assert same_bits(target, source)


@pytest.mark.parametrize("keep", ["values", "hashes"])
def test_changes_that_were_not_found(keep: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    source = torch.zeros(100)
    base = tte.delta.Snapshot({"w": source}, keep=keep)
    source[0] = 1
    base.changes()
    source[:] = 2

    def fail(*_: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patched, pytest.raises(MemoryError):
        patched.setattr(kept, "_host_copy", fail)
        base.changes()
    with pytest.raises(ValueError, match=r"call changes\(\) first"):
        base.advance()
    assert base.changes().num_changed == 100
    base.advance()
    assert base.changes().num_changed == 0


def made_up(path: Path, change: Callable[[dict[str, Any], dict[str, torch.Tensor]], None]) -> None:
    with safe_open(path, "pt") as file:
        notes = file.metadata()
    tensors = load_file(path)
    note = json.loads(notes[NOTE].partition(" ")[2])
    change(note, tensors)
    text = json.dumps(note)
    save_file(tensors, path, {**notes, NOTE: f"{_digest_of(text)} {text}"})


HOSTILE: dict[str, Callable[[dict[str, Any], dict[str, torch.Tensor]], Any]] = {
    "tensors": lambda note, _: note.update(tensors=[]),
    "version": lambda note, _: note.update(base_version="0"),
    "dtype": lambda note, _: note["tensors"]["w"].update(dtype="float33"),
    "shape": lambda note, _: note["tensors"]["w"].update(shape=[3]),
    "negative shape": lambda note, _: note["tensors"]["w"].update(shape=[-100]),
    "count": lambda note, _: note["tensors"]["w"].update(count=0),
    "box": lambda note, _: note["tensors"]["b"].update(boxes=[[[50], [100]]]),
    "flat box": lambda note, _: note["tensors"]["b"].update(boxes=[[[], []]]),
    "half a box": lambda note, _: note["tensors"]["b"].update(boxes=[[[0]]]),
    "small box": lambda note, _: note["tensors"]["b"].update(boxes=[[[0], [99]]]),
    "many positions": lambda _, tensors: tensors.update(
        {
            "w/0/blocks": torch.tensor([[block, -65536] for block in range(1000)], dtype=torch.int32),
            "w/0/offsets": torch.zeros(1000, dtype=torch.uint16),
        }
    ),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_files_that_were_made_up(path: Path, kind: str) -> None:
    state = {"w": torch.zeros(100), "b": torch.zeros(100)}
    base = tte.delta.Snapshot(state)
    state["w"][7] = 1
    state["b"][:] = 1
    tte.delta.save(base.changes(), path)
    made_up(path, lambda note, tensors: None)
    tte.delta.load(path)
    made_up(path, HOSTILE[kind])
    with pytest.raises(DamagedCheckpointError):
        tte.delta.load(path)


class Broken(dict[str, Any]):
    def items(self) -> Any:
        raise RuntimeError("broken")


def one_rank_cannot_describe(rank: int, world_size: int, path: Path) -> None:
    state: dict[str, Any] = {"w": torch.zeros(100)}
    base = tte.delta.Snapshot(state)
    state["w"][0] = 1
    changes = saved(base, path)
    if rank == 1:
        state = Broken(state)
    with pytest.raises(TransferFailedError, match="apply failed on 1 rank.* rank 1: RuntimeError: broken"):
        tte.delta.apply(state, changes)
    with pytest.raises(TransferFailedError, match="snapshot failed on 1 rank.* rank 1: RuntimeError: broken"):
        tte.delta.Snapshot(state)


def test_one_rank_cannot_describe(run_world: Any, path: Path) -> None:
    run_world(2, one_rank_cannot_describe, path)
