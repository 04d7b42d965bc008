"""What messages tell the user to do: followed to the letter, it succeeds and loses only what the message named.

Other tests follow a rename of keys (``checkpoint/rules/test_missing_keys.py``), ``layouts=``
(``distributed/test_refusals.py``), a number of virtual shards (``elastic/data/test_stream_batches.py``).
"""

import ast
import enum
import itertools
import os
import re
import shlex
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from calls import call
from remedies import is_saved, refused
from states import save_of_run
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import torchtitan_ext as tte
from torchtitan_ext import transforms
from torchtitan_ext.elastic import (
    ElasticDataLoader,
    ElasticPolicy,
    Source,
    Streams,
    TrainState,
)
from torchtitan_ext.state.value_digest import digest_value
from torchtitan_ext.storage.commit.commit import lock_path
from torchtitan_ext.storage.commit.save_lock import SaveLock
from torchtitan_ext.transforms import Rule, Transform

Act = Callable[[Path], Any]


def stepped(seed: int = 0) -> tuple[nn.Linear, torch.optim.AdamW]:
    torch.manual_seed(seed)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 + seed)
    model(torch.rand(3)).sum().backward()
    optimizer.step()
    return model, optimizer


def state(seed: int = 0) -> dict[str, Any]:
    """Weights, moments, options and a number: all of them others with another seed."""
    model, optimizer = stepped(seed)
    return {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer), "step": seed}


def is_whole(path: Path | None, **options: Any) -> bool:
    """Whether a load gets all of the state, bit for bit."""
    target = state(1)
    tte.load(target, path, **options)
    return digest_value(target) == digest_value(state())


# Arguments: what is refused, and what the message says to call instead.

WEIGHTS: dict[str, Any] = {"weight": torch.arange(6.0).view(2, 3) + 0.001, "bias": torch.ones(2)}
RENAME = Transform([Rule("model.**", "net.**"), Rule("**", "**")])

SAVES: dict[str, tuple[Act, Act]] = {
    "exchange them": (lambda run: tte.save(run / "b", state()), lambda run: tte.save(state(), run / "b")),
    "expected a dict: {'model': model}, or model.state_dict()": (
        lambda run: tte.save(stepped()[0], run / "b"),
        lambda run: tte.save({**state(), "model": stepped()[0]}, run / "b"),
    ),
    "got the class TrainState for train, expected an instance of it": (
        lambda run: tte.save({**state(), "train": TrainState}, run / "b"),
        lambda run: tte.save({**state(), "train": TrainState()}, run / "b"),
    ),
    "expected a DCP storage writer, such as FileSystemWriter(path)": (
        lambda run: tte.save(state(), storage_writer=FileSystemWriter),
        lambda run: tte.save(state(), storage_writer=FileSystemWriter(run / "b")),
    ),
    "give it to the writer: FileWriter(path, fingerprints=True)": (
        lambda run: tte.save(state(), storage_writer=tte.FileWriter(run / "b"), fingerprints=True),
        lambda run: tte.save(state(), storage_writer=tte.FileWriter(run / "b", fingerprints=True)),
    ),
    "has a checkpoint; pass overwrite=True": (
        lambda run: tte.save(state(), storage_writer=tte.FileWriter(run / "a", overwrite=False)),
        lambda run: os.rename(tte.save(state(), storage_writer=tte.FileWriter(run / "a")).path, run / "b"),
    ),
    "pass overwrite=True or another directory": (
        lambda run: tte.save(state(), storage_writer=tte.FileWriter(run / "a", overwrite=False)),
        lambda run: tte.save(state(), storage_writer=tte.FileWriter(run / "b", overwrite=False)),
    ),
    "this writer stages nothing; pass async_stager= to dcp.async_save, or call tte.async_save": (
        lambda run: tte.FileWriter(run / "b", cache_staged_state_dict=True),
        lambda run: tte.async_save(state(), run / "b").result(),
    ),
}


@pytest.mark.filterwarnings("ignore:the checkpoint in .* is overwritten")
@pytest.mark.parametrize("text", SAVES)
def test_arguments_of_a_save(tmp_path: Path, text: str) -> None:
    tte.save(state(), tmp_path / "a", fingerprints=True)
    wrong, right = SAVES[text]
    refused(text, lambda: wrong(tmp_path))
    assert not (tmp_path / "b").exists()
    right(tmp_path)
    assert is_whole(tmp_path / "b")


