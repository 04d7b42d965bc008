"""Loads through a transform: saved on one layout under other names and shapes, loaded on another, bit for bit."""

from pathlib import Path

import pytest
import torch
from checkpoints import save_as
from models import differences, poison
from random_layouts import build, random_layouts
from safetensors.torch import save_file
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from transformed_states import DIM, TRANSFORM, saved_state, wanted_state

import torchtitan_ext as tte
from torchtitan_ext import transforms
from torchtitan_ext.errors import MissingStateError, ProofFailedError, ReshardError, TransformError, WrongValueError
from torchtitan_ext.offline.mapped_files import MappedFiles
from torchtitan_ext.offline.rewrite.convert import convert
from torchtitan_ext.offline.sources import open_source
from torchtitan_ext.transforms import Transform
from torchtitan_ext.transforms.reader import MappedReader

HUB = Transform([rule for rule in TRANSFORM.rules if rule.targets != ("step",)], TRANSFORM.drop)


def save_layout(rank: int, world_size: int, seed: int, path: Path, is_stock: bool) -> None:
    truth = saved_state()
    state, orders = build(truth, random_layouts(seed, world_size, truth))
    writer = FileSystemWriter(path) if is_stock else None
    tte.save({**state, "step": 7}, path, planner=tte.SavePlanner(layouts=orders), storage_writer=writer)


def load_layout(rank: int, world_size: int, seed: int, path: Path) -> list[str]:
    truth = wanted_state()
    state, orders = build(truth, random_layouts(seed, world_size, truth))
    poison(state)
    whole = {"model": state, "step": 0}
    orders = {f"model.{name}": order for name, order in orders.items()}
    planner = tte.LoadPlanner(layouts=orders)
    tte.load(whole, path, transform=TRANSFORM, planner=planner, share_reads=seed % 2 == 1)
    lines = [] if whole["step"] == 7 else ["step"]
    for name in state:
        full = tte.full_tensor(state[name], layout=orders.get(f"model.{name}"))
        lines += differences({name: full}, {name: truth[name]})
    return lines


@pytest.mark.parametrize(("source", "target", "is_stock"), [(4, 6, False), (6, 2, True), (2, 4, False)])
@pytest.mark.parametrize("seed", range(2))
def test_any_layout_is_loaded_from_any_other(
    run_world, tmp_path: Path, source: int, target: int, is_stock: bool, seed: int
) -> None:
    run_world(source, save_layout, seed, tmp_path / "saved", is_stock)
    assert run_world(target, load_layout, seed + 100, tmp_path / "saved") == [[]] * target


def load_hub(rank: int, world_size: int, path: Path, is_shared: bool) -> list[str]:
    truth = wanted_state()
    state, orders = build(truth, random_layouts(world_size, world_size, truth))
    poison(state)
    planner = tte.LoadPlanner(layouts={f"model.{name}": order for name, order in orders.items()})
    tte.load({"model": state}, path, transform=HUB, planner=planner, share_reads=is_shared)
    lines = []
    for name in state:
        lines += differences({name: tte.full_tensor(state[name], layout=orders.get(name))}, {name: truth[name]})
    return lines


@pytest.mark.parametrize("is_shared", [False, True])
def test_safetensors_of_the_hub_are_loaded_into_any_layout(run_world, tmp_path: Path, is_shared: bool) -> None:
    save_as("safetensors", tmp_path / "hub", saved_state())
    assert run_world(4, load_hub, tmp_path / "hub", is_shared) == [[]] * 4


def test_one_file_of_safetensors_is_loaded(tmp_path: Path) -> None:
    state = targets()
    tte.load({"model": state}, save_as("safetensors file", tmp_path / "hub", saved_state()), transform=HUB)
    assert differences(state, wanted_state()) == []


def test_damaged_safetensors_are_refused(tmp_path: Path) -> None:
    path = save_as("safetensors file", tmp_path / "hub", saved_state())
    path.write_bytes(path.read_bytes()[:-5])
    state = targets()
    with pytest.raises(ReshardError, match=r"hub\.safetensors"):
        tte.load({"model": state}, path, transform=HUB)
    assert differences(state, targets()) == []


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    tte.save({**saved_state(), "step": 7}, tmp_path, no_dist=True)
    return tmp_path


def targets() -> dict[str, torch.Tensor]:
    return {name: torch.full_like(value, -1) for name, value in wanted_state().items()}


