"""Plain tensors with boxes of their own on several ranks: saved, loaded, gathered, synced, exchanged with stock."""

import copy
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from boxed_tensors import CASES, boxed, cut, parts, whole_of
from reference import same_bits
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import torchtitan_ext as tte
from torchtitan_ext.checkpoint import CpuStager
from torchtitan_ext.errors import LayoutError, SyncMismatchError
from torchtitan_ext.integrations.install import installed
from torchtitan_ext.offline.compare.diff import diff
from torchtitan_ext.offline.sources import open_source

STOCK_KNOWS = importlib.util.find_spec("torch.distributed.checkpoint.protocol") is not None  # from torch 2.14 on


def states_of(rank: int, dtype: torch.dtype = torch.float32) -> tuple[dict[str, Any], dict[str, Any]]:
    """The whole tensors of the cases of two ranks, and this rank's parts of them."""
    cases = {case: shape for case, (shape, boxes) in CASES.items() if len(boxes) == 2}
    whole = {case: whole_of(shape, dtype) for case, shape in cases.items()}
    return whole, {case: cut(whole[case], CASES[case][1][rank]) for case in cases}


def emptied(state: dict[str, Any]) -> dict[str, Any]:
    made = {key: copy.deepcopy(value) for key, value in state.items()}
    for value in made.values():
        value.zero_()
    return made


def same_boxes(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return all(
        same_bits(*pair) for key in left for pair in zip(parts(left[key]), parts(right[key]), strict=True)
    ) and all(left[key].shape == right[key].shape for key in left)


def save_in_all_ways(rank: int, world_size: int, path: Path) -> None:
    whole, state = states_of(rank)
    planner = tte.SavePlanner
    dcp.save(state, checkpoint_id=path / "planner", planner=planner())
    dcp.save(state, storage_writer=tte.FileWriter(path / "files"), planner=planner())
    staged = {"planner": planner(), "async_stager": CpuStager()}
    dcp.async_save(state, checkpoint_id=path / "dcp stager", **staged).result()
    dcp.async_save(state, storage_writer=tte.FileWriter(path / "dcp files"), planner=planner()).result()
    with installed():
        dcp.save(state, checkpoint_id=path / "installed")
        dcp.async_save(state, checkpoint_id=path / "installed, async").result()
    tte.save(state, path / "tte")
    future = tte.async_save(state, path / "async")
    for value in state.values():
        value.zero_()
    future.result()
    if STOCK_KNOWS:
        dcp.save(states_of(rank)[1], checkpoint_id=path / "stock")


def load_in_all_ways(rank: int, world_size: int, path: Path, names: list[str]) -> list[str]:
    whole, state = states_of(rank)
    mesh = init_device_mesh("cpu", (2,))
    wrong = []
    for name in names:
        targets = emptied(state)
        tte.load(targets, path / name)
        plain = {key: torch.zeros_like(value) for key, value in whole.items()}
        dcp.load(plain, checkpoint_id=path / name, planner=tte.LoadPlanner())
        sharded = {
            key: distribute_tensor(torch.zeros_like(whole[key]), mesh, [Shard(0)]) for key in ("halves", "replicas")
        }
        tte.load(sharded, path / name)
        is_right = same_boxes(targets, state)
        is_right &= all(same_bits(plain[key], value) for key, value in whole.items())
        is_right &= all(same_bits(value.full_tensor(), whole[key]) for key, value in sharded.items())
        if STOCK_KNOWS:
            targets = emptied(state)
            dcp.load(targets, checkpoint_id=path / name)
            is_right &= same_boxes(targets, state)
        wrong += [] if is_right else [name]
    return wrong


def test_saved_in_all_ways_and_read_by_all(run_world, tmp_path: Path) -> None:
    run_world(2, save_in_all_ways, tmp_path)
    names = sorted(folder.name for folder in tmp_path.iterdir())
    assert len(names) == 8 + STOCK_KNOWS
    for name in names:
        entry = dcp.FileSystemReader(tmp_path / name).read_metadata().state_dict_metadata["halves"]
        assert entry.size == (8,) and [tuple(chunk.offsets) for chunk in entry.chunks] == [(0,), (4,)]
        assert not diff(open_source(tmp_path / name), open_source(tmp_path / "tte")).differences
    for wrong in run_world(2, load_in_all_ways, tmp_path, names):
        assert wrong == []


def describe_half(module: torch.nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    boxed(state["w"], (8,), [((4 * torch.distributed.get_rank(),), (0,), (4,))])


def gather_and_sync(rank: int, world_size: int, path: Path) -> list[str]:
    wrong = []
    for dtype in (torch.bfloat16, torch.float8_e5m2, torch.bool):
        whole, state = states_of(rank, dtype)
        wrong += [f"full tensor {key}" for key in whole if not same_bits(tte.full_tensor(state[key]), whole[key])]
        if tte.fingerprint({"nested": [state]}) != tte.fingerprint({"nested": [whole]}):
            wrong.append("fingerprint")
    mesh = init_device_mesh("cpu", (2,))
    whole, state = states_of(rank)

    state["one box twice"][1] = 100.0 + rank  # the first element of a box that both ranks hold, and the next is alone
    print_ = tte.fingerprint(state)
    if print_.differing != ("one box twice",) or print_.values["halves"] != tte.fingerprint(whole).values["halves"]:
        wrong.append("fingerprint of replicas that differ")

    replica = {"w": boxed(torch.full((6,), float(rank)), (4,), [((0,), (1,), (4,))])}
    (difference,) = tte.check_replicas(replica, mesh)
    if difference.fqn != "w at (0,)":
        wrong.append(str(difference))
    tte.sync_module_states(replica, mesh, verify=True)
    if replica["w"].tolist() != [float(rank), 0.0, 0.0, 0.0, 0.0, float(rank)]:
        wrong.append(f"sync {replica['w'].tolist()}")

    refused: Any = {
        "w at (4,): is a replica on cpu on rank 1, not on rank 0": lambda: tte.sync_module_states(
            {"w": states_of(rank)[1]["halves"]}, mesh
        ),
        "is a plain tensor: it may be a replica or this rank's own": lambda: tte.check_replicas(replica),
        "w: describes its own boxes, and on rank 0 these make no sense": lambda: tte.sync_module_states(broken, mesh),
        "w: describes its own boxes, and on rank 0 .* no sense: global_offsets has 0": lambda: tte.save(broken, path),
        "tensor: describes its own boxes, and on rank 0 these": lambda: tte.full_tensor(broken["w"]),
        "w: describes its own boxes, which full state dicts do not follow": lambda: tte.full.get_full_state_dict(model),
    }
    broken = {"w": boxed(torch.zeros(4), (8,), [((4 * rank,), (0,), (4,))])}
    if rank == 0:
        broken["w"].global_offsets = ()
    model = torch.nn.Module()
    model.register_buffer("w", torch.zeros(4))
    model.register_state_dict_post_hook(describe_half)
    for message, call in refused.items():
        with pytest.raises((LayoutError, SyncMismatchError), match=message.replace("(", r"\(").replace(")", r"\)")):
            call()
    return wrong


def test_gathered_and_synced(run_world, tmp_path: Path) -> None:
    assert run_world(2, gather_and_sync, tmp_path) == [[], []]
