"""What users of the default planners rely on: their options, `Stateful`, views, other meshes, and who writes what."""

import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from models import (
    BY_NAME,
    INTERLEAVED_QKV,
    UNEVEN,
    build_handmade,
    build_model,
    build_whole,
    differences,
    distribute_by_index,
    handmade_truth,
    left_to_right,
    poison,
    random_whole,
)
from reference import Step, same_bits
from states import without_strides
from torch import nn
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.two_tensor import TwoTensor

import torchtitan_ext as tte
from torchtitan_ext.storage.metadata.saved_metadata import WORLD_KEY


def assert_all_empty(answers: list[list[str]]) -> None:
    assert answers == [[]] * len(answers)


# Options of the default planners.


def save_with_options(rank: int, world_size: int, options: dict[str, Any], path: Path) -> None:
    state = build_model(BY_NAME["hsdp2x2"], UNEVEN).state_dict()
    tte.save(state, path, planner=tte.SavePlanner(**options))


def bytes_by_file(path: Path) -> Counter[str]:
    metadata = FileSystemReader(path).read_metadata()
    counts: Counter[str] = Counter()
    for info in metadata.storage_data.values():
        counts[info.relative_path] += info.length
    return counts


def test_replicas_are_written_once_and_balanced(run_world, tmp_path: Path) -> None:
    run_world(4, save_with_options, {}, tmp_path / "balanced")
    run_world(4, save_with_options, {"dedup_save_to_lowest_rank": True}, tmp_path / "lowest")
    balanced, lowest = bytes_by_file(tmp_path / "balanced"), bytes_by_file(tmp_path / "lowest")
    for path in [tmp_path / "balanced", tmp_path / "lowest"]:
        target = build_whole(UNEVEN, seed=1).state_dict()
        tte.load(target, path)
        assert differences(target, build_whole(UNEVEN).state_dict()) == []
        # Each chunk lies in one place.
        places = [index.fqn for index in FileSystemReader(path).read_metadata().storage_data]
        chunks = FileSystemReader(path).read_metadata().state_dict_metadata
        assert Counter(places) == {fqn: len(entry.chunks) for fqn, entry in chunks.items()}
    # Ranks 2 and 3 are replicas of 0 and 1.
    assert {f"__{rank}_0.distcp" for rank in range(2)} >= set(lowest)
    assert {f"__{rank}_0.distcp" for rank in range(4)} == set(balanced)
    assert max(balanced.values()) < max(lowest.values())


def flat_round_trip(rank: int, world_size: int, path: Path) -> list[str]:
    truth = handmade_truth()
    layout = left_to_right("", (2,), _StridedShard(0, split_factor=3))
    state: dict[str, Any] = dict(build_handmade(layout, truth))
    state["nested"] = {"kept": {"whole": [1, 2, 3]}}
    tte.save(state, path, planner=tte.SavePlanner(flatten_state_dict=False))
    tensors = {name: value for name, value in state.items() if name != "nested"}
    poison(tensors)
    target = {**tensors, "nested": None}
    tte.load(target, path, planner=tte.LoadPlanner(flatten_state_dict=False))
    assert target["nested"] == {"kept": {"whole": [1, 2, 3]}}
    return differences(tensors, truth, list(layout.steps))


def test_without_flattening(run_world, tmp_path: Path) -> None:
    assert_all_empty(run_world(2, flat_round_trip, tmp_path))
    assert "nested" in FileSystemReader(tmp_path).read_metadata().state_dict_metadata


class Counter7:
    """A `Stateful` object with tensors and other values."""

    def __init__(self, value: int) -> None:
        self.value = value
        self.history = torch.full((3,), float(value))

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "history": self.history}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.value = state_dict["value"]
        self.history = state_dict["history"]