LOADS: dict[str, tuple[Callable[[Path], dict[str, Any]], Callable[[Path], dict[str, Any]]]] = {
    "give it to the planner: LoadPlanner(cast='allow')": (
        lambda run: {"path": run / "step-1", "planner": tte.LoadPlanner(), "cast": "allow"},
        lambda run: {"path": run / "step-1", "planner": tte.LoadPlanner(cast="allow")},
    ),
    "got a policy and a planner with a policy, expected one of them": (
        lambda run: {
            "path": run / "step-1",
            "planner": tte.LoadPlanner(policy=ElasticPolicy()),
            "policy": ElasticPolicy(),
        },
        lambda run: {"path": run / "step-1", "planner": tte.LoadPlanner(policy=ElasticPolicy())},
    ),
    "give it to that: Source(storage_reader=...)": (
        lambda run: {"path": Source(run / "step-1"), "storage_reader": tte.FileReader(run / "step-1")},
        lambda run: {"path": Source(storage_reader=tte.FileReader(run / "step-1"))},
    ),
    "give it to that: Source(path, transform=...)": (
        lambda run: {"path": Source(run / "step-1"), "transform": Transform([Rule("**", "**")])},
        lambda run: {"path": Source(run / "step-1", transform=Transform([Rule("**", "**")]))},
    ),
    "got step_pattern='step-{step}' and no step, expected step='latest' or a number": (
        lambda run: {"path": run, "step_pattern": "step-{step}"},
        lambda run: {"path": run, "step_pattern": "step-{step}", "step": 1},
    ),
    "got step=1 without a path, expected the directory of the run": (
        lambda run: {"step": 1, "storage_reader": tte.FileReader(run / "step-1")},
        lambda run: {"step": 1, "path": run},
    ),
    "pass step='latest', or step=1": (lambda run: {"path": run}, lambda run: {"path": run, "step": "latest"}),
    "or step=1": (lambda run: {"path": run}, lambda run: {"path": run, "step": 1}),
    "it is a checkpoint itself: load it without step=": (
        lambda run: {"path": run / "step-1", "step": "latest"},
        lambda run: {"path": run / "step-1"},
    ),
    "or give its run: ": (
        lambda run: {"path": run / "step-1", "step": "latest"},
        lambda run: {"path": run, "step": "latest"},
    ),
    "near it are step-1": (lambda run: {"path": run / "step_1"}, lambda run: {"path": run / "step-1"}),
    "save with tte.save(..., fingerprints=True), or load without prove": (
        lambda run: {"path": run / "step-1", "prove": True},
        lambda run: {"path": run / "proved" / "a", "prove": True},
    ),
    "or load without prove": (
        lambda run: {"path": run / "step-1", "prove": True},
        lambda run: {"path": run / "step-1"},
    ),
    "perhaps 'optimizer' is meant; correct it, or leave it out": (
        lambda run: {"path": run / "step-1", "policy": ElasticPolicy({"optimzer": "reshard"})},
        lambda run: {"path": run / "step-1", "policy": ElasticPolicy({"optimizer": "reshard"})},
    ),
    "matches no key; perhaps 'step' is meant": (
        lambda run: {"path": run / "step-1", "planner": tte.LoadPlanner(source=Source(include=["*.*", "stp"]))},
        lambda run: {"path": run / "step-1", "planner": tte.LoadPlanner(source=Source(include=["*.*", "step"]))},
    ),
    "it holds a checkpoint, name one: a": (
        lambda run: {"path": run / "proved"},
        lambda run: {"path": run / "proved" / "a"},
    ),
}


@pytest.mark.parametrize("text", LOADS)
def test_arguments_of_a_load(tmp_path: Path, text: str) -> None:
    tte.save(state(), tmp_path / "step-1")
    tte.save(state(), tmp_path / "proved" / "a", fingerprints=True)
    wrong, right = LOADS[text]
    refused(text, lambda: is_whole(**{"path": None, **wrong(tmp_path)}))
    assert is_whole(**{"path": None, **right(tmp_path)})


# Values that no save writes, and what to save instead.

NESTED = torch.nested.nested_tensor([torch.ones(2), torch.arange(3.0)])
SPARSE = torch.eye(3).to_sparse()
QUANTISED = torch.quantize_per_tensor(torch.arange(4.0), 0.5, 0, torch.qint8)
FAKE = FakeTensorMode().from_tensor(torch.ones(2))
ROUND: dict[str, Any] = {"a": 1}
ROUND["self"] = ROUND
COMPLEX = torch.ones(2, dtype=torch.complex128)


class Counter:
    """A component without a rule for other ranks."""

    def __init__(self, count: int = 0) -> None:
        self.count = count

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count = state_dict["count"]


VALUES: dict[str, tuple[Any, Any, dict[str, str]]] = {
    "it stands at ('x', 'y') and at ('x.y',); rename one of them": (
        {"x": {"y": 1}, "x.y": 2},
        {"x": {"y": 1}, "z": 2},
        {},
    ),
    "leave that reference out": ({"x": ROUND}, {"x": {"a": 1}}, {}),
    "on the meta device and holds no data; materialise it before saving": (
        {"x": torch.ones(2, device="meta")},
        {"x": torch.empty_like(torch.ones(2, device="meta"), device="cpu").fill_(1)},
        {},
    ),
    "is torch.sparse_coo; convert it with .to_dense() first": ({"x": SPARSE}, {"x": SPARSE.to_dense()}, {}),
    "is a fake tensor, which has no values; give it memory outside of FakeTensorMode": (
        {"x": FAKE},
        {"x": torch.ones(FAKE.shape)},
        {},
    ),
    "is quantised; convert it with .dequantize() first": ({"x": QUANTISED}, {"x": QUANTISED.dequantize()}, {}),
    "which has no one shape; store list(tensor.unbind())": ({"x": NESTED}, {"x": list(NESTED.unbind())}, {}),
    "keep to plain values": ({"x": lambda: 0}, {"x": 0}, {}),
    "safetensors files keep their notes under this name; give it another one": (
        {"__metadata__": torch.ones(2)},
        {"metadata": torch.ones(2)},
        {"weights": True},
    ),
    "is complex128, which safetensors files have no name for; cast it": (
        {"x": COMPLEX},
        {"x": COMPLEX.to(torch.complex64)},
        {"weights": True},
    ),
    "and safetensors files have nothing else; leave it out": (
        {"x": torch.ones(2), "step": 1},
        {"x": torch.ones(2)},
        {"weights": True},
    ),
}


def others(value: Any) -> Any:
    """The same keys and shapes with other values."""
    if isinstance(value, Mapping):
        return {key: others(member) for key, member in value.items()}
    if isinstance(value, (list, tuple)):
        return [others(member) for member in value]
    return torch.full_like(value, 9) if isinstance(value, torch.Tensor) else None


@pytest.mark.parametrize("text", VALUES)
def test_values_that_a_save_refuses(tmp_path: Path, text: str) -> None:
    wrong, right, form = VALUES[text]
    save = tte.weights.save if form else tte.save
    refused(text, lambda: save({**wrong, "kept": torch.arange(3.0)}, tmp_path))
    right["kept"] = torch.arange(3.0)
    save(right, tmp_path)
    target = others(right)
    tte.load(target, tmp_path)
    assert digest_value(target) == digest_value(right)


def test_what_safetensors_cannot_hold_is_saved_as_a_checkpoint(tmp_path: Path) -> None:
    refused("or save it as a checkpoint", lambda: tte.weights.save(state(), tmp_path))
    tte.save(state(), tmp_path)
    assert is_whole(tmp_path)


# Targets that a load does not fill.

SAVED: dict[str, Any] = {"w": torch.arange(6.0).view(2, 3) + 0.001, "step": 7, "seen": torch.tensor(5)}

