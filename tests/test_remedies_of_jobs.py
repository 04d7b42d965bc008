"""As ``test_remedies.py``: messages about planners, readers, several jobs, dry runs and process groups."""

import contextlib
import io
import pickle
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from boxed_tensors import boxed
from calls import call
from remedies import WEIGHTS, is_saved, refused, zeros
from torch import nn
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, state_dict_loader
from torch.distributed.checkpoint._extension import ExtensionRegistry, StreamTransformExtension
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.planner_helpers import _create_write_items
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.two_tensor import TwoTensor
from wrapped_tensors import ALLOWED, BlockInt8, CastOnGather, CopiedSlices

import torchtitan_ext as tte
from torchtitan_ext import ops, transforms
from torchtitan_ext.elastic import (
    ElasticDataLoader,
    ElasticLRScheduler,
    ElasticPolicy,
    HuggingFaceStreams,
    Resharded,
    RngState,
    Source,
    TrainState,
    reshard_state,
)
from torchtitan_ext.integrations.torchtitan_train_state import RunTrainState
from torchtitan_ext.offline.rewrite.reshard import reshard
from torchtitan_ext.offline.sources import open_source
from torchtitan_ext.state.value_digest import digest_value
from torchtitan_ext.storage.weights.writer import SafetensorsWriter
from torchtitan_ext.transforms import Rule, Transform

# Planners and readers.


class Renaming(tte.LoadPlanner):
    """Loads "step" into the place of "count"."""

    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:
        super().set_up_planner(state_dict, metadata, is_coordinator)
        self.state_dict["step"] = self.state_dict.pop("count")


class Mapping_(Renaming):
    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:
        super().set_up_planner(state_dict, metadata, is_coordinator)
        self.mappings["step"] = ("count",)


def test_names_that_a_planner_makes(tmp_path: Path) -> None:
    tte.save({"step": 7}, tmp_path)
    refused(
        "say so in mappings, or rename keys by source=", lambda: tte.load({"count": 0}, tmp_path, planner=Renaming())
    )
    source = Source(rename={"count": "step"})
    for planner in (Mapping_(), tte.LoadPlanner(source=source)):
        tte.load(target := {"count": 0}, tmp_path, planner=planner)
        assert target == {"count": 7}


class OwnDedup(tte.SavePlanner):
    def _dedup_save_plans(self, all_plans: Any) -> Any:
        return all_plans


class StockDedup(DefaultSavePlanner):
    def _dedup_save_plans(self, all_plans: Any) -> Any:
        return super()._dedup_save_plans(all_plans)


class OwnPlan(tte.SavePlanner):
    def create_global_plan(self, all_plans: Any) -> Any:
        return super().create_global_plan(all_plans)


def test_methods_that_our_planner_does_not_call(tmp_path: Path) -> None:
    told = "replace a method of DCP's planner protocol, or extend DefaultSavePlanner instead"
    refused(told, lambda: tte.save(dict(WEIGHTS), tmp_path / "a", planner=OwnDedup()))
    for planner in (OwnPlan(), StockDedup()):
        tte.save(dict(WEIGHTS), tmp_path / "a", planner=planner)
        assert is_saved(tmp_path / "a", WEIGHTS)
        shutil.rmtree(tmp_path / "a")


def test_an_argument_without_effect(caplog: pytest.LogCaptureFixture) -> None:
    tte.SavePlanner(dedup_replicated_tensors=True)
    assert "dedup_replicated_tensors is deprecated and has no effect; remove the argument" in caplog.text
    caplog.clear()
    tte.SavePlanner()
    assert caplog.text == ""


def test_a_partial_load_of_nothing(tmp_path: Path) -> None:
    tte.save({"model": WEIGHTS}, tmp_path)
    planner = tte.LoadPlanner(allow_partial_load=True)
    target = {"net": zeros(WEIGHTS)}
    told = refused("and others: check the prefixes", lambda: tte.load(target, tmp_path, planner=planner))
    assert "the checkpoint has model." in told
    tte.load(target := {"model": {**zeros(WEIGHTS), "new": torch.ones(1)}}, tmp_path, planner=planner)
    assert digest_value(target) == digest_value({"model": {**WEIGHTS, "new": torch.ones(1)}})