def test_stateful_objects_stay_the_same_objects(tmp_path: Path) -> None:
    tte.save({"app": Counter7(7), "plain": 1}, tmp_path)
    counter = Counter7(0)
    state = {"app": counter, "plain": 0}
    tte.load(state, tmp_path)
    assert state["app"] is counter and counter.value == 7 and torch.equal(counter.history, torch.full((3,), 7.0))
    assert state["plain"] == 1


def test_load_is_in_place(tmp_path: Path) -> None:
    tte.save({"inner": {"weight": torch.arange(3.0), "step": 3}}, tmp_path)
    weight = torch.zeros(3)
    inner = {"weight": weight, "step": 0}
    state = {"inner": inner}
    tte.load(state, tmp_path)
    assert state["inner"] is inner and inner["weight"] is weight
    assert torch.equal(weight, torch.arange(3.0)) and inner["step"] == 3


def test_an_empty_state_dict(tmp_path: Path) -> None:
    tte.save({}, tmp_path)
    tte.load({}, tmp_path)
    assert FileSystemReader(tmp_path).read_metadata().state_dict_metadata == {}


# Tensors that are not simply a block of memory.


def views(rank: int, world_size: int, dtype: torch.dtype) -> tuple[dict[str, DTensor], dict[str, torch.Tensor]]:
    """Shards that are views: of one flat buffer with an offset, transposed, with gaps between rows, lazily changed."""
    mesh = init_device_mesh("cpu", (world_size,))
    whole = random_whole((9, 4), dtype, 0)
    layout = left_to_right("", (world_size,), Shard(0))
    local = distribute_by_index(whole, mesh, layout).to_local()
    buffer = torch.zeros(3 + 2 * local.numel(), dtype=dtype)
    offset = buffer[3 : 3 + local.numel()].view(local.shape).copy_(local)
    transposed = local.t().contiguous().t()
    gaps = torch.zeros(local.shape[0], 7, dtype=dtype)[:, 1:5].copy_(local)
    values = {"offset": offset, "transposed": transposed, "gaps": gaps}
    truth = dict.fromkeys(values, whole)
    if dtype.is_complex:
        values |= {"conjugated": local.clone().conj(), "negated": torch._neg_view(local.clone())}
        truth |= {"conjugated": whole.conj().resolve_conj(), "negated": torch._neg_view(whole).resolve_neg()}
    states = {
        name: DTensor.from_local(value, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride())
        for name, value in values.items()
    }
    return states, truth


def round_trip_views(rank: int, world_size: int, is_async: bool, path: Path) -> list[str]:
    lines = []
    for dtype in [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.complex64]:
        state, truth = views(rank, world_size, dtype)
        lines += differences({name: tte.full_tensor(value) for name, value in state.items()}, truth)
        if is_async:
            saved = tte.async_save(state, path / str(dtype))
            poison(state)
            saved.result()
        else:
            tte.save(state, path / str(dtype))
            poison(state)
        tte.load(state, path / str(dtype))
        lines += differences(state, truth)
    return lines


@pytest.mark.parametrize("is_async", [False, True])
def test_local_tensors_that_are_views(run_world, tmp_path: Path, is_async: bool) -> None:
    assert_all_empty(run_world(4, round_trip_views, is_async, tmp_path))


def test_tensor_subclasses_made_of_tensors(tmp_path: Path) -> None:
    state = {"pair": TwoTensor(torch.arange(3.0), torch.arange(3.0) + 10), "parameter": nn.Parameter(torch.ones(2))}
    tte.save(state, tmp_path)
    target = {"pair": TwoTensor(torch.zeros(3), torch.zeros(3)), "parameter": nn.Parameter(torch.zeros(2))}
    tte.load(target, tmp_path)
    assert isinstance(target["pair"], TwoTensor) and isinstance(target["parameter"], nn.Parameter)
    assert same_bits(target["pair"].a, state["pair"].a) and same_bits(target["pair"].b, state["pair"].b)
    assert same_bits(target["parameter"], state["parameter"])


# Meshes and layouts of other kinds.


