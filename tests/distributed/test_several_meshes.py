"""Replicas that placements do not show: tensors of one key on several meshes, as FSDP2 over TP leaves them."""

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from models import Sizes, TinyModel, build_optimizer, differences, leaves, take_steps, training_state
from reference import same_bits
from torch import nn
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import torchtitan_ext as tte
from torchtitan_ext.errors import ReplicaMismatchError
from torchtitan_ext.sync import sync_state_dict

# Half of the embedding is more than what is compared anyway.
LARGE = Sizes("large", vocab=4096, hidden=16, feed_forward=32)
PLAN = {"block.up": ColwiseParallel(), "block.down": RowwiseParallel()}
UNPLANNED = ["embed.weight", "block.norm.weight", "block.norm.bias", "head.weight"]


def said_by(call: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(one.message) for one in caught]


def strict_save(state: Any, path: Path) -> str:
    try:
        said = said_by(lambda: tte.save(state, path, planner=tte.SavePlanner(replicas="strict")))
    except ReplicaMismatchError as error:
        return str(error)
    return "\n".join(said)


def local_of(tensor: Any) -> torch.Tensor:
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def tensor_parallel(mesh: DeviceMesh) -> nn.Module:
    torch.manual_seed(0)
    return parallelize_module(TinyModel(LARGE), mesh["tp"], PLAN)


class SeesItems(tte.SavePlanner):
    """A planner that looks at what is written, and gets shards whole."""

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        plan = super().finish_plan(new_plan)
        assert all(
            item.tensor_data.chunk.sizes == item.tensor_data.size for item in plan.items if "embed" in item.index.fqn
        )
        return plan


def unplanned_replicas(rank: int, world_size: int, path: Path) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = fully_shard(tensor_parallel(mesh), mesh=mesh["dp"])
    assert [name for name, param in model.named_parameters() if param.device_mesh.ndim == 1] == UNPLANNED
    optimizer = build_optimizer(model, lr=0.01)
    take_steps(model, optimizer, num_steps=1)
    state = training_state(model, optimizer)
    found: dict[str, Any] = {"equal": []}
    for name in ("first", "again"):
        found["equal"] += said_by(lambda: tte.save(state, path / name))  # noqa: B023
    found["equal"] += [
        strict_save(state, path / "strict"),
        *tte.check_replicas(model),
        *tte.check_replicas(model, mesh),
    ]

    found["equal"] += said_by(lambda: found.update(foreseen=tte.dry_run(state).save))
    divided = {"fsdp": {"model": model.state_dict()}, "tp": {"model": tensor_parallel(mesh).state_dict()}}
    for name, weights in divided.items():  # an embedding that is larger than all else together
        tte.save(weights, path / name, fingerprints=True)
        zeros = {"model": {key: torch.zeros_like(value) for key, value in weights["model"].items()}}
        tte.load(zeros, path / name, prove=True)
        assert all(same_bits(local_of(zeros["model"][key]), local_of(value)) for key, value in weights["model"].items())
        for value in zeros["model"].values():
            local_of(value).zero_()
        dcp.load(zeros, checkpoint_id=path / name)
        assert all(same_bits(local_of(zeros["model"][key]), local_of(value)) for key, value in weights["model"].items())
    found["divided"] = tte.dry_run(divided["fsdp"]).save
    tte.save(divided["tp"], path / "kept", planner=SeesItems())
    weight = dict(model.named_parameters())["embed.weight"]
    local_of(weight)[5, 7] += 1e-3 if rank == 3 else 0
    found["without mesh"] = tte.check_replicas(model)
    found["with mesh"] = tte.check_replicas(model, mesh)
    found["ignored"] = tte.check_replicas(model, ignore=["embed.*"])
    found["strict"] = strict_save(state, path / "refused")
    found["said"] = said_by(lambda: tte.save(state, path / "drifted"))

    before = local_of(weight).clone()
    tte.sync_module_states(model, verify=True)
    found["left alone"] = same_bits(local_of(weight), before)
    tte.sync_module_states(model, mesh, verify=True)
    sync_state_dict(optimizer.state_dict()["state"], mesh, verify=True)
    found["synced"] = [*tte.check_replicas(model), strict_save(state, path / "synced")]
    found["refused"] = (path / "refused").exists()
    return found