class Turned(StreamTransformExtension):
    """Each byte the other way round."""

    @staticmethod
    def registry_name() -> str:
        return "tests.turned"

    @staticmethod
    def from_descriptor(version: str) -> "Turned":
        return Turned()

    def get_descriptor(self) -> str:
        return f"{self.registry_name()}/1"

    def transform_to(self, output: Any) -> Any:
        class Out(io.RawIOBase):
            def writeable(self) -> bool:
                return True

            def write(self, data: Any) -> int:
                return int(output.write(bytes(255 - byte for byte in bytes(data))))

        return Out()

    def transform_from(self, input: Any) -> Any:
        return io.BytesIO(bytes(255 - byte for byte in input.read()))


def test_a_checkpoint_through_an_extension(tmp_path: Path) -> None:
    dcp.save(dict(WEIGHTS), storage_writer=FileSystemWriter(tmp_path, _extensions=[Turned()]), no_dist=True)
    refused("load it with FileSystemReader", lambda: is_saved(tmp_path, WEIGHTS))
    registry = ExtensionRegistry()
    registry.register(Turned)
    assert is_saved(None, WEIGHTS, storage_reader=FileSystemReader(tmp_path, _extension_registry=registry))


@pytest.mark.filterwarnings("ignore:memory.//")
def test_a_checkpoint_at_a_url(tmp_path: Path) -> None:
    url = "memory://remedies-of-jobs/step-1"
    tte.save(WEIGHTS, url)
    rename = Transform([Rule("w", "v"), Rule("b", "b")])
    load = {"v": torch.zeros(2, 3), "b": torch.zeros(2)}
    told = "a transform reads no storage of others; copy the checkpoint to a directory"
    refused(told, lambda: tte.load(load, url, transform=rename))
    told = "files at a URL have no checksums; pass step='latest' or a number"
    run = "memory://remedies-of-jobs"
    refused(told, lambda: is_saved(run, WEIGHTS, step="last-good"))
    assert is_saved(run, WEIGHTS, step="latest") and is_saved(run, WEIGHTS, step=1)
    assert "Copy the checkpoint to a disk first" in plain(call("inspect", url).err)
    assert call("latest", run).out.strip() == tte.latest(run) == url
    fsspec.filesystem("memory").get("/remedies-of-jobs/step-1", str(tmp_path / "copy"), recursive=True)
    tte.load(load, tmp_path / "copy", transform=rename)
    assert digest_value(load) == digest_value({"v": WEIGHTS["w"], "b": WEIGHTS["b"]})
    assert call("inspect", tmp_path / "copy").code == 0


def plain(text: str) -> str:
    return " ".join(text.replace("│", " ").split())


def test_the_metadata_of_a_save_that_was_saved_over(tmp_path: Path) -> None:
    writer = tte.FileWriter(tmp_path)
    saved = dcp.save(dict(WEIGHTS), storage_writer=writer, planner=tte.SavePlanner(), no_dist=True)
    first = pickle.loads(pickle.dumps(saved))  # as other ranks get it
    with pytest.warns(UserWarning, match="is overwritten"):
        tte.save({"w": torch.ones(4)}, tmp_path)
    told = "another one has saved over it; read its metadata with FileReader"
    refused(told, lambda: len(first.planner_data))
    assert list(tte.FileReader(tmp_path).read_metadata().state_dict_metadata) == ["w"]


def test_steps_that_gc_removes(tmp_path: Path) -> None:
    for step in (2, 3, 4):
        tte.save({"step": step}, tmp_path / f"step-{step}")
    with pytest.warns(UserWarning, match="the run goes on with step 1") as caught:
        tte.save({"step": 1}, tmp_path / "step-1")
    assert (tmp_path / "abandoned").exists()
    assert "expected --keep with the number of steps that stay, or --abandoned" in plain(call("gc", tmp_path).err)
    assert "gc --abandoned --yes removes" in plain(call("ls", tmp_path).out)
    (command,) = re.findall(r"torchtitan-ext (gc RUN .*) removes them", str(caught[0].message))
    assert call(*command.replace("RUN", str(tmp_path)).split()).code == 0
    assert not (tmp_path / "abandoned").exists()
    tte.save({"step": 2}, tmp_path / "step-2")
    assert call("gc", tmp_path, "--keep", 1, "--yes").code == 0
    assert sorted(tmp_path.glob("*")) == [tmp_path / "step-2"]
    tte.load(state := {"step": 0}, tmp_path, step="latest")
    assert state == {"step": 2}