TARGETS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "build the model with the saved size": ({"w": torch.zeros(4, 3)}, {"w": torch.zeros(2, 3)}, {}),
    "for w; build the model with the saved size, or leave the key out": ({"w": torch.zeros(4, 3)}, {}, {}),
    "values can change; pass cast='allow' to accept that": (
        {"w": torch.zeros(2, 3, dtype=torch.bfloat16)},
        {"w": torch.zeros(2, 3, dtype=torch.bfloat16)},
        {"cast": "allow"},
    ),
    "cast='forbid' allows no change of dtype; use a target of that dtype": (
        {"w": torch.zeros(2, 3, dtype=torch.float64)},
        {"w": torch.zeros(2, 3)},
        {"cast": "forbid"},
    ),
    "the kind of number would change; convert it yourself": (
        {"w": torch.zeros(2, 3, dtype=torch.int32)},
        {"w": torch.zeros(2, 3)},
        {},
    ),
    "the checkpoint has a tensor, the target is a non-tensor value; put a target of the saved kind there": (
        {"w": "text"},
        {"w": torch.zeros(2, 3)},
        {},
    ),
    "the checkpoint has a non-tensor value, the target is a tensor; put a target of the saved kind there": (
        {"step": torch.zeros(2)},
        {"step": 0},
        {},
    ),
    "several elements of the target share memory; load into a clone() of it": (
        {"w": torch.zeros(1, 3).expand(2, 3)},
        {"w": torch.zeros(1, 3).expand(2, 3).clone()},
        {},
    ),
    "Missing key in checkpoint state_dict: stepp. Nearest: step.": ({"stepp": 0}, {"step": 0}, {}),
}


@pytest.mark.parametrize("text", TARGETS)
def test_targets_that_a_load_refuses(tmp_path: Path, text: str) -> None:
    wrong, right, options = TARGETS[text]
    tte.save(SAVED, tmp_path)
    forbid = {key: value for key, value in options.items() if value == "forbid"}
    refused(text, lambda: tte.load({"seen": torch.tensor(0), **wrong}, tmp_path, **forbid))
    target = {"seen": torch.tensor(0), **right}
    tte.load(target, tmp_path, **options)
    for key, value in target.items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(SAVED[key]).to(torch.as_tensor(value).dtype))


def test_an_optimizer_with_gradients_and_no_state(tmp_path: Path) -> None:
    """With gradients ``get_optimizer_state_dict`` makes no state."""
    _, optimizer = stepped()
    tte.save({"optimizer": optimizer}, tmp_path)
    model = nn.Linear(3, 2)
    fresh = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    before = digest_value(model.state_dict())
    text = refused("call optimizer.zero_grad() and torch.", lambda: tte.load({"optimizer": fresh}, tmp_path))
    assert "get_optimizer_state_dict(model, optimizer) first" in text
    fresh.zero_grad()
    get_optimizer_state_dict(model, fresh)
    tte.load({"optimizer": fresh}, tmp_path)
    assert digest_value(fresh.state_dict()) == digest_value(optimizer.state_dict())
    assert digest_value(model.state_dict()) == before


def test_entries_that_nothing_asks_for(tmp_path: Path) -> None:
    tte.save(state(), tmp_path)
    part = {**state(1), "model": {"weight": torch.zeros(2, 3)}}
    with pytest.warns(UserWarning, match="put targets for them into the state dict") as caught:
        tte.load(part, tmp_path)
    planner = re.search(r"pass (LoadPlanner\(.*\))$", str(caught[0].message))
    assert planner is not None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert is_whole(tmp_path)
        part = {**state(1), "model": {"weight": torch.zeros(2, 3)}}
        tte.load(part, tmp_path, planner=eval(planner[1], {"LoadPlanner": tte.LoadPlanner, "Source": Source}))
    assert digest_value(part) == digest_value({**state(), "model": {"weight": state()["model"]["weight"]}})


class Colour(enum.Enum):
    RED = 1


@dataclass
class Options:
    colour: Colour


def test_classes_of_ones_own(tmp_path: Path) -> None:
    saved = {**SAVED, "options": Options(Colour.RED)}
    with pytest.warns(UserWarning, match=r"in the job that loads pass allow_classes=\[(.*)\] to LoadPlanner") as caught:
        tte.save(saved, tmp_path)
    named = re.search(r"allow_classes=\[(.*?)\]", str(caught[0].message))
    text = refused("or weights_only=False to LoadPlanner or tte.install", lambda: tte.load(others(saved), tmp_path))
    assert named is not None and named[0] in text
    classes = [globals()[name.rpartition(".")[2]] for name in named[1].split(", ")]
    assert classes == [Colour, Options]
    for options in (
        {"planner": tte.LoadPlanner(allow_classes=classes)},
        {"planner": tte.LoadPlanner(weights_only=False)},
    ):
        tte.load(target := others(saved), tmp_path, **options)
        assert target.pop("options") == saved["options"] and digest_value(target) == digest_value(SAVED)


