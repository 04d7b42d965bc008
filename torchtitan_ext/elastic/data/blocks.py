"""Values that a worker process hands to the trainer's: through one anonymous file in memory each.

The pickle of a value and the bytes of its tensors and arrays lie behind each other in the file, whose descriptor goes
through the connection; so a worker never waits until it is read. The trainer's process reads it into one buffer, of
which its tensors are views. (torch's own way needs a descriptor for each tensor, and the worker alive when it is
received. To map the file costs more page faults than the copy.)

    pickle | padding | bytes of tensor 0 | padding | bytes of tensor 1 | ...
"""

from __future__ import annotations

import io
import os
import pickle
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any

import torch

from torchtitan_ext.layout.layout import aligned


class _Pickler(pickle.Pickler):
    """Keeps the bytes of tensors out of the pickle, as NumPy does with those of arrays."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not torch.Tensor or value.layout is not torch.strided or value.device.type != "cpu":
            return NotImplemented
        if value.is_nested or value.requires_grad or value.is_quantized or value.is_conj() or value.is_neg():
            return NotImplemented
        if not value.numel():
            return NotImplemented
        data = value.contiguous().view(-1).view(torch.uint8).numpy().data
        return _tensor_of, (pickle.PickleBuffer(data), value.dtype, tuple(value.shape))


def _tensor_of(data: memoryview, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.frombuffer(data, dtype=dtype).view(shape)


def send_block(connection: Connection, value: Any) -> None:
    """Hands a value to the process at the other end."""
    buffers: list[pickle.PickleBuffer] = []
    pickled = io.BytesIO()
    _Pickler(pickled, pickle.HIGHEST_PROTOCOL, buffer_callback=buffers.append).dump(value)
    parts = [pickled.getbuffer(), *(buffer.raw() for buffer in buffers)]
    sizes = [part.nbytes for part in parts]
    places, size = _places(sizes)
    block = memoryview(bytearray(size))
    for part, place in zip(parts, places, strict=True):
        block[place : place + part.nbytes] = part
    descriptor = os.memfd_create("torchtitan_ext")
    try:
        while block:
            block = block[os.write(descriptor, block) :]
        connection.send(sizes)
        send_handle(connection, descriptor, 0)  # the receiver's pid matters on Windows only
    finally:
        os.close(descriptor)


def receive_block(connection: Connection) -> Any:
    """The value that the process at the other end sent. Raises EOFError or OSError if that ended before."""
    sizes = connection.recv()
    places, size = _places(sizes)
    descriptor = recv_handle(connection)
    memory = memoryview(bytearray(size))
    try:
        done = 0
        while done < size:
            done += os.preadv(descriptor, [memory[done:]], done)
    finally:
        os.close(descriptor)
    parts = [memory[place : place + nbytes] for place, nbytes in zip(places, sizes, strict=True)]
    return pickle.loads(parts[0], buffers=parts[1:])


def _places(sizes: list[int]) -> tuple[list[int], int]:
    """Where parts of these sizes in bytes begin, and the size of all."""
    places, end = [], 0
    for nbytes in sizes:
        places.append(end)
        end += aligned(nbytes)
    return places, end
