"""Reads and writes amounts of bytes as people do: ``1.2 GB``, ``64MiB``."""

from __future__ import annotations

import re

from torchtitan_ext.errors import WrongValueError

_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")
_AMOUNT = re.compile(r"(\d+(?:\.\d*)?)\s*([KMGTP]?)(i?)B?", re.IGNORECASE)


def parse_amount(text: str) -> float:
    """``2GB`` or ``64MiB`` as a number of bytes. Raises WrongValueError for anything else."""
    match = _AMOUNT.fullmatch(text.strip())
    if match is None or float(match[1]) == 0:
        raise WrongValueError(f"got {text!r}, expected bytes such as 2GB or 64MiB")
    power = ("", "K", "M", "G", "T", "P").index(match[2].upper())
    return float(float(match[1]) * (1024 if match[3] else 1000) ** power)


def text_of_bytes(num_bytes: float) -> str:
    """``1.2 GB``: two or three digits, powers of 1,000."""
    for unit in _UNITS:
        if num_bytes < 999.5 or unit == _UNITS[-1]:
            break
        num_bytes /= 1000
    return f"{num_bytes:.0f} {unit}" if unit == "B" or num_bytes >= 99.5 else f"{num_bytes:.2g} {unit}"