def permuted_round_trip(rank: int, world_size: int, path: Path) -> list[str]:
    """Coordinates that do not follow the ranks, as a mesh laid out by topology has."""
    whole = random_whole((11, 5), torch.float32, 0)
    mesh = DeviceMesh("cpu", torch.tensor([[3, 1], [0, 2]]), mesh_dim_names=("dp", "tp"))
    layout = left_to_right("", (2, 2), Shard(0), Shard(0))
    state = {"weight": distribute_by_index(whole, mesh, layout)}
    tte.save(state, path)
    poison(state)
    tte.load(state, path)
    lines = differences(state, {"weight": whole}, list(layout.steps))
    return lines + differences({"weight": tte.full_tensor(state["weight"])}, {"weight": whole})


def test_a_mesh_of_permuted_ranks(run_world, tmp_path: Path) -> None:
    assert_all_empty(run_world(4, permuted_round_trip, tmp_path))
    target = {"weight": torch.zeros(11, 5)}
    tte.load(target, tmp_path)
    assert same_bits(target["weight"], random_whole((11, 5), torch.float32, 0))


FSDP2_HIDES_TP = torch.__version__ < (2, 13)
"""FSDP2 calls its own part of what it shards over ``_StridedShard`` a plain ``Shard``: placements of another order."""


class FusedQkv(nn.Module):
    """Attention's fused projection: q, k and v below each other, each sharded over "tp", then FSDP2."""

    def __init__(self, mesh: DeviceMesh, whole: torch.Tensor) -> None:
        super().__init__()
        tp = mesh["tp"]
        layout = left_to_right("", (tp.size(),), _StridedShard(0, split_factor=3))
        self.wqkv = nn.Parameter(distribute_by_index(whole, tp, layout))
        fully_shard(self, mesh=mesh["dp"])


QKV_ORDER = {"wqkv": tte.layout.ShardOrder((("tp", 0, 3), ("dp", 0, 1)))}
QKV_STEPS = [Step(1, 0, 3), Step(0, 0)]


def save_fused_qkv(rank: int, world_size: int, mesh_shape: tuple[int, int], rows: int, path: Path) -> list[str]:
    whole = random_whole((rows, 2), torch.float32, 0)
    model = FusedQkv(init_device_mesh("cpu", mesh_shape, mesh_dim_names=("dp", "tp")), whole)
    assert model.wqkv.placements == INTERLEAVED_QKV.placements or mesh_shape != (2, 2) or FSDP2_HIDES_TP
    tte.save(model.state_dict(), path, planner=tte.SavePlanner(layouts=QKV_ORDER))
    return differences(model.state_dict(), {"wqkv": whole}, QKV_STEPS)


def load_fused_qkv(rank: int, world_size: int, mesh_shape: tuple[int, int], rows: int, path: Path) -> list[str]:
    whole = random_whole((rows, 2), torch.float32, 0)
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("dp", "tp"))
    model = FusedQkv(mesh, torch.zeros_like(whole))
    tte.load(model.state_dict(), path, planner=tte.LoadPlanner(layouts=QKV_ORDER))
    lines = differences(model.state_dict(), {"wqkv": whole}, QKV_STEPS)
    lines += differences(tte.full.get_full_state_dict(model, layouts=QKV_ORDER), {"wqkv": whole})
    poison(model.state_dict())
    tte.full.set_full_state_dict(model, {"wqkv": whole}, layouts=QKV_ORDER)
    return lines + differences(model.state_dict(), {"wqkv": whole}, QKV_STEPS)


