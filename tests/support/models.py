"""Models, meshes and hand-made DTensors that the distributed tests share, each with the truth of what lies where.

`LAYOUTS` are the meshes on which real models are built with TP and FSDP2; `HANDMADE` are DTensors put together from the
oracle's index tensors, for what no model builder makes. `shard_index` says of any of them, by the oracle alone, which
elements of the global tensor this rank must hold.
"""

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from reference import Step, dtensor_steps, fsdp_steps, index_tensor, same_bits, shard_steps
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import Placement, _StridedShard


@dataclass(frozen=True)
class Sizes:
    """Dims of a `TinyModel`."""

    name: str
    vocab: int
    hidden: int
    feed_forward: int


EVEN = Sizes("even", vocab=32, hidden=16, feed_forward=32)
# At dp = 4 and tp = 2 stock DCP refuses 33 rows, and saves 9 and 17 rows so that they can never be loaded.
UNEVEN = Sizes("uneven", vocab=33, hidden=9, feed_forward=17)


class Block(nn.Module):
    """A feed-forward block: column-wise, then row-wise."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(sizes.hidden)
        self.up = nn.Linear(sizes.hidden, sizes.feed_forward)
        self.down = nn.Linear(sizes.feed_forward, sizes.hidden, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(torch.relu(self.up(self.norm(hidden))))


class TinyModel(nn.Module):
    """Embedding, one block, head; with persistent buffers of several dtypes."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.embed = nn.Embedding(sizes.vocab, sizes.hidden)
        self.block = Block(sizes)
        self.head = nn.Linear(sizes.hidden, sizes.vocab, bias=False)
        self.register_buffer("num_batches", torch.tensor(7))
        self.register_buffer("running_mean", torch.randn(sizes.hidden, dtype=torch.float64))
        self.register_buffer("mask", torch.rand(3, 5) > 0.5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(self.embed(tokens)))


@dataclass(frozen=True)
class Layout:
    """A mesh and how a model is spread over it. Axes: "replicate" and "dp" for FSDP2, "tp" for tensor parallelism."""

    name: str
    mesh_shape: tuple[int, ...]
    axes: tuple[str, ...]
    fsdp_dim: int = 0

    @property
    def world_size(self) -> int:
        return torch.Size(self.mesh_shape).numel()


LAYOUTS = [
    Layout("fsdp2", (2,), ("dp",)),
    Layout("fsdp4", (4,), ("dp",)),
    Layout("fsdp8", (8,), ("dp",)),
    Layout("tp2", (2,), ("tp",)),
    Layout("tp4", (4,), ("tp",)),
    Layout("fsdp2_tp2", (2, 2), ("dp", "tp")),
    Layout("fsdp4_tp2", (4, 2), ("dp", "tp")),
    Layout("fsdp2_tp4", (2, 4), ("dp", "tp")),
    Layout("hsdp2x2", (2, 2), ("replicate", "dp")),
    Layout("hsdp2x2_tp2", (2, 2, 2), ("replicate", "dp", "tp")),
    Layout("fsdp2_dim1", (2,), ("dp",), fsdp_dim=1),
    Layout("fsdp4_dim1", (4,), ("dp",), fsdp_dim=1),
    Layout("fsdp2_tp2_dim1", (2, 2), ("dp", "tp"), fsdp_dim=1),
]

BY_NAME = {layout.name: layout for layout in LAYOUTS}


def refused_by_fsdp(layout: Layout, sizes: Sizes) -> bool:
    """FSDP2 shards uneven dims along dim 0 only."""
    return layout.fsdp_dim != 0 and sizes == UNEVEN


def build_mesh(layout: Layout) -> DeviceMesh:
    return init_device_mesh("cpu", layout.mesh_shape, mesh_dim_names=layout.axes)


def build_whole(sizes: Sizes, seed: int = 0) -> TinyModel:
    torch.manual_seed(seed)
    return TinyModel(sizes)


