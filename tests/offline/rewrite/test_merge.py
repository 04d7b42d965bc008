"""Weighted means and sums of checkpoints, against torch on whole tensors."""

import math
import os
import random
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import Hostile, flip_byte, random_bits, save_as
from extent import num_cases

import torchtitan_ext as tte
from torchtitan_ext.errors import (
    CheckpointReadError,
    DamagedCheckpointError,
    MissingStateError,
    ReshardError,
    StateRefusedError,
    WrongValueError,
)
from torchtitan_ext.offline.boxes import BoxReader, new_buffer, whole
from torchtitan_ext.offline.rewrite.merge import MergeReport, merge
from torchtitan_ext.offline.selection import Selection
from torchtitan_ext.offline.sources import open_source
from torchtitan_ext.offline.torch_boxes import tensor_of

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128]
KINDS = ["ours", "stock", "torch", "safetensors", "safetensors file", "dp=3", "dp=2,tp=2"]


def merged(sources: list[Path], target: Path, **options: Any) -> MergeReport:
    opened = [open_source(path) for path in sources]
    return merge(opened, target, **{"num_processes": 1, "max_bytes": 8 << 20, **options})


def tensors_in(path: Path) -> dict[str, torch.Tensor]:
    source = open_source(path)
    found = {}
    for fqn, entry in source.state.entries.items():
        if entry is not None:
            piece, memory = whole(fqn, entry), new_buffer(entry.num_bytes)[: entry.num_bytes]
            BoxReader(source).read([piece], [memory])
            found[fqn] = tensor_of(memory, piece)
    return found


