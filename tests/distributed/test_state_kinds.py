"""Further kinds of state: pipeline stages, experts, sub-meshes, tied weights, offload, meta targets, adapters.

Each is saved by stock's files and by ours, and loaded from both, by both.
"""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from models import (
    BY_NAME,
    UNEVEN,
    Layout,
    Sizes,
    build_mesh,
    build_model,
    build_whole,
    differences,
    distribute_by_index,
    leaves,
    left_to_right,
    offloaded,
    poison,
    random_whole,
)
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

import torchtitan_ext as tte
from torchtitan_ext.storage import FileReader, FileWriter


def save(state: dict[str, Any], path: Path, **options: Any) -> None:
    dcp.save(state, checkpoint_id=path, planner=tte.SavePlanner(), **options)
    dcp.save(state, storage_writer=FileWriter(path / "ours", sync=False), planner=tte.SavePlanner(), **options)


def load(state: dict[str, Any], path: Path, **options: Any) -> dict[str, Any]:
    """What stock reads of stock's files; the other ways have to give the same bits."""
    ours = path / "ours"
    states = []
    for reader in [FileReader(ours, "all"), FileReader(path), FileSystemReader(ours), FileSystemReader(path)]:
        poison(state)
        dcp.load(state, storage_reader=reader, planner=tte.LoadPlanner(), **options)
        states.append([bits_of(value) for _, value in leaves(state) if isinstance(value, torch.Tensor)])
    assert states[0] == states[1] == states[2] == states[3]
    return state


def bits_of(tensor: torch.Tensor) -> bytes:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def assert_all_empty(answers: list[list[str]]) -> None:
    assert answers == [[]] * len(answers)


# Pipeline: each stage's ranks have the keys of their layers only.


def layer_truth(num_layers: int) -> dict[str, torch.Tensor]:
    return {f"layers.{layer}.weight": random_whole((7 + layer, 3), torch.float32, layer) for layer in range(num_layers)}


def stage_state(mesh: DeviceMesh, truth: dict[str, torch.Tensor]) -> dict[str, DTensor]:
    """The layers of this rank's stage, sharded over the stage's own "dp" axis."""
    num_stages = mesh["pp"].size()
    stage = mesh.get_local_rank("pp")
    layout = left_to_right("stage", (mesh["dp"].size(),), Shard(0))
    return {
        name: distribute_by_index(whole, mesh["dp"], layout)
        for layer, (name, whole) in enumerate(truth.items())
        if layer * num_stages // len(truth) == stage
    }


def save_stages(rank: int, world_size: int, mesh_shape: tuple[int, int], path: Path) -> None:
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("pp", "dp"))
    save({"model": stage_state(mesh, layer_truth(4))}, path)


def load_stages(rank: int, world_size: int, mesh_shape: tuple[int, int], path: Path) -> list[str]:
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("pp", "dp"))
    state = load({"model": stage_state(mesh, layer_truth(4))}, path)["model"]
    truth = {name: whole for name, whole in layer_truth(4).items() if name in state}
    return differences(state, truth)


def test_pipeline_stages_with_different_keys(run_world, tmp_path: Path) -> None:
    for source in [(2, 2), (4, 1), (1, 4)]:
        path = tmp_path / str(source)
        run_world(4, save_stages, source, path)
        for target in [(2, 2), (4, 1), (1, 4), (2, 1)]:
            assert_all_empty(run_world(target[0] * target[1], load_stages, target, path))


# Experts: on a mesh of their own, and under FSDP2 on a part of it.


def expert_truth() -> dict[str, torch.Tensor]:
    return {
        "experts.w1": random_whole((6, 5, 3), torch.float32, 1),
        "router.weight": random_whole((6, 5), torch.float32, 2),
        "attention.wq": random_whole((9, 5), torch.float32, 3),
    }


