"""As ``test_remedies.py``: what messages of layouts, transfers, syncs, data and offline work tell the user to do."""

import ast
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from boxed_tensors import boxed
from calls import call
from remedies import WEIGHTS, is_saved, refused, zeros
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import torchtitan_ext as tte
from torchtitan_ext.elastic import ElasticBatchSampler, ElasticDataLoader, Streams
from torchtitan_ext.sync import sync_state_dict

# Saves and planners.


@pytest.mark.filterwarnings("ignore:memory.//")
def test_steps_at_a_url() -> None:
    run, options = "memory://remedies", {"asynchronous": False}
    refused("leave keep= out, and remove old ones", lambda: tte.CheckpointManager(run, keep=1, **options))
    tte.CheckpointManager(run, **options).save(WEIGHTS, 1)
    assert is_saved(f"{run}/step-1", WEIGHTS)  # type: ignore[arg-type]


class Unset(tte.SavePlanner):
    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        self.state_dict, self.mappings, self.is_coordinator = state_dict, {}, is_coordinator


class SetUp(tte.SavePlanner):
    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        super().set_up_planner(state_dict, storage_meta, is_coordinator)


class Lacking(tte.SavePlanner):
    def create_global_plan(self, all_plans: Any) -> Any:
        return DefaultSavePlanner.create_global_plan(self, all_plans)


class Keeping(tte.SavePlanner):
    def create_global_plan(self, all_plans: Any) -> Any:
        return super().create_global_plan(all_plans)


class Dropping(tte.SavePlanner):
    def finish_plan(self, new_plan: Any) -> Any:
        plan = super().finish_plan(new_plan)
        plan.items.pop()
        return plan


class LeavingOut(tte.SavePlanner):
    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        super().set_up_planner({"w": state_dict["w"]}, storage_meta, is_coordinator)


@pytest.mark.parametrize(
    ("text", "wrong", "right", "keys"),
    [
        ("call super().set_up_planner(", Unset, SetUp, "wb"),
        ("call super().create_global_plan()", Lacking, Keeping, "wb"),
        ("or extend DCP's default planner instead", Lacking, DefaultSavePlanner, "wb"),
        ("leave them out of the state dict in set_up_planner", Dropping, LeavingOut, "w"),
    ],
)
def test_planners_of_ones_own(tmp_path: Path, text: str, wrong: Any, right: Any, keys: str) -> None:
    refused(text, lambda: tte.save(dict(WEIGHTS), tmp_path / "a", planner=wrong()))
    tte.save(dict(WEIGHTS), tmp_path / "a", planner=right())
    assert is_saved(tmp_path / "a", {key: WEIGHTS[key] for key in keys})


def test_tensors_without_memory_or_with_attributes_that_make_no_sense(tmp_path: Path) -> None:
    meta = torch.empty(4, device="meta")
    refused("give it memory with to_empty() first", lambda: tte.fingerprint({"w": meta}))
    model = torch.nn.Linear(2, 2, device="meta")
    refused("give it memory with to_empty() first", lambda: tte.fingerprint(model.state_dict()))
    assert tte.fingerprint(model.to_empty(device="cpu").state_dict())
    wrong = boxed(torch.arange(4.0), (4,), [((0,), (0,), (4,))])
    wrong.global_shape = (4, 4)  # type: ignore[attr-defined]
    refused("these make no sense", lambda: tte.save({"w": wrong}, tmp_path))
    assert "correct these attributes" in refused("w", lambda: tte.save({"w": wrong}, tmp_path))
    wrong.global_shape = (4,)  # type: ignore[attr-defined]
    tte.save({"w": wrong}, tmp_path)
    assert is_saved(tmp_path, {"w": torch.arange(4.0)})


# Files.


def test_an_index_of_another_metadata(tmp_path: Path) -> None:
    for name in "ab":
        tte.save({**WEIGHTS, name: torch.ones(1)}, tmp_path / name)
    (tmp_path / "a" / ".tte_index").write_bytes((tmp_path / "b" / ".tte_index").read_bytes())
    reader = tte.FileReader(tmp_path / "a", verify="all")
    told = refused("reads it without this index", lambda: tte.load(zeros(WEIGHTS), storage_reader=reader))
    named = re.search(r"storage_reader=(FileReader\(path, verify='\w+'\))", told)
    assert named is not None
    with pytest.warns(UserWarning, match="it is read without this index"):
        reader = eval(named[1], {"FileReader": tte.FileReader, "path": tmp_path / "a"})
        assert is_saved(None, WEIGHTS, storage_reader=reader)  # type: ignore[arg-type]


