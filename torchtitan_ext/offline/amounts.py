"""Reads and writes amounts of bytes as people do: ``1.2 GB``, ``2GB/s``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from torchtitan_ext.errors import WrongValueError

_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")
_AMOUNT = re.compile(r"(\d+(?:\.\d*)?)\s*([KMGTP]?)(i?)B?(?:/s)?", re.IGNORECASE)


@dataclass(frozen=True)
class Bandwidth:
    """How fast storage is: for one rank, and for all ranks together. ``None`` where that is not known."""

    bytes_per_second: float | None = None
    shared_bytes_per_second: float | None = None

    def seconds(self, num_bytes: Sequence[int]) -> float | None:
        """The time until all ranks have moved their bytes; ``None`` if no bandwidth is known."""
        times = []
        if self.bytes_per_second is not None:
            times.append(max(num_bytes, default=0) / self.bytes_per_second)
        if self.shared_bytes_per_second is not None:
            times.append(sum(num_bytes) / self.shared_bytes_per_second)
        return max(times, default=None)


def parse_amount(text: str) -> float:
    """``2GB/s`` or ``64MiB`` as a number of bytes. Raises WrongValueError for anything else."""
    match = _AMOUNT.fullmatch(text.strip())
    if match is None or float(match[1]) == 0:
        raise WrongValueError(f"got {text!r}, expected bytes such as 2GB or 64MiB")
    power = ("", "K", "M", "G", "T", "P").index(match[2].upper())
    return float(float(match[1]) * (1024 if match[3] else 1000) ** power)


def parse_rate(text: str | None) -> float | None:
    """``2GB/s`` or ``64MiB`` as bytes per second. Raises WrongValueError for anything else, also a number alone."""
    if text is None:
        return None
    num_bytes = parse_amount(text)
    if re.search("[a-z]", text.replace("/s", ""), re.IGNORECASE) is None:
        raise WrongValueError(f"got {text!r}, expected a number with its unit, such as {text.replace('/s', '')}GB/s")
    return num_bytes


def text_of_bytes(num_bytes: float) -> str:
    """``1.2 GB``: two or three digits, powers of 1,000."""
    for unit in _UNITS:
        if num_bytes < 999.5 or unit == _UNITS[-1]:
            break
        num_bytes /= 1000
    return f"{num_bytes:.0f} {unit}" if unit == "B" or num_bytes >= 99.5 else f"{num_bytes:.2g} {unit}"
