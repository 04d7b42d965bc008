"""Single values from their bytes, and numbers in their shortest form."""

import pickle
from typing import Any

import pytest
import torch

from torchtitan_ext._core import number_of, shortest
from torchtitan_ext.storage.element_types import ITEM_BYTES
from torchtitan_ext.storage.formats.scalars import plain_value_of

FLOATS = ["float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"]


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_shortest_number_is_the_same_element(dtype: str) -> None:
    kind: torch.dtype = getattr(torch, dtype)
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[kind.itemsize]
    values = (
        torch.arange(256).to(torch.uint8)
        if kind.itemsize == 1
        else torch.randint(-(2**15), 2**15, (4000,)).to(bits)
        if kind.itemsize == 2
        else torch.cat([torch.randint(-(2**31), 2**31, (4000,)), torch.arange(1, 9), torch.arange(1, 254) << 23]).to(
            bits
        )
    ).view(kind)
    exact = values.double().tolist() if kind.itemsize > 1 else values.float().double().tolist()
    found = [shortest(value, dtype) for value in exact]
    again = torch.tensor(found, dtype=torch.float64 if kind.itemsize == 4 else torch.float32).to(kind)
    assert torch.equal(again.float().nan_to_num(), values.float().nan_to_num())


@pytest.mark.parametrize("number", [0.1, 3.7, -1e-4, 12345.678, 1e20, 65504.0, 1.1754944e-38, 7.0])
def test_what_was_written_with_few_digits_comes_back_so(number: float) -> None:
    assert shortest(torch.tensor(number, dtype=torch.float32).item(), "float32") == number
    assert shortest(number, "float64") == number


@pytest.mark.parametrize("dtype", [name for name in ITEM_BYTES if not name.startswith("float8")])
def test_elements_are_read_from_their_bytes(dtype: str) -> None:
    kind: torch.dtype = getattr(torch, dtype)
    for number in (0.1 + 0.3j if kind.is_complex else 0.1 if kind.is_floating_point else 1, 0):
        data = bytes(torch.tensor([number], dtype=kind).view(torch.uint8).tolist())
        assert number_of(data, dtype) == number


def test_what_has_no_value_here() -> None:
    assert number_of(b"\x38", "float8_e4m3fn") is None
    doubled: Any = ()
    for _ in range(60):
        doubled = (doubled, doubled)
    for value in ([1], (), {"a": 1}, doubled, print, b"x", [doubled]):
        with pytest.raises(ValueError):
            plain_value_of(pickle.dumps(value))


@pytest.mark.parametrize("value", [None, True, False, 0, -7, 2**40, 2**70, 1.5, "", "é", "a\nb"])
def test_plain_values_of_pickles(value: Any) -> None:
    for protocol in (2, 5):
        found = plain_value_of(pickle.dumps(value, protocol))
        assert found == value and type(found) is type(value)