def test_weights_that_were_cut(tmp_path: Path) -> None:
    tte.weights.save(WEIGHTS, tmp_path / "a")
    (file,) = (tmp_path / "a").glob("*.safetensors")
    whole = file.read_bytes()
    file.write_bytes(whole[:-4])
    refused("copy it again, or give another checkpoint", lambda: is_saved(tmp_path / "a", WEIGHTS))
    file.write_bytes(whole)
    assert is_saved(tmp_path / "a", WEIGHTS)


def test_what_a_conversion_cannot_write(tmp_path: Path) -> None:
    tte.save({**WEIGHTS, "large": torch.full((2,), 1e30)}, tmp_path / "a")
    half = ["convert", tmp_path / "a", tmp_path / "b", "--to", "dcp", "--dtype"]
    told = " ".join(call(*half, "float16").err.replace("│", " ").split())
    assert "leave the tensor out, or choose a dtype with larger numbers, such as bfloat16" in told
    assert call(*half, "bfloat16").code == 0
    assert is_saved(tmp_path / "b", {"large": torch.full((2,), 1e30).bfloat16(), "w": WEIGHTS["w"].bfloat16()})
    assert call(*half, "float16", "--only", "[wb]", "--overwrite").code == 0
    assert is_saved(tmp_path / "b", {key: value.half() for key, value in WEIGHTS.items()})
    tte.save({**WEIGHTS, "odd": torch.ones(2, dtype=torch.complex128)}, tmp_path / "c")
    command = ["convert", tmp_path / "c", tmp_path / "d"]
    told = " ".join(call(*command, "--to", "safetensors").err.replace("│", " ").split())
    assert "leave it out with --only, or convert to dcp" in told
    assert call(*command, "--to", "safetensors", "--only", "[wb]").code == 0 and is_saved(tmp_path / "d", WEIGHTS)
    assert call("convert", tmp_path / "c", tmp_path / "dcp", "--to", "dcp").code == 0


def test_dry_runs(tmp_path: Path) -> None:
    tte.save(WEIGHTS, tmp_path)
    rules: dict[str, Any] = {"placements": {"w": {"dp": 0}}}
    refused("got placements and no mesh", lambda: tte.dry_run(WEIGHTS, **rules))
    assert tte.dry_run(WEIGHTS, **rules, mesh={"dp": 2})
    told = " ".join(
        call("reshard", tmp_path, tmp_path / "new", "--mesh", "dp_shard=2,pp=2").err.replace("│", " ").split()
    )
    assert "leave it out: ranks of any mesh read what each asks for" in told
    assert call("reshard", tmp_path, tmp_path / "new", "--mesh", "dp_shard=2").code == 0
    assert is_saved(tmp_path / "new", WEIGHTS)
    told = refused("name it dp_shard, dp_replicate or tp", lambda: tte.dry_run(tmp_path, mesh={"odd": 2}))
    assert tte.dry_run(tmp_path, mesh={"tp": 2})
    named = re.search(r"placements=(\{.*\})", told)
    assert named is not None and tte.dry_run(tmp_path, mesh={"odd": 2}, placements=ast.literal_eval(named[1]))


# Operators.


def test_arguments_of_operators() -> None:
    nested = torch.nested.nested_tensor([torch.ones(2), torch.arange(3.0)])
    refused("pass the tensor of its values", lambda: tte.ops.flatten_tensors([nested]))
    assert tte.ops.flatten_tensors([nested.values()]).view(torch.float32).tolist() == [1.0, 1.0, 0.0, 1.0, 2.0]
    turned, flat = torch.zeros(2, dtype=torch.complex64).conj(), tte.ops.flatten_tensors([torch.ones(2) + 1j])
    refused("pass what it views", lambda: tte.ops.unflatten_tensors_([turned], flat))
    tte.ops.unflatten_tensors_([turned.conj()], flat)
    assert turned.tolist() == [1 - 1j] * 2


# Data.


def opened(shard: int, num_shards: int, epoch: int) -> Iterator[int]:
    return iter(range(shard, 12, num_shards))


def samples(loader: Any) -> list[int]:
    return [sample for batch in loader for sample in batch.tolist()]


