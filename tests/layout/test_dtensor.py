"""The memory of any tensor: boxes of it, and its bytes."""

import pytest
import torch
from torch import Tensor

from torchtitan_ext.layout.dtensor import as_bytes, local_view

ODD_STRIDES = {
    "one element, stride 2": lambda: torch.arange(2.0).view(1, 2)[:, 0],
    "one element, stride 0": lambda: torch.full((1,), 3.0).as_strided((1, 1), (5, 0)),
    "0-d": lambda: torch.tensor(2.5),
    "empty": lambda: torch.empty(3, 0)[:, :0],
    "transposed": lambda: torch.arange(6.0).view(2, 3).t(),
    "expanded": lambda: torch.arange(3.0).expand(2, 3),
    "with an offset": lambda: torch.arange(6.0)[2:4],
}


@pytest.mark.parametrize("name", ODD_STRIDES)
def test_bytes_are_those_of_the_elements_in_order(name: str) -> None:
    tensor: Tensor = ODD_STRIDES[name]()
    values = torch.tensor(tensor.tolist(), dtype=tensor.dtype).flatten()
    assert as_bytes(tensor).tolist() == list(values.numpy().tobytes())


def test_of_dense_memory_it_is_a_view() -> None:
    tensor = torch.zeros(4, dtype=torch.int16)[1:]
    as_bytes(tensor)[0] = 7
    assert tensor.tolist() == [7, 0, 0]


def test_lazy_views_are_carried_out() -> None:
    numbers = torch.tensor([1 + 2j, 3 - 4j])
    assert torch.equal(as_bytes(numbers.conj()), as_bytes(torch.tensor([1 - 2j, 3 + 4j])))
    assert torch.equal(as_bytes(numbers.conj().imag), as_bytes(torch.tensor([-2.0, 4.0])))


def test_bools_keep_their_bits() -> None:
    flags = torch.tensor([[1, 2], [3, 0]], dtype=torch.uint8).view(torch.bool)
    assert as_bytes(flags.t()).tolist() == [1, 3, 2, 0]


def test_boxes_are_views_also_where_the_box_is_all_of_it() -> None:
    local = torch.arange(12.0).view(3, 4)
    for offsets, sizes in (((0, 0), (3, 4)), ((1, 0), (2, 4)), ((2, 1), (1, 0)), ((0, 3), (3, 1))):
        box = local_view(local, offsets, sizes)
        (row, column), (rows, columns) = offsets, sizes
        assert torch.equal(box, local[row : row + rows, column : column + columns])
        assert box.untyped_storage().data_ptr() == local.untyped_storage().data_ptr()


def test_boxes_outside_of_the_tensor_are_refused() -> None:
    with pytest.raises((RuntimeError, IndexError)):
        local_view(torch.zeros(3), (1,), (3,))