def test_other_memory_than_that_of_the_checkpoint_is_filled(checkpoint: Path) -> None:
    """Other strides, and a dtype that needs a cast after the transform."""
    truth = wanted_state()
    state = {name: torch.full((*value.shape, 2), -1.0, dtype=torch.float64)[..., 0] for name, value in truth.items()}
    versions = {name: value._version for name, value in state.items()}
    tte.load({"model": state}, checkpoint, transform=TRANSFORM)
    assert differences(state, {name: value.double() for name, value in truth.items()}) == []
    assert all(value._version > versions[name] for name, value in state.items())


def test_values_take_every_dtype_on_the_way(tmp_path: Path) -> None:
    whole = torch.linspace(0, 1, 100)
    tte.save({"w": whole}, tmp_path, no_dist=True)
    rule = transforms.Rule("w", "v", [transforms.cast("bfloat16"), transforms.cast("float32")])
    state = {"v": torch.zeros(100)}
    tte.load(state, tmp_path, transform=Transform([rule]))
    assert differences(state, {"v": whole.bfloat16().float()}) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e8m0fnu])
def test_scales_of_few_bits_multiply_in_float32(tmp_path: Path, dtype: torch.dtype) -> None:
    """A product in the dtype of such scales would be rounded, or is not there."""
    weight = torch.linspace(-3, 3, 8 * 12).view(8, 12).to(torch.float8_e4m3fn)
    scale = torch.linspace(0.3, 5, 2 * 3).view(2, 3).to(dtype)
    tte.save({"w": weight, "s": scale}, tmp_path, no_dist=True)
    rule = transforms.Rule(["w", "s"], "v", [transforms.dequantize([4, 4], dtype="float32")])
    state = {"v": torch.zeros(8, 12)}
    tte.load(state, tmp_path, transform=Transform([rule]))
    full = scale.float().repeat_interleave(4, 0).repeat_interleave(4, 1)
    assert differences(state, {"v": weight.float() * full}) == []


def test_one_layer_reads_its_own_files_parts(checkpoint: Path) -> None:
    state = {"layers.1.wk": torch.zeros(7, DIM)}
    tte.load({"model": state}, checkpoint, transform=TRANSFORM)
    assert differences(state, {"layers.1.wk": wanted_state()["layers.1.wk"]}) == []


def test_large_tensors_pass_through_bounded_buffers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchtitan_ext.storage.native.fills.BUFFER_BYTES", 512)
    test_other_memory_than_that_of_the_checkpoint_is_filled(_saved(tmp_path))
    state = targets()
    tte.load({"model": state}, tmp_path, transform=TRANSFORM)
    assert differences(state, wanted_state()) == []


def _saved(path: Path) -> Path:
    tte.save({**saved_state(), "step": 7}, path, no_dist=True)
    return path


def test_a_source_has_a_transform_of_its_own(checkpoint: Path) -> None:
    state = targets()
    source = tte.elastic.Source(checkpoint, transform=TRANSFORM, rename={"*": "model.*"})
    tte.load(state, source, policy=tte.elastic.ElasticPolicy(strict="ignore"))
    assert differences(state, wanted_state()) == []


def test_a_transform_that_does_not_fit_changes_nothing(checkpoint: Path) -> None:
    state = targets()
    forgetful = Transform(
        [rule for rule in TRANSFORM.rules if rule.targets != ("model.layers.*.linear",)], TRANSFORM.drop
    )
    with pytest.raises(TransformError, match=r"layers\.1\.conv: no rule takes it"):
        tte.load({"model": state}, checkpoint, transform=forgetful)
    dropping = Transform(forgetful.rules, [*TRANSFORM.drop, "layers.*.conv"])
    with pytest.raises(MissingStateError, match=r"model\.layers\.0\.linear"):
        tte.load({"model": state}, checkpoint, transform=dropping)
    assert differences(state, targets()) == []


def test_what_does_not_go_together_is_refused(checkpoint: Path) -> None:
    state = {"model": targets()}
    with pytest.raises(WrongValueError, match=r"got prove=True and a transform; .* than model.*\.wq"):
        tte.load(state, checkpoint, transform=TRANSFORM, prove=True)
    with pytest.raises(WrongValueError, match="got a transform and a Source"):
        tte.load(state, tte.elastic.Source(checkpoint), transform=TRANSFORM)
    with pytest.raises(WrongValueError, match="got a transform and a storage_reader"):
        tte.load(state, checkpoint, storage_reader=tte.FileReader(checkpoint), transform=TRANSFORM)
    with pytest.raises(TypeError, match=r"got transform=a dict, expected a tte\.transforms\.Transform"):
        tte.load(state, checkpoint, transform={})