def test_samplers_and_streams() -> None:
    data = torch.arange(12)
    refused("choose a smaller global_batch_size", lambda: ElasticBatchSampler(data, global_batch_size=20))
    assert sorted(sum(ElasticBatchSampler(data, global_batch_size=12), [])) == list(range(12))
    padded = ElasticBatchSampler(data, global_batch_size=20, last="pad")
    assert set(sum(padded, [])) == set(range(12))

    streams = Streams(opened, num_shards=4)
    apart: dict[str, Any] = {"batch_size": 3, "dp_rank": 0, "dp_size": 2}
    refused("or endless=True", lambda: samples(ElasticDataLoader(streams, **apart)))
    batches = iter(ElasticDataLoader(streams, **apart, endless=True))
    assert sorted(sample for _ in range(2) for sample in next(batches).tolist()) == [0, 2, 4, 6, 8, 10]

    empty = Streams(lambda shard, num_shards, epoch: iter([7] if shard == 0 else []), num_shards=2)
    refused("choose a smaller num_shards", lambda: next(iter(ElasticDataLoader(empty, batch_size=2, endless=True))))
    full = Streams(lambda shard, num_shards, epoch: iter([7] if shard == 0 else []), num_shards=1)
    assert next(iter(ElasticDataLoader(full, batch_size=2, endless=True))).tolist() == [7, 7]


# Ranks.


