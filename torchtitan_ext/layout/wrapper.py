"""Wrapper subclasses: tensors that consist of others, such as quantised values and their scales.

Stock DCP saves such a tensor as one value, cuts it by the subclass's own slices and fills it by its ``copy_``. So do
we: nothing here knows what the parts mean. Whether a subclass can do all that is tried before anything is written, on
copies without memory.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable
from typing import Any

import torch

from torchtitan_ext.errors import first_line
from torchtitan_ext.layout.dtensor import box_of, is_wrapper, map_parts
from torchtitan_ext.layout.layout import Box


def parts_of(wrapper: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors that a wrapper consists of, by the names of its attributes."""
    return {name: getattr(wrapper, name) for name in wrapper.__tensor_flatten__()[0]}  # type: ignore[attr-defined]


def why_not_whole(wrapper: torch.Tensor, known: dict[Any, str | None]) -> str | None:
    """Why stock DCP could not load a wrapper back that it saved as one value, or ``None`` if it can.

    Args:
        known: Answers so far, by class, names of parts and context.
    """
    names, context = wrapper.__tensor_flatten__()  # type: ignore[attr-defined]
    alike = (type(wrapper), tuple(names), repr(context))
    if alike not in known:
        known[alike] = _why_no_round_trip(wrapper)
    return known[alike]


def why_not_cut(local: torch.Tensor, boxes: Iterable[Box], *, is_written: bool) -> str | None:
    """The first reason why one of these boxes cannot be read, or written to, by the subclass's slices."""
    for offsets, sizes in boxes:
        box = box_of(local, offsets, sizes)
        if isinstance(box, str):
            return box
        if is_written and not _lies_in(box, local):
            return (
                f"a slice of its {type(local).__name__} is a copy, so that nothing can be written through it; "
                "load into a tensor of the saved layout, or one without the subclass"
            )
    return None


def why_not_materialized(wrapper: torch.Tensor) -> str | None:
    """Why a wrapper on the meta device cannot be given memory, or ``None`` where it can."""
    try:
        made = torch.empty_like(wrapper)
    except Exception as error:  # whatever the subclass raises
        reason = f"{type(error).__name__}: {first_line(error)}"
    else:
        if type(made) is type(wrapper) and made.shape == wrapper.shape:
            return None
        reason = f"empty_like of it is a {type(made).__name__}"
    return f"is a {type(wrapper).__name__} on the meta device ({reason}); give it memory before the load"


def dense_values(local: torch.Tensor) -> torch.Tensor:
    """The values of a wrapper, as its ``copy_`` writes them into a new plain tensor; any other tensor itself.

    Shards of plain tensors can be joined wherever they are cut.
    """
    if not is_wrapper(local):
        return local
    dense = torch.empty(local.shape, dtype=local.dtype, device=local.device)
    with torch.no_grad():
        dense.copy_(local)
    return dense


def without_slack(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, copied where it, or a part of it, lies in larger memory, all of which would be written with it."""
    if not _has_slack(tensor):
        return tensor
    return map_parts(tensor, without_slack) if is_wrapper(tensor) else tensor.clone()


def _has_slack(tensor: torch.Tensor) -> bool:
    if is_wrapper(tensor):
        return any(map(_has_slack, parts_of(tensor).values()))
    is_plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided
    return is_plain and tensor.untyped_storage().size() != tensor.nbytes


def _why_no_round_trip(wrapper: torch.Tensor) -> str | None:
    name = f"{type(wrapper).__module__}.{type(wrapper).__qualname__}"
    if wrapper.is_nested:
        return f"is a {name}, which has no one shape"
    stream = io.BytesIO()
    try:
        empty = _on_meta(wrapper).detach()
        torch.save(empty, stream)
        stream.seek(0)
        loaded = torch.load(stream, weights_only=True)
        with torch.no_grad():
            empty.copy_(loaded)
    except pickle.UnpicklingError:
        return f"consists of a {name}, which no load reads; allow it with torch.serialization.add_safe_globals"
    except Exception as error:  # whatever the subclass raises
        return (
            f"consists of a {name}, which cannot be saved, read and copied "
            f"({type(error).__name__}: {first_line(error)}); convert it to a plain tensor"
        )
    if type(empty) is not type(wrapper) or type(loaded) is not type(wrapper):
        return f"consists of a {name}, which loses its class on the way; convert it to a plain tensor"
    return None


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    if is_wrapper(tensor):
        return map_parts(tensor, _on_meta)
    return torch.empty_like(tensor, device="meta", requires_grad=False)


def _lies_in(box: torch.Tensor, whole: torch.Tensor) -> bool:
    """Whether writes to a slice reach the tensor; parts that are not cut may be copies."""
    if not is_wrapper(whole):
        return box.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr() or box.numel() == 0
    of_whole = parts_of(whole)
    return all(
        part.shape == of_whole[name].shape or _lies_in(part, of_whole[name]) for name, part in parts_of(box).items()
    )
