"""DeepSpeed's universal checkpoints: a folder for each parameter, beside the model states of the ranks that saved.

    <tag>/zero/<parameter>/fp32.pt, exp_avg.pt, exp_avg_sq.pt, step.pt    whole, in its shape or flat
    <tag>/zero/optimizer_state.pt                                         options of the optimizer
    <tag>/*mp_rank_00_model_states.pt                                     as in ``deepspeed``

Written by https://github.com/deepspeedai/DeepSpeed/blob/master/deepspeed/checkpoint/ds_to_universal.py
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from torchtitan_ext.errors import DamagedCheckpointError, Problem, refusal
from torchtitan_ext.layout.layout import num_elements
from torchtitan_ext.offline.foreign.archives import Archive, ForeignFiles, open_archives
from torchtitan_ext.offline.foreign.deepspeed import Chunks, add_model, add_options

_OPTIONS = "zero/optimizer_state.pt"


def read(directory: Path, *, weights_only: bool) -> ForeignFiles:
    """The checkpoint in the directory of a tag. Raises what ``deepspeed.read`` does."""
    models = sorted(path.name for path in directory.glob("*mp_rank_00_model_states.pt"))
    parts = sorted(str(path.relative_to(directory)) for path in directory.glob("zero/*/*.pt"))
    archives = open_archives(directory, [*models, _OPTIONS, *parts], weights_only=weights_only)
    try:
        return _files_of(directory, [archives[name] for name in models], archives)
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        what = f"its files are not what ds_to_universal.py writes ({type(error).__name__}: {error})"
        raise DamagedCheckpointError(f"{directory}: {what}") from None


def _files_of(directory: Path, models: list[Archive], archives: Mapping[str, Archive]) -> ForeignFiles:
    files, chunks, problems = ForeignFiles(directory), Chunks(), []
    shapes: dict[str, tuple[int, ...]] = {}
    for number, group in enumerate(models[0].value["param_shapes"]):
        add_options(files, archives[_OPTIONS].value["param_groups"], number, group)
        shapes |= {name: tuple(shape) for name, shape in group.items()}
    held: dict[str, dict[str, Archive]] = {name: {} for name in shapes}
    for file in map(Path, archives):
        if len(file.parts) == 3:
            held.setdefault(file.parent.name, {})[file.stem] = archives[str(file)]
    is_sliced = any(directory.glob("*mp_rank_01_model_states.pt"))
    expected = set().union(*held.values()) | {"fp32"}
    for name, of_param in held.items():
        is_trained = name in shapes or set(of_param) != {"fp32"}
        if not is_trained and not is_sliced:
            continue  # newer versions repeat buffers, frozen and tied parameters here, which the model states have
        missing = sorted((expected if is_trained else {"fp32"}) - set(of_param))
        what = "is missing; copy it, or convert anew"
        problems += [Problem("broken_checkpoint", f"zero/{name}/{part}.pt", what) for part in missing]
        for part, archive in of_param.items():
            value = archive.value["param"] if isinstance(archive.value, Mapping) else archive.value
            path = ("model", name) if part == "fp32" else ("optimizer", f"state.{name}.{part}")
            shaped = _shaped(value, shapes.get(name))
            if not isinstance(value, torch.Tensor):
                files.add_value(path, value)
            elif shaped is None:
                files.add_problem(
                    path, f"is flat, of {value.numel()} elements: its shape cannot be known; leave it out"
                )
            elif part == "fp32":
                chunks[name] = [((0,) * shaped.dim(), archive.record(shaped))]
            else:
                files.add_tensor(path, [((0,) * shaped.dim(), archive.record(shaped))])
    if problems:
        raise refusal("open", problems)
    add_model(files, models, chunks, is_sliced=is_sliced)
    return files.close()


def _shaped(value: Any, shape: tuple[int, ...] | None) -> torch.Tensor | None:
    """A flat tensor in the shape of its parameter; ``None`` if it has another number of elements.

    Args:
        shape: That on a rank: tensor parallel ranks have a part of it each, and the tensor is not flat then.
    """
    if not isinstance(value, torch.Tensor) or value.dim() != 1 or shape is None or len(shape) == 1:
        return value
    return value.view(shape) if num_elements(shape) == value.numel() else None
