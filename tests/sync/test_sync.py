"""`sync_module_states`: on every layout replicas get the source's bits, and nothing else changes."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import (
    BY_NAME,
    EVEN,
    LAYOUTS,
    UNEVEN,
    Layout,
    TinyModel,
    build_mesh,
    build_model,
    local_of,
    offloaded,
    refused_by_fsdp,
)
from test_broadcast import bits
from tier import TIER
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.nn.parallel import DistributedDataParallel

import torchtitan_ext as tte
from torchtitan_ext import ops
from torchtitan_ext.errors import SyncMismatchError
from torchtitan_ext.sync import sync_state_dict

Locals = dict[str, Tensor]


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def locals_of(module: nn.Module) -> Locals:
    return {name: local_of(tensor).detach().clone() for name, tensor in tensors_of(module).items()}


def scramble(module: nn.Module) -> None:
    """Different values on every rank."""
    generator = torch.Generator().manual_seed(1000 + dist.get_rank())
    for tensor in tensors_of(module).values():
        local = local_of(tensor).detach()
        local.copy_(torch.randint(0, 100, local.shape, generator=generator))


def gathered(value: Any) -> list[Any]:
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def source_rank(tensor: Tensor, whole: DeviceMesh, src: int, *, is_joined: bool) -> int:
    """The oracle: the rank at coordinate src on axes that replicate, at this rank's own on the others.

    Args:
        is_joined: Whether a DTensor is also replicated on the axes of the whole mesh that its own mesh lacks.
    """
    mesh = tensor.device_mesh if isinstance(tensor, DTensor) else whole
    if is_joined and isinstance(tensor, DTensor):
        axes = dict(zip(mesh.mesh_dim_names or (), tensor.placements, strict=True))
        replicated = [isinstance(axes.get(name, Replicate()), Replicate) for name in whole.mesh_dim_names or ()]
        own = whole.get_coordinate() or []
        return int(whole.mesh[tuple(src if one else mine for one, mine in zip(replicated, own, strict=True))])
    placements = tensor.placements if isinstance(tensor, DTensor) else [Replicate()] * mesh.ndim
    where = [
        src if isinstance(at, Replicate) else mine for at, mine in zip(placements, mesh.get_coordinate(), strict=True)
    ]
    return int(mesh.mesh[tuple(where)])


def wrong_after_sync(module: nn.Module, whole: DeviceMesh, src: int, **options: Any) -> list[str]:
    before = gathered(locals_of(module))
    addresses = [local_of(tensor).data_ptr() for tensor in tensors_of(module).values()]
    tte.sync_module_states(module, src=src, **options)
    assert addresses == [local_of(tensor).data_ptr() for tensor in tensors_of(module).values()]
    return [
        name
        for name, tensor in tensors_of(module).items()
        if not torch.equal(
            bits(local_of(tensor)),
            bits(before[source_rank(tensor, whole, src, is_joined=options.get("mesh") is not None)][name]),
        )
    ]


def sync_layout(rank: int, world_size: int, layout: Layout) -> list[str]:
    found = []
    for sizes in (EVEN, UNEVEN):
        if refused_by_fsdp(layout, sizes):
            continue
        mesh = build_mesh(layout)
        model = build_model(layout, sizes)
        for src in (0, 1):
            scramble(model)
            if "dp" in layout.axes:
                found += wrong_after_sync(model, mesh, src, verify=True)
            # What the TP plan leaves out lies on a mesh per TP rank.
            unplanned = {"block.norm.weight", "block.norm.bias"} if {"dp", "tp"} <= set(layout.axes) else set()
            scrambled = {difference.fqn for difference in tte.check_replicas(model, mesh)}
            assert "dp" not in layout.axes or scrambled == unplanned
            found += wrong_after_sync(model, mesh, src, mesh=mesh, verify=True)
            assert tte.check_replicas(model, mesh) == ()
    return found


SYNCED = [layout for layout in LAYOUTS if TIER != "commit" or layout.world_size <= 4]


@pytest.mark.sampled(0.34)
@pytest.mark.parametrize("layout", SYNCED, ids=lambda layout: layout.name)
def test_every_layout(run_world, layout: Layout) -> None:
    assert run_world(layout.world_size, sync_layout, layout) == [[]] * layout.world_size


def train(rank: int, world_size: int, layout: Layout, compiles: bool) -> Locals:
    model = build_model(layout, EVEN, seed=rank)
    tte.sync_module_states(model, verify=True)
    stepped = torch.compile(model, backend="aot_eager") if compiles else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(3):
        torch.manual_seed(100 * step + rank)
        loss = stepped(torch.randint(0, EVEN.vocab, (2, 5))).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            tte.sync_module_states(stepped)  # by the names of the compiled wrapper too
    assert tte.check_replicas(model) == ()
    sync_state_dict(optimizer.state_dict(), model.head.weight.device_mesh, verify=True)
    return locals_of(model)


@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
def test_training_stays_equal(run_world, compiles: bool) -> None:
    answers = run_world(4, train, BY_NAME["hsdp2x2"], compiles)
    for rank in (0, 1):
        left, right = answers[rank], answers[rank + 2]
        assert all(torch.equal(bits(left[name]), bits(right[name])) for name in left)


def sync_ddp(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    model = TinyModel(EVEN)
    model.head.weight = model.embed.weight  # tied
    model.block.norm.weight.requires_grad_(False)
    model.register_buffer("cache", torch.zeros(3), persistent=False)
    ddp = DistributedDataParallel(checkpoint_wrapper(model), init_sync=False)
    scramble(ddp)
    assert wrong_after_sync(ddp, mesh, 1, mesh=mesh, verify=True) == []
    # The same names without the wrapper.
    scramble(model)
    tte.sync_module_states(ddp if rank == 0 else model, mesh)
    with pytest.raises(SyncMismatchError, match=r"embed.weight .and 5 more: .*: is a plain parameter.*pass mesh="):
        tte.sync_module_states(model)
    scramble(model)
    model.cache.fill_(rank)
    tte.sync_module_states(model, mesh, buffers="persistent", ignore=["block.*", "embed.weight"])
    assert float(model.cache[0]) == rank
    differing = {entry.fqn for entry in tte.check_replicas(model, mesh)}
    assert differing == {"embed.weight", "cache", *(f"block.{name}" for name, _ in model.block.named_parameters())}
    assert tte.check_replicas(model, mesh, params=False, buffers="persistent") == ()
    tte.sync_module_states(model, mesh, buffers="none")
    assert [entry.fqn for entry in tte.check_replicas(model, mesh)] == ["cache"]
    tte.sync_module_states([model.block, model.head], mesh, params=False)


def test_pure_ddp_and_options(run_world) -> None:
    run_world(2, sync_ddp)


def sync_unsharded(rank: int, world_size: int) -> list[str]:
    layout = BY_NAME["hsdp2x2"]
    model = build_model(layout, EVEN)
    model(torch.zeros(1, 2, dtype=torch.int64))  # the root stays unsharded after forward
    for module in (model, model.block):
        module.unshard()
    assert not isinstance(model.head.weight, DTensor)
    model.reshard()
    model.block.reshard()
    scramble(model)
    for module in (model, model.block):
        module.unshard()
    tte.sync_module_states(model)
    assert isinstance(model.head.weight, DTensor)
    assert tte.check_replicas(model) == ()
    logits = gathered(model(torch.ones(1, 2, dtype=torch.int64)).detach())
    return [str(at) for at, value in enumerate(logits) if not torch.equal(value, logits[0])]


def test_unsharded_modules(run_world) -> None:
    assert run_world(4, sync_unsharded) == [[]] * 4


def sync_offloaded(rank: int, world_size: int) -> list[str]:
    layout = BY_NAME["hsdp2x2"]
    model = build_model(layout, UNEVEN, offload_policy=offloaded(), device="meta")
    with pytest.raises(SyncMismatchError, match="embed.weight .and 9 more: .*: is on the meta device; give it memory"):
        tte.sync_module_states(model)
    model.to_empty(device="cpu")
    scramble(model)
    return wrong_after_sync(model, build_mesh(layout), 0)


def test_offload_meta_and_to_empty(run_world) -> None:
    assert run_world(4, sync_offloaded) == [[]] * 4


class Expert(nn.Module):
    """Attention on the data-parallel mesh, experts on a mesh of other shape, a local one on no mesh."""

    def __init__(self, data_mesh: DeviceMesh, expert_mesh: DeviceMesh) -> None:
        super().__init__()
        self.attention = nn.Linear(8, 8)
        fully_shard(self.attention, mesh=data_mesh)
        local = torch.zeros(2, 4)
        self.experts = nn.Parameter(DTensor.from_local(local, expert_mesh, [Replicate(), Shard(0)], run_check=False))
        self.local_expert = nn.Parameter(torch.zeros(3))


def sync_experts(rank: int, world_size: int) -> list[str]:
    data_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = Expert(data_mesh, init_device_mesh("cpu", (2, 2), mesh_dim_names=("expert_replicate", "expert")))
    scramble(model)
    with pytest.raises(SyncMismatchError, match="local_expert: is a plain parameter"):
        tte.sync_module_states(model)
    mine = model.local_expert.detach().clone()
    wrong = wrong_after_sync(model, data_mesh, 1, ignore=["local_expert"])
    assert torch.equal(mine, model.local_expert)
    return [name for name in wrong if name != "local_expert"]


def test_experts_on_another_mesh(run_world) -> None:
    assert run_world(4, sync_experts) == [[]] * 4


def sync_pipeline(rank: int, world_size: int) -> None:
    """Two stages with different parameters; each is HSDP of one replica axis over its own ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "replicate"))
    stage = rank // 2
    parts = [nn.Linear(4 + stage, 3), nn.Linear(2, 2 + stage)]
    for part in parts:
        for name, param in list(part.named_parameters()):
            local = torch.full_like(param, float(rank))
            replica = DTensor.from_local(local, mesh["replicate"], [Replicate()], run_check=False)
            setattr(part, name, nn.Parameter(replica))
    tte.sync_module_states(parts, verify=True)
    assert all(bool((local_of(param) == 2 * stage).all()) for part in parts for param in part.parameters())
    with torch.no_grad():
        local_of(parts[1].bias).detach().add_(0.5 if rank == 3 else 0)
    (difference,) = tte.check_replicas(parts)
    assert difference.fqn == "1.bias" and difference.ranks == ((2,), (3,))


