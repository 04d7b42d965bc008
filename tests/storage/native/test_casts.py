"""Casts by the native reader, against torch's."""

from functools import partial
from pathlib import Path

import pytest
import torch
from casts import FLOATS, TARGETS, without_nan
from safetensors.torch import save_file
from states import bits, random_tensor
from torch.distributed.checkpoint.metadata import MetadataIndex

import torchtitan_ext as tte
from torchtitan_ext import _core, transforms
from torchtitan_ext.storage import FileReader
from torchtitan_ext.storage.native import fills
from torchtitan_ext.storage.native.open_files import OpenFiles
from torchtitan_ext.storage.raw_tensor import dtype_name

PAIRS = [(source, target) for source in FLOATS for target in TARGETS if source != target]


def elements_of(dtype: torch.dtype) -> torch.Tensor:
    """All elements of a dtype of at most two bytes; of others random bits, and numbers around the range of each."""
    if dtype.itemsize == 1:
        return torch.arange(256, dtype=torch.int16).to(torch.uint8).view(dtype)
    if dtype.itemsize == 2:
        return torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
    tails = [torch.tensor([0.0, torch.inf, -torch.inf, torch.nan], dtype=dtype)]
    for info in map(torch.finfo, TARGETS):
        ends = torch.tensor([info.max, info.tiny, info.smallest_normal], dtype=torch.float64)
        near = ends * (1 + torch.linspace(-1, 1, 999, dtype=torch.float64).unsqueeze(1) / 128)
        tails += [near.reshape(-1).to(dtype), -near.reshape(-1).to(dtype)]
    return torch.cat([random_tensor((200_000,), dtype, seed=4), torch.randn(20_000, dtype=dtype), *tails])


def read_cast(path: Path, stored: torch.Tensor, *targets: torch.Tensor) -> list[tuple[int, float]]:
    """Fills targets with all elements of a tensor in a file, and returns what was lost."""
    path.write_bytes(b"x" + bits(stored).numpy().tobytes())
    runs = _core.RunReader()
    file = runs.add_file(str(path), -1)
    for number, target in enumerate(targets):
        tensor = _core.StoredTensor(dtype_name(stored.dtype), stored.shape, stored.stride(), 1)
        zero, dtype = [0] * target.dim(), dtype_name(target.dtype)
        found = runs.add_box(file, tensor, zero, target.shape, target.data_ptr(), target.stride(), dtype=dtype)
        assert found == number
    runs.read(2, "none")
    return runs.lost()


@pytest.mark.parametrize(("source", "target"), PAIRS, ids=lambda dtype: dtype_name(dtype))
def test_each_element_is_that_of_torch(tmp_path: Path, source: torch.dtype, target: torch.dtype) -> None:
    stored = elements_of(source)
    wanted = stored.to(target)
    dense, spread = torch.zeros(len(stored), dtype=target), torch.zeros(len(stored), 3, dtype=target)
    lost = read_cast(tmp_path / "file", stored, dense, spread[:, 1])
    assert torch.equal(bits(without_nan(dense)), bits(without_nan(wanted)))
    assert torch.equal(bits(without_nan(spread[:, 1])), bits(without_nan(wanted)))
    assert not spread[:, ::2].any()
    numbers = set(stored[stored.float().isfinite() & wanted.isinf()].tolist())
    if source == torch.float64:
        numbers = set(stored[stored.isfinite() & wanted.isinf()].tolist())
    assert [box for box, _ in lost] == ([0, 1] if numbers else [])
    assert all(number in numbers for _, number in lost)


def test_has_cast_knows_the_floats_alone() -> None:
    known = {(one, other) for one in FLOATS for other in FLOATS if _core.has_cast(dtype_name(one), dtype_name(other))}
    assert known == set(PAIRS)
    assert not _core.has_cast("int32", "float32") and not _core.has_cast("float32", "int32")


def test_memory_of_another_dtype_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="got memory of int32 for elements of float32"):
        read_cast(tmp_path / "file", torch.zeros(3), torch.zeros(3, dtype=torch.int32))


def test_lost_numbers_are_forgotten_by_the_next_read(tmp_path: Path) -> None:
    runs = _core.RunReader()
    (tmp_path / "file").write_bytes(bits(torch.tensor([1e30, 1.0])).numpy().tobytes())
    file = runs.add_file(str(tmp_path / "file"), -1)
    stored, target = _core.StoredTensor("float32", [2], [1], 0), torch.zeros(2, dtype=torch.float16)
    for offset, lost in ((0, [(0, torch.tensor(1e30).item())]), (1, [])):
        assert runs.add_box(file, stored, [offset], [1], target.data_ptr(), [1], "float16") == 0
        runs.read(1, "none")
        assert runs.lost() == lost


