"""A network namespace in which the way to a server on 127.0.0.1 is as slow as a link.

Only packets from and to the port of the server are held back, each way on its own: what the parts of the server send to
each other, and the collectives of the ranks, are not. Takes root, and ``ip`` and ``tc`` of iproute2.
"""

import ctypes
import os
import subprocess

_CLONE_NEWNET = 0x40000000
# What may pass at once: 2 ms of a link of 1 Gbit/s. Packets of the loopback interface have 64 KiB.
_BURST = "256kb"


def enter_namespace() -> None:
    """Puts this thread, and all processes that it starts from now on, into an empty network with a loopback interface.

    Raises:
        OSError: This process may not.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), f"no network namespace: {os.strerror(ctypes.get_errno())}")
    _run("ip link set lo up")


def limit_all(megabits: int) -> None:
    """Limits all that goes from 127.0.0.1 to it: what all processes of the namespace send, together."""
    rate = f"{megabits}mbit"
    _run("tc qdisc add dev lo root handle 1: htb default 1")
    _run(f"tc class add dev lo parent 1: classid 1:1 htb rate {rate} ceil {rate} burst {_BURST} cburst {_BURST}")


def limit_port(port: int, megabits: int) -> None:
    """Limits what goes to a port of 127.0.0.1, and what comes from it, in place of an earlier limit."""
    subprocess.run(["tc", "qdisc", "del", "dev", "lo", "root"], stderr=subprocess.DEVNULL, check=False)
    _run("tc qdisc add dev lo root handle 1: htb default 0")
    for number, side in enumerate(("dport", "sport"), start=1):
        rate = f"{megabits}mbit"
        _run(
            f"tc class add dev lo parent 1: classid 1:{number} htb rate {rate} ceil {rate} "
            f"burst {_BURST} cburst {_BURST} quantum 65536"
        )
        _run(f"tc filter add dev lo parent 1: protocol ip u32 match ip {side} {port} 0xffff flowid 1:{number}")


def _run(command: str) -> None:
    subprocess.run(command.split(), check=True)