def in_a_world(rank: int, world_size: int, path: Path) -> list[str]:
    """What remedies lost of layouts, transfers, syncs and data of several ranks."""
    mesh = dist.init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp",))
    square = dist.init_device_mesh("cpu", (1, world_size), mesh_dim_names=("dp", "tp"))
    truth, lost = torch.arange(24.0).view(8, 3), []

    def cut(*placements: Any, of: Any = mesh, tensor: torch.Tensor = truth, **options: Any) -> DTensor:
        return tte.full.distribute_tensor(tensor, of, placements or [Shard(0)], **options)

    def check(name: str, tensor: torch.Tensor, wanted: torch.Tensor = truth) -> None:
        found = tte.full_tensor(tensor) if isinstance(tensor, DTensor) else tensor
        if not torch.equal(found, wanted):
            lost.append(name)

    # Layouts.
    refused("redistribute() a DTensor", lambda: tte.full.distribute_tensor(cut(), mesh, [Replicate()]))
    check("redistribute", cut().redistribute(mesh, [Replicate()]))
    strided = [_StridedShard(0, split_factor=2)]
    order = {"planner": tte.SavePlanner(layouts={"w": tte.layout.ShardOrder((("dp", 0, 2),))})}
    for text, wrong in (
        ("name one of its axes", tte.layout.ShardOrder((("pp", 0, 2),))),
        ("give one step per sharding axis", tte.layout.ShardOrder((("dp", 0, 2), ("dp", 0, 1)))),
    ):
        local = cut().to_local()
        state = {"w": DTensor.from_local(local, mesh, strided, run_check=False, shape=truth.shape, stride=(3, 1))}
        planner = tte.SavePlanner(layouts={"w": wrong})
        refused(text, partial(tte.save, state, path / "no", planner=planner))
        tte.save(state, path / "order", **order)
    buffers, manifest = tte.flatten_state_dict({"w": cut()})
    back = tte.unflatten_state_dict(buffers, manifest, meshes=[mesh])
    check("flat", back["w"])
    refused("pass the rank's own tensor, .to_local()", lambda: tte.ops.flatten_tensors([cut()]))
    if not torch.equal(tte.ops.flatten_tensors([cut().to_local()]).view(torch.float32), cut().to_local().flatten()):
        lost.append("to_local")

    # Transfers.
    source, target = {"w": cut(), "step": 3}, {"w": cut(Shard(1), tensor=torch.zeros(8, 3)), "step": 0}
    plan = tte.transfer.plan_reshard(source, target)
    source["w"] = cut(tensor=truth + 1)
    del source["step"]
    refused("plan the transfer again", plan.run)
    source = {"w": cut(), "step": 3}
    plan = tte.transfer.plan_reshard(source, target)
    source["w"]._local_tensor = source["w"].to_local().clone()
    refused("plan it again", plan.run)
    tte.transfer.plan_reshard(source, target).run()
    check("plan again", target["w"])
    told = refused("perhaps step is meant: pass rename=", lambda: tte.reshard(source, {"stepp": 0}))
    named = re.search(r"rename=(\{.*?\})", told)
    assert named is not None
    tte.reshard(source, renamed := {"stepp": 0}, rename=ast.literal_eval(named[1]))
    if renamed != {"stepp": 3}:
        lost.append("rename")
    refused(
        "give one number, or none on some ranks", lambda: tte.transfer.plan_reshard(source, target).run(version=rank)
    )
    if tte.transfer.plan_reshard(source, target).run(version=4 if rank == 0 else None).version != 4:
        lost.append("version")
    replicas, whole = {"w": truth + rank}, {"w": torch.zeros(8, 3)}
    refused('plan it with replicas="first"', lambda: tte.reshard(replicas, whole, verify=True))
    tte.transfer.plan_reshard(replicas, whole, replicas="first").run(verify=True)
    check("replicas", whole["w"])
    layer = torch.nn.Linear(1, 1)
    refused("pass what its state_dict() gives", lambda: tte.reshard({"layer": Part(1)}, {"layer": Part(2)}))
    tte.reshard({"layer": Part(1).state_dict()}, given := {"layer": Part(2).state_dict()})
    if given != {"layer": {"number": 1}}:
        lost.append("state_dict")

    # Syncs.
    summed = torch.nn.Linear(3, 8, bias=False)
    summed.weight = torch.nn.Parameter(DTensor.from_local(truth, mesh, [Partial()], run_check=False))
    refused("redistribute it first", lambda: tte.sync_module_states(summed))
    summed.weight = torch.nn.Parameter(summed.weight.data.redistribute(mesh, [Replicate()]))
    tte.sync_module_states(summed)
    check("sync", summed.weight.detach(), truth * world_size)
    refused("pass its local tensor, or use sync_state_dict", lambda: tte.sync.broadcast_tensors([cut(Replicate())]))
    different = DTensor.from_local(truth + rank, mesh, [Replicate()], run_check=False)
    tte.sync.broadcast_tensors([different.to_local()])
    check("local tensor", different.to_local())
    different = DTensor.from_local(truth + rank, mesh, [Replicate()], run_check=False)
    sync_state_dict({"w": different})
    check("sync_state_dict", different.to_local())
    sparse = torch.eye(3).to_sparse()
    refused("convert it to a dense strided tensor first", lambda: tte.sync.broadcast_tensors([sparse]))
    dense = sparse.to_dense() * (rank == 0)
    tte.sync.broadcast_tensors([dense])
    check("dense", dense, torch.eye(3))
    turned = (torch.ones(2, dtype=torch.complex64) * (1j if rank == 0 else 0)).conj()
    refused("resolve it first", lambda: tte.sync.broadcast_tensors([turned]))
    turned = turned.resolve_conj()
    tte.sync.broadcast_tensors([turned])
    check("resolve", turned, torch.full((2,), -1j))
    layer.register_buffer("seen", torch.tensor(float(rank)))
    for parameter in layer.parameters():
        torch.nn.init.zeros_(parameter)
    with pytest.raises(Exception, match="pass mesh= or ignore it") as caught:
        tte.sync_module_states(layer, params=False, buffers="all")
    assert "seen" in str(caught.value)
    tte.sync_module_states(layer, params=False, ignore=["seen"])
    check("ignore", layer.seen, torch.tensor(float(rank)))
    tte.sync_module_states(layer, mesh)
    check("mesh", layer.seen, torch.tensor(0.0))

    # Data.
    data = torch.arange(12)
    refused("such as mesh=mesh['dp']", lambda: ElasticDataLoader(data, global_batch_size=4, mesh=square))
    if sorted(samples(ElasticDataLoader(data, global_batch_size=4, mesh=square["dp"]))) != list(range(12)):
        lost.append("mesh['dp']")
    streams = Streams(opened, num_shards=4)
    apart: dict[str, Any] = {"batch_size": 3, "dp_rank": rank, "dp_size": world_size}
    found = [samples(ElasticDataLoader(streams, **apart, group=mesh["dp"].get_group()))]
    gathered: list[Any] = [None] * world_size
    dist.all_gather_object(gathered, found)
    if sorted(sample for ranks in gathered for of in ranks for sample in of) != list(range(12)):
        lost.append("group")
    return lost


class Part:
    def __init__(self, number: int) -> None:
        self.number = number

    def state_dict(self) -> dict[str, int]:
        return {"number": self.number}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.number = state_dict["number"]


def test_in_a_world(run_world, tmp_path: Path) -> None:
    assert run_world(2, in_a_world, tmp_path) == [[], []]