def build_model(
    layout: Layout, sizes: Sizes, seed: int = 0, offload_policy: OffloadPolicy | None = None, device: str = "cpu"
) -> TinyModel:
    """Collective: the same seeded model on every rank, spread over the whole world."""
    mesh = build_mesh(layout)
    with torch.device(device):
        model = build_whole(sizes, seed)
    if "tp" in layout.axes:
        plan = {
            "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
            "block.up": ColwiseParallel(),
            "block.down": RowwiseParallel(),
            "head": ColwiseParallel(output_layouts=Replicate()),
        }
        parallelize_module(model, mesh["tp"], plan)
    if "dp" in layout.axes:
        dp_mesh = mesh["replicate", "dp"] if "replicate" in layout.axes else mesh["dp"]
        options = {
            "mesh": dp_mesh,
            "shard_placement_fn": lambda param: Shard(layout.fsdp_dim if param.ndim > layout.fsdp_dim else 0),
            "offload_policy": offload_policy or OffloadPolicy(),
        }
        fully_shard(model.block, **options)
        fully_shard(model, **options)
    return model


def offloaded() -> OffloadPolicy:
    return CPUOffloadPolicy(pin_memory=False)


def layout_steps(tensor: DTensor) -> list[Step]:
    """How a model builder really sharded a DTensor: FSDP2 last if its axis is there, else as DTensor reads it."""
    axes = tensor.device_mesh.mesh_dim_names or ()
    if "dp" in axes:
        return fsdp_steps(tensor.placements, axes.index("dp"))
    return dtensor_steps(tensor.placements)


