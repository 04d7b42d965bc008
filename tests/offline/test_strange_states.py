"""Random states of all kinds of tensors, across all formats and meshes, against plain torch."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import random_bits, save_as
from tier import SOAK

import torchtitan_ext as tte
from torchtitan_ext.offline.compare.diff import DiffReport, diff
from torchtitan_ext.offline.rewrite.convert import convert
from torchtitan_ext.offline.rewrite.reshard import reshard
from torchtitan_ext.offline.sources import open_source

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool, torch.complex64, torch.float8_e4m3fn,
    torch.float8_e5m2, torch.float8_e8m0fnu,
]  # fmt: skip
BEYOND_SAFETENSORS = [torch.complex128, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]
NUM_ROUNDS = 3 * SOAK
SMALL: dict[str, Any] = {"num_processes": 1, "max_bytes": 7 << 20}


def strange_view(base: torch.Tensor, source: random.Random) -> torch.Tensor:
    """A view of a tensor's memory with any strides that are not negative, and any offset."""
    sizes = [source.choice([0, 1, 1, 2, 3, 5, 7]) for _ in range(source.randint(0, 4))]
    room = base.numel() - 1
    strides = []
    for size in sizes:
        strides.append(source.randint(0, min(12, room // max(size - 1, 1))))
        room -= max(size - 1, 0) * strides[-1]
    return base.as_strided(sizes, strides, source.randint(0, room))


def usual_view(base: torch.Tensor, source: random.Random) -> torch.Tensor:
    """What models and users make of tensors."""
    matrix = base.view(12, -1)
    return source.choice(
        [
            matrix,
            matrix.t(),
            matrix[3:9],
            matrix[:, 1::3],
            matrix[::5].t(),
            matrix[:, :0],
            matrix[2, 1],
            matrix[1:2].expand(5, -1),
            matrix[:, None].expand(-1, 3, -1).permute(2, 1, 0),
            base.unfold(0, 7, 3),
            base.unfold(0, 7, 3).t(),
            matrix.unfold(1, 4, 1).unfold(0, 3, 2),
        ]
    )


def strange_state(seed: int, dtypes: list[torch.dtype]) -> dict[str, torch.Tensor]:
    """Several tensors over each of a few storages; some are tied, or parameters."""
    source = random.Random(seed)
    state: dict[str, torch.Tensor] = {}
    for number, dtype in enumerate(source.sample(dtypes, 6)):
        base = random_bits((12 * source.randint(5, 30),), dtype, seed + number)
        for _ in range(4):
            view = source.choice([strange_view, usual_view])(base, source)
            state[f"layers.{len(state)}.w"] = view
    state["tied"] = state["layers.0.w"]
    state["parameter"] = torch.nn.Parameter(random_bits((3, 4), torch.float32, seed), requires_grad=True)
    state["conjugate"] = random_bits((4, 3), torch.complex64, seed).t().conj()
    return state


def dense(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Each on its own memory, as a safetensors file wants it."""
    return {key: value.detach().resolve_conj().clone().contiguous() for key, value in state.items()}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Of a new tensor: one element counts as contiguous with any stride, which a view of bytes does not take."""
    return torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.detach().reshape(-1)).view(torch.uint8)


def same_bits(state: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]) -> bool:
    return state.keys() == truth.keys() and all(
        state[key].dtype == value.dtype
        and state[key].shape == value.shape
        and torch.equal(bits(state[key]), bits(value))
        for key, value in truth.items()
    )


@pytest.mark.parametrize("seed", range(NUM_ROUNDS))
def test_every_format_gives_what_torch_has(tmp_path: Path, seed: int) -> None:
    state = strange_state(seed, DTYPES)
    truth = dense(state)
    conjugate = state.pop("conjugate")  # where torch.save wrote one it is refused
    paths = [save_as(kind, tmp_path / kind, state) for kind in ("torch", "stock")]
    state["conjugate"] = conjugate
    paths += [save_as(kind, tmp_path / kind.replace(",", "-"), state) for kind in ("ours", "dp=3,tp=2", "dp=5")]
    paths += [save_as(kind, tmp_path / kind.partition(" ")[0], truth) for kind in ("safetensors", "safetensors file")]
    for path in paths:
        source = open_source(path)
        wanted = {key: truth[key] for key in source.state.entries}
        assert len(wanted) >= len(truth) - 1
        for to in ("safetensors", "dcp"):
            target = tmp_path / f"{path.name}-{to}"
            convert(source, target, to=to, max_file_bytes=1 << 14, **SMALL)  # type: ignore[arg-type]
            assert diff(source, open_source(target), max_bytes=1 << 20) == DiffReport((), len(wanted))
        reshard(source, tmp_path / "again", mesh={"dp": 2, "tp": 3}, overwrite=True, **SMALL)
        loaded = {key: torch.zeros(value.shape, dtype=value.dtype) for key, value in wanted.items()}
        tte.load(loaded, tmp_path / "again")
        assert same_bits(loaded, wanted), path.name


@pytest.mark.parametrize("seed", range(NUM_ROUNDS))
def test_dtypes_beyond_safetensors(tmp_path: Path, seed: int) -> None:
    state = strange_state(seed, BEYOND_SAFETENSORS * 2)
    truth = dense(state)
    del state["conjugate"], truth["conjugate"]
    torch.save(state, tmp_path / "a")
    convert(open_source(tmp_path / "a"), tmp_path / "dcp", to="dcp", **SMALL)
    assert diff(open_source(tmp_path / "a"), open_source(tmp_path / "dcp")) == DiffReport((), len(truth))
    loaded = {key: torch.zeros(value.shape, dtype=value.dtype) for key, value in truth.items()}
    tte.load(loaded, tmp_path / "dcp")
    assert same_bits(loaded, truth)


@pytest.mark.parametrize("seed", range(NUM_ROUNDS))
@pytest.mark.parametrize("max_bytes", [1, 1 << 10, 1 << 20])
def test_one_changed_element_is_found_wherever_it_is(tmp_path: Path, seed: int, max_bytes: int) -> None:
    source = random.Random(seed)
    state = dense(strange_state(seed, DTYPES))
    paths = {"torch": tmp_path / "a", "dp=3,tp=2": tmp_path / "b"}
    save_as("dp=3,tp=2", tmp_path / "b", state)
    for key in source.sample([key for key, value in state.items() if value.numel()], 8):
        changed = {other: value.clone() for other, value in state.items()}
        if source.random() < 0.5 and changed[key].dim() > 1:
            changed[key] = changed[key].transpose(0, -1).contiguous().transpose(0, -1)
        index = tuple(source.randrange(size) for size in state[key].shape)
        element = changed[key][index].clone().view(1).view(torch.uint8)
        element[source.randrange(len(element))] ^= 1
        changed[key][index] = element.view(state[key].dtype)[0]
        torch.save(changed, paths["torch"])
        report = diff(*map(open_source, paths.values()), values=True, max_bytes=max_bytes)
        (found,) = report.differences
        assert (found.key, found.kind, report.num_equal) == (key, "values", len(state) - 1)
        assert found.values is not None
        assert (found.values.num_different, found.values.first_index) == (1, index), key