@pytest.mark.sampled(0.34)
@pytest.mark.parametrize("rows", [24, 36, 30])
def test_interleaved_qkv_of_fsdp_itself(run_world, tmp_path: Path, rows: int) -> None:
    for source in [(2, 2), (4, 2), (2, 4)]:
        path = tmp_path / str(source)
        assert_all_empty(run_world(source[0] * source[1], save_fused_qkv, source, rows, path))
        for target in [(2, 2), (4, 2), (2, 4)]:
            assert_all_empty(run_world(target[0] * target[1], load_fused_qkv, target, rows, path))
        whole = {"wqkv": torch.zeros(rows, 2)}
        tte.load(whole, path)
        assert differences(whole, {"wqkv": random_whole((rows, 2), torch.float32, 0)}) == []


def refuse_fused_qkv(rank: int, world_size: int, path: Path) -> str:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = FusedQkv(mesh, random_whole((24, 2), torch.float32, 0))
    with pytest.raises(tte.errors.LayoutError) as caught:
        tte.save(model.state_dict(), path)
    return str(caught.value)


@pytest.mark.skipif(FSDP2_HIDES_TP, reason="placements that state another order cannot be doubted")
def test_interleaved_qkv_without_its_order_is_refused(run_world, tmp_path: Path) -> None:
    texts = run_world(4, refuse_fused_qkv, tmp_path)
    assert len(set(texts)) == 1 and "two ways" in texts[0] and "'wqkv'" in texts[0]
    assert not (tmp_path / ".metadata").exists()


def replicate_and_shard(rank: int, world_size: int, path: Path) -> list[str]:
    """One tensor per placement on a 2 x 2 mesh, replicated ones among them, 0-d and empty included."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    cases = {
        "scalar": (torch.tensor(2.5), [Replicate(), Replicate()]),
        "empty": (torch.empty(0, 3), [Shard(0), Replicate()]),
        "zero_dim": (torch.empty(3, 0), [Shard(0), Shard(1)]),
        "half": (random_whole((5, 3), torch.float32, 1), [Replicate(), Shard(0)]),
        "other_half": (random_whole((5, 3), torch.float32, 2), [Shard(1), Replicate()]),
        "negative_dim": (random_whole((5, 3), torch.float32, 3), [Replicate(), Shard(-1)]),
    }
    state = {}
    for name, (whole, placements) in cases.items():
        placements = [Shard(p.dim + whole.ndim) if isinstance(p, Shard) and p.dim < 0 else p for p in placements]
        state[name] = distribute_by_index(whole, mesh, left_to_right(name, (2, 2), *placements))
    tte.save(state, path)
    poison(state)
    tte.load(state, path)
    return differences(state, {name: whole for name, (whole, _) in cases.items()})


def test_scalars_empty_tensors_and_mixed_placements(run_world, tmp_path: Path) -> None:
    assert_all_empty(run_world(4, replicate_and_shard, tmp_path))


def stock_and_ours_alike(rank: int, world_size: int, path: Path) -> None:
    state = build_model(BY_NAME["fsdp4"], UNEVEN).state_dict()
    dcp.save(state, checkpoint_id=path / "stock")
    dcp.save(state, checkpoint_id=path / "ours", planner=tte.SavePlanner())


def test_metadata_is_what_stock_would_write(run_world, tmp_path: Path) -> None:
    run_world(4, stock_and_ours_alike, tmp_path)
    stock, ours = (FileSystemReader(tmp_path / name).read_metadata() for name in ("stock", "ours"))
    # Which world saved it is added; readers look paths up by key.
    assert ours.planner_data.pop(WORLD_KEY)["size"] > 0
    assert ours.planner_data == stock.planner_data
    assert ours.state_dict_metadata.keys() == stock.state_dict_metadata.keys()
    for fqn, entry in stock.state_dict_metadata.items():
        assert ours.state_dict_metadata[fqn].size == entry.size
        assert ours.state_dict_metadata[fqn].properties == without_strides(entry.properties)
        boxes = {(chunk.offsets, chunk.sizes) for chunk in entry.chunks if chunk.sizes.numel() > 0}
        assert {(chunk.offsets, chunk.sizes) for chunk in ours.state_dict_metadata[fqn].chunks} == boxes


def sharded_tensor_of(rank: int, world_size: int) -> Any:
    """The kind of tensor that FSDP1 makes."""
    whole = torch.arange(21.0).view(7, 3)
    spec = ChunkShardingSpec(dim=0, placements=[f"rank:{other}/cpu" for other in range(world_size)])
    tensor = sharded_tensor.empty(spec, 7, 3)
    for shard in tensor.local_shards():
        begin = shard.metadata.shard_offsets[0]
        shard.tensor.copy_(whole[begin : begin + shard.metadata.shard_sizes[0]])
    return tensor


def round_trip_sharded_tensor(rank: int, world_size: int, path: Path) -> bool:
    state = {"weight": sharded_tensor_of(rank, world_size)}
    tte.save(state, path)
    for shard in state["weight"].local_shards():
        shard.tensor.fill_(-1)
    tte.load(state, path)
    truth = sharded_tensor_of(rank, world_size).local_shards()
    return all(
        same_bits(left.tensor, right.tensor) for left, right in zip(state["weight"].local_shards(), truth, strict=True)
    )


def test_sharded_tensors_of_old(run_world, tmp_path: Path) -> None:
    assert run_world(3, round_trip_sharded_tensor, tmp_path) == [True] * 3
    target = {"weight": torch.zeros(7, 3)}
    tte.load(target, tmp_path)
    assert same_bits(target["weight"], torch.arange(21.0).view(7, 3))


class BrokenWriter(FileSystemWriter):
    """Storage that fails on one rank."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        if dist.get_rank() == 1:
            raise OSError("no space left on device")
        return super().write_data(plan, planner)


