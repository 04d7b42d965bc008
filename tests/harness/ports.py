"""Ports for servers that must be told theirs before they start. Who can hosts a store on port 0 instead."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def reserved_port() -> Iterator[int]:
    """A port of 127.0.0.1 that nobody is given by chance within the block.

    It is bound here, and nobody listens on it. The kernel gives it to no socket that asks for any port, and lets a
    server bind it that sets SO_REUSEADDR, as stores and launchers do.
    """
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]
