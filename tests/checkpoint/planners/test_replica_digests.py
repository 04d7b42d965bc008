"""Replicas over simulated ranks: tensors of one key on several meshes, and values that differ."""

import warnings
from collections import Counter
from typing import Any

import pytest
import torch
from simulated_ranks import Saved, load, save
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

import torchtitan_ext as tte
from torchtitan_ext.checkpoint.planners import save_planner
from torchtitan_ext.errors import StateRefusedError

State = dict[str, Any]


@pytest.fixture
def world_of(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Says how many ranks there are, as a process group would."""
    return lambda size: monkeypatch.setattr(save_planner, "scope_ranks", lambda: list(range(size)))


def on_mesh(rank: int, ranks: torch.Tensor, whole: torch.Tensor, *placements: Placement) -> DTensor:
    """The rank's part of a tensor on the mesh of these ranks."""
    mesh = DeviceMesh("cpu", ranks, _init_backend=False, _rank=rank)
    local = whole
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard):
            at, parts = (mesh.get_coordinate() or [])[axis], local.chunk(mesh.size(axis), placement.dim)
            local = parts[at] if at < len(parts) else local.narrow(placement.dim, 0, 0)
    return DTensor.from_local(
        local.clone(), mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def hsdp_and_tp(values: dict[str, torch.Tensor]) -> list[State]:
    """Each value on each of two 2-d meshes of (replicate 2, dp 2), as FSDP2 leaves it where the TP plan has no rule."""
    whole = torch.arange(8).view(2, 2, 2)
    return [
        {key: on_mesh(rank, whole[..., rank % 2], value, Replicate(), Shard(0)) for key, value in values.items()}
        for rank in range(8)
    ]


def warned(save_it: Any) -> tuple[Saved, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        saved = save_it()
    return saved, [str(one.message) for one in caught]


def bytes_of_ranks(saved: Saved) -> Counter[int]:
    written: Counter[int] = Counter()
    for index, rank in saved.writers.items():
        value = saved.values[index]
        written[rank] += value.nbytes if isinstance(value, torch.Tensor) else 0
    return written


def values_of(saved: Saved, shapes: dict[str, torch.Tensor]) -> State:
    state = {key: torch.zeros_like(value) for key, value in shapes.items()}
    load(saved, [state])
    return state


SHAPES = [(5, 3), (9,), (1, 4), (0, 3)]
DTYPES = [torch.float32, torch.bfloat16, torch.bool, torch.complex128, torch.float8_e4m3fn, torch.int64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equal_ones_are_written_by_all_holders(world_of: Any, dtype: torch.dtype) -> None:
    world_of(8)
    wholes = [torch.arange(torch.Size(shape).numel()).view(shape).to(dtype) for shape in SHAPES]
    truth = {f"{at}.{n}": whole for n in range(4) for at, whole in enumerate(wholes)}
    # Above 64 KiB: read as fast as memory goes, by another hash.
    truth |= {f"large{n}": torch.randint(0, 2, (300, 301)).to(dtype) for n in range(8)}
    saved, said = warned(lambda: save(hsdp_and_tp(truth), lambda: tte.SavePlanner(replicas="strict")))
    assert said == []
    written = bytes_of_ranks(saved)
    assert sum(written.values()) == sum(value.nbytes for value in truth.values())
    largest = 150 * 301 * dtype.itemsize
    assert len(written) == 8 and max(written.values()) - min(written.values()) <= largest
    found = values_of(saved, truth)
    for key, value in truth.items():
        assert value.numel() == 0 or torch.equal(found[key].view(torch.uint8), value.view(torch.uint8))


@pytest.mark.parametrize("rows", [6, 40_000], ids=["small", "large"])
def test_different_ones_are_warned_of_and_the_first_meshs_are_saved(world_of: Any, rows: int) -> None:
    world_of(8)
    truth = {"a": torch.arange(float(rows)), "b": torch.arange(float(rows)) + 1}
    states = hsdp_and_tp(truth)
    for rank in (3, 7):  # both replicas of one shard, on the second mesh
        states[rank]["b"].to_local()[1] += 1e-3
    saved, said = warned(lambda: save(states))
    (text,) = said
    assert (
        "b: is a tensor on each of several meshes ([0, 2, 4, 6] | [1, 3, 5, 7]), and ranks 2 and 3 hold different"
        in text
    )
    assert "a:" not in text and {rank for index, rank in saved.writers.items() if index.fqn == "b"} <= {0, 2, 4, 6}
    assert all(torch.equal(value, truth[key]) for key, value in values_of(saved, truth).items())
    assert warned(lambda: save(states, lambda: tte.SavePlanner(replicas="first")))[1] == []
    with pytest.raises(StateRefusedError, match="b: is a tensor on each of several meshes"):
        save(states, lambda: tte.SavePlanner(replicas="strict"))
    states[7]["b"].to_local()[1] = 0  # replicas of one mesh are replicas, whatever other meshes hold
    with pytest.raises(StateRefusedError, match="b: ranks 3 and 7 should hold the same"):
        save(states)


def test_pipelines(world_of: Any) -> None:
    """Each stage on a mesh of its own; one key on both."""
    world_of(4)
    embedding = torch.arange(40_000.0)

    def states(of_second: torch.Tensor) -> list[State]:
        ranks = torch.arange(4).view(2, 2)
        return [
            {
                f"layers.{rank // 2}": on_mesh(rank, ranks[rank // 2], torch.ones(40_000), Shard(0)),
                "tied": on_mesh(rank, ranks[rank // 2], of_second if rank > 1 else embedding, Shard(0)),
            }
            for rank in range(4)
        ]

    saved, said = warned(lambda: save(states(embedding)))
    chunks = {key: len(entry.chunks) for key, entry in saved.metadata.state_dict_metadata.items()}
    # What both stages hold is divided among them.
    assert said == [] and chunks == {"layers.0": 2, "layers.1": 2, "tied": 4}
    saved, said = warned(lambda: save(states(embedding + 1)))
    assert "tied: is a tensor on each of several meshes ([0, 1] | [2, 3]), and ranks 0 and 2 hold different" in said[0]
    assert torch.equal(values_of(saved, {"tied": embedding})["tied"], embedding)


def test_other_layouts_on_other_meshes_are_not_compared(world_of: Any) -> None:
    world_of(4)
    whole, ranks = torch.arange(16.0).view(4, 4), torch.arange(4).view(2, 2)
    states = [{"w": on_mesh(rank, ranks[rank // 2], whole, Shard(rank // 2))} for rank in range(4)]
    saved, said = warned(lambda: save(states, lambda: tte.SavePlanner(replicas="strict")))
    assert "not compared" in said[0] and "w: is a tensor on each of several meshes ([0, 1] | [2, 3])" in said[0]
    assert torch.equal(values_of(saved, {"w": whole})["w"], whole)


def test_meshes_as_large_as_the_world_are_not_read(world_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is sharded over all ranks has no other holder."""
    monkeypatch.setattr(
        "torchtitan_ext.checkpoint.tables.key_table.digest_large", lambda tensors: 1 / 0 if tensors else {}
    )
    whole, ranks = torch.arange(80_000.0), torch.arange(2)
    states = [{"w": on_mesh(rank, ranks, whole, Shard(0))} for rank in range(2)]
    world_of(2)
    save(states)
    world_of(4)
    with pytest.raises(ZeroDivisionError):
        save(states)


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (3, 4, "3 and 4"),
        ("warm", "cold", "'warm' and 'cold'"),
        (1, True, "1 and True"),
        (0.1, 0.2, "0.1 and 0.2"),
        (0.0, -0.0, "0.0 and -0.0"),
        (None, [1], "None and a value with digest"),
        (3, 10**5000, "3 and a value with digest"),
        (2**63 - 1, 2**63, "values with digests"),
        ("\ud800", "\u00e9", "'\\ud800' and '\u00e9'"),
        ({"step": 3}, {"step": 4}, "3 and 4"),
        ([3] * 40, [3] * 41, "values with digests"),
        (torch.tensor(3.0), torch.tensor(4.0), "3.0 and 4.0"),
        (torch.tensor([3.0], dtype=torch.bfloat16), torch.tensor([4.0], dtype=torch.bfloat16), "3.0 and 4.0"),
        (torch.tensor(True), torch.tensor(False), "True and False"),
        (torch.tensor(1e300, dtype=torch.float64), torch.tensor(2e300, dtype=torch.float64), "1e+300 and 2e+300"),
        (torch.tensor(2**63 - 1), torch.tensor(1), "9223372036854775807 and 1"),
        (torch.tensor(1 + 2j), torch.tensor(1 - 2j), "(1+2j) and (1-2j)"),
        (torch.tensor(2.0).to(torch.float8_e4m3fn), torch.tensor(4.0).to(torch.float8_e4m3fn), "2.0 and 4.0"),
        (torch.tensor(float("nan")), torch.tensor(1.0), "nan (0x7fc00000) and 1.0"),
        (nn.Parameter(torch.zeros(2)), nn.Parameter(torch.ones(2)), "bits with digests"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_scalars_that_differ_are_shown_by_value(first: Any, second: Any, words: str) -> None:
    _, said = warned(lambda: save([{"x": first}, {"x": second}], lambda: tte.SavePlanner(replicas="warn")))
    assert f"ranks 0 and 1 should hold the same, got {words}" in said[0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.int64])
def test_many_scalars_are_compared_whole(dtype: torch.dtype) -> None:
    """Beyond 32 different ones of a kind digests are cut, values never: these differ in their last bytes, or first."""
    values = {f"step{n}": torch.tensor(n + 1, dtype=dtype) for n in range(50)} | {"lr": 0.5, "text": "a" * 40}
    other = values | {"step7": torch.tensor(2**40, dtype=dtype)}
    _, said = warned(lambda: save([values, dict(values), other]))
    (line,) = said[0].splitlines()[1:]
    assert "step7: ranks 0 and 2 should hold the same, got 8" in line and "1099511627776" in line


def test_a_whole_tensor_beside_one_on_a_mesh(world_of: Any) -> None:
    """Small ones are compared; of large ones only what is on a mesh is read."""
    world_of(3)
    for rows, words in ((4, ""), (40_000, "on some ranks without a digest")):
        whole = torch.arange(float(rows))
        states: list[State] = [{"w": on_mesh(rank, torch.arange(2), whole, Replicate())} for rank in range(2)]
        saved, said = warned(lambda: save([*states, {"w": whole}]))  # noqa: B023
        assert ("" if not said else said[0]).count(words) == 1 and bool(said) == bool(words)
        assert torch.equal(values_of(saved, {"w": whole})["w"], whole)