def shard_index(tensor: torch.Tensor, steps: list[Step] | None = None) -> torch.Tensor:
    """int64, of the local shape: the positions in the global tensor of what this rank must hold."""
    whole = index_tensor(tensor.shape)
    if not isinstance(tensor, DTensor):
        return whole
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    return shard_steps(whole, mesh.mesh.shape, tuple(coordinate), layout_steps(tensor) if steps is None else steps)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def leaves(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of nested dicts, lists and tuples with a dotted name each."""
    if isinstance(value, Mapping):
        for key, child in value.items():
            yield from leaves(child, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(value, (list, tuple)):
        for index, child in enumerate(value):
            yield from leaves(child, f"{prefix}.{index}")
    else:
        yield prefix, value


Shards = dict[str, tuple[torch.Size, torch.Tensor, torch.Tensor]]


def shards_of(state: Any) -> Shards:
    """Of every tensor in a state its global shape, the index of this rank's shard and the shard: picklable."""
    return {
        name: (tensor.shape, shard_index(tensor), local_of(tensor).detach().clone())
        for name, tensor in leaves(state)
        if isinstance(tensor, torch.Tensor)
    }


def differences(state: Any, truth: Mapping[str, Any], steps: list[Step] | None = None) -> list[str]:
    """What in a state on this rank is not to the bit what it must be: no lines where all is right.

    `truth` maps the dotted names of the state's leaves to unsharded tensors and other values; names that either side
    lacks are differences too.
    """
    found = dict(leaves(state))
    lines = [f"{name}: not in the truth" for name in found.keys() - truth.keys()]
    lines += [f"{name}: not in the state" for name in truth.keys() - found.keys()]
    for name in found.keys() & truth.keys():
        got, wanted = found[name], truth[name]
        if isinstance(got, torch.Tensor) and isinstance(wanted, torch.Tensor):
            local = local_of(got).cpu()
            index = shard_index(got, steps)
            if got.shape != wanted.shape or local.shape != index.shape:
                lines.append(f"{name}: shapes {tuple(got.shape)}, {tuple(local.shape)} for {tuple(wanted.shape)}")
            elif not same_bits(local, wanted.flatten()[index]):
                num_wrong = int((local != wanted.flatten()[index]).sum())
                lines.append(f"{name}: {num_wrong} of {local.numel()} elements differ")
        elif type(got) is not type(wanted) or got != wanted:
            lines.append(f"{name}: got {got!r}, expected {wanted!r}")
    return sorted(lines)


def poison(state: Any) -> None:
    """Fills every tensor of a state with a pattern that no test's truth has, so that a load that skips one is seen."""
    for _, tensor in leaves(state):
        if isinstance(tensor, torch.Tensor):
            local = local_of(tensor).detach()
            host = torch.empty_like(local, device="cpu")  # devices fill fewer dtypes
            local.copy_(torch.ones_like(host) if local.dtype == torch.bool else torch.full_like(host, 77))


@dataclass(frozen=True)
class HandMade:
    """DTensors made with `DTensor.from_local` out of the oracle's index tensors."""

    name: str
    mesh_shape: tuple[int, ...]
    placements: tuple[Placement, ...]
    steps: tuple[Step, ...]
    # The order cannot be told from the placements: `layouts=` must state it.
    must_be_stated: bool = False

    @property
    def world_size(self) -> int:
        return torch.Size(self.mesh_shape).numel()


def left_to_right(name: str, mesh_shape: tuple[int, ...], *placements: Placement) -> HandMade:
    return HandMade(name, mesh_shape, placements, tuple(dtensor_steps(placements)))


def nested(name: str, mesh_shape: tuple[int, ...], axes: tuple[int, ...], *placements: Placement) -> HandMade:
    """Plain chunks, the axes in the given order."""
    return HandMade(name, mesh_shape, placements, tuple(Step(axis, placements[axis].dim) for axis in axes))


def strided(dim: int, split_factor: int) -> _StridedShard:
    return _StridedShard(dim, split_factor=split_factor)


HANDMADE = [
    left_to_right("shard0_shard0", (2, 2), Shard(0), Shard(0)),
    left_to_right("shard0_shard0_wide", (4, 2), Shard(0), Shard(0)),
    left_to_right("shard1_shard0", (2, 2), Shard(1), Shard(0)),
    left_to_right("shard1_shard1", (2, 2), Shard(1), Shard(1)),
    nested("strided_nested", (4, 2), (1, 0), strided(0, 2), Shard(0)),
    left_to_right("strided_dtensor", (4, 2), strided(0, 2), Shard(0)),
    nested("strided_nested_dim1", (3, 2), (1, 0), strided(1, 2), Shard(1)),
    left_to_right("strided_1d", (2,), strided(0, 3)),
    left_to_right("strided_1d_dim1", (4,), strided(1, 2)),
    left_to_right("shard0_strided", (2, 2), Shard(0), strided(0, 2)),
    left_to_right("three_axes", (2, 2, 2), Shard(0), Shard(0), Shard(0)),
    nested("three_axes_nested", (2, 2, 2), (2, 1, 0), strided(0, 4), strided(0, 2), Shard(0)),
    nested("fsdp_over_two_axes", (2, 2, 2), (1, 2, 0), strided(0, 4), Shard(0), Shard(0)),
    left_to_right("replicate_strided", (2, 2, 2), Replicate(), strided(0, 2), Shard(0)),
    left_to_right("replicate_only", (2,), Replicate()),
]

HANDMADE_BY_NAME = {layout.name: layout for layout in HANDMADE}

# Fused QKV interleaved over TP (one third of q, k and v each), then FSDP2's plain chunk: the placements of FSDP2 read
# otherwise, at the same sizes.
INTERLEAVED_QKV = HandMade(
    "interleaved_qkv", (2, 2), (strided(0, 2), strided(0, 3)), (Step(1, 0, 3), Step(0, 0)), must_be_stated=True
)

# Stock mis-describes 9, 17, 25 and 33 rows at dp = 4 and tp = 2; fewer rows than ranks leave empty shards.
HANDMADE_SHAPES = [(24, 8), (9, 5), (17, 3), (25, 2), (33, 7), (3, 1), (1, 9), (0, 4), (8, 6, 2)]

DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.bool,
    torch.uint8,
    torch.int64,
    torch.complex64,
]