def test_what_a_tp_plan_leaves_out(run_world, tmp_path: Path) -> None:
    answers = run_world(4, unplanned_replicas, tmp_path)
    for found in answers:
        assert found["equal"] == [""] and found["synced"] == [""] and found["ignored"] == ()
        for kind in ("without mesh", "with mesh"):
            (difference,) = found[kind]
            assert (difference.fqn, difference.ranks) == ("embed.weight", ((2,), (3,)))
            assert difference.coordinates == (((1,),), ((1,),)) and found[kind].uncompared == ()
        assert "model.embed.weight: is a tensor on each of several meshes ([0, 2] | [1, 3])" in found["strict"]
        assert "ranks 2 and 3 hold different bits; give different tensors different keys" in found["strict"]
        assert "tte.sync_module_states(model, mesh)" in found["strict"] and "norm" not in found["strict"]
        assert found["left alone"] and not found["refused"]
    (said,) = answers[0]["said"]
    assert "ranks 2 and 3 hold different bits" in said and "tte.sync_module_states(model, mesh)" in said

    foreseen = [one.num_bytes for one in answers[0]["foreseen"].ranks]
    sizes = [(tmp_path / "strict" / f"__{rank}_0.distcp").stat().st_size for rank in range(4)]
    assert all(0 < one <= other for one, other in zip(foreseen, sizes, strict=True)), (
        "tensors, without heads of records"
    )
    foreseen = [one.num_bytes for one in answers[0]["divided"].ranks]
    for name in ("fsdp", "tp"):
        sizes = [
            (tmp_path / name / file).stat().st_size for file in sorted(os.listdir(tmp_path / name)) if "__" in file
        ]
        assert len(sizes) == 4 and max(sizes) < 1.2 * min(sizes)
        if name == "fsdp":
            assert all(0 < one <= other for one, other in zip(foreseen, sizes, strict=True))
    sizes = [(tmp_path / "kept" / f"__{rank}_0.distcp").stat().st_size for rank in range(4)]
    assert max(sizes) > 10 * min(sizes)

    torch.manual_seed(0)
    whole = TinyModel(LARGE)
    saved: dict[str, dict[str, Any]] = {}
    for name in ("first", "again", "strict", "drifted", "synced"):
        saved[name] = training_state(whole, build_optimizer(whole, lr=0.01))
        tte.load(saved[name], tmp_path / name)
        saved[name] = {
            key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in leaves(saved[name])
        }
        sizes = [(tmp_path / name / f"__{rank}_0.distcp").stat().st_size for rank in range(4)]
        # Each element once, by ranks that all write as much; the drifted embedding alone is the first mesh's to write.
        assert sum(sizes) < 1.1 * 3 * 4 * (2 * 4096 * 16 + 32 * 16 * 2 + 100)
        if name != "drifted":
            assert max(sizes) < 1.2 * min(sizes)
    # The rank that drifted is on the second mesh, and the first one's values are those of all.
    assert all(differences(saved["first"], saved[name]) == [] for name in saved)


def other_tensors(rank: int, world_size: int, path: Path) -> dict[str, Any]:
    """What hand-made TP under FSDP2 holds, stages of a pipeline, and tensors that no two meshes hold alike."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dp, tp = mesh.get_coordinate()
    rows = torch.arange(4.0) + 10 * tp
    state = {"w": DTensor.from_local(rows[2 * dp : 2 * dp + 2], mesh["dp"], [Shard(0)], run_check=False)}
    found: dict[str, Any] = {"different": tte.check_replicas(state), "strict": strict_save(state, path / "strict")}
    found["said"] = said_by(lambda: tte.save(state, path / "different"))

    mixed = dict(state)
    if tp == 0:
        local = torch.ones(3, 1 + dp)[:, :1]
        mixed["v"] = DTensor.from_local(local, mesh["dp"], [Shard(1)], run_check=False)
    else:
        mixed["v"] = DTensor.from_local(torch.ones(3, 2), mesh["dp"], [Replicate()], run_check=False)
    found["mixed said"] = said_by(lambda: found.update(mixed=tte.check_replicas(mixed, ignore=["w"])))
    found["uncompared"] = found["mixed"].uncompared
    found["saved mixed"] = said_by(lambda: tte.save({"v": mixed["v"]}, path / "mixed"))

    stages = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    stage = rank // 2
    part = nn.Linear(2, 4, bias=False)
    with torch.no_grad():
        part.weight.copy_(torch.arange(8.0).view(4, 2) + stage)
    fully_shard(part, mesh=stages["dp"])
    found["stages"] = said_by(lambda: found.update(checked=tte.check_replicas(part)))
    tied = DTensor.from_local(torch.ones(1), stages["dp"], [Shard(0)], run_check=False)
    pipeline = {f"layers.{stage}": part.state_dict(), "tied": tied}
    found["stages"] += [strict_save(pipeline, path / "stages")]
    found["no such mesh"] = strict_save({"step": torch.tensor(3.0 + (rank == 3)), **pipeline}, path / "steps")
    (step,) = tte.check_replicas({"step": torch.tensor(3.0 + (rank == 3))}, mesh)
    found["step"] = (step.values, str(step))
    return found


def test_what_is_no_replica(run_world, tmp_path: Path) -> None:
    answers = run_world(4, other_tensors, tmp_path)
    for found in answers:
        assert [(one.fqn, one.ranks) for one in found["different"]] == [("w", ((0,), (1,))), ("w", ((2,), (3,)))]
        assert "w: is a tensor on each of several meshes ([0, 2] | [1, 3]), and ranks 0 and 1" in found["strict"]
        assert found["mixed"] == () and found["uncompared"] == ("v",)
        assert any("not compared between them" in said and ": v;" in said for said in found["mixed said"])
        assert found["checked"] == () and found["stages"] == [""]
        assert "step: ranks 0 and 3 should hold the same, got 3.0 and 4.0" in found["no such mesh"]
        assert found["step"][0] == ("3.0", "4.0") and "4.0 on rank 3 at (1, 1)" in found["step"][1]
    assert "give different tensors different keys" in answers[0]["said"][0]
    assert "v: is a tensor on each of several meshes ([0, 2] | [1, 3])" in answers[0]["saved mixed"][0]
    loaded = {"w": torch.zeros(4)}
    tte.load(loaded, tmp_path / "different")
    assert loaded["w"].tolist() == [0, 1, 2, 3]
    state = {f"layers.{stage}": {"weight": torch.zeros(4, 2)} for stage in range(2)}
    tte.load({**state, "tied": torch.zeros(2)}, tmp_path / "stages")
    assert [state[f"layers.{stage}"]["weight"][0, 0].item() for stage in range(2)] == [0, 1]