def test_metadata_of_each_rank(tmp_path: Path) -> None:
    dcp.save(dict(WEIGHTS), checkpoint_id=tmp_path, use_collectives=False, no_dist=True)
    done = call("inspect", tmp_path, "--rank", 5)
    assert "and rank 5 has none: name one of these" in plain(done.err)
    assert call("inspect", tmp_path, "--rank", 0).code == 0


def test_a_file_that_is_gone(tmp_path: Path) -> None:
    for step in (1, 2):
        tte.save(WEIGHTS, tmp_path / f"step-{step}")
    (file,) = (tmp_path / "step-2").glob("*.distcp")
    file.rename(tmp_path / "away")
    told = refused(
        "load another step (of a run step='last-good' finds one)", lambda: is_saved(tmp_path / "step-2", WEIGHTS)
    )
    assert "Part-written, load again or start anew" in told
    with pytest.warns(UserWarning, match="step 1 is loaded, 1 newer skipped"):
        assert is_saved(tmp_path, WEIGHTS, step="last-good")
    (tmp_path / "away").rename(file)
    assert is_saved(tmp_path / "step-2", WEIGHTS)


def test_a_state_that_is_not_transformed_by_a_checkpoint(tmp_path: Path) -> None:
    rules = Transform([Rule("w", "v"), Rule("b", "b")])
    truth = {"v": WEIGHTS["w"], "b": WEIGHTS["b"]}
    tte.save(WEIGHTS, tmp_path / "a")
    assert is_saved(tmp_path / "a", truth, transform=rules)
    (tmp_path / "rules.json").write_text(rules.to_json())
    command = ["reshard", tmp_path / "a", tmp_path / "b", "--mesh", "dp_shard=1"]
    assert call(*command, "--transform", tmp_path / "rules.json").code == 0 and is_saved(tmp_path / "b", truth)
    wrapper = {"w": CastOnGather(truth["v"].clone(), torch.float8_e4m3fn)}
    with torch.serialization.safe_globals(ALLOWED):
        told = "save what it holds instead"
        refused(told, lambda: tte.weights.save(wrapper, tmp_path / "c"))
    tte.weights.save({"w": wrapper["w"].weight}, tmp_path / "c")
    assert is_saved(tmp_path / "c", {"w": WEIGHTS["w"]})


def test_scales_that_a_save_does_not_apply(tmp_path: Path) -> None:
    state = {"w": torch.ones(2, 2), "s": torch.full((1, 1), 3.0)}
    scaled = Transform([Rule(["w", "s"], "w", [transforms.dequantize([2, 2], dtype="float32")])])
    told = "leave the values and their scales as they are"
    refused(told, lambda: tte.weights.save(state, tmp_path, transform=scaled))
    tte.weights.save(state, tmp_path)
    assert is_saved(tmp_path, state) and is_saved(tmp_path, {"w": state["w"] * 3}, transform=scaled)


def test_objects_in_the_place_of_their_states() -> None:
    model = nn.Linear(2, 2)
    refused("expected a state dict: what state_dict() of a module or optimizer gives", lambda: tte.fingerprint(model))
    assert tte.fingerprint(model.state_dict()).values.keys() == {"weight", "bias"}
    told = "store what it holds (its state_dict()) instead"
    refused(told, lambda: tte.flatten_state_dict({"part": Plain({"a": 1}), **WEIGHTS}))
    buffers, manifest = tte.flatten_state_dict({"part": Plain({"a": 1}).state_dict(), **WEIGHTS})
    assert digest_value(tte.unflatten_state_dict(buffers, manifest)) == digest_value({"part": {"a": 1}, **WEIGHTS})


def test_a_dim_that_nothing_says(tmp_path: Path) -> None:
    tte.save(WEIGHTS, tmp_path / "a")
    command = ["reshard", tmp_path / "a", tmp_path / "b", "--mesh", "tp=2"]
    assert "dim 0 was taken; state it with --shard" in plain(call(*command).out)
    stated = call(*command, "--overwrite", "--shard", "w=tp:1", "--shard", "b=tp:none")
    assert stated.code == 0 and "state it" not in stated.out and is_saved(tmp_path / "b", WEIGHTS)


def test_numbers_of_files(tmp_path: Path) -> None:
    writer = SafetensorsWriter(tmp_path / "a", file_numbers={"w": 1})
    refused("b: has no number of a file; give it one in file_numbers", lambda: tte.save(WEIGHTS, storage_writer=writer))
    tte.save(WEIGHTS, storage_writer=SafetensorsWriter(tmp_path / "a", file_numbers={"w": 1, "b": 2}))
    assert is_saved(tmp_path / "a", WEIGHTS)
    (tmp_path / "b").write_text("")
    refused(
        "expected a directory for the weights; give another path",
        lambda: tte.weights.save(WEIGHTS, tmp_path / "b"),
    )
    tte.weights.save(WEIGHTS, tmp_path / "c")
    assert is_saved(tmp_path / "c", WEIGHTS)


