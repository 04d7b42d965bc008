"""Deltas of states that are odd, of states that are put together anew, and of files that somebody has made up."""

import copy
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from boxed_tensors import cut, parts
from extent import num_cases
from reference import as_bytes, same_bits
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import torchtitan_ext as tte
from torchtitan_ext.delta.part_reads import read_tensor
from torchtitan_ext.delta.saved_changes import NOTE, _digest_of
from torchtitan_ext.errors import (
    DamagedCheckpointError,
    LayoutError,
    ReshardError,
    StateRefusedError,
    TransferFailedError,
    WrongBaseError,
)
from torchtitan_ext.layout.layout import Chunk, LocalShard
from torchtitan_ext.transfer.changed import kept
from torchtitan_ext.transfer.changed.changes import HeldTensor


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
    plan = tte.transfer.plan_reshard({"w": source}, {"w": targets[0]})
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
    base, plan = tte.delta.Snapshot({"w": source}), tte.transfer.plan_reshard({"w": source}, {"w": target})
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


def test_blocks_of_chunks_side_by_side_are_in_the_order_of_the_global_tensor(monkeypatch: Any) -> None:
    monkeypatch.setattr(kept, "_BLOCK_ELEMENTS", 2)
    chunks = tuple(Chunk((0, first), (3, 2), (0, 2 * at)) for at, first in enumerate((0, 4)))
    tensor = torch.zeros(3, 4)
    hashes = kept.KeptHashes([tensor], [HeldTensor("w", LocalShard((3, 4), chunks), (3, 8), None)])
    tensor[0, 2:], tensor[1, :2] = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])
    found = hashes.find([tensor])
    assert found.positions.tolist() == [4, 5, 8, 9] and found.values.view(torch.float32).tolist() == [1, 2, 3, 4]


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


def two_steps(path: Path) -> tuple[Path, Path, torch.Tensor]:
    """Files from version 1 to 2 and on to 3, of no element twice, and the state of version 1."""
    weight, other = torch.arange(600.0), torch.zeros(4)
    base = tte.delta.Snapshot({"w": weight, "other": other}, version=1)
    first, paths = weight.clone(), (path.with_name("12.safetensors"), path)
    for place, at in zip(paths, (5, 300), strict=True):
        weight[at] = -1
        tte.delta.save(base.changes(), place)
        base.advance()
    return *paths, first


def test_a_version_that_was_skipped(path: Path) -> None:
    skipped, last, weight = two_steps(path)
    state, before = {"w": weight, "other": torch.zeros(4)}, weight.clone()
    changes = tte.delta.load(last)
    what = (
        "w: has other bits than the changes were made from, in elements that stay as they are: it is not of version 2"
    )
    for verify in ("changed", "all"):
        with pytest.raises(WrongBaseError, match=what):
            tte.delta.apply(state, changes, verify=verify)  # type: ignore[arg-type]
        with pytest.raises(WrongBaseError, match="the state is of version 1; apply first what leads from 1 to 2"):
            tte.delta.apply(state, changes, version=1, verify=verify)  # type: ignore[arg-type]
        assert same_bits(weight, before)
    tte.delta.apply(state, tte.delta.load(skipped))
    state["other"][0] = 1  # no change is made to it, but it shows another state
    with pytest.raises(WrongBaseError, match="other: has other bits than .* in elements that stay as they are"):
        tte.delta.apply(state, changes)
    tte.delta.apply(state, changes, version=2)
    assert weight[5] == weight[300] == -1
    base = tte.delta.Snapshot({"w": weight}, version=3)
    tte.delta.save(base.changes(), path)
    with pytest.raises(WrongBaseError, match="of version 3, and the state has none of their tensors; pass version="):
        tte.delta.apply({"v": weight}, tte.delta.load(path))
    assert tte.delta.apply({"v": weight}, tte.delta.load(path), version=3).version == 4


def written_over(path: Path, other: Path) -> None:
    path.write_bytes(other.read_bytes())  # in the same inode


def cut_in_half(path: Path, other: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def one_bit_flipped(path: Path, other: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))


@pytest.mark.parametrize("damage", [written_over, cut_in_half, one_bit_flipped, os.truncate])
@pytest.mark.parametrize("count", [30, 600])
def test_files_that_change_between_load_and_apply(path: Path, damage: Callable[..., Any], count: int) -> None:
    weight = torch.zeros(600, dtype=torch.bfloat16)
    other = path.with_name("other")
    for place, value in ((other, 7), (path, 1)):
        base = tte.delta.Snapshot({"w": weight})
        weight[:count:2] = value
        weight[1:count:2] = value + 1
        tte.delta.save(base.changes(), place)
        weight.zero_()
    changes = tte.delta.load(path)
    damage(path, 9 if damage is os.truncate else other)
    with pytest.raises(
        DamagedCheckpointError, match="new elements of w are not those that were|was cut after|blocks of"
    ):
        tte.delta.apply({"w": weight}, changes)
    with pytest.raises(DamagedCheckpointError):
        read_tensor(changes, "w")
    assert not weight.any()


def test_changes_of_another_dtype_or_layout_are_not_sent() -> None:
    """As many elements of as many bytes, on as many places."""
    source, target = torch.zeros(6, dtype=torch.float16), torch.zeros(6, dtype=torch.float16)
    plan = tte.transfer.plan_reshard({"w": source}, {"w": target})
    plan.run(version=0)
    whole = source.bfloat16()
    boxes = [((0,), (3,)), ((3,), (3,))]
    for state in ({"w": whole}, {"w": cut(source, boxes)}):
        base = tte.delta.Snapshot(state, keep="hashes")
        for part in parts(state["w"]) if state["w"] is not whole else [whole]:
            part[0] = 1
        with pytest.raises(WrongBaseError, match="are of other tensors than the source that was planned, or of .*: w"):
            plan.run(changes=base.changes())
    assert not target.any()