def test_a_component_below_the_top(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"is not asked for its state: pass its state_dict\(\)"):
        tte.save({"parts": {"counter": Counter(3)}}, tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tte.save({"parts": {"counter": Counter(3).state_dict()}}, tmp_path / "other")
    target = {"parts": {"counter": Counter().state_dict()}}
    tte.load(target, tmp_path / "other")
    assert target == {"parts": {"counter": {"count": 3}}}


class PerRank:
    """Entries of single ranks, and no rule for others."""

    def __init__(self, ranks: range) -> None:
        self.counts = {f"rank_{rank}": 10 + rank for rank in ranks}

    def state_dict(self) -> dict[str, Any]:
        return dict(self.counts)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.counts = dict(state_dict)


class Resharding(PerRank):
    def reshard(self, saved: Mapping[str, Any], old: object, new: object) -> tte.elastic.Resharded:
        return tte.elastic.Resharded({"rank_0": sum(saved[key] for key in saved)}, "summed")


def test_entries_of_ranks_that_are_not_there(tmp_path: Path) -> None:
    tte.save({"data": PerRank(range(2)), "step": 3}, tmp_path)
    fewer = {"data": PerRank(range(1)), "step": 0}
    text = refused("load on as many ranks as saved, give the component", lambda: tte.load(fewer, tmp_path))
    more = {"data": PerRank(range(3)), "step": 0}
    refused("among other ranks: give the component a method reshard", lambda: tte.load(more, tmp_path))
    dropped = re.search(r"LoadPlanner\(allow_unclaimed=.*\)", text)
    assert dropped is not None
    tte.load(fewer, tmp_path, planner=eval(dropped[0], {"LoadPlanner": tte.LoadPlanner}))
    assert (fewer["data"].counts, fewer["step"]) == ({"rank_0": 10}, 3)  # type: ignore[attr-defined]
    for ranks in (1, 2, 3):
        target: dict[str, Any] = {"data": Resharding(range(ranks)), "step": 0}
        tte.load(target, tmp_path)
        assert (target["data"].counts, target["step"]) == ({"rank_0": 21}, 3)


# Optimizers.


def of_layers(
    num: int, *, named: bool = True, groups: tuple[float, ...] = ()
) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(num)
    model = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(num)))
    params: Any = list(model.named_parameters() if named else model.parameters())
    if groups:
        params = [{"params": [one], "lr": lr} for one, lr in zip(params, groups, strict=True)]
    optimizer = torch.optim.AdamW(params, lr=0.1)
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    return model, optimizer


def moments(optimizer: torch.optim.Optimizer, number: int) -> Any:
    return digest_value(list(optimizer.state.values())[number])


def test_parameters_without_names(tmp_path: Path) -> None:
    policy = ElasticPolicy({"optimizer.state.1.*": "reset"})
    unnamed, named = of_layers(1, named=False), of_layers(1)
    tte.save({"optimizer": unnamed[1]}, tmp_path / "unnamed")
    tte.save({"optimizer": named[1]}, tmp_path / "named")
    model, current = of_layers(2, named=False)
    both = (
        "save it again by the job that has these, and load it, with an optimizer built from named_parameters(), or by"
    )
    refused(both, lambda: tte.load({"optimizer": current}, tmp_path / "unnamed", policy=policy))
    refused(both, lambda: tte.load({"optimizer": of_layers(2)[1]}, tmp_path / "unnamed", policy=policy))
    here = "by name, this optimizer has 2 without: which is which cannot be told; load it into an optimizer built from"
    refused(here, lambda: tte.load({"optimizer": current}, tmp_path / "named", policy=policy))
    current = of_layers(2)[1]
    own = moments(current, 1)
    tte.load({"optimizer": current}, tmp_path / "named", policy=policy)
    assert (moments(current, 0), moments(current, 1)) == (moments(named[1], 0), own)
    tte.save({"optimizer": get_optimizer_state_dict(*unnamed)}, tmp_path / "again")
    model, current = of_layers(2, named=False)
    here = "has 2 by position: which is which cannot be told; load it into get_optimizer_state_dict(model, optimizer)"
    refused(here, lambda: tte.load({"optimizer": current}, tmp_path / "again", policy=policy))
    target = {"optimizer": get_optimizer_state_dict(model, current)}
    tte.load(target, tmp_path / "again", policy=policy)
    truth = get_optimizer_state_dict(*unnamed)["state"]["0.weight"]
    assert digest_value(target["optimizer"]["state"]["0.weight"]) == digest_value(truth)


def test_parameters_at_other_positions(tmp_path: Path) -> None:
    model, optimizer = of_layers(2)
    turned, other = of_layers(2)
    other = torch.optim.AdamW(list(turned.named_parameters())[::-1], lr=0.1)
    other.step()
    tte.save({"optimizer": optimizer}, tmp_path / "a")
    told = "save and load by get_optimizer_state_dict, which goes by name"
    refused(told, lambda: tte.load({"optimizer": other}, tmp_path / "a", policy=ElasticPolicy()))
    tte.save({"optimizer": get_optimizer_state_dict(model, optimizer)}, tmp_path / "b")
    target = {"optimizer": get_optimizer_state_dict(turned, other)}
    tte.load(target, tmp_path / "b", policy=ElasticPolicy())
    truth = get_optimizer_state_dict(model, optimizer)["state"]
    assert {name: digest_value(of) for name, of in target["optimizer"]["state"].items()} == {
        name: digest_value(of) for name, of in truth.items()
    }


def test_groups_that_are_joined(tmp_path: Path) -> None:
    _, optimizer = of_layers(2, groups=(0.1, 0.2))
    tte.save({"optimizer": optimizer}, tmp_path / "a")
    told = "keep them in groups of their own, or make the values equal before the save"
    policy = ElasticPolicy()
    refused(told, lambda: tte.load({"optimizer": of_layers(2)[1]}, tmp_path / "a", policy=policy))
    apart = of_layers(2, groups=(0.5, 0.5))[1]
    tte.load({"optimizer": apart}, tmp_path / "a", policy=policy)
    assert digest_value(apart.state_dict()) == digest_value(optimizer.state_dict())
    optimizer.param_groups[1]["lr"] = 0.1
    tte.save({"optimizer": optimizer}, tmp_path / "b")
    joined = of_layers(2)[1]
    tte.load({"optimizer": joined}, tmp_path / "b", policy=policy)
    assert [moments(joined, number) for number in (0, 1)] == [moments(optimizer, number) for number in (0, 1)]
    assert joined.param_groups[0]["lr"] == 0.1


# Paths and files.


def test_a_file_of_torch_save(tmp_path: Path) -> None:
    path = tmp_path / "old runs" / "model.pt"
    path.parent.mkdir()
    torch.save(SAVED, path)
    text = refused("write it as DCP first: torchtitan-ext convert", lambda: tte.load(others(SAVED), path))
    _, *words = shlex.split(re.search(r"torchtitan-ext .*", text)[0])  # type: ignore[index]
    assert call(*(str(tmp_path / "new") if word == "<directory>" else word for word in words)).code == 0
    tte.load(target := others(SAVED), tmp_path / "new")
    assert digest_value(target) == digest_value(SAVED)


