"""What tests of remedies have in common: an act is refused in some words; after the remedy the state is whole."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import torchtitan_ext as tte
from torchtitan_ext.state.value_digest import digest_value

WEIGHTS: dict[str, Any] = {"w": torch.arange(6.0).view(2, 3) + 0.001, "b": torch.ones(2)}


def refused(text: str, act: Callable[[], Any]) -> str:
    """What an act is refused with, in which these words are."""
    with pytest.raises(Exception, match=re.escape(text)) as caught:
        act()
    return str(caught.value)


def zeros(state: dict[str, Any]) -> dict[str, Any]:
    return {key: torch.zeros_like(value) for key, value in state.items()}


def is_saved(path: Path | str, truth: dict[str, Any], **options: Any) -> bool:
    """Whether a load gets all of it, bit for bit."""
    tte.load(target := zeros(truth), path, **options)
    return digest_value(target) == digest_value(truth)