def test_ranks_with_different_transforms_are_refused(run_world, checkpoint: Path) -> None:
    assert run_world(2, load_differently, checkpoint) == [True, True]


def load_differently(rank: int, world_size: int, path: Path) -> bool:
    transform = Transform(TRANSFORM.rules, [*TRANSFORM.drop, f"rank_{rank}"])
    named = r"policy: is .*Transform\(8 rules, .* on rank 0, .*Transform\(8 rules, .* on rank 1; pass the same"
    with pytest.raises(tte.errors.ReplicaMismatchError, match=named):
        tte.load({"model": targets()}, path, transform=transform)
    return True


RENAMES = Transform(
    [
        transforms.Rule("model.layers.*.wq", "blocks.*.q"),
        transforms.Rule("model.wide", "wide", [transforms.transpose(0, 1), transforms.transpose(1, 0)]),
        transforms.Rule("model.cube", "cube", [transforms.split(0, sizes=[2, 1]), transforms.concat(0)]),
        transforms.Rule("step", "step"),
    ],
    drop=["model.left.*"],
)


def renamed_truth() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {
        name: torch.randn(shape, generator=generator)
        for name, shape in {"layers.0.wq": (7, 5), "layers.1.wq": (5,), "wide": (9, 4), "cube": (3, 2, 2)}.items()
    }


def save_renamed(rank: int, world_size: int, path: Path) -> None:
    truth = renamed_truth() | {"left.over": torch.ones(3)}
    state, orders = build(truth, random_layouts(3, world_size, truth))
    planner = tte.SavePlanner(layouts={f"model.{name}": order for name, order in orders.items()})
    tte.save({"model": state, "step": 7}, path, planner=planner, fingerprints=True)


def prove_renamed(rank: int, world_size: int, path: Path) -> list[str]:
    truth = {name.replace("layers.", "blocks.").replace("wq", "q"): value for name, value in renamed_truth().items()}
    state, orders = build(truth, random_layouts(4, world_size, truth))
    poison(state)
    planner = tte.LoadPlanner(layouts=orders)
    report = tte.load({**state, "step": 0}, path, transform=RENAMES, planner=planner, prove=True)
    assert report is not None and report.proof is not None
    assert sorted(report.proof.proved) == sorted(truth) and list(report.proof.unproved) == ["step"]
    lines = [
        line
        for name in state
        for line in differences({name: tte.full_tensor(state[name], layout=orders.get(name))}, {name: truth[name]})
    ]
    real_read = MappedReader._read
    MappedReader._read = lambda *args: (real_read(*args), state["blocks.0.q"].to_local().neg_())  # type: ignore
    try:
        with pytest.raises(ProofFailedError) as raised:
            tte.load({**state, "step": 0}, path, transform=RENAMES, planner=planner, prove=True)
    finally:
        MappedReader._read = real_read  # type: ignore[method-assign]
    assert raised.value.fqns == ("blocks.0.q",)
    assert all((path / part.file).exists() and part.is_in_file is False for part in raised.value.parts)
    return lines


def test_a_load_through_other_names_is_proved(run_world, tmp_path: Path) -> None:
    run_world(4, save_renamed, tmp_path / "saved")
    assert run_world(2, prove_renamed, tmp_path / "saved") == [[], []]
    assert run_world(1, prove_renamed, tmp_path / "saved") == [[]]


PADDED = transforms.Transform([transforms.Rule("embed", "vocab", [transforms.pad(0, 16, value=-3)])])


def load_padded(rank: int, world_size: int, path: Path, is_shared: bool) -> list[str]:
    mesh = init_device_mesh("cpu", (world_size,))
    wide = torch.zeros(16, 3, dtype=torch.float64)
    state = {"vocab": tte.full.distribute_tensor(wide, mesh, [Shard(0)])}
    report = tte.load(state, path, transform=PADDED, share_reads=is_shared)
    assert report.padded == ("vocab",) and "padded: vocab" in str(report)
    return differences(state, {"vocab": padded_vocabulary().double()})