def save_to_broken_storage(rank: int, world_size: int, path: Path) -> str:
    state = build_handmade(left_to_right("", (world_size,), Shard(0)), {"weight": torch.arange(12.0)})
    with pytest.raises(tte.errors.CheckpointFailedError) as caught:
        tte.save(state, storage_writer=BrokenWriter(path))
    return str(caught.value)


def test_a_storage_that_fails_on_one_rank_fails_on_all(run_world, tmp_path: Path) -> None:
    texts = run_world(3, save_to_broken_storage, tmp_path)
    assert len(set(texts)) == 1
    assert "rank 1" in texts[0] and "no space left on device" in texts[0]
    assert not (tmp_path / ".metadata").exists()


def one_key_on_two_meshes(rank: int, world_size: int, path: Path) -> list[str]:
    """What two pipeline stages that share a name by mistake would save."""
    meshes = [DeviceMesh("cpu", ranks) for ranks in ([0, 1], [2, 3])]
    mesh = meshes[rank // 2]
    replicated = DTensor.from_local(torch.full((2,), float(rank // 2)), mesh, [Replicate()], run_check=False)
    sharded = DTensor.from_local(torch.full((2,), float(rank)), mesh, [Shard(0)], run_check=False)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for name, value in (("replicated", replicated), ("sharded", sharded)):
            tte.save({"w": value}, path / name)
            with pytest.raises(tte.errors.StateRefusedError, match="w: is a tensor on each of several meshes"):
                tte.save({"w": value}, path / "refused", planner=tte.SavePlanner(replicas="strict"))
    # Replicas of one mesh are refused, whatever the other mesh holds.
    torn = DTensor.from_local(torch.full((2,), float(rank)), mesh, [Replicate()], run_check=False)
    with pytest.raises(tte.errors.StateRefusedError, match="ranks 0 and 1 should hold the same"):
        tte.save({"w": torn}, path / "refused")
    assert not (path / "refused").exists()
    return [str(warning.message) for warning in said if "several meshes" in str(warning.message)]


def test_one_key_on_two_meshes(run_world, tmp_path: Path) -> None:
    replicated, sharded = run_world(4, one_key_on_two_meshes, tmp_path)[0]
    for text in (replicated, sharded):
        assert "w: is a tensor on each of several meshes ([0, 1] | [2, 3]), and ranks 0 and 2 hold different" in text
        assert "give different tensors different keys" in text and "not compared" not in text
    for name, wanted in (("replicated", [0.0, 0.0]), ("sharded", [0.0, 0.0, 1.0, 1.0])):
        loaded = {"w": torch.full((len(wanted),), -1.0)}
        tte.load(loaded, tmp_path / name)
        assert loaded["w"].tolist() == wanted


def load_under_a_graph(rank: int, world_size: int, path: Path) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    weight = nn.Parameter(tte.full.distribute_tensor(torch.full((4,), 2.0), mesh, [Shard(0)]))
    tte.save({"w": weight}, path)
    loss = (weight * weight).sum()
    tte.load({"w": weight}, path)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.full_tensor().backward()


def test_a_graph_of_before_the_load_refuses_its_backward(run_world, tmp_path: Path) -> None:
    run_world(2, load_under_a_graph, tmp_path)


def save_pending(rank: int, world_size: int, path: Path) -> list[float]:
    """What an asynchronous collective still writes is waited for, also by the copy of an asynchronous save."""
    mesh = init_device_mesh("cpu", (world_size,))
    sharded = tte.full.distribute_tensor(torch.arange(6.0), mesh, [Shard(0)])
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.get("rank 0 saves")
    pending = sharded.redistribute(mesh, [Replicate()], async_op=True)
    if rank == 0:
        store.set("rank 0 saves", "")
    tte.async_save({"w": pending}, path).result()
    loaded = {"w": torch.zeros(6)}
    tte.load(loaded, path)
    return loaded["w"].tolist()


def test_an_asynchronous_save_of_what_is_not_there_yet(run_world, tmp_path: Path) -> None:
    assert run_world(2, save_pending, tmp_path) == [[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]] * 2


def fill_shared_memory(rank: int, world_size: int, path: Path) -> None:
    tte.save({"a": torch.ones(3), "w": torch.arange(8.0).view(4, 2)}, path)
    for target in (torch.zeros(5).as_strided((4, 2), (1, 1)), torch.zeros(2).expand(4, 2)):
        state = {"a": torch.zeros(3), "w": target}
        with pytest.raises(tte.errors.StateRefusedError, match="w: cannot be filled: several elements of the target"):
            tte.load(state, path)
        assert not state["a"].any()
    right = {"a": torch.zeros(3), "w": torch.zeros(4, 6)[:, ::3]}
    tte.load(right, path)
    assert right["w"].flatten().tolist() == list(range(8))


def test_targets_that_share_memory_with_themselves(run_world, tmp_path: Path) -> None:
    run_world(2, fill_shared_memory, tmp_path)


class Unwilling:
    """A component that raises on one rank, before DCP's first collective."""

    def __init__(self, raises: bool) -> None:
        self.raises = raises

    def state_dict(self) -> dict[str, int]:
        if self.raises:
            raise RuntimeError("no state today")
        return {"step": 3}

    def load_state_dict(self, state_dict: dict[str, int]) -> None: ...


def one_component_raises(rank: int, world_size: int, path: Path) -> list[str]:
    texts = []
    tte.save({"c": Unwilling(False)}, path / "good")
    attempts = (
        lambda state: tte.save(state, path / "bad"),
        lambda state: tte.load(state, path / "good"),
        lambda state: tte.async_save(state, path / "bad").result(),
    )
    for attempt in attempts:
        with pytest.raises(tte.errors.CheckpointFailedError) as caught:
            attempt({"c": Unwilling(rank == 1)})
        texts.append(str(caught.value))
    return texts


def test_a_component_that_raises_on_one_rank_reaches_all(run_world, tmp_path: Path) -> None:
    answers = run_world(2, one_component_raises, tmp_path)
    assert answers[0] == answers[1]
    assert all("no state today" in text and "rank 1" in text for text in answers[0])