def test_safetensors_and_a_reader_of_dcp(tmp_path: Path) -> None:
    tte.weights.save(WEIGHTS, tmp_path)
    reader = FileSystemReader(tmp_path)
    told = "leave storage_reader out, tte.load reads them"
    refused(told, lambda: tte.load(others(WEIGHTS), tmp_path, storage_reader=reader))
    tte.load(target := others(WEIGHTS), tmp_path)
    assert digest_value(target) == digest_value(WEIGHTS)


def test_a_tensor_in_two_files(tmp_path: Path) -> None:
    for name in "ab":
        tte.weights.save(WEIGHTS, tmp_path / name)
        (tmp_path / name / "model.safetensors").rename(tmp_path / f"{name}.safetensors")
    refused("(a.safetensors, b.safetensors); leave it in one", lambda: tte.load(others(WEIGHTS), tmp_path))
    (tmp_path / "b.safetensors").unlink()
    tte.load(target := others(WEIGHTS), tmp_path)
    assert digest_value(target) == digest_value(WEIGHTS)


def test_weights_beside_a_checkpoint(tmp_path: Path) -> None:
    tte.weights.save(WEIGHTS, tmp_path / "a", max_file_bytes=20)
    for _ in range(2):
        told = refused("save to another directory, or remove them first", lambda: tte.save(state(), tmp_path / "a"))
        (tmp_path / "a" / re.search(r"holds (\S+),", told)[1]).unlink()  # type: ignore[index]
    tte.save(state(), tmp_path / "a")
    tte.save(state(), tmp_path / "b")
    assert is_whole(tmp_path / "a") and is_whole(tmp_path / "b")
    told = "of a checkpoint of DCP; use another directory"
    refused(told, lambda: tte.weights.save(WEIGHTS, tmp_path / "a"))
    tte.weights.save(WEIGHTS, tmp_path / "c")
    tte.load(target := others(WEIGHTS), tmp_path / "c")
    assert is_whole(tmp_path / "a") and digest_value(target) == digest_value(WEIGHTS)
    told = "expected a directory, in which the files are made; leave .safetensors out"
    refused(told, lambda: tte.weights.save(WEIGHTS, tmp_path / "d.safetensors"))
    tte.weights.save(WEIGHTS, tmp_path / "d")


@pytest.mark.filterwarnings("ignore:save. the run goes on with step")
def test_a_step_below_others(tmp_path: Path) -> None:
    for step in (1, 2):
        tte.save(state(step), tmp_path / "run" / f"step-{step}")
    tte.save(state(), tmp_path / "run" / "step-0")
    assert is_whole(tmp_path / "run", step="latest")
    told = refused("load it by its path: ", lambda: tte.load(state(1), tmp_path / "run", step=2))
    aside = Path(told.rpartition("load it by its path: ")[2])
    tte.load(target := state(1), aside)
    assert digest_value(target) == digest_value(state(2))


def test_a_run_whose_steps_have_several_names(tmp_path: Path) -> None:
    for name in ("checkpoint_1", "checkpoint-2"):
        tte.save(state(), tmp_path / name)
    told = refused("choose one: step_pattern=", lambda: tte.load(state(1), tmp_path, step="latest"))
    for pattern in re.findall(r"'([^']+)'", told.partition("choose one: ")[2]):
        assert is_whole(tmp_path, step="latest", step_pattern=pattern)


def test_steps_of_several_checkpoints(tmp_path: Path) -> None:
    for name in ("model", "optimizer"):
        tte.save(state(), tmp_path / "step-1" / name)
    told = refused("load them one by one: ", lambda: tte.load(state(1), tmp_path, step="latest"))
    assert is_whole(Path(re.search(r"one by one: ([^;]+)", told)[1]))  # type: ignore[index]


def test_a_run_whose_disk_is_away(tmp_path: Path) -> None:
    run, fallback = tmp_path / "run", tmp_path / "fallback"

    def is_resumed(step: int | None = None) -> bool:
        target = state(1)
        with tte.CheckpointManager(run, fallback=fallback) as manager:
            manager.resume(target, step=step)
        return digest_value(target) == digest_value(state())

    run.write_text("no directory")
    save_of_run(state(), run / "step-3", fallback=fallback)
    run.unlink()
    told = refused("to go on from the fallback", is_resumed)
    assert is_resumed(int(re.search(r"pass step=(\d+)", told)[1]))  # type: ignore[index]
    run.mkdir()
    tte.save(state(), run / "step-1")
    assert is_resumed()
    shutil.rmtree(run)
    shutil.rmtree(re.search(r"the fallback (\S+) has step", told)[1])  # type: ignore[index]
    tte.save(state(), run / "step-1")
    assert is_resumed()


READERS = {"FileReader": tte.FileReader}


def reader_of(told: str, path: Path) -> tte.FileReader:
    return eval(re.search(r"storage_reader=(FileReader\(path, verify='\w+'\))", told)[1], READERS, {"path": path})  # type: ignore[index]


@pytest.mark.filterwarnings("ignore:.*index")
def test_damage(tmp_path: Path) -> None:
    for step in (1, 2):
        tte.save(state(), tmp_path / f"step-{step}")
    path = tmp_path / "step-2"
    (data,) = path.glob("*.distcp")
    was = data.read_bytes()
    at = was.index(state()["model"]["weight"].numpy().tobytes())
    data.write_bytes(was[:at] + bytes(4) + was[at + 4 :])
    told = refused("load another step (of a run step='last-good' finds one)", lambda: tte.load(state(1), path))
    with pytest.warns(UserWarning, match="step 1 is loaded, 1 newer skipped"):
        assert is_whole(tmp_path, step="last-good")
    target = state(1)
    tte.load(target, storage_reader=reader_of(told, path))
    assert target["model"]["weight"].flatten()[0] == 0
    target["model"]["weight"].view(-1)[0] = state()["model"]["weight"].view(-1)[0]
    assert digest_value(target) == digest_value(state())
    data.write_bytes(was)
    (path / ".tte_index").write_bytes(b"no index")
    told = refused("reads without the index and its checksums", lambda: tte.load(state(1), path))
    assert is_whole(None, storage_reader=reader_of(told, path))