@pytest.fixture
def buffered(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """The dtypes of what passes through the buffer of a load."""
    seen = []
    through = fills.converted

    def noted(values: torch.Tensor, **rest: object) -> torch.Tensor:
        seen.append(values.dtype)
        return through(values, **rest)  # type: ignore[arg-type]

    monkeypatch.setattr(fills, "converted", noted)
    return seen


def test_loads_read_into_targets_of_other_dtypes(tmp_path: Path, buffered: list[torch.dtype]) -> None:
    saved = {dtype_name(dtype): torch.randn(300, 40).to(dtype) for dtype in FLOATS} | {"int": torch.ones(300, 40).int()}
    tte.save(saved, tmp_path, no_dist=True)
    state = {name: torch.zeros(40, 300).t() for name in saved}
    versions = {name: value._version for name, value in state.items()}
    reader = FileReader(tmp_path)
    tte.load(state, storage_reader=reader, cast="allow", no_dist=True)
    assert [name for name, value in state.items() if not torch.equal(value, saved[name].float())] == []
    assert all(value._version > versions[name] for name, value in state.items())
    assert reader.num_bytes_read == sum(value.nbytes for value in saved.values())
    assert buffered == [torch.int32]


@pytest.mark.parametrize(
    ("saved", "casts", "target", "is_read_into"),
    [
        (torch.float32, ["bfloat16"], torch.bfloat16, True),
        (torch.bfloat16, ["bfloat16"], torch.float32, True),
        (torch.bfloat16, ["float32"], torch.float32, True),
        (torch.float32, ["bfloat16"], torch.float32, False),
        (torch.float32, ["bfloat16", "float32"], torch.float32, False),
        (torch.float64, ["float32", "bfloat16"], torch.float64, False),
    ],
)
def test_one_cast_of_a_transform_is_read_into_its_target(
    tmp_path: Path,
    buffered: list[torch.dtype],
    saved: torch.dtype,
    casts: list[str],
    target: torch.dtype,
    is_read_into: bool,
) -> None:
    """Others pass through the buffer: what a dtype between rounds away is lost."""
    stored = torch.randn(50, 3).to(saved)
    save_file({"w": stored}, tmp_path / "model.safetensors")
    state = {"w": torch.zeros(3, 50, dtype=target)}
    steps = [transforms.transpose(0, 1), *map(transforms.cast, casts)]
    tte.load(state, tmp_path, transform=transforms.Transform([transforms.Rule("w", "w", steps)]))
    wanted = stored
    for dtype in casts:
        wanted = wanted.to(getattr(torch, dtype))
    assert torch.equal(state["w"], wanted.t().to(target))
    assert buffered == ([] if is_read_into else [saved])


def test_a_copy_of_the_callers_own_gets_what_is_cast(tmp_path: Path) -> None:
    stored, seen = torch.randn(6), []

    def copy(fqn: str, target: torch.Tensor, values: torch.Tensor) -> None:
        seen.append((fqn, values.clone()))
        target.copy_(values)

    tte.save({"w": stored}, tmp_path, no_dist=True)
    reader = FileReader(tmp_path)
    reader.set_up_storage_reader(reader.read_metadata(), is_coordinator=True)
    files = OpenFiles(reader)
    found = fills.Fills(files, copy=copy)
    (record,) = reader.find_records([MetadataIndex("w", [0])])
    assert record.tensor is not None
    read_into = partial(files.add_part, record.file, record.tensor, (0,))
    targets = {dtype: torch.zeros(6, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)}
    for dtype, target in targets.items():
        found.add(str(dtype), target, fills.Elements((stored.dtype,), read_into))
    found.read()
    assert all(torch.equal(target, stored.to(dtype)) for dtype, target in targets.items())
    assert [fqn for fqn, _ in seen] == ["torch.bfloat16"] and torch.equal(seen[0][1], stored)


def test_targets_that_are_not_plain_pass_through_the_buffer(tmp_path: Path, buffered: list[torch.dtype]) -> None:
    stored = torch.randn(6).bfloat16()
    tte.save({"w": stored}, tmp_path, no_dist=True)
    negated = torch._neg_view(torch.zeros(6))
    tte.load({"w": negated}, tmp_path, no_dist=True)
    assert torch.equal(negated, stored.float())
    assert buffered == [torch.bfloat16]