def test_a_new_file_in_the_place_of_an_opened_one(path: Path) -> None:
    weight = torch.zeros(100)
    base = tte.delta.Snapshot({"w": weight})
    weight[3] = 1
    tte.delta.save(base.changes(), path)
    changes = tte.delta.load(path)
    weight[3] = 2
    tte.delta.save(base.changes(), path)
    target = torch.zeros(100)
    tte.delta.apply({"w": target}, changes)
    assert target[3] == 1


UNKNOWN_TO_FILES = ["float4_e2m1fn_x2", "complex32", "bits8", "bits1x8", "bits16"]


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("name", UNKNOWN_TO_FILES)
def test_dtypes_that_files_do_not_have(path: Path, name: str) -> None:
    memory, target = (torch.zeros(64, dtype=torch.uint8) for _ in range(2))
    state, filled = ({"w": tensor.view(getattr(torch, name))} for tensor in (memory, target))
    base, plan = tte.delta.Snapshot(state), tte.transfer.plan_reshard(state, filled)
    plan.run(version=0)
    memory[::9] = 3
    changes = base.changes()
    with pytest.raises(LayoutError, match=f"w: is {name}, which files of changes do not have; leave it out"):
        tte.delta.save(changes, path)
    assert not any(path.parent.iterdir())
    plan.run(changes=changes)
    assert same_bits(target, memory)


def test_keys_that_are_no_text(path: Path) -> None:
    state, filled = {"w\udc80": torch.zeros(3), "v": torch.zeros(3)}, {"w\udc80": torch.zeros(3)}
    base, plan = tte.delta.Snapshot(state), tte.transfer.plan_reshard(state, filled)
    plan.run(version=0)
    state["w\udc80"][0] = 1
    changes = base.changes()
    with pytest.raises(LayoutError, match=r"w\\udc80: its name is no text, as safetensors files need it"):
        tte.delta.save(changes, path)
    assert not any(path.parent.iterdir())
    plan.run(changes=changes)
    assert filled["w\udc80"][0] == 1


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


DEEP = "deep"
HOSTILE_VALUES: list[Any] = [
    None, True, -1, 0, 1, 2**31, 2**47, 2**62, 2**63, 2**64, -(2**63), 10**30, 0.5, 1e400, "", "x", "f" * 17, "-1",
    "\ud800", [], {}, [0], [-1], [2**62], [2**62] * 4, [0, 2**62, 2**62], [[0], [2**62]], [[[0], [1]]], [None] * 9,
    [1] * 5000, [2**40] * 5000, {"w": {}}, {"\ud800": 1}, "complex32", "float4_e2m1fn_x2", "F4", "I32", DEEP,
]  # fmt: skip


def places_in(value: Any) -> list[tuple[Any, Any]]:
    """The containers in a JSON value, with a key or index of each."""
    keys = value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [place for key in keys for place in ((value, key), *places_in(value[key]))]


def mutated(draw: random.Random, value: Any) -> str:
    """JSON of a value that is changed at one to three random places."""
    value = json.loads(json.dumps(value))
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        container, key = draw.choice(places_in(value))
        kind = draw.randrange(6)
        if kind == 0:
            del container[key]
        elif kind == 1 and isinstance(container, dict):
            container[draw.choice(["w", "v", "dtype", "\udfff", "w/0/values", ""])] = container.pop(key)
        elif kind == 2:
            container[key] = copy.deepcopy(draw.choice(places_in(value))[0])
        else:
            container[key] = copy.deepcopy(draw.choice(HOSTILE_VALUES))
        if not places_in(value):
            break
    depth = draw.choice([500, 100_000])
    return json.dumps(value).replace(f'"{DEEP}"', "[" * depth + "]" * depth)


def test_random_headers_and_notes(path: Path) -> None:
    """Whatever stands there: damaged, or not the base, and nothing is written; in no case another error."""
    state = {"w": torch.arange(100.0), "b": torch.zeros(20, 30)}
    base = tte.delta.Snapshot(state)
    state["w"][7] = -1
    state["b"].fill_(1)
    tte.delta.save(base.changes(), path)
    content, target = path.read_bytes(), {"w": torch.arange(100.0), "b": torch.zeros(20, 30)}
    size = int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8 : 8 + size]), content[8 + size :]
    note = json.loads(header["__metadata__"][NOTE].partition(" ")[2])
    draw, refused, passed = random.Random(0), 0, 0
    for number in range(num_cases(600)):
        if number % 2:
            text = mutated(draw, note)
            notes = {**header["__metadata__"], NOTE: f"{_digest_of(text)} {text}"}
            new = json.dumps({**header, "__metadata__": notes})
        else:
            new = mutated(draw, header)
        path.write_bytes(len(new).to_bytes(8, "little") + new.encode() + data)
        try:
            changes = tte.delta.load(path)
            tte.delta.apply(target, changes)
        except (DamagedCheckpointError, StateRefusedError):
            refused += 1
            assert same_bits(target["w"], torch.arange(100.0)) and not target["b"].any(), new[:2000]
            continue
        passed += 1
        target["w"].copy_(torch.arange(100.0))
        target["b"].zero_()
    assert refused > passed > 0


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
