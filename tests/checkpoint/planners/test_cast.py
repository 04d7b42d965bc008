"""The table of dtype changes, against arithmetic on all values of the small dtypes and the edges of the large ones."""

import itertools

import pytest
import torch

from torchtitan_ext.checkpoint.rules.casts import cast_problem, is_exact
from torchtitan_ext.storage.element_types import EXACT_CASTS

DTYPES = [getattr(torch, name) for name in EXACT_CASTS] + [torch.float64, torch.int64, torch.uint64, torch.complex128]
# Their arithmetic on the CPU is too incomplete to be an oracle.
NOT_CONVERTED = {torch.complex32, torch.uint16, torch.uint32, torch.uint64}


def values_of(dtype: torch.dtype) -> torch.Tensor:
    """All values of dtypes of at most two bytes; edges and the least and last bits of the others."""
    if dtype == torch.bool:
        return torch.tensor([False, True])
    if dtype.itemsize == 1:
        return torch.arange(256, dtype=torch.uint8).view(dtype)
    if dtype.itemsize == 2 and not dtype.is_complex:
        return torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    if dtype.is_complex:
        part = values_of(dtype.to_real())
        return torch.complex(part, part.flip(0))
    if dtype.is_floating_point:
        info = torch.finfo(dtype)
        return torch.tensor([0.0, -0.0, 1 + info.eps, info.max, info.min, info.tiny, float("inf")], dtype=dtype)
    info = torch.iinfo(dtype)
    return torch.tensor([0, 1, -1, info.max, info.min, info.max - 1], dtype=dtype)


CONVERTED = [pair for pair in itertools.product(DTYPES, DTYPES) if not set(pair) & NOT_CONVERTED and is_exact(*pair)]


@pytest.mark.parametrize(("source", "target"), CONVERTED, ids=str)
def test_exact_means_that_every_value_comes_back(source: torch.dtype, target: torch.dtype) -> None:
    values = values_of(source)
    back = values.to(target).to(source)
    assert torch.equal(torch.nan_to_num(back.to(torch.complex128)), torch.nan_to_num(values.to(torch.complex128)))


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (torch.int64, torch.float64),
        (torch.int32, torch.float32),
        (torch.int16, torch.float16),
        (torch.uint8, torch.int8),
        (torch.float16, torch.bfloat16),
        (torch.bfloat16, torch.float16),
        (torch.float8_e5m2, torch.float8_e4m3fn),
        (torch.float8_e8m0fnu, torch.float16),
        (torch.float64, torch.complex64),
    ],
    ids=str,
)
def test_casts_that_look_harmless_and_are_not(source: torch.dtype, target: torch.dtype) -> None:
    assert not is_exact(source, target)


@pytest.mark.parametrize(
    ("source", "target", "least"),
    [
        (torch.bfloat16, torch.float32, "exact"),
        (torch.float32, torch.bfloat16, "allow"),
        (torch.float32, torch.float8_e4m3fn, "allow"),
        (torch.int64, torch.int32, "allow"),
        (torch.int64, torch.float32, "allow"),
        (torch.float32, torch.complex64, "allow"),
        (torch.bool, torch.uint8, "exact"),
    ],
    ids=str,
)
def test_each_policy_allows_what_the_stricter_one_does(source: torch.dtype, target: torch.dtype, least: str) -> None:
    allowed = {policy for policy in ("forbid", "exact", "allow") if cast_problem("w", source, target, policy) is None}  # type: ignore[arg-type]
    assert allowed == {"exact": {"exact", "allow"}, "allow": {"allow"}}[least]


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (torch.float32, torch.int64),
        (torch.complex64, torch.float32),
        (torch.int64, torch.bool),
        (torch.float32, torch.bool),
        (torch.complex64, torch.int8),
    ],
    ids=str,
)
def test_the_kind_of_number_never_narrows(source: torch.dtype, target: torch.dtype) -> None:
    problem = cast_problem("w", source, target, "allow")
    assert problem is not None and problem.kind == "wrong_dtype"
    expected = f"w: saved as {source}, the target is {target}: the kind of number would change; convert it yourself"
    assert str(problem) == expected


def test_the_same_dtype_is_no_cast() -> None:
    assert cast_problem("w", torch.uint16, torch.uint16, "forbid") is None


@pytest.mark.parametrize(
    ("policy", "words"),
    [("forbid", "cast='forbid' allows no change"), ("exact", "pass cast='allow'")],
)
def test_the_message_says_what_to_do(policy: str, words: str) -> None:
    problem = cast_problem("w", torch.float32, torch.bfloat16, policy)  # type: ignore[arg-type]
    assert problem is not None and words in str(problem)