# Data.


def test_a_data_set_that_is_not_streamed() -> None:
    told = "pass one that is not streamed to the loader as it is"
    refused(told, lambda: HuggingFaceStreams(list(range(12)), num_shards=2))  # type: ignore[arg-type]
    found = [sample for batch in ElasticDataLoader(list(range(12)), batch_size=4) for sample in batch.tolist()]
    assert sorted(found) == list(range(12))


def test_a_rank_without_a_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    refused("or pass rank= and world_size=", lambda: RngState(0))
    assert "rank_1" in RngState(0, rank=1, world_size=2).state_dict()


def test_random_states_of_other_ranks(tmp_path: Path) -> None:
    tte.save({"rng": RngState(3, rank=0, world_size=1)}, tmp_path)
    expected = torch.rand(2)
    fresh = RngState(3, rank=1, world_size=2)
    told = "load it by a policy that reshards"
    refused(told, lambda: fresh.load_state_dict(RngState(3, rank=0, world_size=1).state_dict()))
    tte.load({"rng": RngState(3, rank=0, world_size=1)}, tmp_path, policy=ElasticPolicy())
    assert torch.equal(torch.rand(2), expected)
    tte.load({"rng": fresh}, tmp_path, policy=ElasticPolicy())
    assert not torch.equal(torch.rand(2), expected)


class Plain:
    """A component without a method ``reshard``, which keeps an entry per rank."""

    def __init__(self, counts: dict[str, int]) -> None:
        self.counts = counts

    def state_dict(self) -> dict[str, Any]:
        return dict(self.counts)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.counts = dict(state_dict)


class Method(Plain):
    def reshard(self, saved: Any, old: object, new: object) -> Resharded:
        return Resharded({"rank_0": sum(saved.values())}, "summed")


class Registered(Plain):
    pass


@reshard_state.register
def of_registered(component: Registered, saved: Any, old: object, new: object) -> Resharded:
    return Resharded({"rank_0": sum(saved.values())}, "summed")


def test_a_component_that_does_not_say_how_it_reshards(tmp_path: Path) -> None:
    told = "give it a method reshard(saved, old, new), or register one with tte.elastic.reshard_state.register"
    refused(told, lambda: reshard_state(Plain({}), {}, tte.elastic.World(2), tte.elastic.World(1)))
    tte.save({"part": Plain({"rank_0": 3, "rank_1": 4}), "step": 2}, tmp_path)
    for kind in (Method, Registered):
        for policy in (None, ElasticPolicy()):
            tte.load(target := {"part": kind({"rank_0": 0}), "step": 0}, tmp_path, policy=policy)
            assert (target["part"].counts, target["step"]) == ({"rank_0": 7}, 2)  # type: ignore[attr-defined]


class Trainer(Plain):
    """The counters of torchtitan's trainer."""


def test_counters_of_a_trainer(tmp_path: Path) -> None:
    saved = {"step": 3, "ntokens_seen": 96}
    tte.save({"train_state": Plain({"step": 2})}, tmp_path / "step-2")
    tte.save({"train_state": Plain(saved)}, tmp_path / "step-3")
    run = RunTrainState(Trainer({"step": 0, "ntokens_seen": 0}), 1)
    policy = ElasticPolicy()
    told = "the checkpoint has no ntokens_seen; load a step that has all of it"
    refused(told, lambda: tte.load({"train_state": run}, tmp_path, step=2, policy=policy))
    tte.load({"train_state": run}, tmp_path, step=3, policy=policy)
    assert run.state_dict().items() >= saved.items()
    counts = TrainState()
    told = "read it with tte.elastic.read_torchtitan_train_state(saved, num_token_ranks=..., seq_len=...)"
    refused(told, lambda: tte.load({"train_state": counts}, tmp_path, step=3, policy=policy))
    counts.load_state_dict(tte.elastic.read_torchtitan_train_state(saved, num_token_ranks=2, seq_len=8))
    assert (counts.step, counts.samples_seen, counts.tokens_seen) == (3, 24, 192)