def padded_vocabulary() -> torch.Tensor:
    return torch.cat([torch.arange(30.0).view(10, 3), torch.full((6, 3), -3.0)])


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_padded_vocabulary_is_loaded_by_ranks(run_world, tmp_path: Path, is_shared: bool) -> None:
    tte.save({"embed": torch.arange(30.0).view(10, 3)}, tmp_path / "saved", no_dist=True)
    assert run_world(3, load_padded, tmp_path / "saved", is_shared) == [[]] * 3


def test_a_padded_vocabulary_is_converted_cropped_and_not_saved(tmp_path: Path) -> None:
    embed, whole = {"embed": torch.arange(30.0).view(10, 3)}, padded_vocabulary()
    tte.save(embed, tmp_path / "saved", no_dist=True)
    convert(MappedFiles(open_source(tmp_path / "saved"), PADDED), tmp_path / "wide", to="safetensors")
    state = {"vocab": torch.zeros(16, 3)}
    tte.load(state, tmp_path / "wide")
    assert differences(state, {"vocab": whole}) == []
    crop = transforms.Transform([transforms.Rule("vocab", "embed", [transforms.crop(0, 10, was=16)])])
    back = {"embed": torch.zeros(10, 3)}
    tte.load(back, tmp_path / "wide", transform=crop)
    assert differences(back, embed) == []
    with pytest.raises(TransformError, match="vocab: is padded, which a save does not"):
        tte.weights.save(embed, tmp_path / "refused", transform=PADDED)
    tte.weights.save(state, tmp_path / "cropped", transform=crop)
    tte.load(back, tmp_path / "cropped")
    assert differences(back, embed) == []


def test_what_a_proof_needs(tmp_path: Path) -> None:
    tte.save({"w": torch.zeros(4, 2)}, tmp_path, no_dist=True)
    named = Transform([transforms.Rule("w", "v")])
    with pytest.raises(WrongValueError, match="has no fingerprints"):
        tte.load({"v": torch.zeros(4, 2)}, tmp_path, transform=named, prove=True)
    for steps in ([transforms.reshape([2, 4])], [transforms.cast("float64")], [transforms.slice_dim(0, 0, 2)]):
        changed = Transform([transforms.Rule("w", "v", steps)], drop=["w"])
        with pytest.raises(WrongValueError, match="the fingerprints are those of other tensors than v"):
            tte.load({"v": torch.zeros(1)}, tmp_path, transform=changed, prove=True)


def test_small_buffers_and_few_open_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Turned, cast and scaled at once, from many files: a full buffer is read in the midst of a box."""
    monkeypatch.setattr("torchtitan_ext.storage.native.open_files._MAX_OPEN_FILES", 1)
    generator = torch.Generator().manual_seed(3)
    saved, wanted, rules = {}, {}, []
    for number in range(6):
        weight = torch.randn(24, 40, generator=generator).to(torch.float8_e4m3fn)
        scale = torch.rand(3, 5, generator=generator)
        plain = [torch.randn(9, 20, generator=generator).bfloat16() for _ in range(3)]
        saved |= {f"w{number}": weight, f"s{number}": scale} | {f"p{number}.{i}": one for i, one in enumerate(plain)}
        full = scale.repeat_interleave(8, 0).repeat_interleave(8, 1)
        wanted[f"w{number}"] = (weight.float() * full).bfloat16().t().contiguous()
        wanted[f"p{number}"] = torch.stack([one.t() for one in plain]).float()
    quantised = [transforms.dequantize([8, 8], dtype="bfloat16"), transforms.transpose(0, 1)]
    rules.append(transforms.Rule(["w*", "s*"], "w*", quantised))
    turned = [transforms.transpose(0, 1), transforms.stack(0), transforms.cast("float32")]
    rules.append(transforms.Rule("p*.#", "p*", turned))
    for name, value in saved.items():
        save_file({name: value}, tmp_path / f"{name}.safetensors")
    for num_bytes in (1, 64, 300, 1000, 5000, 1 << 20):
        monkeypatch.setattr("torchtitan_ext.storage.native.fills.BUFFER_BYTES", num_bytes)
        state = {name: torch.full_like(value, -1) for name, value in wanted.items()}
        state["p1"] = torch.full_like(wanted["p1"], -1, dtype=torch.float64)
        tte.load(state, tmp_path, transform=Transform(rules))
        assert differences(state, wanted | {"p1": wanted["p1"].double()}) == []
