"""Files of ``torch.save`` as targets of ``convert``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from torchtitan_ext.dcp_private import unflatten_state_dict
from torchtitan_ext.offline.selection import SelectedKeys
from torchtitan_ext.storage.formats.torch_files import empty_tensors, write_without_data


def lay_out_torch(keys: SelectedKeys, path: Path, *, weights_only: bool) -> dict[str, int]:
    """Makes the file with its values, without the data of tensors. Returns at which byte each tensor begins."""
    forms = {key: (getattr(torch, entry.dtype), entry.shape) for key, entry in keys.tensors.items()}
    leaves: dict[str, Any] = dict(empty_tensors(forms))
    leaves |= {key: keys.source.read_value(keys.fqns[key]) for key in keys.values}
    ordered = {key: leaves[key] for key in keys.fqns}
    state = unflatten_state_dict(ordered, {key: keys.paths[key] for key in ordered})
    records = write_without_data(state, path, weights_only=weights_only)
    return {key: records[key].offset for key in keys.tensors}