@pytest.mark.parametrize(
    ("told", "make"),
    [
        ('load this component with the policy "reset", or exclude it', lambda: scheduler_of(2)),
        ('load this component with the policy "reset"', TrainState),
        ('load this component with the policy "reset"', lambda: RngState(0)),
    ],
)
def test_a_component_in_the_place_of_another(tmp_path: Path, told: str, make: Callable[[], Any]) -> None:
    tte.save({"part": Plain({"epoch": 3}), "step": 2}, tmp_path)
    before = torch.get_rng_state()
    target = {"part": make(), "step": 0}
    refused(told, lambda: tte.load(target, tmp_path, policy=ElasticPolicy()))
    for options in (
        {"policy": ElasticPolicy({"part": "reset"})},
        {"policy": ElasticPolicy(), "planner": tte.LoadPlanner(source=Source(exclude=["part", "part.*"]))},
    ):
        tte.load(target, tmp_path, **options)  # type: ignore[arg-type]
        assert (target["step"], digest_value(target["part"].state_dict())) == (2, digest_value(make().state_dict()))
        target["step"] = 0
    torch.set_rng_state(before)


def scheduler_of(step_size: int) -> ElasticLRScheduler:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    return ElasticLRScheduler(torch.optim.lr_scheduler.StepLR(optimizer, step_size), global_batch_size=4)


def test_states_of_different_moments(tmp_path: Path) -> None:
    train, loader = TrainState(), ElasticDataLoader(range(12), batch_size=4)
    next(iter(loader))
    tte.save({"train": train, "data": loader}, tmp_path / "a")
    train.advance(samples=4)
    tte.save({"train": train, "data": loader}, tmp_path / "b")

    def load(step: str, **actions: Any) -> tuple[int, int]:
        target = {"train": TrainState(), "data": ElasticDataLoader(range(12), batch_size=4)}
        tte.load(target, tmp_path / step, policy=ElasticPolicy(actions))
        return target["train"].samples_seen, target["data"].samples_seen  # type: ignore[attr-defined]

    told = refused(
        "load them from one checkpoint, or reset one of them, or 'keep' the one that counts", lambda: load("a")
    )
    assert "train 0" in told and "data 4" in told
    assert load("b") == (4, 4)
    assert load("a", data="reset") == (0, 0)
    assert load("a", train="keep") == (0, 4)


# Transfers.


class Numbered(nn.Linear):
    """A module with a number beside its tensors."""

    def __init__(self, number: int) -> None:
        super().__init__(2, 2)
        self.number = number

    def get_extra_state(self) -> int:
        return self.number

    def set_extra_state(self, state: int) -> None:
        self.number = state


def test_targets_of_a_transfer() -> None:
    told = "several of its elements share memory; fill a clone() of it"
    refused(told, lambda: tte.reshard(WEIGHTS, {"w": torch.zeros(1, 3).expand(2, 3)}))
    tte.reshard(WEIGHTS, target := {"w": torch.zeros(1, 3).expand(2, 3).clone()})
    assert torch.equal(target["w"], WEIGHTS["w"])
    source, module = Numbered(3), Numbered(4)
    refused("expected a state dict, a module, or None on a rank without", lambda: tte.reshard(source, [module]))
    refused("cannot be put into a module; fill a dict of its own", lambda: tte.reshard(source, module))
    tte.reshard(source, own := dict(module.state_dict()))
    assert digest_value(own) == digest_value(dict(source.state_dict()))
    refused("pass what its state_dict() gives", lambda: tte.reshard({"part": Plain({"a": 1})}, {"part": {"a": 0}}))


# Layouts, dry runs, installations.


def test_tensors_that_describe_their_boxes(tmp_path: Path) -> None:
    weight = torch.arange(4.0)

    def describe(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        boxed(state["w"], (4,), [((0,), (0,), (4,))])

    model = nn.Module()
    model.register_buffer("w", weight.clone())
    model.register_state_dict_post_hook(describe)
    refused("call full_tensor on it, or load into it", lambda: tte.full.get_full_state_dict(model))
    assert torch.equal(tte.full_tensor(model.state_dict()["w"]), weight)
    told = refused("describes its own boxes", lambda: tte.full.set_full_state_dict(model, {"w": weight + 1}))
    assert told.endswith("call full_tensor on it, or load into it")
    tte.save({"w": weight + 1}, tmp_path)
    tte.load(model.state_dict(), tmp_path)
    assert torch.equal(model.w, weight + 1)
    state = {"w": boxed(torch.zeros(4), (8,), [((0,), (0,), (4,))]), "b": torch.zeros(2)}
    assert "leave it out of the dry run" in str(tte.dry_run(state, mesh={"dp": 2}).problems)
    assert not tte.dry_run({"b": state["b"]}, mesh={"dp": 2}).problems


class Hooked(TwoTensor):
    def __create_write_items__(self, fqn: str, value: Any) -> list[WriteItem]:
        return _create_write_items(fqn, self.a)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size([0]), self.a.shape)]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return self.a


