"""What the fault proxy does to requests, to which ones, and what it logs of them."""

import re
from collections.abc import Container
from dataclasses import dataclass
from typing import Literal

Kind = Literal[
    "pass",
    "cut_before",
    "cut_request",
    "cut_answer",
    "corrupt_request",
    "corrupt_answer",
    "answer",
    "lose_answer",
    "late",
]


@dataclass(frozen=True)
class Fault:
    """What happens to a request.

    Attributes:
        kind: "pass": nothing.
            "cut_before": the connection ends before anything is forwarded.
            "cut_request": the server gets ``num_bytes`` of the request's body, then both connections end.
            "cut_answer": the client gets ``num_bytes`` of the answer's body, then its connection ends.
            "corrupt_request", "corrupt_answer": the byte of the body at ``num_bytes`` arrives with one bit changed.
            Bodies that are not longer than ``num_bytes`` pass as they are.
            "answer": the proxy answers ``status`` with an error of S3 as body, and forwards nothing.
            "lose_answer": the server has answered when the client's connection ends.
            "late": the client's connection ends when its request is complete; the request is forwarded when
            ``FaultProxy.wait_until_idle`` releases it.
        retry_after_seconds: The header ``Retry-After`` of an "answer".
        cut: How a client's connection ends. "close": in order, so a client that waits for its answer reads the end of
            the stream. "reset": with RST, as when a host or a load balancer has gone.
    """

    kind: Kind
    num_bytes: int = 0
    status: int = 500
    retry_after_seconds: int | None = None
    cut: Literal["close", "reset"] = "close"


@dataclass
class Rule:
    """Which requests meet a fault; made by ``FaultProxy.add``, which has the arguments' meaning.

    Attributes:
        num_matches: How many requests were such ones.
        num_fired: How many of them met the fault.
    """

    fault: Fault
    method: str | None
    path: re.Pattern[str]
    header: str | None
    matches: Container[int] | None
    probability: float
    num_matches: int = 0
    num_fired: int = 0


@dataclass(frozen=True)
class Exchange:
    """One request. ``status`` is what the server or the proxy answered; ``None``: nobody did."""

    method: str
    path: str
    status: int | None
    fault: Kind | None