def test_pipeline_parts(run_world) -> None:
    run_world(4, sync_pipeline)


class Scaled(torch.Tensor):
    """An fp8 weight and its scale behind one tensor, as quantisation libraries have it."""

    @staticmethod
    def __new__(cls, data: Tensor, scale: Tensor) -> "Scaled":
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=torch.float32)

    def __init__(self, data: Tensor, scale: Tensor) -> None:
        self.data_bits, self.scale = data, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["data_bits", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], meta: None, size: Any, stride: Any) -> "Scaled":
        return Scaled(inner["data_bits"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return Scaled(args[0].data_bits, args[0].scale)
        raise NotImplementedError(str(func))


def sync_wrapped(rank: int, world_size: int) -> list[float]:
    mesh = init_device_mesh("cpu", (2,))
    local = Scaled(torch.full((4,), rank + 1.0).to(torch.float8_e4m3fn), torch.tensor(rank + 0.5))
    sync_state_dict({"w": local}, mesh, src=1, verify=True)
    assert [entry.fqn for entry in tte.check_replicas({"w": local}, mesh)] == []
    local.scale.add_(rank)
    assert [entry.fqn for entry in tte.check_replicas({"w": local}, mesh)] == ["w.scale"]
    return [float(local.data_bits.float().sum()), float(local.scale) - rank]


def test_wrapper_subclass(run_world) -> None:
    assert run_world(2, sync_wrapped) == [[8.0, 1.5]] * 2


def sync_wrapped_in_dtensor(rank: int, world_size: int) -> list[float]:
    """As FSDP2 holds fp8 weights: sharded on one axis, a replica on the other, the wrapper inside the DTensor."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    local = Scaled(torch.full((2, 4), rank + 1.0).to(torch.float8_e4m3fn), torch.tensor(rank + 0.5))
    meta = TensorMeta(torch.Size((4, 4)), (4, 1), torch.float32)
    weight = DTensor(local, DTensorSpec(mesh, (Replicate(), Shard(0)), meta), requires_grad=False)
    assert {entry.fqn for entry in tte.check_replicas({"w": weight})} == {"w.data_bits", "w.scale"}
    sync_state_dict({"w": weight}, src=1, verify=True)
    inner = weight._local_tensor
    assert isinstance(inner, Scaled) and inner.data_bits is local.data_bits
    return [float(local.data_bits.float().mean()), float(local.scale)]


def test_wrapper_subclass_in_a_dtensor(run_world) -> None:
    assert run_world(4, sync_wrapped_in_dtensor) == [[3.0, 2.5], [4.0, 3.5]] * 2


def sync_tied_on_equal_meshes(rank: int, world_size: int) -> list[float]:
    """One memory under two DTensors whose meshes are equal but not the same object: sent once."""
    memory = torch.full((4,), float(rank))
    state = {
        name: DTensor.from_local(memory, init_device_mesh("cpu", (2,)), [Replicate()], run_check=False)
        for name in ("first", "second")
    }
    sync_state_dict(state, src=1, verify=True)
    return memory.tolist()


def test_tied_tensors_on_equal_meshes(run_world) -> None:
    assert run_world(2, sync_tied_on_equal_meshes) == [[1.0] * 4] * 2


def optimizer_joins(rank: int, world_size: int) -> None:
    """A replica with fresh optimizer state: refused until it has the same entries, then equal."""
    mesh = build_mesh(BY_NAME["hsdp2x2"])
    model = build_model(BY_NAME["hsdp2x2"], EVEN)
    optimizer = torch.optim.AdamW(model.parameters())
    if rank < 2:
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()
    with pytest.raises(SyncMismatchError, match="exp_avg, .*: is a replica on cpu on rank"):
        sync_state_dict(optimizer.state_dict(), mesh)
    for param in model.parameters():
        param.grad = torch.full_like(param, rank)
    optimizer.step()
    versions = [param._version for param in model.parameters()]
    sync_state_dict({"model": model.state_dict(), "optim": optimizer.state_dict()}, mesh, verify=True)
    assert tte.check_replicas(optimizer.state_dict(), mesh) == ()
    assert all(param._version > before for param, before in zip(model.parameters(), versions, strict=True))


def test_optimizer_state(run_world) -> None:
    run_world(4, optimizer_joins)


def check_differing(rank: int, world_size: int) -> list[tte.sync.check.ReplicaDifference]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "tp"))
    big = DTensor.from_local(torch.zeros(300, 200), mesh, [Replicate(), Shard(0)], run_check=False)
    both = DTensor.from_local(torch.zeros(5, 4).t(), mesh, [Replicate(), Replicate()], run_check=False)
    state = {"big": big, "both": both, "same": both.clone()}
    assert tte.check_replicas(state) == ()
    if rank == 3:
        local_of(big)[250, 17] = -0.0
        local_of(big)[290, 1] = 1.0
        local_of(both)[2, 3] = float("nan")
    return list(tte.check_replicas(state))


def sync_under_a_graph(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    module = nn.Linear(2, 1, bias=False)
    local = torch.full((1, 2), rank + 1.0)
    module.weight = nn.Parameter(DTensor.from_local(local, mesh, [Replicate()], run_check=False))
    loss = (module.weight * module.weight).sum()
    tte.sync_module_states(module)
    assert module.weight._version == 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.to_local().backward()


def test_a_graph_of_before_refuses_its_backward(run_world) -> None:
    run_world(2, sync_under_a_graph)


class Nested(nn.Module):
    """Two weights that DDP's prefix must not make one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.module = nn.Linear(2, 1, bias=False)


def sync_names(rank: int, world_size: int) -> list[str]:
    mesh = init_device_mesh("cpu", (world_size,))
    net = DistributedDataParallel(Nested())
    with torch.no_grad():
        net.module.module.weight.fill_(rank)
    wrapped = Scaled(torch.full((4,), rank + 1.0).to(torch.float8_e4m3fn), torch.tensor(rank + 0.5))
    sync_state_dict({"expert": wrapped}, mesh, ignore=["expert"])
    assert float(wrapped.scale) == rank + 0.5
    twice = {"a.w": torch.zeros(2), "a._orig_mod.w": torch.ones(2)}
    with pytest.raises(SyncMismatchError, match="a.w: stands for two tensors"):
        sync_state_dict(twice, mesh)
    with pytest.raises(SyncMismatchError, match="ignore is <generator"):
        sync_state_dict({"w": torch.zeros(2)}, mesh, ignore=(name for name in ["w"]))  # type: ignore[arg-type]
    return [entry.fqn for entry in tte.check_replicas(net, mesh)]


def test_names_stand_for_one_tensor(run_world) -> None:
    assert run_world(2, sync_names) == [["module.weight"]] * 2


def sync_on_two_meshes(rank: int, world_size: int) -> list[str]:
    """What is one tensor to one rank and two to others; ranks that mean other groups; a mesh on one rank alone."""
    texts = []
    left, right = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [1, 2])
    memory = torch.full((3,), float(rank))
    meshes = {"x": left, "y": right}
    state = {
        name: DTensor.from_local(memory, mesh, [Replicate()], run_check=False)
        for name, mesh in meshes.items()
        if mesh.get_coordinate() is not None
    }
    again = DeviceMesh("cpu", [0, 1])
    other = {"x": DTensor.from_local(memory, again if rank == 1 else left, [Replicate()], run_check=False)}
    everyone = init_device_mesh("cpu", (world_size,))
    for own, mesh in ((state, None), (other if rank < 2 else {}, None), ({}, everyone if rank == 0 else None)):
        with pytest.raises(SyncMismatchError) as caught:
            sync_state_dict(own, mesh)
        texts.append(str(caught.value))
    assert memory.tolist() == [rank] * 3
    return texts


def test_tensors_and_ranks_on_several_meshes(run_world) -> None:
    answers = run_world(3, sync_on_two_meshes)
    assert answers[0] == answers[1] == answers[2]
    shared, groups, scopes = answers[0]
    assert "x: x and y share memory and would both be received into" in shared
    assert "x: process group is" in groups
    assert "mesh: is (3,) over 3 ranks from 0 to 2 on rank 0, left out on ranks 1, 2" in scopes


def check_odd_replicas(rank: int, world_size: int) -> list[Any]:
    mesh = init_device_mesh("cpu", (world_size,))
    # A bool of other bits is another tensor; a copy would make them alike.
    flags = torch.full((2, 2), rank + 1, dtype=torch.uint8).view(torch.bool).t()[:1]
    (found,) = tte.check_replicas({"flags": flags}, mesh)
    sharded = tte.full.distribute_tensor(torch.arange(50_000.0), mesh, [Shard(0)])
    for _ in range(5):
        pending = sharded.redistribute(mesh, [Replicate()], async_op=True)
        assert tte.check_replicas({"w": pending}) == ()
    reverse = DeviceMesh("cpu", [1, 0])
    replica = DTensor.from_local(torch.full((2,), rank), reverse, [Replicate()], run_check=False)
    (turned,) = tte.check_replicas({"w": replica}, reverse)
    # Shards of the same mesh and bits are no replicas.
    whole, part = (
        DTensor.from_local(torch.full((2,), rank), mesh, [placement], run_check=False)
        for placement in (Replicate(), Shard(0))
    )
    assert [one.fqn for one in tte.check_replicas({"a": whole, "b": part})] == ["a"]
    compiled = torch.compile(lambda tensor: (tte.sync.broadcast_tensors([tensor]), tensor + 1)[1], backend="eager")
    return [found.ranks, turned.ranks, turned.coordinates, compiled(torch.full((1,), float(rank))).item()]


def test_odd_replicas(run_world) -> None:
    assert run_world(2, check_odd_replicas) == [[((0,), (1,)), ((0,), (1,)), (((1,),), ((0,),)), 1.0]] * 2


def one_rank_cannot_check(rank: int, world_size: int) -> str:
    mesh = init_device_mesh("cpu", (world_size,))
    state = {"kept": torch.ones(3), "freed": torch.ones(4)}
    if rank == 1:
        state["freed"].untyped_storage().resize_(0)
    with pytest.raises(SyncMismatchError) as caught:
        tte.check_replicas(state, mesh)
    return str(caught.value)


def test_what_one_rank_cannot_compare_is_refused_on_all(run_world) -> None:
    texts = run_world(2, one_rank_cannot_check)
    assert texts[0] == texts[1]
    assert "freed: spans more bytes than its storage has; was it freed or resized?" in texts[0]


def test_check_names_differences(run_world) -> None:
    answers = run_world(4, check_differing)
    assert all(answer == answers[0] for answer in answers)
    big, both = answers[0]
    assert (big.fqn, big.ranks, big.coordinates) == ("big", ((1,), (3,)), (((0, 1),), ((1, 1),)))
    assert (both.fqn, both.ranks) == ("both", ((0, 1, 2), (3,)))
    assert str(big) == "big: equal bits within each of rank 1 at (0, 1) | rank 3 at (1, 1)"


def broken_while_syncing(rank: int, world_size: int) -> str:
    """`verify` is a proof: a receiver that loses the broadcast is found."""
    mesh = init_device_mesh("cpu", (2,))
    weight = torch.full((4,), float(rank))
    original = ops.broadcast_coalesced_
    ops.broadcast_coalesced_ = lambda *args, **kwargs: None
    try:
        with pytest.raises(SyncMismatchError) as caught:
            sync_state_dict({"w": weight}, mesh, verify=True)
    finally:
        ops.broadcast_coalesced_ = original
    return str(caught.value)


def test_verify_finds_what_a_sync_missed(run_world) -> None:
    texts = run_world(2, broken_while_syncing)
    assert texts[0] == texts[1]
    assert texts[0].startswith("sync_state_dict: replicas are not equal; 1 problem(s):")
    assert "w: equal bits within each of rank 0 at (0,) | rank 1 at (1,)" in texts[0]


def refused_layouts(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    partial = DTensor.from_local(torch.zeros(2), mesh, [Partial()], run_check=False)
    replica = DTensor.from_local(torch.zeros(2), mesh, [Replicate()], run_check=False)
    for state, options, text in [
        ({"p": partial}, {}, r"p: holds Partial\(sum\), values still to be reduced"),
        ({"p": replica}, {"src": 2}, "p: is replicated 2 times along mesh axis 0, src is 2"),
        ({"p": torch.eye(2).to_sparse()}, {"mesh": mesh}, "p: is sparse_coo"),
        ({"p": torch.zeros(1).expand(4)}, {"mesh": mesh}, "p: cannot be received into"),
        ({"p": torch.zeros(2)}, {}, "p: is a plain tensor"),
    ]:
        with pytest.raises(SyncMismatchError, match=text):
            sync_state_dict(state, **options)
    with pytest.raises(SyncMismatchError, match="buffers is 'some'"):
        tte.sync_module_states(nn.Linear(1, 1), mesh, buffers="some")


def test_refusals(run_world) -> None:
    run_world(2, refused_layouts)