def test_boxes_of_a_wrapper(tmp_path: Path) -> None:
    boxes = (4,), [((0,), (0,), (4,))]
    truth = torch.arange(4.0)
    told = "which is not one block of memory; dequantise it or give it __create_write_items__"
    refused(told, lambda: tte.save({"w": boxed(TwoTensor(truth.clone(), truth.clone()), *boxes)}, tmp_path / "no"))
    for name, tensor in ("dense", truth.clone()), ("hooked", Hooked(truth.clone(), truth.clone())):
        tte.save({"w": boxed(tensor, *boxes)}, tmp_path / name)
        assert is_saved(tmp_path / name, {"w": truth})


STATE = {"w": torch.zeros(8, 2), "layers.0.w": torch.zeros(4, 2)}

DRY_RUNS: dict[str, tuple[Callable[[Path], Any], list[Callable[[Path], Any]]]] = {
    "Entries of placements= that fit no key (1):\n  v: matches no key on any rank; keys are such as w": (
        lambda path: tte.dry_run(STATE, mesh={"dp": 2}, placements={"v": {"dp": 1}}),
        [lambda path: tte.dry_run(STATE, mesh={"dp": 2}, placements={"w": {"dp": 1}})],
    ),
    "give one of them, or a state dict": (
        lambda path: tte.dry_run(path, checkpoint=path),
        [lambda path: tte.dry_run(path, mesh={"dp": 2}), lambda path: tte.dry_run(STATE, checkpoint=path)],
    ),
    "expected mesh={'dp': 8, 'tp': 2} or a state dict": (
        lambda path: tte.dry_run(path),
        [lambda path: tte.dry_run(path, mesh={"dp": 8, "tp": 2}), lambda path: tte.dry_run(STATE)],
    ),
    "expected checkpoint= with these in it": (
        lambda path: tte.dry_run(STATE, components=["w"]),
        [lambda path: tte.dry_run(STATE, components=["w"], checkpoint=path)],
    ),
    "give stages DTensors on meshes of their ranks": (
        lambda path: tte.dry_run([STATE, STATE], mesh={"dp": 2}),
        [lambda path: tte.dry_run([{}, STATE])],
    ),
}


@pytest.mark.parametrize("text", DRY_RUNS)
def test_arguments_of_a_dry_run(tmp_path: Path, text: str) -> None:
    tte.save(STATE, tmp_path)
    wrong, rights = DRY_RUNS[text]
    refused(text, lambda: wrong(tmp_path))
    for right in rights:
        assert not right(tmp_path).problems


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_patched_functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stock = state_dict_loader._load_state_dict
    with monkeypatch.context() as patch:
        patch.setattr(state_dict_loader, "_load_state_dict", lambda *args, **kwargs: stock(*args, **kwargs))
        refused("before; install first, or without it", tte.install)
    tte.install()
    try:
        dcp.save(dict(WEIGHTS), checkpoint_id=tmp_path / "a", no_dist=True)
        ours = state_dict_loader._load_state_dict
        with monkeypatch.context() as patch:
            patch.setattr(state_dict_loader, "_load_state_dict", lambda *args, **kwargs: ours(*args, **kwargs))
            dcp.load(target := zeros(WEIGHTS), checkpoint_id=tmp_path / "a", no_dist=True)
    finally:
        tte.integrations.uninstall()
    assert digest_value(target) == digest_value(WEIGHTS) and (tmp_path / "a" / ".tte_index").exists()


# Process groups.