def random_whole(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """The unsharded truth: the same for the same seed, of any dtype, all elements different where the dtype allows."""
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point or dtype.is_complex:
        wide = torch.complex64 if dtype.is_complex else torch.float32
        return torch.randn(shape, generator=generator, dtype=wide).to(dtype)
    return torch.randint(0, 2 if dtype == torch.bool else 256, shape, generator=generator).to(dtype)


def handmade_truth(dtypes: list[torch.dtype] | None = None) -> dict[str, torch.Tensor]:
    """Every shape in float32, and one uneven shape in every dtype."""
    truth = {}
    for seed, shape in enumerate(HANDMADE_SHAPES):
        truth["x".join(map(str, shape))] = random_whole(shape, torch.float32, seed)
    for seed, dtype in enumerate(DTYPES if dtypes is None else dtypes):
        truth[str(dtype).removeprefix("torch.")] = random_whole((17, 3), dtype, 100 + seed)
    return truth


def distribute_by_index(whole: torch.Tensor, mesh: DeviceMesh, layout: HandMade) -> DTensor:
    """The DTensor of a hand-made layout: every rank picks its elements by the oracle's index. No communication."""
    coordinate = mesh.get_coordinate()
    index = shard_steps(index_tensor(whole.shape), layout.mesh_shape, tuple(coordinate), layout.steps)
    local = whole.flatten()[index].contiguous().to(mesh.device_type)
    return DTensor.from_local(
        local, mesh, layout.placements, run_check=False, shape=whole.shape, stride=whole.contiguous().stride()
    )


def build_handmade(layout: HandMade, truth: Mapping[str, torch.Tensor]) -> dict[str, DTensor]:
    """Collective: the truth as DTensors of this layout, over the whole world."""
    mesh = init_device_mesh(
        "cpu", layout.mesh_shape, mesh_dim_names=tuple(f"axis{i}" for i in range(len(layout.mesh_shape)))
    )
    return {name: distribute_by_index(whole, mesh, layout) for name, whole in truth.items()}


def whole_grad(name: str, shape: torch.Size, step: int) -> torch.Tensor:
    """The unsharded gradient of a parameter at a step: made up, so that it is the same on every mesh to the bit."""
    return random_whole(tuple(shape), torch.float32, zlib.crc32(name.encode()) + step)


def build_optimizer(model: nn.Module, lr: float, **options: Any) -> torch.optim.AdamW:
    """`foreach` is off unless asked for: it cannot mix parameters of a 2D mesh with those of its "dp" axis."""
    return torch.optim.AdamW(model.parameters(), lr=lr, **{"foreach": False, **options})


def take_steps(
    model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int = 2, *, on_dtensors: bool = False
) -> None:
    """Real optimizer steps on made-up gradients, sharded by the oracle: on the local tensors, or on DTensors."""
    for step in range(num_steps):
        grad_of = {
            param: whole_grad(name, param.shape, step).flatten()[shard_index(param)]
            for name, param in model.named_parameters()
        }
        if not on_dtensors:
            step_on_locals(optimizer, grad_of)
            continue
        for param, grad in grad_of.items():
            param.grad = like(param, grad)
        optimizer.step()
        optimizer.zero_grad()


def step_on_locals(
    optimizer: torch.optim.Optimizer, grad_of: Mapping[torch.Tensor, torch.Tensor], **options: Any
) -> None:
    """A step on the local tensors, which an elementwise optimizer changes as it does DTensors.

    These would work out the sharding of its twenty operators anew in each world. Options take the place of those of the
    parameter groups.
    """
    local = {param: local_of(param.detach()) for group in optimizer.param_groups for param in group["params"]}
    on_locals = type(optimizer)(
        [
            {**group, **options, "params": [local[param] for param in group["params"]]}
            for group in optimizer.param_groups
        ]
    )
    for param, state in optimizer.state.items():
        on_locals.state[local[param]] = {key: local_of(value) for key, value in state.items()}
    for param, grad in grad_of.items():
        local[param].grad = grad
    on_locals.step()
    for param, own in local.items():
        state = on_locals.state[own]
        optimizer.state[param] = {key: value if key == "step" else like(param, value) for key, value in state.items()}


def like(param: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """The tensor of a parameter's layout that has these elements here."""
    if not isinstance(param, DTensor):
        return local
    mesh, placements = param.device_mesh, param.placements
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=param.shape, stride=param.stride())


def training_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state of a training job, as torchtitan and PyTorch's recipes save it.

    A fresh optimizer makes its state as `get_state_dict` would let it: by a step that changes nothing.
    """
    if not optimizer.state:
        no_grads = {param: torch.zeros_like(local_of(param.detach())) for param in model.parameters()}
        step_on_locals(optimizer, no_grads, lr=0.0)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}


def trained(model: nn.Module, *, on_dtensors: bool = False, **options: Any) -> dict[str, Any]:
    """The state of a model after a few steps of AdamW."""
    optimizer = build_optimizer(model, lr=0.01, **options)
    take_steps(model, optimizer, on_dtensors=on_dtensors)
    return training_state(model, optimizer)


def training_truth(sizes: Sizes) -> dict[str, Any]:
    """The same by dotted names, unsharded, in this process alone."""
    return dict(leaves(trained(build_whole(sizes))))