def random_floats(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Of many magnitudes; zeros of both signs and infinities are among them."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-9, 9, shape, generator=generator)
    values = torch.randn(shape, dtype=torch.float64, generator=generator) * 2.0**exponents
    chosen = torch.randint(0, 40, shape, generator=generator)
    values = torch.where(chosen == 0, torch.tensor(-0.0), torch.where(chosen == 1, torch.tensor(math.inf), values))
    if dtype.is_complex:
        return torch.complex(values, -values.flip(0) if shape else values).to(dtype)
    return values.to(dtype)


def expected(tensors: list[torch.Tensor], weights: tuple[float, ...], accumulate: torch.dtype) -> torch.Tensor:
    """The sum on whole tensors, each operation rounded to the dtype of the sums, and at last to that of the tensors."""
    dtype = tensors[0].dtype
    parts = [torch.view_as_real(tensor) if dtype.is_complex else tensor for tensor in tensors]
    in_double = torch.float64 in (accumulate, parts[0].dtype)
    total = torch.empty(0)
    for number, (part, weight) in enumerate(zip(parts, weights, strict=True)):
        wide = part.double() if in_double else part.float()
        product = wide * torch.tensor(weight, dtype=wide.dtype)
        total = product if number == 0 else total + product
    if in_double and dtype is torch.float16:  # torch rounds twice, by way of float32
        total = torch.from_numpy(np.asarray(total.numpy().astype(np.float16)))
    if in_double and dtype is torch.bfloat16:  # 8 bits of the fraction, the first one too
        mantissas, exponents = np.frexp(total.numpy())
        total = torch.from_numpy(np.asarray(np.ldexp(np.rint(np.ldexp(mantissas, 8)), exponents - 8)))
    return torch.view_as_complex(total.to(parts[0].dtype)) if dtype.is_complex else total.to(dtype)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal numbers with their signs; any NaN is one."""
    parts = [torch.view_as_real(tensor) if tensor.dtype.is_complex else tensor for tensor in (one, other)]
    is_nan = parts[0].isnan()
    bits = [torch.where(is_nan, 0, part).contiguous().view(-1).view(torch.uint8) for part in parts]
    return one.dtype == other.dtype and torch.equal(is_nan, parts[1].isnan()) and torch.equal(*bits)


@pytest.mark.parametrize("seed", range(num_cases(24)))
def test_sums_are_those_of_whole_tensors_whatever_the_layouts_and_formats(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    to, kind, accumulate = draw.choice(["dcp", "safetensors", "torch"]), draw.choice(["mean", "sum"]), "float32"
    dtypes = [dtype for dtype in FLOATS if to != "safetensors" or dtype is not torch.complex128]
    if seed % 2:
        accumulate = "float64"
    shapes = {f"w{n}": tuple(draw.choice([0, 1, 3, 8, 30]) for _ in range(draw.randint(0, 3))) for n in range(8)}
    shapes["large"] = (draw.randint(700, 900), 500)
    kinds = {key: draw.choice(dtypes) for key in shapes}
    others = {"ints": torch.arange(9).view(3, 3), "flags": random_bits((5,), torch.bool)}
    states, sources = [], []
    for number in range(draw.randint(1, 4)):
        states.append({key: random_floats(shape, kinds[key], 10 * seed + number) for key, shape in shapes.items()})
        held = [name for name in KINDS if "safetensors" not in name or torch.complex128 not in kinds.values()]
        sources.append(save_as(draw.choice(held), tmp_path / f"s{number}", {**states[-1], **others}))
    weights = [draw.choice([1, 0.1, -0.5, 3.0]) for _ in states]
    if kind == "mean" and not sum(weights):
        weights[0] += 1
    report = merged(sources, tmp_path / "out", to=to, weights=weights, kind=kind, accumulate=accumulate)
    total = sum(weights) if kind == "mean" else 1
    assert report.weights == tuple(weight / total for weight in weights)
    found = tensors_in(tmp_path / "out")
    assert found.keys() == {*shapes, *others} and report.num_keys == len(found)
    for key in shapes:
        wanted = expected([state[key] for state in states], report.weights, getattr(torch, accumulate))
        assert same(found[key], wanted), (key, kinds[key])
    assert all(torch.equal(found[key], tensor) for key, tensor in others.items())


def test_sums_in_float64_are_rounded_once(tmp_path: Path) -> None:
    """Nearer to 1.0078125 than to 1, by less than a float32 tells: rounded by way of it, the result would be 1."""
    near = torch.tensor([1.0], dtype=torch.bfloat16), torch.tensor([2.0**-8], dtype=torch.bfloat16)
    states = [*near, torch.tensor([2.0**-40], dtype=torch.bfloat16)]
    sources = [save_as("ours", tmp_path / f"{number}", {"w": state}) for number, state in enumerate(states)]
    merged(sources, tmp_path / "out", kind="sum", accumulate="float64")
    assert tensors_in(tmp_path / "out")["w"].item() == 1.0078125
    assert sum(states, torch.zeros(1, dtype=torch.float64)).bfloat16().item() == 1


def test_equal_weights_are_the_default_and_a_nested_state_keeps_its_form(tmp_path: Path) -> None:
    states = [{"model": {"w": torch.full((3, 4), float(number))}, "opt": [{"lr": 0.1}], "step": 7} for number in (1, 2)]
    sources = [save_as(kind, tmp_path / kind, state) for kind, state in zip(("stock", "torch"), states, strict=True)]
    report = merged(sources, tmp_path / "out")
    paths = tuple(map(str, sources))
    assert report == MergeReport(3, 48, 1, (), paths, (0.5, 0.5))
    loaded = torch.load(tmp_path / "out", weights_only=True)
    assert torch.equal(loaded.pop("model")["w"], torch.full((3, 4), 1.5))
    assert loaded == {"opt": [{"lr": 0.1}], "step": 7}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": [1]}, "got 1 weights and 2 sources, expected one for each"),
        ({"weights": [1, math.nan]}, "got weights 1.0, nan, expected finite numbers whose sum is not 0"),
        ({"weights": [math.inf, 1], "kind": "sum"}, "got weights inf, 1.0, expected finite numbers"),
        ({"weights": [1, -1]}, "whose sum is not 0; a weighted sum may have any"),
        ({"weights": [1e308, 1e308]}, "expected finite numbers whose sum"),
        ({"kind": "median"}, "kind='median'"),
        ({"accumulate": "bfloat16"}, "accumulate='bfloat16'"),
        ({"others": "first"}, "others='first'"),
        ({"to": "zip"}, "merge: got to='zip', expected one of dcp, safetensors, torch"),
    ],
)
def test_arguments_that_do_not_fit(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    source = save_as("ours", tmp_path / "a", {"w": torch.ones(2)})
    with pytest.raises(WrongValueError, match=message):
        merged([source, source], tmp_path / "out", **options)
    with pytest.raises(WrongValueError, match="got 0 weights and 0 sources"):
        merged([], tmp_path / "out")
    assert os.listdir(tmp_path) == ["a"]


def test_a_sum_without_normalisation_may_be_a_difference(tmp_path: Path) -> None:
    sources = [save_as("ours", tmp_path / str(number), {"w": torch.tensor([number + 1.0])}) for number in range(2)]
    assert merged(sources, tmp_path / "out", weights=[1, -1], kind="sum").weights == (1, -1)
    assert tensors_in(tmp_path / "out")["w"].item() == -1


def test_keys_that_differ_are_named_all_at_once(tmp_path: Path) -> None:
    one = {
        "here": torch.ones(2), "shape": torch.ones(2, 3), "dtype": torch.ones(2), "kind": torch.ones(2),
        "fp8": torch.ones(4).to(torch.float8_e4m3fn), "int": torch.tensor([1, 2]), "note": "a", "fine": torch.ones(2),
    }  # fmt: skip
    other = {
        **one, "there": torch.ones(3), "shape": torch.ones(3, 2), "dtype": torch.ones(2).bfloat16(), "kind": 3,
        "int": torch.tensor([1, 3]), "note": "b",
    }  # fmt: skip
    del other["here"]
    a, b = save_as("dp=2", tmp_path / "a", one), save_as("stock", tmp_path / "b", other)
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(StateRefusedError) as raised:
        merged([a, b], tmp_path / "out")
    said = {problem.fqn: str(problem) for problem in raised.value.problems}
    assert {key: text.replace(f"{tmp_path}/", "") for key, text in said.items()} == {
        "here": "here: is not in b; leave it out with only= (--only)",
        "there": "there: is not in a; leave it out with only= (--only)",
        "shape": "shape: is [2, 3] in a and [3, 2] in b",
        "dtype": "dtype: is float32 in a and bfloat16 in b",
        "kind": "kind: is a tensor in a and a value in b",
        "fp8": "fp8: is float8_e4m3fn, of which no mean is taken; leave it out, or let torchtitan-ext convert --dtype "
        "make other sources",
        "int": 'int: differs in a and b; others="last" (--others last) takes what the last source has',
        "note": 'note: differs in a and b; others="last" (--others last) takes what the last source has',
    }
    assert "merge refused, nothing was changed; 8 problem(s)" in str(raised.value)
    with pytest.raises(MissingStateError, match="Keys that some source does not have"):
        merged([a, b], tmp_path / "out", selection=Selection(("*here",)))
    with pytest.raises(ReshardError, match="fp8: is float8_e4m3fn"):
        merged([a, a], tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == before
    report = merged([a, b], tmp_path / "out", selection=Selection(("fine", "int", "note")), others="last")
    assert report.num_keys == 3
    assert tensors_in(tmp_path / "out")["int"].tolist() == [1, 3]
    assert open_source(tmp_path / "out").read_value("note") == "b"


def test_integers_are_compared_to_their_last_element(tmp_path: Path) -> None:
    state = {"a": torch.arange(900_000), "b": torch.zeros(9, dtype=torch.uint8), "w": torch.ones(2)}
    changed = {**state, "a": state["a"].clone()}
    changed["a"][-1] += 1
    sources = [save_as("dp=3", tmp_path / "a", state), save_as("torch", tmp_path / "b", changed)]
    with pytest.raises(ReshardError, match=r"a: differs in .*a and .*b; others") as raised:
        merged(sources, tmp_path / "out", to="dcp")
    assert len(raised.value.problems) == 1
    with pytest.raises(ReshardError, match="a: differs in"):
        merged([sources[1], sources[0], sources[0]], tmp_path / "out")
    assert merged([sources[0], sources[0]], tmp_path / "out").num_keys == 3
    assert torch.equal(tensors_in(tmp_path / "out")["a"], state["a"])


def test_values_that_are_no_plain_data_are_never_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOSTILE_DIR", str(tmp_path / "hostile"))
    for name, values in (("a", [Hostile()]), ("b", [Hostile(), 1])):
        save_as("stock", tmp_path / name, {"w": torch.ones(2), "x": values[0], "y": values[-1]})
    sources = [tmp_path / "a", tmp_path / "b"]
    with pytest.raises(ReshardError, match="y: is more than plain data, and differs in bytes, in .*a and .*b; others"):
        merged(sources, tmp_path / "out")
    assert merged(sources, tmp_path / "out", others="last").num_keys == 3
    with pytest.raises(CheckpointReadError, match="x"):
        merged(sources, tmp_path / "c", to="torch", others="last")
    assert not (tmp_path / "hostile").exists() and not (tmp_path / "c").exists()


def test_safetensors_have_no_values_that_could_differ(tmp_path: Path) -> None:
    sources = [
        save_as("ours", tmp_path / str(step), {"w": torch.tensor([float(step)]), "step": step, f"note{step}": "x"})
        for step in (2, 4)
    ]
    report = merged(sources, tmp_path / "out", to="safetensors")
    assert (report.num_keys, set(report.dropped)) == (1, {"step", "note4"})
    assert tensors_in(tmp_path / "out")["w"].item() == 3


def test_a_prefix_and_globs_choose_the_keys_of_sources_with_and_without_it(tmp_path: Path) -> None:
    nested = save_as("dp=2", tmp_path / "a", {"model": {"w": torch.ones(4), "b": torch.ones(2)}, "step": 3})
    plain = save_as("safetensors file", tmp_path / "b", {"w": torch.full((4,), 3.0), "b": torch.ones(2)})
    report = merged([plain, nested], tmp_path / "out", selection=Selection(("w",), "model"), to="safetensors")
    assert report.num_keys == 1 and tensors_in(tmp_path / "out")["w"].tolist() == [2] * 4
    merged([nested, plain], tmp_path / "out", selection=Selection((), "model"), overwrite=True)
    assert tensors_in(tmp_path / "out").keys() == {"w", "b"}
    with pytest.raises(WrongValueError, match="got 'modle', below which there is no key"):
        merged([nested, plain], tmp_path / "c", selection=Selection((), "modle"))


@pytest.mark.parametrize("to", ["dcp", "safetensors", "torch"])
@pytest.mark.parametrize("accumulate", ["float32", "float64"])
def test_a_sum_that_is_too_large_leaves_what_was_there(tmp_path: Path, to: Any, accumulate: Any) -> None:
    old = {"w": torch.ones(3)}
    large = {"v": torch.ones(2), "w": torch.tensor([1.0, -60000.0, math.inf], dtype=torch.float16)}
    source, target = save_as("ours", tmp_path / "a", large), tmp_path / "b"
    merged([save_as("ours", tmp_path / "old", old)], target, to=to)
    options = {"to": to, "accumulate": accumulate, "overwrite": True}
    with pytest.raises(WrongValueError, match="w gets the number -90000.0, which float16 cannot hold; give smaller"):
        merged([source, source], target, kind="sum", weights=[1, 0.5], **options)
    assert torch.equal(tensors_in(target)["w"], old["w"])
    merged([source, source], target, weights=[1, 0.5], **options)
    assert tensors_in(target)["w"].tolist() == large["w"].tolist()


def test_damage_in_any_source_leaves_what_was_there(tmp_path: Path) -> None:
    state = {"w": torch.randn(512, 300, generator=torch.Generator().manual_seed(1))}
    sources = [save_as("ours", tmp_path / name, state) for name in "ab"]
    target = tmp_path / "c"
    merged(sources, target)
    for damaged in sources:
        flip_byte(damaged / "__0_0.distcp", 4000)
        with pytest.raises(DamagedCheckpointError, match=f"{damaged}"):
            merged(sources, target, overwrite=True)
        flip_byte(damaged / "__0_0.distcp", 4000)
        assert torch.equal(tensors_in(target)["w"], state["w"])


def test_processes_write_what_one_would(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(3)
    states = [{f"w{number}": torch.randn(300, 700, generator=generator) for number in range(4)} for _ in range(3)]
    kinds = ("dp=3", "ours", "stock")
    sources = [save_as(kind, tmp_path / kind, state) for kind, state in zip(kinds, states, strict=True)]
    done: list[int] = []
    options: dict[str, Any] = {"num_processes": 3, "max_bytes": 48 << 20, "progress": done.append}
    report = merged(sources, tmp_path / "b", to="safetensors", max_file_bytes=1 << 20, **options)
    assert sum(done) == report.num_bytes == 4 * 300 * 700 * 4 and report.num_files == 4
    found = tensors_in(tmp_path / "b")
    for key, tensor in found.items():
        assert same(tensor, expected([state[key] for state in states], report.weights, torch.float32))


@pytest.mark.parametrize("is_indexed", [True, False])
def test_sources_of_many_files_stay_below_the_limit_of_open_ones(tmp_path: Path, is_indexed: bool) -> None:
    state = {"w": torch.randn(80, 30, generator=torch.Generator().manual_seed(3))}
    sources = [save_as("dp=80", tmp_path / str(number), state) for number in range(4)]
    for source in sources if not is_indexed else ():
        (source / ".tte_index").unlink()
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_open = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (num_open + 230, before[1]))
    try:
        merged(sources, tmp_path / "out", selection=Selection(("w",)))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert torch.equal(tensors_in(tmp_path / "out")["w"], state["w"])


def save_steps(run: Path, *steps: int) -> None:
    for step in steps:
        tte.save({"model": {"w": torch.full((4,), float(step))}, "step": step}, run / f"step-{step}")


def test_the_mean_of_the_newest_steps_of_a_run(tmp_path: Path) -> None:
    run = tmp_path / "run"
    save_steps(run, 1, 2, 4, 9)
    (run / "step-12").mkdir()  # a save that has not finished
    report = tte.weights.average(run, 3, out=tmp_path / "mean", prefix="model", num_processes=1)
    assert report.sources == tuple(str(run / f"step-{step}") for step in (2, 4, 9))
    loaded = {"w": torch.zeros(4)}
    tte.load(loaded, tmp_path / "mean")
    assert loaded["w"].tolist() == [5] * 4
    weights = [0.5, 1.5]
    tte.weights.average(run, 2, out=tmp_path / "hf", to="safetensors", weights=weights, only=["model.*"])
    assert tensors_in(tmp_path / "hf")["model.w"].tolist() == [(4 + 3 * 9) / 4] * 4
    with pytest.raises(ReshardError, match=r"step: differs in .*step-4 and .*step-9; others="):
        tte.weights.average(run, 2, out=tmp_path / "all")
    report = tte.weights.average(run, 2, out=tmp_path / "all", others="last")
    assert report.num_keys == 2 and open_source(tmp_path / "all").read_value("step") == 9
    with pytest.raises(FileExistsError):
        tte.weights.average(run, 2, out=tmp_path / "all", others="last")


def test_steps_that_are_no_part_of_the_run_or_damaged(tmp_path: Path) -> None:
    run = tmp_path / "run"
    save_steps(run, 1, 2, 3)
    with pytest.raises(WrongValueError, match="got last=5, and .*run has 3 finished steps"):
        tte.weights.average(run, out=tmp_path / "mean")
    for last, error in ((0, ValueError), ("2", TypeError)):
        with pytest.raises(error, match="weights.average: got last="):
            tte.weights.average(run, last, out=tmp_path / "mean")  # type: ignore[arg-type]
    os.truncate(run / "step-2" / "__0_0.distcp", 100)
    with pytest.raises(DamagedCheckpointError, match="step-2"):
        tte.weights.average(run, 2, out=tmp_path / "mean", only=["model.*"])
    assert os.listdir(tmp_path) == ["run"]
    assert tte.weights.average(run, 1, out=tmp_path / "mean").num_keys == 2
    with pytest.warns(UserWarning, match="goes on with step 0, below its step"):
        save_steps(run, 0)
    with pytest.raises(WrongValueError, match="got last=2, and .*run has 1 finished step"):
        tte.weights.average(run, 2, out=tmp_path / "one")
    assert tte.weights.average(run, 1, out=tmp_path / "one").sources == (str(run / "step-0"),)