@contextlib.contextmanager
def process_group(path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{path}/store", rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def test_without_a_process_group(tmp_path: Path) -> None:
    refused("call init_process_group first", lambda: tte.sync.broadcast_tensors([torch.ones(1)]))
    with process_group(tmp_path):
        tte.sync.broadcast_tensors([torch.ones(1)])


def test_processes_beside_a_process_group(tmp_path: Path) -> None:
    tte.save(WEIGHTS, tmp_path / "a")
    source, mesh = open_source(tmp_path / "a"), {"dp_shard": 2}
    with process_group(tmp_path):
        told = "which cannot be forked; pass num_processes=1, or use the command line"
        refused(told, lambda: reshard(source, tmp_path / "b", mesh=mesh, num_processes=2))
        reshard(source, tmp_path / "b", mesh=mesh, num_processes=1)
    assert is_saved(tmp_path / "b", WEIGHTS)
    assert call("reshard", tmp_path / "a", tmp_path / "c", "--mesh", "dp_shard=2", "--processes", 2).code == 0
    assert is_saved(tmp_path / "c", WEIGHTS)


def wrapped(kind: type[CastOnGather], local: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    return DTensor.from_local(kind(local.clone(), torch.float8_e4m3fn), mesh, [Shard(0)], run_check=False)


def in_a_world(rank: int, world_size: int, path: Path) -> list[str]:
    """What remedies lost of what two ranks do together."""
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp",))
    truth, lost = torch.arange(24.0).view(8, 3), []

    def cut(*placements: Any, of: DeviceMesh = mesh, tensor: torch.Tensor = truth) -> DTensor:
        return tte.full.distribute_tensor(tensor, of, placements or [Shard(0)])

    def check(name: str, is_right: bool) -> None:
        if not is_right:
            lost.append(name)

    # Groups of some ranks.
    first: Any = dist.new_group([0])
    only_first = DeviceMesh("cpu", [0], mesh_dim_names=("dp",))
    data = list(range(4))
    if rank:
        told = "this rank is not in the process group; call it on the group's ranks only"
        refused(told, lambda: tte.save(WEIGHTS, path / "first", process_group=first))
        refused(
            "is not in the group; call it on its ranks only", lambda: tte.sync.broadcast_tensors([truth], group=first)
        )
        told = "make the loader on its ranks only"
        refused(told, lambda: ElasticDataLoader(data, batch_size=2, mesh=only_first))
    else:
        tte.save(WEIGHTS, path / "first", process_group=first)
        tte.sync.broadcast_tensors([truth.clone()], group=first)
        found = [one for batch in ElasticDataLoader(data, batch_size=2, mesh=only_first) for one in batch.tolist()]
        check("mesh of some ranks", sorted(found) == data)
    dist.barrier()
    check("group of some ranks", is_saved(path / "first", WEIGHTS))

    # Saves and loads.
    load: dict[str, Any] = {"share_reads": rank == 0}
    refused("pass the same on every rank", lambda: is_saved(path / "first", WEIGHTS, **load))
    for share in (True, False):
        check(f"share_reads={share}", is_saved(path / "first", WEIGHTS, share_reads=share))
    dcp.save({"w": cut()}, checkpoint_id=path / "own", use_collectives=False)
    told = "load it without a policy, on the ranks of the save"
    target = {"w": cut(tensor=torch.zeros(8, 3))}
    refused(told, lambda: tte.load(target, path / "own", policy=ElasticPolicy()))
    refused("load on the mesh of the save", lambda: tte.load({"w": cut(Shard(1))}, path / "own"))
    tte.load(target, path / "own")
    check("on the ranks of the save", torch.equal(tte.full_tensor(target["w"]), truth))
    tte.save({"pair": (torch.ones(2), 3)}, path / "pair")
    pair: dict[str, Any] = {"pair": (cut(tensor=torch.zeros(2)), 0)}
    refused("load plain tensors there", lambda: tte.load(pair, path / "pair"))
    tte.load(pair := {"pair": (torch.zeros(2), 0)}, path / "pair")
    check("plain tensors", digest_value(pair) == digest_value({"pair": (torch.ones(2), 3)}))
    tied = {"a": truth, "b": truth if rank else truth.clone()}
    refused("tie it on all or none", lambda: tte.weights.save(tied, path / "tied"))
    for name, one in ("all", truth), ("none", truth.clone()):
        tte.weights.save({"a": truth, "b": one}, path / name)
        check(f"tied on {name}", is_saved(path / name, {"a": truth, "b": truth}))

    # Transfers.
    plans = []
    for number in range(2):
        target = {"w": cut(Shard(1), tensor=torch.zeros(8, 3))}
        plans.append((tte.transfer.plan_reshard({"w": cut(tensor=truth + number)}, target), target))
    refused("run plans in one order on all ranks", plans[rank][0].run)
    for number, (plan, target) in enumerate(plans):
        plan.run()
        check("one order", torch.equal(tte.full_tensor(target["w"]), truth + number))

    return lost


def on_meshes_of_their_own(rank: int, world_size: int, path: Path) -> list[Any]:
    """What remedies lost of replicas and wrapper subclasses."""
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp",))
    meshes = [DeviceMesh("cpu", [one], mesh_dim_names=("dp",)) for one in range(world_size)]
    truth, lost = torch.arange(24.0).view(8, 3), []

    def check(name: str, is_right: bool) -> None:
        if not is_right:
            lost.append(name)

    # Replicas.
    own = meshes[rank]
    told = "pass one that holds all ranks of the module"
    refused(told, lambda: tte.sync_module_states({"w": tte.full.distribute_tensor(truth, mesh, [Replicate()])}, own))
    different = DTensor.from_local(truth + rank, mesh, [Replicate()], run_check=False)
    tte.sync_module_states({"w": different}, mesh)
    check("mesh of all ranks", torch.equal(different.to_local(), truth))
    apart = {"v": DTensor.from_local(truth, own, [Shard(0) if rank else Replicate()], run_check=False)}
    alike = {"v": DTensor.from_local(truth + rank, own, [Replicate()], run_check=False)}
    with pytest.warns(UserWarning, match="; shard replicas alike, or pass mesh= of the ranks that share them"):
        tte.check_replicas(apart)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check("mesh of the ranks that share", tte.check_replicas(apart, own) == ())
        check("alike", [one.fqn for one in tte.check_replicas(alike)] == ["v"])

    # Wrapper subclasses.
    with torch.serialization.safe_globals(ALLOWED):
        tte.save({"w": tte.full.distribute_tensor(truth, mesh, [Shard(1)])}, path / "columns")
        tte.save({"w": wrapped(CastOnGather, truth[4 * rank : 4 * rank + 4], mesh)}, path / "rows")
        target = {"w": wrapped(CopiedSlices, torch.zeros(4, 3), mesh)}
        told = "load into a tensor of the saved layout, or one without the subclass"
        refused(told, lambda: tte.load(target, path / "columns"))
        tte.load(target, path / "rows")
        check("of the saved layout", torch.equal(target["w"].to_local().weight, truth[4 * rank : 4 * rank + 4]))
        target = {"w": tte.full.distribute_tensor(torch.zeros(8, 3), mesh, [Shard(0)])}
        tte.load(target, path / "columns")
        check("without the subclass", torch.equal(tte.full_tensor(target["w"]), truth))
    return lost


def test_on_meshes_of_their_own(run_world, tmp_path: Path) -> None:
    assert run_world(2, on_meshes_of_their_own, tmp_path) == [[], []]


def test_in_a_world(run_world, tmp_path: Path) -> None:
    assert run_world(2, in_a_world, tmp_path) == [[], []]


# Operators, and wrappers without memory.


def exchanged(source: torch.Tensor) -> torch.Tensor:
    """What this rank sends itself."""
    target, table = torch.zeros(2, 3), torch.tensor([0, 0, -1, 2, 0, 0, 2, 3])
    ops.exchange_runs_([source], [target], table, table, group_name="")
    return target


def test_what_an_exchange_takes() -> None:
    refused("sources[0] is on the meta device; give it memory first", lambda: exchanged(WEIGHTS["w"].to("meta")))
    memory = torch.empty_like(WEIGHTS["w"].to("meta"), device="cpu").copy_(WEIGHTS["w"])
    wrapper = TwoTensor(WEIGHTS["w"], WEIGHTS["w"])
    refused("got a TwoTensor in sources; pass the rank's own plain tensor", lambda: exchanged(wrapper))
    assert torch.equal(exchanged(memory), WEIGHTS["w"]) and torch.equal(exchanged(wrapper.a), WEIGHTS["w"])


def test_wrappers_on_the_meta_device(tmp_path: Path) -> None:
    weight = BlockInt8.of(WEIGHTS["w"], 2)
    tte.save({"w": weight.dense()}, tmp_path)
    target = BlockInt8(weight.codes.to("meta"), weight.scale.to("meta"), 2)
    with torch.serialization.safe_globals([BlockInt8]):
        refused("give it memory before the load", lambda: tte.load({"w": target}, tmp_path))
        target = BlockInt8(torch.zeros_like(weight.codes), torch.ones_like(weight.scale), 2)
        tte.load({"w": target}, tmp_path)
    assert torch.equal(target.dense(), weight.dense())