def test_a_save_that_is_gone(tmp_path: Path) -> None:
    lock = lock_path(tmp_path / "a")
    told = "wait for it, end it, or save to another directory"
    with ThreadPoolExecutor() as pool:
        other = pool.submit(SaveLock.acquire, lock, "1" * 32, tmp_path / "a").result()
        assert f"If it is gone, remove {lock}" in refused(told, lambda: tte.save(state(), tmp_path / "a"))
        tte.save(state(), tmp_path / "b")
        lock.unlink()
        tte.save(state(), tmp_path / "a")
        other.release()
    assert is_whole(tmp_path / "a") and is_whole(tmp_path / "b")


# Transforms.

RULES: dict[str, tuple[list[Any], list[Any], list[str], dict[str, Any]]] = {
    "bias: no rule takes it; give it a rule": (
        [Rule("weight", "w")],
        [Rule("weight", "w"), Rule("bias", "b")],
        [],
        {"w": WEIGHTS["weight"], "b": WEIGHTS["bias"]},
    ),
    "or name it in drop": ([Rule("weight", "w")], [Rule("weight", "w")], ["bias"], {"w": WEIGHTS["weight"]}),
    "w: several rules fill it; leave one of them": (
        [Rule("weight", "w"), Rule(["weight"], "w", [transforms.transpose(0, 1)]), Rule("bias", "b")],
        [Rule("weight", "w"), Rule("bias", "b")],
        [],
        {"w": WEIGHTS["weight"], "b": WEIGHTS["bias"]},
    ),
}


@pytest.mark.parametrize("text", RULES)
def test_rules_of_a_transform(tmp_path: Path, text: str) -> None:
    wrong, right, drop, truth = RULES[text]
    tte.save(WEIGHTS, tmp_path)
    refused(text, lambda: tte.load(others(truth), tmp_path, transform=Transform(wrong)))
    tte.load(target := others(truth), tmp_path, transform=Transform(right, drop=drop))
    assert digest_value(target) == digest_value(truth)


@pytest.mark.parametrize(
    ("text", "wrong", "right"),
    [
        ("give it sizes= or parts=", transforms.concat(0), transforms.concat(0, sizes=[2, 2])),
        ("sizes= or parts=", transforms.concat(0), transforms.concat(0, parts=2)),
        ("give it was=", transforms.reshape([4]), transforms.reshape([4], was=[2, 2])),
        ("cast has no inverse; give it was=", transforms.cast("float64"), transforms.cast("float64", was="float32")),
    ],
)
def test_a_transform_without_an_inverse(tmp_path: Path, text: str, wrong: Any, right: Any) -> None:
    sources = ["a", "b"] if right.op == "concat" else ["a"]
    refused(text, lambda: Transform([Rule(sources, "t", [wrong])]).inverse())
    forth = Transform([Rule(sources, "t", [right])])
    saved = {name: torch.rand(2) if right.op == "concat" else torch.rand(2, 2) for name in sources}
    tte.save(saved, tmp_path)
    tte.load(target := others(saved), tmp_path, transform=forth.then(forth.inverse()))
    assert digest_value(target) == digest_value(saved)


def test_dtypes_of_joined_tensors(tmp_path: Path) -> None:
    saved = {"a": torch.ones(2), "b": torch.arange(2.0).bfloat16()}
    tte.save(saved, tmp_path / "a")
    joined = Transform([Rule(["a", "b"], "c", [transforms.concat(0)])])
    told = "cast them to one dtype first, those of a checkpoint by torchtitan-ext convert --dtype"
    refused(told, lambda: tte.load({"c": torch.zeros(4)}, tmp_path / "a", transform=joined))
    refused(told, lambda: tte.weights.save(saved, tmp_path / "b", transform=joined))
    assert call("convert", tmp_path / "a", tmp_path / "c", "--to", "dcp", "--dtype", "float32").code == 0
    tte.load(target := {"c": torch.zeros(4)}, tmp_path / "c", transform=joined)
    cast = {name: tensor.float() for name, tensor in saved.items()}
    tte.weights.save(cast, tmp_path / "b", transform=joined)
    tte.load(again := {"c": torch.zeros(4)}, tmp_path / "b")
    assert target["c"].tolist() == again["c"].tolist() == [1.0, 1.0, 0.0, 1.0]


# Data.


def opened(shard: int, num_shards: int, epoch: int) -> Iterator[int]:
    return iter(range(shard, 12, num_shards))


def streams(num_shards: int) -> Streams:
    return Streams(opened, num_shards=num_shards)