def expert_state(ep: int, dp: int, tp: int) -> dict[str, DTensor]:
    """Experts over all ranks as (dp of experts x ep), the rest over the same ranks as (dp x tp)."""
    world_size = dist.get_world_size()
    expert_mesh = init_device_mesh("cpu", (world_size // ep, ep), mesh_dim_names=("dp_expert", "ep"))
    mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
    truth = expert_truth()
    rest = left_to_right("rest", (dp, tp), Shard(0), Shard(0))
    experts = left_to_right("experts", (world_size // ep, ep), Shard(1), Shard(0))
    return {
        "experts.w1": distribute_by_index(truth["experts.w1"], expert_mesh, experts),
        "router.weight": distribute_by_index(
            truth["router.weight"], mesh["dp"], left_to_right("router", (dp,), Replicate())
        ),
        "attention.wq": distribute_by_index(truth["attention.wq"], mesh, rest),
    }


def save_experts(rank: int, world_size: int, sizes: tuple[int, int, int], path: Path) -> None:
    save(expert_state(*sizes), path)


def load_experts(rank: int, world_size: int, sizes: tuple[int, int, int], path: Path) -> list[str]:
    return differences_by_placement(load(expert_state(*sizes), path), expert_truth())


def differences_by_placement(state: dict[str, DTensor], truth: dict[str, torch.Tensor]) -> list[str]:
    """`differences`, for hand-made tensors of which none is FSDP2's: left to right whatever the axes are called."""
    lines = []
    for name, tensor in state.items():
        steps = list(left_to_right("", (), *tensor.placements).steps)
        lines += differences({name: tensor}, {name: truth[name]}, steps)
    return lines


def test_experts_on_another_mesh_than_the_rest(run_world, tmp_path: Path) -> None:
    run_world(4, save_experts, (2, 2, 2), tmp_path)
    assert_all_empty(run_world(4, load_experts, (4, 4, 1), tmp_path))
    assert_all_empty(run_world(2, load_experts, (2, 1, 2), tmp_path))
    assert (
        differences(load({k: torch.empty_like(v) for k, v in expert_truth().items()}, tmp_path), expert_truth()) == []
    )


class Experts(nn.Module):
    """Grouped experts as in torchtitan: one parameter with a leading expert dim, sharded over "ep" before FSDP2."""

    def __init__(self, whole: torch.Tensor) -> None:
        super().__init__()
        self.w1 = nn.Parameter(whole)


def fsdp_experts(ep: int, whole: torch.Tensor) -> nn.Module:
    world_size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world_size // ep, ep), mesh_dim_names=("dp", "ep"))
    experts = Experts(whole)
    layout = left_to_right("ep", (ep,), Shard(0))
    experts.w1 = nn.Parameter(distribute_by_index(whole, mesh["ep"], layout))
    fully_shard(experts, mesh=mesh["dp"])
    return experts


def save_fsdp_experts(rank: int, world_size: int, ep: int, path: Path) -> list[str]:
    whole = expert_truth()["experts.w1"]
    state = fsdp_experts(ep, whole).state_dict()
    save(state, path)
    return differences(state, {"w1": whole})


def load_fsdp_experts(rank: int, world_size: int, ep: int, path: Path) -> list[str]:
    whole = expert_truth()["experts.w1"]
    return differences(load(fsdp_experts(ep, torch.zeros_like(whole)).state_dict(), path), {"w1": whole})


def test_experts_under_fsdp_on_the_same_dim(run_world, tmp_path: Path) -> None:
    # 6 experts over ep = 4 leave (2, 2, 2, 0); FSDP2 chunks what is left.
    assert_all_empty(run_world(4, save_fsdp_experts, 2, tmp_path))
    for world_size, ep in [(4, 4), (4, 2), (2, 2)]:
        assert_all_empty(run_world(world_size, load_fsdp_experts, ep, tmp_path))


# Sub-meshes: some ranks hold nothing of a tensor.


def submesh_state(ranks: list[int], whole: torch.Tensor) -> dict[str, Any]:
    """A tensor over some ranks; the others have it too, as an empty DTensor, as a model built on every rank has."""
    mesh = DeviceMesh("cpu", torch.tensor(ranks))
    if mesh.get_coordinate() is None:
        part = DTensor.from_local(
            whole.new_empty(0), mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
        )
    else:
        part = distribute_by_index(whole, mesh, left_to_right("part", (len(ranks),), Shard(0)))
    return {"part": part, "everywhere": torch.arange(3)}


def save_submesh(rank: int, world_size: int, ranks: list[int], path: Path, is_known_outside: bool) -> None:
    state = submesh_state(ranks, random_whole((7, 3), torch.float32, 0))
    if rank not in ranks and not is_known_outside:
        del state["part"]
    save(state, path)


def load_submesh(rank: int, world_size: int, ranks: list[int], path: Path) -> list[str]:
    whole = random_whole((7, 3), torch.float32, 0)
    state = load(submesh_state(ranks, whole), path)
    if rank not in ranks:
        assert state.pop("part").to_local().numel() == 0
        return differences(state, {"everywhere": torch.arange(3)})
    return differences(state, {"part": whole, "everywhere": torch.arange(3)})


@pytest.mark.parametrize("is_known_outside", [True, False])
def test_ranks_outside_the_mesh(run_world, tmp_path: Path, is_known_outside: bool) -> None:
    for source in [[0, 1], [1, 3], [2]]:
        path = tmp_path / str(source)
        run_world(4, save_submesh, source, path, is_known_outside)
        for target in [[0, 1, 2], [3, 1]]:
            assert_all_empty(run_world(4, load_submesh, target, path))


# Models in other forms.


def tied_model(layout: Layout, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Embedding(33, 9), nn.Linear(9, 33, bias=False))
    model[1].weight = model[0].weight
    if layout.axes:
        fully_shard(model, mesh=build_mesh(layout)["dp"])
    return model


def save_tied(rank: int, world_size: int, layout: Layout, path: Path) -> None:
    save(tied_model(layout, seed=0).state_dict(), path)


def load_tied(rank: int, world_size: int, layout: Layout, path: Path) -> list[str]:
    model = tied_model(layout, seed=1)
    load(model.state_dict(), path)
    assert model[1].weight is model[0].weight
    return differences(model.state_dict(), tied_model(Layout("whole", (1,), ()), seed=0).state_dict())


def test_tied_weights(run_world, tmp_path: Path) -> None:
    run_world(4, save_tied, BY_NAME["fsdp4"], tmp_path)
    assert_all_empty(run_world(2, load_tied, BY_NAME["fsdp2"], tmp_path))
    assert_all_empty(run_world(1, load_tied, Layout("whole", (1,), ()), tmp_path, process_group=False))


def save_offloaded(rank: int, world_size: int, layout: Layout, path: Path) -> None:
    save(build_model(layout, UNEVEN, offload_policy=offloaded()).state_dict(), path)


def load_offloaded(rank: int, world_size: int, layout: Layout, path: Path) -> list[str]:
    model = build_model(layout, UNEVEN, seed=1, offload_policy=offloaded())
    model.load_state_dict(load(model.state_dict(), path))
    return differences(model.state_dict(), build_whole(UNEVEN).state_dict())


def test_cpu_offload(run_world, tmp_path: Path) -> None:
    run_world(4, save_offloaded, BY_NAME["fsdp2_tp2"], tmp_path)
    assert_all_empty(run_world(4, load_offloaded, BY_NAME["hsdp2x2"], tmp_path))
    assert_all_empty(run_world(4, load_offloaded, BY_NAME["fsdp2_tp2"], tmp_path))


def load_meta(rank: int, world_size: int, layout: Layout, path: Path) -> list[str]:
    model = build_model(layout, UNEVEN, device="meta") if layout.axes else whole_on_meta()
    state = model.state_dict()
    assert all(tensor.is_meta for tensor in state.values())
    dcp.load({"model": state}, storage_reader=FileReader(path / "ours", "all"), planner=tte.LoadPlanner())
    lines = differences(state, build_whole(UNEVEN).state_dict())
    model.load_state_dict(state, assign=True)
    return lines + differences(model.state_dict(), build_whole(UNEVEN).state_dict())


def whole_on_meta() -> nn.Module:
    with torch.device("meta"):
        return build_whole(UNEVEN)


def save_model(rank: int, world_size: int, layout: Layout, path: Path) -> None:
    save({"model": build_model(layout, UNEVEN).state_dict()}, path)


def test_meta_targets_are_materialised(run_world, tmp_path: Path) -> None:
    run_world(4, save_model, BY_NAME["fsdp2_tp2"], tmp_path)
    for name in ["fsdp2_tp2", "fsdp2", "hsdp2x2"]:
        assert_all_empty(run_world(BY_NAME[name].world_size, load_meta, BY_NAME[name], tmp_path))
    assert_all_empty(run_world(1, load_meta, Layout("whole", (1,), ()), tmp_path, process_group=False))


def wrapped_states(sizes: Sizes) -> dict[str, dict[str, Any]]:
    """State dicts of one model inside each wrapper that changes names."""
    compiled = torch.compile(build_whole(sizes, seed=1))
    checkpointed = build_whole(sizes, seed=1)
    checkpointed.block = checkpoint_wrapper(checkpointed.block)
    return {
        "_orig_mod.": compiled.state_dict(),
        # The wrapper hides its prefix in state_dict, so this state is one that was put together by hand.
        "_checkpoint_wrapped_module.": {
            name.replace("block.", "block._checkpoint_wrapped_module."): value
            for name, value in build_whole(sizes, seed=1).state_dict().items()
        },
        "module.": {f"module.{name}": value for name, value in checkpointed.state_dict().items()},
    }


@pytest.mark.parametrize("prefix", ["_orig_mod.", "_checkpoint_wrapped_module.", "module."])
def test_keys_that_differ_only_by_a_wrappers_prefix(tmp_path: Path, prefix: str) -> None:
    save({"model": build_whole(UNEVEN).state_dict()}, tmp_path / "plain")
    wrapped = wrapped_states(UNEVEN)[prefix]
    assert any(prefix in name for name in wrapped)
    with pytest.raises(tte.errors.MissingStateError, match="differs only by prefix"):
        tte.load({"model": wrapped}, tmp_path / "plain")
    save({"model": wrapped}, tmp_path / "wrapped")
    with pytest.raises(tte.errors.MissingStateError, match="differs only by prefix"):
        tte.load({"model": build_whole(UNEVEN).state_dict()}, tmp_path / "wrapped")


# Parts of a model: adapters.


class WithAdapter(nn.Module):
    """A linear layer with a low-rank adapter."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.base = nn.Linear(9, 17, bias=False)
        self.lora_a = nn.Linear(9, 3, bias=False)
        self.lora_b = nn.Linear(3, 17, bias=False)


def adapters_of(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if "lora" in name}


def adapter_model(layout: Layout, seed: int) -> nn.Module:
    model = WithAdapter(seed)
    fully_shard(model, mesh=build_mesh(layout)["dp"])
    return model


def save_base_and_adapters(rank: int, world_size: int, layout: Layout, folder: Path) -> None:
    state = adapter_model(layout, seed=0).state_dict()
    save(state, folder / "all")
    save(adapters_of(state), folder / "adapters")


def load_adapters_only(rank: int, world_size: int, layout: Layout, folder: Path) -> list[str]:
    truth = WithAdapter(seed=0).state_dict()
    lines = []
    for name in ["all", "adapters"]:
        model = adapter_model(layout, seed=1)
        load(adapters_of(model.state_dict()), folder / name)
        mixed = WithAdapter(seed=1).state_dict() | adapters_of(truth)
        lines += [f"{name}: {line}" for line in differences(model.state_dict(), mixed)]
    return lines


def load_base_from_adapters(rank: int, world_size: int, layout: Layout, folder: Path) -> list[str]:
    model = adapter_model(layout, seed=1)
    with pytest.raises(tte.errors.MissingStateError, match=r"base\.weight"):
        tte.load(model.state_dict(), folder / "adapters")
    untouched = differences(model.state_dict(), WithAdapter(seed=1).state_dict())
    tte.load(model.state_dict(), folder / "adapters", planner=tte.LoadPlanner(allow_partial_load=True))
    mixed = WithAdapter(seed=1).state_dict() | adapters_of(WithAdapter(seed=0).state_dict())
    return untouched + differences(model.state_dict(), mixed)


def test_adapters_alone(run_world, tmp_path: Path) -> None:
    run_world(4, save_base_and_adapters, BY_NAME["fsdp4"], tmp_path)
    assert_all_empty(run_world(2, load_adapters_only, BY_NAME["fsdp2"], tmp_path))
    assert_all_empty(run_world(2, load_base_from_adapters, BY_NAME["fsdp2"], tmp_path))


# Process groups.


def save_in_subset(rank: int, world_size: int, ranks: list[int], path: Path) -> None:
    group = dist.new_group(ranks)
    mesh = DeviceMesh("cpu", torch.tensor(ranks))
    if rank in ranks:
        whole = random_whole((9, 3), torch.float32, 0)
        layout = left_to_right("subset", (len(ranks),), Shard(0))
        state = {"weight": distribute_by_index(whole, mesh, layout), "plain": torch.arange(4)}
        save(state, path, process_group=group)


def load_in_subset(rank: int, world_size: int, ranks: list[int], path: Path) -> list[str]:
    group = dist.new_group(ranks)
    mesh = DeviceMesh("cpu", torch.tensor(ranks))
    if rank not in ranks:
        return []
    whole = random_whole((9, 3), torch.float32, 0)
    layout = left_to_right("subset", (len(ranks),), Shard(0))
    state = {"weight": distribute_by_index(whole, mesh, layout), "plain": torch.zeros(4, dtype=torch.int64)}
    load(state, path, process_group=group)
    return differences(state, {"weight": whole, "plain": torch.arange(4)})


def test_process_group_of_some_ranks(run_world, tmp_path: Path) -> None:
    # Rank 0 is the coordinator of the default group; a group without it has its own.
    for source in [[0, 1], [2, 3], [1, 2, 3]]:
        path = tmp_path / str(source)
        run_world(4, save_in_subset, source, path)
        for target in [[0, 1, 2], [1, 3]]:
            assert_all_empty(run_world(4, load_in_subset, target, path))


def test_no_process_group_at_all(run_world, tmp_path: Path) -> None:
    assert not dist.is_initialized()
    state = build_whole(UNEVEN).state_dict()
    tte.save({"model": state}, tmp_path)
    target = build_whole(UNEVEN, seed=1).state_dict()
    tte.load({"model": target}, tmp_path)
    assert differences(target, state) == []


def save_alone(rank: int, world_size: int, path: Path) -> None:
    if rank == 1:
        tte.save({"model": build_whole(UNEVEN).state_dict()}, path, no_dist=True)


def test_one_rank_of_many_saves_alone(run_world, tmp_path: Path) -> None:
    run_world(2, save_alone, tmp_path)
    target = build_whole(UNEVEN, seed=1).state_dict()
    tte.load({"model": target}, tmp_path)
    assert differences(target, build_whole(UNEVEN).state_dict()) == []


def hooked_dtensor(rank: int, mesh: DeviceMesh, whole: torch.Tensor) -> DTensor:
    """As megatron-fsdp makes them: cut where placements do not say, with DCP's hooks on the local tensor."""
    cuts = [0, 5, 7]
    local = whole[cuts[rank] : cuts[rank + 1]].clone()
    tensor = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride())
    tensor.requires_grad_()
    chunk = ChunkStorageMetadata(offsets=torch.Size([cuts[rank], 0]), sizes=local.shape)

    def write_items(fqn: str, value: Any) -> list[WriteItem]:
        data = TensorWriteData(chunk, TensorProperties.create_from_tensor(local), whole.shape)
        return [WriteItem(MetadataIndex(fqn, chunk.offsets), WriteItemType.SHARD, tensor_data=data)]

    tensor._local_tensor.__create_chunk_list__ = lambda: [chunk]
    tensor._local_tensor.__create_write_items__ = write_items
    return tensor


def proofs_and_saves_of_hooked(rank: int, world_size: int, path: Path) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    whole = torch.arange(21.0).reshape(7, 3)
    state = {"w": hooked_dtensor(rank, mesh, whole)}
    assert torch.equal(tte.full_tensor(state["w"]), whole)
    assert tte.fingerprint(state).total == tte.fingerprint({"w": whole}).total
    tte.save(state, path)
    for reader in (FileReader(path), FileSystemReader(path)):
        target = {"w": hooked_dtensor(rank, mesh, torch.zeros(7, 3))}
        tte.load(target, path, storage_reader=reader)
        assert torch.equal(tte.full_tensor(target["w"]), whole)


def test_proofs_and_saves_of_dtensors_with_hooks(run_world, tmp_path: Path) -> None:
    run_world(2, proofs_and_saves_of_hooked, tmp_path)


def fsdp1_local(rank: int, world_size: int, path: Path) -> None:
    """Its shards are views that autograd knows of, of a parameter that requires a gradient."""

    def local_state(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        model = FullyShardedDataParallel(nn.Linear(5, 3), device_id=torch.device("cpu"))
        with warnings.catch_warnings(), FullyShardedDataParallel.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
            warnings.simplefilter("ignore")
            return model.state_dict()

    state = local_state(0)
    expected = tte.fingerprint(state).total
    tte.save({"model": state}, path)
    tte.async_save({"model": state}, path.with_name("beside")).result()
    for reader in (FileReader(path), FileSystemReader(path), FileReader(path.with_name("beside"))):
        target = local_state(1)
        assert tte.fingerprint(target).total != expected
        tte.load({"model": target}, path, storage_reader=reader)
        assert tte.fingerprint(target).total == expected


def test_local_state_dicts_of_fsdp1(run_world, tmp_path: Path) -> None:
    run_world(2, fsdp1_local, tmp_path)
