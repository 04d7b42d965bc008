"""What two checkpoints differ in, across formats and meshes."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import flip_byte, random_bits, save_as, tensors, training_state
from safetensors.torch import save_file

import torchtitan_ext as tte
from torchtitan_ext.checkpoint.tables.tensor_sums import hex_of_digest
from torchtitan_ext.errors import DamagedCheckpointError
from torchtitan_ext.offline.compare.diff import (
    Difference,
    DiffReport,
    Tolerance,
    ValueDifference,
    diff,
)
from torchtitan_ext.offline.compare.fingerprints import sum_tensors
from torchtitan_ext.offline.selection import Selection
from torchtitan_ext.offline.sources import open_source

FORMATS = ["ours", "stock", "torch", "safetensors", "safetensors file", "dp=4,tp=2", "dp_replicate=2,dp_shard=3"]
CHANGES = [(kind, "model.wide") for kind in FORMATS] + [("dp=4,tp=2", key) for key in tensors() if "empty" not in key]
NESTED = ["ours", "stock", "torch", "dp=4,tp=2"]


def compared(a: Path, b: Path, **options: Any) -> DiffReport:
    return diff(open_source(a), open_source(b), max_bytes=1 << 20, **options)


@pytest.mark.parametrize("kind", FORMATS)
def test_equal_tensors_are_equal_in_every_format_and_on_every_mesh(tmp_path: Path, kind: str) -> None:
    state = tensors()
    report = compared(save_as("ours", tmp_path / "a", state), save_as(kind, tmp_path / "b", state))
    assert report == DiffReport((), len(state))


@pytest.mark.parametrize("kind", NESTED)
def test_nested_states_with_values_are_equal(tmp_path: Path, kind: str) -> None:
    state = training_state()
    report = compared(save_as("torch", tmp_path / "a", state), save_as(kind, tmp_path / "b", state))
    assert report.differences == ()
    assert report.num_equal > len(state["model"])


@pytest.mark.parametrize(("kind", "key"), CHANGES)
def test_one_changed_element_is_found_and_said_where(tmp_path: Path, kind: str, key: str) -> None:
    state, changed = tensors(), tensors()
    position = changed[key].numel() * 2 // 3
    bits = changed[key].view(-1).view(torch.uint8)
    bits[position * changed[key].element_size()] ^= 1
    a, b = save_as(kind, tmp_path / "a", state), save_as("ours", tmp_path / "b", changed)
    (found,) = compared(a, b, values=True).differences
    assert (found.key, found.kind) == (key, "values")
    assert found.values is not None
    assert (found.values.num_different, found.values.num_elements) == (1, state[key].numel())
    index = torch.arange(state[key].numel()).view(state[key].shape)[found.values.first_index]
    assert int(index) == position


def test_what_differs_by_metadata(tmp_path: Path) -> None:
    a = {"same": torch.ones(3), "a": torch.ones(2), "kind": 3, "shape": torch.ones(4), "dtype": torch.ones(4), "n": 1}
    b = {"same": torch.ones(3), "b": "text", "kind": torch.ones(1), "shape": torch.ones(5), "dtype": torch.arange(4)}
    report = compared(save_as("stock", tmp_path / "a", a), save_as("torch", tmp_path / "b", b | {"n": 2}))
    assert report.differences == (
        Difference("a", "only_in_a", a="float32 [2]"),
        Difference("b", "only_in_b", b="'text'"),
        Difference("dtype", "dtype", "float32 [4]", "int64 [4]"),
        Difference("kind", "type", "3", "float32 [1]"),
        Difference("n", "values", "1", "2"),
        Difference("shape", "shape", "float32 [4]", "float32 [5]"),
    )
    assert report.num_equal == 1


def test_values_say_how_many_where_and_how_far(tmp_path: Path) -> None:
    a = torch.arange(12.0).view(3, 4)
    b = a.clone()
    b[1, 2], b[2, 0] = 7.0, float("nan")
    report = compared(save_as("ours", tmp_path / "a", {"w": a}), save_as("dp=3", tmp_path / "b", {"w": b}), values=True)
    expected = ValueDifference(2, 12, (1, 2), 6.0, 7.0, 1.0, 1 / 7)
    assert report.differences == (Difference("w", "values", "float32 [3, 4]", "float32 [3, 4]", expected),)


def test_pieces_of_a_large_tensor_add_up(tmp_path: Path) -> None:
    a = random_bits((200, 3001), torch.int32)
    b = a.clone()
    b[17, 2900] += 1
    b[150] += 2
    pair = save_as("ours", tmp_path / "a", {"w": a}), save_as("dp=3,tp=2", tmp_path / "b", {"w": b})
    (found,) = compared(*pair, values=True).differences
    assert found.values is not None
    assert (found.values.num_different, found.values.first_index, found.values.max_abs) == (3002, (17, 2900), 2.0)


def test_numbers_within_a_tolerance_are_equal(tmp_path: Path) -> None:
    a, b = torch.tensor([1.0, 100.0, float("nan")]), torch.tensor([1.001, 100.1, -float("nan")])
    pair = save_as("ours", tmp_path / "a", {"w": a}), save_as("ours", tmp_path / "b", {"w": b})
    assert compared(*pair).differences
    assert compared(*pair, tolerance=Tolerance(rtol=2e-3)) == DiffReport((), 1)
    (found,) = compared(*pair, tolerance=Tolerance(atol=0.01), values=True).differences
    assert found.values is not None
    assert (found.values.num_different, found.values.first_index) == (1, (1,))


@pytest.mark.parametrize(
    ("dtype", "a", "b"),
    [
        (torch.int64, 2**53, 2**53 + 1),
        (torch.int64, -(2**63), -(2**63) + 1),
        (torch.int64, -(2**63), 2**63 - 1),
        (torch.uint64, 2**64 - 2, 2**64 - 1),
        (torch.uint64, 2**64 - 1, 0),
        (torch.uint8, 255, 1),
    ],
)
def test_integers_are_compared_exactly(tmp_path: Path, dtype: torch.dtype, a: int, b: int) -> None:
    numbers = (torch.tensor([7, number], dtype=dtype) for number in (a, b))
    pair = [save_as("ours", tmp_path / name, {"w": one}) for name, one in zip("ab", numbers, strict=True)]
    distance = abs(a - b)
    (found,) = compared(*pair, tolerance=Tolerance(atol=distance * 0.75), values=True).differences
    assert found.values is not None
    assert (found.values.num_different, found.values.max_abs) == (1, distance)
    assert (found.values.first_a, found.values.first_b) == (a, b)
    (found,) = compared(*pair, tolerance=Tolerance(rtol=distance / max(abs(b), 1) * 0.75)).differences
    assert compared(*pair, tolerance=Tolerance(atol=float(distance))) == DiffReport((), 1)
    assert compared(*pair, tolerance=Tolerance(rtol=1e30, atol=1e30)) == DiffReport((), 1)


def test_nothing_finite_is_close_to_infinity(tmp_path: Path) -> None:
    a, b = torch.tensor([5.0, float("inf"), 1.0]), torch.tensor([float("inf"), -float("inf"), 1.0])
    pair = save_as("ours", tmp_path / "a", {"w": a}), save_as("ours", tmp_path / "b", {"w": b})
    (found,) = compared(*pair, tolerance=Tolerance(rtol=0.1, atol=0.1), values=True).differences
    assert found.values is not None and found.values.num_different == 2


@pytest.mark.parametrize(("dtype", "sizes", "offsets"), [(torch.uint8, (1, 1), (0, 1)), (torch.int8, (1,), (1,))])
def test_chunks_of_one_tensor_are_of_one_dtype_and_of_as_many_dims(
    tmp_path: Path, dtype: torch.dtype, sizes: tuple[int, ...], offsets: tuple[int, ...]
) -> None:
    def save_chunk(name: str, tensor: torch.Tensor, begin: tuple[int, ...]) -> None:
        note = {"DCP_SHARDING_INFO": json.dumps({"w": {"saved_offsets": begin}})}
        save_file({"w": tensor}, tmp_path / name, note)

    save_chunk("a.safetensors", torch.ones(1, dtype=torch.uint8), (0,))
    save_chunk("b.safetensors", torch.ones(sizes, dtype=dtype), offsets)
    with pytest.raises(DamagedCheckpointError, match="the chunks of w"):
        open_source(tmp_path)


def test_a_prefix_finds_the_model_of_a_training_checkpoint(tmp_path: Path) -> None:
    state = training_state()
    a = save_as("dp=2,tp=2", tmp_path / "a", state)
    b = save_as("safetensors", tmp_path / "b", state["model"])
    assert compared(a, b, selection=Selection(prefix="model")) == DiffReport((), len(state["model"]))
    assert compared(a, b, selection=Selection(("*wide",), "model")).num_equal == 1


def test_digests_are_those_of_the_fingerprint_of_a_state(tmp_path: Path) -> None:
    state = tensors()
    source = open_source(save_as("dp=4,tp=2", tmp_path / "a", state))
    sums = sum_tensors(source, state, max_bytes=1 << 12, num_threads=3)
    digests = {key: hex_of_digest(total, str(state[key].dtype), state[key].shape) for key, total in sums.items()}
    assert digests == tte.fingerprint(state).values


def test_damage_is_an_error_that_names_the_tensor(tmp_path: Path) -> None:
    a = save_as("ours", tmp_path / "a", {"w": torch.zeros(4096)})
    flip_byte(a / "__0_0.distcp", 9000)
    with pytest.raises(DamagedCheckpointError, match=r"__0_0.distcp.*\bw\b"):
        compared(a, a)


def test_checkpoints_without_keys_are_equal(tmp_path: Path) -> None:
    assert compared(save_as("ours", tmp_path / "a", {}), save_as("torch", tmp_path / "b", {})) == DiffReport((), 0)


def test_sources_are_not_changed(tmp_path: Path) -> None:
    state = copy.deepcopy(training_state())
    a = save_as("ours", tmp_path / "a", state)
    before = {path.name: path.read_bytes() for path in a.iterdir()}
    compared(a, a, values=True)
    assert {path.name: path.read_bytes() for path in a.iterdir()} == before


def test_long_values_are_shown_where_they_differ(tmp_path: Path) -> None:
    names = [f"layer.{number}" for number in range(50)]
    other = [*names[:40], "lm_head", *names[41:]]
    states = {"a": {"order": ",".join(names)}, "b": {"order": ",".join(other)}}
    sources = [open_source(save_as("ours", tmp_path / name, state)) for name, state in states.items()]
    (found,) = diff(*sources).differences
    assert found.a is not None and ",layer.40," in found.a and found.b is not None and ",lm_head," in found.b
    assert all(text.startswith("...") and text.endswith("...") and len(text) <= 66 for text in (found.a, found.b))


def test_elements_are_shown_with_as_few_digits_as_tell_them(tmp_path: Path) -> None:
    kinds = {"float32": 0.1, "float16": 0.1, "bfloat16": 0.1, "complex64": 0.1 + 0.2j, "int64": 7, "float64": 0.1}
    one = {name: torch.tensor([value], dtype=getattr(torch, name)) for name, value in kinds.items()}
    other = {name: torch.zeros_like(value) for name, value in one.items()}
    sources = [open_source(save_as("ours", tmp_path / name, state)) for name, state in (("a", one), ("b", other))]
    found = {difference.key: difference.values for difference in diff(*sources, values=True).differences}
    shown = {name: value.first_a for name, value in found.items() if value is not None}
    assert shown == {**kinds, "complex64": "(0.1+0.2j)"}