class Iterable(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Iterator[int]:
        return iter(range(12))


class MapStyle(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> int:
        return index


Loader = Callable[[], ElasticDataLoader]

LOADERS: dict[str, tuple[Loader, Loader, int]] = {
    "give exactly one of batch_size (per rank) and global_batch_size": (
        lambda: ElasticDataLoader(range(12)),
        lambda: ElasticDataLoader(range(12), batch_size=4),
        12,
    ),
    "pass last='drop' or last='pad' for drop_last": (
        lambda: ElasticDataLoader(range(10), batch_size=4, drop_last=True),
        lambda: ElasticDataLoader(range(10), batch_size=4, last="drop"),
        8,
    ),
    "or last='pad' for drop_last": (
        lambda: ElasticDataLoader(range(12), batch_size=4, drop_last=False),
        lambda: ElasticDataLoader(range(12), batch_size=4, last="pad"),
        12,
    ),
    "the loader has an order of its own: order=, shuffle= and seed=": (
        lambda: ElasticDataLoader(range(12), batch_size=4, sampler=range(12)),
        lambda: ElasticDataLoader(range(12), batch_size=4, order="randperm", shuffle=True, seed=3),
        12,
    ),
    "in_order=False has no position to resume from; leave it out": (
        lambda: ElasticDataLoader(range(12), batch_size=4, in_order=False),
        lambda: ElasticDataLoader(range(12), batch_size=4),
        12,
    ),
    "choose a smaller global_batch_size": (
        lambda: ElasticDataLoader(range(12), global_batch_size=20),
        lambda: ElasticDataLoader(range(12), global_batch_size=12),
        12,
    ),
    'or last="pad"': (
        lambda: ElasticDataLoader(range(12), global_batch_size=20),
        lambda: ElasticDataLoader(range(12), global_batch_size=20, last="pad"),
        12,
    ),
    "choose a multiple of 4 as global_batch_size": (
        lambda: ElasticDataLoader(range(12), global_batch_size=3, dp_rank=0, dp_size=4),
        lambda: ElasticDataLoader(range(12), global_batch_size=4, dp_rank=0, dp_size=4),
        3,
    ),
    "expected both or none; pass mesh=mesh['dp'], or dp_rank= and dp_size=": (
        lambda: ElasticDataLoader(range(12), batch_size=3, dp_rank=1),
        lambda: ElasticDataLoader(range(12), batch_size=3, dp_rank=1, dp_size=2),
        6,
    ),
    "wrap what opens its shards in Streams of tte.elastic": (
        lambda: ElasticDataLoader(Iterable(), batch_size=4),
        lambda: ElasticDataLoader(streams(2), batch_size=4),
        12,
    ),
    "or pass a map-style view of it: a torch.utils.data.Dataset whose __getitem__ asks it": (
        lambda: ElasticDataLoader(Iterable(), batch_size=4),
        lambda: ElasticDataLoader(MapStyle(), batch_size=4),
        12,
    ),
    "wrap what opens your streams in Streams or HuggingFaceStreams of tte.elastic": (
        lambda: ElasticDataLoader(iter(range(12)), batch_size=4),
        lambda: ElasticDataLoader(streams(3), batch_size=4),
        12,
    ),
    "choose num_shards=4 or a multiple": (
        lambda: ElasticDataLoader(streams(2), batch_size=1, dp_rank=0, dp_size=4, endless=True),
        lambda: ElasticDataLoader(streams(4), batch_size=1, dp_rank=0, dp_size=1),
        12,
    ),
    "perhaps num_workers is meant": (
        lambda: ElasticDataLoader(streams(2), batch_size=4, num_worker=0),
        lambda: ElasticDataLoader(streams(2), batch_size=4, num_workers=0),
        12,
    ),
}


def samples(loader: ElasticDataLoader) -> list[int]:
    found = [sample for batch in loader for sample in batch.tolist()]
    return found[: len(found) - loader.num_padding]


@pytest.mark.parametrize("text", LOADERS)
def test_arguments_of_a_data_loader(text: str) -> None:
    wrong, right, num_samples = LOADERS[text]
    refused(text, wrong)
    found = samples(right())
    assert len(set(found)) == len(found) == num_samples


def test_a_data_loader_in_use() -> None:
    loader = ElasticDataLoader(range(12), batch_size=4, shuffle=False)
    batches = iter(loader)
    seen = next(batches).tolist()
    seen += next(batches).tolist()
    loader.load_state_dict(loader.state_dict())
    refused("a state was loaded under this iterator; make a new one", lambda: next(batches))
    batches = iter(loader)
    seen += next(batches).tolist()
    assert seen == list(range(12))
    loader = ElasticDataLoader(range(12), batch_size=4, shuffle=False)
    older = iter(loader)
    seen = next(older).tolist()
    newer = iter(loader)
    seen += next(newer).tolist()
    refused("a newer iterator goes on from here; use that one, or make a new one", lambda: next(older))
    assert seen + next(newer).tolist() == list(range(12))


def test_a_data_loader_of_other_data(tmp_path: Path) -> None:
    saved = ElasticDataLoader(range(12), batch_size=4)
    seen = next(iter(saved)).tolist()
    tte.save({"data": saved, "step": 3}, tmp_path)
    other = {"data": ElasticDataLoader(range(14), batch_size=4), "step": 0}
    told = "use the data set it was saved with, or reset the data loader to begin a new epoch"
    refused(told, lambda: tte.load(other, tmp_path))
    tte.load(other, tmp_path, policy=ElasticPolicy({"data": "reset"}))
    assert (len(samples(other["data"])), other["step"]) == (12, 3)  # type: ignore[arg-type]
    same: dict[str, Any] = {"data": ElasticDataLoader(range(12), batch_size=4), "step": 0}
    tte.load(same, tmp_path)
    assert sorted(seen + samples(same["data"])) == list(range(12)) and same["step"] == 3


# Whole models, operators, commands.


def test_a_full_state_dict() -> None:
    model = stepped()[0]
    full = {"weight": torch.ones(2, 3), "new": torch.ones(1)}
    bias = model.bias.detach().clone()
    told = refused("pass strict=False to leave it", lambda: tte.full.set_full_state_dict(model, full))
    assert "pass strict=False to skip it" in told
    tte.full.set_full_state_dict(model, full, strict=False)
    assert torch.equal(model.weight, full["weight"]) and torch.equal(model.bias, bias)


def test_operators_in_place() -> None:
    leaf = torch.zeros(2, requires_grad=True)
    told = refused("call it under torch.no_grad(), or use the form without", lambda: unflatten(leaf))
    assert "final underscore" in told
    with torch.no_grad():
        unflatten(leaf)
    assert leaf.tolist() == [1.0, 1.0]
    with torch.inference_mode():
        made = torch.zeros(2)
    told = refused("call under torch.inference_mode(), or clone() it first", lambda: unflatten(made))
    with torch.inference_mode():
        unflatten(made)
    unflatten(again := made.clone())
    assert made.tolist() == again.tolist() == [1.0, 1.0]


def unflatten(target: torch.Tensor) -> None:
    flat = tte.ops.flatten_tensors([torch.ones(2)])
    tte.ops.unflatten_tensors_([target], flat)


def test_commands(tmp_path: Path) -> None:
    tte.save(SAVED, tmp_path / "a")
    tte.save({**SAVED, "step": 8}, tmp_path / "b")
    told = call("convert", tmp_path / "b", tmp_path / "a", "--to", "dcp").err
    assert "pass --overwrite to replace it, or give another DST" in " ".join(told.replace("│", " ").split())
    for arguments in ((tmp_path / "a", "--overwrite"), (tmp_path / "c",)):
        assert call("convert", tmp_path / "b", *arguments, "--to", "dcp").code == 0
        tte.load(target := others(SAVED), arguments[0])
        assert digest_value(target) == digest_value({**SAVED, "step": 8})
    torch.save({**SAVED, "options": Options(Colour.RED)}, tmp_path / "own.pt")
    told = call("inspect", tmp_path / "own.pt").err
    assert "inspect, diff and convert read it with --unsafe-unpickle" in told
    for arguments in (("inspect", tmp_path / "own.pt"), ("diff", tmp_path / "own.pt", tmp_path / "own.pt")):
        assert call(*arguments, "--unsafe-unpickle").code == 0


# Ranks.


def in_a_world(rank: int, world_size: int, path: Path) -> list[str]:
    """What remedies lost of what ranks save and load together."""
    mesh = dist.init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp",))
    lost = []

    def saves(name: str, of_rank: dict[str, Any], truth: dict[str, Any], **options: Any) -> None:
        tte.save(of_rank, path / name, **options)
        tte.load(target := others(truth), path / name)
        if digest_value(target) != digest_value(truth):
            lost.append(name)

    partial = DTensor.from_local(torch.ones(4), mesh, [Partial()], run_check=False)
    refused("redistribute it to Replicate() or Shard() first", lambda: tte.save({"w": partial}, path / "no"))
    for placement in (Replicate(), Shard(0)):
        whole = partial.redistribute(mesh, [placement])
        saves(f"reduced to {placement}", {"w": whole}, {"w": torch.full((4,), float(world_size))})

    own = {"seed": rank, "w": torch.arange(3.0)}
    refused("give each rank a key of its own (such as rank_0)", lambda: tte.save(own, path / "no"))
    keyed = {f"rank_{rank}": {"seed": rank}, "w": own["w"]}
    saves(
        "a key for each rank",
        keyed,
        {f"rank_{other}": {"seed": other} for other in range(world_size)} | {"w": own["w"]},
    )
    refused("with SavePlanner(replicas='first')", lambda: tte.save(own, path / "no"))
    saves("of the first rank", own, {**own, "seed": 0}, planner=tte.SavePlanner(replicas="first"))

    def strict() -> dict[str, Any]:
        return {"planner": tte.SavePlanner(replicas="strict")}

    torch.manual_seed(rank)
    model = nn.Linear(3, 2)
    refused("make the replicas equal first", lambda: tte.save(model.state_dict(), path / "no", **strict()))
    refused("pass mesh= if its ranks must hold the same, or ignore it", lambda: tte.sync_module_states(model))
    tte.sync_module_states(model, ignore=["*"])
    before = model.weight.detach().clone()
    tte.sync_module_states(model, mesh=mesh)
    if rank == 0 and not torch.equal(before, model.weight):
        lost.append("of sync_module_states")
    saves(
        "replicas", model.state_dict(), {name: value.clone() for name, value in model.state_dict().items()}, **strict()
    )

    told = refused(
        "make a name with a time or a step in it on one rank, and broadcast it", lambda: tte.save(own, path / str(rank))
    )
    assert "pass the same path on every rank" in told
    names = [str(rank)]
    dist.broadcast_object_list(names)
    saves(names[0], {"w": own["w"]}, {"w": own["w"]})
    told = "make the same calls, in one order, on all ranks"
    refused(told, lambda: (tte.weights.save if rank else tte.save)({"w": own["w"]}, path / "no"))
    other = Transform([Rule("w", "v")]) if rank else None
    told = "make the same call with the same transform on all ranks"
    refused(told, lambda: tte.weights.save({"w": own["w"]}, path / "no", transform=other))
    tte.weights.save({"w": own["w"]}, path / "weights")
    if not is_saved(path / "weights", {"w": own["w"]}):
        lost.append("weights")
    policy = {"policy": ElasticPolicy()} if rank else {}
    told = "pass the same policy and Source on every rank"
    refused(told, lambda: tte.load({"w": torch.zeros(3)}, path / "0", **policy))
    tte.load(target := {"w": torch.zeros(3)}, path / "0", policy=ElasticPolicy())
    return lost if torch.equal(target["w"], own["w"]) else [*lost, "policy"]


def test_in_a_world(run_world, tmp_path: Path) -> None:
    assert run_world(2, in_a_world, tmp_path) == [[], []]


# Names of arguments.

_TREES = [ast.parse(path.read_text()) for path in Path(tte.__file__).parent.rglob("*.py")]
# An option of DCP, of Ray Train and of torchtitan's loaders, and examples of meshes and of options of commands.
_OTHERS = {"use_collectives", "async_stager", "dp", "tp", "dataloader"}
_OTHERS |= {"storage_path", "checkpoint_config", "num_to_keep", "repeat"}


def sentences() -> Iterator[str]:
    """The texts of the package's code but its docstrings."""
    for node in itertools.chain.from_iterable(map(ast.walk, _TREES)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            node.value.value = None
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value.split()) > 2:
            yield node.value


def parameters() -> dict[str, set[str]]:
    """The names of arguments of each function and class."""
    found: dict[str, set[str]] = {}
    for node in itertools.chain.from_iterable(map(ast.walk, _TREES)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names = found.setdefault(node.name, set())
            names |= {part.arg for part in ast.walk(node) if isinstance(part, ast.arg)}
            names |= {ast.unparse(part.target) for part in node.body if isinstance(part, ast.AnnAssign)}
    return found


def test_arguments_that_messages_name_exist() -> None:
    known = parameters()
    every = set().union(*known.values())
    said, calls = set(), set()
    for text in sentences():
        said |= set(re.findall(r"(?<![\w.{\['\"-])([a-z]\w+)=(?!=)", text))
        calls |= set(re.findall(r"\b([A-Za-z_]\w+)\((?:\w+, |\.\.\., )?([a-z]\w+)=", text))
    assert len(said) > 60 and said - every <= _OTHERS
    calls = {call for call in calls if call[0] not in ("RunConfig", "CheckpointConfig")}  # of Ray Train
    assert len(calls) > 12 and [call for call in calls if call[1] not in {*known.get(call[0], ()), *_OTHERS}] == []
